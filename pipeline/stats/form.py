"""The form of a line in a stats file (docs/formats/stats.md), strictly, by the types that ``POST /v1/stats`` asks for.

Spark's own reader of JSON would pass over text behind the object and bytes that are no UTF-8, and make names of numbers
and objects. What is not known is passed over, so that a newer node may say more.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import datetime
from typing import Annotated, Any, Final

import msgspec
import pyarrow as pa
from msgspec import Meta

from ledger.canonical import INTEGER_MAX
from ledger.names import JOB_ID, TENANT_ID

LINE_BYTES_MAX: Final = 64 << 10
"""A node writes a few bytes more than 8 KiB at most."""
NAME_CHARACTERS_MAX: Final = 256
NAMES_MAX: Final = 32
"""Names in ``counts``, and in ``values``."""
WEIGHT_MAX: Final = 1_000_000

Tenant = Annotated[str, Meta(pattern=rf"^({TENANT_ID})\Z")]
Job = Annotated[str, Meta(pattern=rf"^({JOB_ID})\Z")]
Name = Annotated[str, Meta(min_length=1, max_length=NAME_CHARACTERS_MAX)]
Measured = Annotated[str, Meta(pattern=r"^[a-z][a-z0-9_]{0,63}\Z")]
Time = Annotated[datetime, Meta(tz=True)]
Count = Annotated[int, Meta(ge=0, le=INTEGER_MAX)]


class Report(msgspec.Struct, frozen=True):
    """What one line says."""

    tenant_id: Tenant
    job_id: Job
    dc_id: Name
    time: Time
    received: Time
    weight: Annotated[int, Meta(ge=1, le=WEIGHT_MAX)]
    workflow_id: Name | None = None
    completed: Count | None = None
    failed: Count | None = None
    interval_ms: Count | None = None
    counts: Annotated[dict[Measured, Count], Meta(max_length=NAMES_MAX)] = {}
    values: Annotated[dict[Measured, float], Meta(max_length=NAMES_MAX)] = {}


REPORT: Final = """struct<
    tenant_id: string, job_id: string, dc_id: string, workflow_id: string, time: timestamp, weight: bigint,
    completed: bigint, failed: bigint, counts: map<string, bigint>, values: map<string, double>
>"""
_ARROW: Final = pa.struct(
    [
        *((name, pa.string()) for name in ("tenant_id", "job_id", "dc_id", "workflow_id")),
        ("time", pa.timestamp("us", tz="UTC")),
        *((name, pa.int64()) for name in ("weight", "completed", "failed")),
        ("counts", pa.map_(pa.string(), pa.int64())),
        ("values", pa.map_(pa.string(), pa.float64())),
    ]
)
_decode = msgspec.json.Decoder(Report).decode


def with_reports(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """``batches`` with a last column ``report``: what the column ``line`` says, null where it is no report."""
    for batch in batches:
        reports = [_row(report_of(line)) for line in batch.column("line").to_pylist()]
        yield batch.append_column("report", pa.array(reports, _ARROW))


def report_of(line: bytes) -> Report | None:
    """The report that ``line`` is; None where it is not of the form."""
    if len(line) > LINE_BYTES_MAX:
        return None
    try:
        return _decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def _row(report: Report | None) -> dict[str, Any] | None:
    if report is None:
        return None
    return {
        **{name: getattr(report, name) for name in _ARROW.names},
        "counts": list(report.counts.items()),
        "values": list(report.values.items()),
    }
