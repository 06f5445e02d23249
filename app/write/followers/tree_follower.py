"""Appends chained links to the tenants' Merkle trees, and signs and keeps a checkpoint of each new size.

For many tenants at once::

    1. lock the stored trees; read the links beyond them; append them; sign a checkpoint of each new size
    2. write the changed tiles, the sizes, roots and checkpoints; commit: one transaction for all
    3. store the checkpoints beside the WAL: one line of the journal, one fsync      (app.write.followers.checkpoints)

Invariants, per tenant::

    chained_seq >= tree_size
    checkpoint beside the WAL <= tree_size

The memory between turns is bounded over all tenants. All links are dropped once there are more than RECENT_LINKS_MAX.
Beyond TREES_CACHED_MAX the least recently used trees are evicted. Both are read back.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field

from app.runtime.postgres import DATABASE_FAULTS
from app.runtime.state.node import Node
from app.store import Connection
from app.store import notary as store
from app.store.notary import GrownTree, LinkRow
from app.trust.key_in_use import KeyInUse
from app.write.followers.checkpoints import CheckpointJournal
from app.write.followers.signed_chain import (
    OwnEntries,
    checked_links,
    extended_tree,
    not_stored,
    rebuild_tree,
    unforeseen,
)
from ledger import merkle
from ledger.errors import (
    LedgerError,
    SignatureError,
    SigningUnavailableError,
    StoredTreeError,
    StoredTreeLockedError,
)
from ledger.job_index.builder import OpenBlock
from ledger.merkle import tiles
from signing import checkpoint
from signing.checkpoint import Checkpoint
from signing.keys import PublicKey
from signing.note import is_signed_by

RECENT_LINKS_MAX = 200_000
"""Links of all tenants kept in memory, from the commit on this node until they are signed; others are read back."""
TREES_CACHED_MAX = 1000
"""Tenants whose tree edge is kept in memory."""


@dataclass(slots=True, eq=False)
class IndexedTenant:
    """The index of jobs of entries ``begin + 1..size`` of one tenant."""

    roots: dict[tuple[int, int], bytes] = field(default_factory=dict)
    """Roots of the runs over its full blocks, by level and first leaf index."""
    open: OpenBlock = field(default_factory=lambda: OpenBlock(0))
    """The entries behind them."""
    begin: int = 0
    """Leaf index of its first entry; above 0 if entries left before there was an index."""

    @property
    def size(self) -> int:
        """The last entry."""
        return self.open.end


@dataclass(slots=True, eq=False)
class FollowedTenant:
    """State of one tenant between its turns."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    head_seq: int = 0
    """Newest entry that this node chained, or found chained when it started."""
    recent: list[LinkRow] = field(default_factory=list)
    """Newest links that this node chained, without a gap."""
    tree: tiles.TileTree | None = None
    roots: dict[int, bytes] = field(default_factory=dict)
    """Roots of ``tree`` at sizes at which a snapshot may end."""
    rooted_from_seq: int = 1
    """From this seq on the leaves of ``tree`` are links that this node chained."""
    signed_seq: int | None = None
    signed_digest: str | None = None
    """Digest of the newest snapshot."""
    is_kept: bool = True
    """False if the checkpoint beside the WAL is missing or older than the one in Postgres, and must be signed again."""
    is_tree_damaged: bool = False
    """Whether the stored tree is known to differ from the chain and must be rebuilt."""
    unsigned_since_s: float | None = None
    job_index: IndexedTenant | None = None
    """The index of jobs, up to the newest snapshot or behind it."""

    def links_from(self, from_seq: int, limit: int) -> list[LinkRow]:
        """Links from ``from_seq`` on as this node chained them; empty if they are no longer in memory."""
        if not self.recent or not self.recent[0].seq <= from_seq <= self.recent[-1].seq:
            return []
        start = from_seq - self.recent[0].seq
        return self.recent[start : start + limit]

    def unsigned_count(self) -> int:
        """Entries of ``tree``, which is in memory, that no snapshot covers."""
        assert self.tree is not None
        return self.tree.size - (self.signed_seq or 0)


class TenantMemory:
    """The tenants that the notary follows; bounds the links and trees in memory."""

    def __init__(self) -> None:
        self.tenants: defaultdict[str, FollowedTenant] = defaultdict(FollowedTenant)
        self._cached: OrderedDict[str, None] = OrderedDict()
        """Tenants whose tree is in memory, the most recently used last."""
        self._recent_count = 0

    def remember(self, tenant: FollowedTenant, rows: list[LinkRow]) -> None:
        """Keep ``rows`` for the next turn. Beyond the bound all links are dropped and read back later."""
        if tenant.recent and rows[0].seq != tenant.recent[-1].seq + 1:
            self._forget(tenant)
        self._recent_count += len(rows)
        tenant.recent += rows
        if self._recent_count > RECENT_LINKS_MAX:
            for other in self.tenants.values():
                self._forget(other)

    def forget_signed(self, tenant: FollowedTenant) -> None:
        """Drop links that are in the tree and in a snapshot."""
        done_seq = min(tenant.tree.size if tenant.tree is not None else 0, tenant.signed_seq or 0)
        if tenant.recent and tenant.recent[0].seq <= done_seq:
            kept = tenant.recent[done_seq - tenant.recent[0].seq + 1 :]
            self._recent_count -= len(tenant.recent) - len(kept)
            tenant.recent = kept
        tenant.roots = {size: root for size, root in tenant.roots.items() if size > done_seq}

    def trim_trees(self, used: Iterable[str]) -> None:
        """Evict the least recently used trees beyond the bound."""
        for name in used:
            self._cached[name] = None
            self._cached.move_to_end(name)
        surplus = len(self._cached) - TREES_CACHED_MAX
        for name in [name for name in self._cached if not self.tenants[name].lock.locked()][: max(0, surplus)]:
            del self._cached[name]
            self.tenants[name].tree = self.tenants[name].job_index = None

    def _forget(self, tenant: FollowedTenant) -> None:
        self._recent_count -= len(tenant.recent)
        tenant.recent = []


LINKS_PER_TURN = 10_000
"""Links appended to one tree in one transaction, as this node chained them."""
ENTRIES_PER_TURN = 1000
"""Entries of one tenant read back, checked and appended in one transaction."""


@dataclass(kw_only=True, eq=False)
class TreeFollower:
    """Advances trees and checkpoints for the notary."""

    node: Node
    memory: TenantMemory
    checkpoints: CheckpointJournal
    own: OwnEntries
    keys: KeyInUse
    origin: Callable[[str], str]
    batch_size: int
    checkpoint_fault: str | None = field(default=None, init=False)
    """Why the last checkpoints could not be stored beside the WAL, None if they could."""

    async def advance(
        self, connection: Connection, names: Sequence[str], *, waits: bool = False
    ) -> dict[str, LedgerError]:
        """Append one turn of links to the tree of each tenant and sign its checkpoint; all in one transaction.

        The caller holds the tenants' locks. A fault of one tenant does not stop the others: returns the faults. Without
        ``waits`` a tree that another session keeps locked, such as a node that rebuilds it, is a fault.
        """
        grown: dict[str, tuple[tiles.TileTree, Checkpoint | None]] = {}
        async with connection.transaction():
            if new := [name for name in names if self.memory.tenants[name].tree is None]:
                await store.begin_trees(connection, new)
            locked = await store.lock_trees(connection, names, waits=waits)
            faults = await self._not_had(connection, set(names).difference(tree.tenant_id for tree in locked))
            for stored in locked:
                tenant = self.memory.tenants[stored.tenant_id]
                try:
                    grown[stored.tenant_id] = await self._append_turn(connection, stored, tenant)
                except DATABASE_FAULTS:
                    raise
                except Exception as error:
                    name = stored.tenant_id
                    faults[name] = error if isinstance(error, LedgerError) else unforeseen(name, error)
            heads = {name: head for name, (_, head) in grown.items() if head is not None}
            notes = dict(zip(heads, await self.keys.sign_checkpoints([*heads.values()]), strict=True))
            for name in await store.store_trees(
                connection, [GrownTree(name, grown[name][0], note) for name, note in notes.items()]
            ):
                faults[name] = not_stored(name, "its Merkle tree")
                del grown[name], notes[name]
        for name in faults:
            self.memory.tenants[name].tree = None
        for name, (tree, _) in grown.items():
            tree.forget_changed()
            self.memory.tenants[name].tree = tree
        await self._keep(notes)
        self.memory.trim_trees(grown)
        return faults

    async def rebuild(self, connection: Connection, tenant_id: str) -> None:
        """Rebuild the tenant's stored tree from its chain; the caller holds the tenant's lock.

        Raises:
            LedgerError: the chain is broken or differs from the checkpoint beside the WAL; or another session keeps the
                tree locked.
        """
        # Committed immediately, so that other nodes can pass over it meanwhile.
        await store.begin_trees(connection, (tenant_id,))
        async with connection.transaction():
            if not await store.lock_trees(connection, (tenant_id,), waits=False):
                raise (await self._not_had(connection, {tenant_id}))[tenant_id]
            await rebuild_tree(connection, tenant_id, self.checkpoints.load(tenant_id))

    def is_kept(self, tenant_id: str, tree_size: int) -> bool:
        """Whether the checkpoint beside the WAL has that size and the signatures of the current keys."""
        kept = self.checkpoints.load(tenant_id)
        return kept is not None and self._is_ours(tenant_id, kept) and self.checkpoints.size(tenant_id) >= tree_size

    def _is_ours(self, tenant_id: str, note: str) -> bool:
        """Whether the keys that this node signs checkpoints with now are those that signed the note."""
        origin = self.origin(tenant_id)
        keys = (signer.public_key for signer in self.keys.node_keys.checkpoint_signers)
        return all(is_signed_by_any(note, origin, (key,)) for key in keys)

    async def keep_followed(self, connection: Connection, notes: Mapping[str, str]) -> dict[str, LedgerError]:
        """Store these checkpoints of other nodes beside the WAL. A trusted key signed each, and each was proved to
        extend the stored one. The covered entries in this node's name must be its own.

        The caller holds the tenants' locks. Returns the faults of the tenants whose checkpoint is not stored.
        """
        faults: dict[str, LedgerError] = {}
        sizes = {name: checkpoint.read(text).size for name, text in notes.items()}
        for name, size in sizes.items():
            try:
                await self._check_followed(connection, name, size)
            except LedgerError as error:
                faults[name] = error
        if vouched := {name: text for name, text in notes.items() if name not in faults}:
            await asyncio.to_thread(self.checkpoints.store, vouched)
        for name in vouched:
            self.own.forget(name, sizes[name])
        return faults

    async def _not_had(self, connection: Connection, names: Set[str]) -> dict[str, LedgerError]:
        """Why each of these trees could not be locked."""
        there = await store.trees_there(connection, sorted(names)) if names else set()
        return {
            name: StoredTreeLockedError(
                f"another session keeps the row of tenant {name} in scheduler.merkle_head locked (see pg_locks)"
            )
            if name in there
            else StoredTreeError(f"the stored tree of tenant {name} is gone")
            for name in names
        }

    async def _append_turn(
        self, connection: Connection, stored: store.LockedTree, tenant: FollowedTenant
    ) -> tuple[tiles.TileTree, Checkpoint | None]:
        """One tenant's tree after one turn of links, with the checkpoint to sign if one is due."""
        name, tree = stored.tenant_id, tenant.tree
        if tree is None or tree.size != stored.tree_size:
            tree = await extended_tree(connection, stored, self.checkpoints.load(name))
            await self._check_followed(connection, name, tree.size)
            tenant.roots, tenant.rooted_from_seq = {}, tree.size + 1
        links = await self._links_to_follow(connection, name, tenant, tree.size)
        self._append(tenant, tree, links)
        head = Checkpoint(self.origin(name), tree.size, tree.root())
        is_new = links or not tenant.is_kept or not (stored.checkpoint or "").startswith(checkpoint.body(head))
        return tree, head if tree.size and is_new else None

    async def _check_followed(self, connection: Connection, name: str, tree_size: int) -> None:
        """Check that the entries in this node's name between its stored checkpoint and ``tree_size`` are its own.

        Raises:
            ChainBrokenError: one is not.
        """
        seq = kept_size = self.checkpoints.size(name)
        while rows := await store.read_entries_of(
            connection, name, self.node.node_id, seq + 1, tree_size, ENTRIES_PER_TURN
        ):
            if await self.own.vouched(name, rows, is_kept=kept_size > 0) < len(rows):
                raise SigningUnavailableError(f"tenant {name} grows while it is looked at; it is signed soon")
            seq = rows[-1][0]

    async def _links_to_follow(
        self, connection: Connection, tenant_id: str, tenant: FollowedTenant, tree_size: int
    ) -> list[LinkRow]:
        """The links after ``tree_size``, from memory; else from Postgres, with every row checked."""
        if not (links := tenant.links_from(tree_size + 1, LINKS_PER_TURN)):
            prev_link = await store.read_link(connection, tenant_id, tree_size)
            rows = await store.read_entries(connection, tenant_id, tree_size + 1, ENTRIES_PER_TURN)
            links = checked_links(tenant_id, tree_size, prev_link, rows, tenant.recent)
            is_kept = self.checkpoints.load(tenant_id) is not None
            links = links[: await self.own.vouched(tenant_id, rows, is_kept=is_kept)]
        return links

    def _append(self, tenant: FollowedTenant, tree: tiles.TileTree, links: Sequence[LinkRow]) -> None:
        """Append ``links``; keep the roots for the snapshots, of links that this node chained."""
        leaves = merkle.leaf_hashes([bytes.fromhex(link.chain_link) for link in links])
        if links and not tenant.links_from(links[0].seq, 1):
            tree.append_leaf_hashes(leaves)
            tenant.roots, tenant.rooted_from_seq = {}, tree.size + 1
            return
        to_boundary = self.batch_size - (tree.size - (tenant.signed_seq or 0)) % self.batch_size
        at = 0
        for end in (*range(to_boundary, len(leaves), self.batch_size), len(leaves)):
            tree.append_leaf_hashes(leaves[at:end])
            tenant.roots[tree.size] = tree.root()
            at = end

    async def _keep(self, notes: Mapping[str, str]) -> None:
        """Store these checkpoints beside the WAL; each is committed by now. If that fails they are signed again."""
        if not notes:
            return
        try:
            await asyncio.to_thread(self.checkpoints.store, notes)
        except OSError as error:
            self.checkpoint_fault = f"checkpoints cannot be written beside the WAL: {error}"
            for name in notes:
                self.memory.tenants[name].is_kept = False
            raise SigningUnavailableError(self.checkpoint_fault) from error
        self.checkpoint_fault = None
        for name, note in notes.items():
            tenant = self.memory.tenants[name]
            self.own.forget(name, checkpoint.read(note).size)
            tenant.is_kept = (
                tenant.tree is not None and tenant.tree.size >= tenant.head_seq and self._is_ours(name, note)
            )


def is_signed_by_any(note: str, origin: str, keys: Sequence[PublicKey]) -> bool:
    """Whether one of these keys signed the note of this log; False for a malformed note."""
    with suppress(SignatureError):
        return any(is_signed_by(note, origin, key) for key in keys)
    return False
