"""The thread that writes what the intake has taken. Whatever happens to its disk is counted and said once, and stays
here: jobs are written elsewhere."""

from __future__ import annotations

import threading
from collections.abc import Callable

import structlog

from app.runtime.metrics import Metrics
from app.write.stats.files import StatsFiles
from app.write.stats.intake import Chunk, StatsIntake

TRY_AGAIN_S = 1.0
"""How long a disk that failed is left alone while nothing is to be written."""

log = structlog.get_logger()


class StatsWriter:
    """Writes from ``start`` on until ``close``."""

    def __init__(self, intake: StatsIntake, files: StatsFiles, metrics: Metrics) -> None:
        self._intake = intake
        self._files = files
        self._metrics = metrics
        self._closing = threading.Event()
        self._failing = False
        self._thread = threading.Thread(target=self._run, name="stats-writer", daemon=True)

    def start(self) -> None:
        """Close what an earlier process left open, then write what comes."""
        self._thread.start()

    def close(self, timeout_s: float) -> None:
        """Write what waits, close the file; after ``timeout_s`` the thread is left to end with the process."""
        if not self._thread.is_alive():
            return
        self._closing.set()
        self._intake.hurry()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            log.warning("stats_not_flushed", waited_s=timeout_s)

    def _run(self) -> None:
        self._attempt(self._files.tidy)
        while not self._closing.is_set():
            for chunk in self._intake.take(TRY_AGAIN_S if self._failing else self._files.due_in_s()):
                self._write(chunk)
            self._attempt(self._files.close_old)
            if self._failing:
                self._attempt(self._files.tidy)
        for chunk in self._intake.take(0):
            self._write(chunk)
        self._attempt(self._files.close)

    def _write(self, chunk: Chunk) -> None:
        if self._attempt(lambda: self._files.append(chunk.data)):
            self._metrics.stats_written_bytes.inc(len(chunk.data))
            if self._failing:
                self._failing = False
                log.info("stats_written_again")
        else:
            self._metrics.stats_dropped("disk", chunk.lines)
        self._intake.written(chunk)

    def _attempt(self, work: Callable[[], None]) -> bool:
        """Whether ``work`` could be done; of all failures until lines are written again the first is logged."""
        try:
            work()
        except OSError as error:
            self._metrics.stats_write_failures.inc()
            if not self._failing:
                log.warning("stats_not_written", error=str(error))
            self._failing = True
            return False
        return True
