"""What the notary knows of each tenant between its turns, within bounds over all of them.

What is forgotten is read back from Postgres: all links once they are more than RECENT_LINKS_MAX, and the trees that
were used longest ago beyond TREES_CACHED_MAX.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

from app.store.notary import LinkRow
from ledger.merkle import tiles

RECENT_LINKS_MAX = 200_000
"""Links kept in memory, over all tenants, from being chained here until they are signed; others are read back."""
TREES_CACHED_MAX = 1000
"""Tenants whose tree edge is kept in memory."""


@dataclass(slots=True, eq=False)
class FollowedTenant:
    """What the notary knows of one tenant between its turns."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    head_seq: int = 0
    """Newest entry that this node chained, or found chained when it started."""
    recent: list[LinkRow] = field(default_factory=list)
    """Newest links that this node chained, without a gap."""
    tree: tiles.TileTree | None = None
    leaves: list[bytes] = field(default_factory=list)
    """Leaf hashes of remembered links as they went into ``tree``, without a gap, up to its end."""
    first_leaf_seq: int = 1
    roots: dict[int, bytes] = field(default_factory=dict)
    """Roots that ``tree`` had where a snapshot may end, by size."""
    signed_seq: int | None = None
    signed_digest: str | None = None
    """SHA-256 of the newest snapshot's DSSE payload."""
    unkept: str | None = None
    """The newest checkpoint, as long as it is not beside the WAL."""
    is_kept: bool = True
    """False when an earlier process ended between a checkpoint in Postgres and the one beside the WAL."""
    is_tree_damaged: bool = False
    """Whether the stored tree is known not to be that of the chain, and is to be made again."""
    unsigned_since_s: float | None = None

    def links_from(self, from_seq: int, limit: int) -> list[LinkRow]:
        """Links from ``from_seq`` on as this node chained them, none when it does not know any more."""
        if not self.recent or not self.recent[0].seq <= from_seq <= self.recent[-1].seq:
            return []
        start = from_seq - self.recent[0].seq
        return self.recent[start : start + limit]

    def leaves_of(self, from_seq: int, to_seq: int) -> list[bytes]:
        """Leaf hashes of these entries, as far as they are remembered."""
        if from_seq < self.first_leaf_seq:
            return []
        return self.leaves[from_seq - self.first_leaf_seq : to_seq - self.first_leaf_seq + 1]

    def forget_leaves(self, upto_seq: int | None = None) -> None:
        """Drop leaf hashes and roots up to ``upto_seq``, or all."""
        if upto_seq is None:
            self.leaves, self.roots = [], {}
        elif upto_seq >= self.first_leaf_seq:
            self.leaves = self.leaves[upto_seq - self.first_leaf_seq + 1 :]
            self.first_leaf_seq = upto_seq + 1
            self.roots = {size: root for size, root in self.roots.items() if size > upto_seq}


class TenantMemory:
    """The tenants that the notary follows, and how much of their links and trees is kept."""

    def __init__(self) -> None:
        self.tenants: dict[str, FollowedTenant] = {}
        self._cached: OrderedDict[str, None] = OrderedDict()
        """Tenants whose tree is kept in memory, the one used last at the end."""
        self._recent_count = 0

    def of(self, tenant_id: str) -> FollowedTenant:
        """What is known of the tenant, nothing yet if it is new."""
        tenant = self.tenants.get(tenant_id)
        if tenant is None:
            tenant = self.tenants[tenant_id] = FollowedTenant()
        return tenant

    def remember(self, tenant: FollowedTenant, rows: list[LinkRow]) -> None:
        """Keep ``rows`` for the next turn, unless that would be too much; then they are read back."""
        if tenant.recent and rows[0].seq != tenant.recent[-1].seq + 1:
            self._forget(tenant)
        self._recent_count += len(rows)
        tenant.recent += rows
        if self._recent_count > RECENT_LINKS_MAX:
            for other in self.tenants.values():
                self._forget(other)

    def forget_signed(self, tenant: FollowedTenant) -> None:
        """Drop kept links that are in the tree and in a snapshot."""
        done_seq = min(tenant.tree.size if tenant.tree is not None else 0, tenant.signed_seq or 0)
        if tenant.recent and tenant.recent[0].seq <= done_seq:
            kept = tenant.recent[done_seq - tenant.recent[0].seq + 1 :]
            self._recent_count -= len(tenant.recent) - len(kept)
            tenant.recent = kept
        tenant.forget_leaves(done_seq)

    def trim_trees(self, used: Iterable[str]) -> None:
        """Keep the trees that were used last."""
        for name in used:
            self._cached[name] = None
            self._cached.move_to_end(name)
        surplus = len(self._cached) - TREES_CACHED_MAX
        for name in [name for name in self._cached if not self.tenants[name].lock.locked()][: max(0, surplus)]:
            del self._cached[name]
            self.tenants[name].tree = None

    def _forget(self, tenant: FollowedTenant) -> None:
        self._recent_count -= len(tenant.recent)
        tenant.recent = []
        tenant.forget_leaves()
