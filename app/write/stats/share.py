"""How much of the event loop stats may have: seconds of it, which come back at a steady rate and are charged as used.

    -share * OWED_S_MAX <= left_s <= burst_s        left_s grows by share each second

What is charged is time that went by and not processor time: while the loop is at one request, no other has it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

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
