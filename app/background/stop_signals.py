"""The signals that ask a service to stop, from the start of its process until its loop handles them."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

Value = TypeVar("Value")

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def hold() -> None:
    """Let the signals wait until they are handled: an exception raised by one inside an event loop would break it."""
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)


def handle(stop: Callable[[], object]) -> None:
    """Call ``stop`` from the running loop at each signal, also at one that was held."""
    loop = asyncio.get_running_loop()
    for number in STOP_SIGNALS:
        loop.add_signal_handler(number, stop)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


async def unless(signalled: asyncio.Event, work: Coroutine[Any, Any, Value]) -> Value | None:
    """What ``work`` returns, or None when it was cut short by the signal."""
    loop = asyncio.get_running_loop()
    working = loop.create_task(work)
    signal_came = loop.create_task(signalled.wait())
    await asyncio.wait((working, signal_came), return_when=asyncio.FIRST_COMPLETED)
    signal_came.cancel()
    if not working.done():
        working.cancel()
        await asyncio.wait((working,))
    return None if working.cancelled() else working.result()
