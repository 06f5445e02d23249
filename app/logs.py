"""Logs: one JSON object a line on stderr, or coloured text when stderr is a terminal.

An event has a name that never changes (``wal_epoch_bump``) and its facts as fields. Records of the standard
library's ``logging``, uvicorn's among them, come out in the same form.

Of one event at most ``LINES_A_SECOND_MAX`` lines a second are written; how many more there were is one line a second
later (``log_lines_left_out``). So nobody fills the disk of the log by asking for the same thing again and again.

A line that cannot be written, on a disk that is full or to a reader that is gone, is lost, and whoever logs goes on;
the next that can says how many there were (``log_lines_lost``).
"""

from __future__ import annotations

import io
import logging
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Final, TextIO, cast

import structlog
from structlog.types import EventDict, Processor

LINES_A_SECOND_MAX: Final = 10
"""Of one event. Critical ones are written all."""
_LEFT_OUT: Final = "log_lines_left_out"
_LOST: Final = "log_lines_lost"


class LineBudget:
    """Decides which lines are written, and has the others counted. Any thread may ask.

    ``tell`` is called with an event and how many lines of it were left out, once for each about a second later.
    """

    def __init__(self, tell: Callable[[str, int], object], clock_s: Callable[[], float] = time.monotonic) -> None:
        self._tell = tell
        self._clock_s = clock_s
        self._lock = threading.Lock()
        self._written: dict[str, tuple[float, int]] = {}
        """By event, when the second began that is counted, and the lines written in it."""
        self._left_out: Counter[str] = Counter()

    def admits(self, event: str) -> bool:
        """Whether one more line of ``event`` is written."""
        with self._lock:
            now_s = self._clock_s()
            began_s, lines = self._written.get(event, (now_s, 0))
            if now_s - began_s >= 1:
                began_s, lines = now_s, 0
            self._written[event] = began_s, lines + 1
            if lines < LINES_A_SECOND_MAX:
                return True
            if not self._left_out:
                telling = threading.Timer(1.0, self.tell)
                telling.daemon = True
                telling.start()
            self._left_out[event] += 1
            return False

    def tell(self) -> None:
        """Tell of the lines that were left out until now."""
        with self._lock:
            left_out, self._left_out = self._left_out, Counter()
        for event, count in left_out.items():
            self._tell(event, count)

    def process(self, _logger: object, method: str, line: EventDict) -> EventDict:
        """As a processor of structlog.

        Raises:
            DropEvent: the line is left out.
        """
        if method != "critical" and line["event"] != _LEFT_OUT and not self.admits(str(line["event"])):
            raise structlog.DropEvent
        return line

    def filter(self, record: logging.LogRecord) -> bool:
        """As a filter of ``logging``: there an event is a place in the code."""
        return record.levelno >= logging.CRITICAL or self.admits(f"{record.name}:{record.lineno}")


class LossyStream(io.TextIOBase):
    """Writes what ``out`` takes, line by line, and counts the lines that it does not take. The first kilobytes of
    those may come out late, counted all the same."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._lost = 0

    def isatty(self) -> bool:
        """Whether people read it."""
        return self._out.isatty()

    def write(self, text: str) -> int:
        """MUST NOT fail: whoever logs may be about to say why the node ends, and has to end it."""
        try:
            self._out.write(text)
            self._out.flush()
        except (OSError, ValueError):
            self._lost += 1
        else:
            self._lost = 0
        return len(text)

    def count_lost(self, _logger: object, _method: str, line: EventDict) -> EventDict:
        """As a processor of structlog: the next line that is written says how many were lost before it."""
        if self._lost:
            line[_LOST] = self._lost
        return line


def configure_logs(stream: TextIO | None = None) -> None:
    """Send every log of this process to ``stream`` (stderr when not said), from INFO up."""
    # There is no stderr in a process that was started with it closed.
    out = LossyStream(stream or sys.stderr or open(os.devnull, "w"))  # noqa: SIM115 (it is written to until the end)
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        out.count_lost,
    ]
    budget = LineBudget(lambda event, count: structlog.get_logger().warning(_LEFT_OUT, of=event, count=count))
    structlog.configure(
        processors=[budget.process, *shared, *_rendering(out)],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=structlog.WriteLoggerFactory(cast(TextIO, out)),
        cache_logger_on_first_use=False,
    )
    handler = logging.StreamHandler(out)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[*shared, structlog.stdlib.add_logger_name],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *_rendering(out)],
        )
    )
    handler.addFilter(budget.filter)
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(logging.INFO)
    for name, level in (("alembic", logging.WARNING), ("asyncpg.pool", logging.ERROR), ("httpx", logging.WARNING)):
        logging.getLogger(name).setLevel(level)
    for name in ("uvicorn", "uvicorn.error", "uvicorn.access"):
        logging.getLogger(name).handlers = []
        logging.getLogger(name).propagate = name != "uvicorn.access"


def _rendering(out: LossyStream) -> list[Processor]:
    if out.isatty():
        return [structlog.dev.ConsoleRenderer(colors=True, exception_formatter=structlog.dev.plain_traceback)]
    # Local variables stay out of tracebacks: they may hold passwords and what callers sent.
    transformer = structlog.tracebacks.ExceptionDictTransformer(show_locals=False)
    return [structlog.processors.ExceptionRenderer(transformer), structlog.processors.JSONRenderer()]
