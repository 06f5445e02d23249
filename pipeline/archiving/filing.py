"""Making the files of an archive: rows are read, checked, written to a local file, and put under their name.

Each is made by a task, ``file_on`` Spark, alone and in bounded memory. In order::

    1. rows are read in batches, checked against one another and against what stands before them, and written
    2. rows that do not hold end it: nothing is put into the archive, and what is wrong is the outcome
    3. the file is put under its name; where the name is taken, what stands there must have the same rows

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

from ledger import merkle
from ledger.errors import (
    ArchiveConflictError,
    ArchiveInvalidError,
    ArchiveSignatureError,
    InvalidInputError,
    LedgerError,
    UnknownKeyError,
)
from ledger.merkle.subtrees import GrowingPart
from ledger.verification.entry_check import ENTRY_COLUMNS, EntryChecker
from ledger.verification.verdict import Break, Findings
from pipeline.archive import parquet
from pipeline.archive.layout import FileName
from pipeline.archive.manifest import ArchivedFile
from pipeline.archive.parquet import ENTRY_FILE_SCHEMA, SNAPSHOT_FILE_SCHEMA, FileWriter, WrittenFile
from pipeline.archive.store import ArchiveStore
from pipeline.archiving.covered import Covered, Ground, UnjudgedBreak, worst
from pipeline.archiving.postgres import Ledger
from pipeline.arrow import lists_of

if TYPE_CHECKING:
    from pyspark import Accumulator
    from pyspark.sql import SparkSession

_PHYSICAL = ENTRY_COLUMNS.index("hlc_physical")


class FileTask(NamedTuple):
    """One file to be made; ``ground`` of a file of snapshots alone."""

    name: FileName
    ground: Ground | None = None


def found_in(error: LedgerError, seq: int) -> Break:
    """What is wrong with one tenant of the archive, from an error that says so; ``seq`` where the error names none."""
    if isinstance(error, UnknownKeyError):
        return UnjudgedBreak(seq, "archive-signature", str(error), None, None)
    at = error.seq if isinstance(error, ArchiveInvalidError) and error.seq else seq
    kind = "archive-signature" if isinstance(error, ArchiveSignatureError) else "archive"
    return Break(at, kind, str(error), None, None)


class FiledEntries(NamedTuple):
    """A file of entries that stands in the archive, and what its entries say of the chain."""

    file: ArchivedFile
    prev_chain_link: str | None
    from_chain_link: str
    to_chain_link: str
    first_hlc: str
    last_hlc: str
    first_physical_ms: int
    highest_physical_ms: int
    subtrees: list[bytes]
    """Roots of the perfect subtrees of the tenant's tree that the entries fall into, from left to right."""


class FiledSnapshots(NamedTuple):
    """A file of snapshots that stands in the archive, and what the entries under them come to."""

    file: ArchivedFile
    node_id: str
    to_chain_link: str
    tree_root: str


Outcome = FiledEntries | FiledSnapshots | Break
FileAll = Callable[[Sequence[FileTask]], Sequence[Outcome]]
"""Makes files, in any order, and gives what came of each."""


def file_entries(ledger: Ledger, store: ArchiveStore, name: FileName) -> FiledEntries | Break:
    """Put the entries of ``name`` into the archive; what is wrong with them, if anything is.

    Raises:
        ArchiveConflictError: something else stands there.
        ArchiveUnavailableError, DatabaseUnavailableError: one of the two does not answer.
    """
    tenant_id, from_seq, to_seq, _ = name
    before = ledger.entry_before(tenant_id, from_seq)
    findings = Findings()
    checker = EntryChecker(
        tenant_id,
        findings,
        first_seq=from_seq,
        prev_link=before.chain_link,
        may_be_v1=before.link_version in (None, 1),
    )
    subtrees = GrowingPart(from_seq - 1)
    first: list[Any] = []
    last: list[Any] = []
    highest = 0
    with tempfile.TemporaryFile() as local, closing(FileWriter(local, ENTRY_FILE_SCHEMA)) as writer:
        # 1. Read, checked and written.
        for batch in ledger.entries(tenant_id, from_seq, to_seq):
            columns = lists_of(batch)
            runs = checker.check_columns(columns)
            if findings.first_break() is not None:
                continue
            subtrees.append([merkle.leaf_hash(link) for run in runs for link in run.links])
            highest = max(highest, max(columns[_PHYSICAL]))
            first = first or [column[0] for column in columns]
            last = [column[-1] for column in columns]
            writer.add(batch)
        # 2. Whether they hold.
        if checker.last_seq < to_seq:
            missing = f"entries from seq {checker.last_seq + 1} on are missing, and a snapshot covers them"
            findings.add("gap", checker.last_seq + 1, missing)
        found = findings.first_break()
        if found is not None:
            return found
        # 3. Under their name.
        file = _put(store, name, local, writer.finish(), ENTRY_FILE_SCHEMA)
    named_first, named_last = (dict(zip(ENTRY_COLUMNS, row, strict=True)) for row in (first, last))
    return FiledEntries(
        file=file,
        prev_chain_link=named_first["prev_chain_link"],
        from_chain_link=named_first["chain_link"],
        to_chain_link=named_last["chain_link"],
        first_hlc=named_first["t_hlc"],
        last_hlc=named_last["t_hlc"],
        first_physical_ms=named_first["hlc_physical"],
        highest_physical_ms=highest,
        subtrees=subtrees.roots(),
    )


def file_snapshots(ledger: Ledger, store: ArchiveStore, name: FileName, ground: Ground) -> FiledSnapshots | Break:
    """Put the snapshots of ``name`` into the archive, which cover its range without gap, are those of its entries, and
    were signed by keys that are held; raises as ``file_entries``."""
    findings = Findings()
    covered = Covered(ledger, name, ground, findings)
    with tempfile.TemporaryFile() as local, closing(FileWriter(local, SNAPSHOT_FILE_SCHEMA)) as writer:
        for batch in covered.batches():
            writer.add(batch)
        found = worst(findings)
        if found is not None:
            return found
        file = _put(store, name, local, writer.finish(), SNAPSHOT_FILE_SCHEMA)
    claim = None if covered.last is None else covered.last.claim
    assert claim is not None
    return FiledSnapshots(file, claim.node_id, claim.to_chain_link, covered.frontier.root().hex())


def _put(store: ArchiveStore, name: FileName, local: Any, written: WrittenFile, schema: pa.Schema) -> ArchivedFile:
    file = ArchivedFile(name.path(), *written)
    if store.create(file.name, local):
        return file
    digest, size = store.digest(file.name)
    if digest == written.sha256:
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
    """Whether the file that stands in the archive has the rows of ``local``."""
    try:
        with parquet.opened(store, standing, schema) as there:
            both = zip_longest(parquet.batches(there, standing), parquet.batches(parquet.parsed(local), standing))
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
