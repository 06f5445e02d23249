"""Tasks that look after derived state: what fails in one of them must not end a node that can take and chain events."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

import structlog

from app.runtime.database_faults import DATABASE_FAULTS
from ledger.errors import DatabaseUnavailableError

PAUSE_FIRST_S = 1.0
PAUSE_MAX_S = 60.0

log = structlog.get_logger()


async def kept_running(
    work: Callable[[], Coroutine[Any, Any, None]],
    *,
    pause_first_s: float = PAUSE_FIRST_S,
    report: Callable[[BaseException, str], object] = lambda error, task: None,
) -> None:
    """Run ``work`` to its end; when it fails, say so and restart it, after longer and longer pauses. ``report`` is
    given each failure that is no outage, and the name of the task."""
    pause_s = pause_first_s
    task = (work.func if isinstance(work, partial) else work).__qualname__
    while True:
        try:
            await work()
            return
        except DATABASE_FAULTS as error:
            # An outage: where in the driver it was met says nothing.
            log.warning("task_delayed", task=task, error=f"{type(error).__name__}: {error}", retry_in_s=pause_s)
        except DatabaseUnavailableError as error:
            log.warning("task_delayed", task=task, error=str(error), retry_in_s=pause_s)
        except Exception as error:
            # Rows and files that somebody edited may hold anything; the trace says what was not foreseen.
            log.error("task_failed", task=task, exc_info=error, retry_in_s=pause_s)
            report(error, task)
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, PAUSE_MAX_S)
