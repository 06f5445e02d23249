"""Watches every chain of the ledger, of all nodes, so that no running node continues on a rolled-back database.

Each round reads all tenants, page by page, each page in one snapshot of the database::

    0. with the first page: the database has all that this node chained, signed or not   (write.chain.view)
    1. for each chain whose head, tree or last entry changed: the entry at this node's newest stored checkpoint is still
       the one that was signed
    2. a newer checkpoint of another node replaces the stored one beside the WAL, if a trusted key signed it and it is
       proved to extend the stored one                                       (notary, under the tenant's lock)

A chain that ends before its checkpoint, or that is consistent but differs from it, stops the node; the next start
refuses it, too (node.start.checks). Inconsistent rows are damage of one tenant: verification names them, and no node
signs them.

If a chain grows for UNFOLLOWED_AFTER_S without a newer checkpoint that can be stored, the log and ``/readyz`` report
it: this node would not notice the loss of entries above the stored checkpoint.

Cost: at most SHARE of one core, so a round over very many tenants takes longer. A page that takes a second or more
waits for the database; the rest after it is bounded, so that the node does not miss changes for long.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from app.runtime.logs import log
from app.runtime.state.found_breaks import FoundBreaks
from app.runtime.state.node import Node
from app.runtime.tasks import paced
from app.store import Connection
from app.store import chain_reads as store
from app.store.chain_reads import SeenChain
from app.store.node import positions
from app.store.notary import TileCoordinates, read_tiles_of
from app.store.reading import Pool, reading
from app.write.chain.view import refuse_older
from app.write.followers.checkpoints import CheckpointJournal
from app.write.followers.notary import Notary
from app.write.followers.signed_chain import is_in_tree, leaf_tiles, root_of_chain, tree_agrees
from ledger import merkle
from ledger.errors import DatabaseUnavailableError, DatabaseWentBackError, LedgerError, SignatureError
from ledger.merkle import tiles
from ledger.names import is_readable_tenant
from ledger.verification.entry_check import ENTRY_COLUMNS, EntryRow, first_break_in, holds_together
from ledger.verification.verdict import Break
from signing import checkpoint
from signing.checkpoint import Checkpoint, open_checkpoint
from signing.keys import Keyring

SHARE = 0.05
"""Largest share of time that the watch takes, including waits for the database."""
REST_MAX_S = 5.0
"""Longest rest after a page, however long it took."""
ROUND_INTERVAL_S = 1.0
"""Rest between two rounds: a ledger of one page is checked once a second."""
PAGE_TENANTS = 500
FOLLOW_INTERVAL_S = 5.0
"""Shortest time between two replacements of a tenant's checkpoint by one of another node: each costs an fsync."""
UNFOLLOWED_AFTER_S = 30.0
"""How long a chain may be longer than its newest valid checkpoint before that is reported. Time without an answer of
the database is not included: one check adds at most half of this."""
TENANTS_LOGGED_MAX = 10
"""Tenants that one line of the log names."""
ROOT_TIMEOUT_S = 3600.0
"""Longest that computing a root from a whole chain may take."""

_LINK, _PREVIOUS = map(ENTRY_COLUMNS.index, ("chain_link", "prev_chain_link"))
_WENT_BACK = (
    "the database was restored or failed over to an older copy, or history was rewritten. This node writes no more; "
    "bring the newer database back, or what is missing with tally restore"
)


@dataclass(slots=True, eq=False)
class _Watched:
    """State of one chain between two rounds."""

    anchor: Checkpoint | None = None
    """The newest checkpoint beside the WAL."""
    link: str | None = None
    """Link of the entry at the anchor's size, once proved to be the signed entry."""
    fingerprint: int | None = None
    """Hash of the chain's columns at the last check."""
    follow_at_s: float = 0.0
    """When a newer checkpoint of another node is next read."""
    fault: str | None = None
    """Why the last read checkpoint in the database was not taken over."""
    uncovered_s: float = 0.0
    """How long the chain has been longer than the checkpoint, in checked time."""
    checked_at_s: float = field(default_factory=time.monotonic)

    def move(self, anchor: Checkpoint) -> None:
        """Compare the chain with ``anchor`` from now on."""
        self.anchor, self.link, self.fingerprint = anchor, None, None
        self.fault, self.uncovered_s = None, 0.0

    @property
    def kept_size(self) -> int:
        """Size of the newest checkpoint beside the WAL."""
        return self.anchor.size if self.anchor is not None else 0


@dataclass(kw_only=True, eq=False)
class LedgerWatch:
    """The watch of one node; belongs to its event loop."""

    node: Node
    pool: Pool
    checkpoints: CheckpointJournal
    notary: Notary
    keyring: Callable[[], Awaitable[Keyring]]
    """Returns the keys of all nodes that may sign checkpoints now."""
    breaks: FoundBreaks
    on_failure: Callable[[LedgerError], None]
    on_signed: Callable[[Mapping[str, int]], None]
    """Called with the sizes of trees that changed, of all nodes of the ledger."""
    _watched: defaultdict[str, _Watched] = field(default_factory=lambda: defaultdict(_Watched), init=False)

    async def run(self) -> None:
        """Watch until cancelled or the node has failed."""
        for tenant_id, text in self.checkpoints.load_all().items():
            self._watched[tenant_id].move(checkpoint.read(text))
        while self.node.failure is None:
            try:
                await self._round()
            except DatabaseUnavailableError as error:
                log.debug("ledger_watch_delayed", error=str(error))
            except DatabaseWentBackError as error:
                self.on_failure(error)
            await asyncio.sleep(ROUND_INTERVAL_S)

    async def _round(self) -> None:
        """Check every chain once.

        Raises:
            DatabaseWentBackError: a chain is not the signed one, or lacks entries that this node chained.
            DatabaseUnavailableError: Postgres does not answer.
        """
        # Known chains are checked even without a checkpoint: this node may store one just after the check. Chains with
        # a checkpoint are checked even if never seen: they may have come and gone between two rounds.
        unseen = self._watched.keys() | self.checkpoints.load_all().keys()
        after: str | None = ""
        while after is not None:
            async with paced(SHARE, rest_max_s=REST_MAX_S):
                chained_lsn = self.node.chained.lsn
                async with reading(self.pool, snapshot=True) as connection:
                    if after == "":
                        refuse_older((await positions(connection)).get(self.node.node_id), self.node, chained_lsn)
                    page = await store.seen_chains(connection, after, PAGE_TENANTS)
                    after = page[-1].tenant_id if len(page) == PAGE_TENANTS else None
                    unseen.difference_update(chain.tenant_id for chain in page)
                    if after is None:
                        page += [SeenChain(tenant_id, None, None, None, None, None, None) for tenant_id in unseen]
                    # A quarantined tenant is not extended anyway.
                    chains = [
                        chain
                        for chain in page
                        if is_readable_tenant(chain.tenant_id) and chain.tenant_id not in self.node.damaged
                    ]
                    changed = self._changed(chains)
                    doubtful = await self._unproved(connection, changed)
                self.on_signed(
                    {
                        chain.tenant_id: chain.tree_size
                        for chain in chains
                        if chain.tenant_id in changed and type(chain.tree_size) is int
                    }
                )
                for tenant_id in doubtful:
                    await self._settle(tenant_id)
                # A chain may look unchanged though this node has stored a longer checkpoint: its new entries were lost
                # again between two rounds.
                longer = [
                    name
                    for name in [chain.tenant_id for chain in chains]
                    if self.checkpoints.size(name) > self._watched[name].kept_size
                ]
                self._take_own([*changed, *longer])
                await self._follow([chain for chain in chains if self._is_behind(chain)])
                self._report_unfollowed(chains)

    # --- 1. the entry that was signed -----------------------------------------------------------------

    def _changed(self, chains: Sequence[SeenChain]) -> list[str]:
        """The chains whose columns changed since the last check."""
        changed = []
        for chain in chains:
            watched, fingerprint = self._watched[chain.tenant_id], hash(chain[1:6])
            if fingerprint != watched.fingerprint:
                watched.fingerprint = fingerprint
                changed.append(chain.tenant_id)
        return changed

    async def _unproved(self, connection: Connection, changed: Sequence[str]) -> list[str]:
        """The ``changed`` chains whose signed entry is missing, or not proved by the stored tree."""
        kept = {name: self._watched[name].anchor for name in changed}
        if not (anchors := {name: anchor for name, anchor in kept.items() if anchor is not None and anchor.size}):
            return []
        links = await store.links_at(connection, {name: anchor.size for name, anchor in anchors.items()})
        known = {name: self._watched[name].link for name in anchors}
        unknown = {name: anchor for name, anchor in anchors.items() if known[name] is None}
        stored = await read_tiles_of(
            connection, [(name, at) for name, anchor in unknown.items() for at in leaf_tiles(anchor)]
        )
        proved = [name for name, anchor in unknown.items() if is_in_tree(links.get(name), anchor, stored.get(name, {}))]
        for name in proved:
            known[name] = self._watched[name].link = links[name]
        return [name for name in anchors if known[name] is None or known[name] != links.get(name)]

    def _take_own(self, changed: Sequence[str]) -> None:
        """Compare chains with the checkpoints that this node stored meanwhile, from the next round on: then the
        database is read after the checkpoint was stored."""
        for tenant_id in changed:
            kept, watched = self.checkpoints.load(tenant_id), self._watched[tenant_id]
            if kept is not None and (anchor := checkpoint.read(kept)) != watched.anchor:
                watched.move(anchor)

    async def _settle(self, tenant_id: str) -> None:
        """Find why a chain's signed entry was not proved: another chain, damaged rows, or a damaged tree.

        Raises:
            DatabaseWentBackError: the chain ends before the checkpoint, or is consistent and differs from it.
        """
        watched = self._watched[tenant_id]
        anchor = watched.anchor
        assert anchor is not None
        async with reading(self.pool, timeout_s=ROOT_TIMEOUT_S, snapshot=True) as connection:
            end_seq = await store.last_seq(connection, tenant_id)
            row = next(iter(await store.entries_at(connection, tenant_id, anchor.size)), None)
            if row is None and end_seq < anchor.size:
                raise DatabaseWentBackError(
                    f"the chain of tenant {tenant_id} ends at seq {end_seq}, but this node keeps a checkpoint of it of "
                    f"size {anchor.size}: {_WENT_BACK}"
                )
            if row is None and await tree_agrees(connection, tenant_id, anchor):
                # It has left with a prune; the next checkpoint takes the place of this one.
                return
            if row is None or not holds_together(tenant_id, row):
                self.breaks.report(tenant_id, _break_at(tenant_id, anchor.size, row), "ledger_watch")
                return
            link = row[_LINK]
            if watched.link is None and await tree_agrees(connection, tenant_id, anchor):
                watched.link = link
                return
            if watched.link is None and await root_of_chain(connection, tenant_id, anchor.size) == anchor.root:
                watched.link = link
        if link != watched.link:
            raise DatabaseWentBackError(
                f"the chain of tenant {tenant_id} differs within its first {anchor.size} entries from the checkpoint "
                f"that this node keeps of it, and holds together: {_WENT_BACK}"
            )
        self.notary.rebuild(tenant_id)

    # --- 2. newer checkpoints of other nodes ----------------------------------------------------------

    def _is_behind(self, chain: SeenChain) -> bool:
        """Whether the chain may have a newer checkpoint, and its next read is due."""
        watched = self._watched[chain.tenant_id]
        return (
            type(chain.tree_size) is int
            and chain.tree_size > watched.kept_size
            and watched.follow_at_s <= time.monotonic()
        )

    async def _follow(self, chains: Sequence[SeenChain]) -> None:
        """Store newer checkpoints of these chains, if a trusted key signed them and they extend the stored ones."""
        if not chains:
            return
        ring = await self.keyring()
        # They must extend the stored checkpoint: this node may have stored a newer one since the read.
        self._take_own([chain.tenant_id for chain in chains])
        heads: dict[str, Checkpoint] = {}
        notes: dict[str, str] = {}
        for chain in filter(self._is_behind, chains):
            tenant_id, note = chain.tenant_id, chain.checkpoint or ""
            watched = self._watched[tenant_id]
            watched.follow_at_s = time.monotonic() + FOLLOW_INTERVAL_S
            try:
                head = open_checkpoint(note, ring, origin=self.notary.origin(tenant_id))
                if (head.size, head.root.hex()) != (chain.tree_size, chain.root_hash):
                    raise SignatureError(f"the checkpoint of size {head.size} is not that of the stored tree")
                heads[tenant_id], notes[tenant_id] = head, note
            except LedgerError as error:
                watched.fault = str(error)
        if not heads:
            return
        anchors = {tenant_id: self._watched[tenant_id].anchor for tenant_id in heads}
        sizes = {tenant_id: anchor.size for tenant_id, anchor in anchors.items() if anchor is not None and anchor.size}
        async with reading(self.pool, snapshot=True) as connection:
            stored = await read_tiles_of(
                connection,
                [(name, at) for name, size in sizes.items() for at in tiles.consistency_tiles(size, heads[name].size)],
            )
        for tenant_id, head in heads.items():
            if not _extends(anchors[tenant_id], head, stored.get(tenant_id, {})):
                log.error("checkpoint_does_not_extend", tenant_id=tenant_id, size=head.size)
                fault = f"the checkpoint of size {head.size} does not extend the one that is kept"
                self._watched[tenant_id].fault = fault
                del notes[tenant_id]
        for tenant_id in await self.notary.keep_followed(notes, anchors):
            self._watched[tenant_id].move(heads[tenant_id])

    # --- 3. chains that grow without a valid checkpoint -----------------------------------------------

    def _report_unfollowed(self, chains: Sequence[SeenChain]) -> None:
        """Note which of these chains have been longer than their checkpoint for too long, and log the new ones."""
        now_s, unfollowed = time.monotonic(), self.node.unfollowed
        new: dict[str, str] = {}
        for chain in chains:
            watched, name = self._watched[chain.tenant_id], chain.tenant_id
            checked_at_s, watched.checked_at_s = watched.checked_at_s, now_s
            is_covered = _end_of(chain) <= self.checkpoints.size(name)
            if is_covered or watched.uncovered_s == 0.0:
                unfollowed.pop(name, None)
            added_s = min(now_s - checked_at_s, UNFOLLOWED_AFTER_S / 2)
            watched.uncovered_s = 0.0 if is_covered else watched.uncovered_s + added_s
            if watched.uncovered_s >= UNFOLLOWED_AFTER_S and name not in unfollowed:
                new[name] = self._why_unfollowed(chain)
        unfollowed.update(new)
        if new:
            log.warning(
                "checkpoints_not_followed", tenants=len(new), faults=dict(sorted(new.items())[:TENANTS_LOGGED_MAX])
            )

    def _why_unfollowed(self, chain: SeenChain) -> str:
        watched = self._watched[chain.tenant_id]
        above = f"nothing that counts covers seq {watched.kept_size + 1} to {_end_of(chain)}"
        if watched.fault is not None:
            return f"{above}: {watched.fault}"
        return (
            f"{above}: no checkpoint was made; the node that writes is not admitted (tally keys list), is down, or "
            "cannot store checkpoints (its /readyz says why under signing)"
        )


def _end_of(chain: SeenChain) -> int:
    """Length of the chain according to the database, by its head or its tree."""
    return max((size for size in (chain.head_seq, chain.tree_size) if type(size) is int), default=0)


def _break_at(tenant_id: str, seq: int, row: EntryRow | None) -> Break:
    """The break at ``seq``, which a checkpoint covers: its row is missing or inconsistent."""
    if row is None:
        return Break(seq, "gap", f"the entry of seq {seq}, which a checkpoint covers, is missing")
    found = first_break_in(tenant_id, [row], first_seq=seq, prev_link=row[_PREVIOUS])
    return found or Break(seq, "link", "a row that a checkpoint covers was changed")


def _extends(anchor: Checkpoint | None, head: Checkpoint, stored: dict[TileCoordinates, bytes]) -> bool:
    """Whether the tiles prove that the tree of ``head`` begins with that of ``anchor``."""
    if anchor is None or not anchor.size:
        return True
    with suppress(LedgerError, ValueError, TypeError):
        merkle.verify_consistency(
            anchor.size,
            head.size,
            anchor.root,
            head.root,
            tiles.consistency_proof(anchor.size, head.size, tiles.getter(stored)),
        )
        return True
    return False
