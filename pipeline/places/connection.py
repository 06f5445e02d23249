"""A database by its URL, whose password nothing shows, and one connection to it over ADBC: rows as Arrow batches,
faults of the database as errors of ours."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Final, cast
from urllib.parse import unquote

import adbc_driver_manager
import adbc_driver_postgresql
import pyarrow as pa
from adbc_driver_manager import AdbcConnection, AdbcDatabase
from adbc_driver_postgresql import StatementOptions

from ledger.errors import ConfigurationError, DatabaseUnavailableError, LedgerError
from ledger.secret_text import secret_text
from pipeline.arrow import Row, rows_of
from pipeline.places import statements
from pipeline.places.protocol import BATCH_BYTES_HINT, BATCH_ROWS_MAX

if TYPE_CHECKING:
    from adbc_driver_manager import dbapi


SCHEMES: Final = ("postgresql", "postgres")
_PASSWORD_OPTION: Final = re.compile(r"[?&](?:ssl)?password=([^&]+)")
_AS_URLS_SPELL: Final = re.compile(r"(?:[^%/?#@\[\]:]|%[0-9A-Fa-f]{2})*")
_QUOTED: Final = re.compile(r'"[^"]*"')


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
        text = secret_text(text, "the URL of the database")
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
            self.run(f"SET TRANSACTION SNAPSHOT {statements.literal(snapshot_id)}", imports=True)

    def rows(self, query: str) -> list[Row]:
        """All rows of what is known to be short."""
        return [row for batch in self.batches(query) for row in rows_of(batch)]

    def batches(self, query: str) -> Iterator[pa.RecordBatch]:
        """What ``query`` gives, streamed; batches are bounded and not empty."""
        options = {StatementOptions.BATCH_SIZE_HINT_BYTES.value: str(BATCH_BYTES_HINT)}
        with self._raw.cursor(adbc_stmt_kwargs=options) as cursor:
            for batch in self._streamed(cursor, query):
                for at in range(0, batch.num_rows, BATCH_ROWS_MAX):
                    yield batch.slice(at, BATCH_ROWS_MAX)

    def _streamed(self, cursor: dbapi.Cursor, query: str) -> Iterator[pa.RecordBatch]:
        try:
            cursor.execute(query)
            yield from cursor.fetch_record_batch()
        except _DATABASE_ERROR as error:
            raise _told(error, self._dsn) from None

    def run(self, statement: str, *, imports: bool = False) -> None:
        """Run what gives no rows; ``imports`` for what asks for a snapshot that may be gone."""
        with self._raw.cursor() as cursor:
            try:
                cursor.execute(statement)
            except _DATABASE_ERROR as error:
                raise _told(error, self._dsn, imports=imports) from None


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
