"""Lines of stats files, read and judged one by one: what a line is worth depends on nothing but itself and its file.

A line is rejected, with the first reason that holds::

    gone     no line: its file was removed before it could be read
    bad      no JSON object of the documented form (``pipeline.stats.form``), or longer than any that a node writes
    ahead    its time, or the closing of its file, lies more than ``AHEAD_MAX_S`` past the clock of this run: it would
             end everybody's windows (such a file waits, and is read only when the clock was set back meanwhile)
    late     its file was closed, and so shown to readers, more than the watermark after its time

So the same lines are late in every run, in whichever order and with whichever others they are read.
"""

from __future__ import annotations

from typing import Final

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as fn

from pipeline.stats.source import AHEAD_MAX_S, StatsSource

LINE_CHARACTERS_MAX: Final = 8192
"""As much is kept of a rejected line; a node writes no longer one."""
_CORRUPT: Final = "_corrupt"
_SCHEMA: Final = f"""
    tenant_id string, job_id string, dc_id string, workflow_id string, time timestamp, received timestamp,
    weight bigint, completed bigint, failed bigint, interval_ms bigint, counts map<string, bigint>,
    values map<string, double>, {_CORRUPT} string
"""
_COLUMNS: Final = (
    *("tenant_id", "job_id", "dc_id", "workflow_id", "weight", "completed", "failed", "interval_ms"),
    *("counts", "values"),
)


def lines_of(spark: SparkSession, folder: str, files_a_batch_max: int, close_after_s: int) -> DataFrame:
    """A stream of ``pipeline.stats.source.SCHEMA``: whole files, the oldest first.

    With ``close_after_s`` the clock goes on for so long after the last file, and for ever with none.
    """
    spark.dataSource.register(StatsSource)
    return (
        spark.readStream.format(StatsSource.name())
        .option("folder", folder)
        .option("files_a_batch", files_a_batch_max)
        .option("close_after_ms", close_after_s * 1000)
        .load()
    )


def judged(lines: DataFrame, watermark_s: int) -> DataFrame:
    """``lines`` with the ``report`` of each and the ``reason`` it is rejected for, null when it is not."""
    options = {"columnNameOfCorruptRecord": _CORRUPT, "allowNonNumericNumbers": "false"}
    text = fn.when(fn.col("is_report"), fn.col("line").cast("string"))
    read = lines.withColumn("report", fn.from_json(text, _SCHEMA, options))
    late_s = fn.col("at").cast("double") - fn.col("report.time").cast("double")
    newest = fn.greatest(fn.col("report.time"), fn.col("at"))
    reason = (
        fn.when(fn.col("what") == "gone", "gone")
        .when(fn.col("what") == "clock", None)
        .when(_is_bad(), "bad")
        .when(newest > fn.current_timestamp() + fn.expr(f"interval {AHEAD_MAX_S} seconds"), "ahead")
        .when(late_s > watermark_s, "late")
    )
    return read.withColumn("reason", reason)


def _is_bad() -> Column:
    # A time that no calendar has, a number that no column holds.
    bad: Column = ~fn.col("is_report") | fn.col("report").isNull() | fn.col(f"report.{_CORRUPT}").isNotNull()
    for name in ("time", "received"):
        bad = bad | fn.col(f"report.{name}").isNull()
    return bad


def accepted(judged_lines: DataFrame) -> DataFrame:
    """The reports that were not rejected, one a row; the clock is one of no tenant."""
    time = fn.when(fn.col("what") == "clock", fn.col("at")).otherwise(fn.col("report.time")).alias("time")
    taken = judged_lines.where("reason IS NULL")
    return taken.select(time, *(f"report.{name}" for name in _COLUMNS))


def rejected(judged_lines: DataFrame) -> DataFrame:
    """The lines that were, with their ``time`` where they have one; bytes that are no UTF-8 as U+FFFD."""
    return judged_lines.where("reason IS NOT NULL").select(
        "reason",
        fn.substring(fn.make_valid_utf8(fn.col("line").cast("string")), 1, LINE_CHARACTERS_MAX).alias("line"),
        "file",
        fn.coalesce("at", fn.current_timestamp()).alias("closed"),
        fn.col("report.time").alias("time"),
    )
