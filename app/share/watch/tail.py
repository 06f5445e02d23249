"""The tails of watched chains: each chain is read once for all its watchers.

A tail follows the end of its chain. Entries that this node chained are in memory, and only the columns that PostgreSQL
assigns are read. Entries that other nodes chained are read whole. Each entry is encoded once and kept up to a bound::

    seq                 the last entry that the tail has read; <= head_seq, the last known end of the chain
    first_seq .. seq    kept, in blocks without a gap; the oldest are evicted first

A watcher reads earlier entries from the log, page by page (``Tails.page``), until it reaches the tail. That includes a
watcher that resumes from a stored position.

Entries of other nodes are found by reading the heads of watched chains every ``LOOK_INTERVAL_S``. A chain without
watchers costs nothing. All work is done in turns of one share of the event loop, so the writer does not wait.
"""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_right
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Final, Protocol

from app.runtime.logs import log
from app.runtime.sharing import Share
from app.runtime.tasks import kept_running
from app.share.watch.blocks import Block, DcsOfJobs, Wanted, blocks_of, jobs_in_question
from app.store import Connection, chain_reads
from app.store.appended import AppendedEntries
from app.store.chain_reads import ListedEntry
from app.store.chaining import LOG_COLUMNS, Piece, RecentRows, Row
from app.store.entry_check import Report
from app.store.jobs.table import JobFolds
from app.store.reading import Pool, reading, run_in
from app.trust.retention import RetentionReader
from ledger.errors import ArchivedError, ChainDamagedError, DatabaseUnavailableError, TenantNotFoundError
from ledger.machines import jobs
from ledger.verification.verdict import damaged

LOOK_INTERVAL_S: Final = 0.2
"""Interval of the check for entries that other nodes chained."""
RETRY_PAUSE_S: Final = 1.0
"""Pause before a failed read of the database is retried."""
ENTRIES_A_READ: Final = 200
"""Entries that a tail reads at a time."""
ENTRIES_BEFORE: Final = 500
"""Entries before the head with which a tail starts: most clients that reconnect together had read further than that."""
PAGE_ENTRIES: Final = 64
"""Entries read at a time for a watcher that is behind the tail: about a block."""
READS_MAX: Final = 4
"""Concurrent reads of PostgreSQL, for all tails together."""
TAILS_BYTES_MAX: Final = 64 << 20
"""Bytes of the events that all tails keep together, in equal parts; cached filter results come on top."""
TAIL_BYTES_MAX: Final = 8 << 20
"""Bytes of the events that one tail keeps."""
ROWS_BYTES_MAX: Final = 8 << 20
"""Bytes of rows that this node chained and a tail has not read yet; beyond it they are read from PostgreSQL."""
READ_S: Final = 300e-6
"""Estimated event-loop time of one statement: the driver's work cannot be measured here."""
ROW_READ_S: Final = 25e-6
"""Estimated time of each row in addition."""
STAMP_READ_S: Final = 5e-6
"""Estimated time of each row of which only the columns that PostgreSQL assigns are read."""
DCS_READ_S: Final = 30e-6
"""Estimated time to find the data centres of an entry."""

_SEQ = LOG_COLUMNS.index("seq")


class Waiter(Protocol):
    """A consumer that is woken by new entries."""

    def more(self, block: Block) -> bool:
        """``block``, the newest, may hold an entry for it; returns false to keep waiting."""

    def end(self) -> None:
        """The tail has ended; no entry follows."""


class Tail:
    """The end of one chain for its watchers. Belongs to one event loop."""

    def __init__(self, tenant_id: str, seq: int) -> None:
        """Follows the chain from after ``seq``."""
        self.tenant_id = tenant_id
        self.seq = self.head_seq = seq
        self.users = self.dc_users = 0
        """Users, and the users that need the data centres of entries."""
        self.error: ArchivedError | ChainDamagedError | None = None
        """Why the tail has ended."""
        self.grown = asyncio.Event()
        """Set while ``seq < head_seq``."""
        self.moved = asyncio.Event()
        """Set, and replaced, when ``seq`` rises or the tail fails."""
        self._blocks: list[Block] = []
        self._bytes = 0
        self.rows = RecentRows()
        """The newest rows that this node chained and the tail has not read."""
        self.following: asyncio.Task[None]
        self._waiting: dict[Wanted, dict[Waiter, None]] = {}

    @property
    def first_seq(self) -> int:
        """The oldest entry that is kept; ``seq + 1`` if none is."""
        return self._blocks[0].first_seq if self._blocks else self.seq + 1

    def after(self, seq: int) -> Block | None:
        """The block with the entry after ``seq``; None if it is evicted or not read yet."""
        if not self.first_seq <= seq + 1 <= self.seq:
            return None
        return self._blocks[bisect_right(self._blocks, seq + 1, key=lambda block: block.first_seq) - 1]

    def wait(self, wanted: Wanted, waiter: Waiter) -> None:
        """Wake the waiter once, with the next block that holds a wanted entry."""
        self._waiting.setdefault(wanted, {})[waiter] = None

    def leave(self, wanted: Wanted, waiter: Waiter) -> bool:
        """Stop waking the waiter; returns whether it was waiting."""
        waiting = self._waiting.get(wanted, {})
        if waiter not in waiting:
            return False
        del waiting[waiter]
        if not waiting:
            del self._waiting[wanted]
        return True

    async def grown_beyond(self, seq: int) -> None:
        """Return once the tail has an entry after ``seq``.

        Raises:
            ArchivedError, ChainDamagedError: the tail has ended.
        """
        while self.seq <= seq:
            if self.error is not None:
                raise self.error
            await self.moved.wait()

    # --- growing ----------------------------------------------------------------------------------

    def hear(self, head_seq: int) -> None:
        """Record that the chain's head is at least ``head_seq``."""
        if head_seq > self.head_seq:
            self.head_seq = head_seq
            self.grown.set()

    def chained(self, piece: Piece) -> None:
        """Record rows that this node chained; pieces may come in any order."""
        self.rows.add(piece)
        if self.rows.size_bytes > ROWS_BYTES_MAX:
            self.rows = RecentRows()
        self.hear(piece.last_seq)

    def take(self, block: Block, bytes_max: int) -> None:
        """Append the next block, wake the waiters that want an entry of it, and evict blocks over ``bytes_max``."""
        self._blocks.append(block)
        self._bytes += block.event_bytes
        self.seq = block.last_seq
        self.moved.set()
        self.moved = asyncio.Event()
        self._wake(block)
        dropped = 0
        while self._bytes > bytes_max and dropped < len(self._blocks) - 1:
            self._bytes -= self._blocks[dropped].event_bytes
            dropped += 1
        del self._blocks[:dropped]
        self.rows.forget(self.seq)
        if self.seq >= self.head_seq:
            self.head_seq = self.seq
            self.grown.clear()

    def fail(self, error: ArchivedError | ChainDamagedError) -> None:
        """End the tail and all its waiters."""
        self.error = error
        waiting, self._waiting = self._waiting, {}
        for waiters in waiting.values():
            for waiter in waiters:
                waiter.end()
        self.moved.set()

    def _wake(self, block: Block) -> None:
        for wanted in [*self._waiting]:
            if block.chosen(wanted).entries or (wanted.dc is not None and not block.has_dcs):
                waiters = self._waiting.pop(wanted)
                if left := {each: None for each in waiters if not each.more(block)}:
                    self._waiting[wanted] = left


class Tails:
    """The tails of a node."""

    def __init__(self, pool: Pool, share: Share, folds: JobFolds, retention: RetentionReader, report: Report) -> None:
        """``retention`` tells which entries have left. ``report`` is called with each error about damaged stored rows,
        and the part that met it."""
        self._pool = pool
        self._retention = retention
        self._folds = folds
        self._check = folds.check
        self._report = report
        self.share = share
        self._tails: dict[str, Tail] = {}
        self._reads = asyncio.Semaphore(READS_MAX)
        self._watched = asyncio.Event()
        """Set while something is watched."""
        self.last_error: str | None = None

    @asynccontextmanager
    async def watching(self, tenant_id: str, *, with_dcs: bool = False) -> AsyncIterator[Tail]:
        """The tail of the tenant's chain, followed until its last user leaves. New entries carry their data centres
        while any user asks ``with_dcs``.

        Raises:
            TenantNotFoundError: there is no such tenant.
            DatabaseUnavailableError: Postgres does not answer.
        """
        if (tail := self._tails.get(tenant_id)) is None:
            ends = await self._ends(tenant_id)
            tail = self._tails.get(tenant_id) or self._begin(tenant_id, *ends)
        tail.users += 1
        tail.dc_users += with_dcs
        try:
            yield tail
        finally:
            tail.users -= 1
            tail.dc_users -= with_dcs
            if not tail.users:
                self._end(tail)

    async def page(self, tail: Tail, after_seq: int, *, with_dcs: bool) -> Block:
        """The entries after ``after_seq``, read from the log. ``after_seq`` MUST be below the tail's ``seq``.

        Raises:
            ArchivedError: the next entry has left.
            ChainDamagedError: an entry is missing, or a row is damaged.
            DatabaseUnavailableError: Postgres does not answer.
        """
        async with self._reads:
            return (await self._blocks_after(tail, after_seq, PAGE_ENTRIES, (), with_dcs=with_dcs))[0]

    # --- following --------------------------------------------------------------------------------

    def chained(self, appended: AppendedEntries) -> None:
        """Record that this node chained ``appended``; as ``TableFollower.chained``."""
        if not self._tails:
            return
        for piece in appended.log_rows.pieces:
            if (tail := self._tails.get(piece.tenant_id)) is not None:
                tail.chained(piece)

    async def run(self) -> None:
        """Check for entries that other nodes chained, until cancelled."""
        while True:
            await self._watched.wait()
            try:
                heads = await run_in(reading(self._pool), chain_reads.head_seqs, [*self._tails])
                for tenant_id, head_seq in heads.items():
                    if (tail := self._tails.get(tenant_id)) is not None:
                        tail.hear(head_seq)
                self.last_error = None
            except DatabaseUnavailableError as error:
                self._note(error)
            await asyncio.sleep(LOOK_INTERVAL_S)

    async def _ends(self, tenant_id: str) -> tuple[int, int]:
        """After which entry a new tail of the chain begins, and the seq of its head; raises as ``watching``."""
        head_seq = await self.head_seq(tenant_id)
        after_seq = max(0, head_seq - ENTRIES_BEFORE)
        async with reading(self._pool) as connection:
            try:
                await self._retention.refuse_left(connection, tenant_id, after_seq + 1)
            except ArchivedError as error:
                after_seq = error.verified_from_seq - 1
            except ChainDamagedError:
                pass  # The tail names it if it is among its entries, and verification in any case.
        return after_seq, max(after_seq, head_seq)

    def _begin(self, tenant_id: str, after_seq: int, head_seq: int) -> Tail:
        tail = self._tails[tenant_id] = Tail(tenant_id, after_seq)
        tail.hear(head_seq)
        tail.following = asyncio.create_task(kept_running(partial(self._follow, tail)))
        self._watched.set()
        return tail

    def _end(self, tail: Tail) -> None:
        if self._tails.get(tail.tenant_id) is tail:
            del self._tails[tail.tenant_id]
            tail.following.cancel()
        if not self._tails:
            self._watched.clear()
            self.last_error = None

    async def _follow(self, tail: Tail) -> None:
        """Read chained entries into the tail, until cancelled or the chain is found damaged."""
        while True:
            await tail.grown.wait()
            try:
                async with self._reads:
                    blocks = await self._blocks_after(
                        tail,
                        tail.seq,
                        ENTRIES_A_READ,
                        tail.rows.after(tail.seq, ENTRIES_A_READ),
                        with_dcs=bool(tail.dc_users),
                    )
            except DatabaseUnavailableError as error:
                self._note(error)
                await asyncio.sleep(RETRY_PAUSE_S)
            except (ArchivedError, ChainDamagedError) as error:
                # What has left is no damage: clients come back, and the next tail begins behind it.
                log.error("watch_ended", tenant_id=tail.tenant_id, error=str(error))
                self._report(error, "watch")
                del self._tails[tail.tenant_id]
                tail.fail(error)
                return
            else:
                self.last_error = None
                await self._take(tail, blocks)

    async def _take(self, tail: Tail, blocks: Sequence[Block]) -> None:
        """Hand the blocks to the tail one by one: the waiters for a block have their turns before the next."""
        for block in blocks:
            began_s = time.thread_time()
            tail.take(block, min(TAIL_BYTES_MAX, TAILS_BYTES_MAX // len(self._tails)))
            self.share.spent(time.thread_time() - began_s)
            await self.share.turn()

    async def _blocks_after(
        self, tail: Tail, after_seq: int, limit: int, rows: Sequence[Row], *, with_dcs: bool
    ) -> list[Block]:
        """The blocks of the next entries: of ``rows``, which this node chained, or else of up to ``limit`` entries of
        the log."""
        tenant_id, dcs = tail.tenant_id, None
        async with (
            reading(self._pool) as connection,
            self._retention.leaving(connection, tenant_id, after_seq + 1),
        ):
            if rows:
                stamps = await chain_reads.stamps(connection, tenant_id, after_seq + 1, rows[-1][_SEQ])
                listed = [
                    ListedEntry._make((stamp.id, *row, stamp.created_at))
                    for row, stamp in zip(rows, stamps, strict=False)
                    if stamp.seq == row[_SEQ]
                ]
            else:
                listed, _ = await chain_reads.list_entries(connection, tenant_id, after_seq + 1, limit)
                await self._check.require(connection, tenant_id, [entry.columns for entry in listed])
            if not listed or listed[0].seq > after_seq + 1:
                raise damaged(tenant_id, "gap", after_seq + 1, f"the entry of seq {after_seq + 1} is missing")
            if with_dcs:
                dcs = await self._dcs(connection, tenant_id, listed)
                self.share.spent(READ_S + DCS_READ_S * len(listed))
        self.share.spent(READ_S + (STAMP_READ_S if rows else ROW_READ_S) * len(listed))
        await self.share.turn()
        began_s = time.thread_time()
        blocks = blocks_of(tenant_id, after_seq, listed, dcs)
        self.share.spent(time.thread_time() - began_s)
        return blocks

    async def _dcs(self, connection: Connection, tenant_id: str, listed: Sequence[ListedEntry]) -> DcsOfJobs:
        """The data centres of the jobs that cannot be known from the entries alone."""
        found: dict[str, frozenset[str] | None] = {}
        for job in await self._folds.read(connection, [(tenant_id, job_id) for job_id in jobs_in_question(listed)]):
            try:
                state = (await self._folds.fold(connection, job)).state
                found[job.span.job_id] = frozenset() if state is None else jobs.dcs_of(state)
            except ChainDamagedError as error:
                # The data centres of the job are unknown, so all clients get its entries.
                self._report(error, "watch")
                found[job.span.job_id] = None
        return found

    async def head_seq(self, tenant_id: str) -> int:
        """Seq of the chain's head.

        Raises:
            as ``watching``.
        """
        found = await run_in(reading(self._pool), chain_reads.head_seqs, [tenant_id])
        if tenant_id not in found:
            raise TenantNotFoundError(f"there is no tenant {tenant_id}")
        return found[tenant_id]

    def _note(self, error: DatabaseUnavailableError) -> None:
        if self.last_error is None:
            log.warning("watch_delayed", error=str(error))
        self.last_error = str(error)
