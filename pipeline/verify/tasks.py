"""What tasks of a verification hand on: rows of one shape, most of them a plain value in MessagePack.

A row of ``number`` belongs to that range of its tenant; ``place`` orders rows of one kind within it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, groupby
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec
import pyarrow as pa

from ledger.errors import ArchiveInvalidError, ArchiveSignatureError
from ledger.machines import job_parts
from ledger.machines.job_parts import JobParts
from ledger.verification.commitment_check import CommitmentJudge
from ledger.verification.projection_check import JobJudge, JobsFound, StoredJob, merged
from ledger.verification.range_check import RangeChecker, RangeSummary, RangeTask, opened_for
from ledger.verification.range_fold import ChainBounds, CheckAgain, fold
from ledger.verification.reader import CommitmentRow, PromisedRow, of_commitments
from ledger.verification.verdict import Break, Findings, is_number
from pipeline import arrow
from pipeline.arrow import ArrowEntries, ddl_of, lists_of, rows_of
from pipeline.keys import keyring_of
from pipeline.places import Piece, PieceReader
from pipeline.places.protocol import SEQ_MIN
from signing.snapshot import open_snapshot

if TYPE_CHECKING:
    from pyspark import Accumulator


SUMMARY: Final = "summary"
"""A ``RangeSummary``."""
BREAK: Final = "break"
"""A ``Break``."""
CANDIDATE: Final = "candidate"
"""A ``Break`` of the projection, if the chain itself is whole."""
PART: Final = "part"
"""The state of ``job_id`` folded from some of its entries."""
STORED: Final = "stored"
"""A stored job, as its columns."""
JOBS: Final = "jobs"
"""What comparing some of the jobs came to, as ``JobsFound``."""
COMMITMENT: Final = "commitment"
"""What judging verdicts takes: a ``Judged``. They belong to no range; ``place`` is the seq."""
VERDICT: Final = "verdict"
"""A ``Verdict``; of a bundle its verdict object, as JSON."""
REFUSED: Final = "refused"
"""A ``Refusal``: what holds the rows does not hold, so nothing in it says anything."""
AGAIN: Final = "again"
"""A ``RangeTask`` to be done again before there can be a verdict."""

_SCHEMA: Final = pa.schema(
    [
        ("tenant_id", pa.string()),
        ("kind", pa.string()),
        ("number", pa.int64()),
        ("place", pa.int64()),
        ("job_id", pa.string()),
        ("data", pa.binary()),
    ]
)
DDL: Final = ddl_of(_SCHEMA)

_BREAK_DECODER: Final = msgspec.msgpack.Decoder(Break)


class Refusal(NamedTuple):
    """Why the rows of a tenant were not looked at: an ``ArchiveInvalidError``."""

    is_signature: bool
    message: str
    seq: int


class Judged(NamedTuple):
    """One entry or row of the table of commitments, or, before all of these, how far the table has followed."""

    entry: CommitmentRow | None = None
    promised: PromisedRow | None = None
    followed_seq: int = 0


class TaskRow(NamedTuple):
    """One row of ``DDL``."""

    tenant_id: str
    kind: str
    number: int
    place: int
    job_id: str | None
    data: bytes


def batched(rows: Iterable[TaskRow]) -> Iterator[pa.RecordBatch]:
    """``rows`` in batches that are bounded in number and bytes."""
    return arrow.batched(rows, _SCHEMA, lambda row: len(row.data))


def rows_in(batches: Iterable[pa.RecordBatch]) -> Iterator[TaskRow]:
    """The rows of batches that Spark hands to a task."""
    for batch in batches:
        yield from map(TaskRow, *lists_of(batch))


def encode(value: Any) -> bytes:
    """A plain value."""
    return msgspec.msgpack.encode(value)


def decode_break(data: bytes) -> Break:
    """What ``encode`` gave of a break."""
    return _BREAK_DECODER.decode(data)


# --- tasks ----------------------------------------------------------------------------------------


JOBS_HELD_MAX: Final = 20_000
"""Jobs whose states a task holds before it hands them on: some tens of megabytes."""
JOBS_SORTED_BY: Final = ("tenant_id", "job_id", "kind", "number", "place")
"""Parts come in chain order, stored jobs in the order that they are stored in."""
CHAINS_SORTED_BY: Final = ("tenant_id", "kind", "number", "place")
ROWS_FOLDED: Final = (SUMMARY, JOBS, REFUSED, COMMITMENT)
"""Kinds of rows that are folded."""
_JOBS_DECODER: Final = msgspec.msgpack.Decoder(JobsFound)
_JUDGED_DECODER: Final = msgspec.msgpack.Decoder(Judged)


@dataclass(frozen=True)
class CheckRanges:
    """Checks a piece as its task says. Travels to the workers."""

    tasks: Mapping[tuple[str, int | None], RangeTask]
    """By tenant and first seq of the piece."""
    keys: str | None
    """The keyring as JSON; without one signatures are not judged."""
    with_jobs: bool
    """Whether to fold the jobs."""
    with_commitments: bool = True
    """Whether to hand on what verdicts are judged by."""
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
        jobs, place = JobParts(reader.followed_seq() if self.with_jobs else 0), 0
        for batch in reader.entries():
            known = checker.commitments
            if checker.check_packed(ArrowEntries(batch)) is None:
                checker.check([*rows_of(batch)])
            if self.with_commitments and checker.commitments > known:
                yield from _commitments(task.tenant_id, of_commitments([*rows_of(batch)]))
            if self.with_jobs:
                jobs.add(lists_of(batch))
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
    """What is stored of jobs and commitments of the tenant whose first piece this is, where its ledger stores any."""
    return batched(chain(_stored(piece.tenant_id, reader), _promised(piece.tenant_id, reader)))


def _stored(tenant_id: str, reader: PieceReader) -> Iterator[TaskRow]:
    batches = reader.jobs()
    if batches is None:
        return
    yield TaskRow(tenant_id, JOBS, -1, 0, None, encode(JobJudge().outcome()))
    place = 0
    for batch in batches:
        for row in rows_of(batch):
            job_id = row[0] if isinstance(row[0], str) else None
            yield TaskRow(tenant_id, STORED, 0, place, job_id, encode(row))
            place += 1


def _promised(tenant_id: str, reader: PieceReader) -> Iterator[TaskRow]:
    header = Judged(followed_seq=reader.followed_seq())
    yield TaskRow(tenant_id, COMMITMENT, -1, SEQ_MIN, None, encode(header))
    for batch in reader.promised():
        for row in map(PromisedRow._make, rows_of(batch)):
            place = row.seq if is_number(row.seq) else 0
            yield TaskRow(tenant_id, COMMITMENT, -1, place, None, encode(Judged(promised=row)))


def _commitments(tenant_id: str, entries: Sequence[CommitmentRow]) -> Iterator[TaskRow]:
    for entry in entries:
        if is_number(entry.seq):
            yield TaskRow(tenant_id, COMMITMENT, -1, entry.seq, None, encode(Judged(entry=entry)))


def _parts(task: RangeTask, place: int, jobs: JobParts) -> Iterator[TaskRow]:
    for state in jobs.take():
        yield TaskRow(task.tenant_id, PART, task.number, place, state.job_id, job_parts.encode(state))


def _breaks(task: RangeTask, breaks: list[Break]) -> Iterator[TaskRow]:
    """Those found since the last call."""
    found, breaks[:] = [*breaks], []
    for each in found:
        yield TaskRow(task.tenant_id, BREAK, task.number, 0, None, encode(each))


def compare_jobs(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Rows of one partition, which has all rows of every job in it, sorted by ``JOBS_SORTED_BY``."""
    return batched(_compared(rows_in(batches)))


def _compared(rows: Iterator[TaskRow]) -> Iterator[TaskRow]:
    for tenant_id, of_tenant in groupby(rows, key=lambda row: row.tenant_id):
        comparing = _Comparing(tenant_id)
        for job_id, of_job in groupby(of_tenant, key=lambda row: row.job_id):
            yield from comparing.compare(job_id, of_job)
        yield from comparing.finish()


class _Comparing:
    """Compares jobs of one tenant."""

    def __init__(self, tenant_id: str) -> None:
        self._tenant_id = tenant_id
        self._breaks: list[Break] = []
        self._candidates: list[Break] = []
        self._judge = JobJudge(self._breaks.append, self._candidates.append)
        self._is_any_compared = False

    def compare(self, job_id: str | None, rows: Iterator[TaskRow]) -> Iterator[TaskRow]:
        parts, stored = [], []
        for row in rows:
            if row.kind == PART:
                parts.append(job_parts.decode(row.data))
            elif row.kind == STORED:
                job = StoredJob(*msgspec.msgpack.decode(row.data))
                if self._judge.has_place(job):
                    stored.append(job)
                self._is_any_compared = True
            else:
                yield row
        if job_id is not None:
            self._judge.compare_all(job_parts.merged(parts), stored)
            self._is_any_compared = True
        yield from self._found(BREAK, self._breaks)
        yield from self._found(CANDIDATE, self._candidates)

    def finish(self) -> Iterator[TaskRow]:
        """No job of the tenant follows in this partition."""
        if self._is_any_compared:
            yield TaskRow(self._tenant_id, JOBS, -1, 0, None, encode(self._judge.outcome()))

    def _found(self, kind: str, breaks: list[Break]) -> Iterator[TaskRow]:
        for each in breaks:
            # They belong to no range, so they stay when one is checked again.
            yield TaskRow(self._tenant_id, kind, -1, 0, None, encode(each))
        breaks.clear()


class PlannedChain(NamedTuple):
    """One tenant's chain as it was planned."""

    ends: ChainBounds
    tasks: list[RangeTask]


@dataclass(frozen=True)
class FoldChains:
    """Folds the rows of one partition, which has all of every tenant in it, sorted by ``CHAINS_SORTED_BY``."""

    chains: Mapping[str, PlannedChain]

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return batched(self._rows(rows_in(batches)))

    def _rows(self, rows: Iterator[TaskRow]) -> Iterator[TaskRow]:
        for tenant_id, of_tenant in groupby(rows, key=lambda row: row.tenant_id):
            yield from _folded(self.chains[tenant_id], of_tenant)


def _folded(chain: PlannedChain, rows: Iterator[TaskRow]) -> Iterator[TaskRow]:
    tenant_id = chain.ends.tenant_id
    jobs: JobsFound | None = None
    breaks: list[Break] = []
    candidates: list[Break] = []
    assert COMMITMENT < JOBS < REFUSED < SUMMARY, "rows come sorted by kind"
    for kind, of_kind in groupby(rows, key=lambda row: row.kind):
        if kind == COMMITMENT:
            jobs = _judged(of_kind, candidates)
            continue
        if kind == JOBS:
            found = merged(_JOBS_DECODER.decode(row.data) for row in of_kind)
            jobs = found if jobs is None else merged((jobs, found))
            continue
        if kind == REFUSED:
            # What the lowest range met first is what reading from end to end would have met.
            yield next(of_kind)
            return
        # One summary after the other: they are as many as a long chain has ranges.
        summaries = (RangeSummary.decode(row.data) for row in of_kind)
        outcome = fold(chain.ends, zip(chain.tasks, summaries, strict=True), jobs, breaks.append)
        if isinstance(outcome, CheckAgain):
            for task in outcome.tasks:
                yield TaskRow(tenant_id, AGAIN, task.number, 0, None, encode(task))
            return
        for each in breaks:
            yield TaskRow(tenant_id, BREAK, -1, 0, None, encode(each))
        for each in candidates:
            yield TaskRow(tenant_id, CANDIDATE, -1, 0, None, encode(each))
        yield TaskRow(tenant_id, VERDICT, 0, 0, None, encode(outcome))


def _judged(rows: Iterator[TaskRow], candidates: list[Break]) -> JobsFound:
    """What judging the verdicts of one chain came to; rows come by seq."""
    judge = CommitmentJudge(0)
    for number, row in enumerate(rows):
        entry, promised, followed_seq = _JUDGED_DECODER.decode(row.data)
        if number == 0:
            judge = CommitmentJudge(followed_seq, candidates.append)
        if entry is not None:
            judge.add_entry(entry)
        elif promised is not None:
            judge.add_promised(promised)
    return judge.finish()
