"""Logs: one JSON object a line on stderr, or coloured text when stderr is a terminal.

An event has a name that never changes (``wal_epoch_bump``) and its facts as fields. Records of the standard
library's ``logging``, uvicorn's among them, come out in the same form.
"""

from __future__ import annotations

import logging
import sys
from typing import TextIO

import structlog
from structlog.types import Processor


def configure_logs(level: int = logging.INFO, stream: TextIO | None = None) -> None:
    """Send every log of this process to ``stream`` (stderr when not said), from ``level`` up."""
    out = sys.stderr if stream is None else stream
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    structlog.configure(
        processors=[*shared, *_rendering(out)],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.WriteLoggerFactory(out),
        cache_logger_on_first_use=False,
    )
    handler = logging.StreamHandler(out)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[*shared, structlog.stdlib.add_logger_name],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *_rendering(out)],
        )
    )
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(level)
    for name in ("alembic", "httpx"):
        logging.getLogger(name).setLevel(logging.WARNING)
    for name in ("uvicorn", "uvicorn.error", "uvicorn.access"):
        logging.getLogger(name).handlers = []
        logging.getLogger(name).propagate = name != "uvicorn.access"


def _rendering(out: TextIO) -> list[Processor]:
    if out.isatty():
        return [structlog.dev.ConsoleRenderer(colors=True, exception_formatter=structlog.dev.plain_traceback)]
    # Local variables stay out of tracebacks: they may hold passwords and what callers sent.
    transformer = structlog.tracebacks.ExceptionDictTransformer(show_locals=False)
    return [structlog.processors.ExceptionRenderer(transformer), structlog.processors.JSONRenderer()]
