"""The rows of the next batch, stored while the batch before it is committed.

PostgreSQL would have nothing to do while one transaction ends and the next begins. So as soon as it has the rows of a
batch, those of the next, where they are linked already, go to it on a second connection, in a transaction of their own.
That has passed no fence and holds no lock of a head. It is committed only once the batch before is, past the fence, and
if the heads are those that the rows were linked onto; else it is rolled back, and the batch is chained as usual.

It must not keep others waiting who hold the locks that it needs, and may be about to store rows in the same places:
whatever it waits for, it waits ``AHEAD_LOCK_TIMEOUT_MS`` for, and then nothing of it is left.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence

import asyncpg
import structlog

from app.runtime.database_faults import DATABASE_FAULTS
from app.store import chaining, idempotency
from app.store.chaining import Step
from app.store.growth import head_of
from app.write.chain.linking_ahead import Ahead
from app.write.pending.backlog import Pending
from ledger.errors import ChainDamagedError

ENTRIES_MIN = 1000
"""Fewer are left to be stored with what comes meanwhile: a transaction costs as much as a hundred of them."""
PAUSE_S = 5.0
"""How long nothing is stored ahead after something was in vain: where another node writes to the same tenants, most of
it would be."""

log = structlog.get_logger()

Connect = Callable[[], Awaitable["asyncpg.Connection[asyncpg.Record]"]]


class Stored:
    """A batch whose rows are stored, in a transaction that is open."""

    def __init__(self, ahead: Ahead, connection: asyncpg.Connection[asyncpg.Record]) -> None:
        self._ahead = ahead
        self.connection = connection

    async def move(self, step: Step) -> bool:
        """Pass the fence and move the heads; False when another node was there, or the fence does not let through.

        Raises:
            DATABASE_FAULTS: PostgreSQL refuses, or is away.
        """
        linked, met = self._ahead.linked, self._ahead.met
        moves = [
            (tenant_id, head, head_of(linked.links[tenant_id]) if tenant_id in linked.links else head)
            for tenant_id, head in met.items()
        ]
        if not await chaining.advance_and_move(self.connection, step, moves):
            return False
        if linked.idempotency_rows:
            await idempotency.store_lines(self.connection, linked.idempotency_rows)
        return True

    async def commit(self) -> None:
        """Commit. When this raises, it may have been."""
        await chaining.commit(self.connection)

    async def end(self) -> None:
        """Leave nothing of it, unless it was committed."""
        try:
            await chaining.roll_back(self.connection)
        except DATABASE_FAULTS:
            self.connection.terminate()


class StoringAhead:
    """Stores one batch at a time, each to be taken or dropped before the next."""

    def __init__(self, connect: Connect) -> None:
        self._connect = connect
        self._connection: asyncpg.Connection[asyncpg.Record] | None = None
        self.ahead: Ahead | None = None
        """What is stored, or being stored."""
        self._task: asyncio.Task[Stored] | None = None
        self._paused_until_s = 0.0

    @property
    def may_start(self) -> bool:
        """Whether it is worth while now."""
        return time.monotonic() >= self._paused_until_s

    @property
    def batch(self) -> Sequence[Pending]:
        """Of what is stored."""
        return () if self.ahead is None else self.ahead.batch

    def start(self, ahead: Ahead) -> None:
        """Begin to store ``ahead``, to which nothing is linked any more."""
        assert self._task is None
        self.ahead = ahead
        self._task = asyncio.get_running_loop().create_task(self._store(ahead))

    async def take(self, instead: asyncpg.Connection[asyncpg.Record] | None) -> Stored | None:
        """What is stored, whose connection is the caller's from now on, and ``instead`` the one for the next; None when
        it could not be stored, and nothing is left of it."""
        task, self._task, self.ahead = self._task, None, None
        if task is None:
            return None
        try:
            stored = await task
        except (ChainDamagedError, *DATABASE_FAULTS) as error:
            # Whoever stores the batch as usual finds the same, and says so.
            log.debug("not_stored_ahead", error=str(error))
            self._pause()
            return None
        self._connection = instead
        return stored

    async def drop(self) -> None:
        """Leave nothing of what was stored."""
        if (stored := await self.take(None)) is not None:
            await self.end(stored)
            self._connection = stored.connection

    async def end(self, stored: Stored) -> None:
        """Leave nothing of what was taken, unless it was committed."""
        self._pause()
        await stored.end()

    def cancel(self) -> None:
        """Stop what is under way, and give up the connection."""
        if self._task is not None:
            self._task.cancel()
        self._task = self.ahead = None
        if self._connection is not None:
            self._connection.terminate()
            self._connection = None

    def _pause(self) -> None:
        self._paused_until_s = time.monotonic() + PAUSE_S

    async def _store(self, ahead: Ahead) -> Stored:
        if self._connection is None or self._connection.is_closed():
            self._connection = await self._connect()
        stored = Stored(ahead, self._connection)
        try:
            await chaining.begin_ahead(stored.connection)
            await chaining.copy_entries(stored.connection, ahead.linked.log_rows)
        except (ChainDamagedError, *DATABASE_FAULTS):
            await stored.end()
            raise
        return stored
