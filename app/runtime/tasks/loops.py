"""What other threads have to say to an event loop."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import TypeVar

Value = TypeVar("Value")


def called_in(loop: asyncio.AbstractEventLoop, callback: Callable[[Value], None]) -> Callable[[Value], None]:
    """``callback``, called on any thread, run in ``loop``; dropped once that has ended."""

    def call(value: Value) -> None:
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(callback, value)

    return call
