"""Making one file of an archive: its rows are read, checked, written to a local file, and put under their name.

This is what a task does, alone and in bounded memory; nothing of Spark is in it. In order::

    1. rows are read in batches, checked against one another and against what stands before them, and written
    2. rows that do not hold end it: nothing is put into the archive, and what is wrong is the outcome
    3. the file is put under its name; where the name is taken, what stands there must have the same rows

Step 3 takes another file with the same rows for the one it would write: the writer of Parquet may have become another
one between a run that was killed and the one that carries on.
"""

from __future__ import annotations

import tempfile
from contextlib import closing
from itertools import zip_longest
from typing import Any, NamedTuple

import pyarrow as pa

from ledger import merkle
from ledger.entry_check import ENTRY_COLUMNS, EntryChecker
from ledger.errors import ArchiveConflictError, ArchiveInvalidError, InvalidInputError, SignatureError
from ledger.snapshot_check import SNAPSHOT_COLUMNS
from ledger.subtrees import GrowingPart
from ledger.verdict import Break, Findings
from pipeline.archive import parquet
from pipeline.archive.layout import FileName
from pipeline.archive.manifest import ArchivedFile
from pipeline.archive.parquet import ENTRY_FILE_SCHEMA, SNAPSHOT_FILE_SCHEMA, FileWriter, Written
from pipeline.archive.store import ArchiveStore
from pipeline.archiving.postgres import Ledger
from signing.snapshot import open_snapshot

_FROM_SEQ, _TO_SEQ, _ENVELOPE = (SNAPSHOT_COLUMNS.index(name) for name in ("from_seq", "to_seq", "dsse_envelope"))
_PHYSICAL = ENTRY_COLUMNS.index("hlc_physical")


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
    """A file of snapshots that stands in the archive, and what the last of them claims; its signature is not judged."""

    file: ArchivedFile
    node_id: str
    to_chain_link: str
    tree_root: str


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
            columns = [column.to_pylist() for column in batch.columns]
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


def file_snapshots(ledger: Ledger, store: ArchiveStore, name: FileName) -> FiledSnapshots | Break:
    """Put the snapshots of ``name`` into the archive, which cover its range without gap; raises as ``file_entries``."""
    expected_seq, envelope = name.from_seq, ""
    with tempfile.TemporaryFile() as local, closing(FileWriter(local, SNAPSHOT_FILE_SCHEMA)) as writer:
        for batch in ledger.snapshots(name.tenant_id, name.from_seq, name.to_seq):
            for row in zip(*(column.to_pylist() for column in batch.columns), strict=True):
                if row[_FROM_SEQ] != expected_seq:
                    detail = f"a snapshot begins at {row[_FROM_SEQ]} where one from {expected_seq} must follow"
                    return Break(expected_seq, "snapshot-chain", detail)
                expected_seq, envelope = row[_TO_SEQ] + 1, row[_ENVELOPE]
            writer.add(batch)
        if expected_seq != name.to_seq + 1:
            detail = f"the snapshots end at {expected_seq - 1} and not at {name.to_seq}"
            return Break(expected_seq, "snapshot-chain", detail)
        try:
            claim = open_snapshot(envelope, None).claim
        except SignatureError as error:
            detail = f"the snapshot that ends at {name.to_seq} is malformed: {error}"
            return Break(name.to_seq, "snapshot-signature", detail)
        file = _put(store, name, local, writer.finish(), SNAPSHOT_FILE_SCHEMA)
    return FiledSnapshots(file, claim.node_id, claim.to_chain_link, claim.tree_root)


def _put(store: ArchiveStore, name: FileName, local: Any, written: Written, schema: pa.Schema) -> ArchivedFile:
    file = ArchivedFile(name.path(), *written)
    if store.create(file.name, local):
        return file
    digest, size = store.digest(file.name)
    if digest == written.sha256:
        return file
    standing = file._replace(sha256=digest, bytes=size)
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
