"""A share of the event loop for many who each need little of it, and whom nobody waits for.

Who asks for a turn gets it in the order of asking. What was done in turns is told to ``spent``, and rested from: all of
it together takes no more than a share of the processor time that the loop gets. That is ``BUSY`` while others work in
the loop, or on the machine so that the loop waits for its processor; ``IDLE`` else::

    time in turns <= share * time of the loop, within a piece or two

So ten thousand who are told of one write cost the next write no more than ten of them; they are told later.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import deque
from contextlib import suppress
from typing import Final

BUSY: Final = 0.03
"""Share of the loop's time that turns get while others work."""
IDLE: Final = 0.4
BUSY_FROM: Final = 0.25
"""Others work where they take more than this part of a processor, or keep the loop from having it."""
GOT_MIN: Final = 0.05
"""Least part of the processor time it wants that the loop is taken to get."""
LOOK_INTERVAL_S: Final = 0.05
"""How often it is looked how much others take."""
TURNS_AT_ONCE: Final = 16
"""Turns that are taken in one pass of the event loop."""
REST_FROM_S: Final = 0.0005
"""What was spent is rested from once it is so much: timers are no finer."""


class Share:
    """Hands out turns. Belongs to one event loop; ``run`` MUST run for turns to come."""

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._wanted = asyncio.Event()
        self._owed_s = 0.0
        """Spent and not rested from."""
        self._spent_s = 0.0
        """Spent since others were looked at."""
        self._share = BUSY
        self._got = 1.0
        """Part of the processor time that the loop wanted, and got."""
        self._scheduled = _Scheduled()
        self._looked_at = self._scheduled.look()

    def grant(self, future: asyncio.Future[None]) -> None:
        """Set ``future`` when its turn has come; until its next await whoever waits for it has the turn."""
        self._waiting.append(future)
        self._wanted.set()

    async def turn(self) -> None:
        """Return when it is the caller's turn, which lasts until its next await."""
        future = asyncio.get_running_loop().create_future()
        self.grant(future)
        await future

    def spent(self, seconds: float) -> None:
        """A turn took so much processor time."""
        self._owed_s += seconds
        self._spent_s += seconds

    async def run(self) -> None:
        """Hand out turns, until cancelled."""
        while True:
            await self._wanted.wait()
            handed_out = 0
            while self._waiting and handed_out < TURNS_AT_ONCE:
                future = self._waiting.popleft()
                if not future.done():
                    future.set_result(None)
                    handed_out += 1
            if not self._waiting:
                self._wanted.clear()
            # Behind those who were woken just now.
            await asyncio.sleep(0)
            if self._owed_s >= REST_FROM_S:
                self._look()
                owed_s, self._owed_s = self._owed_s, 0.0
                await asyncio.sleep(owed_s * (1 - self._share) / (self._share * self._got))

    def _look(self) -> None:
        """See how much of a processor others took since it was last looked."""
        now = self._scheduled.look()
        took_s, ran_s, waited_s = (after - before for after, before in zip(now, self._looked_at, strict=True))
        if took_s >= LOOK_INTERVAL_S:
            self._share = BUSY if ran_s - self._spent_s + waited_s > BUSY_FROM * took_s else IDLE
            self._got = max(GOT_MIN, ran_s / (ran_s + waited_s)) if ran_s + waited_s else 1.0
            self._looked_at, self._spent_s = now, 0.0


class _Scheduled:
    """How the system schedules the thread that asks, where it says so."""

    def __init__(self) -> None:
        self._file: int | None = None
        with suppress(OSError):
            self._file = os.open("/proc/thread-self/schedstat", os.O_RDONLY | os.O_CLOEXEC)

    def __del__(self) -> None:
        if self._file is not None:
            os.close(self._file)

    def look(self) -> tuple[float, float, float]:
        """The time, how long the thread has run, and how long it has waited for a processor, in seconds."""
        if self._file is None:
            return time.perf_counter(), time.thread_time(), 0.0
        ran_ns, waited_ns, _ = os.pread(self._file, 128, 0).split()
        return time.perf_counter(), int(ran_ns) / 1e9, int(waited_ns) / 1e9
