"""Watchers: each sends the entries of one chain from a position on, as fast as its client reads.

    seq      all wanted entries up to here were sent; it only rises

A watcher that is behind the tail reads pages from the log until it reaches the tail. From then on it is live: it sleeps
until a wanted entry is appended. If the tail evicts the next entry of a live watcher, the watcher has fallen behind. It
reports that, with the seq to restart from, and ends. So the cost of a stalled client is bounded, and nothing waits for
it. The same is reported if the next entry leaves with a prune.

All pieces are sent in turns of one share of the event loop.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Final

from app.runtime.answers import json_bytes
from app.runtime.metrics import Metrics
from app.share.watch.blocks import BLOCK_BYTES_MAX, EVERYTHING, Block, Chosen, Wanted
from app.share.watch.tail import RETRY_PAUSE_S, Tail, Tails
from ledger.errors import ArchivedError, DatabaseUnavailableError, NotReadyError

LOOK_INTERVAL_S: Final = 5.0
"""Interval of the check that a client may still watch and was sent data recently."""
LOOKS_AT_ONCE: Final = 50
"""Clients that are checked in one pass of the event loop."""
SILENCE_MAX_S: Final = 15.0
"""Longest time without sending a client anything."""
PASSED_MIN: Final = 1000
"""After so many unwanted entries, a heartbeat carries the position of the client."""
TURN_S: Final = 40e-6
"""Estimated overhead of a turn."""
CUT_OFF_AFTER_S: Final = 1.0
"""Time for a client to read the last piece after its watch is ended."""
NO_END: Final = 2**63
"""Above every seq: the end of an unbounded watch."""
BEAT: Final = b": still here\n\n"

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
        """Cuts off a client that does not read."""
        self._tails = tails
        self._tail = tail
        self._wanted = wanted
        self._awaited = wanted if to_seq == NO_END else EVERYTHING
        """The entries that wake it: any entry can bring a bounded watch to its end."""
        self._to_seq = to_seq
        self._metrics = metrics
        self._is_live = self._is_over = self._is_beat_due = False
        self._woken: asyncio.Future[None] | None = None
        self._turn_began_s: float | None = None
        self._told_seq = after_seq
        """The last position that the client knows."""
        self.told_at_s = time.monotonic()

    # --- what the client is sent ------------------------------------------------------------------

    async def next(self) -> bytes:
        """The next piece for the client, to be sent immediately; empty at the end.

        MUST be called only after the client has read the previous piece; ``sent`` MUST be called before the next await
        that may block.
        """
        has_turn = False
        while not self._is_over and self.seq < self._to_seq:
            if self._is_beat_due:
                return self._beat()
            if (block := self._tail.after(self.seq)) is not None and self._knows(block):
                if has_turn:
                    has_turn, piece = False, self._take()
                    if piece:
                        return piece
                else:
                    has_turn = await self._turn()
            elif self.seq >= self._tail.seq:
                if self._tail.error is not None:
                    break  # the tail failed while this watcher was sending, and wakes no waiter any more
                self._is_live = True
                self._tail.wait(self._awaited, self)
                has_turn = await self._wake()
            elif self._is_live and self.seq + 1 < self._tail.first_seq:
                return self._lagged()
            elif piece := await self._read_page():
                return piece
        return b""

    def sent(self) -> None:
        """Record that the piece was sent."""
        self.told_at_s = time.monotonic()
        self._end_turn()

    def end(self) -> None:
        """End the watch."""
        self._is_over = True
        self._tail.leave(self._awaited, self)
        if self._woken is not None and not self._woken.done():
            self._woken.set_result(None)

    def beat(self) -> None:
        """Send a heartbeat, if the watcher is waiting."""
        if self._woken is not None and self._tail.leave(self._awaited, self):
            self._is_beat_due = True
            # No entry that the tail has read so far is wanted.
            self.seq = max(self.seq, self._tail.seq)
            self._tails.share.grant(self._woken)

    # --- as ``Waiter``, with ``end`` ---------------------------------------------------------------

    def more(self, block: Block) -> bool:
        """The newest block may hold an entry for it."""
        if block.last_seq <= self.seq or self._woken is None:
            return False
        # No entry in between is wanted.
        self.seq = max(self.seq, block.first_seq - 1)
        self._tails.share.grant(self._woken)
        return True

    # --- turns ------------------------------------------------------------------------------------

    async def _turn(self) -> bool:
        self._woken = asyncio.get_running_loop().create_future()
        self._tails.share.grant(self._woken)
        return await self._wake()

    async def _wake(self) -> bool:
        """Sleep until woken, which starts its turn; returns true."""
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
        """The next wanted events in the tail, about a block."""
        self._is_live = True
        found: list[Chosen] = []
        size = 0
        while size < BLOCK_BYTES_MAX and self.seq < self._to_seq:
            if (block := self._tail.after(self.seq)) is None or not self._knows(block):
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
        """The wanted events in the next page of the log."""
        self._end_turn()
        try:
            block = await self._tails.page(self._tail, self.seq, with_dcs=self._wanted.dc is not None)
        except DatabaseUnavailableError:
            # The tail logs the failure, once for all watchers.
            await asyncio.sleep(RETRY_PAUSE_S)
            return self._nothing()
        except ArchivedError:
            # A client that comes back is answered where these entries are.
            return self._lagged()
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
        """The result of a page without wanted entries: a heartbeat, if the client was sent nothing for long."""
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
        """A watcher of the tenant's chain from after ``after_seq``, or the head of the chain, up to ``to_seq``.

        Raises:
            NotReadyError: there are too many, or the service stops.
            TenantNotFoundError: there is no such tenant.
            DatabaseUnavailableError: Postgres does not answer.
        """
        self._check_room()
        async with self._tails.watching(tenant_id, with_dcs=wanted.dc is not None) as tail:
            if after_seq is None:
                after_seq = await self._tails.head_seq(tenant_id)
            self._check_room()  # other watchers or the stop may have come meanwhile
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
        """End watches whose client may not watch any more, send the others heartbeats, until cancelled."""
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
        """End all watches, and reject new ones."""
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
    """A client that was sent nothing since then gets a heartbeat: the next check might be too late."""
    return time.monotonic() - (SILENCE_MAX_S - 2 * LOOK_INTERVAL_S)


def watchers_max(connections_max: int) -> int:
    """Watchers allowed at once: one of four connections is left for short requests."""
    return connections_max * 3 // 4
