"""Connections for reads, bounded in time; faults of the database become one error.

The error reports what PostgreSQL refuses to every caller: a missing table, a revoked right, a read-only transaction. An
error about a value is raised unchanged: it names the value, which may be private, and means a bug or a damaged row.

*Rows.* The fields of a named tuple name the columns that a statement selects. Tables may have been edited by hand, so a
reader that shows rows checks that they are whole. PostgreSQL has years from 4713 BC to 294276, Python from 1 to 9999:
an edited time must not fail the read of other columns.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeAlias, TypeVar, cast

import asyncpg
import orjson

from app.runtime.logs import log
from app.runtime.postgres import DATABASE_FAULTS, is_of_a_value, text_of
from app.store import Connection
from ledger.errors import ChainDamagedError, DatabaseUnavailableError
from ledger.verification.entry_check import ENTRY_COLUMNS

Pool: TypeAlias = "asyncpg.Pool[asyncpg.Record]"
Given = ParamSpec("Given")
Value = TypeVar("Value")

READ_TIMEOUT_S = 10.0
"""Longest that one read may take, the wait for a connection included."""
RELEASE_TIMEOUT_S = 0.5
"""Longest that a connection may take to be ready for the next read before it is dropped."""

_LOST = (
    asyncpg.PostgresConnectionError,
    asyncpg.OperatorInterventionError,
    asyncpg.InsufficientResourcesError,
    asyncpg.TransactionRollbackError,
    asyncpg.LockNotAvailableError,
    asyncpg.InterfaceError,
    asyncpg.InternalClientError,
    OSError,
    TimeoutError,
)
"""Errors that are not the fault of the statement."""
_LOCKED = "another session keeps locked what is needed (see pg_locks)"


@asynccontextmanager
async def reading(
    pool: Pool, *, timeout_s: float | None = READ_TIMEOUT_S, snapshot: bool = False
) -> AsyncIterator[Connection]:
    """Lend a connection for reads; with ``snapshot`` all statements see the same state of the database.

    Raises:
        DatabaseUnavailableError: Postgres cannot be reached, did not answer within ``timeout_s`` seconds, or refuses.
        asyncpg.DataError: Postgres rejects a value.
    """
    try:
        async with asyncio.timeout(timeout_s), _borrowed(pool) as connection:
            if snapshot:
                async with connection.transaction(isolation="repeatable_read", readonly=True):
                    yield connection
            else:
                yield connection
    except _LOST as error:
        raise _unavailable(error) from error
    except DATABASE_FAULTS as error:
        if is_of_a_value(error):
            raise
        log.error("database_refuses", error=text_of(error))
        raise DatabaseUnavailableError(f"the database refuses: {error.args[0]}; its operator must mend that") from error


async def run_in(
    lent: AbstractAsyncContextManager[Connection],
    work: Callable[Concatenate[Connection, Given], Awaitable[Value]],
    *given: Given.args,
    **named: Given.kwargs,
) -> Value:
    """The result of ``work`` on a connection that is lent for it: by ``reading``, or as the pool lends it."""
    async with lent as connection:
        return await work(connection, *given, **named)


@asynccontextmanager
async def _borrowed(pool: Pool) -> AsyncIterator[Connection]:
    """A connection of ``pool``; any failure to get one means that Postgres is unavailable."""
    try:
        connection = await pool.acquire()
    except asyncpg.PostgresError as error:
        raise _unavailable(error) from error
    try:
        yield connection
    finally:
        # The pool drops a connection that fails here; the rows that were read are valid.
        with suppress(*_LOST):
            await pool.release(connection, timeout=RELEASE_TIMEOUT_S)


def _unavailable(error: BaseException) -> DatabaseUnavailableError:
    said = f"the database does not answer ({type(error).__name__})"
    if isinstance(error, asyncpg.LockNotAvailableError):
        said = _LOCKED
    elif isinstance(error, TimeoutError):
        said = f"{said}, or {_LOCKED}"
    return DatabaseUnavailableError(f"{said}; try again later")


ENTRIES = f"SELECT {', '.join(ENTRY_COLUMNS)} FROM scheduler.scheduler_log"
"""SQL that selects entries for verification."""

Row = TypeVar("Row", bound=NamedTuple)

_FIRST, _LAST = "timestamptz '0001-01-02 00:00:00Z'", "timestamptz '9999-12-30 00:00:00Z'"


def columns(row: type[NamedTuple], times: Collection[str] = ()) -> str:
    """SQL that selects the fields of ``row``; ``times`` go through ``told``."""
    return ", ".join(told(name) if name in times else name for name in row._fields)


def clamped_columns(row: type[NamedTuple], times: Collection[str]) -> str:
    """As ``columns``, but a time outside Python's range becomes the first or last in it: for rows whose times are
    proved by signatures, which then fail."""
    return ", ".join(clamped(name) if name in times else name for name in row._fields)


def clamped(column: str) -> str:
    """SQL of ``column``, which is not NULL, under its own name, limited to Python's range of times."""
    return f"greatest(least({column}, {_LAST}), {_FIRST}) AS {column.rpartition('.')[2]}"


def like(patterns: Sequence[str]) -> list[str]:
    """Patterns of tenants, which may end in ``*``, as LIKE patterns."""
    escaped = (pattern.replace("\\", r"\\").replace("_", r"\_").replace("%", r"\%") for pattern in patterns)
    return [f"{pattern[:-1]}%" if pattern.endswith("*") else pattern for pattern in escaped]


def told(column: str) -> str:
    """SQL of ``column``, under its own name; NULL if the time is outside Python's range."""
    return f"{tellable(column)} AS {column.rpartition('.')[2]}"


def tellable(column: str) -> str:
    """SQL of the time in ``column``; NULL if it is outside Python's range."""
    return f"CASE WHEN {column} BETWEEN {_FIRST} AND {_LAST} THEN {column} END"


async def fetch_as(connection: Connection, row: type[Row], query: str, *arguments: object) -> list[Row]:
    """The rows of ``query``, which selects the fields of ``row`` in their order."""
    return [row._make(found) for found in await connection.fetch(query, *arguments)]


async def fetch_one_as(connection: Connection, row: type[Row], query: str, *arguments: object) -> Row | None:
    """As ``fetch_as``, the first row; None when there is none."""
    found = await connection.fetchrow(query, *arguments)
    return None if found is None else row._make(found)


async def fetch_column(connection: Connection, query: str, *arguments: object) -> list[Any]:
    """The first column of ``query``."""
    return [found[0] for found in await connection.fetch(query, *arguments)]


async def fetch_dict(connection: Connection, query: str, *arguments: object) -> dict[Any, Any]:
    """The second column of ``query`` by its first."""
    return dict(map(tuple, await connection.fetch(query, *arguments)))


async def fetch_value(connection: Connection, _kind: type[Value], query: str, *arguments: object) -> Value | None:
    """The value of ``query``, which selects one column; None without a row."""
    return cast("Value | None", await connection.fetchval(query, *arguments))


async def fetch_tuples(connection: Connection, query: str, *arguments: object) -> list[tuple[Any, ...]]:
    """The rows of ``query`` as they are."""
    return [tuple(found) for found in await connection.fetch(query, *arguments)]


def turned(rows: Sequence[Sequence[object]], width: int) -> list[list[object]]:
    """The columns of ``rows``, each of ``width`` values, for ``unnest``; ``width`` empty columns without rows."""
    return [list(column) for column in zip(*rows, strict=True)] or [[] for _ in range(width)]


def json_in(text: str | None) -> Any:
    """The value of ``text``, a column of type json; None if it was edited to something that Python cannot parse."""
    try:
        return orjson.loads(text or "null")
    except orjson.JSONDecodeError:
        return None


def whole(tenant_id: str, row: Row, nullable: Collection[str] = ()) -> Row:
    """``row``, if no column but the ``nullable`` ones is NULL.

    Raises:
        ChainDamagedError: names the column, and the seq if the row has one.
    """
    for name, value in row._asdict().items():
        if value is None and name not in nullable:
            where = f" of seq {seq}" if (seq := getattr(row, "seq", None)) is not None else ""
            raise ChainDamagedError(tenant_id, f"column {name}{where} is NULL, or no value it may have")
    return row


PAGE_BYTES_MAX = 4 << 20
"""A page ends after the row that brings its JSON to this many bytes."""
PAYLOAD_BYTES = "coalesce(octet_length(payload::text), 0) AS bytes"


def page_of(listed: str, order: str, limit: str, bytes_max: int = PAGE_BYTES_MAX) -> str:
    """The relation of the rows of ``listed``, a query with ``bytes`` and at most ``limit`` + 1 rows, that one page has.

    ``number`` counts its rows in ``order``; ``found`` is how many ``listed`` has.
    """
    return f"""(
SELECT *
  FROM (SELECT listed.*, row_number() OVER ordered AS number, count(*) OVER () AS found,
               sum(bytes) OVER ordered - bytes AS bytes_before
          FROM ({listed}) AS listed
        WINDOW ordered AS (ORDER BY {order})) AS numbered
 WHERE number <= {limit} AND bytes_before < {bytes_max})"""


async def fetch_page(
    connection: Connection,
    row: type[Row],
    query: str,
    tenant_id: str,
    *arguments: object,
    nullable: Collection[str] = (),
) -> tuple[list[Row], bool]:
    """The rows of ``query``, which selects the fields of ``row`` and ``found``, and whether more follow.

    Raises:
        ChainDamagedError: a column is NULL that is not ``nullable``.
    """
    rows = await connection.fetch(query, tenant_id, *arguments)
    page = [whole(tenant_id, row._make(tuple(each)[:-1]), nullable) for each in rows]
    return page, bool(rows) and rows[-1]["found"] > len(rows)
