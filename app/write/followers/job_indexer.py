"""Makes the index of jobs that snapshots sign (docs/formats/job-index.md), from entry 1 on, without a gap; of a chain
whose entries left before that, from what was kept of the index, else from the first border of blocks behind them.

The state in memory is trusted: roots of the runs over the full blocks, and the entries behind them. It comes from the
newest snapshot, if a trusted key signed that one and its index, else from the entries. Stored runs are not trusted: one
is used only if its root is that of the state. Entries from the database are used only if their links are right and
the tree in memory has them.

An index that is behind the snapshots, such as that of a chain from before there was one, follows in turns, and the
snapshots meanwhile have none::

    indexed size <= signed_seq        a snapshot has the index where it begins at the indexed size
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, NamedTuple

from app.runtime.logs import log
from app.store import Connection
from app.store import notary as notary_store
from app.store.jobs import index as store
from app.store.jobs.index import PostgresIndex, StoredRun
from app.store.notary import LinkRow
from app.store.retention import retention_rows
from app.trust.key_in_use import KeyInUse
from app.write.followers.signed_chain import proved_root
from app.write.followers.tree_follower import FollowedTenant, IndexedTenant
from ledger.errors import ChainBrokenError, InvalidInputError, SignatureError
from ledger.job_index import (
    BLOCK_ENTRIES,
    LEVEL_MAX,
    RunPlace,
    begin_behind,
    covering,
    keys_of,
    merged_leaves,
    root_of,
    run_entries,
)
from ledger.job_index.builder import OpenBlock
from ledger.machines.retention import Floor, retention_of
from ledger.merkle import HASH_BYTES
from ledger.verification.entry_check import ENTRY_COLUMNS, leaves_of
from ledger.verification.left_index import index_of_left
from ledger.verification.snapshot_check import SnapshotClaim, SnapshotRow
from ledger.verification.verdict import Break
from signing import retention_statement
from signing.snapshot import ENVELOPE, open_snapshot

ENTRIES_A_TURN: Final = 16 * BLOCK_ENTRIES
"""Entries of one tenant that an index which is behind takes in one turn."""
RETRY_PAUSE_S: Final = 600.0
"""Pause before an index is tried again that cannot be made from the entries that are there."""

_JOB = ENTRY_COLUMNS.index("job_id")


class GrownIndex(NamedTuple):
    """An index with more entries, and what must be stored with it."""

    state: IndexedTenant
    stored: dict[StoredRun, bytes]
    """Leaves of the new runs."""
    merged: list[StoredRun]
    """Runs that are under a new one."""

    def roots(self) -> list[str]:
        """As a snapshot has them, in hex."""
        open_block, size = self.state.open, self.state.size
        partial = root_of(open_block.leaves()) if open_block.keys else b""
        return [self.state.roots.get(each[:2], partial).hex() for each in covering(size, self.state.begin)]

    def claimed(self) -> dict[str, Any]:
        """Members of a ``SnapshotClaim``, none if no entry is in the index yet."""
        begin = self.state.begin
        if not (roots := self.roots()):
            return {}
        return {"job_index": roots, **({"job_index_from": begin + 1} if begin else {})}


class StoredRunError(ValueError):
    """A stored run is not the one that was signed."""


@dataclass(kw_only=True, eq=False)
class JobIndexer:
    """Makes the indexes for the notary, whose tenants' locks the caller holds."""

    keys: KeyInUse
    origin: Callable[[str], str]
    """Returns the name of a tenant's log."""
    behind: set[str] = field(default_factory=set, init=False)
    """Tenants whose index has not reached their snapshots."""
    _made_again: set[str] = field(default_factory=set, init=False)
    """Those of them whose stored runs are not the ones that were signed."""
    _retry_at_s: dict[str, float] = field(default_factory=dict, init=False)

    async def grown(
        self,
        connection: Connection,
        tenant_id: str,
        tenant: FollowedTenant,
        links: Sequence[LinkRow],
        leaf_hashes: Sequence[bytes],
        *,
        are_ours: bool,
    ) -> GrownIndex | None:
        """The index with these entries, which follow the newest snapshot; None if it is behind.

        ``are_ours`` is whether this node chained them; else their rows are read. The caller MUST store the result with
        the snapshot, and then give its state to the tenant.
        """
        state: IndexedTenant | None = await self._loaded(connection, tenant_id, tenant)
        if tenant_id in self.due():
            await self.follow(connection, tenant_id, tenant)
            state = tenant.job_index
        if state is None or state.size != links[0].seq - 1 or tenant_id in self.behind:
            return None
        try:
            if are_ours:
                keys: bytes | None = keys_of([link.job_id for link in links])
            else:
                keys, hashes = await self._read(connection, tenant_id, links[0].seq, len(links))
                keys = keys if hashes == b"".join(leaf_hashes) else None
            if keys is not None:
                return await with_entries(connection, tenant_id, state, keys, b"".join(leaf_hashes))
        except StoredRunError as error:
            self._begin_again(tenant_id, tenant, str(error))
        return None

    async def follow(self, connection: Connection, tenant_id: str, tenant: FollowedTenant) -> None:
        """Take one turn for an index that is behind the snapshots of its tenant, in one transaction."""
        assert tenant.tree is not None
        signed_seq, stored = tenant.signed_seq or 0, dict[StoredRun, bytes]()
        state = await self._loaded(connection, tenant_id, tenant)
        if (floor := await self._floor(connection, tenant_id, state)) is not None:
            state = await self._behind(connection, tenant_id, floor, stored)
        if state.size > signed_seq:
            return  # Snapshots have not come to the first entry that can be in an index.
        begin_size, merged = state.size, list[StoredRun]()
        try:
            while state.size < min(signed_seq, begin_size + ENTRIES_A_TURN):
                count = min(BLOCK_ENTRIES - state.size % BLOCK_ENTRIES, signed_seq - state.size)
                keys, hashes = await self._read(connection, tenant_id, state.size + 1, count)
                leaves = [hashes[at : at + HASH_BYTES] for at in range(0, len(hashes), HASH_BYTES)]
                await proved_root(connection, tenant_id, tenant.tree, state.size + 1, leaves)
                grown = await with_entries(connection, tenant_id, state, keys, hashes, stored)
                state = grown.state
                stored |= grown.stored
                merged += grown.merged
                await asyncio.sleep(0)
        except (StoredRunError, ChainBrokenError) as error:
            self._begin_again(tenant_id, tenant, str(error))
            return
        async with connection.transaction():
            await store.store_runs(
                connection, tenant_id, {run: stored[run] for run in stored if run not in merged}, merged
            )
        tenant.job_index = state
        if state.size < signed_seq:
            self.behind.add(tenant_id)
        else:
            self.behind.discard(tenant_id)
            self._made_again.discard(tenant_id)

    def due(self) -> set[str]:
        """Tenants whose index is behind and may be followed now."""
        now_s = time.monotonic()
        return {name for name in self.behind if self._retry_at_s.get(name, 0.0) <= now_s}

    def make_again(self, tenant_id: str, tenant: FollowedTenant) -> None:
        """The stored runs may be damaged: make the index from the entries, unless that is under way."""
        if tenant_id not in self._made_again:
            tenant.job_index = IndexedTenant()
            self.behind.add(tenant_id)
            self._made_again.add(tenant_id)

    def _begin_again(self, tenant_id: str, tenant: FollowedTenant, why: str) -> None:
        log.warning("job_index_delayed", tenant_id=tenant_id, error=why)
        self._made_again.discard(tenant_id)
        self.make_again(tenant_id, tenant)
        self._retry_at_s[tenant_id] = time.monotonic() + RETRY_PAUSE_S

    # --- the state --------------------------------------------------------------------------------

    async def _loaded(self, connection: Connection, tenant_id: str, tenant: FollowedTenant) -> IndexedTenant:
        """The state of a tenant: what is in memory, else what the newest snapshot signed, else that of no entries."""
        signed_seq = tenant.signed_seq or 0
        if tenant.job_index is None or tenant.job_index.size > signed_seq or tenant_id in self.behind:
            last = await notary_store.last_snapshot(connection, tenant_id)
            signed = None
            if last is not None and tenant_id not in self._made_again:
                signed = await self._signed(connection, tenant_id, last.row)
            if signed is not None and signed.size == signed_seq:
                tenant.job_index = signed
                self.behind.discard(tenant_id)
            elif tenant.job_index is None or tenant.job_index.size > signed_seq:
                tenant.job_index = IndexedTenant()
        if tenant.job_index.size < signed_seq:
            self.behind.add(tenant_id)
        return tenant.job_index

    async def _signed(self, connection: Connection, tenant_id: str, row: SnapshotRow) -> IndexedTenant | None:
        """The state that a snapshot signed; None if it has none, or no trusted key signed it."""
        claim = await self._claim(connection, row)
        if claim is None or claim.tenant_id != tenant_id or not isinstance(claim.job_index, list):
            return None
        size, begin = claim.to_seq, claim.to_seq - claim.to_seq % BLOCK_ENTRIES
        roots = {place[:2]: root for place, root in claim.index_roots.items()}
        open_block: OpenBlock | None = OpenBlock(begin)
        if begin < size:
            open_block = await store.entries_under(connection, tenant_id, RunPlace(0, begin, size))
            if open_block is None or root_of(open_block.leaves()) != roots.pop((0, begin)):
                log.warning("job_index_delayed", tenant_id=tenant_id, error=f"entries behind {begin} were changed")
                return None
        assert open_block is not None
        return IndexedTenant(roots, open_block, claim.index_begin)

    async def _claim(self, connection: Connection, row: SnapshotRow) -> SnapshotClaim | None:
        if not isinstance(row[ENVELOPE], str):
            return None
        with suppress(SignatureError, InvalidInputError):
            opened = open_snapshot(row[ENVELOPE], await self.keys.counting(connection))
            return opened.claim if opened.verdict == "ok" else None
        return None

    async def _floor(self, connection: Connection, tenant_id: str, state: IndexedTenant) -> Floor | None:
        """What left a chain, by an admitted key, if it left before it was in the index."""
        if not (rows := await retention_rows(connection, tenant_id)):
            return None
        judge = partial(retention_statement.judge, self.origin(tenant_id), await self.keys.counting(connection))
        floor = retention_of(rows, judge).floor
        return floor if floor is not None and floor.to_seq > state.size else None

    async def _behind(
        self, connection: Connection, tenant_id: str, floor: Floor, stored: dict[StoredRun, bytes]
    ) -> IndexedTenant:
        """The index of what left, of which ``stored`` takes the runs, if it was kept and is the one that was signed;
        else one of no entries, which begins behind."""
        known = await index_of_left([PostgresIndex(connection, tenant_id)], floor)
        if (left := known.left()) is None:
            return IndexedTenant(open=OpenBlock(begin := begin_behind(floor.to_seq)), begin=begin)
        stored |= {place[:2]: leaves for place, leaves in zip(left.places(), left.runs, strict=True)}
        roots = {place[:2]: root for place, root in known.roots().items() if place.end % BLOCK_ENTRIES == 0}
        return IndexedTenant(roots, left.open, left.begin)

    # --- growing ----------------------------------------------------------------------------------

    async def _read(self, connection: Connection, tenant_id: str, from_seq: int, count: int) -> tuple[bytes, bytes]:
        """The keys and leaf hashes of these entries, by their rows, each of which has its link.

        Raises:
            ChainBrokenError: one is missing or is not whole.
        """
        rows = await notary_store.read_entries(connection, tenant_id, from_seq, count)
        if [row[0] for row in rows] != [*range(from_seq, from_seq + count)]:
            raise ChainBrokenError(tenant_id, f"entries {from_seq} to {from_seq + count - 1} are not all there")
        leaves = leaves_of(tenant_id, [tuple(row) for row in rows])
        if isinstance(leaves, Break):
            raise ChainBrokenError(tenant_id, f"{leaves.kind} at seq {leaves.seq}: {leaves.detail}", leaves)
        return keys_of([row[_JOB] for row in rows]), b"".join(leaves)


async def with_entries(
    connection: Connection,
    tenant_id: str,
    state: IndexedTenant,
    keys: bytes,
    hashes: bytes,
    unstored: dict[StoredRun, bytes] | None = None,
) -> GrownIndex:
    """``state`` with these entries, given the keys of their jobs and their leaf hashes. ``unstored`` are new runs that
    are not in the database yet.

    Raises:
        StoredRunError: a stored run is not the one of the state.
    """
    found = GrownIndex(IndexedTenant(dict(state.roots), state.open, state.begin), {}, [])
    at = 0
    while at < len(keys):
        count = BLOCK_ENTRIES * HASH_BYTES - len(found.state.open.keys)
        found.state.open = found.state.open.with_entries(keys[at : at + count], hashes[at : at + count])
        at += count
        if len(found.state.open.keys) == BLOCK_ENTRIES * HASH_BYTES:
            await _close(connection, tenant_id, found, unstored or {})
    return found


async def _close(connection: Connection, tenant_id: str, found: GrownIndex, unstored: dict[StoredRun, bytes]) -> None:
    """The open block is full: its run is one of the index, or is merged with those before it."""
    state = found.state
    level, begin, leaves = 0, state.open.begin, state.open.leaves()
    state.open = OpenBlock(state.open.end)
    while level < LEVEL_MAX and state.size % (above := run_entries(level + 1)) == 0:
        first = state.size - above
        if first < state.begin:
            break
        group = []
        for run in [(level, each) for each in range(first, begin, run_entries(level))]:
            stored = found.stored.get(run) or unstored.get(run) or await store.stored_leaves(connection, tenant_id, run)
            if root_of(stored) != state.roots.pop(run):
                raise StoredRunError(f"the stored run of level {level} from entry {run[1] + 1} on was changed")
            group.append(stored)
            found.stored.pop(run, None)
            found.merged.append(run)
        level, begin, leaves = level + 1, first, await asyncio.to_thread(merged_leaves, [*group, leaves])
    state.roots[level, begin] = await asyncio.to_thread(root_of, leaves)
    found.stored[level, begin] = leaves
