"""What a process costs that tasks run in, beside the work: what it loads, and what is gone through after each task."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
from pyspark.sql import SparkSession

from pipeline.places.archive import FileOfArchive
from pipeline.places.protocol import ROWS_A_PIECE, Piece
from pipeline.source import TASKS_A_CORE, in_tasks, over_numbers, rows_a_task
from pipeline.spark import TASK_DAEMON


def test_tasks_load_no_more_than_they_use() -> None:
    code = "import sys, pipeline.verify.tasks, pipeline.places; print(*sys.modules)"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert {"pyarrow", "pipeline.places.postgres"} <= {*said.stdout.split()}
    assert not {"pandas", "pyspark"} & {*said.stdout.split()}


def test_tasks_run_in_forks_of_a_process_that_has_imported_what_they_use(spark: SparkSession) -> None:
    def parent(_: int) -> Iterator[pa.RecordBatch]:
        yield pa.RecordBatch.from_pydict({"command": [Path(f"/proc/{os.getppid()}/cmdline").read_bytes()]})

    (row,) = over_numbers(spark, 1, parent, "command binary").collect()
    assert row["command"].split(b"\0")[1:3] == [b"-m", TASK_DAEMON.encode()]


def test_what_is_loaded_ahead_is_what_tasks_of_tables_are_forked_from(spark: SparkSession) -> None:
    def parent(_: int) -> Iterator[pa.RecordBatch]:
        yield pa.RecordBatch.from_pydict({"pid": [os.getppid()]})

    (row,) = over_numbers(spark, 1, parent, "pid bigint").collect()
    assert spark.sparkContext.parallelize([0], 1).map(lambda _: os.getppid()).collect() == [row["pid"]]


def test_the_process_that_is_forked_has_one_thread() -> None:
    code = "import os, sys, pipeline.task_daemon as it; it.prepare(); "
    code += "print(len(os.listdir('/proc/self/task')), *sys.modules)"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    threads, *modules = said.stdout.split()
    assert int(threads) == 1
    assert {"pyarrow", "numpy", "pyspark.worker", "pipeline.places.postgres"} <= {*modules}
    assert "pandas" not in modules


def test_the_collector_passes_over_what_a_process_has_loaded(spark: SparkSession) -> None:
    def frozen(_: int) -> Iterator[pa.RecordBatch]:
        yield pa.RecordBatch.from_pydict({"count": [gc.get_freeze_count()]})

    counts = [row["count"] for row in over_numbers(spark, 3, frozen, "count bigint").collect()]
    assert min(counts) > 10_000


def test_many_small_pieces_become_a_few_tasks_a_core_and_few_are_not_put_together() -> None:
    where = FileOfArchive("file:///a", None, None, None, None)  # type: ignore[arg-type]
    pieces = [Piece(f"tenant-{number}", 1, None, 51_000, True, where) for number in range(200)]
    for cores in (1, 2, 4):
        tasks = in_tasks(pieces, rows_a_task(pieces, cores))
        assert TASKS_A_CORE * cores <= len(tasks) <= 1.3 * TASKS_A_CORE * cores
        assert [piece for of_task in tasks for piece in of_task] == pieces
    assert len(in_tasks(pieces, rows_a_task(pieces, 1000))) == 200
    assert rows_a_task(pieces[:5], 2) == ROWS_A_PIECE
