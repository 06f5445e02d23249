"""Stats of running jobs: JSON lines that nodes write, streamed into windows that a report can read.

    closed files ──► lines ──► judged ──► measures ──► a job's window ──► a data centre's window ──► Parquet
    (format in                   └─► rejected: bad, ahead, late ────────────────────────────────────►  (one commit log)
     docs/formats/stats.md)

``run`` streams; ``read`` and ``rejected`` give what was committed, and nothing else.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as fn
from pyspark.sql.streaming.query import StreamingQuery

from ledger.errors import ConfigurationError
from pipeline.java import run_in_thread
from pipeline.stats.destination import (
    PARTITIONS,
    Destination,
    committed_files,
    next_tick,
    read,
    refuse_behind,
    rejected,
    together,
)
from pipeline.stats.reports import judged, lines_of, rejected_lines, windows_of

__all__ = ["Summary", "committed_files", "read", "rejected", "run"]


FILES_A_BATCH_MAX: Final = 256
"""Files that one micro-batch reads at most; more wait for the next one."""
LOOK_INTERVAL_S: Final = 1
_ROCKSDB: Final = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
_SETTINGS: Final = {
    # A file that makes room for others before it is read holds nobody up.
    "spark.sql.files.ignoreMissingFiles": "true",
    # Open windows are held outside of Java's memory, and on disk when there are many.
    "spark.sql.streaming.stateStore.providerClass": _ROCKSDB,
    # What a batch changes is noted, not the whole again, and nobody asks how many rows there are.
    "spark.sql.streaming.stateStore.rocksdb.changelogCheckpointing.enabled": "true",
    "spark.sql.streaming.stateStore.rocksdb.trackTotalNumberOfRows": "false",
    "spark.sql.streaming.numRecentProgressUpdates": "50",
    "spark.sql.streaming.statefulOperator.allowMultiple": "true",
}


@dataclass
class Summary:
    """What a run, or one batch of it, came to."""

    batches: int = 0
    lines: int = 0
    bad: int = 0
    ahead: int = 0
    late: int = 0
    late_groups: int = 0
    """Measures of a job that came to a window already closed, though their lines were in time: files out of order."""
    rows: int = 0
    """Rows of windows written."""

    def add(self, other: Summary) -> None:
        """Count ``other`` in."""
        for name, value in asdict(other).items():
            setattr(self, name, getattr(self, name) + value)


def run(
    spark: SparkSession,
    source: str,
    dest: str,
    *,
    window_s: int = 60,
    watermark_s: int = 600,
    once: bool = True,
    close: bool = False,
    every_s: int = 30,
    files_a_batch_max: int = FILES_A_BATCH_MAX,
    on_batch: Callable[[Summary], None] = lambda _: None,
) -> Summary:
    """Stream ``source``, a folder, into ``dest``: what is there now and no more when ``once``, else for ever.

    With ``close`` a window is closed too when twice the watermark has gone by on this machine's clock since its end and
    there is no file left to read, and never further than the newest report that was read bears out.

    An exception raised while it runs, by ``on_batch`` or a signal's handler, stops the query first; the batch under way
    is then done by the next run.

    Raises:
        ConfigurationError: ``source`` is no folder, or ``dest`` was begun with another one or other windows, is written
            by another run, is not whole any more, or cannot be written by this Spark; or this machine's clock is not
            one to ``close`` windows by.
    """
    folder = _folder_of(source)
    session = spark.newSession()
    for name, value in _SETTINGS.items():
        session.conf.set(name, value)
    destination = Destination(session, dest)
    close_after_ms = (window_s + 2 * watermark_s) * 1000 if close else 0
    total = Summary()

    def take() -> int:
        rows = _rows(session, folder, destination.ticks, files_a_batch_max, window_s, watermark_s)
        return _take(rows, destination, total, on_batch)

    with destination.held():
        destination.check_whole()
        destination.describe({"source": folder, "window_s": window_s})
        while True:
            last = destination.last_tick()
            if close:
                refuse_behind(last, _clock_ms())
            tick = next_tick(last, take(), _clock_ms(), close_after_ms)
            if tick != last:
                destination.note_tick(tick, is_later=tick.time_ms > last.time_ms)
            if tick.time_ms > last.time_ms:
                take()
            if once:
                return total
            time.sleep(every_s)


def _take(rows: DataFrame, destination: Destination, total: Summary, on_batch: Callable[[Summary], None]) -> int:
    """Write ``rows`` of what is there now; returns the time of the newest report, 0 for none."""
    query = (
        rows.writeStream.format("parquet")
        .outputMode("append")
        .partitionBy(*PARTITIONS)
        .option("checkpointLocation", destination.checkpoint)
        .trigger(availableNow=True)
        .start(destination.url)
    )
    try:
        return _follow(query, total, on_batch)
    finally:
        run_in_thread(query.stop).result()


def _folder_of(source: str) -> str:
    """``source`` in the one spelling by which it is known again."""
    parts = urlsplit(source)
    if parts.scheme not in ("", "file"):
        raise ConfigurationError(f"{source} is no folder: bring the files to one, with the names that nodes gave them")
    folder = Path(parts.path if parts.scheme else source).resolve()
    if not folder.is_dir():
        raise ConfigurationError(f"{source} is no folder: name the one that stats.dir names")
    return str(folder)


def _rows(
    spark: SparkSession, folder: str, ticks: str, files_a_batch_max: int, window_s: int, watermark_s: int
) -> DataFrame:
    """Everything that is written: closed windows and rejected"""
    found = judged(lines_of(spark, folder, files_a_batch_max), watermark_s)
    observed = found.observe(
        "read",
        fn.count(fn.lit(1)).alias("lines"),
        *(fn.count_if(fn.col("reason") == reason).alias(reason) for reason in ("bad", "ahead", "late")),
        fn.max(fn.when(fn.col("reason").isNull(), fn.unix_millis("report.time"))).alias("newest_ms"),
    )
    # How late it is comes as reports of no tenant that have a time and nothing else.
    clock = spark.readStream.text(ticks).selectExpr("timestamp_millis(bigint(value)) AS time")
    accepted = found.where("reason IS NULL").select("report.*").unionByName(clock, allowMissingColumns=True)
    closed = windows_of(accepted, window_s, watermark_s).observe("written", fn.count(fn.lit(1)).alias("rows"))
    # One file a partition and batch.
    return together(closed, rejected_lines(observed)).repartition(*PARTITIONS)


def _follow(query: StreamingQuery, total: Summary, on_batch: Callable[[Summary], None]) -> int:
    """Wait for the end of ``query``, counting each batch that did something into ``total`` and telling ``on_batch``.

    Returns the time of the newest report.
    """
    told, newest_ms, ended = -1, 0, False
    while not ended:
        ended = bool(query.awaitTermination(LOOK_INTERVAL_S))
        for progress in query.recentProgress:
            if progress["batchId"] <= told:
                continue
            batch, batch_newest_ms = summary_of(progress)
            newest_ms = max(newest_ms, batch_newest_ms)
            if batch != Summary():
                told = progress["batchId"]
                total.add(batch)
                on_batch(batch)
    return newest_ms


def summary_of(progress: Any) -> tuple[Summary, int]:
    """What one batch came to, all zero for a look that found nothing; and the time of its newest report."""
    observed = progress["observedMetrics"]
    read = observed["read"].asDict() if "read" in observed else {}
    newest_ms = read.pop("newest_ms", None) or 0
    rows = observed["written"]["rows"] if "written" in observed else 0
    dropped = sum(operator["numRowsDroppedByWatermark"] for operator in progress["stateOperators"])
    if not (any(read.values()) or rows or dropped):
        return Summary(), newest_ms
    return Summary(batches=1, **read, late_groups=dropped, rows=rows), newest_ms


def _clock_ms() -> int:
    return time.time_ns() // 1_000_000
