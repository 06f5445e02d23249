"""Who read what on this node: lines of JSON in files of a bounded size, beside the data.

    access.log, access.log.1 … access.log.7      the newest first; each of up to FILE_BYTES

A line is written a moment after its request was answered, and a crash may lose the last ones. What must not be lost is
chained: acts, refusals, and reads of tenants that ask for it (``app.intake.access_records``). When lines come faster
than the disk takes them the newest are counted instead, and the count is a line.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable, Iterator
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any, Final

import orjson

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
        self._writing = asyncio.Lock()

    def add(self, line: Line) -> None:
        """Write ``line``, which has ``at``, soon."""
        if len(self._waiting) < QUEUE_MAX:
            self._waiting.append(line)
        else:
            self._dropped += 1
            self._on_dropped(1)

    async def run(self) -> None:
        """Write what waits, until cancelled; then what is left."""
        try:
            while True:
                await asyncio.sleep(WRITE_INTERVAL_S)
                await self.flush()
        finally:
            self._write(self._taken())

    async def flush(self) -> None:
        """Return once all that was added is in its file."""
        async with self._writing:
            if self._waiting or self._dropped:
                await asyncio.to_thread(self._write, self._taken())

    async def newest(self, tenant_id: str, below: int, limit: int) -> tuple[list[Line], int | None]:
        """Up to ``limit`` lines about the tenant, newest first, from below the line with that number (from 1, of all
        lines that are kept); and the number to go on below, None at the end."""
        await self.flush()
        async with self._writing:
            return await asyncio.to_thread(self._newest, tenant_id, below, limit)

    def _taken(self) -> list[Line]:
        lines = [*self._waiting]
        self._waiting.clear()
        if self._dropped:
            lines.append({"at": lines[-1]["at"] if lines else None, "dropped": self._dropped})
            self._dropped = 0
        return lines

    def _write(self, lines: list[Line]) -> None:
        if not lines:
            return
        handler = RotatingFileHandler(self._path, maxBytes=FILE_BYTES, backupCount=FILES_MAX - 1, encoding="utf-8")
        with contextlib.closing(handler):
            for line in lines:
                handler.emit(logging.makeLogRecord({"msg": orjson.dumps(line).decode()}))

    def _newest(self, tenant_id: str, below: int, limit: int) -> tuple[list[Line], int | None]:
        found: list[tuple[int, Line]] = []
        for number, line in enumerate(self._lines(), 1):
            if line.get("tenant_id") == tenant_id and number < below:
                found.append((number, line))
        page = found[-limit:]
        return [line for _, line in reversed(page)], page[0][0] if len(found) > len(page) else None

    def _lines(self) -> Iterator[Line]:
        """All that are kept, oldest first."""
        names = [*(f"{NAME}.{number}" for number in range(FILES_MAX - 1, 0, -1)), NAME]
        for name in names:
            path = self._path.with_name(name)
            if path.exists():
                with path.open("rb") as file:
                    yield from map(orjson.loads, filter(bytes.strip, file))
