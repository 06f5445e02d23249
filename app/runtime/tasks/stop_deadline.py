"""The last resort of a stop: where something holds it up for ever, the process says what, and ends all the same.

What was acknowledged is durable, so the next start loses nothing by it; it finds what a kill leaves.
"""

from __future__ import annotations

import os
import sys
import threading
import traceback
from collections.abc import Callable
from types import TracebackType

import structlog

from ledger.exit_code import ExitCode

log = structlog.get_logger()


class StopDeadline:
    """Ends the process, with exit code 1, ``seconds`` after ``begin`` was first called; unless it was left before.
    ``before_end`` is called then, behind the last line of the log, and MUST NOT wait long."""

    def __init__(self, seconds: float, before_end: Callable[[], object] = lambda: None) -> None:
        self._seconds = seconds
        self._before_end = before_end
        self._timer = threading.Timer(seconds, self._end)
        self._timer.daemon = True
        self._has_begun = False

    def __enter__(self) -> StopDeadline:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._timer.cancel()

    def begin(self) -> None:
        """The stop begins; more calls change nothing."""
        if not self._has_begun:
            self._has_begun = True
            self._timer.start()

    def _end(self) -> None:
        frames = sys._current_frames()
        stands = {
            thread.name: "".join(traceback.format_stack(frames[thread.ident], limit=3)).strip().splitlines()
            for thread in threading.enumerate()
            if thread is not threading.current_thread() and thread.ident in frames
        }
        log.critical("stop_overdue", after_s=self._seconds, threads=stands)
        self._before_end()
        os._exit(ExitCode.COULD_NOT_RUN)
