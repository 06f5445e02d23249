"""What jobs are, of all entries that the log has of them, for answers that show one job or a page of them.

Most jobs have few entries, which are read, recomputed and folded each time. A job of many entries is folded once, in
parts, and remembered: after that only what was chained since is read. Its row in the job table is compared with the
fold: a row that leaves an entry out, or names one that is not there, answers for nothing.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from app.store import job_table
from app.store.entry_check import not_as_chained
from app.store.job_table import ENTRIES_MAX, JobKey, JobSpan
from ledger.errors import ChainDamagedError
from ledger.machines.jobs import JobState
from ledger.verification.verdict import Break

if TYPE_CHECKING:
    from app.store import Connection
    from app.store.entry_check import EntryCheck
    from app.store.job_table import EntryRow, JobClaim
    from app.store.reads import JobRows, ListedRow

LARGE_JOBS_MAX: Final = 1000
"""Jobs of more than ``ENTRIES_MAX`` entries whose states are remembered; the oldest is evicted first."""
LARGE_JOBS_A_PAGE_MAX: Final = 5
"""Most jobs of a page that are folded in parts: behind them the page ends, and another follows."""


class DamagedJob(NamedTuple):
    """A job of a list of which something stored is not what was chained."""

    job_id: str
    error: ChainDamagedError

    def shown(self) -> dict[str, str]:
        """As the list names it."""
        return {"job_id": self.job_id, "detail": str(self.error)}


class _Known(NamedTuple):
    state: JobState
    seq: int
    """Of the last entry that is part of the state."""


class FoldedJobs:
    """Folds the entries of jobs. ``doubt`` takes jobs whose rows in the job table are false, ``report`` the damage that
    the answer does not name."""

    def __init__(
        self,
        check: EntryCheck,
        doubt: Callable[[str, str], None],
        report: Callable[[ChainDamagedError, str], object],
    ) -> None:
        self._check = check
        self._doubt = doubt
        self._report = report
        self._large: OrderedDict[JobKey, _Known] = OrderedDict()

    def known_seq(self, tenant_id: str, job_id: str) -> int:
        """Up to which seq the entries of the job need not be read: 0 of most."""
        known = self._large.get((tenant_id, job_id))
        return 0 if known is None else known.seq

    async def state_of(self, connection: Connection, tenant_id: str, job_id: str, rows: JobRows) -> JobState | None:
        """What the job is; None where there is none. ``rows`` begin behind ``known_seq``.

        Raises:
            ChainDamagedError: an entry is not what was chained, or the row in the job table is false.
        """
        state, last_seq = await self._folded(connection, JobSpan(tenant_id, job_id), rows.entries)
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
        spans, entries, are_checked = await self._entries(connection, tenant_id, [row.job_id for row in rows], to_seq)
        states: list[JobState] = []
        met: list[DamagedJob] = []
        large = 0
        for number, (row, span, of_job) in enumerate(zip(rows, spans, entries, strict=True)):
            large += len(of_job) > ENTRIES_MAX
            if large > LARGE_JOBS_A_PAGE_MAX:
                return states, met, number
            try:
                if are_checked and len(of_job) <= ENTRIES_MAX:
                    state, last_seq = self._merged(span, of_job)
                else:
                    state, last_seq = await self._folded(connection, span, of_job, are_checked=are_checked)
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
        spans, entries, are_checked = await self._entries(connection, tenant_id, [job_id for job_id, _ in rows], to_seq)
        met: list[ChainDamagedError] = []
        for (job_id, claim), span, of_job in zip(rows, spans, entries, strict=True):
            try:
                state, last_seq = await self._folded(connection, span, of_job, are_checked=are_checked)
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
    ) -> tuple[list[JobSpan], list[list[EntryRow]], bool]:
        """What is to be read of each job, its entries, and whether all of them are what was chained: of a page that is
        whole, as nearly all are, no job is looked at by itself."""
        spans = [JobSpan(tenant_id, job_id, self.known_seq(tenant_id, job_id), to_seq) for job_id in job_ids]
        entries = await job_table.entries_of(connection, spans) if spans else []
        try:
            await self._check.require(connection, tenant_id, [entry for of_job in entries for entry in of_job])
        except ChainDamagedError:
            return spans, entries, False
        return spans, entries, True

    async def _folded(
        self, connection: Connection, span: JobSpan, entries: Sequence[EntryRow], *, are_checked: bool = False
    ) -> tuple[JobState | None, int]:
        """The fold of what is known of the job and of ``entries``, and the seq of the last of them."""
        if not are_checked:
            await self._check.require(connection, span.tenant_id, entries)
        state, last_seq = self._merged(span, entries)
        if len(entries) > ENTRIES_MAX:
            rest = span._replace(after_seq=last_seq)
            state = await job_table.fold(connection, self._check, rest, state)
            last_seq = max(last_seq, state.last_seq if state is not None else 0)
            if state is not None:
                self._remember((span.tenant_id, span.job_id), _Known(state._replace(workflow={}), last_seq))
        return state, last_seq

    def _merged(self, span: JobSpan, entries: Sequence[EntryRow]) -> tuple[JobState | None, int]:
        """As ``_folded``, of entries that were checked, and none of those behind them."""
        known = self._large.get((span.tenant_id, span.job_id))
        state, last_seq = (None, 0) if known is None else known
        state = job_table.folded(span.tenant_id, span.job_id, state, entries)
        return state, entries[-1][0] if entries else last_seq

    def _remember(self, key: JobKey, known: _Known) -> None:
        self._large[key] = known
        if len(self._large) > LARGE_JOBS_MAX:
            self._large.popitem(last=False)

    def _compare(self, tenant_id: str, job_id: str, claim: JobClaim, state: JobState | None) -> None:
        found = claim.break_in(job_id, state)
        if found is not None:
            self._doubt(tenant_id, job_id)
            raise not_as_chained(tenant_id, found)


def _not_stored(tenant_id: str, state: JobState) -> ChainDamagedError:
    detail = f"job {state.job_id} has entries but is not stored"
    return not_as_chained(tenant_id, Break(state.last_seq, "projection", detail))
