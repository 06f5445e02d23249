"""Lines of stats files, read and judged one by one: what a line is worth depends on nothing but itself and its file.

A line is rejected, with the first reason that holds::

    bad      no JSON object of the documented form
    ahead    its time lies more than ``AHEAD_MAX`` past the clock of this run: it would end everybody's windows
    late     its file was closed, and so shown to readers, more than the watermark after its time

So the same lines are late in every run, in whichever order and with whichever others they are read.
"""

from __future__ import annotations

from typing import Final

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as fn

AHEAD_MAX: Final = "5 minutes"
LINE_CHARACTERS_MAX: Final = 8192
"""As much is kept of a rejected line; a node writes no longer one."""
WEIGHT_MAX: Final = 1_000_000
FILE_PATTERN: Final = "*.ndjson"
FILE_AGE_MAX: Final = "30d"
"""A file is passed over when it is so much older than the newest: what was read need not be known for ever."""

_CORRUPT: Final = "_corrupt"
_SCHEMA: Final = f"""
    tenant_id string, job_id string, dc_id string, workflow_id string, time timestamp, received timestamp,
    weight bigint, completed bigint, failed bigint, interval_ms bigint, counts map<string, bigint>,
    values map<string, double>, {_CORRUPT} string
"""
_REQUIRED: Final = ("tenant_id", "job_id", "dc_id", "time", "received", "weight")


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
    reason = (
        fn.when(_is_bad(), "bad")
        .when(fn.col("report.time") > fn.current_timestamp() + fn.expr(f"interval {AHEAD_MAX}"), "ahead")
        .when(late_s > watermark_s, "late")
    )
    return read.withColumn("reason", reason)


def _is_bad() -> Column:
    bad = fn.col("report").isNull() | fn.col(f"report.{_CORRUPT}").isNotNull()
    for name in _REQUIRED:
        bad = bad | fn.col(f"report.{name}").isNull()
    return bad | ~fn.col("report.weight").between(1, WEIGHT_MAX)


def accepted(judged_lines: DataFrame) -> DataFrame:
    """The reports that were not rejected, one a row."""
    return judged_lines.where("reason IS NULL").select("report.*").drop(_CORRUPT)


def rejected(judged_lines: DataFrame) -> DataFrame:
    """The lines that were, with their ``time`` where they have one."""
    return judged_lines.where("reason IS NOT NULL").select(
        "reason",
        fn.substring("line", 1, LINE_CHARACTERS_MAX).alias("line"),
        "file",
        "closed",
        fn.col("report.time").alias("time"),
    )
