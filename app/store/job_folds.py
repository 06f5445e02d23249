"""Folding the entries of jobs, for reads, lists, lookups before writes, and the watch.

Most jobs have few entries, which are read, recomputed and folded each time. A job of more than ``ENTRIES_MAX`` entries
is folded once, in parts, and remembered, so that only what was chained since is read. Each part is remembered once it
is folded: a fold that is ended, as by a timeout, goes on there the next time.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, Final, NamedTuple

from app.store import job_table
from app.store.job_table import ENTRIES_MAX, SEQ_MAX, EntryRow, JobKey, JobSpan
from app.store.rows import json_in
from ledger.errors import ChainDamagedError, InvalidInputError
from ledger.machines import jobs
from ledger.machines.jobs import JobState
from ledger.verification import ENTRY_COLUMNS

if TYPE_CHECKING:
    from app.store import Connection
    from app.store.entry_check import EntryCheck
    from ledger.hlc import Hlc

LARGE_JOBS_MAX: Final = 1000
"""Jobs of more than ``ENTRIES_MAX`` entries whose states are remembered; the least recently folded is evicted first."""

_HLC: Final = itemgetter(*map(ENTRY_COLUMNS.index, ("hlc_physical", "hlc_logical", "hlc_node")))
_FACTS: Final = itemgetter(
    *map(ENTRY_COLUMNS.index, ("seq", "hlc_physical", "hlc_logical", "hlc_node", "action", "payload_digest"))
)
_PAYLOAD: Final = ENTRY_COLUMNS.index("payload")


class Folded(NamedTuple):
    """The entries of a job up to ``seq``, folded.

    Entries behind it MUST be folded onto the value that was taken before they were read: what is remembered of the job
    may be evicted or replaced meanwhile.
    """

    state: JobState | None
    seq: int

    def onto(self, span: JobSpan, entries: Sequence[EntryRow], as_of: Hlc | None = None) -> Folded:
        """With ``entries`` of the job, which were checked; with those up to the HLC ``as_of`` if one is given.

        Raises:
            ChainDamagedError: one of them cannot be read.
        """
        folded = entries if as_of is None else [row for row in entries if _HLC(row) <= as_of]
        facts = [(*_FACTS(row), json_in(row[_PAYLOAD])) for row in folded]
        try:
            state = jobs.folded(span.job_id, self.state, facts)
        except InvalidInputError as error:
            raise ChainDamagedError(span.tenant_id, f"an entry of job {span.job_id} is none: {error}") from error
        return Folded(state, entries[-1][0] if entries else self.seq)


_NOTHING: Final = Folded(None, 0)


class ReadJob(NamedTuple):
    """The entries of ``span``, of which there may be more where it is a large job, and what they are folded onto."""

    span: JobSpan
    known: Folded
    entries: Sequence[EntryRow]

    @property
    def is_large(self) -> bool:
        """Whether there may be more entries than were read."""
        return len(self.entries) > ENTRIES_MAX


class JobFolds:
    """Folds jobs for one node, and remembers the large ones. Belongs to one event loop."""

    def __init__(self, check: EntryCheck) -> None:
        self.check = check
        self._folds: OrderedDict[JobKey, Folded] = OrderedDict()

    def remembered(self, tenant_id: str, job_id: str) -> Folded:
        """What need not be read again of the job: nothing of most."""
        return self._folds.get((tenant_id, job_id), _NOTHING)

    async def read(self, connection: Connection, wanted: Sequence[JobKey], to_seq: int = SEQ_MAX) -> list[ReadJob]:
        """What is to be folded of these jobs, up to ``to_seq``; ``ENTRIES_MAX`` + 1 entries of each at most."""
        known = [self.remembered(*job) for job in wanted]
        spans = [JobSpan(*job, each.seq, to_seq) for job, each in zip(wanted, known, strict=True)]
        entries = await job_table.entries_of(connection, spans) if spans else []
        return list(map(ReadJob, spans, known, entries))

    async def fold(
        self, connection: Connection, job: ReadJob, *, are_checked: bool = False, as_of: Hlc | None = None
    ) -> Folded:
        """All entries of the job's span, of which the caller may have checked those that were read; those up to the HLC
        ``as_of`` if one is given.

        Raises:
            ChainDamagedError: one of them is not what was chained.
        """
        span, folded, entries = job
        while True:
            if not are_checked:
                await self.check.require(connection, span.tenant_id, entries)
            folded = folded.onto(span, entries, as_of)
            if job.is_large and as_of is None:
                self._remember((span.tenant_id, span.job_id), folded)
            if len(entries) <= ENTRIES_MAX:
                return folded
            (entries,) = await job_table.entries_of(connection, [span._replace(after_seq=folded.seq)])
            are_checked = False

    async def state_at(self, connection: Connection, tenant_id: str, job_id: str, as_of: Hlc) -> JobState | None:
        """What the job was at the HLC ``as_of``.

        Raises:
            ChainDamagedError: an entry is not what was chained.
        """
        span = JobSpan(tenant_id, job_id)
        (entries,) = await job_table.entries_of(connection, [span])
        return (await self.fold(connection, ReadJob(span, _NOTHING, entries), as_of=as_of)).state

    def _remember(self, key: JobKey, folded: Folded) -> None:
        if folded.state is None:
            return
        # No answer shows workflows.
        self._folds[key] = folded._replace(state=folded.state._replace(workflow={}))
        self._folds.move_to_end(key)
        if len(self._folds) > LARGE_JOBS_MAX:
            self._folds.popitem(last=False)
