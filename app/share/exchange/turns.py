"""One node of a ledger imports from a peer at a time: a lock in PostgreSQL for each peer.

``Turns`` holds all locks on one connection of the node, because a round mostly waits for the peer. A lock ends with its
session. So if a lock may be left over, because the node stops or a statement fails, the connection is closed. The other
turns of this node then lose their locks too, and another node may import from the same peer at the same time; imports
of the same entries add nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import asyncpg
from asyncpg.pool import PoolConnectionProxy

from app.store import exchange


class Turns:
    """The turns of one node. Belongs to one event loop."""

    def __init__(self, pool: asyncpg.Pool[asyncpg.Record]) -> None:
        self._pool = pool
        self._statement = asyncio.Lock()
        self._connection: PoolConnectionProxy[asyncpg.Record] | None = None
        self._held = 0
        """Turns that are taken or being requested."""

    @asynccontextmanager
    async def turn(self, peer: str) -> AsyncIterator[bool]:
        """Whether this node alone of its ledger asks ``peer``, until the context is left.

        Raises:
            DATABASE_FAULTS: PostgreSQL cannot be reached.
        """
        self._held += 1
        try:
            async with self._session() as connection:
                is_ours = await exchange.take_turn(connection, peer)
            try:
                yield is_ours
            except asyncio.CancelledError:
                self._close()
                raise
            finally:
                if is_ours and self._connection is connection:
                    async with self._session():
                        await exchange.end_turn(connection, peer)
        finally:
            self._held -= 1
            if not self._held and self._connection is not None:
                connection, self._connection = self._connection, None
                await self._pool.release(connection)

    @asynccontextmanager
    async def _session(self) -> AsyncIterator[PoolConnectionProxy[asyncpg.Record]]:
        """The connection, for one statement."""
        async with self._statement:
            if self._connection is None:
                self._connection = await self._pool.acquire()
            try:
                yield self._connection
            except BaseException:
                self._close()
                raise

    def _close(self) -> None:
        """End the session, and with it its locks."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.terminate()
