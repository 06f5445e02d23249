"""Verifies history again: every chain from its first entry, one tenant after the other, at a bounded share of time.

A short chain is verified whole, job states and verdicts on proposals included. A longer chain is verified in ranges,
without job states; the log reports each such tenant (``job_states_not_compared``). Its verdicts, each of which depends
on all earlier entries, are judged at its end. Each range receives the tree over the entries before it and compares the
tree with the checkpoints beside the WAL. After a gap there is no tree, and the walk continues without one. The walk's
position is stored beside the WAL, in ``<wal folder>/walk.json``, so that a node that is restarted every day still
completes its walk::

    {"version": 2, "began_at": 1700000000.0, "is_done": false, "tenant_id": "acme", "seq": 40000,
     "from_seq": 39800, "link": "64 hex digits", "snapshot": "64 hex digits", "frontier": ["64 hex digits"],
     "runs": {"0": "64 hex digits"}, "is_valid": true}

The next range begins after ``from_seq``, the end of a snapshot. ``link`` is the link of that entry, ``snapshot`` the
snapshot's payload digest, and ``frontier`` the right edge of the tree over the entries up to there, null without a
tree. The index of jobs passes from range to range in memory, so that runs over several ranges are compared as well;
``runs`` has the roots of those that are not merged any more, by first leaf, and the rest is made again after a restart.
If the file cannot be read, the walk starts from the beginning.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Literal

import msgspec

from app.read.verification import ChainVerifier
from app.runtime.logs import log
from app.runtime.state.found_breaks import DAMAGED
from app.runtime.state.kept_files import WALK, KeptFile, Verified
from app.runtime.tasks import end_if_cancelled, paced
from app.store.chain_reads import last_seq, list_tenants, next_seq
from app.store.jobs.index import PostgresIndex
from app.store.reading import Pool, reading
from ledger.errors import (
    ArchivedError,
    DatabaseUnavailableError,
    InvalidInputError,
    StartRefusedError,
    TenantNotFoundError,
)
from ledger.job_index import LEVEL_MAX, full_run
from ledger.job_index.builder import IndexBuilder
from ledger.merkle import Frontier
from ledger.verification.left_index import builder_at
from ledger.verification.verdict import KINDS

NAME: Final = "walk.json"
SHARE: Final = 0.1
"""Largest share of time that the walk takes, waits for the database included: at most a tenth of a core."""
RANGE_ENTRIES: Final = 20_000
"""Most entries of one range, and of a chain that is verified whole."""
STORE_INTERVAL_S: Final = 5.0
"""How often the position is stored; a restart repeats at most this much of the walk."""
PAUSE_S: Final = 60.0
"""Longest pause between two checks whether a walk is due."""

UNSIGNED_ENTRIES_MAX: Final = 100_000
"""Most entries without a snapshot that are read again; after more, the next range does not start at a snapshot."""

_COMPARED_IN_RANGES: Final = {*KINDS, DAMAGED} - {"projection"}
"""Kinds of break that a valid verdict in ranges rules out: all but job states, which are not compared."""


class _Position(msgspec.Struct):
    """The walk's progress: ``tenant_id`` up to ``seq``; all tenants before it are done."""

    version: Literal[2] = 2
    began_at: float = 0.0
    is_done: bool = True
    tenant_id: str = ""
    seq: int = 0
    from_seq: int = 0
    link: str | None = None
    snapshot: str | None = None
    frontier: list[str] | None = None
    runs: dict[int, str] = {}
    is_valid: bool = True
    """Whether this tenant has had no break so far."""

    def begin(self, tenant_id: str) -> None:
        """Start with the chain of this tenant."""
        self.tenant_id, self.seq, self.is_valid, self.runs = tenant_id, 0, True, {}
        self.go_behind(0, None, None, [])

    def go_behind(self, seq: int, link: str | None, snapshot: str | None, frontier: Sequence[bytes] | None) -> None:
        """Let the next range begin after entry ``seq``."""
        self.from_seq, self.link, self.snapshot = seq, link, snapshot
        self.frontier = None if frontier is None else [each.hex() for each in frontier]


_FILE: Final = KeptFile[_Position](NAME, _Position, b"{}", "the walk begins again")


class FullWalk:
    """The walk of one node; belongs to its event loop."""

    def __init__(
        self,
        *,
        pool: Pool,
        verifier: ChainVerifier,
        wal_folder: Path,
        interval_s: float,
    ) -> None:
        self._pool = pool
        self._verifier = verifier
        self._folder = wal_folder
        self._interval_s = interval_s
        self._at = _load(wal_folder)
        self._index: IndexBuilder | None = None
        """The index of jobs up to the end of the last range, None if it must be made again."""
        self._stored_at_s = 0.0
        self.walks_done = 0

    async def run(self) -> None:
        """Walk every ``interval_s`` seconds until cancelled; called again after an error, the walk continues.

        Raises:
            DatabaseUnavailableError: Postgres cannot be reached.
        """
        while True:
            due_in_s = self._at.began_at + self._interval_s - time.time() if self._at.is_done else 0.0
            if due_in_s > 0:
                await asyncio.sleep(min(due_in_s, PAUSE_S))
                continue
            await self._walk()

    async def _walk(self) -> None:
        """Continue the walk to the end of the last chain."""
        if self._at.is_done:
            self._at = _Position(began_at=time.time(), is_done=False)
        async with reading(self._pool) as connection:
            tenants = [each for each in await list_tenants(connection) if each >= self._at.tenant_id]
        for tenant_id in tenants:
            if tenant_id != self._at.tenant_id:
                self._begin(tenant_id)
            while not await self._next_range(tenant_id):
                await self._store()
            # This tenant is done: continue at the next possible name.
            self._begin(tenant_id + "\0")
            await self._store()
        self._at.is_done = True
        self.walks_done += 1
        await self._store(is_due=True)
        log.info("full_verification_done", tenants=len(tenants), took_s=round(time.time() - self._at.began_at, 1))

    def _begin(self, tenant_id: str) -> None:
        self._at.begin(tenant_id)
        self._index = None

    async def _next_range(self, tenant_id: str) -> bool:
        """Verify the next range of the chain; True if it was the last."""
        async with paced(SHARE):
            try:
                return await self._verify(tenant_id)
            except DatabaseUnavailableError:
                raise
            except TenantNotFoundError:
                return True
            except ArchivedError as error:
                # The range left before it was read; the floor has what the next one begins with.
                self._at.seq = error.verified_from_seq - 1
                self._at.go_behind(self._at.seq, None, None, [])
                return False
            except Exception as error:
                # Edited rows may hold anything and raise any error; the walk must go on.
                self._verifier.failed(tenant_id, error)
                end_if_cancelled()
                return True

    async def _verify(self, tenant_id: str) -> bool:
        at = self._at
        async with reading(self._pool) as connection:
            end_seq = await last_seq(connection, tenant_id)
            before_first = await next_seq(connection, tenant_id, 0) - 1
        if at.seq == 0 and end_seq - before_first <= RANGE_ENTRIES:
            await self._verifier.again(tenant_id, by=WALK)
            return True
        if at.seq == 0:
            log.info("job_states_not_compared", tenant_id=tenant_id, entries=end_seq, done="tally verify compares them")
        # A prefix that is not there has left with a prune, or is reported by the first range.
        at.seq = max(at.seq, before_first)
        to_seq = min(at.seq + RANGE_ENTRIES, end_seq)
        frontier = [bytes.fromhex(each) for each in at.frontier or ()]
        expected = at.link, at.snapshot, frontier
        index = await self._index_before(tenant_id)
        done = await self._verifier.again(
            tenant_id, at.from_seq + 1, to_seq, *expected, job_index=index, take_index=self._take_index
        )
        verdict = done.verdict
        at.is_valid = at.is_valid and verdict.is_valid
        if to_seq >= end_seq:
            await self._verifier.judge_commitments(tenant_id)
            await self._verifier.verified_whole(
                tenant_id, Verified(at.began_at, WALK), is_valid=at.is_valid, kinds=_COMPARED_IN_RANGES
            )
            return True
        if verdict.to_seq <= at.seq:
            # The range is empty. The next one spans the gap, with entries on both sides, so that it is reported.
            async with reading(self._pool) as connection:
                at.seq = await next_seq(connection, tenant_id, to_seq) - 1
            return False
        at.seq, covered_to = to_seq, verdict.covered_to
        if covered_to.seq > at.from_seq:
            # Start the next range at the end of a snapshot, so that it has whole snapshots.
            at.go_behind(
                covered_to.seq, covered_to.chain_link, verdict.covered_digest, verdict.frontiers.get(covered_to.seq)
            )
        elif to_seq - at.from_seq > UNSIGNED_ENTRIES_MAX:
            at.go_behind(
                to_seq, verdict.to_link if verdict.to_seq == to_seq else None, None, verdict.frontiers.get(to_seq)
            )
        return False

    async def _index_before(self, tenant_id: str) -> IndexBuilder | None:
        """The index of at least the entries before the next range; None of a chain that has just begun."""
        at = self._at
        if at.from_seq == 0 or (self._index is not None and self._index.size >= at.from_seq):
            return self._index
        async with reading(self._pool) as connection:
            found = await builder_at(PostgresIndex(connection, tenant_id), at.from_seq)
        found.knows({full_run(begin): bytes.fromhex(root) for begin, root in at.runs.items()})
        return found

    def _take_index(self, index: IndexBuilder) -> None:
        self._index = index
        self._at.runs = {place.begin: root.hex() for place, root in index.roots().items() if place.level == LEVEL_MAX}

    async def _store(self, *, is_due: bool = False) -> None:
        if not is_due and time.monotonic() < self._stored_at_s + STORE_INTERVAL_S:
            return
        self._stored_at_s = time.monotonic()
        try:
            await asyncio.to_thread(_FILE.store, self._folder, self._at)
        except OSError as error:
            log.warning("full_verification_position_not_stored", error=str(error))


def _load(folder: Path) -> _Position:
    try:
        position = _FILE.load(folder)
        Frontier.restore(position.from_seq if position.frontier else 0, [*map(bytes.fromhex, position.frontier or ())])
    except (StartRefusedError, InvalidInputError, ValueError) as error:
        log.warning("full_verification_begins_again", error=repr(error))
        return _Position()
    return position
