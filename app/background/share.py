"""A share of the event loop for many who each need little of it, and whom nobody waits for.

Who asks for a turn gets it in the order of asking. What was done in turns is told to ``spent``, and rested from: all of
it together takes no more than a share of the time. That is ``BUSY`` while the rest of the loop works, ``IDLE`` else::

    time in turns <= share * time, within a piece or two

So ten thousand who are told of one write cost the next write no more than ten of them; they are told later.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from typing import Final

BUSY: Final = 0.05
"""Share of the time that turns get while others work in this loop."""
IDLE: Final = 0.4
BUSY_FROM: Final = 0.25
"""Others work where they take more than this part of a processor."""
LOOK_INTERVAL_S: Final = 0.25
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
        self._share = IDLE
        self._looked_at = time.perf_counter(), time.thread_time()

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
        """A turn took so long."""
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
                await asyncio.sleep(owed_s * (1 - self._share) / self._share)

    def _look(self) -> None:
        """See how much of a processor others took since it was last looked."""
        now_s, worked_s = time.perf_counter(), time.thread_time()
        began_s, worked_before_s = self._looked_at
        if now_s - began_s >= LOOK_INTERVAL_S:
            others_s = worked_s - worked_before_s - self._spent_s
            self._share = BUSY if others_s > BUSY_FROM * (now_s - began_s) else IDLE
            self._looked_at, self._spent_s = (now_s, worked_s), 0.0
