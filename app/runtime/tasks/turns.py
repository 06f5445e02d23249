"""Long work on the event loop, in turns: between two of them requests are served.

One after the other takes a turn, and only one between two looks at the network: however many are at work, whoever asks
for little waits for one turn, not for one of each. Those who wait go by their keys in rotation.

each turn: <= LINES_PER_TURN lines, and <= BYTES_PER_TURN bytes or one line; or about TURN_S
"""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import accumulate, count
from weakref import WeakKeyDictionary

LINES_PER_TURN = 500
"""Most lines of a turn."""
BYTES_PER_TURN = 128 * 1024
"""Most bytes of a turn of several lines: it is bytes that take the time, not lines."""
TURN_S = 0.02
"""A turn whose work nobody can tell in advance ends with the line that brings it to this time."""
TURNS_IN_A_ROW = 16
"""Most turns before others of the same key, who came later, have theirs: enough for a request of 2,000 lines, which are
then on their way to the chain while the next request is looked at."""


def turns(sizes: Sequence[int]) -> Iterator[range]:
    """Turns for lines of these sizes: ranges that follow each other, each of at least one line."""
    upto_bytes = list(accumulate(sizes, initial=0))
    start = 0
    while start < len(sizes):
        end = bisect_right(upto_bytes, upto_bytes[start] + BYTES_PER_TURN, start + 1) - 1
        end = min(max(end, start + 1), start + LINES_PER_TURN, len(sizes))
        yield range(start, end)
        start = end


class Turn:
    """The turn that is being taken."""

    __slots__ = ("_began_s",)

    def __init__(self) -> None:
        self._began_s = time.perf_counter()

    def is_over(self) -> bool:
        """Whether it has taken its time. MUST be asked between two lines; ``pause`` begins the next one."""
        return time.perf_counter() - self._began_s > TURN_S

    async def pause(self) -> None:
        """Let others go first."""
        await asyncio.sleep(0)
        self._began_s = time.perf_counter()


class FairTurns:
    """Hands out turns, one in each pass of the event loop, by keys in rotation; those of one key by the age of who
    asks, so that one request is done before the next is begun. Belongs to one event loop."""

    def __init__(self) -> None:
        self._waiting: dict[str | None, list[tuple[int, int, asyncio.Future[None]]]] = {}
        """By key, in the order in which the keys come next: a heap of who waits, by place and then as they came."""
        self._places: WeakKeyDictionary[asyncio.Task[object], _Place] = WeakKeyDictionary()
        self._numbers = count()

    async def next(self, key: str | None) -> None:
        """Return when it is the turn of ``key``, and of this task among those of the key; it lasts until the task's
        next await."""
        loop = asyncio.get_running_loop()
        mine = loop.create_future()
        if not self._waiting:
            loop.call_soon(self._hand_out)
        heappush(self._waiting.setdefault(key, []), (self._place(), next(self._numbers), mine))
        await mine

    def _place(self) -> int:
        """Where the task that runs stands among others: as it came, or as it last took ``TURNS_IN_A_ROW``."""
        task = asyncio.current_task()
        assert task is not None
        place = self._places.get(task)
        if place is None or not place.turns_left:
            place = self._places[task] = _Place(next(self._numbers))
        place.turns_left -= 1
        return place.number

    def _hand_out(self) -> None:
        """Give the first turn to somebody who still waits; the next one in the next pass of the loop."""
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
    """Where a task stands: the lower the number, the sooner it comes."""

    number: int
    turns_left: int = TURNS_IN_A_ROW
