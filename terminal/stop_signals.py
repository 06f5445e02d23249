"""The signals that ask a process to stop, from its start until its loop handles them, and those that it ignores.

=====================================  ==========================================================================
SIGTERM, SIGINT                        stop
SIGHUP, SIGQUIT, SIGXCPU, SIGPWR       stop as well, unless the process was started to ignore them (``nohup``)
SIGUSR1, SIGUSR2, SIGALRM, SIGVTALRM,  ignored, where nothing else handles them: nobody means to end a process
SIGPROF, SIGIO, real-time signals      with them, and that is what they do by default
=====================================  ==========================================================================

SIGKILL cannot be handled; the rest are faults of the process itself.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Coroutine
from types import FrameType
from typing import Any, Final, TypeVar

Value = TypeVar("Value")
Handler = Callable[[int, FrameType | None], object]


def _known(*names: str) -> tuple[signal.Signals, ...]:
    """The signals among these that this system has."""
    return tuple(getattr(signal, name) for name in names if hasattr(signal, name))


STOP_SIGNALS: Final = _known("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGXCPU", "SIGPWR")
_ALWAYS: Final = (signal.SIGINT, signal.SIGTERM)
_IGNORED: Final = _known("SIGUSR1", "SIGUSR2", "SIGALRM", "SIGVTALRM", "SIGPROF", "SIGIO")
_REAL_TIME: Final = range(getattr(signal, "SIGRTMIN", 0), getattr(signal, "SIGRTMAX", -1) + 1)


def handled_signals() -> tuple[signal.Signals, ...]:
    """``STOP_SIGNALS`` without those that this process was started to ignore."""
    return tuple(each for each in STOP_SIGNALS if each in _ALWAYS or signal.getsignal(each) is not signal.SIG_IGN)


def take(handler: Handler) -> None:
    """Call ``handler`` at each of the handled signals from now on, and ignore signals that are not meant to end a
    process."""
    for number in handled_signals():
        signal.signal(number, handler)
    for other in (*_IGNORED, *_REAL_TIME):
        if signal.getsignal(other) is signal.SIG_DFL:
            signal.signal(other, signal.SIG_IGN)


def hold() -> None:
    """Block the signals until they are handled: an exception raised by one inside an event loop would break it."""
    signal.pthread_sigmask(signal.SIG_BLOCK, handled_signals())


def handle(stop: Callable[[], object]) -> None:
    """Call ``stop`` from the running loop at each signal, also at one that was held."""
    loop = asyncio.get_running_loop()
    numbers = handled_signals()
    for number in numbers:
        loop.add_signal_handler(number, stop)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)


def ignore() -> None:
    """Ignore the signals from now on: the stop is under way, so another one has no effect."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


async def unless(signalled: asyncio.Event, work: Coroutine[Any, Any, Value]) -> Value | None:
    """The result of ``work``, or None if the signal interrupted it."""
    working = asyncio.create_task(work)
    await ended_or_set(working, signalled)
    if not working.done():
        working.cancel()
        await asyncio.wait((working,))
    return None if working.cancelled() else working.result()


async def ended_or_set(task: asyncio.Task[Any], *events: asyncio.Event) -> None:
    """Return once ``task`` has ended, or one of the events is set."""
    waits = [asyncio.create_task(event.wait()) for event in events]
    await asyncio.wait((task, *waits), return_when=asyncio.FIRST_COMPLETED)
    for each in waits:
        each.cancel()
