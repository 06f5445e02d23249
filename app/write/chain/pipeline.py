"""The next batch, linked and copied while PostgreSQL commits the batch before it.

Otherwise PostgreSQL would wait while the node links, and the node while PostgreSQL commits::

    connection 1    fence, heads, COMMIT of batch 1    COPY of batch 3
    connection 2    COPY of batch 2                    fence, heads, COMMIT of batch 2
    node            links batch 2                      publishes batch 1, links batch 3

The transaction of a copied batch has not passed the fence and holds no lock of a head. ``store.commit`` checks both
before it commits. If the batch before it becomes another, or a head moves, the connection is closed: nothing of the
copied rows is left, and the batch is chained as any other.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import NamedTuple

import asyncpg
from asyncpg.transaction import Transaction

from app.runtime.logs import log
from app.runtime.postgres import DATABASE_FAULTS
from app.store.chaining import ChainHead
from app.store.commit import copy_first
from app.write.pending.backlog import Pending
from app.write.pending.linking import LinkedBatch
from ledger.errors import ChainDamagedError

PAUSE_S = 5.0
"""How long no batch is pipelined after one was copied in vain: while another node writes to the same tenants, most
would be."""

Connect = Callable[[], Awaitable["asyncpg.Connection[asyncpg.Record]"]]


class NextBatch(NamedTuple):
    """A batch linked onto ``heads``, which the batch before it leaves."""

    batch: Sequence[Pending]
    heads: Mapping[str, ChainHead]
    linked: LinkedBatch


class CopiedBatch(NamedTuple):
    """The connection with the open transaction that holds the rows."""

    connection: asyncpg.Connection[asyncpg.Record]
    transaction: Transaction


class Pipeline:
    """Copies one batch at a time. Belongs to one event loop."""

    def __init__(self, connect: Connect) -> None:
        self._connect = connect
        self._connection: asyncpg.Connection[asyncpg.Record] | None = None
        self._next_batch: NextBatch | None = None
        self._copying: asyncio.Task[CopiedBatch] | None = None
        self._paused_until_s = 0.0

    @property
    def is_paused(self) -> bool:
        """Whether a batch was copied in vain a short time ago."""
        return time.monotonic() < self._paused_until_s

    @property
    def batch(self) -> Sequence[Pending]:
        """The batch that is copied, or being copied; empty if there is none."""
        return () if self._next_batch is None else self._next_batch.batch

    def start(self, batch: NextBatch) -> None:
        """Begin to copy the rows of ``batch``."""
        self._next_batch = batch
        self._copying = asyncio.get_running_loop().create_task(self._copy(batch.linked))
        self._copying.add_done_callback(lambda copying: copying.cancelled() or copying.exception())

    def linked(self, batch: Sequence[Pending], heads: Mapping[str, ChainHead]) -> LinkedBatch | None:
        """``batch`` linked onto ``heads``, if that is what is being copied; if not, the copied rows are dropped."""
        copied = self._next_batch
        if copied is not None and copied.heads == heads and copied.batch == batch:
            return copied.linked
        self.drop()
        return None

    async def take(self, instead: asyncpg.Connection[asyncpg.Record]) -> CopiedBatch | None:
        """The copied batch, whose connection is the caller's from now on, and ``instead`` the one for the next. None if
        its rows could not be copied: the caller copies them, and finds why."""
        assert self._copying is not None
        try:
            copied = await self._copying
        except (ChainDamagedError, *DATABASE_FAULTS) as error:
            log.debug("next_batch_not_copied", error=str(error))
            self.drop()
            return None
        self._connection, self._next_batch, self._copying = instead, None, None
        return copied

    def drop(self) -> None:
        """Leave nothing of the copied rows. The server rolls back once it finds the connection closed."""
        if self._next_batch is not None:
            self._paused_until_s = time.monotonic() + PAUSE_S
            self.close()

    def close(self) -> None:
        """Stop copying and close the connection."""
        if self._copying is not None:
            self._copying.cancel()
        if self._connection is not None:
            self._connection.terminate()
        self._connection = self._next_batch = self._copying = None

    async def _copy(self, linked: LinkedBatch) -> CopiedBatch:
        if self._connection is None or self._connection.is_closed():
            self._connection = await self._connect()
        return CopiedBatch(self._connection, await copy_first(self._connection, linked.log_rows))
