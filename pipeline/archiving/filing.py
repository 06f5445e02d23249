"""Making the files of an archive: rows are read, checked, written to a local file, and put under their name.

Each file of entries is made by a task, ``file_on`` Spark, alone and in bounded memory. In order::

    1. rows are read in batches, checked as one range of the chain, and written
    2. rows that do not hold end it: nothing is put into the archive, and what is wrong is the outcome
    3. the file is put under its name; where the name is taken, what stands there must have the same rows

What a file says of the chain beyond itself is left to the fold of all ranges (``ledger.verification.range_fold``): a
range is judged on its way into an archive by the algorithm that verifies it later.

Step 3 takes another file with the same rows for the one it would write: the writer of Parquet may have become another
one between a run that was killed and the one that carries on.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from ledger.errors import (
    ArchiveConflictError,
    ArchiveInvalidError,
    ArchiveSignatureError,
    InvalidInputError,
    LedgerError,
    UnknownKeyError,
)
from ledger.verification.entry_check import ENTRY_COLUMNS
from ledger.verification.range_check import RangeChecker, RangeSummary, RangeTask
from ledger.verification.verdict import Break, Findings
from objects.store import ArchiveStore
from pipeline.archive import parquet
from pipeline.archive.manifest import ArchivedFile, FileName
from pipeline.archive.parquet import ENTRY_FILE_SCHEMA, SNAPSHOT_FILE_SCHEMA, FileWriter
from pipeline.archiving.postgres import Ledger
from pipeline.arrow import ArrowEntries, lists_of

if TYPE_CHECKING:
    from pyspark import Accumulator
    from pyspark.sql import SparkSession

_PHYSICAL = ENTRY_COLUMNS.index("hlc_physical")


class UnjudgedBreak(Break):
    """Nothing is wrong but that no held key signed it."""


class FileTask(NamedTuple):
    """One file of entries to be made."""

    name: FileName
    first_seq: int
    """Of the range that the file is a part of."""


def found_in(error: LedgerError, seq: int) -> Break:
    """What is wrong with one tenant of the archive, from an error that says so; ``seq`` where the error names none."""
    if isinstance(error, UnknownKeyError):
        return UnjudgedBreak(seq, "archive-signature", str(error), None, None)
    at = error.seq if isinstance(error, ArchiveInvalidError) and error.seq else seq
    kind = "archive-signature" if isinstance(error, ArchiveSignatureError) else "archive"
    return Break(at, kind, str(error), None, None)


class FiledEntries(NamedTuple):
    """What came of a file of entries: the file, None where they do not hold, and what they say of the chain."""

    file: ArchivedFile | None
    summary: RangeSummary
    first: dict[str, Any]
    """The first entry, by ``ENTRY_COLUMNS``."""
    highest_physical_ms: int


Outcome = FiledEntries | Break
FileAll = Callable[[Sequence[FileTask]], Sequence[Outcome]]
"""Makes files, in any order, and gives what came of each."""


def file_entries(ledger: Ledger, store: ArchiveStore, task: FileTask) -> FiledEntries:
    """Put the entries of a file into the archive, if they hold.

    Raises:
        ArchiveConflictError: something else stands there.
        ArchiveUnavailableError, DatabaseUnavailableError: one of the two does not answer.
    """
    tenant_id, from_seq, to_seq, _ = task.name
    checked = RangeTask(
        tenant_id,
        0,
        from_seq,
        to_seq,
        task.first_seq,
        intervals=ledger.intervals(tenant_id, from_seq, to_seq),
        may_be_v1=ledger.entry_before(tenant_id, from_seq)[1] in (None, 1),
    )
    findings = Findings()
    checker = RangeChecker(checked, [], findings)
    first: dict[str, Any] = {}
    highest, file = 0, None
    with tempfile.TemporaryFile() as local, closing(FileWriter(local, ENTRY_FILE_SCHEMA)) as writer:
        for batch in ledger.range_reader(tenant_id, from_seq, to_seq).entries():
            columns = lists_of(batch)
            if checker.check_packed(ArrowEntries(batch)) is None:
                checker.check([*zip(*columns, strict=True)])
            if findings.first_break() is None:
                first = first or {name: column[0] for name, column in zip(ENTRY_COLUMNS, columns, strict=True)}
                highest = max(highest, max(columns[_PHYSICAL]))
                writer.add(batch)
        if first and findings.first_break() is None:
            file = _put(store, writer.finish(task.name.path()), local, ENTRY_FILE_SCHEMA)
    return FiledEntries(file, checker.finish(), first, highest)


def file_snapshots(store: ArchiveStore, name: FileName, batches: Iterable[pa.RecordBatch]) -> ArchivedFile:
    """Put snapshots, which were compared with their entries, into the archive; raises as ``file_entries``.

    Raises:
        InvalidInputError: a column holds what it never may.
    """
    with tempfile.TemporaryFile() as local, closing(FileWriter(local, SNAPSHOT_FILE_SCHEMA)) as writer:
        for batch in batches:
            writer.add(batch)
        return _put(store, writer.finish(name.path()), local, SNAPSHOT_FILE_SCHEMA)


def _put(store: ArchiveStore, file: ArchivedFile, local: Any, schema: pa.Schema) -> ArchivedFile:
    if store.create(file.name, local):
        return file
    digest, size = store.digest(file.name)
    if digest == file.sha256:
        return file
    standing = msgspec.structs.replace(file, sha256=digest, bytes=size)
    local.seek(0)
    if _has_rows_of(store, standing, local, schema):
        return standing
    raise ArchiveConflictError(
        f"{file.name} is there already and is another file: nothing was overwritten. If it is no part of this archive, "
        "move it away; else archive to another place"
    )


def _has_rows_of(store: ArchiveStore, standing: ArchivedFile, local: Any, schema: pa.Schema) -> bool:
    """Whether the file in the archive has the rows of ``local``."""
    try:
        with parquet.opened(store, standing, schema) as there:
            both = zip_longest(parquet.batches(there, standing), parquet.batches(pq.ParquetFile(local), standing))
            return all(theirs is not None and theirs.equals(ours) for theirs, ours in both)
    except (ArchiveInvalidError, InvalidInputError):
        return False


def file_on(spark: SparkSession, dsn: str, url: str, rows: Accumulator[int]) -> FileAll:
    """Makes each file in a task of its own; ``rows`` counts the entries of those that are done.

    A task that fails is tried again, as Spark has it, and finds its file there or not.
    """

    def task(names: Iterable[FileTask]) -> Iterator[Outcome]:
        with Ledger.connected(dsn) as ledger:
            for outcome in file_each(names, ledger, ArchiveStore(url)):
                if isinstance(outcome, FiledEntries):
                    rows.add(outcome.summary.rows)
                yield outcome

    def file_all(names: Sequence[FileTask]) -> Sequence[Outcome]:
        return spark.sparkContext.parallelize(names, len(names)).mapPartitions(task).collect()

    return file_all


def file_each(tasks: Iterable[FileTask], ledger: Ledger, store: ArchiveStore) -> Iterator[Outcome]:
    """Make these files. What is wrong with one tenant, in the archive too, is an outcome and stops no other.

    Raises:
        ArchiveUnavailableError, DatabaseUnavailableError: one of the two does not answer.
    """
    for task in tasks:
        try:
            yield file_entries(ledger, store, task)
        except (ArchiveConflictError, ArchiveInvalidError, InvalidInputError) as error:
            yield found_in(error, task.name.from_seq)
