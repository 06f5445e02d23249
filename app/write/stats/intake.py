"""The queue that stats reports wait in until they are written, and the share of the event loop that they may have.

The queue is bounded, and keeps fewer lines the fuller it is, or the more of the event loop they used recently::

    0 <= lines_waiting <= lines_max        0 <= bytes_waiting <= bytes_max
    weight of a kept line = 1 / the share of lines that were kept when it was
    ANSWERING_SHARE + CHECKING_SHARE < 1/2: jobs have more than half of the loop, however many lines come, on up to
    ANSWERING_SHARE / ANSWERING_S = 600 connections; beyond, each brings a request in ``OWED_S_MAX`` all the same, and
    from (1/2 - CHECKING_SHARE) / ANSWERING_S = 1,200 on that never pause, stats have half of it and more
    -share * OWED_S_MAX <= left_s <= burst_s        left_s grows by share each second

Lines that are being written count as waiting, so the bounds hold for all the memory that reports take. The share is
charged in time that went by, not in processor time: while the loop serves one request, no other has it.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Final, NamedTuple, TypeVar

LINES_MAX = 200_000
"""Most lines that wait, however short they are."""
LINGER_S = 0.1
"""How long the writer lets lines gather; a queue that is half full wakes it at once."""
CHECKED_BYTES_MAX = 16 << 20
"""Bodies that wait to be checked hold no more than this together; what comes on top is dropped unread."""
WEIGHTS = ((0.5, 1), (0.75, 2), (0.875, 4), (1.0, 8))
"""Up to which share of the queue, or of the time for checking, one line in how many is kept."""
CHECKING_SHARE = 0.2
"""Of the loop's time, for checking and writing out; it is measured."""
CHECKING_BURST_S = 0.5
"""Time for checking that gathers while nothing comes."""
ANSWERING_SHARE = 0.15
"""Of the loop's time, for taking requests and answering them, whatever the answer."""
ANSWERING_BURST_S = 0.2
"""Time for answering that gathers while nothing comes."""
ANSWERING_S = 250e-6
"""What taking a request and answering it costs beside the checking, on a core that others use too. It cannot be
measured from within: most of it is before and behind us."""
assert CHECKING_SHARE + ANSWERING_SHARE < 0.5, "jobs come first, as long as connections are not too many"
_BYTE_VALUES = 256
assert all(_BYTE_VALUES % weight == 0 for _, weight in WEIGHTS), "one byte of chance decides on a line"

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
        self._lock = threading.Lock()
        self._chunks: list[Chunk] = []
        self._bytes_waiting = 0
        self._lines_waiting = 0
        self._wanted = threading.Event()
        self._urgent = threading.Event()
        self._turn = asyncio.Lock()
        self._checked_bytes = 0
        self._answering = LoopShare(ANSWERING_SHARE, ANSWERING_BURST_S)
        self.checking = LoopShare(CHECKING_SHARE, CHECKING_BURST_S)

    async def admit(self) -> None:
        """Wait, for ``OWED_S_MAX`` at most, until the loop has time for one more request.

        Requests that wait at once are released together, so what holds the rate down is that each connection waits.
        """
        self._answering.charge(ANSWERING_S)
        if owed_s := self._answering.owed_s():
            await asyncio.sleep(owed_s)

    @asynccontextmanager
    async def turn(self, body_bytes: int) -> AsyncIterator[bool]:
        """Wait until no other body is checked: however many come at once, the loop is theirs for one turn at a time.

        False, without waiting, when too much waits already; false too when there is no time left for checking.
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
        """One line in how many is kept now."""
        queued = max(self._bytes_waiting / self._bytes_max, self._lines_waiting / self._lines_max)
        share = max(queued, self.checking.spent())
        return next((weight for up_to, weight in WEIGHTS if share < up_to), WEIGHTS[-1][1])

    def sample(self, items: Sequence[Item], weight: int) -> Sequence[Item]:
        """Each of ``items`` with the chance of one in ``weight``, independently of the others."""
        if weight == 1:
            return items
        below = _BYTE_VALUES // weight
        return [item for item, chance in zip(items, self._draw(len(items)), strict=True) if chance < below]

    def offer(self, chunk: Chunk) -> bool:
        """Queue ``chunk``, which MUST NOT be taken for kept: it is lost with the process. False: there is no room."""
        with self._lock:
            bytes_waiting = self._bytes_waiting + len(chunk.data)
            lines_waiting = self._lines_waiting + chunk.lines
            if bytes_waiting > self._bytes_max or lines_waiting > self._lines_max:
                self._urgent.set()
                return False
            self._bytes_waiting, self._lines_waiting = bytes_waiting, lines_waiting
            self._chunks.append(chunk)
        self._wanted.set()
        if self.weight() > 1:
            self._urgent.set()
        return True

    def take(self, timeout_s: float | None) -> list[Chunk]:
        """All that waits, once it has gathered for a while; nothing when nothing came within ``timeout_s``.

        For the writer thread, which MUST say ``written`` of each.
        """
        if self._wanted.wait(timeout_s):
            self._urgent.wait(LINGER_S)
        with self._lock:
            chunks, self._chunks = self._chunks, []
            self._wanted.clear()
            self._urgent.clear()
        return chunks

    def written(self, chunk: Chunk) -> None:
        """``chunk``, which was taken, holds no memory any more."""
        with self._lock:
            self._bytes_waiting -= len(chunk.data)
            self._lines_waiting -= chunk.lines
            assert self._bytes_waiting >= 0
            assert self._lines_waiting >= 0

    def hurry(self) -> None:
        """Have ``take`` return at once, and once."""
        self._urgent.set()
        self._wanted.set()


OWED_S_MAX: Final = 1.0
"""Nobody waits longer for what others have used up."""


class LoopShare:
    """A token bucket of seconds, for the thread of the loop."""

    def __init__(self, share: float, burst_s: float, *, clock: Callable[[], float] = time.perf_counter) -> None:
        assert 0 < share < 1
        assert burst_s > 0
        self._share = share
        self._burst_s = burst_s
        self._clock = clock
        self._left_s = burst_s
        self._at_s = clock()

    def spent(self) -> float:
        """Which part of the bucket is used up: 0 nothing, 1 or more all of it."""
        self._refill()
        return 1 - self._left_s / self._burst_s

    def owed_s(self) -> float:
        """Seconds until nothing is owed any more, at most ``OWED_S_MAX``; 0 while something is left."""
        self._refill()
        return max(0.0, -self._left_s / self._share)

    def charge(self, used_s: float) -> None:
        """Take ``used_s`` out of the bucket, which may then owe."""
        self._refill()
        self._left_s = max(self._left_s - used_s, -self._share * OWED_S_MAX)

    @contextmanager
    def charged(self) -> Iterator[None]:
        """Charge how long the block takes, which MUST NOT await."""
        began_s = self._clock()
        try:
            yield
        finally:
            self.charge(self._clock() - began_s)

    def _refill(self) -> None:
        now_s = self._clock()
        self._left_s = min(self._burst_s, self._left_s + (now_s - self._at_s) * self._share)
        self._at_s = now_s
