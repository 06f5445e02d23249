"""The Data Source ``tallystick-stats``: files of nodes as a stream of lines, each file once.

An offset (``pipeline.stats.offset``) says what was taken, and up to when the clock has gone on without anything new.
Spark's own source of files knows each one it ever read by its path, in memory and in a log that is written again and
again as a whole; this offset has the size of the folder, however long it has been read. Two equal offsets are the same
text, and what lies between two is the same files whenever it is asked for: a file is taken once it is closed, and never
changes. Files are taken in the order in which they were closed, over all nodes.

    taken_ms <= clock of the run that took the newest       clock_ms <= taken_ms + close_after_ms

So a clock that was wrong for one run moves ``clock_ms`` no further than files say. A file that was opened or closed
more than ``AHEAD_MAX_S`` past the clock waits: either clock may be the wrong one.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from typing import Final, NamedTuple

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxFiles, SupportsTriggerAvailableNow
from pyspark.sql.types import StructType

from ledger.errors import ConfigurationError
from pipeline.stats.folder import SUFFIX, Listing, lines_in, listed
from pipeline.stats.form import is_report
from pipeline.stats.offset import BEGINNING, Offset, check
from pipeline.stats.taken import FileName, Taken, parsed

FORMAT: Final = "tallystick-stats"
SCHEMA: Final = "what string, line binary, is_report boolean, file string, at timestamp"
"""``what`` is ``line``; ``gone``, a file that was removed before it could be read; or ``clock``, how late it is.
``at`` is when the file was closed, or the time on the clock."""
AHEAD_MAX_S: Final = 300
"""How far past this machine's clock a time may lie that is believed."""
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
        return dict(BEGINNING)

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802 (Spark's name)
        """What the option ``files_a_batch`` says."""
        return ReadMaxFiles(self._files_a_batch)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802 (Spark's name)
        """From now on, what is there now is all there is, and it stays as late as it is."""
        self._target_ms = _clock_ms()
        self._target = listed(self._source)

    def latestOffset(self, start: Offset, limit: ReadLimit) -> Offset:  # noqa: N802 (Spark's name)
        """Which files the next batch takes; where there are none, how late it is."""
        listing = self._target if self._target is not None else listed(self._source)
        files_max = None if isinstance(limit, ReadAllAvailable) else self._files_a_batch
        now_ms = self._target_ms or _clock_ms()
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
        for row in _rows(self._source, partition.value):
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
        ConfigurationError: ``start`` is none of this source, or ``now_ms`` lies so far behind it that this is no clock
            to close windows by.
    """
    check(start)
    known_ms = max(start["taken_ms"], start["clock_ms"])
    if close_after_ms and now_ms + AHEAD_MAX_S * 1000 < known_ms:
        raise ConfigurationError(
            f"this machine's clock says {_utc(now_ms)}, and an earlier run here had come to {_utc(known_ms)}: "
            "set the clock right, or leave out --close"
        )
    taken = {folder: Taken(value) for folder, value in start["folders"].items()}
    new: list[tuple[int, str, FileName]] = []
    others: dict[tuple[str, int], list[FileName]] = {}
    for folder, names in listing.nodes.items():
        seen = taken.setdefault(folder, Taken())
        for name in names.values():
            found = parsed(name)
            assert found is not None
            if seen.is_another(found):
                others.setdefault((folder, found.epoch), []).append(found)
            elif seen.is_new(found):
                # One that is gone already is taken too, so that it is told.
                closed = _closed(os.path.join(source, folder, name))
                if not _is_ahead(found, closed, now_ms):
                    new.append((0 if closed is None else closed.time_us, folder, found))
    if not new:
        clock_ms = min(now_ms, start["taken_ms"] + close_after_ms)
        if close_after_ms and start["folders"] and clock_ms > start["clock_ms"]:
            return start | {"clock_ms": clock_ms}
        return start
    batch = sorted(new)[:files_max]
    for _, folder, found in batch:
        taken[folder].add(found, others.get((folder, found.epoch), ()))
    grown = {folder for _, folder, _ in batch}
    for folder in grown:
        taken[folder].forget(epoch for epoch, _ in listing.nodes[folder])
    folders = {folder: taken[folder].value() for folder in sorted({*start["folders"], *grown})}
    closed_ms = min(now_ms, batch[-1][0] // 1000)
    return {"folders": folders, "taken_ms": max(closed_ms, start["taken_ms"]), "clock_ms": start["clock_ms"]}


def taken_between(source: str, start: Offset, end: Offset, listing: Listing) -> list[ToRead]:
    """The files that ``end`` has and ``start`` has not."""
    check(start)
    check(end)
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


def passed_over(source: str, offset: Offset, listing: Listing, now_ms: int) -> dict[str, str]:
    """Paths of files that are not read though they are there, or not there though they once were, to the reason."""
    told = dict(listing.strange)
    for folder, names in listing.nodes.items():
        taken = Taken(offset["folders"].get(folder))
        for name in names.values():
            found = parsed(name)
            assert found is not None
            path = os.path.join(folder, name)
            if taken.is_another(found):
                told[path] = "later files of this node were read: it began anew, or this came late"
            elif taken.is_new(found) and _is_ahead(found, _closed(os.path.join(source, path)), now_ms):
                told[path] = f"its time lies ahead of this machine's clock, {_utc(now_ms)}: it waits until then"
    for folder, value in offset["folders"].items():
        for epoch, first, last in Taken(value).missing(listing.nodes.get(folder, ())):
            path = os.path.join(folder, f"*-{epoch:08}-{first:06}{SUFFIX}")
            count = f"{last - first + 1:,} files, up to number {last}, are" if last > first else "it is"
            told[path] = f"{count} not here, and later ones are: removed before they were read, or not brought yet"
    return told


def _is_ahead(name: FileName, closed: Closed | None, now_ms: int) -> bool:
    """Whether one clock, that of the node or this one, is wrong."""
    believed_ms = now_ms + AHEAD_MAX_S * 1000
    return name.opened > _utc(believed_ms) or (closed is not None and closed.time_us > believed_ms * 1000)


def _utc(time_ms: int) -> str:
    """As the names of files have it."""
    return time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(time_ms / 1000))


def _clock_ms() -> int:
    return time.time_ns() // 1_000_000


def _closed(path: str) -> Closed | None:
    try:
        found = os.stat(path, follow_symlinks=False)
    except (FileNotFoundError, NotADirectoryError):
        return None
    return Closed(found.st_mtime_ns // 1000, found.st_size)


def _rows(source: str, items: list[ToRead | Clock]) -> Iterator[Row]:
    for item in items:
        if isinstance(item, Clock):
            yield "clock", None, None, "", item.time_ms * 1000
            continue
        try:
            for line, is_whole in lines_in(source, os.path.relpath(item.path, source)):
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
