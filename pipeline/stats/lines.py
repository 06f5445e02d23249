"""Lines of stats files, read and judged one by one: what a line is worth depends on nothing but itself and its file.

Which files there are, and which were read, is Spark's own to know: its source of files. A line is rejected, with the
first reason that holds::

    bad      no JSON object of the documented form (``pipeline.stats.form``), or longer than any that a node writes
    ahead    its time, or the closing of its file, lies more than ``AHEAD_MAX_S`` past the clock of this run: it would
             end everybody's windows
    late     its file was closed, and so shown to readers, more than the watermark after its time

So the same lines are late in every run, in whichever order and with whichever others they are read.
"""

from __future__ import annotations

import re
from typing import Final

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as fn

from pipeline.stats.form import REPORT, with_reports

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
