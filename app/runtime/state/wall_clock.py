"""The wall clock of a node, trusted only as far as Postgres and the node's monotonic time confirm it.

Between two readings of Postgres the wall clock may gain ``max_skew_ms`` on the monotonic time (CLOCK_BOOTTIME, which
includes the time of a suspended machine). A larger leap is not adopted: time continues from its last value at the
monotonic rate, and ``fault`` reports it until the clock is right again, or Postgres agrees with it. So::

    now_ms <= time of Postgres at the last look + time run since + 2 * max_skew_ms

A clock that goes back is adopted: the HLC never goes back.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

from app.runtime.logs import log

_RUNNING = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


class Reading(NamedTuple):
    """One reading of the clocks of this machine, in milliseconds."""

    wall_ms: int
    running_ms: int


def running_s() -> float:
    """Seconds on the clock that no one sets and that counts the time in which the machine was suspended.

    Linux: CLOCK_BOOTTIME. Other systems: CLOCK_MONOTONIC, which counts suspended time on macOS and not on the BSDs. No
    clock of a virtual machine counts the time in which the hypervisor has paused it.
    """
    return time.clock_gettime(_RUNNING)


def read_clocks() -> Reading:
    """The clocks of this machine now."""
    return Reading(time.time_ns() // 1_000_000, time.clock_gettime_ns(_RUNNING) // 1_000_000)


class WallClock:
    """The wall clock as far as it is trusted. Belongs to one event loop."""

    def __init__(self, max_skew_ms: int, read: Callable[[], Reading] = read_clocks) -> None:
        self._max_skew_ms = max_skew_ms
        self._read = read
        self._believed = read()
        self.ahead_ms = 0
        """How far the wall clock is ahead of the trusted time; 0 while it is adopted."""
        self._ahead_of_database_ms = 0

    def now_ms(self) -> int:
        """The time, milliseconds since 1970."""
        wall_ms, running_ms = self._read()
        expected_ms = self._believed.wall_ms + running_ms - self._believed.running_ms
        if wall_ms <= expected_ms + self._max_skew_ms:
            self.ahead_ms = 0
            return wall_ms
        if not self.ahead_ms:
            log.error("wall_clock_ahead", ahead_ms=wall_ms - expected_ms, done="not adopted; time goes on as it runs")
        self.ahead_ms = wall_ms - expected_ms
        return expected_ms

    def compare(self, before: Reading, database_ms: int) -> None:
        """Postgres reported ``database_ms`` after the reading ``before``: a wall clock that is not ahead of Postgres is
        adopted, however far it leapt."""
        self._ahead_of_database_ms = before.wall_ms - database_ms
        if self._ahead_of_database_ms > self._max_skew_ms:
            return
        moved_ms = before.wall_ms - (self._believed.wall_ms + before.running_ms - self._believed.running_ms)
        if abs(moved_ms) > self._max_skew_ms:
            log.warning("wall_clock_jump_adopted", moved_ms=moved_ms, reason="Postgres says the same time")
        self._believed = before

    def fault(self) -> str | None:
        """The fault of the wall clock; None if none is known."""
        if self.ahead_ms:
            return f"the wall clock leapt {self.ahead_ms} ms ahead and is not adopted; set it right"
        if self._ahead_of_database_ms > self._max_skew_ms:
            return (
                f"the wall clock is {self._ahead_of_database_ms} ms ahead of that of Postgres; set the wrong one right"
            )
        return None
