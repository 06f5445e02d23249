"""The consistency levels of reads, and how a read keeps its promise.

A token names a write: (node, epoch, lsn). It is judged by that node's row in the same Postgres snapshot that the read
uses::

    epoch == present epoch                 seen when chained_lsn >= lsn
    epoch <  present epoch, lsn <= end     seen when chained_lsn >= lsn       (end: last LSN of that epoch)
    epoch <  present epoch, lsn >  end     lost: never seen, and never taken for seen
    anything else                          not yet known here: wait

The end of an epoch is a row that can be edited. So a write that the row calls lost is first looked up in the chains.

``chained_lsn`` only rises, so a write seen once stays seen in every later snapshot of the same copy. A copy that lags
shows an earlier state: it may not know a write yet, but its answers "seen" and "lost" are final.
One exception: ``chained_lsn`` skips writes that a node holds back for a quarantined or locked tenant (decision 0008).
Other nodes take these writes for seen; the node itself refuses the read.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Sequence
from enum import StrEnum
from typing import NamedTuple

from app.runtime.state.node import Node
from app.runtime.state.session import Token
from app.runtime.tasks import attempts_within
from app.store import reads
from app.store.reading import Pool, reading, run_in
from ledger.errors import (
    DurabilityTimeoutError,
    FencedError,
    SessionNotCaughtUpError,
    TooStaleError,
    WriteLostError,
)
from ledger.hlc import Hlc
from ledger.positions import Epoch


class ReadLevel(StrEnum):
    """How much a read promises."""

    EVENTUAL = "eventual"
    SESSION = "session"
    BOUNDED_STALENESS = "bounded_staleness"
    STRONG = "strong"


class UnfitError(Exception):
    """This snapshot cannot keep the promise; a later one, or one of another copy, may."""


class Promise(NamedTuple):
    """The promise of one read; ``max_staleness_ms`` applies to BOUNDED_STALENESS only."""

    level: ReadLevel
    tokens: Sequence[Token]
    max_staleness_ms: int

    def check(self, seen: reads.Seen, staleness_ms: int, chained: Collection[Token] = ()) -> None:
        """Return if a snapshot that shows ``seen`` and is at most ``staleness_ms`` old keeps the promise. The writes of
        the tokens in ``chained`` are known to be in it.

        Raises:
            UnfitError: it does not.
            WriteLostError: no snapshot ever will.
        """
        if (self.level is ReadLevel.BOUNDED_STALENESS and staleness_ms > self.max_staleness_ms) or (
            self.level in (ReadLevel.SESSION, ReadLevel.STRONG) and not all_seen(self.tokens, seen.positions, chained)
        ):
            raise UnfitError


def all_seen(
    tokens: Sequence[Token], positions: Sequence[reads.TokenPosition], chained: Collection[Token] = ()
) -> bool:
    """Whether a snapshot in which the tokens' nodes are at ``positions`` has every write of ``tokens``. The writes of
    ``chained`` are known to be in it.

    Raises:
        WriteLostError: a token names a write beyond the end of its epoch.
    """
    seen = [token in chained or _is_seen(token, position) for token, position in zip(tokens, positions, strict=True)]
    return all(seen)


def _is_seen(token: Token, position: reads.TokenPosition) -> bool:
    if position.epoch is None or position.chained_lsn is None or token.epoch > position.epoch:
        return False
    if token.epoch < position.epoch:
        if position.end_lsn is None:
            return False
        if token.lsn > position.end_lsn:
            raise WriteLostError(
                f"write {token.lsn} of node {token.node_id} in epoch {token.epoch} was lost: that epoch "
                f"ended at {position.end_lsn}. Do the write again"
            )
    return position.chained_lsn >= token.lsn


class Consistency:
    """Waits until a read can keep its promise, at most ``wait_s`` seconds."""

    def __init__(self, node: Node, pool: Pool, wait_s: float) -> None:
        self._node = node
        self._pool = pool
        self.wait_s = wait_s

    def receive(self, tokens: Sequence[Token]) -> None:
        """Advance the clock past the tokens' times, so that later writes come after them.

        Raises:
            ClockSkewError: a time is too far ahead; the clock is unchanged.
            InvalidInputError: a time is out of range.
        """
        for token in tokens:
            self._node.clock.receive(Hlc.parse(token.hlc), self._node.wall.now_ms())

    async def wait_for_session(self, tokens: Sequence[Token]) -> None:
        """Return once the primary has every write of ``tokens``.

        Raises:
            SessionNotCaughtUpError: not in time.
            WriteLostError: one of them was lost.
        """
        if not (others := await self.wait_here(tokens)):
            return
        chained: set[Token] = set()
        pairs = [(token.node_id, token.epoch) for token in others]
        async for _ in self.attempts():
            async with reading(self._pool) as connection:
                positions = (await reads.seen(connection, pairs, "")).positions
            try:
                is_seen = all_seen(others, positions, chained)
            except WriteLostError:
                chained = await self.chained(others)
                is_seen = all_seen(others, positions, chained)
            if is_seen:
                return

    async def chained(self, tokens: Sequence[Token]) -> set[Token]:
        """The tokens whose writes are in a chain. If an epoch's end calls one of these lost, that row is wrong."""
        hlcs = {token: Hlc.parse(token.hlc) for token in tokens}
        found = await run_in(reading(self._pool), reads.chained, [*hlcs.values()])
        return {token for token, hlc in hlcs.items() if hlc in found}

    async def wait_here(self, tokens: Sequence[Token]) -> list[Token]:
        """Wait for the writes of this node's present epoch; returns the tokens that Postgres must judge."""
        node = self._node
        mine = [token.lsn for token in tokens if token.node_id == node.node_id and token.epoch == node.epoch]
        if mine:
            lsn = max(mine)
            try:
                # The token's write may not be committed yet, and must not hurry the appender before it is.
                await node.committed.reached(lsn, self.wait_s)
                await node.chained.reached(lsn, self.wait_s)
            except DurabilityTimeoutError as error:
                raise SessionNotCaughtUpError(f"{error}; try again") from None
        return [token for token in tokens if token.node_id != node.node_id or token.epoch != node.epoch]

    async def attempts(self) -> AsyncIterator[None]:
        """Yield once for each attempt to read Postgres, with growing pauses.

        Raises:
            SessionNotCaughtUpError: another attempt would be too late.
        """
        async for _ in attempts_within(self.wait_s):
            yield
        raise SessionNotCaughtUpError(f"the session's writes did not become visible in {self.wait_s:g} s; try again")

    async def chain_own_writes(self) -> None:
        """Return once every write that is durable on this node now is chained.

        Raises:
            TooStaleError: not in time.
        """
        try:
            await self._node.chained.reached(self._node.durable.lsn, self.wait_s)
        except DurabilityTimeoutError as error:
            raise TooStaleError(f"this node's own writes are not all chained yet: {error}") from None

    def check_not_fenced(self, epoch: Epoch | None) -> None:
        """Return if ``epoch``, which Postgres has for this node, is the node's own.

        Raises:
            FencedError: another process writes this WAL now.
        """
        if epoch != self._node.epoch:
            raise FencedError(
                f"node {self._node.node_id} runs in epoch {self._node.epoch}; Postgres knows epoch {epoch}"
            )
