"""The tasks that read rows: each checks one range, and folds the jobs in it as far as the range goes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

import pyarrow as pa

from ledger.errors import ArchiveInvalidError, ArchiveSignatureError
from ledger.machines import job_parts
from ledger.machines.job_parts import JobParts
from ledger.verification import ENTRY_COLUMNS
from ledger.verification.projection_check import FOLD_COLUMNS
from ledger.verification.range_check import RangeChecker, opened_for
from ledger.verification.range_summary import RangeTask
from ledger.verification.verdict import Break, Findings
from pipeline.arrow import rows_of
from pipeline.places import Piece, PieceReader
from pipeline.sent_keys import keyring_of
from pipeline.verify.columns import check_batch
from pipeline.verify.task_rows import BREAK, JOBS, PART, REFUSED, STORED, SUMMARY, Refusal, TaskRow, batched, encode
from signing.snapshot import open_snapshot

if TYPE_CHECKING:
    from pyspark import Accumulator

JOBS_HELD_MAX: Final = 20_000
"""Jobs whose states a task holds before it hands them on: some tens of megabytes."""
_FOLDED: Final = frozenset(FOLD_COLUMNS)


@dataclass(frozen=True)
class CheckRanges:
    """Checks a piece as its task says. Travels to the workers."""

    tasks: Mapping[tuple[str, int | None], RangeTask]
    """By tenant and first seq of the piece."""
    keys: str | None
    """The keyring as JSON; without one signatures are not judged."""
    with_jobs: bool
    """Whether to fold the jobs."""
    passed: Accumulator[int] | None = None
    """Counts entries."""

    def __call__(self, piece: Piece, reader: PieceReader) -> Iterator[pa.RecordBatch]:
        return batched(self._told(self.tasks[piece.tenant_id, piece.from_seq], reader))

    def _told(self, task: RangeTask, reader: PieceReader) -> Iterator[TaskRow]:
        try:
            yield from self._rows(task, reader)
        except ArchiveInvalidError as error:
            refusal = Refusal(isinstance(error, ArchiveSignatureError), str(error), error.seq)
            yield TaskRow(task.tenant_id, REFUSED, task.number, 0, None, encode(refusal))

    def _rows(self, task: RangeTask, reader: PieceReader) -> Iterator[TaskRow]:
        breaks: list[Break] = []
        opener = partial(open_snapshot, keyring=keyring_of(self.keys))
        findings = Findings(breaks.append)
        snapshots = [row for batch in reader.snapshots() for row in rows_of(batch)]
        checker = RangeChecker(task, opened_for(task, snapshots, opener, findings), findings)
        jobs, place = JobParts(), 0
        for batch in reader.entries():
            check_batch(checker, batch)
            if self.with_jobs:
                jobs.add([_column(name, batch) for name in ENTRY_COLUMNS])
            if len(jobs) >= JOBS_HELD_MAX:
                yield from _parts(task, place, jobs)
            if self.passed is not None:
                self.passed.add(batch.num_rows)
            yield from _breaks(task, breaks)
            place += 1
        yield from _parts(task, place, jobs)
        for tiles in checker.tiles():
            stored_tiles = reader.tiles(*tiles)
            if stored_tiles is None:
                break
            checker.compare_tiles(tiles, stored_tiles)
        summary = checker.finish()
        yield from _breaks(task, breaks)
        yield TaskRow(task.tenant_id, SUMMARY, task.number, 0, None, summary.encode())


def read_jobs(piece: Piece, reader: PieceReader) -> Iterator[pa.RecordBatch]:
    """The stored jobs of the tenant whose first piece this is, where its ledger stores any."""
    return batched(_stored(piece.tenant_id, reader))


def _stored(tenant_id: str, reader: PieceReader) -> Iterator[TaskRow]:
    batches = reader.jobs()
    if batches is None:
        return
    nothing = Findings().found()
    yield TaskRow(tenant_id, JOBS, -1, 0, None, encode((nothing, nothing)))
    place = 0
    for batch in batches:
        for row in rows_of(batch):
            job_id = row[0] if isinstance(row[0], str) else None
            yield TaskRow(tenant_id, STORED, 0, place, job_id, encode(row))
            place += 1


def _parts(task: RangeTask, place: int, jobs: JobParts) -> Iterator[TaskRow]:
    for state in jobs.take():
        yield TaskRow(task.tenant_id, PART, task.number, place, state.job_id, job_parts.encode(state))


def _breaks(task: RangeTask, breaks: list[Break]) -> Iterator[TaskRow]:
    """Those found since the last call."""
    found, breaks[:] = [*breaks], []
    for each in found:
        yield TaskRow(task.tenant_id, BREAK, task.number, 0, None, encode(each))


def _column(name: str, batch: pa.RecordBatch) -> list[object]:
    """A column that folding asks for, nothing of the others."""
    return batch.column(name).to_pylist() if name in _FOLDED else []
