"""The streaming query: from the folder that nodes write to, to windows in Parquet, each exactly once.

Append mode: a window is written when it is closed, once, and never touched again, so the output only grows and any
reader of Parquet can have it. (Update and complete mode would write a window again and again, which files cannot take
back.) Spark notes what a batch reads before it begins, and names the files of a batch in one step at its end; a batch
that was cut short is done again from the same files, and what it had left counts nowhere.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as fn
from pyspark.sql.streaming.query import StreamingQuery

from ledger.errors import ConfigurationError
from pipeline.gateway import apart
from pipeline.stats import lines, output, windows
from pipeline.stats.destination import Destination
from pipeline.stats.folder import listed
from pipeline.stats.offset import Offset
from pipeline.stats.source import AHEAD_MAX_S, passed_over

FILES_A_BATCH_MAX: Final = 256
"""Files that one micro-batch reads at most; more wait for the next one."""
LOOK_INTERVAL_S: Final = 1
TELL_INTERVAL_S: Final = 60.0
"""How often files that are not read are looked for while no batch does anything."""
_ROCKSDB: Final = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
_SETTINGS: Final = {
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
    gone: int = 0
    """Files that were removed before they could be read."""
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
    on_passed_over: Callable[[Mapping[str, str]], None] = lambda _: None,
) -> Summary:
    """Stream ``source``, a folder, into ``dest``: what is there now and no more when ``once``, else for ever.

    With ``close`` a window is closed too when twice the watermark has gone by on this machine's clock since its end and
    there is no file left to read, and never further than the closing of the newest file that was read bears out.
    ``on_passed_over`` is told of files that are there and are not read, and of numbers that are not there though later
    ones are, with the reason, whenever there are more of them.

    An exception raised while it runs, by ``on_batch`` or a signal's handler, stops the query first; the batch under way
    is then done by the next run.

    Raises:
        ConfigurationError: ``source`` is no folder, or ``dest`` was begun with another one or other windows, is written
            by another run, is not whole any more, or cannot be written by this Spark.
    """
    folder = _folder_of(source)
    session = spark.newSession()
    for name, value in _SETTINGS.items():
        session.conf.set(name, value)
    destination = Destination(session, dest)
    with destination.held():
        destination.check_whole()
        destination.describe({"source": folder, "window_s": window_s})
        close_after_s = AHEAD_MAX_S + window_s + 2 * watermark_s if close else 0
        stream = lines.lines_of(session, folder, files_a_batch_max, close_after_s)
        rows = _rows(stream, window_s, watermark_s)
        writer = (
            rows.writeStream.format("parquet")
            .outputMode("append")
            .partitionBy(*output.PARTITIONS)
            .option("checkpointLocation", destination.checkpoint)
        )
        writer = writer.trigger(availableNow=True) if once else writer.trigger(processingTime=f"{every_s} seconds")
        query = writer.start(destination.url)
        try:
            return _follow(query, on_batch, _Overseer(folder, on_passed_over))
        finally:
            apart(query.stop)


class _Overseer:
    """Tells of files that are there and are not read, and of those that never came."""

    def __init__(self, folder: str, tell: Callable[[Mapping[str, str]], None]) -> None:
        self._folder = folder
        self._tell = tell
        self._told: set[str] = set()

    def look(self, offset: Offset) -> None:
        """Look through the folder once, when the stream has come to ``offset``."""
        found = passed_over(self._folder, offset, listed(self._folder), time.time_ns() // 1_000_000)
        if new := {path: why for path, why in found.items() if path not in self._told}:
            self._tell(new)
        self._told = set(found)


def _folder_of(source: str) -> str:
    """``source`` in the one spelling by which it is known again."""
    parts = urlsplit(source)
    if parts.scheme not in ("", "file"):
        raise ConfigurationError(f"{source} is no folder: bring the files to one, with the names that nodes gave them")
    folder = Path(parts.path if parts.scheme else source).resolve()
    if not folder.is_dir():
        raise ConfigurationError(f"{source} is no folder: name the one that stats.dir names")
    return str(folder)


def _rows(stream: DataFrame, window_s: int, watermark_s: int) -> DataFrame:
    """Everything that is written: closed windows and rejected lines."""
    judged = lines.judged(stream, watermark_s)
    counts = [fn.count_if(fn.col("reason") == reason).alias(reason) for reason in ("bad", "ahead", "late", "gone")]
    rejected = lines.rejected(judged.observe("read", fn.count_if(fn.col("what") == "line").alias("lines"), *counts))
    closed = windows.windows_of(lines.accepted(judged), window_s, watermark_s)
    closed = closed.observe("written", fn.count(fn.lit(1)).alias("rows"))
    # One file a partition and batch.
    return output.together(closed, rejected).repartition(*output.PARTITIONS)


def _follow(query: StreamingQuery, on_batch: Callable[[Summary], None], overseer: _Overseer) -> Summary:
    """Wait for the end of ``query``, telling ``on_batch`` of each batch that did something."""
    total, told, looked, looked_s = Summary(), -1, -2, time.monotonic()
    ended = False
    while not ended:
        ended = bool(query.awaitTermination(LOOK_INTERVAL_S))
        for progress in query.recentProgress:
            batch = summary_of(progress)
            if progress["batchId"] > told and batch != Summary():
                told = progress["batchId"]
                total.add(batch)
                on_batch(batch)
        is_time = ended or told > looked or time.monotonic() - looked_s >= TELL_INTERVAL_S
        if is_time and (last := query.lastProgress) is not None:
            looked, looked_s = told, time.monotonic()
            overseer.look(offset_of(last))
    return total


def offset_of(progress: Any) -> Offset:
    """Up to where the stream has come."""
    (source,) = progress["sources"]
    offset: Offset = json.loads(source["endOffset"])
    return offset


def summary_of(progress: Any) -> Summary:
    """What one batch came to; all zero for a look that found nothing."""
    observed = progress["observedMetrics"]
    read = observed["read"].asDict() if "read" in observed else {}
    rows = observed["written"]["rows"] if "written" in observed else 0
    dropped = sum(operator["numRowsDroppedByWatermark"] for operator in progress["stateOperators"])
    if not (any(read.values()) or rows or dropped):
        return Summary()
    return Summary(batches=1, **read, late_groups=dropped, rows=rows)
