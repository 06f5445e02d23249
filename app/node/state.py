"""This node: who it is, its clock, and how far its writes have come.

Always true::

    written >= durable >= committed >= chained
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from app.node.wall_clock import WallClock
from ledger.errors import DurabilityTimeoutError, LedgerError
from ledger.hlc import Clock


class Watermark:
    """A position that only rises, and those who wait for it. Belongs to one event loop."""

    def __init__(self, name: str, lsn: int = 0) -> None:
        self.name = name
        self.lsn = lsn
        self.wanted_lsn = lsn
        """Highest position that anybody waits for, or waited for."""
        self.on_wanted: Callable[[], None] | None = None
        """Called when somebody waits for a higher position than anybody before."""
        self._failure: LedgerError | None = None
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    def reached(self, lsn: int) -> asyncio.Future[None]:
        """A future that resolves once the watermark is at ``lsn`` or above, not before.

        It fails with the error given to ``fail`` if that comes first.
        """
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if self.lsn >= lsn:
            future.set_result(None)
        elif self._failure is not None:
            future.set_exception(self._failure)
        else:
            self._insert(lsn, future)
        return future

    def want(self, lsn: int) -> None:
        """Somebody waits for ``lsn``, here or in another way."""
        if lsn > self.wanted_lsn:
            self.wanted_lsn = lsn
            if self.on_wanted is not None:
                self.on_wanted()

    def _insert(self, lsn: int, future: asyncio.Future[None]) -> None:
        self.want(lsn)
        at = len(self._waiting)
        while at and self._waiting[at - 1][0] > lsn:
            at -= 1
        self._waiting.insert(at, (lsn, future))

    async def wait(self, lsn: int, timeout_s: float) -> None:
        """Return once the watermark is at ``lsn`` or above.

        Raises:
            DurabilityTimeoutError: not within ``timeout_s`` seconds.
            LedgerError: the error given to ``fail``.
        """
        if self.lsn >= lsn:
            return
        future = self.reached(lsn)
        message = f"{self.name} did not reach LSN {lsn} in {timeout_s:g} s"
        timer = asyncio.get_running_loop().call_later(timeout_s, expire, future, message)
        try:
            await future
        finally:
            timer.cancel()

    def advance(self, lsn: int) -> None:
        """Raise the watermark to ``lsn`` and resolve whoever waited for it; a lower one changes nothing."""
        if lsn <= self.lsn:
            return
        self.lsn = lsn
        waiting = self._waiting
        while waiting and waiting[0][0] <= lsn:
            future = waiting.popleft()[1]
            if not future.done():
                future.set_result(None)

    def give_up(self, message: str) -> None:
        """Tell everyone who waits now that their time is up."""
        while self._waiting:
            expire(self._waiting.popleft()[1], message)

    def fail(self, error: LedgerError) -> None:
        """Fail everyone who waits, and everyone who comes later for a position not reached."""
        self._failure = error
        while self._waiting:
            future = self._waiting.popleft()[1]
            if not future.done():
                future.set_exception(error)


def expire(future: asyncio.Future[Any], message: str) -> None:
    """Fail ``future``, which nobody else waits for, because its time is up; one that is done stays as it is."""
    if not future.done():
        future.set_exception(DurabilityTimeoutError(message))


@dataclass(slots=True)
class Node:
    """One running service process with its own WAL."""

    node_id: str
    region: str
    gate: str
    wal_id: str
    epoch: int
    clock: Clock
    written_lsn: Callable[[], int] = field(default=lambda: 0)
    """How far the WAL was given to the operating system; the writer, which its thread moves, is asked."""
    durable: Watermark = field(default_factory=lambda: Watermark("durable"))
    committed: Watermark = field(default_factory=lambda: Watermark("committed"))
    chained: Watermark = field(default_factory=lambda: Watermark("chained"))
    wall: WallClock = field(init=False)
    """The wall clock, as far as it is believed."""
    failure: LedgerError | None = None
    """Why this node takes no writes any more: a poisoned WAL, a fence, a database that went back."""
    damaged: dict[str, str] = field(default_factory=dict)
    """Tenants whose chain this node cannot extend, and why (``app.pending.quarantine``)."""
    locked: dict[str, str] = field(default_factory=dict)
    """Tenants whose rows another session keeps locked, and why they wait (``app.pending.quarantine``)."""
    unsigned: dict[str, str] = field(default_factory=dict)
    """Tenants whose rows this node does not sign any further, and why."""
    unfollowed: dict[str, str] = field(default_factory=dict)
    """Tenants of whose newest entries no checkpoint that counts is found, and why (``app.chain.ledger_watch``)."""
    shutting_down: bool = False

    def __post_init__(self) -> None:
        self.wall = WallClock(self.clock.max_clock_skew_ms)
