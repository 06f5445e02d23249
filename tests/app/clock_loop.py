"""An event loop in the time of a clock that is set by hand."""

from __future__ import annotations

import asyncio
import selectors


class Clock:
    """Time that goes by when it is told to."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class ClockSelector(selectors.DefaultSelector):
    """Waits by setting the clock forward."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._clock = clock

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        events = super().select(0)
        if not events and timeout:
            self._clock.now_s += timeout
        return events


class ClockLoop(asyncio.SelectorEventLoop):
    """An event loop in the time of a clock: what it runs takes as long as it says, whatever else the machine does."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(ClockSelector(clock))
        self._clock = clock

    def time(self) -> float:
        return self._clock()
