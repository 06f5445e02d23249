"""The wall clock of a node, believed only as far as Postgres and the node's own running time bear it out.

Between two looks at Postgres the wall clock may gain ``max_skew_ms`` on the time that runs by itself (CLOCK_BOOTTIME,
which counts a suspended machine's time too). What it is ahead beyond that is not adopted: time goes on from where it
was, as fast as it runs, and ``fault`` says so until the clock is right again, or Postgres agrees that it is. So::

    now_ms <= time of Postgres at the last look + time run since + 2 * max_skew_ms

A clock that goes back is adopted: the HLC never does.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import structlog

_RUNNING = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)

log = structlog.get_logger()


class Reading(NamedTuple):
    """What the clocks of this machine say at one time, in milliseconds."""

    wall_ms: int
    running_ms: int


def read_clocks() -> Reading:
    """The clocks of this machine now."""
    return Reading(time.time_ns() // 1_000_000, time.clock_gettime_ns(_RUNNING) // 1_000_000)


class WallClock:
    """The wall clock as far as it is believed. Belongs to one event loop."""

    def __init__(self, max_skew_ms: int, read: Callable[[], Reading] = read_clocks) -> None:
        self._max_skew_ms = max_skew_ms
        self._read = read
        self._believed = read()
        self.ahead_ms = 0
        """How far the wall clock is ahead of what is believed; 0 while it is adopted."""
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
        """Postgres said ``database_ms`` after the clocks said ``before``: a wall clock that is not ahead of it is
        adopted, whatever it did."""
        self._ahead_of_database_ms = before.wall_ms - database_ms
        if self._ahead_of_database_ms > self._max_skew_ms:
            return
        moved_ms = before.wall_ms - (self._believed.wall_ms + before.running_ms - self._believed.running_ms)
        if abs(moved_ms) > self._max_skew_ms:
            log.warning("wall_clock_jump_adopted", moved_ms=moved_ms, reason="Postgres says the same time")
        self._believed = before

    def fault(self) -> str | None:
        """What is wrong with the wall clock, None when nothing is known to be."""
        if self.ahead_ms:
            return f"the wall clock leapt {self.ahead_ms} ms ahead and is not adopted; set it right"
        if self._ahead_of_database_ms > self._max_skew_ms:
            return (
                f"the wall clock is {self._ahead_of_database_ms} ms ahead of that of Postgres; set the wrong one right"
            )
        return None
