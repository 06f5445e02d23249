"""Jobs of many entries: folded once, in parts, and remembered, so that only what was chained since is read.

Reads of jobs and the lookups of writes share what is remembered. Each part counts once it is folded: a fold that is
ended, as by a timeout, goes on there the next time.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from app.store import job_table
from app.store.job_table import ENTRIES_MAX, EntryRow, JobKey, JobSpan
from ledger.machines.jobs import JobState

if TYPE_CHECKING:
    from app.store import Connection
    from app.store.entry_check import EntryCheck

LARGE_JOBS_MAX: Final = 1000
"""Jobs of more than ``ENTRIES_MAX`` entries whose states are remembered; the least recently folded is evicted first."""


class Folded(NamedTuple):
    """The entries of a job up to one of them, folded.

    Entries behind it MUST be folded onto the value that was taken before they were read: what is remembered of the job
    may be evicted or replaced meanwhile.
    """

    state: JobState | None
    seq: int
    """Of the last entry that is part of the state."""

    def onto(self, span: JobSpan, entries: Sequence[EntryRow]) -> Folded:
        """With ``entries`` of the job, which were checked.

        Raises:
            ChainDamagedError: one of them says nothing that can be read.
        """
        state = job_table.folded(span.tenant_id, span.job_id, self.state, entries)
        return Folded(state, entries[-1][0] if entries else self.seq)


_NOTHING: Final = Folded(None, 0)


class LargeJobs:
    """The folds of the jobs of many entries that one node remembers. Belongs to one event loop."""

    def __init__(self) -> None:
        self._folds: OrderedDict[JobKey, Folded] = OrderedDict()

    def remembered(self, tenant_id: str, job_id: str) -> Folded:
        """What need not be read again of the job: nothing of most."""
        return self._folds.get((tenant_id, job_id), _NOTHING)

    async def fold(self, connection: Connection, check: EntryCheck, span: JobSpan, known: Folded) -> Folded:
        """``known`` with the entries of ``span`` behind it, read in parts.

        Raises:
            ChainDamagedError: one of them is not what was chained.
        """
        while True:
            self._remember((span.tenant_id, span.job_id), known)
            (entries,) = await job_table.entries_of(connection, [span._replace(after_seq=known.seq)])
            await check.require(connection, span.tenant_id, entries)
            known = known.onto(span, entries)
            if len(entries) <= ENTRIES_MAX:
                self._remember((span.tenant_id, span.job_id), known)
                return known

    def _remember(self, key: JobKey, folded: Folded) -> None:
        if folded.state is None:
            return
        # No answer shows workflows.
        self._folds[key] = folded._replace(state=folded.state._replace(workflow={}))
        self._folds.move_to_end(key)
        if len(self._folds) > LARGE_JOBS_MAX:
            self._folds.popitem(last=False)
