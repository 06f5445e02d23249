"""What tasks of a verification hand on: rows of one shape, most of them a plain value in MessagePack.

A row of ``number`` belongs to that range of its tenant; ``place`` orders rows of one kind within it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Final, NamedTuple

import msgspec
import pyarrow as pa

from ledger.verification.commitment_check import CommitmentRow, PromisedRow
from ledger.verification.verdict import Break
from pipeline import arrow
from pipeline.arrow import ddl_of, lists_of

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
