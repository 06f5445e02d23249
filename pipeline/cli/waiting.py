"""Says what a command waits for while a cluster lets it wait: to be taken in, and for executors."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Final

from pipeline.gateway import is_submitted
from pipeline.masters import is_local

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from rich.console import Console

TOLD_AFTER_S: Final = 5.0
"""Shorter waits are not worth a line."""
LOOK_INTERVAL_S: Final = 0.5


class Waiting:
    """Looks at how a command is getting on, from a thread of its own, and says each wait once."""

    def __init__(self, master: str | None, console: Console) -> None:
        self.spark: SparkSession | None = None
        """Once it has started."""
        self._master = master
        self._console = console
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="pipeline-waiting", daemon=True)

    @classmethod
    @contextmanager
    def told(cls, master: str | None, console: Console) -> Iterator[Waiting]:
        """Look until the context is left; not at all where the work is done on this machine."""
        waiting = cls(master, console)
        if is_submitted() or (master is not None and not is_local(master)):
            waiting._thread.start()
        try:
            yield waiting
        finally:
            waiting.end()

    def end(self) -> None:
        """Look no more: Spark is about to stop."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join(LOOK_INTERVAL_S)

    def _follow(self) -> None:
        what, since_s, is_told = None, 0.0, False
        while not self._ended.wait(LOOK_INTERVAL_S):
            now, now_s = self._waits_for(), time.monotonic()
            if now != what:
                what, since_s, is_told = now, now_s, False
            elif what is not None and not is_told and now_s - since_s >= TOLD_AFTER_S:
                self._console.print(f"waiting for {what} ...", markup=False)
                is_told = True

    def _waits_for(self) -> str | None:
        from py4j.protocol import Py4JError

        if self.spark is None:
            return "Spark to start" if self._master is None else f"Spark to start on {self._master}"
        context = self.spark.sparkContext
        if is_local(context.master or ""):
            return None
        with suppress(Py4JError, OSError):  # Java is ending; the command itself will say so.
            # The driver is among those that are listed.
            if context.statusTracker().getActiveStageIds() and len(context._jsc.statusTracker().getExecutorInfos()) < 2:
                return f"{context.master} to give the application an executor"
        return None
