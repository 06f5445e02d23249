"""The files that stats reports are written to, and the thread that writes them.

    <folder>/20261121T134000Z-00000007-000003.ndjson         closed: never written again, its name never used again
    <folder>/.20261121T134100Z-00000007-000004.ndjson.part   open: readers skip names that begin with a dot

A name is the time at which the file was opened, the epoch of the node and a number within it. A file is closed when
it is full or old: its time of modification is set to now, then it is renamed. Readers that take files in the order of
that time therefore never find one behind others that they have read.

    bytes of closed files + file_bytes_max <= bytes_max        closed files <= FILES_MAX

Nothing is synced. A crash of the process leaves an open file, perhaps with a torn last line. The next start, or the
same process once its disk takes writes again, cuts it behind its last whole line and closes it. A fault of the disk
is counted and logged once; jobs are written elsewhere.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path

import structlog

from app.runtime.metrics import Metrics
from app.write.stats.intake import Chunk, StatsIntake
from ledger.positions import Epoch

FILES_MAX = 20_000
"""Most closed files that are kept, however small they are."""
FOLDER_MODE, FILE_MODE = 0o700, 0o600
"""Who runs the node reads them, and nobody else: what jobs report may name customers."""
SUFFIX = ".ndjson"
OPEN_SUFFIX = SUFFIX + ".part"
SCAN_BYTES = 64 << 10
"""How much of a file left open is read at once, from its end, to find its last whole line."""

_CLOSED_NAME = re.compile(r"\d{8}T\d{6}Z-\d{8,}-\d{6,}" + re.escape(SUFFIX), re.ASCII)
_OPEN_NAME = re.compile(r"\.(\d{8}T\d{6}Z-\d{8,}-\d{6,})" + re.escape(OPEN_SUFFIX), re.ASCII)


class StatsFiles:
    """The files of one node. For one thread; every method may raise ``OSError`` and can be called again after it."""

    def __init__(
        self,
        folder: Path,
        *,
        epoch: Epoch,
        file_bytes_max: int,
        file_age_max_s: float,
        bytes_max: int,
        on_removed: Callable[[int], None],
    ) -> None:
        self._folder = folder
        self._epoch = epoch
        self._file_bytes_max = file_bytes_max
        self._file_age_max_s = file_age_max_s
        self._bytes_max = bytes_max
        self._on_removed = on_removed
        self._number = 0
        self._fd: int | None = None
        self._path = folder
        self._size = 0
        self._opened_s = 0.0
        self._untidy = True

    def tidy(self) -> None:
        """Close what a process that ended, or a disk that failed, left open; remove the oldest beyond the bounds."""
        if self._fd is not None or not self._untidy:
            return
        self._folder.mkdir(FOLDER_MODE, parents=True, exist_ok=True)
        for entry in sorted(os.scandir(self._folder), key=lambda entry: entry.name):
            if _OPEN_NAME.fullmatch(entry.name):
                _cut_torn_line(Path(entry.path))
                _publish(Path(entry.path))
        self._untidy = False
        self._remove_oldest()

    def append(self, data: bytes) -> None:
        """Write whole lines. After an ``OSError`` none of them is kept, as far as the disk can still be told so."""
        if self._fd is not None and self._size and self._size + len(data) > self._file_bytes_max:
            self.close()
        if self._fd is None:
            self._open()
        assert self._fd is not None
        written = 0
        try:
            while written < len(data):
                written += os.pwrite(self._fd, data[written:], self._size + written)
        except OSError:
            self._take_back()
            raise
        self._size += len(data)

    def due_in_s(self) -> float | None:
        """Seconds until the open file is old, None when there is none."""
        return None if self._fd is None else max(0.0, self._opened_s + self._file_age_max_s - time.monotonic())

    def close_old(self) -> None:
        """Close the open file if it is old."""
        if self.due_in_s() == 0.0:
            self.close()

    def close(self) -> None:
        """Close the open file, if there is one, and show it to readers."""
        if self._fd is None:
            return
        fd, self._fd = self._fd, None
        self._untidy = True
        os.close(fd)
        if self._size:
            _publish(self._path)
        else:
            self._path.unlink()
        self._untidy = False
        self._remove_oldest()

    def _open(self) -> None:
        self._untidy = True
        self.tidy()
        opened = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
        while True:
            self._number += 1
            stem = f"{opened}-{self._epoch:08}-{self._number:06}"
            if not (self._folder / (stem + SUFFIX)).exists():
                break
        self._path = self._folder / f".{stem}{OPEN_SUFFIX}"
        self._fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE_MODE)
        self._size = 0
        self._opened_s = time.monotonic()

    def _take_back(self) -> None:
        """Cut off what a failed write has left; a file that cannot be cut is left for ``tidy``."""
        assert self._fd is not None
        try:
            os.ftruncate(self._fd, self._size)
        except OSError:
            fd, self._fd = self._fd, None
            self._untidy = True
            with contextlib.suppress(OSError):
                os.close(fd)

    def _remove_oldest(self) -> None:
        closed = sorted(
            (entry.name, entry.stat().st_size)
            for entry in os.scandir(self._folder)
            if _CLOSED_NAME.fullmatch(entry.name)
        )
        total, count = sum(size for _, size in closed), len(closed)
        for name, size in closed:
            if total + self._file_bytes_max <= self._bytes_max and count <= FILES_MAX:
                return
            (self._folder / name).unlink(missing_ok=True)
            self._on_removed(size)
            total, count = total - size, count - 1


def _publish(path: Path) -> None:
    """Give a file that is complete the name under which readers find it; one without a line is removed."""
    name = _OPEN_NAME.fullmatch(path.name)
    assert name is not None
    if path.stat().st_size == 0:
        path.unlink()
        return
    os.utime(path)
    path.rename(path.with_name(name[1] + SUFFIX))


def _cut_torn_line(path: Path) -> None:
    """Cut the file behind its last newline."""
    with path.open("r+b") as file:
        end = size = file.seek(0, os.SEEK_END)
        while end > 0:
            start = max(0, end - SCAN_BYTES)
            file.seek(start)
            found = file.read(end - start).rfind(b"\n")
            if found >= 0:
                end = start + found + 1
                break
            end = start
        if end < size:
            file.truncate(end)


TRY_AGAIN_S = 1.0
"""How long a disk that failed is left alone while nothing is to be written."""

log = structlog.get_logger()


class StatsWriter:
    """Writes from ``start`` on until ``close``."""

    def __init__(self, intake: StatsIntake, files: StatsFiles, metrics: Metrics) -> None:
        self._intake = intake
        self._files = files
        self._metrics = metrics
        self._closing = threading.Event()
        self._failing = False
        self._thread = threading.Thread(target=self._run, name="stats-writer", daemon=True)

    def start(self) -> None:
        """Close what an earlier process left open, then write what comes."""
        self._thread.start()

    def close(self, timeout_s: float) -> None:
        """Write what waits, close the file; after ``timeout_s`` the thread is left to end with the process."""
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
        """Whether ``work`` could be done; of all failures until lines are written again the first is logged."""
        try:
            work()
        except OSError as error:
            self._metrics.count("stats_write_failures")
            if not self._failing:
                log.warning("stats_not_written", error=str(error))
            self._failing = True
            return False
        return True
