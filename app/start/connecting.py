"""The connection of a start: Postgres is waited for, its schema is looked at, and what fails refuses the start."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import asyncpg

from app.store.faults import DATABASE_FAULTS
from app.store.node_connection import NodeConnection
from app.store.schema import check_schema
from ledger.errors import StartRefusedError

CONNECT_WAIT_S = 30.0
"""How long a start waits for Postgres to answer."""
CONNECT_PAUSE_S = 0.5
_WENT_AWAY = (
    asyncpg.PostgresError,
    asyncpg.InterfaceError,
    asyncpg.InternalClientError,
    ConnectionError,
    TimeoutError,
)
"""What a database that answered and then failed looks like, and the files of a node do not."""


@contextlib.asynccontextmanager
async def connected_for_now(database_url: str) -> AsyncIterator[asyncpg.Connection[asyncpg.Record]]:
    """A connection to a database that has the schema this version knows, with all that guards it.

    Raises:
        StartRefusedError: there is none, or it fails before it is left.
    """
    async with connected_to_keep(database_url) as connection:
        yield connection
        with contextlib.suppress(*DATABASE_FAULTS):
            await connection.close(timeout=5)


@contextlib.asynccontextmanager
async def connected_to_keep(database_url: str) -> AsyncIterator[asyncpg.Connection[asyncpg.Record]]:
    """As ``connected_for_now``, but open afterwards, unless something fails."""
    connection = await _connect(database_url)
    try:
        await check_schema(connection)
        yield connection
    except _WENT_AWAY as error:
        connection.terminate()
        raise went_away(error) from error
    except BaseException:
        connection.terminate()
        raise


async def _connect(url: str) -> asyncpg.Connection[asyncpg.Record]:
    """A connection, trying for ``CONNECT_WAIT_S`` while Postgres does not answer.

    Raises:
        StartRefusedError: it still does not, or it refuses this user or database.
    """
    loop = asyncio.get_running_loop()
    deadline_s = loop.time() + CONNECT_WAIT_S
    while True:
        try:
            return await asyncpg.connect(url, timeout=5, connection_class=NodeConnection)
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
