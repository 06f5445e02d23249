"""The files of a round as tasks on Spark, one a file."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from ledger.errors import ArchiveConflictError, ArchiveInvalidError, InvalidInputError
from pipeline.archive.store import ArchiveStore
from pipeline.archiving.filing import FiledEntries, FileTask, Outcome, file_entries, file_snapshots, found_in
from pipeline.archiving.postgres import Ledger
from pipeline.archiving.run import FileAll

if TYPE_CHECKING:
    from pyspark import Accumulator
    from pyspark.sql import SparkSession


def file_on(spark: SparkSession, dsn: str, url: str, rows: Accumulator[int]) -> FileAll:
    """Makes each file in a task of its own; ``rows`` counts the entries of those that are done.

    A task that fails is tried again, as Spark has it, and finds its file there or not.
    """

    def task(names: Iterable[FileTask]) -> Iterator[Outcome]:
        with Ledger.connected(dsn) as ledger:
            for outcome in file_each(names, ledger, ArchiveStore(url)):
                if isinstance(outcome, FiledEntries):
                    rows.add(outcome.file.rows)
                yield outcome

    def file_all(names: Sequence[FileTask]) -> Sequence[Outcome]:
        if not names:
            return []
        each = spark.sparkContext.parallelize(names, len(names))
        return each.mapPartitions(task).collect()

    return file_all


def file_each(tasks: Iterable[FileTask], ledger: Ledger, store: ArchiveStore) -> Iterator[Outcome]:
    """Make these files. What is wrong with one tenant, in the archive too, is an outcome and stops no other.

    Raises:
        ArchiveUnavailableError, DatabaseUnavailableError: one of the two does not answer.
    """
    for name, ground in tasks:
        try:
            if ground is None:
                yield file_entries(ledger, store, name)
            else:
                yield file_snapshots(ledger, store, name, ground)
        except (ArchiveConflictError, ArchiveInvalidError, InvalidInputError) as error:
            yield found_in(error, name.from_seq)
