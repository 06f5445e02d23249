"""The wall clock of a node, believed only as far as Postgres and the node's own running time bear it out.

Between two looks at Postgres the wall clock may gain ``max_skew_ms`` on the time that runs by itself (CLOCK_BOOTTIME,
which counts a suspended machine's time too). What it is ahead beyond that is not adopted: time goes on from where it
was, as fast as it runs, and ``fault`` says so until the clock is right again, or Postgres agrees that it is. So::

    now_ms <= time of Postgres at the last look + time run since + 2 * max_skew_ms

A clock that goes back is adopted: the HLC never does.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import structlog

from app.store import node as node_store
from app.store.reading import reading
from ledger.errors import DatabaseUnavailableError, StartRefusedError

if TYPE_CHECKING:
    from app.store import Connection
    from app.store.reading import Pool

LOOK_INTERVAL_S = 5.0
"""How often the clock of Postgres is looked at."""
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


async def watch(wall: WallClock, pool: Pool) -> None:
    """Compare, for ever; ends by cancellation. While Postgres is away no leap is adopted."""
    while True:
        try:
            async with reading(pool) as connection:
                before = read_clocks()
                wall.compare(before, await node_store.database_ms(connection))
        except DatabaseUnavailableError as error:
            log.debug("wall_clock_not_compared", error=str(error))
        wall.now_ms()
        await asyncio.sleep(LOOK_INTERVAL_S)


async def refuse_ahead(connection: Connection, max_skew_ms: int) -> None:
    """Return unless the wall clock is ahead of that of Postgres by more than ``max_skew_ms``.

    Raises:
        StartRefusedError: it is; times that were issued could never be taken back.
    """
    before = read_clocks()
    ahead_ms = before.wall_ms - await node_store.database_ms(connection)
    if ahead_ms > max_skew_ms:
        raise StartRefusedError(
            f"this machine's clock is {ahead_ms} ms ahead of that of Postgres, more than the {max_skew_ms} ms of "
            "hlc.max_clock_skew. Set the wrong one right: times from the future cannot be taken back once chained"
        )
