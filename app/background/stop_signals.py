"""The signals that ask a service to stop, from the start of its process until its loop handles them."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable

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
