"""How work shares the event loop: in turns, so that requests are served between two of them.

``FairTurns`` are for requests: one task takes a turn, and the loop looks at the network before the next. However many
requests run, a small request waits for one turn, not for one turn of each. Turns rotate by key::

    each turn: <= LINES_PER_TURN lines, and <= BYTES_PER_TURN bytes or one line; or about TURN_S

``Share`` is for background work. It hands out turns first come, first served, and pauses between them, so that all
turns together take no more than a share of the loop's processor time: ``BUSY`` while other work runs in the loop or on
the machine, ``IDLE`` otherwise::

    time in turns <= share * time of the loop, within a piece or two
"""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_right
from collections import deque
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import accumulate, count
from pathlib import Path
from typing import Final, TypeVar
from weakref import WeakKeyDictionary

BUSY: Final = 0.03
"""Share of the loop's time that turns get while other work runs."""
IDLE: Final = 0.4
BUSY_FROM: Final = 0.25
"""Other work runs if it takes more than this part of a processor, or keeps the loop from that part."""
GOT_MIN: Final = 0.05
"""Lower bound of the part of its wanted processor time that the loop is assumed to get."""
LOOK_INTERVAL_S: Final = 0.05
"""Interval of the checks how much other work takes."""
TURNS_AT_ONCE: Final = 16
"""Turns that are taken in one pass of the event loop."""
REST_FROM_S: Final = 0.0005
"""Turns pause once they have spent so much: timers are no finer."""


@dataclass(eq=False)
class Share:
    """Hands out turns. Belongs to one event loop; ``run`` MUST run for turns to come."""

    _waiting: deque[asyncio.Future[None]] = field(default_factory=deque)
    _wanted: asyncio.Event = field(default_factory=asyncio.Event)
    _owed_s: float = 0.0
    """Spent since the last pause."""
    _spent_s: float = 0.0
    """Spent since the last check of other work."""
    _share: float = BUSY
    _got: float = 1.0
    """Part of its wanted processor time that the loop got."""
    _looked_at: tuple[float, float, float] = field(default_factory=lambda: _scheduled())

    def grant(self, future: asyncio.Future[None]) -> None:
        """Set ``future`` when its turn has come; the task that awaits it has the turn until its next await."""
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
                if not (future := self._waiting.popleft()).done():
                    future.set_result(None)
                    handed_out += 1
            if not self._waiting:
                self._wanted.clear()
            # After the tasks that were just woken.
            await asyncio.sleep(0)
            if self._owed_s >= REST_FROM_S:
                self._look()
                owed_s, self._owed_s = self._owed_s, 0.0
                await asyncio.sleep(owed_s * (1 - self._share) / (self._share * self._got))

    def _look(self) -> None:
        """Measure how much of a processor other work took since the last check."""
        if time.perf_counter() - self._looked_at[0] < LOOK_INTERVAL_S:
            return
        now = _scheduled()
        took_s, ran_s, waited_s = (after - before for after, before in zip(now, self._looked_at, strict=True))
        self._share = BUSY if ran_s - self._spent_s + waited_s > BUSY_FROM * took_s else IDLE
        self._got = max(GOT_MIN, ran_s / (ran_s + waited_s)) if ran_s + waited_s else 1.0
        self._looked_at, self._spent_s = now, 0.0


def _scheduled() -> tuple[float, float, float]:
    """The time, how long this thread has run, and how long it has waited for a processor, in seconds; the wait is 0 if
    the system does not report it."""
    try:
        ran_ns, waited_ns, _ = Path("/proc/thread-self/schedstat").read_bytes().split()
    except OSError:
        return time.perf_counter(), time.thread_time(), 0.0
    return time.perf_counter(), int(ran_ns) / 1e9, int(waited_ns) / 1e9


LINES_PER_TURN = 500
"""Most lines of a turn."""
BYTES_PER_TURN = 128 * 1024
"""Most bytes of a turn of several lines: it is bytes that take the time, not lines."""
TURN_S = 0.02
"""A turn whose work cannot be estimated ends with the line that reaches this time."""
TURNS_IN_A_ROW = 16
"""Most turns of a task before later tasks of the same key get theirs: enough for a request of 2,000 lines, which are
then in the WAL while the next request is read."""

Item = TypeVar("Item")


def turns(sizes: Sequence[int]) -> Iterator[range]:
    """Turns for lines of these sizes: ranges that follow each other, each of at least one line."""
    upto_bytes = list(accumulate(sizes, initial=0))
    start = 0
    while start < len(sizes):
        end = bisect_right(upto_bytes, upto_bytes[start] + BYTES_PER_TURN, start + 1) - 1
        end = min(max(end, start + 1), start + LINES_PER_TURN, len(sizes))
        yield range(start, end)
        start = end


async def in_turns(items: Iterable[Item], turn_s: float | None = None) -> AsyncIterator[Item]:
    """The items, for work of the event loop on each. Once a turn has taken ``turn_s``, by default ``TURN_S``, others go
    first."""
    began_s, limit_s = time.perf_counter(), TURN_S if turn_s is None else turn_s
    for item in items:
        if time.perf_counter() - began_s > limit_s:
            await asyncio.sleep(0)
            began_s = time.perf_counter()
        yield item


@dataclass(eq=False)
class FairTurns:
    """Hands out turns, one in each pass of the event loop, by keys in rotation; of one key, the oldest task first, so
    that one request is done before the next starts. Belongs to one event loop."""

    _waiting: dict[str | None, list[tuple[int, int, asyncio.Future[None]]]] = field(default_factory=dict)
    """By key, in the order of the keys' next turns: a heap of waiting tasks, by place, then by arrival."""
    _places: WeakKeyDictionary[asyncio.Task[object], _Place] = field(default_factory=WeakKeyDictionary)
    _numbers: Iterator[int] = field(default_factory=count)

    async def next(self, key: str | None) -> None:
        """Return when it is the turn of ``key``, and of this task within the key. The turn lasts until the task's next
        await."""
        loop = asyncio.get_running_loop()
        mine = loop.create_future()
        if not self._waiting:
            loop.call_soon(self._hand_out)
        heappush(self._waiting.setdefault(key, []), (self._place(), next(self._numbers), mine))
        await mine

    def _place(self) -> int:
        """The place of the current task in the queue: by its arrival, or by when it last used up ``TURNS_IN_A_ROW``."""
        task = asyncio.current_task()
        assert task is not None
        place = self._places.get(task)
        if place is None or not place.turns_left:
            place = self._places[task] = _Place(next(self._numbers))
        place.turns_left -= 1
        return place.number

    def _hand_out(self) -> None:
        """Give the turn to the first task that still waits; schedule the next turn for the next pass of the loop."""
        handed_out = False
        while self._waiting and not handed_out:
            key = next(iter(self._waiting))
            waiting = self._waiting.pop(key)
            *_, first = heappop(waiting)
            if waiting:
                self._waiting[key] = waiting
            if not first.done():
                first.set_result(None)
                handed_out = True
        if self._waiting:
            asyncio.get_running_loop().call_soon(self._hand_out)


@dataclass(slots=True)
class _Place:
    """A task's place in the queue: the lower the number, the earlier its turn."""

    number: int
    turns_left: int = TURNS_IN_A_ROW
