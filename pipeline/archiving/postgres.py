"""What the archive asks a ledger in PostgreSQL: what of it is chained and signed, and its rows.

Rows up to the end of the last snapshot never change, so tasks need no common snapshot of the database: one that does
change is found by its links. What must agree with one another is read in one transaction, ``Ledger.at_one_time``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Final, NamedTuple

import pyarrow as pa

from ledger.errors import ConfigurationError, InvalidInputError
from ledger.hlc import Hlc
from ledger.names import is_readable_tenant
from ledger.verification.entry_check import ENTRY_COLUMNS
from pipeline.archive.layout import FILE_STORED_BYTES, GROUP_ROWS
from pipeline.archiving import statements
from pipeline.places import statements as reading
from pipeline.places.connection import Connection, connected
from pipeline.places.dsn import Dsn
from pipeline.places.postgres import PostgresPieceReader, PostgresState, state_of
from pipeline.places.protocol import Piece
from signing.keys import PublicKey

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


class LastRow(NamedTuple):
    """The entry before a range: its link and link version; None at the start of a chain."""

    chain_link: str | None
    link_version: int | None


class Stretch(NamedTuple):
    """Entries ``from_seq..to_seq``, what their payloads take in the database, and their highest hlc_physical."""

    from_seq: int
    to_seq: int
    stored_bytes: int
    highest_physical_ms: int


class Ledger:
    """One connection to a ledger. Belongs to one thread at a time. What its methods raise is as ``connected`` says."""

    def __init__(self, connection: Connection, state: PostgresState) -> None:
        self._connection, self._state = connection, state

    @classmethod
    @contextmanager
    def connected(cls, dsn: str) -> Iterator[Ledger]:
        """A connection that only reads, closed at the end.

        Raises:
            DatabaseUnavailableError: PostgreSQL does not answer.
            ConfigurationError: ``dsn`` names no database, it refuses the login, or it holds no ledger as it was made.
        """
        place = Dsn.parse(dsn)
        with connected(place) as connection:
            connection.run(reading.PREPARE_SESSION)
            connection.run(statements.READ_ONLY)
            state = state_of(connection, place, None)
            for (table, column), kind in state.altered:
                raise ConfigurationError(
                    f"the ledger in {place} cannot be archived: column {column} of {table} was made type {kind}; what "
                    "that did to its rows is said by tally pipeline verify"
                )
            yield cls(connection, state)

    @contextmanager
    def at_one_time(self) -> Iterator[None]:
        """Everything read meanwhile is of one state of the database."""
        self._connection.run(reading.BEGIN)
        try:
            yield
        finally:
            self._connection.run(statements.END)

    # --- the ledger as a whole ------------------------------------------------------------------------

    def log_origin(self) -> str:
        """What the origins of its logs begin with.

        Raises:
            ConfigurationError: the database does not say.
        """
        rows = self._connection.rows(reading.LOG_ORIGIN)
        if not rows:
            raise ConfigurationError("the database names no log in scheduler.ledger_identity, so it is no whole ledger")
        return str(rows[0][0])

    def published_keys(self) -> list[PublicKey]:
        """Every key that signed for this ledger, by its own word, while it held; rows without a key are left out."""
        keys = []
        for pem, begin, end, revoked in self._connection.rows(statements.PUBLISHED_KEYS):
            with suppress(InvalidInputError):
                until = None if revoked is None else Hlc.parse(str(revoked))
                keys.append(PublicKey.of(str(pem), not_before=begin, not_after=end, revoked_from_hlc=until))
        return keys

    def signed(self, tenants: Collection[str] | None = None) -> list[SignedEnd]:
        """Every tenant that has a snapshot, by name, or those of these that do."""
        rows = self._connection.rows(statements.signed(tenants))
        return [SignedEnd(*row) for row in rows if is_readable_tenant(row[0])]

    def unsigned(self) -> dict[str, int]:
        """The last seq of every tenant that has entries and no snapshot at all."""
        rows = self._connection.rows(statements.UNSIGNED)
        return {tenant_id: last_seq for tenant_id, last_seq in rows if is_readable_tenant(tenant_id)}

    # --- one tenant -----------------------------------------------------------------------------------

    def checkpoint(self, tenant_id: str) -> str | None:
        """The newest signed note of the tenant's log."""
        rows = self._connection.rows(reading.checkpoint(tenant_id))
        return rows[0][0] if rows else None

    def tile(self, tenant_id: str, level: int, index: int) -> bytes:
        """The hashes of a stored tile; none where it is not there."""
        return self._reader(tenant_id, 1, 1).tiles(level, index, index).get(index, b"")

    def snapshot_end(self, tenant_id: str, from_seq: int, to_seq: int) -> int | None:
        """Where the last snapshot ends that ends in the range; None when none does."""
        end: int | None = self._connection.value(statements.snapshot_end(tenant_id, from_seq, to_seq))
        return end

    def next_snapshot_end(self, tenant_id: str, seq: int) -> int | None:
        """Where the first snapshot ends that ends at ``seq`` or behind it."""
        end: int | None = self._connection.value(statements.next_snapshot_end(tenant_id, seq))
        return end

    def entry_before(self, tenant_id: str, seq: int) -> LastRow:
        """The entry right before ``seq``."""
        rows = self._connection.rows(statements.links(tenant_id, seq - 1))
        return LastRow(*rows[0]) if rows else LastRow(None, None)

    def first_at_or_after(self, tenant_id: str, from_seq: int, to_seq: int, physical_ms: int) -> tuple[int, int] | None:
        """Seq and hlc_physical of the first entry of the range whose hlc_physical is at least so much."""
        rows = self._connection.rows(statements.first_at_or_after(tenant_id, from_seq, to_seq, physical_ms))
        return (rows[0][0], rows[0][1]) if rows else None

    def stretches(self, tenant_id: str, from_seq: int, to_seq: int) -> Iterator[Stretch]:
        """The entries of the range by ``STRETCH_ROWS``, or one by one where those are too long for one file.

        Where guards are gone and a column is NULL in all of a stretch, so is what is said of it.
        """
        for row in self._connection.rows(statements.stretches(tenant_id, from_seq, to_seq, STRETCH_ROWS)):
            stretch = Stretch(*row)
            if row[2] is None or row[2] <= FILE_STORED_BYTES:
                yield stretch
            else:
                each = self._connection.rows(statements.one_by_one(tenant_id, stretch.from_seq, stretch.to_seq))
                yield from (Stretch(*row) for row in each)

    # --- rows -----------------------------------------------------------------------------------------

    def entries(
        self, tenant_id: str, from_seq: int, to_seq: int, columns: Sequence[str] = ENTRY_COLUMNS
    ) -> Iterator[pa.RecordBatch]:
        """Batches of these columns by seq."""
        return self._reader(tenant_id, from_seq, to_seq).entries(columns)

    def snapshots(self, tenant_id: str, from_seq: int, to_seq: int) -> Iterator[pa.RecordBatch]:
        """Batches of ``SNAPSHOT_COLUMNS`` by ``from_seq``, of snapshots that end in the range."""
        return self._connection.batches(statements.snapshots(tenant_id, from_seq, to_seq))

    def _reader(self, tenant_id: str, from_seq: int, to_seq: int) -> PostgresPieceReader:
        piece = Piece(tenant_id, from_seq, to_seq, to_seq - from_seq + 1, False, self._state)
        return PostgresPieceReader(self._connection, {}, piece)
