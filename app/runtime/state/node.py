"""This node: who it is, its clock, and how far its writes have come.

Always true::

    written >= durable >= committed >= chained
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from app.runtime.state.places import Places
from app.runtime.state.wall_clock import WallClock
from ledger.errors import DurabilityTimeoutError, FencedError, LedgerError, NotReadyError
from ledger.hlc import Clock
from ledger.positions import BEFORE_FIRST, Epoch, Lsn


class Watermark(Places):
    """A position that only rises, and those who wait for it."""

    def __init__(self, name: str, lsn: Lsn = BEFORE_FIRST) -> None:
        super().__init__(lsn)
        self.name = name

    def when_wanted(self, wake: Callable[[], None]) -> None:
        """Call ``wake`` whenever somebody wants a position that is not reached."""
        self.on_wanted = wake

    def give_up(self, message: str) -> None:
        """Tell everyone who waits now that their time is up."""
        for future in self.leave():
            expire(future, message)

    def fail(self, error: LedgerError) -> None:
        """Fail everyone who waits, and everyone who comes later for a position not reached."""
        self.failure = error
        for future in self.leave():
            if not future.done():
                future.set_exception(error)

    def look_at(self, ends_s: float) -> None:
        """Tell those whose time is up then, in the loop's time."""
        asyncio.get_running_loop().call_at(ends_s, self._expire, ends_s)

    def _expire(self, ends_s: float) -> None:
        if ends_s == self.looks_at_s:
            for lsn, timeout_s, future in self.overdue(asyncio.get_running_loop().time()):
                expire(future, f"{self.name} did not reach LSN {lsn} in {timeout_s:g} s")


def expire(future: asyncio.Future[Any], message: str) -> None:
    """Fail ``future``, which nobody else waits for, because its time is up; one that is done stays as it is."""
    if not future.done():
        future.set_exception(DurabilityTimeoutError(message))


ROWS_LOCKED: Final = "another session keeps its row of scheduler.chain_heads locked (see pg_locks)"
HISTORY_READ: Final = "its commitments are being read from the log, as once after each start"


@dataclass(slots=True)
class Node:
    """One running service process with its own WAL."""

    node_id: str
    region: str
    gate: str
    wal_id: str
    epoch: Epoch
    clock: Clock
    durable: Watermark = field(default_factory=lambda: Watermark("durable"))
    committed: Watermark = field(default_factory=lambda: Watermark("committed"))
    chained: Watermark = field(default_factory=lambda: Watermark("chained"))
    spread: Watermark = field(default_factory=lambda: Watermark("a majority of the regions"))
    """What a majority of the regions holds; stands still where there is one."""
    wall: WallClock = field(init=False)
    """The wall clock, as far as it is believed."""
    failure: LedgerError | None = None
    """Why this node takes no writes any more: a poisoned WAL, a fence, a database that went back."""
    damaged: dict[str, str] = field(default_factory=dict)
    """Tenants whose chain this node cannot extend, and why (``app.write.pending.quarantine``)."""
    waiting: dict[str, str] = field(default_factory=dict)
    """Tenants that are not chained for a while, and why: ``ROWS_LOCKED`` or ``HISTORY_READ``
    (``app.write.pending.quarantine``)."""
    unsigned: dict[str, str] = field(default_factory=dict)
    """Tenants whose rows this node does not sign any further, and why."""
    unfollowed: dict[str, str] = field(default_factory=dict)
    """Tenants of whose newest entries no checkpoint that counts is found, and why (``ledger_watch``)."""
    accepting: bool = False
    """Whether requests are taken: false while starting and from the signal to stop on."""
    shutting_down: bool = False

    def stop_accepting(self) -> None:
        """Take no request from now on: the service stops."""
        self.accepting, self.shutting_down = False, True

    def check_writable(self) -> None:
        """Refuse unless this node takes writes now.

        Raises:
            FencedError: another process writes this WAL now.
            NotReadyError: the service is starting or stopping, or the node has failed.
        """
        if isinstance(self.failure, FencedError):
            raise FencedError(str(self.failure))
        if self.failure is not None:
            raise NotReadyError(f"this node has stopped writing: {self.failure}")
        self.check_accepting()

    def check_accepting(self) -> None:
        """Refuse unless requests are taken.

        Raises:
            NotReadyError: the service is starting or stopping.
        """
        if not self.accepting:
            raise NotReadyError("the service is starting or stopping; try again")

    def chained_lsn_of(self, tenant_id: str) -> Lsn:
        """Up to where every record of the tenant is in its chain; ``chained`` goes on past those that are held back."""
        is_held_back = tenant_id in self.damaged or tenant_id in self.waiting
        return BEFORE_FIRST if is_held_back else self.chained.lsn

    @property
    def watermarks(self) -> tuple[Watermark, ...]:
        """All that anybody may wait for."""
        return self.durable, self.committed, self.chained, self.spread

    def __post_init__(self) -> None:
        self.wall = WallClock(self.clock.max_clock_skew_ms)
