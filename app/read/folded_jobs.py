"""Job states folded from all entries that the log has of a job, for answers that show one job or a page of them.

Most jobs have few entries, which are read, recomputed and folded each time. A job of many entries is folded once, in
parts, and cached: later reads fold only newer entries onto it. The job's row in the job table is compared with the
fold: a row that omits an entry, or names one that does not exist, is damage.

A list by status does not show rows of another status, so a wrong status hides a job from it. A walk therefore compares
every row, at a bounded share of the time::

    every WALK_INTERVAL_S, for each tenant, as far as the table has followed
      WALK_RANGE_ENTRIES of the log at a time: the jobs whose last entry is among them
        all entries of each are folded, and its row MUST be what they fold to
      the figures MUST be what all rows say together

A row that differs is reported, and rebuilt from the entries; for figures that differ, all rows of the tenant are.
Verification finds rows of jobs that have no entry.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from app.runtime.tasks import paced
from app.store import Connection
from app.store.chain_reads import list_tenants
from app.store.entry_check import not_as_chained
from app.store.jobs import figures as job_figures
from app.store.jobs import table as job_table
from app.store.jobs.table import Folded, JobFolds, JobSpan, ListedRow, ReadJob
from app.store.reading import Pool, reading, run_in
from app.store.reads import JobRows
from ledger.errors import ChainDamagedError
from ledger.machines.exclusions import COUNT_ALL
from ledger.machines.jobs import JobState
from ledger.verification.projection_check import StoredJob, difference
from ledger.verification.verdict import damaged

LARGE_JOBS_A_PAGE_MAX: Final = 5
"""Most jobs of a page that are folded in parts: after these the page ends, and another follows."""


class DamagedJob(NamedTuple):
    """A job of a list whose stored rows differ from what was chained."""

    job_id: str
    error: ChainDamagedError

    def shown(self) -> dict[str, str]:
        """The job as a list names it."""
        return {"job_id": self.job_id, "detail": str(self.error)}


class FoldedJobs:
    """Folds the entries of jobs, and compares the folds with the job table. ``doubt`` receives jobs whose table rows
    are wrong, ``report`` receives damage that the answer does not name."""

    def __init__(
        self, folds: JobFolds, doubt: Callable[[str, str], None], report: Callable[[ChainDamagedError, str], object]
    ) -> None:
        self.folds = folds
        self._doubt = doubt
        self._report = report

    async def state_of(
        self, connection: Connection, tenant_id: str, job_id: str, known: Folded, rows: JobRows
    ) -> JobState | None:
        """The state of the job, None if there is no such job. ``rows`` begin after ``known``.

        Raises:
            ChainDamagedError: an entry differs from what was chained, or the row in the job table is wrong.
        """
        exclusions = await self.folds.exclusions(connection, tenant_id) if rows.has_statements else COUNT_ALL
        job = ReadJob(JobSpan(tenant_id, job_id), known, rows.entries, exclusions)
        folded = await self.folds.fold(connection, job)
        state = folded.state
        if rows.followed_seq is None or folded.covers_seq > rows.followed_seq:
            return state
        try:
            self._compare(tenant_id, job_id, rows.stored, state)
        except ChainDamagedError as error:
            if rows.stored is not None:
                raise
            # The job has no row, so only lists lack it. This answer comes from its entries.
            self._report(error, "job_read")
        return state

    async def states_of(
        self,
        connection: Connection,
        tenant_id: str,
        rows: Sequence[ListedRow],
        to_seq: int,
        large_max: float = LARGE_JOBS_A_PAGE_MAX,
    ) -> tuple[list[JobState], list[DamagedJob], int]:
        """The states at ``to_seq`` of the jobs of these table rows, the damaged jobs, and how many rows these cover.
        That is at least one row, and every row if at most ``large_max`` jobs are large."""
        read = await self.folds.read(connection, [(tenant_id, row.job_id) for row in rows], to_seq)
        try:
            # Nearly always all entries are as chained; then no job needs a check of its own.
            await self.folds.check.require(connection, tenant_id, [entry for job in read for entry in job.entries])
            are_checked = True
        except ChainDamagedError:
            are_checked = False
        states: list[JobState] = []
        damaged: list[DamagedJob] = []
        large = 0
        for number, (row, job) in enumerate(zip(rows, read, strict=True)):
            large += job.is_large
            if large > large_max:
                return states, damaged, number
            try:
                folded = await self.folds.fold(connection, job, are_checked=are_checked)
                if folded.covers_seq <= to_seq:
                    self._compare(tenant_id, row.job_id, row.stored, folded.state)
                states += [] if folded.state is None else [folded.state]
            except ChainDamagedError as error:
                damaged.append(DamagedJob(row.job_id, error))
        return states, damaged, len(rows)

    def _compare(self, tenant_id: str, job_id: str, stored: StoredJob | None, state: JobState | None) -> None:
        if (found := difference(state, stored)) is not None:
            self._doubt(tenant_id, job_id)
            raise not_as_chained(tenant_id, found)


WALK_SHARE: Final = 0.02
"""Largest share of time that the walk takes, waits for the database included."""
WALK_INTERVAL_S: Final = 3600.0
"""Pause between two walks over all tenants."""
WALK_RANGE_ENTRIES: Final = 500
"""Entries of the log whose jobs are compared at a time."""


class JobTableWalk:
    """The walk of one node; belongs to its event loop."""

    def __init__(
        self,
        pool: Pool,
        folded: FoldedJobs,
        report: Callable[[ChainDamagedError, str], object],
        rewrite: Callable[[str], object],
    ) -> None:
        """``rewrite`` receives tenants whose rows and figures must be rebuilt."""
        self._rewrite = rewrite
        self._pool = pool
        self._folded = folded
        self._report = report
        self.walks_done = 0

    async def run(self) -> None:
        """Walk repeatedly until cancelled.

        Raises:
            DatabaseUnavailableError: Postgres cannot be reached.
        """
        while True:
            tenants = await run_in(reading(self._pool), list_tenants)
            for tenant_id in tenants:
                await self._walk(tenant_id)
                await self._recount(tenant_id)
            self.walks_done += 1
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
                        _, damaged, _ = await self._folded.states_of(connection, tenant_id, stored, place.seq, math.inf)
                except ChainDamagedError as error:
                    self._report(error, "job_table_walk")
                    return
            for each in damaged:
                self._report(each.error, "job_table_walk")
            after_seq = to_seq

    async def _recount(self, tenant_id: str) -> None:
        """Compare the figures of a tenant with its rows, in one state of the database."""
        async with paced(WALK_SHARE), reading(self._pool, timeout_s=None, snapshot=True) as connection:
            place = await job_table.place(connection, tenant_id)
            is_followed = place is not None and not place.is_begun
            found = await job_figures.difference(connection, tenant_id) if is_followed else None
        if found is not None:
            detail = f"the figures of jobs are not what the job table says together: {found}"
            self._report(damaged(tenant_id, "projection", 1, detail), "job_table_walk")
            self._rewrite(tenant_id)
