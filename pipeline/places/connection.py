"""One connection to PostgreSQL over ADBC: rows as Arrow batches, faults of the database as errors of ours."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, cast

import adbc_driver_manager
import adbc_driver_postgresql
import pyarrow as pa
from adbc_driver_manager import AdbcConnection, AdbcDatabase
from adbc_driver_postgresql import StatementOptions

from ledger.errors import ConfigurationError, DatabaseUnavailableError, LedgerError
from pipeline.arrow import Row, rows_of
from pipeline.places import statements
from pipeline.places.dsn import Dsn
from pipeline.places.protocol import BATCH_BYTES_HINT, BATCH_ROWS_MAX

if TYPE_CHECKING:
    from adbc_driver_manager import dbapi

_SNAPSHOT_GONE: Final = ("42704", "22023")
_NOT_ALLOWED: Final = ("28", "42501", "3D", "3F", "42P01", "0LP01")
"""SQLSTATEs, or classes of them, of what the operator must put right."""
_REFUSED_LOGIN: Final = re.compile(r"authentication failed|does not exist|no pg_hba|invalid|permission denied")
_DATABASE_ERROR: Final = (adbc_driver_manager.Error, OSError)


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

    def rows(self, query: str) -> list[Row]:
        """All rows of what is known to be short."""
        return [row for batch in self.batches(query) for row in rows_of(batch)]

    def row(self, query: str) -> Row:
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
            yield from _sliced(self._streamed(cursor, query))

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


def _sliced(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The same rows in batches that are not empty and of bounded length."""
    for batch in batches:
        for at in range(0, batch.num_rows, BATCH_ROWS_MAX):
            yield batch.slice(at, BATCH_ROWS_MAX)


@contextmanager
def connected(dsn: Dsn) -> Iterator[Connection]:
    """A connection that is closed at the end, its session not prepared yet.

    Raises:
        DatabaseUnavailableError: PostgreSQL does not answer.
        ConfigurationError: it refuses the login.
    """
    # Imported here: it loads pandas, which takes as long as all else that a task imports.
    from adbc_driver_manager import dbapi

    try:
        raw = dbapi.Connection(cast(AdbcDatabase, _StaysOpen()), AdbcConnection(_database(dsn.url)), autocommit=True)
    except _DATABASE_ERROR as error:
        raise _told(error, dsn) from None
    try:
        yield Connection(dsn, raw)
    finally:
        with suppress(*_DATABASE_ERROR):
            raw.close()


@lru_cache(maxsize=2)
def _database(url: str) -> AdbcDatabase:
    """What connections to ``url`` share: the types that PostgreSQL has, for which the driver connects once and has
    50 ms to do, a hundred times what a connection takes. It holds no connection."""
    database: AdbcDatabase = adbc_driver_postgresql.connect(url)
    return database


class _StaysOpen:
    """Given to a connection in place of its database, which others will use when it is closed."""

    def close(self) -> None:
        """Leave it."""


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
