"""What jobs are, of all entries that the log has of them, for answers that show one job or a page of them.

Most jobs have few entries, which are read, recomputed and folded each time. A job of many entries is folded once, in
parts, and remembered: after that only what was chained since is read. Its row in the job table is compared with the
fold: a row that leaves an entry out, or names one that is not there, answers for nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from app.store import job_table
from app.store.entry_check import not_as_chained
from app.store.job_table import ENTRIES_MAX, JobSpan
from ledger.errors import ChainDamagedError
from ledger.machines.jobs import JobState
from ledger.verification.verdict import Break

if TYPE_CHECKING:
    from app.store import Connection
    from app.store.entry_check import EntryCheck
    from app.store.job_table import EntryRow, JobClaim
    from app.store.large_jobs import Folded, LargeJobs
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
