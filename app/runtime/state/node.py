"""This node: its identity, its clock, and the positions of its writes.

Always true::

    written >= durable >= committed >= chained
"""

from __future__ import annotations

import asyncio
import math
import time
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from app.runtime.state.wall_clock import WallClock
from ledger.errors import DurabilityTimeoutError, FencedError, LedgerError, NotReadyError
from ledger.hlc import Clock
from ledger.positions import BEFORE_FIRST, Epoch, Lsn


class _Waiting(NamedTuple):
    """A wait for a position, until a deadline in the loop's time."""

    lsn: Lsn
    ends_s: float
    timeout_s: float
    future: asyncio.Future[None]


class PythonPlaces:
    """A position that only rises, and its waiters in the order of their positions.

    This is the specification: ``_native.Places`` does the same in C, if it is built. Both use the loop's own futures.
    One rise resolves all waiters that it reaches in one pass, and one timer, which a subclass sets (``look_at``),
    serves all deadlines. Belongs to one event loop.
    """

    def __init__(self, lsn: Lsn) -> None:
        self.lsn = lsn
        self.wanted_lsn = lsn
        """Highest position that was ever waited for."""
        self.on_wanted: Callable[[], None] | None = None
        """Called when a wait is for a higher position than any before."""
        self.failure: LedgerError | None = None
        """The error of each new wait for a position not reached; None while the position rises."""
        self.looks_at_s = math.inf
        """When the deadlines are checked next: at the first of them, or before."""
        self._waiting: list[_Waiting] = []

    def reached(self, lsn: Lsn, timeout_s: float = math.inf, /) -> asyncio.Future[None]:
        """A future that resolves once the position is ``lsn`` or above, not before.

        It fails with ``failure`` if that comes first; ``overdue`` returns it after ``timeout_s`` seconds.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        if self.lsn >= lsn:
            future.set_result(None)
        elif self.failure is not None:
            future.set_exception(self.failure)
        else:
            self.want(lsn)
            one = _Waiting(lsn, loop.time() + timeout_s, timeout_s, future)
            self._waiting.insert(bisect_right(self._waiting, lsn, key=_lsn_of), one)
            self._check_by(one.ends_s)
        return future

    def want(self, lsn: Lsn, /) -> None:
        """Note a wait for ``lsn``, here or elsewhere."""
        if lsn > self.wanted_lsn:
            self.wanted_lsn = lsn
            if self.on_wanted is not None:
                self.on_wanted()

    def advance(self, lsn: Lsn, /) -> None:
        """Raise the position to ``lsn`` and resolve all waits for it; a lower ``lsn`` changes nothing."""
        if lsn <= self.lsn:
            return
        self.lsn = lsn
        for future in self._leave_first(bisect_right(self._waiting, lsn, key=_lsn_of)):
            if not future.done():
                future.set_result(None)

    def leave(self) -> list[asyncio.Future[None]]:
        """Remove all waits, and return their futures."""
        return self._leave_first(len(self._waiting))

    def overdue(self, now_s: float, /) -> list[tuple[Lsn, float, asyncio.Future[None]]]:
        """Remove the waits whose time is up, and return them: position, timeout in seconds, future. Schedules the check
        of the other deadlines."""
        late = [(one.lsn, one.timeout_s, one.future) for one in self._waiting if one.ends_s <= now_s]
        self._waiting = [one for one in self._waiting if one.ends_s > now_s]
        self.looks_at_s = math.inf
        self._check_by(min((one.ends_s for one in self._waiting), default=math.inf))
        return late

    def look_at(self, ends_s: float) -> None:
        """A subclass calls ``overdue`` at ``ends_s``, or at ``looks_at_s`` if that has changed."""

    def _leave_first(self, count: int) -> list[asyncio.Future[None]]:
        futures = [one.future for one in self._waiting[:count]]
        del self._waiting[:count]
        return futures

    def _check_by(self, ends_s: float) -> None:
        if ends_s < self.looks_at_s:
            self.looks_at_s = ends_s
            self.look_at(ends_s)


_lsn_of = attrgetter("lsn")

if TYPE_CHECKING:
    Places = PythonPlaces
else:
    try:
        Places = import_module("app.runtime.state._native").Places
    except ImportError:
        Places = PythonPlaces


class Watermark(Places):
    """A position that only rises, and its waiters."""

    def __init__(self, name: str, lsn: Lsn = BEFORE_FIRST) -> None:
        super().__init__(lsn)
        self.name = name

    def give_up(self, message: str) -> None:
        """Expire all current waits."""
        for future in self.leave():
            expire(future, message)

    def fail(self, error: LedgerError) -> None:
        """Fail all waits, and later waits for a position not reached."""
        self.failure = error
        for future in self.leave():
            if not future.done():
                future.set_exception(error)

    def look_at(self, ends_s: float) -> None:
        """Expire overdue waits at ``ends_s``, in the loop's time."""
        asyncio.get_running_loop().call_at(ends_s, self._expire, ends_s)

    def _expire(self, ends_s: float) -> None:
        if ends_s == self.looks_at_s:
            for lsn, timeout_s, future in self.overdue(asyncio.get_running_loop().time()):
                expire(future, f"{self.name} did not reach LSN {lsn} in {timeout_s:g} s")


def expire(future: asyncio.Future[Any], message: str) -> None:
    """Fail ``future``, which has no other waiter, because its time is up; a future that is done stays as it is."""
    if not future.done():
        future.set_exception(DurabilityTimeoutError(message))


RISES_MAX: Final = 4096


class Rises:
    """The times of the last ``RISES_MAX`` rises of a position, by ``time.perf_counter``."""

    def __init__(self) -> None:
        self._rises: deque[tuple[Lsn, float]] = deque(maxlen=RISES_MAX)

    def note(self, lsn: Lsn) -> None:
        """The position is ``lsn`` from now on, higher than before."""
        self._rises.append((lsn, time.perf_counter()))

    def reached_s(self, lsn: Lsn) -> float | None:
        """When the position reached ``lsn``; None if it has not, or that is forgotten."""
        at = bisect_left(self._rises, lsn, key=_lsn_in)
        is_known = at < len(self._rises) and (at > 0 or len(self._rises) < RISES_MAX)
        return self._rises[at][1] if is_known else None


_lsn_in = itemgetter(0)


class WriteRises:
    """When records entered the WAL, became durable and were chained: kept only while requests are traced."""

    def __init__(self) -> None:
        self.entered, self.durable, self.chained = Rises(), Rises(), Rises()


class TimedWatermark(Watermark):
    """A watermark whose rises are noted in ``rises``."""

    def __init__(self, name: str, rises: Rises) -> None:
        super().__init__(name)
        self._rises = rises

    def advance(self, lsn: Lsn, /) -> None:
        """As of every watermark."""
        if lsn > self.lsn:
            self._rises.note(lsn)
        super().advance(lsn)


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
    """What this node may answer as LOCAL. The position in the file is the writer's: it is higher while the lease on the
    log has expired and no quorum holds the rest."""
    committed: Watermark = field(default_factory=lambda: Watermark("committed"))
    chained: Watermark = field(default_factory=lambda: Watermark("chained"))
    spread: Watermark = field(default_factory=lambda: Watermark("a majority of the regions"))
    """The position that a majority of the regions holds; does not move with a single region."""
    wall: WallClock = field(init=False)
    """The wall clock, as far as it is believed."""
    failure: LedgerError | None = None
    """Why this node no longer takes writes: a poisoned WAL, a fence, a database that went back."""
    damaged: dict[str, str] = field(default_factory=dict)
    """Tenants whose chain this node cannot extend, and why (``app.write.pending.quarantine``)."""
    waiting: dict[str, str] = field(default_factory=dict)
    """Tenants that are not chained for a while, and why: ``ROWS_LOCKED`` or ``HISTORY_READ``
    (``app.write.pending.quarantine``)."""
    unsigned: dict[str, str] = field(default_factory=dict)
    """Tenants whose rows this node does not sign any further, and why."""
    unfollowed: dict[str, str] = field(default_factory=dict)
    """Tenants whose newest entries have no valid checkpoint, and why (``ledger_watch``)."""
    accepting: bool = False
    """Whether requests are taken: false while starting and from the signal to stop on."""
    shutting_down: bool = False
    rises: WriteRises | None = None
    """None unless requests are traced."""

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
        """Position up to which every record of the tenant is chained; ``chained`` advances past records held back."""
        return BEFORE_FIRST if tenant_id in self.damaged or tenant_id in self.waiting else self.chained.lsn

    @property
    def watermarks(self) -> tuple[Watermark, ...]:
        """All watermarks that can be waited for."""
        return self.durable, self.committed, self.chained, self.spread

    def __post_init__(self) -> None:
        self.wall = WallClock(self.clock.max_clock_skew_ms)
        if self.rises is not None:
            self.durable = TimedWatermark(self.durable.name, self.rises.durable)
            self.chained = TimedWatermark(self.chained.name, self.rises.chained)
