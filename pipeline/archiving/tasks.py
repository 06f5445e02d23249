"""The files of a round as tasks on Spark, one a file."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from pipeline.archive.layout import FileName
from pipeline.archive.store import ArchiveStore
from pipeline.archiving.filing import FiledEntries, file_entries, file_snapshots
from pipeline.archiving.postgres import Ledger
from pipeline.archiving.run import FileAll, Outcome

if TYPE_CHECKING:
    from pyspark import Accumulator
    from pyspark.sql import SparkSession


def file_on(spark: SparkSession, dsn: str, url: str, rows: Accumulator[int]) -> FileAll:
    """Makes each file in a task of its own; ``rows`` counts the entries of those that are done.

    A task that fails is tried again, as Spark has it, and finds its file there or not.
    """

    def task(names: Iterable[FileName]) -> Iterator[Outcome]:
        with Ledger.connected(dsn) as ledger:
            for outcome in file_each(names, ledger, ArchiveStore(url)):
                if isinstance(outcome, FiledEntries):
                    rows.add(outcome.file.rows)
                yield outcome

    def file_all(names: Sequence[FileName]) -> Sequence[Outcome]:
        if not names:
            return []
        each = spark.sparkContext.parallelize(names, len(names))
        return each.mapPartitions(task).collect()

    return file_all


def file_each(names: Iterable[FileName], ledger: Ledger, store: ArchiveStore) -> Iterator[Outcome]:
    """Make these files, one after another in this process; raises what making one raises."""
    for name in names:
        yield (file_snapshots if name.month is None else file_entries)(ledger, store, name)
