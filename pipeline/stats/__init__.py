"""Stats of running jobs: JSON lines that nodes write, streamed into windows that a report can read.

    closed files ──► lines ──► judged ──► measures ──► a job's window ──► a data centre's window ──► Parquet
    (format in                   └─► rejected: bad, ahead, late ────────────────────────────────────►  (one commit log)
     docs/formats/stats.md)

``run`` streams; ``read`` and ``rejected`` return only committed rows.
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
"""Most files that one micro-batch reads; more wait for the next."""
LOOK_INTERVAL_S: Final = 1
_SETTINGS: Final = {
    # A file that is deleted to make room before it is read does not stop the stream.
    "spark.sql.files.ignoreMissingFiles": "true",
    # Open windows are held outside of Java's heap, and on disk if there are many.
    "spark.sql.streaming.stateStore.providerClass": (
        "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
    ),
    # A checkpoint contains only the changes of a batch; the row count is not needed.
    "spark.sql.streaming.stateStore.rocksdb.changelogCheckpointing.enabled": "true",
    "spark.sql.streaming.stateStore.rocksdb.trackTotalNumberOfRows": "false",
    "spark.sql.streaming.numRecentProgressUpdates": "50",
    "spark.sql.streaming.statefulOperator.allowMultiple": "true",
}


@dataclass
class Summary:
    """The result of a run or of one batch."""

    batches: int = 0
    lines: int = 0
    bad: int = 0
    ahead: int = 0
    late: int = 0
    late_groups: int = 0
    """Measures for a window that was already closed, though their lines were in time: files arrived out of order."""
    rows: int = 0
    """Rows of windows written."""

    def add(self, other: Summary) -> None:
        """Add the counts of ``other``."""
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
    """Stream ``source``, a folder, into ``dest``: only the existing files if ``once``, else forever.

    With ``close`` a window also closes if no file is left to read and twice the watermark has passed on this
    machine's clock since the window's end. The newest report read limits how far windows close.

    An exception of ``on_batch`` or a signal handler stops the query first; the next run repeats the batch under way.

    Raises:
        ConfigurationError: ``source`` is no folder; ``dest`` was started with another source or other windows, has
            another writer, is incomplete, or cannot be written by this Spark; or this machine's clock is unfit to
            ``close`` windows.
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
            if (tick := next_tick(last, take(), _clock_ms(), close_after_ms)) != last:
                destination.note_tick(tick, is_later=tick.time_ms > last.time_ms)
            if tick.time_ms > last.time_ms:
                take()
            if once:
                return total
            time.sleep(every_s)


def _take(rows: DataFrame, destination: Destination, total: Summary, on_batch: Callable[[Summary], None]) -> int:
    """Write the ``rows`` of existing files; returns the time of the newest report, 0 for none."""
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
    """The canonical spelling of ``source``."""
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
    """All rows to write: closed windows and rejected"""
    found = judged(lines_of(spark, folder, files_a_batch_max), watermark_s)
    observed = found.observe(
        "read",
        fn.count(fn.lit(1)).alias("lines"),
        *(fn.count_if(fn.col("reason") == reason).alias(reason) for reason in ("bad", "ahead", "late")),
        fn.max(fn.when(fn.col("reason").isNull(), fn.unix_millis("report.time"))).alias("newest_ms"),
    )
    # Ticks are reports without tenant that have only a time.
    clock = spark.readStream.text(ticks).selectExpr("timestamp_millis(bigint(value)) AS time")
    accepted = found.where("reason IS NULL").select("report.*").unionByName(clock, allowMissingColumns=True)
    closed = windows_of(accepted, window_s, watermark_s).observe("written", fn.count(fn.lit(1)).alias("rows"))
    # One file a partition and batch.
    return together(closed, rejected_lines(observed)).repartition(*PARTITIONS)


def _follow(query: StreamingQuery, total: Summary, on_batch: Callable[[Summary], None]) -> int:
    """Wait for the end of ``query``; add each non-empty batch to ``total`` and pass it to ``on_batch``.

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
    """The summary of one batch, all zero if it found nothing; and the time of its newest report."""
    observed = progress["observedMetrics"]
    read = observed["read"].asDict() if "read" in observed else {}
    newest_ms = read.pop("newest_ms", None) or 0
    rows = observed["written"]["rows"] if "written" in observed else 0
    dropped = sum(operator["numRowsDroppedByWatermark"] for operator in progress["stateOperators"])
    return Summary(batches=int(any((*read.values(), rows, dropped))), **read, late_groups=dropped, rows=rows), newest_ms


def _clock_ms() -> int:
    return time.time_ns() // 1_000_000
