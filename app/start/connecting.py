"""The connection of a start: Postgres is waited for, its schema is looked at, and what fails refuses the start."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import asyncpg

from app.store.faults import DATABASE_FAULTS
from app.store.node_connection import CONNECT_TIMEOUT_S, NO_ROW_HIDDEN, STATEMENT_TIMEOUT_S, NodeConnection
from app.store.schema import check_schema
from ledger.errors import StartRefusedError

CONNECT_WAIT_S = 30.0
"""How long a start waits for Postgres to answer."""
CONNECT_PAUSE_S = 0.5
LOCK_TIMEOUT_S = 10.0
"""How long a start or a restore waits for what another session keeps locked: nodes and imports do that for a fraction
of it."""
_WENT_AWAY = (
    asyncpg.PostgresError,
    asyncpg.InterfaceError,
    asyncpg.InternalClientError,
    ConnectionError,
    TimeoutError,
)
"""What a database that answered and then failed looks like, and the files of a node do not."""


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
    """A connection to a database that has the schema this version knows, with all that guards it. No statement waits
    longer than ``LOCK_TIMEOUT_S`` for a lock. It is open afterwards, without that limit, unless something failed.

    Raises:
        StartRefusedError: there is none, it fails before it is left, or another session keeps locked what it needs.
    """
    connection = await _connect(database_url)
    try:
        async with connection.waiting_for_locks(LOCK_TIMEOUT_S):
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
            return await asyncpg.connect(
                url, timeout=CONNECT_TIMEOUT_S, connection_class=NodeConnection, server_settings=NO_ROW_HIDDEN
            )
        except (asyncpg.InvalidAuthorizationSpecificationError, asyncpg.InvalidCatalogNameError) as error:
            raise StartRefusedError(f"Postgres refuses: {error}; check database_url") from error
        except (OSError, asyncpg.PostgresError, TimeoutError) as error:
            if loop.time() > deadline_s:
                raise StartRefusedError(
                    f"Postgres does not answer ({type(error).__name__}: {error}); start it or check database_url"
                ) from error
        await asyncio.sleep(CONNECT_PAUSE_S)


def went_away(error: Exception) -> StartRefusedError:
    """The refusal when Postgres answered and then failed."""
    return StartRefusedError(
        f"Postgres failed during the start ({type(error).__name__}: {error}); nothing is lost, start again"
    )
