"""Waiting for what must come, without an event loop; ``tests.app.chains.until`` waits inside of one."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

WAIT_S = 120.0
"""How long a test waits for something that must come."""
_PAUSE_S = 0.01


def until(condition: Callable[[], Any], what: str, timeout_s: float = WAIT_S, *, pause_s: float = _PAUSE_S) -> Any:
    """Wait until ``condition()`` is true; its value then. It is asked every ``pause_s``. Fails after ``timeout_s``."""
    deadline_s = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline_s, f"not within {timeout_s:g} s: {what}"
        time.sleep(pause_s)
    return value
