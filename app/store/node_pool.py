"""The pool of a node: a connection that is about to be free is waited for before another is opened.

A connection costs PostgreSQL a process, some 3 ms, and as much again for each table that it then learns of anew; most
statements are over sooner. So at a start, where a dozen tasks ask at once, they take turns on few connections. The
first is the one that the node was started with: it knows the tables already.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final

import asyncpg
from asyncpg.pool import PoolConnectionProxy

from app.store.node_connection import AT_A_NODE, NodeConnection
from app.store.sessions import connect

if TYPE_CHECKING:
    Pool = asyncpg.Pool[asyncpg.Record]
else:
    Pool = asyncpg.Pool

WAIT_S: Final = 0.02
"""How long a connection that is in use is waited for."""
OPENING_WAIT_S: Final = 0.25
"""The same while another is being opened: one is, at a time, as long as that goes well."""


class NodePool(Pool):
    """A pool that begins with the connection ``first``, which it then owns. Belongs to one event loop."""

    def __init__(self, url: str, *, connections_max: int, command_timeout_s: float, first: NodeConnection) -> None:
        super().__init__(
            url,
            connection_class=NodeConnection,
            record_class=asyncpg.Record,
            min_size=1,
            max_size=connections_max,
            max_queries=50_000,
            max_inactive_connection_lifetime=300.0,
            connect=self._open,  # type: ignore[arg-type]
            setup=None,
            init=None,
            reset=None,
            loop=None,
            command_timeout=command_timeout_s,
        )
        self._first: NodeConnection | None = first
        self._is_opening = False
        self._changed = asyncio.Event()
        """Set, and replaced, whenever a connection may have become free."""

    async def _open(
        self, url: str, *, command_timeout: float, **_of_the_pool: Any
    ) -> asyncpg.Connection[asyncpg.Record]:
        first, self._first = self._first, None
        if first is not None and not first.is_closed():
            first.limit_statements_to(command_timeout)
            return first
        return await connect(url, AT_A_NODE, command_timeout_s=command_timeout)

    async def _acquire(self, timeout: float | None) -> PoolConnectionProxy[asyncpg.Record]:  # noqa: ASYNC109 (asyncpg's own)
        await self._wait_for_one()
        if self.get_idle_size() or self._is_full():
            return await super()._acquire(timeout)  # type: ignore[misc,no-any-return]
        self._is_opening = True
        try:
            return await super()._acquire(timeout)  # type: ignore[misc,no-any-return]
        finally:
            self._is_opening = False
            self._tell()

    async def _wait_for_one(self) -> None:
        """Until one is free, or the wait for it was long enough."""
        began_s = asyncio.get_running_loop().time()
        while not self.get_idle_size() and not self._is_full() and (self._is_opening or self.get_size()):
            wait_s = OPENING_WAIT_S if self._is_opening else WAIT_S
            try:
                async with asyncio.timeout_at(began_s + wait_s):
                    await self._changed.wait()
            except TimeoutError:
                return

    def _is_full(self) -> bool:
        return self.get_size() == self.get_max_size()

    def _tell(self) -> None:
        """Have those that wait look again."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def release(
        self,
        connection: PoolConnectionProxy[asyncpg.Record],
        *,
        timeout: float | None = None,  # noqa: ASYNC109 (asyncpg's own)
    ) -> None:
        """As asyncpg's, but that a session which is spent is not lent again."""
        lent: NodeConnection | None = connection._con  # type: ignore[attr-defined]
        if lent is not None and lent.is_spent:
            lent.terminate()
        try:
            await super().release(connection, timeout=timeout)
        finally:
            self._tell()
