"""The connection of a start: the node waits for Postgres and checks its schema; a failure refuses the start."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Final

import asyncpg

from app.runtime.postgres import DATABASE_FAULTS
from app.store.schema import check_schema
from app.store.sessions import AT_A_NODE, STATEMENT_TIMEOUT_S, NodeConnection, check_sessions_are_kept, connect
from ledger.errors import StartRefusedError

CONNECT_WAIT_S = 30.0
"""How long a start waits for Postgres to answer."""
CONNECT_PAUSE_S = 0.5
LOCK_TIMEOUT_S = 10.0
"""How long a start or a restore waits for a lock of another session: nodes and imports hold locks for a fraction of
it."""
_WENT_AWAY = (
    asyncpg.PostgresError,
    asyncpg.InterfaceError,
    asyncpg.InternalClientError,
    ConnectionError,
    TimeoutError,
)
"""Errors of a database that answered and then failed; the files of a node never raise them."""

_PASSING = (
    asyncpg.PostgresConnectionError,
    asyncpg.OperatorInterventionError,
    asyncpg.InsufficientResourcesError,
    asyncpg.TransactionRollbackError,
)
"""Errors of PostgreSQL that may have passed by the next start."""
_REMEDIES: Final = {
    asyncpg.ReadOnlySQLTransactionError: (
        "let database_url lead to the primary; if it does, reset default_transaction_read_only of this login and "
        "database (ALTER ROLE or ALTER DATABASE ... RESET, or postgresql.conf), then start again"
    ),
    asyncpg.InsufficientPrivilegeError: (
        "make the login a member of tallystick_service, and grant that role again what migrations/sql grants it, then "
        "start again"
    ),
}


@contextlib.asynccontextmanager
async def connected_for_now(database_url: str) -> AsyncIterator[NodeConnection]:
    """As ``connected_to_keep``, but closed afterwards, and no statement takes longer than ``STATEMENT_TIMEOUT_S``."""
    async with connected_to_keep(database_url) as connection:
        connection.limit_statements_to(STATEMENT_TIMEOUT_S)
        yield connection
    with contextlib.suppress(*DATABASE_FAULTS):
        await connection.close(timeout=5)


@contextlib.asynccontextmanager
async def connected_to_keep(database_url: str) -> AsyncIterator[NodeConnection]:
    """A connection to a database that has the schema of this version, with all its guards. No statement waits longer
    than ``LOCK_TIMEOUT_S`` for a lock. The connection stays open afterwards, within ``AT_A_NODE``, unless something
    failed.

    Raises:
        StartRefusedError: there is none, it fails before it is left, or another session keeps locked what it needs.
    """
    connection = await _connect(database_url)
    try:
        async with connection.waiting_for_locks(LOCK_TIMEOUT_S):
            await check_sessions_are_kept(connection, database_url)
            await check_schema(connection)
            yield connection
    except asyncpg.LockNotAvailableError as error:
        connection.terminate()
        where = f", {error.context}" if error.context else ""
        raise StartRefusedError(
            f"another session keeps locked what is needed here ({error}{where}). What waited for it stored nothing; "
            "end that session (see pg_locks and pg_stat_activity) or wait for it, and run this again"
        ) from error
    except _WENT_AWAY as error:
        connection.terminate()
        raise went_away(error) from error
    except BaseException:
        connection.terminate()
        raise


async def _connect(url: str) -> NodeConnection:
    """A connection, trying for ``CONNECT_WAIT_S`` while Postgres does not answer.

    Raises:
        StartRefusedError: it still does not, or it refuses this user or database.
    """
    loop = asyncio.get_running_loop()
    deadline_s = loop.time() + CONNECT_WAIT_S
    while True:
        try:
            return await connect(url, AT_A_NODE)
        except DATABASE_FAULTS as error:
            if isinstance(error, asyncpg.PostgresError) and not isinstance(error, _PASSING):
                raise StartRefusedError(f"Postgres refuses: {error}; check database_url") from error
            if loop.time() > deadline_s:
                raise _no_connection(error) from error
        await asyncio.sleep(CONNECT_PAUSE_S)


def _no_connection(error: Exception) -> StartRefusedError:
    """The refusal when no session opened within the wait of a start."""
    if isinstance(error, asyncpg.TargetServerAttributeNotMatched):
        return StartRefusedError(
            f"no host of database_url was what its target_session_attrs asks for in {CONNECT_WAIT_S:g} s ({error}): "
            "during a switchover wait until one host is the primary, otherwise promote one or check database_url; then "
            "start again"
        )
    if isinstance(error, asyncpg.PostgresError):
        return StartRefusedError(f"Postgres, or a pooler before it, refuses: {error}; mend that, or check database_url")
    return StartRefusedError(
        f"Postgres does not answer ({type(error).__name__}: {error}); start it or check database_url"
    )


def went_away(error: Exception) -> StartRefusedError:
    """The refusal when Postgres answered and then failed."""
    fault = [error, *_said_of(error)][-1]
    return StartRefusedError(
        f"Postgres failed during the start ({type(fault).__name__}: {fault}); nothing is lost: {remedy(error)}"
    )


def remedy(error: BaseException) -> str:
    """What to do about a fault of the database, or about its cause: "start again" if it may pass."""
    said = _said_of(error)
    is_lasting = bool(said) and not isinstance(said[0], _PASSING)
    known = (do for kind, do in _REMEDIES.items() if any(isinstance(fault, kind) for fault in said))
    return next(known, "mend what it says, then start again" if is_lasting else "start again")


def _said_of(error: BaseException) -> list[asyncpg.PostgresError]:
    """The errors that PostgreSQL reported, latest first. The driver reports a connection that PostgreSQL ended by an
    error of its own."""
    faults: list[BaseException | None] = [error]
    while (fault := faults[-1]) is not None:
        faults.append(fault.__cause__ or fault.__context__)
    return [fault for fault in faults if isinstance(fault, asyncpg.PostgresError)]
