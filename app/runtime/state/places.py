"""Who waits for a position of this node, in the order of the positions.

It is there twice: ``PythonPlaces`` is the specification, and ``_native.Places`` does the same in C, where that
is built. What is waited on are the loop's own futures with either.
"""

from __future__ import annotations

import asyncio
import math
from bisect import bisect_right
from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING

from ledger.errors import LedgerError
from ledger.positions import Lsn


class PythonPlaces:
    """A position that only rises, and the places of those who wait for it, each until a time of the loop's own.

    All whom one rise reaches are resolved in one pass, and one timer, which is whoever inherits this to set
    (``look_at``), serves all who wait with a deadline. Belongs to one event loop.
    """

    def __init__(self, lsn: Lsn) -> None:
        self.lsn = lsn
        self.wanted_lsn = lsn
        """Highest position that anybody waits for, or waited for."""
        self.on_wanted: Callable[[], None] | None = None
        """Called when somebody waits for a higher position than anybody before."""
        self.failure: LedgerError | None = None
        """What everyone is told who comes for a position not reached; None while it rises."""
        self.looks_at_s = math.inf
        """When the deadlines are looked at next: at the first of them, or before."""
        self._loop: asyncio.AbstractEventLoop | None = None
        """Kept, since asking for the running one costs a system call."""
        self._lsns: list[Lsn] = []
        self._deadlines: list[tuple[float, float]] = []
        """In the loop's time, and the seconds given."""
        self._futures: list[asyncio.Future[None]] = []
        self._came_s = -math.inf
        """When the last came, in the loop's time, which stands still while it calls one after the other."""
        self._deadline = (0.0, 0.0)
        """Of those who came then."""

    def reached(self, lsn: Lsn, timeout_s: float = math.inf, /) -> asyncio.Future[None]:
        """A future that resolves once the position is ``lsn`` or above, not before.

        It fails with ``failure`` if that comes first, and ``overdue`` names it after ``timeout_s`` seconds.
        """
        loop = self._loop
        if loop is None:
            loop = self._loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        if self.lsn >= lsn:
            future.set_result(None)
        elif self.failure is not None:
            future.set_exception(self.failure)
        else:
            self.want(lsn)
            now_s = loop.time()
            if now_s != self._came_s or timeout_s != self._deadline[1]:
                self._come(now_s, timeout_s)
            at = len(self._lsns)
            if self._lsns and self._lsns[-1] > lsn:
                at = bisect_right(self._lsns, lsn)
            self._lsns.insert(at, lsn)
            self._deadlines.insert(at, self._deadline)
            self._futures.insert(at, future)
        return future

    def want(self, lsn: Lsn, /) -> None:
        """Somebody waits for ``lsn``, here or in another way."""
        if lsn > self.wanted_lsn:
            self.wanted_lsn = lsn
            if self.on_wanted is not None:
                self.on_wanted()

    def advance(self, lsn: Lsn, /) -> None:
        """Raise the position to ``lsn`` and resolve whoever waited for it; a lower one changes nothing."""
        if lsn <= self.lsn:
            return
        self.lsn = lsn
        for future in self._leave_first(bisect_right(self._lsns, lsn)):
            if not future.done():
                future.set_result(None)

    def leave(self) -> list[asyncio.Future[None]]:
        """The futures of all who wait, who do so no more."""
        return self._leave_first(len(self._lsns))

    def overdue(self, now_s: float, /) -> list[tuple[Lsn, float, asyncio.Future[None]]]:
        """Those whose time is up, who wait no more: position, the seconds given, future. The deadlines of those who are
        left are looked at in time."""
        waiting = list(zip(self._lsns, self._deadlines, self._futures, strict=True))
        left = [place for place in waiting if place[1][0] > now_s]
        self._lsns = [lsn for lsn, _, _ in left]
        self._deadlines = [deadline for _, deadline, _ in left]
        self._futures = [future for _, _, future in left]
        self._came_s = -math.inf
        self.looks_at_s = math.inf
        next_s, _ = min(self._deadlines, default=(math.inf, 0.0))
        if next_s < math.inf:
            self._look_at(next_s)
        return [(lsn, timeout_s, future) for lsn, (ends_s, timeout_s), future in waiting if ends_s <= now_s]

    def look_at(self, ends_s: float) -> None:
        """See that ``overdue`` is asked at ``ends_s``, or later where ``looks_at_s`` is another by then."""
        raise NotImplementedError

    def _leave_first(self, count: int) -> list[asyncio.Future[None]]:
        futures = self._futures[:count]
        del self._lsns[:count], self._deadlines[:count], self._futures[:count]
        return futures

    def _come(self, now_s: float, timeout_s: float) -> None:
        """Whoever comes at ``now_s`` with this timeout has the same deadline, and it is looked at in time."""
        self._came_s = now_s
        self._deadline = (now_s + timeout_s, timeout_s)
        if self._deadline[0] < self.looks_at_s:
            self._look_at(self._deadline[0])

    def _look_at(self, ends_s: float) -> None:
        self.looks_at_s = ends_s
        self.look_at(ends_s)


if TYPE_CHECKING:
    Places = PythonPlaces
else:
    try:
        Places = import_module("app.runtime.state._native").Places
    except ImportError:
        Places = PythonPlaces
