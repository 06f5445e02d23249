"""What a process costs that tasks run in, beside the work: what it loads, and what is gone through after each task."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Iterator

import pyarrow as pa
from pyspark.sql import SparkSession

from pipeline.places.archive import FileOfArchive
from pipeline.places.protocol import ROWS_A_PIECE, Piece
from pipeline.source.frames import TASKS_A_CORE, in_tasks, over_numbers, rows_a_task


def test_tasks_load_no_more_than_they_use() -> None:
    code = "import sys, pipeline.verify.tasks, pipeline.places; print(*sys.modules)"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert {"pyarrow", "pipeline.places.postgres"} <= {*said.stdout.split()}
    assert not {"pandas", "pyspark"} & {*said.stdout.split()}


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
