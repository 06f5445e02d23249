"""Reads and validates lines of stats files one by one; the result depends only on the line and its file.

Spark's file source tracks which files exist and which were read. A line is rejected with the first matching reason::

    bad      no JSON object of the documented form (``Report``), or longer than any that a node writes
    ahead    its time, or the closing of its file, lies more than ``AHEAD_MAX_S`` past the clock of this run: it would
             end everybody's windows
    late     its file was closed, and so shown to readers, more than the watermark after its time

So the same lines are late in every run, whatever their order and the other lines. The form is that of
docs/formats/stats.md, checked strictly by the types of ``POST /v1/stats``. Spark's own JSON reader would ignore text
after the object and bytes that are not UTF-8, and turn numbers and objects into names. Unknown fields are ignored,
so that a newer node may add some.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from datetime import datetime
from typing import Annotated, Any, Final

import msgspec
import pyarrow as pa
from msgspec import UNSET, Meta, UnsetType
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as fn
from pyspark.sql.pandas.types import from_arrow_schema

from ledger.canonical import INTEGER_MAX
from ledger.decoding import decoder_of
from ledger.names import JOB_ID, TENANT_ID

AHEAD_MAX_S: Final = 300
"""How far past this machine's clock an accepted time may lie."""
LINE_CHARACTERS_MAX: Final = 8192
"""Characters kept of a rejected line; a node writes none longer."""
_OPTIONS: Final = {
    "lineSep": "\n",
    "pathGlobFilter": "*.ndjson",  # Spark ignores names with a leading dot, which are files still being written.
    "recursiveFileLookup": "true",
    "maxFileAge": "36500d",  # Else one file with a wrong clock would make Spark ignore all others.
    "mapreduce.input.linerecordreader.line.maxlength": str(1 << 20),  # Longer lines are never held in memory.
}
LINE_BYTES_MAX: Final = 64 << 10
"""A node writes a few bytes more than 8 KiB at most."""
NAME_CHARACTERS_MAX: Final = 256
NAMES_MAX: Final = 32
"""Most names in ``counts``, and in ``values``."""
WEIGHT_MAX: Final = 1_000_000

Tenant = Annotated[str, Meta(pattern=rf"^({TENANT_ID})\Z")]
Job = Annotated[str, Meta(pattern=rf"^({JOB_ID})\Z")]
Name = Annotated[str, Meta(min_length=1, max_length=NAME_CHARACTERS_MAX)]
Measured = Annotated[str, Meta(pattern=r"^[a-z][a-z0-9_]{0,63}\Z")]
Time = Annotated[datetime, Meta(tz=True)]
Count = Annotated[int, Meta(ge=0, le=INTEGER_MAX)]


class Report(msgspec.Struct, frozen=True):
    """The contents of one line."""

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


_decode = decoder_of(Report).decode
_COLUMNS: Final = pa.struct(
    [
        *((name, pa.string()) for name in ("tenant_id", "job_id", "dc_id", "workflow_id")),
        ("time", pa.timestamp("us", tz="UTC")),
        *((name, pa.int64()) for name in ("weight", "completed", "failed")),
        ("counts", pa.map_(pa.string(), pa.int64())),
        ("values", pa.map_(pa.string(), pa.float64())),
    ]
)
"""The columns of a report that are aggregated."""


def with_reports(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """``batches`` with a last column ``report``, parsed from the column ``line``; null if it is no report."""
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
    """``line``, ``file`` and ``at``, the closing time of the file, for all of ``folder``: whole files, the oldest
    first."""
    lines = spark.readStream.format("text").options(**_OPTIONS).option("maxFilesPerTrigger", files_a_batch_max)
    # Spark reads special characters in a path as a pattern, and returns a path as a URI, in which a plus is no space.
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
    """``lines`` with the ``report`` of each and the ``reason`` of its rejection, null if accepted."""
    late_s = fn.col("at").cast("double") - fn.col("report.time").cast("double")
    newest = fn.greatest(fn.col("report.time"), fn.col("at"))
    reason = (
        fn.when(fn.col("report").isNull(), "bad")
        .when(newest > fn.current_timestamp() + fn.expr(f"interval {AHEAD_MAX_S} seconds"), "ahead")
        .when(late_s > watermark_s, "late")
    )
    return lines.mapInArrow(with_reports, _JUDGED).withColumn("reason", reason)


def rejected_lines(judged_lines: DataFrame) -> DataFrame:
    """The rejected lines, with their ``time`` if they have one; bytes that are not UTF-8 become U+FFFD."""
    return judged_lines.where("reason IS NOT NULL").select(
        "reason",
        fn.substring(fn.make_valid_utf8(fn.col("line").cast("string")), 1, LINE_CHARACTERS_MAX).alias("line"),
        "file",
        fn.col("at").alias("closed"),
        fn.col("report.time").alias("time"),
    )


# --- windows --------------------------------------------------------------------------------------


PERCENTILES: Final = {"p50": 0.5, "p95": 0.95, "p99": 0.99}
"""Of values, to three significant digits."""
_SMALLEST_UNIT: Final = 1e-300


def windows_of(reports: DataFrame, window_s: int, watermark_s: int) -> DataFrame:
    """One row a (window, tenant, data centre, what, name), after the window is closed.

    The columns are ``pipeline.stats.destination.WINDOW_SCHEMA``. ``reports`` is a stream of accepted reports; the
    result is a stream for append mode.
    """
    window, group = f"{window_s} seconds", ("tenant_id", "dc_id", "what", "name")
    by_centre = (
        _measures(reports.withWatermark("time", f"{2 * watermark_s} seconds"))
        # 1. A job's window.
        .groupBy(fn.window("time", window), *group, "job_id", "workflow_id", "value")
        .agg(
            fn.count(fn.lit(1)).alias("lines"),
            fn.sum("weight").alias("reports"),
            fn.sum(fn.col("amount") * fn.col("weight")).alias("sum"),
            fn.min("amount").alias("min"),
            fn.max("amount").alias("max"),
        )
        # 2. A data centre's window.
        .groupBy(fn.window("window", window), *group)
        .agg(
            fn.sum("lines").alias("lines"),
            fn.sum("reports").alias("reports"),
            fn.count("job_id").alias("series"),
            fn.sum("sum").alias("sum"),
            fn.sum("max").alias("latest"),
            fn.min("min").alias("min"),
            fn.max("max").alias("max"),
            fn.percentile("value", list(PERCENTILES.values()), fn.col("reports")).alias("percentiles"),
        )
    )
    return by_centre.select(
        fn.col("window.start").alias("window_start"),
        fn.col("window.end").alias("window_end"),
        "tenant_id",
        "dc_id",
        "what",
        "name",
        "lines",
        "reports",
        _of(("reports", "total"), fn.col("series")).alias("series"),
        _of(("reports", "count"), fn.col("sum")).alias("sum"),
        _of(("reports", "count"), fn.col("sum") / window_s).alias("per_second"),
        _of(("total",), fn.col("latest")).alias("latest"),
        _of(("value",), fn.col("sum") / fn.col("reports")).alias("mean"),
        _of(("value",), fn.col("min")).alias("min"),
        _of(("value",), fn.col("max")).alias("max"),
        *(fn.col("percentiles")[index].alias(name) for index, name in enumerate(PERCENTILES)),
    )


def _of(whats: tuple[str, ...], amount: Column, what: str = "what") -> Column:
    """``amount`` in the rows of these measures, null in others."""
    return fn.when(fn.col(what).isin(*whats), amount)


def _measures(reports: DataFrame) -> DataFrame:
    """One row a measure of a report; ``value`` is the rounded amount of a value, and only those belong to no job."""
    found = fn.concat(
        fn.array(_measure("reports", fn.lit("reports"), fn.lit(1.0))),
        *(fn.array(_measure("total", fn.lit(name), fn.col(name))) for name in ("completed", "failed")),
        *(_measures_in(what, f"{what}s") for what in ("count", "value")),
    )
    # A tick is no report. The condition includes the time, or Spark would drop ticks before the watermark.
    reported = reports.where(fn.col("tenant_id").isNotNull() | (fn.col("time") < fn.lit(0).cast("timestamp")))
    return (
        reported.select("*", fn.explode(found).alias("measure"))
        .where(fn.abs("measure.amount") < fn.lit(float("inf")))
        .select(
            *("time", "tenant_id", "dc_id", "weight", "measure.*"),
            *(
                _of(("reports", "total"), fn.col(name), "measure.what").alias(name)
                for name in ("job_id", "workflow_id")
            ),
            _of(("value",), _rounded(fn.col("measure.amount")), "measure.what").alias("value"),
        )
    )


def _measure(what: str, name: Column, amount: Column) -> Column:
    return fn.struct(fn.lit(what).alias("what"), name.alias("name"), amount.cast("double").alias("amount"))


def _measures_in(what: str, column: str) -> Column:
    """Each member of a map as a measure; none if the map is null."""
    members = fn.transform(fn.map_entries(column), lambda entry: _measure(what, entry["key"], entry["value"]))
    return fn.coalesce(members, fn.array().cast("array<struct<what: string, name: string, amount: double>>"))


def _rounded(amount: Column) -> Column:
    """``amount`` to three significant digits, so that a window has few distinct amounts."""
    unit = fn.greatest(fn.pow(fn.lit(10.0), fn.floor(fn.log10(fn.abs(amount))) - 2), fn.lit(_SMALLEST_UNIT))
    rounded = fn.rint(amount / unit) * unit
    # Rounding up the largest numbers would yield infinity.
    return fn.when(amount == 0, fn.lit(0.0)).when(fn.abs(rounded) < fn.lit(float("inf")), rounded).otherwise(amount)
