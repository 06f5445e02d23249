"""Progress of long work on a terminal: stages, tasks, rows and their rate, as Spark's own status tracker tells them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Final

from py4j.protocol import Py4JError
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

if TYPE_CHECKING:
    from pyspark import Accumulator, SparkContext
    from pyspark.sql import SparkSession

LOOK_INTERVAL_S: Final = 0.25


@contextmanager
def shown(spark: SparkSession, what: str, console: Console, rows: Accumulator[int] | None = None) -> Iterator[None]:
    """Show how far the jobs are that run meanwhile; ``rows`` counts the rows that tasks which ended have passed.

    Nothing is shown where ``console`` is no terminal.
    """
    if not console.is_terminal:
        yield
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[told]}"))
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as progress:
        task, ended = progress.add_task(what, total=None, told=""), threading.Event()

        def follow() -> None:
            with suppress(Py4JError, OSError):  # Java is gone; the work itself will say so.
                while not ended.wait(LOOK_INTERVAL_S):
                    done, total, stages = _tasks(spark.sparkContext)
                    told = f"stage {stages}, {done}/{total} tasks" if total else "planning"
                    if rows is not None and rows.value:
                        elapsed_s = progress.tasks[task].elapsed or 1
                        told += f", {rows.value:,} rows, {rows.value / elapsed_s:,.0f} rows/s"
                    progress.update(task, total=total or None, completed=done, told=told)

        follower = threading.Thread(target=follow, name="pipeline-progress", daemon=True)
        follower.start()
        try:
            yield
        finally:
            ended.set()
            follower.join()


def _tasks(context: SparkContext) -> tuple[int, int, str]:
    """Tasks done and in all of the stages at work, and the numbers of those stages."""
    tracker = context.statusTracker()
    stages = [info for info in map(tracker.getStageInfo, tracker.getActiveStageIds()) if info is not None]
    numbers = ", ".join(str(info.stageId + 1) for info in stages)
    return sum(info.numCompletedTasks for info in stages), sum(info.numTasks for info in stages), numbers
