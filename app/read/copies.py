"""The copies of the database that reads come from: the primary, and its replicas where there are some."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, TypeVar

from app.read.consistency import Promise, ReadLevel, UnfitError
from app.read.replicas import Judge, Look, Replicas, Source
from app.store import reads
from ledger.errors import (
    DatabaseUnavailableError,
    QuarantinedError,
    SessionNotCaughtUpError,
    TooStaleError,
    WriteLostError,
)
from ledger.positions import Epoch

if TYPE_CHECKING:
    from app.read.consistency import Consistency
    from app.runtime.state.node import Node
    from app.runtime.state.session import Token
    from app.store import Connection
    from app.store.reading import Pool

PRIMARY = Source("primary", 0)
REPLICA_WAIT_PART = 0.1
"""Part of ``read.wait`` that a session waits for a replica before it goes to the primary."""

Value = TypeVar("Value")


class Copies:
    """Reads from the copy that keeps a promise; nothing else decides where from."""

    def __init__(self, node: Node, primary: Pool, consistency: Consistency, replicas: Replicas | None = None) -> None:
        self._node = node
        self._primary = primary
        self._consistency = consistency
        self._replicas = replicas

    def _check_whole(self, tenant_id: str | None, promise: Promise) -> None:
        """Refuse a read of a tenant whose promise covers writes that were passed over when others were chained: it is
        damaged, or its rows are locked. What the chain shows need not have them."""
        level = promise.level
        if tenant_id is None or not (level is ReadLevel.STRONG or (promise.tokens and level is ReadLevel.SESSION)):
            return
        if (reason := self._node.damaged.get(tenant_id)) is not None:
            raise QuarantinedError(tenant_id, reason)
        if (reason := self._node.locked.get(tenant_id)) is not None:
            raise SessionNotCaughtUpError(
                f"tenant {tenant_id} has writes that are not chained yet: {reason}; try again"
            )

    def asked_of(self, promise: Promise) -> tuple[Sequence[tuple[str, Epoch]], str]:
        """What a look has to ask its snapshot for, so that a judge can judge it: arguments of ``reads.seen``."""
        return [(token.node_id, token.epoch) for token in promise.tokens], self._node.node_id

    async def judged(self, connection: Connection, promise: Promise, judge: Judge) -> None:
        """Show ``judge`` the snapshot of ``connection``, whatever it raises."""
        judge(await reads.seen(connection, *self.asked_of(promise)))

    async def read(self, tenant_id: str | None, look: Look[Value], promise: Promise) -> tuple[Value, Source]:
        """What ``look`` reads, of one tenant or of all, in a snapshot that keeps ``promise``: a replica's, else the
        primary's.

        A session first waits for this node's own writes: before they are chained no copy has them.

        Raises:
            SessionNotCaughtUpError, WriteLostError, TooStaleError, FencedError: the promise cannot be kept.
            ChainDamagedError: the tenant is quarantined, and the promise covers writes that may be held back.
        """
        self._check_whole(tenant_id, promise)
        try:
            found = await self._read(look, promise)
        except WriteLostError as lost:
            # What says so is a row that can be edited.
            try:
                chained = await self._consistency.chained(promise.tokens)
            except DatabaseUnavailableError:
                raise lost from None
            found = await self._read_primary(look, promise, chained), PRIMARY
        self._check_whole(tenant_id, promise)  # Again: it waited for what is promised.
        return found

    async def _read(self, look: Look[Value], promise: Promise) -> tuple[Value, Source]:
        level, wait_s = promise.level, 0.0
        if level in (ReadLevel.SESSION, ReadLevel.STRONG):
            await self._consistency.wait_here(promise.tokens)
            wait_s = self._consistency.wait_s * REPLICA_WAIT_PART
        if level is ReadLevel.STRONG:
            await self._consistency.chain_own_writes()
        elif self._replicas is not None:
            answer = await self._replicas.read(look, promise, wait_s)
            if answer is not None:
                return answer
        return await self._read_primary(look, promise), PRIMARY

    async def _read_primary(self, look: Look[Value], promise: Promise, chained: Collection[Token] = ()) -> Value:
        def judge(seen: reads.Seen) -> None:
            promise.check(seen, PRIMARY.staleness_ms, chained)
            if promise.level is ReadLevel.STRONG:
                self._consistency.check_not_fenced(seen.epoch)

        async for _ in self._consistency.attempts():
            try:
                return await look(self._primary, judge)
            except UnfitError:
                continue
            except DatabaseUnavailableError as error:
                if promise.level is ReadLevel.BOUNDED_STALENESS:
                    raise TooStaleError(f"no replica is fresh enough, and {error}") from error
                raise
        raise AssertionError("attempts never end without an error")
