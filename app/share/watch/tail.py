"""The tails of the chains that are watched: one read of each chain for all who watch it.

A tail follows the end of its chain. What this node chained itself it has in memory, and asks PostgreSQL only what that
gave the rows; what others chained it reads. Each entry is encoded once and kept while there is room::

    seq                 up to here the tail has come; <= head_seq, where it is known that the chain ends
    first_seq .. seq    kept, in blocks without a gap; the oldest go first

Who wants what lies before that reads it from the log, page by page (``Tails.page``): so does whoever starts from a
position that it kept, until it meets the tail.

What others chained is found by looking at the heads of watched chains every ``LOOK_INTERVAL_S``. A chain that nobody
watches costs nothing. All of it is done in turns of one share of the event loop, so the writer does not wait.
"""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_right
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Final, Protocol

import structlog

from app.runtime.sharing import Share
from app.runtime.tasks import kept_running
from app.share.watch.blocks import Block, DcsOfJobs, Wanted, blocks_of, jobs_in_question
from app.store import Connection, chain_reads
from app.store.appended import AppendedEntries
from app.store.chain_reads import ListedEntry
from app.store.chaining import LOG_COLUMNS, Piece, RecentRows
from app.store.entry_check import Report
from app.store.job_table import JobFolds
from app.store.reading import Pool, reading
from ledger.errors import ChainDamagedError, DatabaseUnavailableError, TenantNotFoundError
from ledger.machines import jobs
from ledger.verification.verdict import damaged

LOOK_INTERVAL_S: Final = 0.2
"""How often it is looked what others chained."""
RETRY_PAUSE_S: Final = 1.0
"""Rest before what the database did not answer is read again."""
ENTRIES_A_READ: Final = 200
"""Entries that a tail takes in at a time."""
ENTRIES_BEFORE: Final = 500
"""Entries before the end with which a tail begins: of many who come back together, most had come further than that."""
PAGE_ENTRIES: Final = 64
"""Entries that are read at a time for one who is behind the tail: about a block of them."""
READS_MAX: Final = 4
"""Reads of PostgreSQL at once, for all."""
TAILS_BYTES_MAX: Final = 64 << 20
"""Bytes of the events that all tails keep together, each its part of it; what is chosen of them comes on top, once."""
TAIL_BYTES_MAX: Final = 8 << 20
"""Bytes of the events that one tail keeps."""
ROWS_BYTES_MAX: Final = 8 << 20
"""Bytes of rows that this node chained and a tail has not taken in; what goes beyond is read back."""
READ_S: Final = 300e-6
"""What one statement takes of the event loop, about: the driver does it at no time of ours."""
ROW_READ_S: Final = 25e-6
"""What each row takes beside that."""
STAMP_READ_S: Final = 5e-6
"""What each row takes of which only that is read which PostgreSQL gave it."""
DCS_READ_S: Final = 30e-6
"""What it takes to find out the data centres that an entry concerns."""

_SEQ = LOG_COLUMNS.index("seq")

log = structlog.get_logger()


class Waiter(Protocol):
    """Who is to be woken when there is more."""

    def more(self, block: Block) -> bool:
        """``block``, the newest, may hold something for it; false when it waits on."""
        ...

    def end(self) -> None:
        """There will be no more."""
        ...


class Tail:
    """The end of one chain, as those who watch it see it. Belongs to one event loop."""

    def __init__(self, tenant_id: str, seq: int) -> None:
        """Follows the chain from behind ``seq`` on."""
        self.tenant_id = tenant_id
        self.seq = self.head_seq = seq
        self.users = 0
        self.dc_users = 0
        """How many of them want to know which data centres entries concern."""
        self.error: ChainDamagedError | None = None
        """Why there will be no more."""
        self.grown = asyncio.Event()
        """Set while ``seq < head_seq``."""
        self.moved = asyncio.Event()
        """Set, and replaced, when ``seq`` rises or the tail fails."""
        self._blocks: list[Block] = []
        self._bytes = 0
        self.rows = RecentRows()
        """The newest rows that this node chained and that are not taken in."""
        self._waiting: dict[Wanted, dict[Waiter, None]] = {}

    @property
    def first_seq(self) -> int:
        """The oldest entry that is kept; ``seq + 1`` where none is."""
        return self._blocks[0].first_seq if self._blocks else self.seq + 1

    def after(self, seq: int) -> Block | None:
        """The block that holds the entry after ``seq``; None where that is not kept, or is not there yet."""
        if not self.first_seq <= seq + 1 <= self.seq:
            return None
        return self._blocks[bisect_right(self._blocks, seq + 1, key=lambda block: block.first_seq) - 1]

    def wait(self, wanted: Wanted, waiter: Waiter) -> None:
        """Wake the waiter once, with the next block that holds something that is wanted."""
        self._waiting.setdefault(wanted, {})[waiter] = None

    def leave(self, wanted: Wanted, waiter: Waiter) -> bool:
        """Wake the waiter no more; whether it would have been."""
        waiting = self._waiting.get(wanted, {})
        if waiter not in waiting:
            return False
        del waiting[waiter]
        if not waiting:
            del self._waiting[wanted]
        return True

    async def grown_beyond(self, seq: int) -> None:
        """Return once the tail has an entry behind ``seq``.

        Raises:
            ChainDamagedError: there will be no more.
        """
        while self.seq <= seq:
            if self.error is not None:
                raise self.error
            await self.moved.wait()

    # --- growing ----------------------------------------------------------------------------------

    def hear(self, head_seq: int) -> None:
        """The chain ends at ``head_seq`` at least."""
        if head_seq > self.head_seq:
            self.head_seq = head_seq
            self.grown.set()

    def chained(self, piece: Piece) -> None:
        """This node chained these; of two calls that wait, in whatever order."""
        self.rows.add(piece)
        if self.rows.size_bytes > ROWS_BYTES_MAX:
            self.rows = RecentRows()
        self.hear(piece.last_seq)

    def take(self, block: Block, bytes_max: int) -> None:
        """Keep the block, which comes next, and wake who waits for something in it."""
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

    def fail(self, error: ChainDamagedError) -> None:
        """There will be no more."""
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

    def __init__(self, pool: Pool, share: Share, folds: JobFolds, report: Report) -> None:
        """``report`` is given each error that says that stored rows are damaged, and the part that met it."""
        self._pool = pool
        self._folds = folds
        self._check = folds.check
        self._report = report
        self.share = share
        self._tails: dict[str, Tail] = {}
        self._following: dict[str, asyncio.Task[None]] = {}
        self._reads = asyncio.Semaphore(READS_MAX)
        self._watched = asyncio.Event()
        """Set while something is watched."""
        self.last_error: str | None = None

    @asynccontextmanager
    async def watching(self, tenant_id: str, *, with_dcs: bool = False) -> AsyncIterator[Tail]:
        """The tail of the tenant's chain, which is followed until all have left it. Entries that come say which data
        centres they concern while somebody asked ``with_dcs``.

        Raises:
            TenantNotFoundError: there is no such tenant.
            DatabaseUnavailableError: Postgres does not answer.
        """
        tail = self._tails.get(tenant_id)
        if tail is None:
            head_seq = await self.head_seq(tenant_id)
            tail = self._tails.get(tenant_id) or self._begin(tenant_id, head_seq)
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
        """The entries that follow ``after_seq``, which MUST be before the end of the tail, read from the log.

        Raises:
            ChainDamagedError: an entry is missing, or a row is damaged.
            DatabaseUnavailableError: Postgres does not answer.
        """
        async with self._reads:
            async with reading(self._pool) as connection:
                listed, _ = await chain_reads.list_entries(connection, tail.tenant_id, after_seq + 1, PAGE_ENTRIES)
                await self._check.require(connection, tail.tenant_id, [entry.columns for entry in listed])
                dcs = await self._dcs(connection, tail.tenant_id, listed) if with_dcs else None
            await self.share.turn()
        self.share.spent(READ_S + ROW_READ_S * len(listed))
        return self._encoded(tail, after_seq, listed, dcs)[0]

    # --- following --------------------------------------------------------------------------------

    def chained(self, appended: AppendedEntries) -> None:
        """This node chained ``appended``; as ``TableFollower.chained``."""
        if not self._tails:
            return
        for piece in appended.log_rows.pieces:
            tail = self._tails.get(piece.tenant_id)
            if tail is not None:
                tail.chained(piece)

    async def run(self) -> None:
        """Look what others chained, until cancelled."""
        while True:
            await self._watched.wait()
            try:
                async with reading(self._pool) as connection:
                    heads = await chain_reads.head_seqs(connection, [*self._tails])
                for tenant_id, head_seq in heads.items():
                    if (tail := self._tails.get(tenant_id)) is not None:
                        tail.hear(head_seq)
                self.last_error = None
            except DatabaseUnavailableError as error:
                self._note(error)
            await asyncio.sleep(LOOK_INTERVAL_S)

    def _begin(self, tenant_id: str, head_seq: int) -> Tail:
        tail = self._tails[tenant_id] = Tail(tenant_id, max(0, head_seq - ENTRIES_BEFORE))
        tail.hear(head_seq)
        self._following[tenant_id] = asyncio.get_running_loop().create_task(kept_running(partial(self._follow, tail)))
        self._watched.set()
        return tail

    def _end(self, tail: Tail) -> None:
        if self._tails.get(tail.tenant_id) is tail:
            del self._tails[tail.tenant_id]
            self._following.pop(tail.tenant_id).cancel()
        if not self._tails:
            self._watched.clear()
            self.last_error = None

    async def _follow(self, tail: Tail) -> None:
        """Take in what is chained, until cancelled or the chain turns out to be damaged."""
        while True:
            await tail.grown.wait()
            try:
                async with self._reads:
                    blocks = await self._next_blocks(tail)
            except DatabaseUnavailableError as error:
                self._note(error)
                await asyncio.sleep(RETRY_PAUSE_S)
            except ChainDamagedError as error:
                log.error("watch_ended", tenant_id=tail.tenant_id, error=str(error))
                self._report(error, "watch")
                del self._tails[tail.tenant_id], self._following[tail.tenant_id]
                tail.fail(error)
                return
            else:
                self.last_error = None
                await self._take(tail, blocks)

    async def _take(self, tail: Tail, blocks: Sequence[Block]) -> None:
        """Hand on what was read, block by block: who waits for one has his turn before the next comes."""
        for block in blocks:
            began_s = time.thread_time()
            tail.take(block, min(TAIL_BYTES_MAX, TAILS_BYTES_MAX // len(self._tails)))
            self.share.spent(time.thread_time() - began_s)
            await self.share.turn()

    async def _next_blocks(self, tail: Tail) -> list[Block]:
        rows, dcs = tail.rows.after(tail.seq, ENTRIES_A_READ), None
        async with reading(self._pool) as connection:
            if rows:
                stamps = await chain_reads.stamps(connection, tail.tenant_id, tail.seq + 1, rows[-1][_SEQ])
                self.share.spent(READ_S + STAMP_READ_S * len(stamps))
                listed = [
                    ListedEntry._make((stamp.id, *row, stamp.created_at))
                    for row, stamp in zip(rows, stamps, strict=False)
                    if stamp.seq == row[_SEQ]
                ]
            else:
                listed, _ = await chain_reads.list_entries(connection, tail.tenant_id, tail.seq + 1, ENTRIES_A_READ)
                await self._check.require(connection, tail.tenant_id, [entry.columns for entry in listed])
                self.share.spent(READ_S + ROW_READ_S * len(listed))
            if tail.dc_users:
                dcs = await self._dcs(connection, tail.tenant_id, listed)
        return self._encoded(tail, tail.seq, listed, dcs)

    def _encoded(
        self, tail: Tail, after_seq: int, listed: Sequence[ListedEntry], dcs_of_jobs: DcsOfJobs | None
    ) -> list[Block]:
        if not listed:
            raise damaged(tail.tenant_id, "gap", after_seq + 1, f"the entry of seq {after_seq + 1} is missing")
        began_s = time.thread_time()
        blocks = blocks_of(tail.tenant_id, after_seq, listed, dcs_of_jobs)
        if dcs_of_jobs is not None:
            self.share.spent(READ_S + DCS_READ_S * len(listed))
        self.share.spent(time.thread_time() - began_s)
        return blocks

    async def _dcs(self, connection: Connection, tenant_id: str, listed: Sequence[ListedEntry]) -> DcsOfJobs:
        """The data centres of the jobs that must be asked for it."""
        found: dict[str, frozenset[str] | None] = {}
        for job in await self._folds.read(connection, [(tenant_id, job_id) for job_id in jobs_in_question(listed)]):
            try:
                state, _ = await self._folds.fold(connection, job)
                found[job.span.job_id] = frozenset() if state is None else jobs.dcs_of(state)
            except ChainDamagedError as error:
                # It is not known whom the job's entries concern, so all clients get them.
                self._report(error, "watch")
                found[job.span.job_id] = None
        return found

    async def head_seq(self, tenant_id: str) -> int:
        """Where the chain ends now.

        Raises:
            as ``watching``.
        """
        async with reading(self._pool) as connection:
            found = await chain_reads.head_seqs(connection, [tenant_id])
        if tenant_id not in found:
            raise TenantNotFoundError(f"there is no tenant {tenant_id}")
        return found[tenant_id]

    def _note(self, error: DatabaseUnavailableError) -> None:
        if self.last_error is None:
            log.warning("watch_delayed", error=str(error))
        self.last_error = str(error)
