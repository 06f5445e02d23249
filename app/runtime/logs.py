"""Logs: one JSON object a line on stderr, or coloured text when stderr is a terminal.

An event has a name that never changes (``wal_epoch_bump``) and its facts as fields. Records of the standard
library's ``logging``, uvicorn's among them, come out in the same form.

Of one event at most ``LINES_A_SECOND_MAX`` lines a second are written; how many more there were is one line a second
later (``log_lines_left_out``). So no caller can fill the disk of the log by repeating a request.

Lines wait in a bounded queue for a thread that writes them. A line is lost if the queue is full, because a reader does
not read, or if it cannot be written, because the disk is full or the reader is gone. The caller continues; the next
line that is written reports how many were lost (``log_lines_lost``).
"""

from __future__ import annotations

import atexit
import io
import logging
import os
import select
import signal
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, TextIO, cast

import structlog
from structlog.types import EventDict, Processor

LINES_A_SECOND_MAX: Final = 10
"""Of one event. Critical lines are all written."""
WAITING_BYTES_MAX: Final = 1 << 20
"""Of lines that wait to be written; further lines are lost."""
DRAIN_S: Final = 2.0
"""How long the end of a process waits for its lines to be written."""
_LEFT_OUT: Final = "log_lines_left_out"

log = structlog.get_logger()
"""The log of every room of ``app``; its lines go where ``configure_logs`` says."""


@dataclass(eq=False)
class LineBudget:
    """Decides which lines are written, and counts the others. Thread-safe.

    ``_tell`` is called with an event and how many lines of it were left out, once for each about a second later.
    """

    _tell: Callable[[str, int], object]
    _clock_s: Callable[[], float] = time.monotonic
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _written: dict[str, tuple[float, int]] = field(default_factory=dict)
    """By event, the start of the current second, and the lines written in it."""
    _left_out: Counter[str] = field(default_factory=Counter)

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
        """Report the lines that were left out until now."""
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


class QueuedStream(io.TextIOBase):
    """Writes lines to ``out`` from a queue and by a thread of its own, so that a slow reader or a stopped terminal
    blocks no caller. One call of ``write`` is one line.

    waiting bytes <= WAITING_BYTES_MAX

    A line is lost if the queue is full or ``out`` does not take it; the next line that is written reports how many were
    lost. The thread bypasses Python's own buffer, whose lock the process would need at its end.
    """

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._changed = threading.Condition()
        self._lines: deque[tuple[bytes, int]] = deque()
        """Waiting lines, each with the number of lost lines that it reports."""
        self._waiting_bytes = 0
        self._lost = 0
        """Lines that no line reports yet."""
        self._reported = threading.local()
        """By thread: ``count``, the number that the thread's next line reports."""
        self._descriptor = out.fileno()
        out.flush()
        # The thread gets no signals: they are for the thread that waits for them, or blocks them.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        threading.Thread(target=self._write_all, name="log", daemon=True).start()
        signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def isatty(self) -> bool:
        """Whether people read it."""
        return self._out.isatty()

    def write(self, text: str) -> int:
        """MUST NOT fail, nor wait: the caller may be about to log why the node ends, and has to end it."""
        count, self._reported.count = getattr(self._reported, "count", 0), 0
        line = text.encode("utf-8", "backslashreplace")
        with self._changed:
            if self._waiting_bytes + len(line) > WAITING_BYTES_MAX:
                self._lost += 1 + count
            else:
                self._lines.append((line, count))
                self._waiting_bytes += len(line)
                self._changed.notify_all()
        return len(text)

    def count_lost(self, _logger: object, _method: str, line: EventDict) -> EventDict:
        """As a processor of structlog: the next line that is written says how many were lost before it."""
        with self._changed:
            count, self._lost = getattr(self._reported, "count", 0) + self._lost, 0
        self._reported.count = count
        if count:
            line["log_lines_lost"] = count
        return line

    def drain(self, seconds: float) -> None:
        """Wait until all lines are written, at most ``seconds``."""
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting_bytes, seconds)

    def _write_all(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._lines)
                line, count = self._lines.popleft()
            is_written = self._is_sent(line)
            with self._changed:
                self._lost += 0 if is_written else 1 + count
                self._waiting_bytes -= len(line)
                self._changed.notify_all()

    def _is_sent(self, line: bytes) -> bool:
        """Whether the system took the whole line; waits for a descriptor that does not block."""
        while line:
            try:
                line = line[os.write(self._descriptor, line) :]
            except BlockingIOError:
                ready = select.poll()
                ready.register(self._descriptor, select.POLLOUT)
                ready.poll()
            except OSError:
                return False
        return True


_streams: list[QueuedStream] = []
"""The one that logs go to."""


def drain_logs(seconds: float = DRAIN_S) -> None:
    """Wait until all logged lines are written, at most ``seconds``. For code that ends the process."""
    for stream in _streams:
        stream.drain(seconds)


def write_line(text: str) -> None:
    """Write a line for people to the stream of the logs, after all logged lines."""
    for stream in _streams:
        stream.write(f"{text}\n")


def configure_logs(stream: TextIO | None = None) -> None:
    """Send every log of this process to ``stream``, a file (default stderr), from INFO up."""
    # There is no stderr in a process that was started with it closed.
    out = QueuedStream(stream or sys.stderr or open(os.devnull, "w"))  # noqa: SIM115 (it is written to until the end)
    _streams[:] = [out]
    atexit.register(drain_logs)
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


def _rendering(out: QueuedStream) -> list[Processor]:
    if out.isatty():
        return [structlog.dev.ConsoleRenderer(colors=True, exception_formatter=structlog.dev.plain_traceback)]
    # Local variables stay out of tracebacks: they may hold passwords and callers' data.
    return [
        structlog.processors.ExceptionRenderer(structlog.tracebacks.ExceptionDictTransformer(show_locals=False)),
        structlog.processors.JSONRenderer(),
    ]
