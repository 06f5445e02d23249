"""What a read may promise, and how it keeps the promise.

A token names a write: (node, epoch, lsn). Judged by what Postgres says of that node in the very snapshot that
is read from::

    epoch == present epoch                 seen when chained_lsn >= lsn
    epoch <  present epoch, lsn <= end     seen when chained_lsn >= lsn       (end: last LSN of that epoch)
    epoch <  present epoch, lsn >  end     lost: never seen, and never taken for seen
    anything else                          not yet known here: wait

Where an epoch ended is a row that can be edited: a write that it says is lost is looked for in the chains first.

``chained_lsn`` only rises, so what was seen once stays seen in every later snapshot of the same copy. A copy that
lags says the same of an earlier time: it may not know a write yet, but what it calls seen or lost is so.
One exception: ``chained_lsn`` passes over what a node holds back of a quarantined or locked tenant (decision 0008), so
other nodes take that for seen; the node itself refuses the read.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Collection, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple

from app.store import reads
from app.store.reading import reading
from ledger.errors import (
    DurabilityTimeoutError,
    FencedError,
    SessionNotCaughtUpError,
    TooStaleError,
    WriteLostError,
)
from ledger.hlc import Hlc
from ledger.positions import Epoch

if TYPE_CHECKING:
    from app.runtime.state.node import Node
    from app.runtime.state.session import Token
    from app.store.reading import Pool

POLL_FIRST_S = 0.005
POLL_LONGEST_S = 0.1
"""Waits between two looks at Postgres for other nodes' writes: doubling, from the first to the longest."""


class ReadLevel(StrEnum):
    """How much a read promises."""

    EVENTUAL = "eventual"
    SESSION = "session"
    BOUNDED_STALENESS = "bounded_staleness"
    STRONG = "strong"


class UnfitError(Exception):
    """This snapshot cannot keep the promise; a later one, or that of another copy, may."""


class Promise(NamedTuple):
    """What one read promises; ``max_staleness_ms`` counts with BOUNDED_STALENESS."""

    level: ReadLevel
    tokens: Sequence[Token]
    max_staleness_ms: int

    def check(self, seen: reads.Seen, staleness_ms: int, chained: Collection[Token] = ()) -> None:
        """Return if a snapshot that shows ``seen`` and is at most ``staleness_ms`` old keeps the promise; of tokens, it
        has the writes of ``chained``.

        Raises:
            UnfitError: it does not.
            WriteLostError: none ever will.
        """
        if self.level is ReadLevel.BOUNDED_STALENESS and staleness_ms > self.max_staleness_ms:
            raise UnfitError
        if self.level in (ReadLevel.SESSION, ReadLevel.STRONG) and not all_seen(self.tokens, seen.positions, chained):
            raise UnfitError


def all_seen(
    tokens: Sequence[Token], positions: Sequence[reads.TokenPosition], chained: Collection[Token] = ()
) -> bool:
    """Whether a snapshot in which the tokens' nodes stand at ``positions`` has every write of ``tokens``; those of
    ``chained`` it has.

    Raises:
        WriteLostError: a token names a write beyond the end of its epoch.
    """
    seen = True
    for token, position in zip(tokens, positions, strict=True):
        seen = (token in chained or _is_seen(token, position)) and seen
    return seen


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


async def turns(wait_s: float) -> AsyncIterator[None]:
    """Turns to read something again, with growing pauses between them, as long as the next is not later than
    ``wait_s`` seconds from now."""
    deadline_s, pause_s = time.monotonic() + wait_s, POLL_FIRST_S
    while True:
        yield
        if time.monotonic() + pause_s > deadline_s:
            return
        await asyncio.sleep(pause_s)
        pause_s = min(pause_s * 2, POLL_LONGEST_S)


class Consistency:
    """Waits until a read can keep its promise, at most ``wait_s`` seconds."""

    def __init__(self, node: Node, pool: Pool, wait_s: float) -> None:
        self._node = node
        self._pool = pool
        self.wait_s = wait_s

    def receive(self, tokens: Sequence[Token]) -> None:
        """Let the clock learn of the tokens' times, so that what is written next comes after them.

        Raises:
            ClockSkewError: a time lies too far ahead; the clock is as it was.
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
        others = await self.wait_here(tokens)
        if not others:
            return
        chained: set[Token] = set()
        pairs = [(token.node_id, token.epoch) for token in others]
        async for _ in self.attempts():
            async with reading(self._pool) as connection:
                positions = await reads.positions(connection, pairs)
            try:
                is_seen = all_seen(others, positions, chained)
            except WriteLostError:
                chained = await self.chained(others)
                is_seen = all_seen(others, positions, chained)
            if is_seen:
                return

    async def chained(self, tokens: Sequence[Token]) -> set[Token]:
        """Those of the tokens whose writes a chain has: an end of an epoch that calls one of them lost is false."""
        hlcs = {token: Hlc.parse(token.hlc) for token in tokens}
        async with reading(self._pool) as connection:
            found = await reads.chained(connection, [*hlcs.values()])
        return {token for token, hlc in hlcs.items() if hlc in found}

    async def wait_here(self, tokens: Sequence[Token]) -> list[Token]:
        """Wait for the writes of this node's present epoch; returns the tokens Postgres must judge."""
        node = self._node
        mine = [token.lsn for token in tokens if token.node_id == node.node_id and token.epoch == node.epoch]
        if mine:
            lsn = max(mine)
            try:
                # A token may be of what is not committed yet: it must not hurry those who chain.
                await node.committed.reached(lsn, self.wait_s)
                await node.chained.reached(lsn, self.wait_s)
            except DurabilityTimeoutError as error:
                raise SessionNotCaughtUpError(f"{error}; try again") from None
        return [token for token in tokens if token.node_id != node.node_id or token.epoch != node.epoch]

    async def attempts(self) -> AsyncIterator[None]:
        """Turns to look at Postgres, with growing waits between them.

        Raises:
            SessionNotCaughtUpError: when another turn would come too late.
        """
        async for _ in turns(self.wait_s):
            yield
        raise SessionNotCaughtUpError(f"the session's writes did not become visible in {self.wait_s:g} s; try again")

    async def chain_own_writes(self) -> None:
        """Return once everything durable on this node now is chained.

        Raises:
            TooStaleError: not in time.
        """
        try:
            await self._node.chained.reached(self._node.durable.lsn, self.wait_s)
        except DurabilityTimeoutError as error:
            raise TooStaleError(f"this node's own writes are not all chained yet: {error}") from None

    def check_not_fenced(self, epoch: Epoch | None) -> None:
        """Refuse unless ``epoch``, which Postgres has for this node, is its own.

        Raises:
            FencedError: another process writes this WAL now.
        """
        if epoch != self._node.epoch:
            raise FencedError(
                f"node {self._node.node_id} runs in epoch {self._node.epoch}; Postgres knows epoch {epoch}"
            )
