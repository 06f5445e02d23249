"""Lines of stats files, read and judged one by one: what a line is worth depends on nothing but itself and its file.

A line is rejected, with the first reason that holds::

    bad      no JSON object of the documented form (``pipeline.stats.form``)
    ahead    its time, or the closing of its file, lies more than ``AHEAD_MAX`` past the clock of this run: it would end
             everybody's windows
    late     its file was closed, and so shown to readers, more than the watermark after its time

So the same lines are late in every run, in whichever order and with whichever others they are read.
"""

from __future__ import annotations

from typing import Final

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as fn

from pipeline.stats.form import are_reports

AHEAD_MAX: Final = "5 minutes"
LINE_CHARACTERS_MAX: Final = 8192
"""As much is kept of a rejected line; a node writes no longer one."""
FILE_PATTERN: Final = "*.ndjson"
FILE_AGE_MAX: Final = "100000000d"
"""Spark passes in silence over a file that is so much older than the newest, and one file from a clock that is wrong
is enough for that. No file is so old, so each one that was read is known for ever, about 200 bytes of the driver."""

_CORRUPT: Final = "_corrupt"
_SCHEMA: Final = f"""
    tenant_id string, job_id string, dc_id string, workflow_id string, time timestamp, received timestamp,
    weight bigint, completed bigint, failed bigint, interval_ms bigint, counts map<string, bigint>,
    values map<string, double>, {_CORRUPT} string
"""


def lines_of(spark: SparkSession, folder: str, files_a_batch_max: int) -> DataFrame:
    """A stream of ``line``, its ``file`` and when that was ``closed``: whole files, the oldest first.

    Files whose names begin with a dot are still being written and are not seen.
    """
    stream = (
        spark.readStream.format("text")
        .schema("value string")
        .option("recursiveFileLookup", "true")
        .option("pathGlobFilter", FILE_PATTERN)
        .option("maxFilesPerTrigger", files_a_batch_max)
        .option("maxFileAge", FILE_AGE_MAX)
        .option("ignoreMissingFiles", "true")
        .load(folder)
    )
    file = fn.col("_metadata")
    return stream.select(
        fn.col("value").alias("line"),
        file["file_path"].alias("file"),
        file["file_modification_time"].alias("closed"),
    )


def judged(lines: DataFrame, watermark_s: int) -> DataFrame:
    """``lines`` with the ``report`` of each and the ``reason`` it is rejected for, null when it is not."""
    options = {"columnNameOfCorruptRecord": _CORRUPT, "allowNonNumericNumbers": "false"}
    read = lines.withColumn("report", fn.from_json("line", _SCHEMA, options))
    late_s = fn.col("closed").cast("double") - fn.col("report.time").cast("double")
    newest = fn.greatest(fn.col("report.time"), fn.col("closed"))
    reason = (
        fn.when(_is_bad(), "bad")
        .when(newest > fn.current_timestamp() + fn.expr(f"interval {AHEAD_MAX}"), "ahead")
        .when(late_s > watermark_s, "late")
    )
    return read.withColumn("reason", reason)


def _is_bad() -> Column:
    is_report = fn.arrow_udf(are_reports, "boolean")  # type: ignore[attr-defined]
    bad: Column = ~is_report(fn.col("line").cast("binary"))
    # A time that no calendar has, a number that no column holds.
    bad = bad | fn.col("report").isNull() | fn.col(f"report.{_CORRUPT}").isNotNull()
    for name in ("time", "received"):
        bad = bad | fn.col(f"report.{name}").isNull()
    return bad


def accepted(judged_lines: DataFrame) -> DataFrame:
    """The reports that were not rejected, one a row."""
    return judged_lines.where("reason IS NULL").select("report.*").drop(_CORRUPT)


def rejected(judged_lines: DataFrame) -> DataFrame:
    """The lines that were, with their ``time`` where they have one; bytes that are no UTF-8 as U+FFFD."""
    return judged_lines.where("reason IS NOT NULL").select(
        "reason",
        fn.substring(fn.make_valid_utf8("line"), 1, LINE_CHARACTERS_MAX).alias("line"),
        "file",
        "closed",
        fn.col("report.time").alias("time"),
    )
