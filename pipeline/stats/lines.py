"""Lines of stats files, read and judged one by one: what a line is worth depends on nothing but itself and its file.

Which files there are, and which were read, is Spark's own to know: its source of files. A line is rejected, with the
first reason that holds::

    bad      no JSON object of the documented form (``Report``), or longer than any that a node writes
    ahead    its time, or the closing of its file, lies more than ``AHEAD_MAX_S`` past the clock of this run: it would
             end everybody's windows
    late     its file was closed, and so shown to readers, more than the watermark after its time

So the same lines are late in every run, in whichever order and with whichever others they are read. The form is that of
docs/formats/stats.md, strictly, by the types that ``POST /v1/stats`` asks for: Spark's own reader of JSON would pass
over text behind the object and bytes that are no UTF-8, and make names of numbers and objects. What is not known is
passed over, so that a newer node may say more.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from datetime import datetime
from typing import Annotated, Any, Final

import msgspec
import pyarrow as pa
from msgspec import Meta
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as fn

from ledger.canonical import INTEGER_MAX
from ledger.names import JOB_ID, TENANT_ID

AHEAD_MAX_S: Final = 300
"""How far past this machine's clock a time may lie that is believed."""
LINE_CHARACTERS_MAX: Final = 8192
"""As much is kept of a rejected line; a node writes no longer one."""
_OPTIONS: Final = {
    "lineSep": "\n",
    "pathGlobFilter": "*.ndjson",  # Names with a dot in front, of files that are still written, Spark passes over.
    "recursiveFileLookup": "true",
    "maxFileAge": "36500d",  # Or one file of a wrong clock would have all others passed over.
    "mapreduce.input.linerecordreader.line.maxlength": str(1 << 20),  # What is longer is never held.
}
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


def lines_of(spark: SparkSession, folder: str, files_a_batch_max: int) -> DataFrame:
    """``line``, ``file`` and ``at``, when that was closed, of all in ``folder``: whole files, the oldest first."""
    lines = spark.readStream.format("text").options(**_OPTIONS).option("maxFilesPerTrigger", files_a_batch_max)
    # Spark takes signs in a path for a pattern, and says a path as a URI, in which a plus is no space.
    path = fn.regexp_replace("_metadata.file_path", "^file:(//)?", "")
    return lines.load(re.sub(r"([\\*?\[\]{}])", r"\\\1", folder)).select(
        fn.col("value").cast("binary").alias("line"),
        fn.url_decode(fn.replace(path, fn.lit("+"), fn.lit("%2B"))).alias("file"),
        fn.col("_metadata.file_modification_time").alias("at"),
    )


def judged(lines: DataFrame, watermark_s: int) -> DataFrame:
    """``lines`` with the ``report`` of each and the ``reason`` it is rejected for, null when it is not."""
    read = lines.mapInArrow(with_reports, f"line binary, file string, at timestamp, report {REPORT}")
    late_s = fn.col("at").cast("double") - fn.col("report.time").cast("double")
    newest = fn.greatest(fn.col("report.time"), fn.col("at"))
    reason = (
        fn.when(fn.col("report").isNull(), "bad")
        .when(newest > fn.current_timestamp() + fn.expr(f"interval {AHEAD_MAX_S} seconds"), "ahead")
        .when(late_s > watermark_s, "late")
    )
    return read.withColumn("reason", reason)


def accepted(judged_lines: DataFrame) -> DataFrame:
    """The reports that were not rejected, one a row."""
    return judged_lines.where("reason IS NULL").select("report.*")


def rejected(judged_lines: DataFrame) -> DataFrame:
    """The lines that were, with their ``time`` where they have one; bytes that are no UTF-8 as U+FFFD."""
    return judged_lines.where("reason IS NOT NULL").select(
        "reason",
        fn.substring(fn.make_valid_utf8(fn.col("line").cast("string")), 1, LINE_CHARACTERS_MAX).alias("line"),
        "file",
        fn.col("at").alias("closed"),
        fn.col("report.time").alias("time"),
    )


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
