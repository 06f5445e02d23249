"""Output of verification tasks: rows of one shape, most with a value in MessagePack.

A row of ``number`` belongs to that range of its chain; ``place`` orders rows of one kind within it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Final, NamedTuple

import pyarrow as pa
from msgspec.msgpack import decode, encode

from ledger.errors import ArchiveInvalidError, ArchiveSignatureError
from ledger.machines import jobs
from ledger.machines.jobs import JobParts
from ledger.machines.retention import Floor
from ledger.verification.commitment_check import CommitmentJudge
from ledger.verification.projection_check import StoredJob, compare, has_id
from ledger.verification.range_check import RangeChecker, RangeSummary, RangeTask, opened_for
from ledger.verification.range_fold import ChainBounds, fold
from ledger.verification.reader import CommitmentRow, PromisedRow, of_commitments
from ledger.verification.verdict import Break, Findings, Found, is_number
from pipeline import arrow
from pipeline.arrow import ArrowEntries, ddl_of, lists_of, rows_of
from pipeline.places import Piece, PieceReader
from pipeline.places.protocol import SEQ_MIN
from signing.callers import judge_of
from signing.keys import Keyring
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
"""The result of comparing some of the jobs: a ``Found``."""
COMMITMENT: Final = "commitment"
"""Input for judging commitments: a ``Judged``. It belongs to no range; ``place`` is the seq."""
VERDICT: Final = "verdict"
"""A ``Verdict``; of a bundle its verdict object, as JSON."""
REFUSED: Final = "refused"
"""A ``Refusal``: the container of the rows is invalid, so its rows cannot be trusted."""

_SCHEMA: Final = pa.schema(
    [
        ("chain", pa.string()),
        ("kind", pa.string()),
        ("number", pa.int64()),
        ("place", pa.int64()),
        ("job_id", pa.string()),
        ("data", pa.binary()),
    ]
)
DDL: Final = ddl_of(_SCHEMA)


Refusal = tuple[bool, str, int]
"""Why the rows of a tenant were not checked: whether the error is an ``ArchiveSignatureError``, else
``ArchiveInvalidError``; its message; and its seq."""


class Judged(NamedTuple):
    """One entry or row of the table of commitments; or, before all of these, the last seq that the table covers."""

    entry: CommitmentRow | None = None
    promised: PromisedRow | None = None
    followed_seq: int = 0


class TaskRow(NamedTuple):
    """One row of ``DDL``."""

    chain: str
    """The text of a ``ChainName``."""
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


# --- tasks ----------------------------------------------------------------------------------------


JOBS_HELD_MAX: Final = 20_000
"""Most job states that a task holds before it emits them: some tens of megabytes."""
JOBS_SORTED_BY: Final = ("chain", "job_id", "kind", "number", "place")
"""Parts are in chain order, stored jobs in storage order."""
CHAINS_SORTED_BY: Final = ("chain", "kind", "number", "place")
ROWS_FOLDED: Final = (SUMMARY, JOBS, REFUSED, COMMITMENT)
"""Kinds of rows to fold."""


@dataclass(frozen=True)
class CheckRanges:
    """Checks a piece as its task says. Travels to the workers."""

    tasks: Mapping[tuple[str, int | None], RangeTask]
    """By chain and first seq of the piece."""
    keyrings: Mapping[str | None, Keyring | None]
    """By ledger. If None, signatures are not verified."""
    with_jobs: bool
    """Whether to fold the jobs."""
    passed: Accumulator[int] | None = None
    """Counts entries."""

    def __call__(self, piece: Piece, reader: PieceReader) -> Iterator[pa.RecordBatch]:
        task = self.tasks.get((piece.chain, piece.from_seq))
        return batched(self._left(piece, reader) if task is None else self._rows(piece, task, reader))

    def _left(self, piece: Piece, reader: PieceReader) -> Iterator[TaskRow]:
        """The jobs of entries that left and are still stored."""
        jobs = JobParts(reader.jobs_seq(), reader.exclusions())
        place = piece.bounds[0]
        for batch in reader.entries():
            yield from self._commitments(piece.chain, of_commitments([*rows_of(batch)]))
            jobs.add(lists_of(batch))
            if len(jobs) >= JOBS_HELD_MAX:
                yield from _parts(piece.chain, -1, place, jobs)
            place += 1
        yield from _parts(piece.chain, -1, place, jobs)

    def _commitments(self, chain: str, entries: Sequence[CommitmentRow]) -> Iterator[TaskRow]:
        for entry in entries:
            if is_number(entry.seq):
                yield TaskRow(chain, COMMITMENT, -1, entry.seq, None, encode(Judged(entry=entry)))

    def _rows(self, piece: Piece, task: RangeTask, reader: PieceReader) -> Iterator[TaskRow]:
        breaks: list[Break] = []
        findings = Findings(breaks.append)
        try:
            snapshots = [row for batch in reader.snapshots() for row in rows_of(batch)]
            keyring = self.keyrings[piece.ledger]
            opener = partial(open_snapshot, keyring=keyring)
            opened = opened_for(task, snapshots, opener, findings)
            checker = RangeChecker(task, opened, findings, judge_of(keyring))
            yield from self._entries(checker, piece.chain, reader, breaks)
            for tiles in checker.tiles():
                if (stored_tiles := reader.tiles(*tiles)) is None:
                    break
                checker.compare_tiles(tiles, stored_tiles)
            summary = encode(checker.finish())
            yield from _breaks(piece.chain, breaks)
            yield TaskRow(piece.chain, SUMMARY, task.number, 0, None, summary)
        except ArchiveInvalidError as error:
            refusal: Refusal = (isinstance(error, ArchiveSignatureError), str(error), error.seq)
            yield TaskRow(piece.chain, REFUSED, task.number, 0, None, encode(refusal))

    def _entries(
        self, checker: RangeChecker, chain: str, reader: PieceReader, breaks: list[Break]
    ) -> Iterator[TaskRow]:
        jobs = JobParts(reader.jobs_seq(), reader.exclusions()) if self.with_jobs else JobParts(0)
        place = 0
        for batch in reader.entries():
            known = checker.summary.commitments
            if checker.check_packed(ArrowEntries(batch)) is None:
                checker.check([*rows_of(batch)])
            if checker.summary.commitments > known:
                yield from self._commitments(chain, of_commitments([*rows_of(batch)]))
            if self.with_jobs:
                jobs.add(lists_of(batch))
            if len(jobs) >= JOBS_HELD_MAX:
                yield from _parts(chain, checker.task.number, place, jobs)
            if self.passed is not None:
                self.passed.add(batch.num_rows)
            yield from _breaks(chain, breaks)
            place += 1
        yield from _parts(chain, checker.task.number, place, jobs)


def read_jobs(piece: Piece, reader: PieceReader) -> Iterator[pa.RecordBatch]:
    """The stored jobs and commitments of the tenant, read with its first piece, if the ledger stores any."""
    return batched(_stored(piece.chain, reader))


def _stored(chain: str, reader: PieceReader) -> Iterator[TaskRow]:
    if (jobs := reader.jobs()) is not None:
        yield TaskRow(chain, JOBS, -1, 0, None, encode(Found()))
        for place, row in enumerate(row for batch in jobs for row in rows_of(batch)):
            yield TaskRow(chain, STORED, 0, place, row[0] if isinstance(row[0], str) else None, encode(row))
    yield TaskRow(chain, COMMITMENT, -1, SEQ_MIN, None, encode(Judged(followed_seq=reader.followed_seq())))
    for promised in (PromisedRow._make(row) for batch in reader.promised() for row in rows_of(batch)):
        place = promised.seq if is_number(promised.seq) else 0
        yield TaskRow(chain, COMMITMENT, -1, place, None, encode(Judged(promised=promised)))


def _parts(chain: str, number: int, place: int, parts: JobParts) -> Iterator[TaskRow]:
    return (TaskRow(chain, PART, number, place, state.job_id, jobs.encode_state(state)) for state in parts.take())


def _breaks(chain: str, breaks: list[Break], kind: str = BREAK) -> Iterator[TaskRow]:
    """Breaks found since the last call."""
    found, breaks[:] = [*breaks], []
    return (TaskRow(chain, kind, -1, 0, None, encode(each)) for each in found)


def compare_jobs(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Compare the jobs of one partition. It has all rows of each of its jobs, sorted by ``JOBS_SORTED_BY``."""
    return batched(_compared(rows_in(batches)))


def _compared(rows: Iterator[TaskRow]) -> Iterator[TaskRow]:
    for chain, of_chain in groupby(rows, key=lambda row: row.chain):
        breaks, is_any_compared = list[Break](), False
        findings = Findings(breaks.append)
        for job_id, of_job in groupby(of_chain, key=lambda row: row.job_id):
            parts, placed = [], []
            is_any_compared |= job_id is not None
            for row in of_job:
                if row.kind == PART:
                    parts.append(jobs.decode_state(row.data))
                elif row.kind == STORED:
                    is_any_compared = True
                    # Rows without an id are not kept; a forged table may have millions.
                    if has_id(job := StoredJob(*decode(row.data)), findings):
                        placed.append(job)
                else:
                    yield row
            if job_id is not None:
                compare(jobs.merge_states(parts), placed[0] if placed else None, findings)
                for job in placed[1:]:
                    compare(None, job, findings)
            yield from _breaks(chain, breaks, CANDIDATE)
        if is_any_compared:
            yield TaskRow(chain, JOBS, -1, 0, None, encode(findings.found))


class PlannedChain(NamedTuple):
    """One tenant's chain as it was planned."""

    ends: ChainBounds
    tasks: list[RangeTask]


def fold_chains(chains: Mapping[str, PlannedChain], batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Fold the rows of one partition. It has all rows of each of its chains, sorted by ``CHAINS_SORTED_BY``."""
    by_chain = groupby(rows_in(batches), key=lambda row: row.chain)
    return batched(row for chain, rows in by_chain for row in _folded(chain, chains[chain], rows))


def _folded(chain: str, planned: PlannedChain, rows: Iterator[TaskRow]) -> Iterator[TaskRow]:
    jobs: list[Found] | None = None
    breaks: list[Break] = []
    candidates: list[Break] = []
    assert COMMITMENT < JOBS < REFUSED < SUMMARY, "rows come sorted by kind"
    for kind, of_kind in groupby(rows, key=lambda row: row.kind):
        if kind == COMMITMENT:
            jobs = [_judged(of_kind, candidates, planned.ends.floor)]
            continue
        if kind == JOBS:
            jobs = [*(jobs or ()), *(decode(row.data, type=Found) for row in of_kind)]
            continue
        if kind == REFUSED:
            # A sequential read would meet the refusal of the lowest range first.
            yield next(of_kind)
            return
        # One summary at a time: a long chain has many ranges.
        summaries = (decode(row.data, type=RangeSummary) for _, row in zip(planned.tasks, of_kind, strict=True))
        verdict = fold(planned.ends, summaries, jobs, breaks.append)
        yield from _breaks(chain, breaks)
        yield from _breaks(chain, candidates, CANDIDATE)
        yield TaskRow(chain, VERDICT, 0, 0, None, encode(verdict))


def _judged(rows: Iterator[TaskRow], candidates: list[Break], floor: Floor | None) -> Found:
    """The result of judging the commitments of one chain from its floor on; rows are in order of seq."""
    judge = CommitmentJudge(0)
    for number, row in enumerate(rows):
        entry, promised, followed_seq = decode(row.data, type=Judged)
        if number == 0:
            judge = CommitmentJudge(followed_seq, candidates.append, floor)
        if entry is not None:
            judge.add_entry(entry)
        elif promised is not None:
            judge.add_promised(promised)
    return judge.finish()
