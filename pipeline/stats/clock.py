"""How late it is, told to the stream by files of one line beside its checkpoint, where windows are to be closed by it.

A stream closes windows by the newest time that it has seen. While nothing new comes, that of a tick is the newest::

    time_ms <= newest_ms + close_after_ms

of which ``newest_ms`` is the time of the newest report that was read. So a clock that was wrong for one run closes no
window further than reports bear out.
"""

from __future__ import annotations

import time
from typing import NamedTuple

from ledger.errors import ConfigurationError
from pipeline.stats.lines import AHEAD_MAX_S


class Tick(NamedTuple):
    """In milliseconds since 1970: the newest report that was read, and how late it was said to be then."""

    newest_ms: int
    time_ms: int


def next_tick(last: Tick, newest_ms: int, now_ms: int, close_after_ms: int) -> Tick:
    """The tick after ``last``, once reports up to ``newest_ms`` were read; ``close_after_ms`` is 0 to close nothing."""
    newest_ms = max(newest_ms, last.newest_ms)
    is_closing = close_after_ms and newest_ms
    return Tick(newest_ms, max(last.time_ms, min(now_ms, newest_ms + close_after_ms) if is_closing else 0))


def refuse_behind(last: Tick, now_ms: int) -> None:
    """See that ``now_ms`` can be the time of a clock to close windows by.

    Raises:
        ConfigurationError: it lies too far behind what was read.
    """
    if now_ms + AHEAD_MAX_S * 1000 < max(last):
        raise ConfigurationError(
            f"this machine's clock says {_utc(now_ms)}, and an earlier run here had come to {_utc(max(last))}: "
            "set the clock right, or leave out --close"
        )


def _utc(time_ms: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time_ms / 1000))
