"""What jobs are, of all entries that the log has of them, for answers that show one job or a page of them.

Most jobs have few entries, which are read, recomputed and folded each time. A job of many entries is folded once, in
parts, and remembered: after that only what was chained since is read. Its row in the job table is compared with the
fold: a row that leaves an entry out, or names one that is not there, answers for nothing.

A list of one status does not show the rows that claim another one, so a false status hides a job from it. A walk
compares every row, at a bounded share of the time::

    every WALK_INTERVAL_S, for each tenant, as far as the table has followed
      WALK_RANGE_ENTRIES of the log at a time: the jobs whose last entry is among them
        all entries of each are folded, and its row MUST be what they fold to

A row that is not is reported, and written again from the entries. Rows of jobs that have no entry are found by
verification.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

import asyncpg
import structlog

from app.runtime.tasks.running import paced
from app.store import job_table
from app.store.chain_reads import list_tenants
from app.store.entry_check import not_as_chained
from app.store.job_table import ENTRIES_MAX, JobSpan
from app.store.reading import reading
from ledger.errors import ChainDamagedError, DatabaseUnavailableError
from ledger.machines.jobs import JobState
from ledger.verification.verdict import Break

if TYPE_CHECKING:
    from app.store import Connection
    from app.store.entry_check import EntryCheck
    from app.store.job_table import EntryRow, JobClaim
    from app.store.large_jobs import Folded, LargeJobs
    from app.store.reading import Pool
    from app.store.reads import JobRows, ListedRow

LARGE_JOBS_A_PAGE_MAX: Final = 5
"""Most jobs of a page that are folded in parts: behind them the page ends, and another follows."""


class DamagedJob(NamedTuple):
    """A job of a list of which something stored is not what was chained."""

    job_id: str
    error: ChainDamagedError

    def shown(self) -> dict[str, str]:
        """As the list names it."""
        return {"job_id": self.job_id, "detail": str(self.error)}


class FoldedJobs:
    """Folds the entries of jobs. ``doubt`` takes jobs whose rows in the job table are false, ``report`` the damage that
    the answer does not name."""

    def __init__(
        self,
        check: EntryCheck,
        large: LargeJobs,
        doubt: Callable[[str, str], None],
        report: Callable[[ChainDamagedError, str], object],
    ) -> None:
        self._check = check
        self._doubt = doubt
        self._report = report
        self._large = large

    def remembered(self, tenant_id: str, job_id: str) -> Folded:
        """What need not be read again of the job: nothing of most."""
        return self._large.remembered(tenant_id, job_id)

    async def state_of(
        self, connection: Connection, tenant_id: str, job_id: str, known: Folded, rows: JobRows
    ) -> JobState | None:
        """What the job is; None where there is none. ``rows`` begin behind ``known``.

        Raises:
            ChainDamagedError: an entry is not what was chained, or the row in the job table is false.
        """
        state, last_seq = await self._folded(connection, JobSpan(tenant_id, job_id), known, rows.entries)
        if rows.followed_seq is None or last_seq > rows.followed_seq:
            return state
        if rows.claim is not None:
            self._compare(tenant_id, job_id, rows.claim, state)
        elif state is not None:
            # Only lists lack it. What is shown here is what its entries say.
            self._doubt(tenant_id, job_id)
            self._report(_not_stored(tenant_id, state), "job_read")
        return state

    async def states_of(
        self, connection: Connection, tenant_id: str, rows: Sequence[ListedRow], to_seq: int
    ) -> tuple[list[JobState], list[DamagedJob], int]:
        """What the jobs of these rows of the job table were once it had followed to ``to_seq``, those that are damaged,
        and how many of the rows that is: at least one, all but for a page of large jobs."""
        job_ids = [row.job_id for row in rows]
        parts, are_checked = await self._entries(connection, tenant_id, job_ids, to_seq)
        states: list[JobState] = []
        met: list[DamagedJob] = []
        large = 0
        for number, (row, (span, known, of_job)) in enumerate(zip(rows, parts, strict=True)):
            large += len(of_job) > ENTRIES_MAX
            if large > LARGE_JOBS_A_PAGE_MAX:
                return states, met, number
            try:
                if are_checked and len(of_job) <= ENTRIES_MAX:
                    state, last_seq = known.onto(span, of_job)
                else:
                    state, last_seq = await self._folded(connection, span, known, of_job, are_checked=are_checked)
                if last_seq <= to_seq:
                    self._compare(tenant_id, row.job_id, row.claim, state)
            except ChainDamagedError as error:
                met.append(DamagedJob(row.job_id, error))
            else:
                if state is not None:
                    states.append(state)
        return states, met, len(rows)

    async def compare(
        self, connection: Connection, tenant_id: str, rows: Sequence[tuple[str, JobClaim | None]], to_seq: int
    ) -> list[ChainDamagedError]:
        """What is wrong with these jobs, each with its row in the job table, None where it has none, once that has
        followed to ``to_seq``."""
        job_ids = [job_id for job_id, _ in rows]
        parts, are_checked = await self._entries(connection, tenant_id, job_ids, to_seq)
        met: list[ChainDamagedError] = []
        for (job_id, claim), (span, known, of_job) in zip(rows, parts, strict=True):
            try:
                state, last_seq = await self._folded(connection, span, known, of_job, are_checked=are_checked)
                if last_seq > to_seq:
                    continue
                if claim is not None:
                    self._compare(tenant_id, job_id, claim, state)
                elif state is not None:
                    self._doubt(tenant_id, job_id)
                    met.append(_not_stored(tenant_id, state))
            except ChainDamagedError as error:
                met.append(error)
        return met

    async def _entries(
        self, connection: Connection, tenant_id: str, job_ids: Sequence[str], to_seq: int
    ) -> tuple[list[tuple[JobSpan, Folded, list[EntryRow]]], bool]:
        """What is to be read of each job, what it is folded onto, and its entries; and whether all entries are what was
        chained: of a page that is whole, as nearly all are, no job is looked at by itself."""
        known = [self.remembered(tenant_id, job_id) for job_id in job_ids]
        spans = [JobSpan(tenant_id, job_id, each.seq, to_seq) for job_id, each in zip(job_ids, known, strict=True)]
        entries = await job_table.entries_of(connection, spans) if spans else []
        parts = list(zip(spans, known, entries, strict=True))
        try:
            await self._check.require(connection, tenant_id, [entry for of_job in entries for entry in of_job])
        except ChainDamagedError:
            return parts, False
        return parts, True

    async def _folded(
        self,
        connection: Connection,
        span: JobSpan,
        known: Folded,
        entries: Sequence[EntryRow],
        *,
        are_checked: bool = False,
    ) -> Folded:
        """The fold of what is ``known`` of the job, of ``entries`` and of those behind them."""
        if not are_checked:
            await self._check.require(connection, span.tenant_id, entries)
        folded = known.onto(span, entries)
        if len(entries) <= ENTRIES_MAX:
            return folded
        return await self._large.fold(connection, self._check, span, folded)

    def _compare(self, tenant_id: str, job_id: str, claim: JobClaim, state: JobState | None) -> None:
        found = claim.break_in(job_id, state)
        if found is not None:
            self._doubt(tenant_id, job_id)
            raise not_as_chained(tenant_id, found)


def _not_stored(tenant_id: str, state: JobState) -> ChainDamagedError:
    detail = f"job {state.job_id} has entries but is not stored"
    return not_as_chained(tenant_id, Break(state.last_seq, "projection", detail))


WALK_SHARE: Final = 0.02
"""Most of the time that the walk takes, waiting for the database included."""
WALK_INTERVAL_S: Final = 3600.0
"""Rest between two walks over all tenants, and before one goes on that the database interrupted."""
WALK_RANGE_ENTRIES: Final = 500
"""Entries of the log whose jobs are compared at a time."""

log = structlog.get_logger()


class JobTableWalk:
    """The walk of one node; belongs to its event loop."""

    def __init__(self, pool: Pool, folded: FoldedJobs, report: Callable[[ChainDamagedError, str], object]) -> None:
        self._pool = pool
        self._folded = folded
        self._report = report
        self.walks_done = 0

    async def run(self) -> None:
        """Walk again and again; ends by cancellation."""
        while True:
            try:
                async with reading(self._pool) as connection:
                    tenants = await list_tenants(connection)
                for tenant_id in tenants:
                    await self._walk(tenant_id)
                self.walks_done += 1
            except (DatabaseUnavailableError, asyncpg.DataError) as error:
                log.warning("job_table_walk_delayed", error=str(error))
            await asyncio.sleep(WALK_INTERVAL_S)

    async def _walk(self, tenant_id: str) -> None:
        after_seq = 0
        while True:
            async with paced(WALK_SHARE):
                try:
                    async with reading(self._pool, snapshot=True) as connection:
                        place = await job_table.place(connection, tenant_id)
                        if place is None or after_seq >= place.seq:
                            return
                        to_seq = min(after_seq + WALK_RANGE_ENTRIES, place.seq)
                        found = await job_table.jobs_ending(connection, tenant_id, after_seq, to_seq, place.seq)
                        stored = await job_table.rows_of(connection, tenant_id, found)
                        met = await self._folded.compare(connection, tenant_id, stored, place.seq)
                except ChainDamagedError as error:
                    self._report(error, "job_table_walk")
                    return
            for each in met:
                self._report(each, "job_table_walk")
            after_seq = to_seq
