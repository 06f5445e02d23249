"""The Data Source ``tallystick-stats``: files of nodes as a stream of lines, each file once.

An offset says what was taken, and up to when the clock has gone on without anything new::

    {"folders": {"node-a": {"before": 0, "7": "1-30@20261121T134000Z"}}, "taken_ms": 1795268400000, "clock_ms": 0}

Spark's own source of files knows each one it ever read by its path, in memory and in a log that is written again and
again as a whole; this offset has the size of the folder, however long it has been read. Two equal offsets are the same
text, and what lies between two is the same files whenever it is asked for: a file is taken once it is closed, and never
changes. Files are taken in the order in which they were closed, over all nodes.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxFiles, SupportsTriggerAvailableNow
from pyspark.sql.types import StructType

from ledger.errors import ConfigurationError
from pipeline.stats.folder import SUFFIX, Listing, lines_in, listed
from pipeline.stats.form import is_report
from pipeline.stats.taken import Taken, parsed

FORMAT: Final = "tallystick-stats"
SCHEMA: Final = "what string, line binary, is_report boolean, file string, at timestamp"
"""``what`` is ``line``; ``gone``, a file that was removed before it could be read; or ``clock``, how late it is.
``at`` is when the file was closed, or the time on the clock."""
TASK_BYTES: Final = 32 << 20
"""Files are put together to so much for one task."""
BATCH_ROWS: Final = 5_000
BATCH_BYTES: Final = 4 << 20

_ARROW: Final = pa.schema(
    [
        *(("what", pa.string()), ("line", pa.binary()), ("is_report", pa.bool_()), ("file", pa.string())),
        ("at", pa.timestamp("us", tz="UTC")),
    ]
)

Offset = dict[str, Any]
_BEGINNING: Final[Offset] = {"folders": {}, "taken_ms": 0, "clock_ms": 0}
Row = tuple[str, bytes | None, bool | None, str, int | None]


class ToRead(NamedTuple):
    """A file that a task reads; ``closed_us`` is None when it is gone already."""

    path: str
    closed_us: int | None
    bytes: int


class Closed(NamedTuple):
    """When a file was closed, in microseconds since 1970, and how large it is."""

    time_us: int
    bytes: int


class Clock(NamedTuple):
    """How late it is, in milliseconds since 1970."""

    time_ms: int


class Share(InputPartition):
    """What one task reads: some files, or the clock."""

    def __init__(self, items: list[ToRead | Clock]) -> None:
        super().__init__(items)


class StatsSource(DataSource):
    """Options: ``folder``; ``files_a_batch``; ``close_after_ms``, 0 for never: so long after files were last taken the
    clock goes on without new ones."""

    @classmethod
    def name(cls) -> str:
        """The name to say in ``format``."""
        return FORMAT

    def schema(self) -> str:
        """One row a line, and few others."""
        return SCHEMA

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802 (Spark's name)
        """Reads what nodes close as time goes on."""
        return StatsReader(self.options)


class StatsReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Follows a folder. Spark's driver has one at work, and tasks copies that only ``read``."""

    def __init__(self, options: Mapping[str, str]) -> None:
        self._source = options["folder"]
        self._files_a_batch = int(options["files_a_batch"])
        self._close_after_ms = int(options["close_after_ms"])
        self._target: Listing | None = None
        self._target_ms = 0

    # --- on the driver ----------------------------------------------------------------------------

    def initialOffset(self) -> Offset:  # noqa: N802 (Spark's name)
        """Before the first file."""
        return dict(_BEGINNING)

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802 (Spark's name)
        """What the option ``files_a_batch`` says."""
        return ReadMaxFiles(self._files_a_batch)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802 (Spark's name)
        """From now on, what is there now is all there is, and it stays as late as it is."""
        self._target_ms = _now_ms()
        self._target = listed(self._source)

    def latestOffset(self, start: Offset, limit: ReadLimit) -> Offset:  # noqa: N802 (Spark's name)
        """Which files the next batch takes; where there are none, how late it is."""
        listing = self._target if self._target is not None else listed(self._source)
        files_max = None if isinstance(limit, ReadAllAvailable) else self._files_a_batch
        now_ms = self._target_ms or _now_ms()
        return next_offset(self._source, start, listing, files_max, now_ms, self._close_after_ms)

    def partitions(self, start: Offset, end: Offset) -> list[InputPartition]:
        """The files of one batch, so that tasks have about as much to read each."""
        shares: list[InputPartition] = []
        items: list[ToRead | Clock] = []
        filled = 0
        for file in taken_between(self._source, start, end, listed(self._source)):
            if items and filled + file.bytes > TASK_BYTES:
                shares.append(Share(items))
                items, filled = [], 0
            items.append(file)
            filled += file.bytes
        if items:
            shares.append(Share(items))
        if end["clock_ms"] > start["clock_ms"]:
            shares.append(Share([Clock(end["clock_ms"])]))
        return shares

    # --- in tasks -----------------------------------------------------------------------------------

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The lines of its files."""
        rows: list[Row] = []
        held = 0
        for row in _rows(partition.value):
            rows.append(row)
            held += len(row[1] or b"")
            if len(rows) >= BATCH_ROWS or held >= BATCH_BYTES:
                yield _batch(rows)
                rows, held = [], 0
        if rows:
            yield _batch(rows)


def next_offset(
    source: str, start: Offset, listing: Listing, files_max: int | None, now_ms: int, close_after_ms: int
) -> Offset:
    """Where a batch ends that begins behind ``start``: that many files on, else by the clock, else where it began.

    Raises:
        ConfigurationError: ``start`` is none of this source.
    """
    _check(start)
    taken = {folder: Taken(value) for folder, value in start["folders"].items()}
    new: list[tuple[int, str, str]] = []
    for folder, names in listing.nodes.items():
        seen = taken.setdefault(folder, Taken())
        for name in names.values():
            found = parsed(name)
            if found is not None and seen.is_new(found):
                # One that is gone already takes its turn too, so that it is told.
                closed = _closed(os.path.join(source, folder, name))
                new.append((now_ms * 1000 if closed is None else closed.time_us, folder, name))
    if not new:
        clock_ms = min(now_ms, start["taken_ms"] + close_after_ms)
        if close_after_ms and start["folders"] and clock_ms > start["clock_ms"]:
            return start | {"clock_ms": clock_ms}
        return start
    grown = set()
    for _, folder, name in sorted(new)[:files_max]:
        found = parsed(name)
        assert found is not None
        taken[folder].add(found)
        grown.add(folder)
    for folder in grown:
        taken[folder].forget(epoch for epoch, _ in listing.nodes[folder])
    folders = {folder: taken[folder].value() for folder in sorted({*start["folders"], *grown})}
    return {"folders": folders, "taken_ms": max(now_ms, start["taken_ms"]), "clock_ms": start["clock_ms"]}


def taken_between(source: str, start: Offset, end: Offset, listing: Listing) -> list[ToRead]:
    """The files that ``end`` has and ``start`` has not."""
    _check(start)
    _check(end)
    files = []
    for folder, value in end["folders"].items():
        earlier = start["folders"].get(folder)
        if value == earlier:
            continue
        for epoch, number in Taken(value).since(Taken(earlier)):
            # Of one that is gone nobody knows any more when it was opened.
            name = listing.nodes.get(folder, {}).get((epoch, number), f"*-{epoch:08}-{number:06}{SUFFIX}")
            path = os.path.join(source, folder, name)
            files.append(ToRead(path, *(_closed(path) or (None, 0))))
    return files


def passed_over(offset: Offset, listing: Listing) -> dict[str, str]:
    """Paths of files that are there and will never be read, to the reason."""
    told = dict(listing.strange)
    for folder, names in listing.nodes.items():
        taken = Taken(offset["folders"].get(folder))
        for name in names.values():
            found = parsed(name)
            if found is not None and taken.is_another(found):
                told[os.path.join(folder, name)] = (
                    "later files of this node were read: it began anew, or this came late"
                )
    return told


def _check(offset: Offset) -> None:
    if offset.keys() != _BEGINNING.keys():
        raise ConfigurationError("the checkpoint is not of a form that is known here: write elsewhere")


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


def _closed(path: str) -> Closed | None:
    try:
        found = os.stat(path, follow_symlinks=False)
    except FileNotFoundError:
        return None
    return Closed(found.st_mtime_ns // 1000, found.st_size)


def _rows(items: list[ToRead | Clock]) -> Iterator[Row]:
    for item in items:
        if isinstance(item, Clock):
            yield "clock", None, None, "", item.time_ms * 1000
            continue
        try:
            for line, is_whole in lines_in(item.path):
                yield "line", line, is_whole and is_report(line), item.path, item.closed_us
        except FileNotFoundError:
            yield "gone", None, None, item.path, item.closed_us


def _batch(rows: list[Row]) -> pa.RecordBatch:
    *columns, times = zip(*rows, strict=True)
    # Whatever time a file system says, in no calendar's bounds.
    arrays = [pa.array(column, field.type) for column, field in zip(columns, _ARROW, strict=False)]
    return pa.RecordBatch.from_arrays(
        [*arrays, pa.array(times, pa.int64()).cast(_ARROW.field("at").type)], schema=_ARROW
    )
