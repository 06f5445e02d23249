"""SQL of the archive: what of a ledger in PostgreSQL is chained and signed, and its rows, over ADBC.

Rows up to the end of the last snapshot never change, so tasks need no common snapshot of the database: one that does
change is found by its links. What must agree with one another is read in one transaction, ``Ledger.at_one_time``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

import adbc_driver_postgresql.dbapi as dbapi
import pyarrow as pa
from adbc_driver_postgresql import StatementOptions

from ledger.entry_check import ENTRY_COLUMNS
from ledger.errors import DatabaseUnavailableError
from ledger.names import is_readable_tenant
from ledger.snapshot_check import SNAPSHOT_COLUMNS
from pipeline.archive.layout import FILE_STORED_BYTES, GROUP_ROWS
from pipeline.archiving.plan import Stretch
from signing.keys import PublicKey

BATCH_BYTES_HINT: Final = 4 << 20
"""A batch is closed by the row that takes it to so many bytes."""
STRETCH_ROWS: Final = 256
assert GROUP_ROWS % STRETCH_ROWS == 0

_ENTRIES: Final = ", ".join(f"{name}::text" if name in ("payload", "origin") else name for name in ENTRY_COLUMNS)
_SNAPSHOTS: Final = ", ".join(f"{name}::text" if name == "dsse_envelope" else name for name in SNAPSHOT_COLUMNS)
_STORED_BYTES: Final = "pg_column_size(payload)::bigint + coalesce(pg_column_size(origin), 0)"


class Signed(NamedTuple):
    """How far a tenant's chain is signed, and its newest checkpoint, None before the first."""

    tenant_id: str
    signed_seq: int
    checkpoint: str | None


class LastRow(NamedTuple):
    """The entry before a range: its link and link version; None at the start of a chain."""

    chain_link: str | None
    link_version: int | None


class Ledger:
    """One connection to a ledger. Belongs to one thread at a time."""

    def __init__(self, connection: dbapi.Connection) -> None:
        self._connection = connection

    @classmethod
    @contextmanager
    def connected(cls, dsn: str) -> Iterator[Ledger]:
        """A connection that only reads, closed at the end.

        Raises:
            DatabaseUnavailableError: PostgreSQL cannot be reached, or does not do what it is asked.
        """
        try:
            with dbapi.connect(dsn, autocommit=True) as connection:
                ledger = cls(connection)
                ledger._run("SET default_transaction_read_only = on")
                yield ledger
        except dbapi.Error as error:
            raise DatabaseUnavailableError(f"PostgreSQL: {str(error).partition(chr(10))[0]}") from error

    @contextmanager
    def at_one_time(self) -> Iterator[None]:
        """Everything read meanwhile is of one state of the database."""
        self._run("BEGIN ISOLATION LEVEL REPEATABLE READ, READ ONLY")
        try:
            yield
        finally:
            self._run("ROLLBACK")

    # --- the ledger as a whole ------------------------------------------------------------------------

    def log_origin(self) -> str:
        """What the origins of its logs begin with."""
        return str(self._rows("SELECT log_origin FROM scheduler.ledger_identity")[0][0])

    def published_keys(self) -> list[PublicKey]:
        """Every key that signed for this ledger and is not revoked, by its own word."""
        rows = self._rows("SELECT public_key_pem FROM scheduler.signing_keys WHERE revoked_from_hlc IS NULL")
        return [PublicKey.of(row[0]) for row in rows]

    def signed(self, tenants: Collection[str] | None = None) -> list[Signed]:
        """Every tenant that has a snapshot, by name, or those of these that do."""
        rows = self._rows(
            """
            SELECT s.tenant_id, s.signed_seq, m.checkpoint
              FROM (SELECT tenant_id, max(to_seq) AS signed_seq FROM scheduler.batch_snapshot GROUP BY tenant_id) s
              LEFT JOIN scheduler.merkle_head m USING (tenant_id)
             ORDER BY s.tenant_id
            """
        )
        found = [Signed(*row) for row in rows if is_readable_tenant(row[0])]
        return found if tenants is None else [each for each in found if each.tenant_id in tenants]

    # --- one tenant -----------------------------------------------------------------------------------

    def checkpoint(self, tenant_id: str) -> str | None:
        """The newest signed note of the tenant's log."""
        rows = self._rows("SELECT checkpoint FROM scheduler.merkle_head WHERE tenant_id = $1", tenant_id)
        return rows[0][0] if rows else None

    def tiles(self, tenant_id: str, coordinates: Sequence[tuple[int, int]]) -> dict[tuple[int, int], bytes]:
        """Hashes of the stored tiles at (level, index)."""
        found = {}
        for level, index in coordinates:
            rows = self._rows(
                "SELECT hashes FROM scheduler.merkle_tile WHERE tenant_id = $1 AND level = $2 AND tile_index = $3",
                tenant_id,
                level,
                index,
            )
            if rows:
                found[level, index] = rows[0][0]
        return found

    def snapshot_end(self, tenant_id: str, from_seq: int, to_seq: int) -> int | None:
        """Where the last snapshot ends that ends in the range; None when none does."""
        query = "SELECT max(to_seq) FROM scheduler.batch_snapshot WHERE tenant_id = $1 AND to_seq BETWEEN $2 AND $3"
        end: int | None = self._rows(query, tenant_id, from_seq, to_seq)[0][0]
        return end

    def next_snapshot_end(self, tenant_id: str, seq: int) -> int | None:
        """Where the first snapshot ends that ends at ``seq`` or behind it."""
        query = "SELECT min(to_seq) FROM scheduler.batch_snapshot WHERE tenant_id = $1 AND to_seq >= $2"
        end: int | None = self._rows(query, tenant_id, seq)[0][0]
        return end

    def entry_before(self, tenant_id: str, seq: int) -> LastRow:
        """The entry right before ``seq``."""
        query = "SELECT chain_link, link_version FROM scheduler.scheduler_log WHERE tenant_id = $1 AND seq = $2"
        rows = self._rows(query, tenant_id, seq - 1)
        return LastRow(*rows[0]) if rows else LastRow(None, None)

    def first_at_or_after(self, tenant_id: str, from_seq: int, to_seq: int, physical_ms: int) -> tuple[int, int] | None:
        """Seq and hlc_physical of the first entry of the range whose hlc_physical is at least so much."""
        query = (
            "SELECT seq, hlc_physical FROM scheduler.scheduler_log"
            " WHERE tenant_id = $1 AND seq BETWEEN $2 AND $3 AND hlc_physical >= $4 ORDER BY seq LIMIT 1"
        )
        rows = self._rows(query, tenant_id, from_seq, to_seq, physical_ms)
        return (rows[0][0], rows[0][1]) if rows else None

    def stretches(self, tenant_id: str, from_seq: int, to_seq: int) -> Iterator[Stretch]:
        """The entries of the range by ``STRETCH_ROWS``, or one by one where those are too long for one file."""
        query = f"""
            SELECT min(seq), max(seq), sum({_STORED_BYTES})::bigint, max(hlc_physical)
              FROM scheduler.scheduler_log WHERE tenant_id = $1 AND seq BETWEEN $2 AND $3
             GROUP BY (seq - 1) / {STRETCH_ROWS} ORDER BY 1
        """  # noqa: S608 (constants of this module)
        for row in self._rows(query, tenant_id, from_seq, to_seq):
            stretch = Stretch(*row)
            if stretch.stored_bytes <= FILE_STORED_BYTES:
                yield stretch
            else:
                yield from self._one_by_one(tenant_id, stretch)

    def _one_by_one(self, tenant_id: str, stretch: Stretch) -> list[Stretch]:
        query = (
            f"SELECT seq, seq, {_STORED_BYTES}, hlc_physical FROM scheduler.scheduler_log"  # noqa: S608 (constants)
            " WHERE tenant_id = $1 AND seq BETWEEN $2 AND $3 ORDER BY seq"
        )
        return [Stretch(*row) for row in self._rows(query, tenant_id, stretch.from_seq, stretch.to_seq)]

    # --- rows -----------------------------------------------------------------------------------------

    def entries(self, tenant_id: str, from_seq: int, to_seq: int) -> Iterator[pa.RecordBatch]:
        """Batches of ``ENTRY_COLUMNS`` by seq."""
        return self._batches(_ENTRIES, "scheduler_log", "seq", "seq", tenant_id, from_seq, to_seq)

    def snapshots(self, tenant_id: str, from_seq: int, to_seq: int) -> Iterator[pa.RecordBatch]:
        """Batches of ``SNAPSHOT_COLUMNS`` by ``from_seq``, of snapshots that end in the range."""
        return self._batches(_SNAPSHOTS, "batch_snapshot", "to_seq", "from_seq", tenant_id, from_seq, to_seq)

    # --- statements -----------------------------------------------------------------------------------

    def _run(self, statement: str) -> None:
        with self._connection.cursor() as cursor:
            cursor.execute(statement)

    def _rows(self, query: str, *values: object) -> list[tuple[Any, ...]]:
        with self._connection.cursor() as cursor:
            cursor.execute(query, values or None)
            return list(cursor.fetchall())

    def _batches(
        self, columns: str, table: str, bounded: str, order: str, tenant_id: str, from_seq: int, to_seq: int
    ) -> Iterator[pa.RecordBatch]:
        # With parameters ADBC does not COPY, and gives all rows in one batch. What tenants are called needs no quoting.
        assert is_readable_tenant(tenant_id)
        query = (
            f"SELECT {columns} FROM scheduler.{table} WHERE tenant_id = '{tenant_id}'"  # noqa: S608 (see above)
            f" AND {bounded} BETWEEN {from_seq:d} AND {to_seq:d} ORDER BY {order}"
        )
        options = {StatementOptions.BATCH_SIZE_HINT_BYTES.value: str(BATCH_BYTES_HINT)}
        with self._connection.cursor(adbc_stmt_kwargs=options) as cursor:
            cursor.execute(query)
            for batch in cursor.fetch_record_batch():
                if batch.num_rows:
                    yield batch
