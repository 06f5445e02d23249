"""The life of a node: its tasks, its failure, and the time budget of its stop.

A stop takes at most ``shutdown_grace``: open requests end, the WAL is flushed, the backlog is drained as far as time
allows, the control file is written. A node that fails (poisoned WAL, fenced, database went back) acknowledges nothing
more and stops itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from app.runtime.logs import log
from app.runtime.metrics import Metrics
from app.runtime.state.kept_files import count_fenced
from app.runtime.state.node import Node, expire
from app.runtime.tasks import kept_running
from app.write.pending.backlog import Backlog
from ledger.errors import DurabilityTimeoutError, FencedError, LedgerError, WalPoisonedError

WAITING_SHARE = 0.4
"""Part of ``shutdown_grace`` after which writes that wait for their level are answered without it."""


@dataclass(kw_only=True, eq=False)
class Lifecycle:
    """Runs the tasks of a node until it stops. Belongs to one event loop."""

    node: Node
    backlog: Backlog
    metrics: Metrics
    wal_folder: Path
    grace_s: float
    report: Callable[[BaseException, str], object]
    """Takes an error that is about a break, and the name of the task that met it."""
    give_up: Callable[[], None]
    """Ends the waits for answers of safekeepers and regions."""
    tasks: list[asyncio.Task[None]] = field(default_factory=list)
    stop_requested: asyncio.Event = field(default_factory=asyncio.Event)
    _loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    _stop_by_s: float | None = None

    @property
    def is_stopping(self) -> bool:
        """Whether the stop has started."""
        return self._stop_by_s is not None

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run ``work`` until the node stops; if it fails, the node fails."""
        task = self._loop.create_task(work)
        task.add_done_callback(self._task_ended)
        self.tasks.append(task)
        return task

    def keep(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run ``work`` until the node stops, and restart it when it fails; a break that it meets is reported."""
        self.spawn(kept_running(work, report=self.report))

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        if task.cancelled():
            if not self.is_stopping:
                # Only a stop cancels tasks: a task that ended for any other reason no longer does its work.
                name = getattr(task.get_coro(), "__qualname__", task.get_name())
                self.fail(LedgerError(f"internal error: {name} was cancelled, though nobody stops the node"))
            return
        if (error := task.exception()) is None or error is self.node.failure:
            return
        if self.is_stopping and isinstance(error, DurabilityTimeoutError | WalPoisonedError):
            return  # too late for the stop; a WAL that really failed reports that itself
        log.error("task_failed", exc_info=error)
        self.report(error, "node")
        self.fail(error if isinstance(error, LedgerError) else LedgerError(f"internal error: {error!r}"))

    def fail(self, error: LedgerError) -> None:
        """The node cannot go on: nothing more is acknowledged, and the process ends for a restart."""
        if self.node.failure is not None:
            return
        self.node.failure = error
        if isinstance(error, FencedError):
            self.metrics.count("wal_fencing_rejects")
            count_fenced(self.wal_folder)
        log.critical(
            "wal_sync_failure" if isinstance(error, WalPoisonedError) else "node_failed",
            error=str(error),
            kind=type(error).__name__,
        )
        for watermark in self.node.watermarks:
            watermark.fail(error)
        self._end_waiting(lambda outcome: outcome.set_exception(error))
        self.stop_requested.set()

    def begin_stop(self) -> None:
        """``shutdown_grace`` counts from the first call on."""
        if self._stop_by_s is None:
            self._stop_by_s = self._loop.time() + self.grace_s
            self._loop.call_later(self.grace_s * WAITING_SHARE, self._answer_waiting)

    def _answer_waiting(self) -> None:
        """Answer the waiting writes with the level that each has reached, while there is time to."""
        message = "the service stops"
        for watermark in self.node.watermarks:
            watermark.give_up(message)
        self._end_waiting(lambda outcome: expire(outcome, message))

    def _end_waiting(self, end: Callable[[asyncio.Future[Any]], object]) -> None:
        """Call ``end`` with each future that writes wait for in the backlog; end the waits for safekeepers and
        regions."""
        for pending in self.backlog:
            if pending.outcome is not None and not pending.outcome.done():
                end(pending.outcome)
                pending.outcome.exception()
        self.give_up()

    def left_s(self) -> float:
        """Seconds left for the stop."""
        assert self._stop_by_s is not None
        return max(0.0, self._stop_by_s - self._loop.time())
