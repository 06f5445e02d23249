"""This node: who it is, its clock, and how far its writes have come.

Always true::

    written >= durable >= committed >= chained
"""

from __future__ import annotations

import asyncio
import math
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from app.node.wall_clock import WallClock
from ledger.errors import DurabilityTimeoutError, LedgerError
from ledger.hlc import Clock
from ledger.positions import BEFORE_FIRST, Epoch, Lsn


class Watermark:
    """A position that only rises, and those who wait for it. Belongs to one event loop.

    All whom one rise reaches are resolved in one pass, and one timer serves all who wait with a deadline. Who waits is
    held in columns, in the order of the LSNs: position; deadline in the loop's time, and the seconds given; future.
    """

    def __init__(self, name: str, lsn: Lsn = BEFORE_FIRST) -> None:
        self.name = name
        self.lsn = lsn
        self.wanted_lsn = lsn
        """Highest position that anybody waits for, or waited for."""
        self.on_wanted: Callable[[], None] | None = None
        """Called when somebody waits for a higher position than anybody before."""
        self._failure: LedgerError | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        """Kept, since asking for the running one costs a system call."""
        self._lsns: list[Lsn] = []
        self._deadlines: list[tuple[float, float]] = []
        self._futures: list[asyncio.Future[None]] = []
        self._came_s = -math.inf
        """When the last came, in the loop's time, which stands still while it calls one after the other."""
        self._deadline = (0.0, 0.0)
        """Of those who came then."""
        self._looks_at_s = math.inf
        """When the deadlines are looked at next: at the first of them, or before."""

    def reached(self, lsn: Lsn, timeout_s: float = math.inf) -> asyncio.Future[None]:
        """A future that resolves once the watermark is at ``lsn`` or above, not before.

        It fails with the error given to ``fail`` if that comes first, and with DurabilityTimeoutError after
        ``timeout_s`` seconds.
        """
        loop = self._loop
        if loop is None:
            loop = self._loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        if self.lsn >= lsn:
            future.set_result(None)
        elif self._failure is not None:
            future.set_exception(self._failure)
        else:
            if lsn > self.wanted_lsn:
                self.wanted_lsn = lsn
                if self.on_wanted is not None:
                    self.on_wanted()
            now_s = loop.time()
            if now_s != self._came_s or timeout_s != self._deadline[1]:
                self._come(now_s, timeout_s)
            if not self._lsns or self._lsns[-1] <= lsn:
                self._lsns.append(lsn)
                self._deadlines.append(self._deadline)
                self._futures.append(future)
            else:
                at = bisect_right(self._lsns, lsn)
                self._lsns.insert(at, lsn)
                self._deadlines.insert(at, self._deadline)
                self._futures.insert(at, future)
        return future

    def want(self, lsn: Lsn) -> None:
        """Somebody waits for ``lsn``, here or in another way."""
        if lsn > self.wanted_lsn:
            self.wanted_lsn = lsn
            if self.on_wanted is not None:
                self.on_wanted()

    def advance(self, lsn: Lsn) -> None:
        """Raise the watermark to ``lsn`` and resolve whoever waited for it; a lower one changes nothing."""
        if lsn <= self.lsn:
            return
        self.lsn = lsn
        for future in self._leave(bisect_right(self._lsns, lsn)):
            if not future.done():
                future.set_result(None)

    def give_up(self, message: str) -> None:
        """Tell everyone who waits now that their time is up."""
        for future in self._leave(len(self._lsns)):
            expire(future, message)

    def fail(self, error: LedgerError) -> None:
        """Fail everyone who waits, and everyone who comes later for a position not reached."""
        self._failure = error
        for future in self._leave(len(self._lsns)):
            if not future.done():
                future.set_exception(error)

    def _leave(self, count: int) -> list[asyncio.Future[None]]:
        """The futures of the first ``count`` who wait, who do so no more."""
        futures = self._futures[:count]
        del self._lsns[:count], self._deadlines[:count], self._futures[:count]
        return futures

    def _come(self, now_s: float, timeout_s: float) -> None:
        """Whoever comes at ``now_s`` with this timeout has the same deadline, and it is looked at in time."""
        self._came_s = now_s
        self._deadline = (now_s + timeout_s, timeout_s)
        if self._deadline[0] < self._looks_at_s:
            self._look_at(self._deadline[0])

    def _look_at(self, deadline_s: float) -> None:
        self._looks_at_s = deadline_s
        asyncio.get_running_loop().call_at(deadline_s, self._expire, deadline_s)

    def _expire(self, deadline_s: float) -> None:
        """Tell those whose time is up, and look again at the next deadline of those who are left."""
        if deadline_s != self._looks_at_s:
            return
        now_s = asyncio.get_running_loop().time()
        waiting = list(zip(self._lsns, self._deadlines, self._futures, strict=True))
        self._lsns, self._deadlines, self._futures = [], [], []
        for lsn, (ends_s, timeout_s), future in waiting:
            if ends_s <= now_s:
                expire(future, f"{self.name} did not reach LSN {lsn} in {timeout_s:g} s")
            else:
                self._lsns.append(lsn)
                self._deadlines.append((ends_s, timeout_s))
                self._futures.append(future)
        next_s, _ = min(self._deadlines, default=(math.inf, 0.0))
        self._came_s = -math.inf
        self._looks_at_s = math.inf
        if next_s < math.inf:
            self._look_at(next_s)


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
    epoch: Epoch
    clock: Clock
    written_lsn: Callable[[], Lsn] = field(default=lambda: BEFORE_FIRST)
    """How far the WAL was given to the operating system; the writer, which its thread moves, is asked."""
    durable: Watermark = field(default_factory=lambda: Watermark("durable"))
    committed: Watermark = field(default_factory=lambda: Watermark("committed"))
    chained: Watermark = field(default_factory=lambda: Watermark("chained"))
    spread: Watermark = field(default_factory=lambda: Watermark("spread"))
    """What a majority of the regions holds; stands still where there is one."""
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

    @property
    def watermarks(self) -> tuple[Watermark, ...]:
        """All that anybody may wait for."""
        return self.durable, self.committed, self.chained, self.spread

    def __post_init__(self) -> None:
        self.wall = WallClock(self.clock.max_clock_skew_ms)
