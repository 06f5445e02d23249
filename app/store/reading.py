"""A connection for reading, bounded in time, with the faults of the database told in one error.

What PostgreSQL refuses to all, it tells: a table that is not there, a right that was taken away, a transaction that may
only read. What it says of a value names the value, which may be anybody's, and is the program's fault or that of a row.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import TypeAlias

import asyncpg
import structlog

from app.runtime.postgres import DATABASE_FAULTS, is_of_a_value, text_of
from app.store import Connection
from ledger.errors import DatabaseUnavailableError

Pool: TypeAlias = "asyncpg.Pool[asyncpg.Record]"

READ_TIMEOUT_S = 10.0
"""Longest that one read may take, the wait for a connection included."""
RELEASE_TIMEOUT_S = 0.5
"""How long a connection may take to be fit for the next read before it is dropped."""

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
"""What a statement raises when the fault is not its own."""
_LOCKED = "another session keeps locked what is needed (see pg_locks)"

log = structlog.get_logger()


@asynccontextmanager
async def reading(
    pool: Pool, *, timeout_s: float | None = READ_TIMEOUT_S, snapshot: bool = False
) -> AsyncIterator[Connection]:
    """Lend a connection for reads; with ``snapshot`` all statements see the same state of the database.

    Raises:
        DatabaseUnavailableError: Postgres cannot be reached, did not answer within ``timeout_s`` seconds, or refuses.
        asyncpg.DataError: it refuses a value.
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


@asynccontextmanager
async def _borrowed(pool: Pool) -> AsyncIterator[Connection]:
    """A connection of ``pool``; whatever keeps Postgres from giving one makes it unavailable."""
    try:
        connection = await pool.acquire()
    except asyncpg.PostgresError as error:
        raise _unavailable(error) from error
    try:
        yield connection
    finally:
        # One that fails here is dropped by the pool; what was read is good all the same.
        with suppress(*_LOST):
            await pool.release(connection, timeout=RELEASE_TIMEOUT_S)


def _unavailable(error: BaseException) -> DatabaseUnavailableError:
    said = f"the database does not answer ({type(error).__name__})"
    if isinstance(error, asyncpg.LockNotAvailableError):
        said = _LOCKED
    elif isinstance(error, TimeoutError):
        said = f"{said}, or {_LOCKED}"
    return DatabaseUnavailableError(f"{said}; try again later")
