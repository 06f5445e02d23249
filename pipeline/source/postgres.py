"""A ledger in PostgreSQL, read over ADBC as Arrow batches, all of it in one exported snapshot.

The driver opens a REPEATABLE READ transaction, exports its snapshot and keeps it open; every task imports that
snapshot into a transaction of its own. So all pieces, and what the driver itself reads, show one state.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import unquote

import adbc_driver_manager
import pyarrow as pa
from adbc_driver_postgresql import StatementOptions, dbapi

from ledger.errors import ConfigurationError, DatabaseUnavailableError, LedgerError, TenantNotFoundError
from ledger.verification import ENTRY_COLUMNS, Head, StoredTree
from pipeline.arrow import rows_of
from pipeline.source import statements
from pipeline.source.pieces import (
    BATCH_BYTES_HINT,
    EVER,
    ROWS_A_PIECE,
    Facts,
    Piece,
    PieceReader,
    Session,
    Times,
    cut,
)
from pipeline.source.rows import sliced

SCHEMES: Final = ("postgresql", "postgres")
TIMED_ROWS_MAX: Final = 4 * ROWS_A_PIECE
"""Entries of a time range looked at to find the seqs it lies in; a longer one is read from all pieces."""
TENANTS_AT_ONCE: Final = 500
"""Tenants asked for in one statement."""

_SNAPSHOT_GONE: Final = ("42704", "22023")
_NOT_ALLOWED: Final = ("28", "42501", "3D", "3F", "42P01", "0LP01")
"""SQLSTATEs, or classes of them, of what the operator must put right."""
_REFUSED_LOGIN: Final = re.compile(r"authentication failed|does not exist|no pg_hba|invalid|permission denied")
_PASSWORD_OPTION: Final = re.compile(r"[?&](?:ssl)?password=([^&]+)")
_AS_URLS_SPELL: Final = re.compile(r"(?:[^%/?#@\[\]:]|%[0-9A-Fa-f]{2})*")
_QUOTED: Final = re.compile(r'"[^"]*"')
_DATABASE_ERROR: Final = (adbc_driver_manager.Error, OSError)


@dataclass(frozen=True, slots=True, repr=False)
class Dsn:
    """Where a database is; its password is in ``url`` alone, which nothing shows."""

    url: str

    @classmethod
    def parse(cls, text: str) -> Dsn:
        """The database that ``text`` names.

        Raises:
            ConfigurationError: it is no URL of PostgreSQL. What it says is not shown, for it may hold a password.
        """
        scheme, separator, _ = text.partition("://")
        if not separator or scheme not in SCHEMES:
            raise ConfigurationError("a database is named as postgresql://USER:PASSWORD@HOST/NAME")
        return cls(text)

    @property
    def shown(self) -> str:
        """The URL without password and without options."""
        scheme, _, rest = self.url.partition("://")
        login, _, place = self._parts(rest)
        user = login.partition(":")[0]
        return f"{scheme}://{f'{user}@' if user else ''}{place}"

    @staticmethod
    def _parts(rest: str) -> tuple[str, str, str]:
        """Login, ``@`` and the place of what stands behind ``://``; whatever is in front of the last ``@`` is login."""
        base, _, _ = rest.partition("?")
        login, at, place = (base if {"@", "/"} & set(base) else rest).rpartition("@")
        return login, at, place.partition("?")[0]

    def __repr__(self) -> str:
        return self.shown

    def hide(self, text: str) -> str:
        """``text`` of the driver in one line, without the URL and anything of the password, should it quote them.

        Where the password is not spelt as URLs spell it, libpq quotes pieces of it, so nothing that it quotes is told.
        """
        rest = self.url.partition("://")[2]
        password = self._parts(rest)[0].partition(":")[2]
        secrets = [self.url, *_PASSWORD_OPTION.findall(rest), password]
        for secret in (*secrets, *map(unquote, secrets)):
            text = text.replace(secret, "…") if secret else text
        if not _AS_URLS_SPELL.fullmatch(password):
            text = _QUOTED.sub('"…"', text)
        return " ".join(text.split())


@dataclass(frozen=True, slots=True)
class PostgresState:
    """One state of a database, as tasks see it: while the transaction that exported ``snapshot_id`` is open."""

    dsn: Dsn
    snapshot_id: str | None
    """None for the state of the moment: for rows that only ever get more."""
    altered: tuple[tuple[tuple[str, str], str], ...] = ()
    """What ``statements.Types`` says."""

    @contextmanager
    def session(self) -> Iterator[Session]:
        """A transaction in this state."""
        with connected(self.dsn) as connection:
            connection.begin(self.snapshot_id)
            yield PostgresSession(connection, dict(self.altered))


class PostgresSession:
    """Reads pieces through one connection."""

    def __init__(self, connection: Connection, types: statements.Types) -> None:
        self._connection, self._types = connection, types

    def reader(self, piece: Piece) -> PieceReader:
        """A reader of ``piece``."""
        return PostgresPieceReader(self._connection, self._types, piece)


class PostgresPieceReader:
    """Reads one piece; one thing at a time, so an iterator is to be finished before the next is begun."""

    def __init__(self, connection: Connection, types: statements.Types, piece: Piece) -> None:
        self._connection, self._types, self._piece = connection, types, piece

    def entries(self, columns: Sequence[str] = ENTRY_COLUMNS) -> Iterator[pa.RecordBatch]:
        """The piece's entries by seq."""
        return self._connection.batches(statements.entries(self._types, self._piece, columns))

    def snapshots(self) -> Iterator[pa.RecordBatch]:
        """The snapshots that touch it."""
        return self._connection.batches(statements.snapshots(self._types, self._piece))

    def tiles(self, level: int, first: int, last: int) -> Mapping[int, bytes]:
        """Stored tiles."""
        rows = self._connection.rows(statements.tiles(self._types, self._piece.tenant_id, level, first, last))
        return dict(rows)

    def jobs(self) -> Iterator[pa.RecordBatch]:
        """Stored jobs of the tenant."""
        return self._connection.batches(statements.jobs(self._types, self._piece.tenant_id))


@dataclass(frozen=True, slots=True)
class PostgresPlace:
    """A ledger in PostgreSQL."""

    dsn: Dsn

    def __str__(self) -> str:
        return self.dsn.shown

    @contextmanager
    def open(self) -> Iterator[OpenPostgres]:
        """Hold one state of the database, by a transaction that stays open.

        Raises:
            DatabaseUnavailableError: PostgreSQL does not answer.
            ConfigurationError: it refuses the login, or holds no ledger that this login may read.
        """
        with connected(self.dsn) as connection:
            connection.begin(None)
            snapshot_id = str(connection.value(statements.EXPORT_SNAPSHOT))
            yield OpenPostgres(connection, state_of(connection, self.dsn, snapshot_id))

    @contextmanager
    def join(self, snapshot_id: str | None) -> Iterator[OpenPostgres]:
        """In the state that somebody else holds, or with None in that of the moment, which no task will share.

        Raises:
            DatabaseUnavailableError: PostgreSQL does not answer, or that state is gone.
        """
        with connected(self.dsn) as connection:
            connection.begin(snapshot_id)
            yield OpenPostgres(connection, state_of(connection, self.dsn, snapshot_id))


class OpenPostgres:
    """A ledger in PostgreSQL, held in one state."""

    def __init__(self, connection: Connection, state: PostgresState) -> None:
        self._connection = connection
        self.state = state
        self._types = dict(state.altered)
        self._facts: dict[str, Facts] = {}

    @property
    def snapshot_id(self) -> str:
        """The id of the snapshot it shows."""
        assert self.state.snapshot_id is not None
        return self.state.snapshot_id

    def tenants(self) -> list[str]:
        """Every tenant that any table names."""
        return [row[0] for row in self._connection.rows(statements.TENANTS)]

    def pieces(
        self,
        tenants: Collection[str] | None = None,
        *,
        rows_a_piece: int = ROWS_A_PIECE,
        from_seq: int | None = None,
        to_seq: int | None = None,
        times: Times = EVER,
    ) -> list[Piece]:
        """The pieces of these tenants; borders are multiples of ``rows_a_piece``."""
        wanted = self.tenants() if tenants is None else self._existing(tenants)
        pieces: list[Piece] = []
        for at in range(0, len(wanted), TENANTS_AT_ONCE):
            some = wanted[at : at + TENANTS_AT_ONCE]
            occupied: dict[str, list[int]] = {tenant: [] for tenant in some}
            for tenant, seq in self._connection.rows(statements.occupied(some, rows_a_piece, from_seq, to_seq)):
                occupied[tenant].append(seq)
            self.read_facts(some)
            for tenant in some:
                whole = Piece(tenant, from_seq, to_seq, 0, True, self.state, times)
                pieces += self._cut(whole, occupied[tenant], rows_a_piece)
        return pieces

    def facts(self, tenant_id: str) -> Facts:
        """Head, last entry and stored tree."""
        self.read_facts([tenant_id])
        return self._facts[tenant_id]

    def log_origin(self) -> str | None:
        """The origin of this ledger's logs but for the tenant; None when it never said one."""
        rows = self._connection.rows(statements.LOG_ORIGIN)
        return rows[0][0] if rows else None

    def checkpoint(self, tenant_id: str) -> str | None:
        """The newest checkpoint that was signed for a tenant's log, as stored; None before the first."""
        rows = self._connection.rows(statements.checkpoint(tenant_id))
        return rows[0][0] if rows else None

    def read_facts(self, tenants: Collection[str]) -> None:
        """Have those of many tenants at hand at once."""
        unread = [tenant for tenant in tenants if tenant not in self._facts]
        for at in range(0, len(unread), TENANTS_AT_ONCE):
            some = unread[at : at + TENANTS_AT_ONCE]
            for tenant, *row in self._connection.rows(statements.facts(self._types, some)):
                self._facts[tenant] = _facts(tenant, row)

    def _existing(self, tenants: Collection[str]) -> list[str]:
        wanted = sorted(set(tenants))
        found = {row[0] for row in self._connection.rows(statements.tenants_among(wanted))} if wanted else set()
        for tenant in wanted:
            if tenant not in found:
                raise TenantNotFoundError(f"there is no tenant {tenant!r} in {self.state.dsn}")
        return wanted

    def _cut(self, whole: Piece, occupied: Sequence[int], rows_a_piece: int) -> list[Piece]:
        if not occupied:
            return [whole]
        last = self._facts[whole.tenant_id].last
        last_seq = last.seq if last is not None else occupied[-1]
        pieces = cut(whole, occupied, last_seq if whole.to_seq is None else min(whole.to_seq, last_seq), rows_a_piece)
        if whole.times == EVER:
            return pieces
        lowest, highest, count = self._connection.row(
            statements.seqs_in(whole.tenant_id, whole.times, TIMED_ROWS_MAX + 1)
        )
        if count > TIMED_ROWS_MAX:
            return pieces
        return [piece for piece in pieces if count and piece.bounds[0] <= highest and piece.bounds[1] >= lowest]


class Connection:
    """One connection over ADBC; every fault of the database is an error of ours in one line."""

    def __init__(self, dsn: Dsn, raw: dbapi.Connection) -> None:
        self._dsn, self._raw = dsn, raw

    def begin(self, snapshot_id: str | None) -> None:
        """Begin the transaction that all reads are in, in the state of ``snapshot_id`` or of now."""
        self.run(statements.PREPARE_SESSION)
        self.run(statements.BEGIN)
        if snapshot_id is not None:
            self.run(statements.import_snapshot(snapshot_id), imports=True)

    def rows(self, query: str) -> list[tuple[Any, ...]]:
        """All rows of what is known to be short."""
        return [row for batch in self.batches(query) for row in rows_of(batch)]

    def row(self, query: str) -> tuple[Any, ...]:
        """The one row there is."""
        (row,) = self.rows(query)
        return row

    def value(self, query: str) -> Any:
        """The one value there is."""
        (value,) = self.row(query)
        return value

    def batches(self, query: str) -> Iterator[pa.RecordBatch]:
        """What ``query`` gives, streamed; batches are bounded and not empty."""
        with self._cursor() as cursor:
            yield from sliced(self._streamed(cursor, query))

    def _streamed(self, cursor: dbapi.Cursor, query: str) -> Iterator[pa.RecordBatch]:
        try:
            cursor.execute(query)
            yield from cursor.fetch_record_batch()
        except _DATABASE_ERROR as error:
            raise _told(error, self._dsn) from None

    def run(self, statement: str, *, imports: bool = False) -> None:
        """Run what gives no rows; ``imports`` for what asks for a snapshot that may be gone."""
        with self._cursor() as cursor:
            try:
                cursor.execute(statement)
            except _DATABASE_ERROR as error:
                raise _told(error, self._dsn, imports=imports) from None

    @contextmanager
    def _cursor(self) -> Iterator[dbapi.Cursor]:
        options = {StatementOptions.BATCH_SIZE_HINT_BYTES.value: str(BATCH_BYTES_HINT)}
        with self._raw.cursor(adbc_stmt_kwargs=options) as cursor:
            yield cursor


@contextmanager
def connected(dsn: Dsn) -> Iterator[Connection]:
    """A connection that is closed at the end, its session not prepared yet.

    Raises:
        DatabaseUnavailableError: PostgreSQL does not answer.
        ConfigurationError: it refuses the login.
    """
    try:
        raw = dbapi.connect(dsn.url, autocommit=True)
    except _DATABASE_ERROR as error:
        raise _told(error, dsn) from None
    try:
        yield Connection(dsn, raw)
    finally:
        with suppress(*_DATABASE_ERROR):
            raw.close()


def _told(error: Exception, dsn: Dsn, *, imports: bool = False) -> LedgerError:
    """What is to be done about a fault of the database."""
    state, text = getattr(error, "sqlstate", None) or "", dsn.hide(str(error))
    if imports and state in _SNAPSHOT_GONE:
        return DatabaseUnavailableError(
            f"the snapshot of {dsn} that is read in is gone: PostgreSQL was restarted or failed over, the connection"
            " that held it has ended, or it was not read from for long; run the job or load the DataFrame again"
        )
    if state.startswith(_NOT_ALLOWED) or (not state and _REFUSED_LOGIN.search(text)):
        return ConfigurationError(
            f"the ledger in {dsn} cannot be read: {text}; name a database that `tally migrate` has made a ledger of,"
            " and a login that may SELECT from schema scheduler"
        )
    return DatabaseUnavailableError(f"the database {dsn} does not answer: {text}")


def state_of(connection: Connection, dsn: Dsn, snapshot_id: str | None) -> PostgresState:
    """What tasks need to know of the state that ``connection`` shows.

    Raises:
        ConfigurationError: tables are missing, or altered so that no row of them can be found.
    """
    found = {(table, column): kind for table, column, kind in connection.rows(statements.COLUMN_TYPES)}
    problem = statements.unreadable(found)
    if problem is not None:
        raise ConfigurationError(f"the ledger in {dsn} cannot be read: {problem}")
    return PostgresState(dsn, snapshot_id, tuple(statements.altered(found).items()))


def _facts(tenant_id: str, row: Sequence[Any]) -> Facts:
    has_head, head, has_last, last, has_tree, tree = row[0], row[1:4], row[4], row[5:8], row[8], row[9:11]
    return Facts(
        tenant_id,
        Head(*head) if has_head else None,
        Head(*last) if has_last else None,
        StoredTree(*tree) if has_tree else None,
    )
