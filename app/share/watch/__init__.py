"""Watchers: each reads one chain from a position on, as far as its client takes what it is told.

    seq      up to here all was told that is wanted; it only rises

A watcher that is behind the tail reads pages from the log until it meets the tail, and is live from then on: it sleeps
until something comes that it wants. One that was live and whose next entry the tail no longer keeps has fallen behind:
it is told so, with the seq to start over from, and that is its end. So what a client that stands still costs has a
bound, and nobody waits for it.

All pieces are handed out in turns of one share of the event loop.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Final

import structlog

from app.runtime.answers import json_bytes
from app.runtime.metrics import Metrics
from app.share.watch.blocks import BLOCK_BYTES_MAX, EVERYTHING, Block, Chosen, Wanted
from app.share.watch.tail import RETRY_PAUSE_S, Tail, Tails
from ledger.errors import DatabaseUnavailableError, NotReadyError

LOOK_INTERVAL_S: Final = 5.0
"""How often it is looked whether a client may still watch, and was told something lately."""
LOOKS_AT_ONCE: Final = 50
"""Clients that are checked in one pass of the event loop."""
SILENCE_MAX_S: Final = 15.0
"""Longest that a client is sent nothing at all."""
PASSED_MIN: Final = 1000
"""Once so many entries went by that a client does not want, a sign of life says how far it has come."""
TURN_S: Final = 40e-6
"""What a turn takes beyond what is done in it, about."""
CUT_OFF_AFTER_S: Final = 1.0
"""How long a client has to take what it was told last, when its watch is ended."""
NO_END: Final = 2**63
"""Beyond every seq: the end of a watch that has none."""
BEAT: Final = b": still here\n\n"

log = structlog.get_logger()

MayWatch = Callable[[], Awaitable[bool]]
"""Whether a client may still watch."""


class Watcher:
    """One client's place in a chain. Belongs to one event loop, and ``next`` to one task."""

    def __init__(
        self,
        tails: Tails,
        tail: Tail,
        wanted: Wanted,
        *,
        after_seq: int,
        to_seq: int,
        may_watch: MayWatch,
        metrics: Metrics,
    ) -> None:
        self.seq = after_seq
        self.may_watch = may_watch
        self.cut_off: Callable[[], object] = lambda: None
        """Ends a client that takes nothing."""
        self._tails = tails
        self._tail = tail
        self._wanted = wanted
        self._awaited = wanted if to_seq == NO_END else EVERYTHING
        """What wakes it: one that has an end, each entry may bring there."""
        self._to_seq = to_seq
        self._metrics = metrics
        self._is_live = False
        self._is_over = False
        self._is_beat_due = False
        self._woken: asyncio.Future[None] | None = None
        self._turn_began_s: float | None = None
        self._told_seq = after_seq
        """The last position that the client knows."""
        self.told_at_s = time.monotonic()

    # --- what the client is sent ------------------------------------------------------------------

    async def next(self) -> bytes:
        """The next piece for the client, to be sent at once; nothing at the end.

        MUST be called when the client has taken what it was told before; ``sent`` MUST be called before the next await
        that may wait.
        """
        has_turn = False
        while not self._is_over and self.seq < self._to_seq:
            if self._is_beat_due:
                return self._beat()
            block = self._tail.after(self.seq)
            if block is not None and self._knows(block):
                if has_turn:
                    has_turn, piece = False, self._take()
                    if piece:
                        return piece
                else:
                    has_turn = await self._turn()
            elif self.seq >= self._tail.seq:
                if self._tail.error is not None:
                    break  # it failed while this watcher was told something, and wakes nobody any more
                self._is_live = True
                self._tail.wait(self._awaited, self)
                has_turn = await self._wake()
            elif self._is_live and self.seq + 1 < self._tail.first_seq:
                return self._lagged()
            elif piece := await self._read_page():
                return piece
        return b""

    def sent(self) -> None:
        """The piece was sent."""
        self.told_at_s = time.monotonic()
        self._end_turn()

    def end(self) -> None:
        """Tell the client no more."""
        self._is_over = True
        self._tail.leave(self._awaited, self)
        if self._woken is not None and not self._woken.done():
            self._woken.set_result(None)

    def beat(self) -> None:
        """Give the client a sign of life, if it waits for something."""
        if self._woken is not None and self._tail.leave(self._awaited, self):
            self._is_beat_due = True
            # All that the tail has taken in was checked, and is not wanted.
            self.seq = max(self.seq, self._tail.seq)
            self._tails.share.grant(self._woken)

    # --- as ``Waiter``, with ``end`` ---------------------------------------------------------------

    def more(self, block: Block) -> bool:
        """The newest block may hold something for it."""
        if block.last_seq <= self.seq or self._woken is None:
            return False
        # What lies between was checked, and is not wanted.
        self.seq = max(self.seq, block.first_seq - 1)
        self._tails.share.grant(self._woken)
        return True

    # --- turns ------------------------------------------------------------------------------------

    async def _turn(self) -> bool:
        self._woken = asyncio.get_running_loop().create_future()
        self._tails.share.grant(self._woken)
        return await self._wake()

    async def _wake(self) -> bool:
        """Sleep until somebody wakes it, which is its turn; true."""
        self._end_turn()
        if self._woken is None or self._woken.done():
            self._woken = asyncio.get_running_loop().create_future()
        await self._woken
        self._turn_began_s = time.thread_time()
        return True

    def _end_turn(self) -> None:
        if self._turn_began_s is not None:
            self._tails.share.spent(TURN_S + time.thread_time() - self._turn_began_s)
            self._turn_began_s = None

    # --- pieces -----------------------------------------------------------------------------------

    def _knows(self, block: Block) -> bool:
        return block.has_dcs or self._wanted.dc is None

    def _take(self) -> bytes:
        """What the tail holds for the client, about a block of it."""
        self._is_live = True
        found: list[Chosen] = []
        size = 0
        while size < BLOCK_BYTES_MAX and self.seq < self._to_seq:
            block = self._tail.after(self.seq)
            if block is None or not self._knows(block):
                break
            chosen = block.chosen_between(self._wanted, self.seq, self._to_seq)
            size += len(chosen.events)
            if found and size > BLOCK_BYTES_MAX:
                break
            self.seq = block.last_seq
            if chosen.entries:
                found.append(chosen)
        return self._told(found)

    async def _read_page(self) -> bytes:
        """What the log holds for the client, the next page of it."""
        self._end_turn()
        try:
            block = await self._tails.page(self._tail, self.seq, with_dcs=self._wanted.dc is not None)
        except DatabaseUnavailableError:
            # The tail says so in the log, once for all.
            await asyncio.sleep(RETRY_PAUSE_S)
            return self._nothing()
        chosen = block.chosen_between(self._wanted, self.seq, self._to_seq)
        self.seq = block.last_seq
        if not chosen.entries:
            return self._nothing()
        self._turn_began_s = time.thread_time()
        return self._told([chosen])

    def _told(self, found: list[Chosen]) -> bytes:
        if found:
            self._told_seq = self.seq
            self._metrics.count("watch_entries_sent", sum(chosen.entries for chosen in found))
        return found[0].events if len(found) == 1 else b"".join(chosen.events for chosen in found)

    def _nothing(self) -> bytes:
        """What a page comes to that holds nothing for the client: a sign of life, where there were many of them."""
        return self._beat() if self.told_at_s < _silent_since_s() else b""

    def _beat(self) -> bytes:
        self._is_beat_due = False
        if self.seq - self._told_seq < PASSED_MIN:
            return BEAT
        self._told_seq = self.seq
        return b"id: %d\n" % self.seq + BEAT

    def _lagged(self) -> bytes:
        self._is_over = True
        self._metrics.count("watch_lagged")
        return b"event: lagged\ndata: %b\n\n" % json_bytes({"from_seq": self.seq + 1, "head_seq": self._tail.head_seq})


class Watchers:
    """All watchers of a node: at most ``count_max`` at once."""

    def __init__(self, tails: Tails, count_max: int, metrics: Metrics) -> None:
        self._tails = tails
        self._count_max = count_max
        self._metrics = metrics
        self._open: set[Watcher] = set()
        self._is_closed = False
        metrics.read(lambda: {"watch_streams": len(self._open)})

    @asynccontextmanager
    async def open(
        self,
        tenant_id: str,
        wanted: Wanted,
        after_seq: int | None,
        to_seq: int | None,
        may_watch: MayWatch,
    ) -> AsyncIterator[Watcher]:
        """A watcher of the tenant's chain from behind ``after_seq``, or the end of the chain, up to ``to_seq``.

        Raises:
            NotReadyError: there are too many, or the service stops.
            TenantNotFoundError: there is no such tenant.
            DatabaseUnavailableError: Postgres does not answer.
        """
        self._check_room()
        async with self._tails.watching(tenant_id, with_dcs=wanted.dc is not None) as tail:
            if after_seq is None:
                after_seq = await self._tails.head_seq(tenant_id)
            self._check_room()  # others have come meanwhile, or the stop
            watcher = Watcher(
                self._tails,
                tail,
                wanted,
                after_seq=after_seq,
                to_seq=NO_END if to_seq is None else to_seq,
                may_watch=may_watch,
                metrics=self._metrics,
            )
            self._open.add(watcher)
            try:
                yield watcher
            finally:
                watcher.end()
                self._open.discard(watcher)

    def _check_room(self) -> None:
        if self._is_closed:
            raise NotReadyError("the service is stopping; watch another node, or this one when it is back")
        if len(self._open) >= self._count_max:
            raise NotReadyError(f"{self._count_max} clients watch here, three of four connections; watch another node")

    async def run(self) -> None:
        """End the watch of those who may not watch any more, give others a sign of life, until cancelled."""
        while True:
            await asyncio.sleep(LOOK_INTERVAL_S)
            everybody = [*self._open]
            for start in range(0, len(everybody), LOOKS_AT_ONCE):
                watchers = everybody[start : start + LOOKS_AT_ONCE]
                began_s = time.thread_time()
                self._end([watcher for watcher in watchers if not await watcher.may_watch()])
                silent_since_s = _silent_since_s()
                for watcher in watchers:
                    if watcher.told_at_s < silent_since_s:
                        watcher.beat()
                self._tails.share.spent(time.thread_time() - began_s)
                await asyncio.sleep(0)

    def close(self) -> None:
        """End all watches, and let none begin."""
        self._is_closed = True
        self._end([*self._open])

    def _end(self, watchers: Sequence[Watcher]) -> None:
        for watcher in watchers:
            watcher.end()
        if watchers:
            asyncio.get_running_loop().call_later(CUT_OFF_AFTER_S, self._cut_off, watchers)

    def _cut_off(self, watchers: Sequence[Watcher]) -> None:
        for watcher in watchers:
            if watcher in self._open:
                watcher.cut_off()


def _silent_since_s() -> float:
    """Who was told nothing since then gets a sign of life: the next look might be too late."""
    return time.monotonic() - (SILENCE_MAX_S - 2 * LOOK_INTERVAL_S)


def watchers_max(connections_max: int) -> int:
    """How many may watch at once: of four connections one is left for those who ask for little."""
    return connections_max * 3 // 4
