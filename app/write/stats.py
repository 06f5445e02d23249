"""The data plane: reports about running jobs, taken immediately, stored without a guarantee, read as files.

    request ──► edge ──► sampling ──► queue ──► writer thread ──► open file ──► closed file
                strict   under        bounded   no fsync          hidden        whole, never written again
                checks   pressure

Nothing here reaches the WAL, the chain or PostgreSQL, and no failure here is a failure of the node.

*The queue* is bounded. It keeps fewer lines the fuller it is, or the more loop time reports used recently::

    0 <= lines_waiting <= lines_max        0 <= bytes_waiting <= bytes_max
    weight of a kept line = 1 / the share of lines that were kept at that time
    ANSWERING_SHARE + CHECKING_SHARE < 1/2: jobs have more than half of the loop, for any number of lines, on up to
    ANSWERING_SHARE / ANSWERING_S = 600 connections; each further connection still sends a request in ``OWED_S_MAX``,
    and from (1/2 - CHECKING_SHARE) / ANSWERING_S = 1,200 busy connections on, stats take half of the loop or more
    -share * OWED_S_MAX <= left_s <= burst_s        left_s grows by share each second

Lines that are being written count as waiting, so the bounds hold for all memory of reports. The share is charged in
elapsed time, not in processor time: while the loop serves one request, it serves no other.

*The files* are in the folder of the node::

    <folder>/20261121T134000Z-00000007-000003.ndjson         closed: never written again, its name never reused
    <folder>/.20261121T134100Z-00000007-000004.ndjson.part   open: readers skip names that begin with a dot

A name has the time at which the file was opened, the epoch of the node and a number within the epoch. A file is closed
when it is full or old: its modification time is set to now, then it is renamed. So a reader in the order of that time
never misses a file.

    bytes of closed files + file_bytes_max <= bytes_max        closed files <= FILES_MAX

Nothing is synced. A crash of the process leaves an open file, perhaps with a torn last line. The next start, or the
same process once its disk takes writes again, cuts it after its last whole line and closes it. A disk fault is counted
and logged once; jobs are written elsewhere.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from io import FileIO
from itertools import count
from pathlib import Path
from typing import Final, NamedTuple, TypeVar

from app.runtime.logs import log
from app.runtime.metrics import Metrics
from ledger.positions import Epoch

LINES_MAX = 200_000
"""Most waiting lines, however short they are."""
LINGER_S = 0.1
"""How long the writer lets lines gather; a half full queue wakes it immediately."""
CHECKED_BYTES_MAX = 16 << 20
"""Most bytes of all bodies that wait to be checked; further bodies are dropped unread."""
WEIGHTS = ((0.5, 1), (0.75, 2), (0.875, 4), (1.0, 8))
"""(used share, weight): below this share of the queue or of the checking time, one line in ``weight`` is kept."""
CHECKING_SHARE = 0.2
"""Share of the loop's time for checking and writing out, as measured."""
CHECKING_BURST_S = 0.5
"""Most checking time that accumulates without requests."""
ANSWERING_SHARE = 0.15
"""Share of the loop's time for receiving and answering requests, whatever the answer."""
ANSWERING_BURST_S = 0.2
"""Most answering time that accumulates without requests."""
ANSWERING_S = 250e-6
"""Assumed cost of receiving and answering a request without checking, on a shared core. It cannot be measured here:
most of it is spent before and after this code."""
assert CHECKING_SHARE + ANSWERING_SHARE < 0.5, "jobs come first, as long as connections are not too many"
OWED_S_MAX: Final = 1.0
"""Longest wait of a request for time that other requests have used."""
_BYTE_VALUES = 256
assert all(_BYTE_VALUES % weight == 0 for _, weight in WEIGHTS), "one byte of chance decides on a line"

SCAN_BYTES = 64 << 10
"""Bytes read at once, from the end of a file left open, to find its last whole line."""
FILES_MAX = 20_000
"""Most closed files that are kept, however small they are."""
FOLDER_MODE, FILE_MODE = 0o700, 0o600
"""Only the node's user may read them: reports of jobs may name customers."""
SUFFIX = ".ndjson"
OPEN_SUFFIX = SUFFIX + ".part"
TRY_AGAIN_S = 1.0
"""Pause before a failed disk is retried while no line waits."""

_CLOSED_NAME = re.compile(r"\d{8}T\d{6}Z-\d{8,}-\d{6,}" + re.escape(SUFFIX), re.ASCII)
_OPEN_NAME = re.compile(r"\.(\d{8}T\d{6}Z-\d{8,}-\d{6,})" + re.escape(OPEN_SUFFIX), re.ASCII)

Item = TypeVar("Item")


class Chunk(NamedTuple):
    """Whole lines, each with its newline."""

    data: bytes
    lines: int


class StatsIntake:
    """The queue between the event loop, which offers, and the writer thread, which takes."""

    def __init__(
        self, bytes_max: int, *, lines_max: int = LINES_MAX, draw: Callable[[int], bytes] = os.urandom
    ) -> None:
        self._bytes_max = bytes_max
        self._lines_max = lines_max
        self._draw = draw
        self._changed = threading.Condition()
        self._chunks: list[Chunk] = []
        self._bytes_waiting = self._lines_waiting = self._checked_bytes = 0
        self._is_urgent = False
        """Whether the writer takes the chunks without waiting for more."""
        self._turn = asyncio.Lock()
        self._answering = LoopShare(ANSWERING_SHARE, ANSWERING_BURST_S)
        self.checking = LoopShare(CHECKING_SHARE, CHECKING_BURST_S)

    async def admit(self) -> None:
        """Wait, for ``OWED_S_MAX`` at most, until the loop has time for one more request.

        Concurrent requests are released together: the rate is limited because each connection waits.
        """
        self._answering.charge(ANSWERING_S)
        if owed_s := self._answering.owed_s():
            await asyncio.sleep(owed_s)

    @asynccontextmanager
    async def turn(self, body_bytes: int) -> AsyncIterator[bool]:
        """Wait until no other body is checked, so that concurrent bodies get one turn of the loop at a time.

        Yields False, without waiting, if too many bytes wait already; also if no checking time is left.
        """
        if self._checked_bytes + body_bytes > CHECKED_BYTES_MAX:
            yield False
            return
        self._checked_bytes += body_bytes
        try:
            async with self._turn:
                yield self.checking.spent() < 1
        finally:
            self._checked_bytes -= body_bytes

    def weight(self) -> int:
        """Current weight: one line in this many is kept."""
        share = max(self._bytes_waiting / self._bytes_max, self._lines_waiting / self._lines_max, self.checking.spent())
        return next((weight for up_to, weight in WEIGHTS if share < up_to), WEIGHTS[-1][1])

    def sample(self, items: Sequence[Item], weight: int) -> Sequence[Item]:
        """Keep each of ``items`` with a chance of one in ``weight``, independently of the others."""
        if weight == 1:
            return items
        below = _BYTE_VALUES // weight
        return [item for item, chance in zip(items, self._draw(len(items)), strict=True) if chance < below]

    def offer(self, chunk: Chunk) -> bool:
        """Queue ``chunk``; False if there is no room. It MUST NOT be taken as stored: a crash loses it."""
        with self._changed:
            bytes_waiting = self._bytes_waiting + len(chunk.data)
            lines_waiting = self._lines_waiting + chunk.lines
            has_room = bytes_waiting <= self._bytes_max and lines_waiting <= self._lines_max
            if has_room:
                self._bytes_waiting, self._lines_waiting = bytes_waiting, lines_waiting
                self._chunks.append(chunk)
            self._is_urgent = self._is_urgent or not has_room or self.weight() > 1
            if self._is_urgent or len(self._chunks) == 1:
                self._changed.notify()
        return has_room

    def take(self, timeout_s: float | None) -> list[Chunk]:
        """All waiting chunks, after they gathered for ``LINGER_S``; empty if none came within ``timeout_s``.

        For the writer thread, which MUST call ``written`` for each.
        """
        with self._changed:
            if self._changed.wait_for(lambda: self._chunks or self._is_urgent, timeout_s):
                self._changed.wait_for(lambda: self._is_urgent, LINGER_S)
            chunks, self._chunks, self._is_urgent = self._chunks, [], False
        return chunks

    def written(self, chunk: Chunk) -> None:
        """Release the memory of ``chunk``, which was taken."""
        with self._changed:
            self._bytes_waiting -= len(chunk.data)
            self._lines_waiting -= chunk.lines

    def hurry(self) -> None:
        """Let the next ``take`` return immediately."""
        with self._changed:
            self._is_urgent = True
            self._changed.notify()


class LoopShare:
    """A token bucket of seconds, for the thread of the loop."""

    def __init__(self, share: float, burst_s: float, *, clock: Callable[[], float] = time.perf_counter) -> None:
        self._share = share
        self._burst_s = burst_s
        self._clock = clock
        self._left_s = burst_s
        self._at_s = clock()

    def spent(self) -> float:
        """Used part of the bucket: 0 if full, 1 or more if empty."""
        return 1 - self._refill() / self._burst_s

    def owed_s(self) -> float:
        """Seconds until the debt is paid, at most ``OWED_S_MAX``; 0 without a debt."""
        return max(0.0, -self._refill() / self._share)

    def charge(self, used_s: float) -> None:
        """Take ``used_s`` out of the bucket, which may then owe."""
        self._left_s = max(self._refill() - used_s, -self._share * OWED_S_MAX)

    @contextmanager
    def charged(self) -> Iterator[None]:
        """Charge the time of the block, which MUST NOT await."""
        began_s = self._clock()
        try:
            yield
        finally:
            self.charge(self._clock() - began_s)

    def _refill(self) -> float:
        """Seconds in the bucket now."""
        before_s, self._at_s = self._at_s, self._clock()
        self._left_s = min(self._burst_s, self._left_s + (self._at_s - before_s) * self._share)
        return self._left_s


@dataclass(eq=False)
class StatsFiles:
    """The files of one node. For one thread; every method may raise ``OSError`` and can be called again after it."""

    folder: Path
    epoch: Epoch
    file_bytes_max: int
    file_age_max_s: float
    bytes_max: int
    on_removed: Callable[[int], None]

    def __post_init__(self) -> None:
        self._numbers = count(1)
        self._file: FileIO | None = None
        self._opened_s = 0.0

    def tidy(self) -> None:
        """Close files left open by an earlier process or a disk fault; remove the oldest beyond the bounds."""
        if self._file is not None:
            return
        self.folder.mkdir(FOLDER_MODE, parents=True, exist_ok=True)
        for path in sorted(self.folder.iterdir()):
            if _OPEN_NAME.fullmatch(path.name):
                _cut_torn_line(path)
                _publish(path)
        self._remove_oldest()

    def append(self, data: bytes) -> None:
        """Write whole lines. After an ``OSError`` they are cut off again, if the disk allows that."""
        if self._file is not None and self._file.tell() > max(0, self.file_bytes_max - len(data)):
            self.close()
        file = self._file = self._file or self._open()
        size, written = file.tell(), 0
        try:
            while written < len(data):
                written += os.pwrite(file.fileno(), data[written:], size + written)
            file.seek(size + written)
        except OSError:
            try:
                file.truncate(size)
                file.seek(size)
            except OSError:
                # It is left to ``tidy``.
                self._file = None
                with contextlib.suppress(OSError):
                    file.close()
            raise

    def due_in_s(self) -> float | None:
        """Seconds until the open file is old, None if there is none."""
        return None if self._file is None else max(0.0, self._opened_s + self.file_age_max_s - time.monotonic())

    def close_old(self) -> None:
        """Close the open file if it is old."""
        if self.due_in_s() == 0.0:
            self.close()

    def close(self) -> None:
        """Close the open file, if there is one, and show it to readers."""
        if self._file is not None:
            file, self._file = self._file, None
            file.close()
            _publish(Path(str(file.name)))
            self._remove_oldest()

    def _open(self) -> FileIO:
        self.tidy()
        opened = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
        stems = (f"{opened}-{self.epoch:08}-{number:06}" for number in self._numbers)
        stem = next(stem for stem in stems if not (self.folder / (stem + SUFFIX)).exists())
        self._opened_s = time.monotonic()
        return FileIO(self.folder / f".{stem}{OPEN_SUFFIX}", "x", opener=partial(os.open, mode=FILE_MODE))

    def _remove_oldest(self) -> None:
        closed = sorted(path for path in self.folder.iterdir() if _CLOSED_NAME.fullmatch(path.name))
        sizes = [path.stat().st_size for path in closed]
        kept_bytes = sum(sizes)
        for number, (path, size) in enumerate(zip(closed, sizes, strict=True)):
            if kept_bytes + self.file_bytes_max <= self.bytes_max and len(closed) - number <= FILES_MAX:
                return
            path.unlink(missing_ok=True)
            self.on_removed(size)
            kept_bytes -= size


def _publish(path: Path) -> None:
    """Rename a complete file so that readers find it; an empty file is removed."""
    if path.stat().st_size == 0:
        path.unlink()
        return
    os.utime(path)
    path.rename(path.with_name(path.name.removeprefix(".").removesuffix(OPEN_SUFFIX) + SUFFIX))


def _cut_torn_line(path: Path) -> None:
    """Cut the file after its last newline. It is read, not mapped: a disk fault under a map kills the process."""
    with path.open("r+b") as file:
        end = file.seek(0, os.SEEK_END)
        while end > 0:
            start = max(0, end - SCAN_BYTES)
            file.seek(start)
            if (found := file.read(end - start).rfind(b"\n")) >= 0:
                end = start + found + 1
                break
            end = start
        file.truncate(end)


class StatsWriter:
    """The writer thread, from ``start`` until ``close``."""

    def __init__(self, intake: StatsIntake, files: StatsFiles, metrics: Metrics) -> None:
        self._intake = intake
        self._files = files
        self._metrics = metrics
        self._closing = threading.Event()
        self._failing = False
        self._thread = threading.Thread(target=self._run, name="stats-writer", daemon=True)

    def start(self) -> None:
        """Close files of an earlier process, then write chunks."""
        self._thread.start()

    def close(self, timeout_s: float) -> None:
        """Write waiting chunks and close the file. After ``timeout_s`` the thread is left to end with the process."""
        if not self._thread.is_alive():
            return
        self._closing.set()
        self._intake.hurry()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            log.warning("stats_not_flushed", waited_s=timeout_s)

    def _run(self) -> None:
        self._attempt(self._files.tidy)
        while not self._closing.is_set():
            for chunk in self._intake.take(TRY_AGAIN_S if self._failing else self._files.due_in_s()):
                self._write(chunk)
            self._attempt(self._files.close_old)
            if self._failing:
                self._attempt(self._files.tidy)
        for chunk in self._intake.take(0):
            self._write(chunk)
        self._attempt(self._files.close)

    def _write(self, chunk: Chunk) -> None:
        if self._attempt(lambda: self._files.append(chunk.data)):
            self._metrics.count("stats_written_bytes", len(chunk.data))
            if self._failing:
                self._failing = False
                log.info("stats_written_again")
        else:
            self._metrics.count("stats_dropped", chunk.lines, "disk")
        self._intake.written(chunk)

    def _attempt(self, work: Callable[[], None]) -> bool:
        """Whether ``work`` succeeded; only the first failure until lines are written again is logged."""
        try:
            work()
        except OSError as error:
            self._metrics.count("stats_write_failures")
            if not self._failing:
                log.warning("stats_not_written", error=str(error))
            self._failing = True
            return False
        return True
