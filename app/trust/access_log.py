"""The access log of a node: reads, acts and refusals as lines of JSON, in files of bounded size beside the data.

    access.log, access.log.1 … access.log.7      the newest first; each of up to FILE_BYTES

A line is written shortly after its request was answered, so a crash may lose the last ones. Acts, refusals, and reads
of tenants that ask for it (``write.intake.access_records``) are also chained, and are not lost. If the disk fails or is
too slow, the newest lines are dropped, and their number is written as a line. A reader skips a line that a full disk or
a crash cut off.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections import deque
from collections.abc import Callable, Iterator
from io import TextIOWrapper
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any, Final

import orjson

from app.runtime.logs import log
from ledger.errors import NotReadyError, reported_as
from wal.segment import FILE_MODE

FILE_BYTES: Final = 8 << 20
FILES_MAX: Final = 8
QUEUE_MAX: Final = 10_000
"""Lines that wait for the disk."""
WRITE_INTERVAL_S: Final = 0.2
NAME: Final = "access.log"

Line = dict[str, Any]


class AccessLog:
    """Belongs to one event loop; files are written on other threads, one at a time."""

    def __init__(self, folder: Path, on_dropped: Callable[[int], object] = lambda _: None) -> None:
        self._path = folder / NAME
        self._on_dropped = on_dropped
        self._waiting: deque[Line] = deque()
        self._dropped = 0
        self._fault: str | None = None
        """Why the last lines could not be written."""
        self._writing = asyncio.Lock()

    def add(self, line: Line) -> None:
        """Queue ``line``, which has ``at``, to be written."""
        if len(self._waiting) < QUEUE_MAX:
            self._waiting.append(line)
        else:
            self._dropped += 1
            self._on_dropped(1)

    async def run(self) -> None:
        """Write queued lines until cancelled, then the rest."""
        try:
            while True:
                await asyncio.sleep(WRITE_INTERVAL_S)
                await self.flush()
        finally:
            self._written(*self._write(self._taken()))

    async def flush(self) -> None:
        """Return once every added line is in its file, or counted as dropped if the disk fails."""
        async with self._writing:
            if self._waiting or (self._dropped and self._fault is None):
                self._written(*await asyncio.to_thread(self._write, self._taken()))

    async def newest(self, tenant_id: str, below: int, limit: int) -> tuple[list[Line], int | None]:
        """Up to ``limit`` lines about the tenant, newest first, whose number among all kept lines (from 1) is less than
        ``below``; and the next ``below``, None at the end.

        Raises:
            NotReadyError: the files cannot be read.
        """
        await self.flush()
        async with self._writing:
            with reported_as(NotReadyError, "the access log of this node cannot be read", OSError):
                return await asyncio.to_thread(self._newest, tenant_id, below, limit)

    def _taken(self) -> list[Line]:
        lines = [*self._waiting]
        self._waiting.clear()
        if self._dropped:
            lines.append({"at": lines[-1]["at"] if lines else None, "dropped": self._dropped})
            self._dropped = 0
        return lines

    def _write(self, lines: list[Line]) -> tuple[list[Line], str | None]:
        """Write the lines. Returns the unwritten ones and the error. Blocks."""
        left = deque(lines)
        try:
            if left:
                with contextlib.closing(_Files(self._path)) as files:
                    while left:
                        files.emit(logging.makeLogRecord({"msg": orjson.dumps(left[0]).decode()}))
                        left.popleft()
        except OSError as error:
            return [*left], str(error)
        return [], None

    def _written(self, left: list[Line], fault: str | None) -> None:
        for line in left:
            self._dropped += line.get("dropped", 1)
            if "dropped" not in line:
                self._on_dropped(1)
        if fault != self._fault:
            log.warning("access_log_not_written", error=fault) if fault else log.info("access_log_written_again")
        self._fault = fault

    def _newest(self, tenant_id: str, below: int, limit: int) -> tuple[list[Line], int | None]:
        found = [
            (number, line)
            for number, line in enumerate(self._lines(), 1)
            if line.get("tenant_id") == tenant_id and number < below
        ]
        page = found[-limit:]
        return [line for _, line in reversed(page)], page[0][0] if len(found) > len(page) else None

    def _lines(self) -> Iterator[Line]:
        """Every kept line, oldest first."""
        for name in [*(f"{NAME}.{number}" for number in range(FILES_MAX - 1, 0, -1)), NAME]:
            path = self._path.with_name(name)
            if path.exists():
                with path.open("rb") as file:
                    for text in file:
                        # A line that a crash cut off is skipped.
                        with contextlib.suppress(orjson.JSONDecodeError):
                            if isinstance(line := orjson.loads(text), dict):
                                yield line


class _Files(RotatingFileHandler):
    """The files, open for appending. Errors are raised."""

    def __init__(self, path: Path) -> None:
        with open(path, "ab+", opener=_own) as file:
            if file.tell():
                file.seek(-1, os.SEEK_END)
                if file.read() != b"\n":
                    file.write(b"\n")
        super().__init__(path, maxBytes=FILE_BYTES, backupCount=FILES_MAX - 1, encoding="utf-8")

    def _open(self) -> TextIOWrapper:
        return open(self.baseFilename, "a", encoding="utf-8", opener=_own)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 (named by logging)
        """Raise the current exception; logging would print it, with the line."""
        raise


def _own(path: str, flags: int) -> int:
    """Open a file. Only the service's account may read a new one, because it holds lines about all tenants."""
    return os.open(path, flags, FILE_MODE)
