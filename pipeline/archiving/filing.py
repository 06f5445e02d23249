"""Reads the ledger and writes the archive's files: rows are read, checked, written to a local file and uploaded.

One task writes each file of entries (``file_on`` Spark), in bounded memory. In order::

    1. rows are read in batches, checked as one range of the chain, and written
    2. an invalid row ends the task: nothing is put into the archive, and the break is the outcome
    3. the file is put under its name; where the name is taken, the file there must have the same rows
    4. it is read back: a file counts once its digest is that of the rows that were written

Claims of a file about the rest of the chain are checked by the fold of all ranges
(``ledger.verification.range_fold``). So the same algorithm checks a range before archiving and verifies it later.

Step 3 accepts an existing file with equal rows: its bytes may differ if the Parquet writer was upgraded after the run
that was killed.

Rows up to the end of the last snapshot never change, so tasks need no common database snapshot: links reveal a
changed row. Values that must be consistent are read in one transaction, ``Ledger.at_one_time``. Statements contain
values as literals, as in ``pipeline.places.statements``.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from ledger.errors import (
    ArchiveConflictError,
    ArchiveInvalidError,
    ArchiveSignatureError,
    BrokenRangeError,
    ConfigurationError,
    InvalidInputError,
    LedgerError,
    UnknownKeyError,
)
from ledger.hlc import Hlc
from ledger.names import is_readable_tenant
from ledger.verification.entry_check import ENTRY_COLUMNS
from ledger.verification.range_check import RangeChecker, RangeSummary, RangeTask
from ledger.verification.snapshot_check import SNAPSHOT_COLUMNS
from ledger.verification.verdict import Break, Findings
from objects.locked import ObjectLock
from objects.store import ArchiveStore
from pipeline.archive import FILE_STORED_BYTES, GROUP_ROWS, RANGE_SNAPSHOTS, ArchivedFile, FileName, lost, parquet
from pipeline.archive.parquet import ENTRY_FILE_SCHEMA, SNAPSHOT_FILE_SCHEMA, UNSIGNED_FILE_SCHEMA, FileWriter
from pipeline.arrow import ArrowEntries, rows_of
from pipeline.places import statements
from pipeline.places.postgres import Dsn, OpenPostgres, PostgresPlace, connected, state_of
from pipeline.places.protocol import Piece, Place
from pipeline.places.statements import HEADS, LOG, SNAPSHOTS, TREES, literal, select_list, tenants_in, wanted
from signing.keys import PublicKey

if TYPE_CHECKING:
    from pyspark import Accumulator
    from pyspark.sql import SparkSession


class UnjudgedBreak(Break):
    """The only fault is that no held key signed it."""


def broken_at(seq: int, kind: str, detail: str) -> BrokenRangeError:
    """The error for a break at ``seq``."""
    return BrokenRangeError(Break(seq, kind, detail))


class FileTask(NamedTuple):
    """One file of entries to be made."""

    name: FileName
    first_seq: int
    """Of the range that the file is a part of."""
    dsn: Dsn
    """The ledger."""
    url: str
    """The archive."""
    lock: ObjectLock | None


def found_in(error: LedgerError, seq: int) -> Break:
    """The break of one tenant of the archive, from an error; at ``seq`` if the error names no seq."""
    if isinstance(error, UnknownKeyError):
        return UnjudgedBreak(seq, "archive-signature", str(error), None, None)
    kind = "archive-signature" if isinstance(error, ArchiveSignatureError) else "archive"
    return Break(
        error.seq if isinstance(error, ArchiveInvalidError) and error.seq else seq, kind, str(error), None, None
    )


class FiledEntries(NamedTuple):
    """Result of filing entries: the file, None if they are invalid, and their summary of the chain."""

    file: ArchivedFile | None
    summary: RangeSummary
    first: dict[str, Any]
    """The first entry, by ``ENTRY_COLUMNS``."""
    highest_physical_ms: int
    footer: pq.FileMetaData | None
    """Of the file that was written; None if none was, or another with these rows was there before."""


Outcome = FiledEntries | Break
FileAll = Callable[[Sequence[FileTask]], Sequence[Outcome]]
"""Writes files, in any order, and returns the outcome of each."""


def file_entries(ledger: Ledger, store: ArchiveStore, task: FileTask) -> FiledEntries:
    """Put the entries of a file into the archive, if they are valid.

    Raises:
        ArchiveConflictError: a different file exists under the name.
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
    highest, file, footer = 0, None, None
    with tempfile.TemporaryFile() as local, closing(FileWriter(local, ENTRY_FILE_SCHEMA)) as writer:
        for batch in ledger.entries(tenant_id, from_seq, to_seq):
            if checker.check_packed(ArrowEntries(batch)) is None:
                checker.check([*rows_of(batch)])
            if findings.first_break() is None:
                first = first or batch.slice(0, 1).to_pylist()[0]
                highest = max(highest, pc.max(batch.column("hlc_physical")).as_py())
                writer.add(batch)
        if first and findings.first_break() is None:
            written = writer.finish(task.name.path())
            file = _put(store, written, local, ENTRY_FILE_SCHEMA)
            footer = writer.footer if file == written else None
    return FiledEntries(file, checker.finish(), first, highest, footer)


def file_snapshots(store: ArchiveStore, name: FileName, batches: Sequence[pa.RecordBatch]) -> ArchivedFile:
    """Put snapshots, which were compared with their entries, into the archive; raises as ``file_entries``.

    Raises:
        InvalidInputError: a column holds a forbidden value.
    """
    is_any_unsigned = any(batch.column("dsse_envelope").null_count for batch in batches)
    schema = UNSIGNED_FILE_SCHEMA if is_any_unsigned else SNAPSHOT_FILE_SCHEMA
    with tempfile.TemporaryFile() as local, closing(FileWriter(local, schema)) as writer:
        for batch in batches:
            writer.add(batch)
        return _put(store, writer.finish(name.path()), local, SNAPSHOT_FILE_SCHEMA)


def _put(store: ArchiveStore, file: ArchivedFile, local: Any, schema: pa.Schema) -> ArchivedFile:
    is_new = store.create(file.name, local)
    try:
        digest, size = store.digest(file.name)
    except ArchiveInvalidError as error:
        raise lost(store, file.name) from error
    if digest == file.sha256:
        return file
    if is_new:
        raise lost(store, file.name)
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


def file_on(spark: SparkSession, rows: Accumulator[int]) -> FileAll:
    """Writes each file in its own task; ``rows`` counts the entries of finished tasks.

    Spark retries a failed task, which may find its file already in the archive.
    """

    def work(tasks: Iterable[FileTask]) -> Iterator[Outcome]:
        for task in tasks:
            with Ledger.connected(task.dsn.url) as ledger:
                for outcome in file_each([task], ledger, ArchiveStore(task.url, task.lock)):
                    if isinstance(outcome, FiledEntries):
                        rows.add(outcome.summary.rows)
                    yield outcome

    def file_all(tasks: Sequence[FileTask]) -> Sequence[Outcome]:
        return spark.sparkContext.parallelize(tasks, len(tasks)).mapPartitions(work).collect()

    return file_all


def file_each(tasks: Iterable[FileTask], ledger: Ledger, store: ArchiveStore) -> Iterator[Outcome]:
    """Write these files. An error of one tenant, in the archive too, is an outcome and stops no other tenant.

    Raises:
        ArchiveUnavailableError, DatabaseUnavailableError: one of the two does not answer.
    """
    for task in tasks:
        try:
            yield file_entries(ledger, store, task)
        except (ArchiveConflictError, ArchiveInvalidError, InvalidInputError) as error:
            yield found_in(error, task.name.from_seq)


# --- the ledger -----------------------------------------------------------------------------------


STRETCH_ROWS: Final = 256
assert GROUP_ROWS % STRETCH_ROWS == 0


class SignedEnd(NamedTuple):
    """How far a tenant's chain is signed, and its newest checkpoint, None before the first."""

    tenant_id: str
    signed_seq: int
    last_seq: int
    """Of the last entry, 0 when there is none."""
    has_tree: bool
    checkpoint: str | None


class Stretch(NamedTuple):
    """Entries ``from_seq..to_seq``, the stored size of their payloads, and their highest hlc_physical."""

    from_seq: int
    to_seq: int
    stored_bytes: int
    highest_physical_ms: int


class Ledger(OpenPostgres):
    """One connection to a ledger. Belongs to one thread at a time. Its methods raise as ``connected`` does."""

    @classmethod
    @contextmanager
    def connected(cls, dsn: str) -> Iterator[Ledger]:
        """A read-only connection, closed at the end.

        Raises:
            DatabaseUnavailableError: PostgreSQL does not answer.
            ConfigurationError: ``dsn`` names no database, the login is refused, or the ledger's tables are missing
                or altered.
        """
        place = Dsn.parse(dsn)
        with connected(place) as connection:
            connection.run(statements.PREPARE_SESSION)
            connection.run("SET default_transaction_read_only = on")
            state = state_of(connection, place, None)
            for (table, column), kind in state.altered:
                raise ConfigurationError(
                    f"the ledger in {place} cannot be archived: column {column} of {table} was made type {kind}; what "
                    "that did to its rows is said by tally pipeline verify"
                )
            yield cls(connection, state)

    @classmethod
    def of(cls, place: Place) -> AbstractContextManager[Ledger]:
        """As ``connected``, for the place of a database."""
        return cls.connected(cast(PostgresPlace, place).dsn.url)

    @contextmanager
    def at_one_time(self) -> Iterator[None]:
        """All reads within the context see one state of the database."""
        self.connection.run(statements.BEGIN)
        try:
            yield
        finally:
            self.connection.run("ROLLBACK")

    # --- the ledger as a whole ------------------------------------------------------------------------

    def log_origin(self, tenant_id: str | None = None) -> str:
        """The common prefix of the origins of its logs.

        Raises:
            ConfigurationError: the database does not have it.
        """
        if (origin := super().log_origin(tenant_id)) is None:
            raise ConfigurationError("the database names no log in scheduler.ledger_identity, so it is no whole ledger")
        return origin

    def published_keys(self) -> list[PublicKey]:
        """Every key that the ledger itself lists as a signer, for its validity period; rows without a key are left
        out."""
        keys = []
        query = "SELECT public_key_pem, not_before, not_after, revoked_from_hlc FROM scheduler.signing_keys"
        for pem, begin, end, revoked in self.connection.rows(query):
            with suppress(InvalidInputError):
                until = None if revoked is None else Hlc.parse(str(revoked))
                keys.append(PublicKey.of(str(pem), not_before=begin, not_after=end, revoked_from_hlc=until))
        return keys

    def signed(self, tenants: Collection[str] | None = None) -> list[SignedEnd]:
        """Every tenant with a signed snapshot, by name; with ``tenants`` only those of them."""
        among = f"({tenants_in(SNAPSHOTS)}) AS wanted" if tenants is None else wanted(tenants)
        rows = self.connection.rows(f"""
            SELECT wanted.tenant_id, s.signed_seq,
                   coalesce((SELECT max(seq) FROM {LOG} l WHERE l.tenant_id = wanted.tenant_id), 0) AS last_seq,
                   m.tenant_id IS NOT NULL AS has_tree, m.checkpoint
              FROM {among}
             CROSS JOIN LATERAL
                   (SELECT max(to_seq) AS signed_seq FROM {SNAPSHOTS}
                     WHERE tenant_id = wanted.tenant_id AND dsse_envelope IS NOT NULL) AS s
              LEFT JOIN {TREES} m ON m.tenant_id = wanted.tenant_id
             WHERE s.signed_seq IS NOT NULL
             ORDER BY wanted.tenant_id COLLATE "C"
        """)
        return [SignedEnd(*row) for row in rows if is_readable_tenant(row[0])]

    def unarchived_s(self, archived: Mapping[str, int]) -> dict[str, float]:
        """For each of these tenants with a signed entry after the given seq, how many seconds ago the first was
        signed, by the clock of the database."""
        if not archived:
            return {}
        ends = ", ".join(f"({literal(tenant_id)}, {seq:d}::bigint)" for tenant_id, seq in archived.items())
        rows = self.connection.rows(f"""
            SELECT ends.tenant_id, extract(epoch FROM clock_timestamp() - s.created_at)::float8
              FROM (VALUES {ends}) AS ends (tenant_id, seq)
             CROSS JOIN LATERAL
                   (SELECT created_at FROM {SNAPSHOTS} WHERE tenant_id = ends.tenant_id AND from_seq > ends.seq
                       AND dsse_envelope IS NOT NULL ORDER BY from_seq LIMIT 1) AS s
        """)
        return {tenant_id: max(0.0, seconds) for tenant_id, seconds in rows}

    def unsigned(self) -> dict[str, int]:
        """The last seq of every tenant that has entries and no signed snapshot."""
        rows = self.connection.rows(f"""
            SELECT h.tenant_id, h.head_seq FROM {HEADS} h
             WHERE h.head_seq > 0 AND NOT EXISTS
                   (SELECT FROM {SNAPSHOTS} s WHERE s.tenant_id = h.tenant_id AND s.dsse_envelope IS NOT NULL)
             ORDER BY h.tenant_id COLLATE "C"
        """)
        return {tenant_id: last_seq for tenant_id, last_seq in rows if is_readable_tenant(tenant_id)}

    # --- one tenant -----------------------------------------------------------------------------------

    def tile(self, tenant_id: str, level: int, index: int) -> bytes:
        """The hashes of a stored tile; empty if it is missing."""
        piece = Piece(tenant_id, 1, 1, 1, False, self.state)
        return self.reader(piece).tiles(level, index, index).get(index, b"")

    def cosignatures_between(self, tenant_id: str, least: int, most: int) -> list[tuple[str, str]]:
        """Verifier key and note of the newest cosignature of each witness on a checkpoint of so many entries."""
        query = statements.cosignatures_between(tenant_id, least, most)
        return [(key, note) for key, note in self.connection.rows(query)]

    def range_end(self, tenant_id: str, from_seq: int, to_seq: int) -> int | None:
        """The end of a range that should end near ``to_seq``: the end of the last of the first ``RANGE_SNAPSHOTS``
        signed snapshots that end in it; if none does, the end of the first after it. None if there is none."""

        def end(which: str, condition: str) -> str:
            return f"""
                (SELECT {which}(to_seq)
                   FROM (SELECT to_seq FROM {SNAPSHOTS} WHERE tenant_id = {literal(tenant_id)}
                            AND dsse_envelope IS NOT NULL AND {condition}
                          ORDER BY from_seq LIMIT {RANGE_SNAPSHOTS}) AS first)
            """

        within, after = f"to_seq BETWEEN {from_seq:d} AND {to_seq:d}", f"to_seq >= {from_seq:d}"
        ((seq,),) = self.connection.rows(f"SELECT coalesce({end('max', within)}, {end('min', after)})")
        return cast(int | None, seq)

    def intervals(self, tenant_id: str, from_seq: int, to_seq: int) -> tuple[tuple[int, int], ...]:
        """Bounds of the snapshots with entries in the range."""
        return tuple(
            self.connection.rows(
                f"SELECT from_seq, to_seq FROM {SNAPSHOTS} WHERE tenant_id = {literal(tenant_id)}"
                f" AND from_seq <= {to_seq:d} AND to_seq >= {from_seq:d} ORDER BY from_seq"
            )
        )

    def entry_before(self, tenant_id: str, seq: int) -> tuple[str | None, int | None]:
        """Link and link version of the entry right before ``seq``; None at the start of a chain. Where that entry has
        left the database, its link is what the entry after it names, and its version is None."""
        queries = (
            f"SELECT chain_link, link_version::bigint FROM {_entries(tenant_id, seq - 1, seq - 1)}",
            f"SELECT prev_chain_link, NULL::bigint FROM {_entries(tenant_id, seq, seq)}",
        )
        return next(((link, version) for each in queries for link, version in self.connection.rows(each)), (None, None))

    def first_at_or_after(self, tenant_id: str, from_seq: int, to_seq: int, physical_ms: int) -> tuple[int, int]:
        """Seq and hlc_physical of the first entry of the range whose hlc_physical reaches the given one."""
        ((seq, physical),) = self.connection.rows(
            f"SELECT seq, hlc_physical FROM {_entries(tenant_id, from_seq, to_seq)} AND hlc_physical >= {physical_ms:d}"
            " ORDER BY seq LIMIT 1"
        )
        return seq, physical

    def stretches(self, tenant_id: str, from_seq: int, to_seq: int) -> Iterator[Stretch]:
        """The entries of the range by ``STRETCH_ROWS``, or one by one if those are too long for one file.

        If constraints were removed and a column is NULL throughout a stretch, its aggregate is NULL.
        """
        for stretch in self._stretches(tenant_id, from_seq, to_seq, STRETCH_ROWS):
            if stretch.stored_bytes is None or stretch.stored_bytes <= FILE_STORED_BYTES:
                yield stretch
            else:
                yield from self._stretches(tenant_id, stretch.from_seq, stretch.to_seq, 1)

    # --- rows -----------------------------------------------------------------------------------------

    def entries(self, tenant_id: str, from_seq: int, to_seq: int) -> Iterator[pa.RecordBatch]:
        """Batches of ``ENTRY_COLUMNS`` by seq. A seq that repeats is a break, whichever of its rows comes first."""
        return self.connection.batches(
            f"SELECT {select_list({}, LOG, ENTRY_COLUMNS)} FROM {_entries(tenant_id, from_seq, to_seq)}"
            f" ORDER BY {LOG}.seq"
        )

    def snapshots(self, tenant_id: str, from_seq: int, to_seq: int) -> Iterator[pa.RecordBatch]:
        """Batches of ``SNAPSHOT_COLUMNS`` by ``from_seq``, of snapshots that end in the range."""
        return self.connection.batches(
            f"SELECT {select_list({}, SNAPSHOTS, SNAPSHOT_COLUMNS)} FROM {SNAPSHOTS} s"
            f" WHERE s.tenant_id = {literal(tenant_id)} AND s.to_seq BETWEEN {from_seq:d} AND {to_seq:d}"
            " ORDER BY s.from_seq"
        )

    def _stretches(self, tenant_id: str, from_seq: int, to_seq: int, rows: int) -> Iterator[Stretch]:
        query = (
            "SELECT min(seq), max(seq),"
            " sum(pg_column_size(payload)::bigint + coalesce(pg_column_size(origin), 0))::bigint, max(hlc_physical)"
            f" FROM {_entries(tenant_id, from_seq, to_seq)} GROUP BY (seq - 1) / {rows:d} ORDER BY 1"
        )
        return (Stretch(*row) for row in self.connection.rows(query))


def _entries(tenant_id: str, from_seq: int, to_seq: int) -> str:
    return f"{LOG} WHERE tenant_id = {literal(tenant_id)} AND seq BETWEEN {from_seq:d} AND {to_seq:d}"
