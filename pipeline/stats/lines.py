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
from msgspec import UNSET, Meta, UnsetType
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as fn
from pyspark.sql.pandas.types import from_arrow_schema

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


class Report(msgspec.Struct, frozen=True):
    """What one line says."""

    tenant_id: Tenant
    job_id: Job
    dc_id: Name
    time: Time
    received: Time
    weight: Annotated[int, Meta(ge=1, le=WEIGHT_MAX)]
    workflow_id: Name | UnsetType = UNSET
    completed: Count | UnsetType = UNSET
    failed: Count | UnsetType = UNSET
    interval_ms: Count | UnsetType = UNSET
    counts: Annotated[dict[Measured, Count], Meta(max_length=NAMES_MAX)] | UnsetType = UNSET
    values: Annotated[dict[Measured, float], Meta(max_length=NAMES_MAX)] | UnsetType = UNSET


_decode = msgspec.json.Decoder(Report).decode
_COLUMNS: Final = pa.struct(
    [
        *((name, pa.string()) for name in ("tenant_id", "job_id", "dc_id", "workflow_id")),
        ("time", pa.timestamp("us", tz="UTC")),
        *((name, pa.int64()) for name in ("weight", "completed", "failed")),
        ("counts", pa.map_(pa.string(), pa.int64())),
        ("values", pa.map_(pa.string(), pa.float64())),
    ]
)
"""What of a report is put together."""


def with_reports(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """``batches`` with a last column ``report``: what the column ``line`` says, null where it is no report."""
    for batch in batches:
        reports = [_report_of(line) for line in batch.column("line").to_pylist()]
        yield batch.append_column("report", pa.array(reports, _COLUMNS))


def _report_of(line: bytes) -> Any:
    if len(line) > LINE_BYTES_MAX:
        return None
    try:
        return msgspec.to_builtins(_decode(line), builtin_types=(datetime,))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


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


_JUDGED: Final = from_arrow_schema(
    pa.schema([("line", pa.binary()), ("file", pa.string()), ("at", _COLUMNS.field("time").type), ("report", _COLUMNS)])
)


def judged(lines: DataFrame, watermark_s: int) -> DataFrame:
    """``lines`` with the ``report`` of each and the ``reason`` it is rejected for, null when it is not."""
    read = lines.mapInArrow(with_reports, _JUDGED)
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
