"""The appender: one task a node, from committed WAL records to chained rows.

For each batch, in one Postgres transaction::

    1. pass the fence (wal_positions: my epoch, the chained LSN I left) and lock the touched heads in tenant order
    2. give new tenants their head
    3. read which keyed lines are chained; decide duplicates and proposals, assign seq, link  (write.pending.linking)
    4. COPY the rows, store the keyed lines, move the heads
    5. commit; only then do outcomes resolve and the chained watermark rise

While Postgres stores this batch (4), step 3 of the next is done as its records become committed, where it begins no
tenant and holds no proposal; while this one is committed (5), the rows of the next are copied
(app.write.chain.storing_ahead). Both count only if the heads are then where this one left them.

Invariants::

    chained_lsn in Postgres == LSN of the last event of the last committed batch
    node.chained.lsn <= chained_lsn in Postgres
    a chain whose head went below one that this node has seen, or changed under the same seq, is never extended

What Postgres answers decides what happens next:

=================================  ==============================================================
the answer to COMMIT is lost       read the position under lock: new = it was committed, old = again. One statement that
                                   chains at once may be so later: it is asked again where the fence lets nobody through
the fence does not let through     another epoch = fenced, stop; lower position = it went back, stop
an entry is there already           look up what the chain holds of the batch: what was imported while this node
                                   was away is not chained again; another event with that HLC makes a CONFLICT
SQLSTATE class 22, 23, 54          halve the batch; a single event is chained as REFUSED instead
the same of the fence alone        no record is at fault: again, with pauses, until it passes
a row in the way of an entry, a    the tenant is quarantined and its events are held back (write.pending.quarantine);
head that is not as left, fewer    all others go on: the fence, which held, says that the database did not go back
rows stored than were sent
rows that another session keeps    the tenant is passed over, its records wait in memory and, by where they begin, in
locked for LOCK_TIMEOUT_S          held.json; they are chained once the rows are free (app.write.chain.locked_tenants)
anything else                      again, with growing pauses, for as long as it takes
=================================  ==============================================================
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import NamedTuple

import asyncpg
import structlog

from app.runtime.database_faults import DATABASE_FAULTS
from app.runtime.metrics import Metrics
from app.runtime.state.found_breaks import FoundBreaks
from app.runtime.state.node import HISTORY_READ, Node
from app.store import chaining, idempotency
from app.store.chaining import ChainHead, Step
from app.store.chaining_at_once import AtOnce
from app.store.entry_check import EntryCheck
from app.store.growth import head_of
from app.write.chain import previous
from app.write.chain.at_once import LinkingAtOnce
from app.write.chain.fence import is_moved
from app.write.chain.linking_ahead import LinkingAhead
from app.write.chain.locked_tenants import LockedTenants
from app.write.chain.promised import Promised
from app.write.chain.seen_heads import SeenHeads
from app.write.chain.storing_ahead import ENTRIES_MIN, StoringAhead
from app.write.pending.backlog import Backlog, Pending
from app.write.pending.linking import LinkedBatch, link_batch, tenants_begun_by, tenants_decided_by
from app.write.pending.quarantine import Quarantine
from ledger.chain import Linker
from ledger.errors import (
    ChainDamagedError,
    LedgerError,
)
from ledger.positions import Lsn

BATCH_ENTRIES_MAX = 4000
"""Most events in one transaction: enough to spread the commit, few enough to keep the latency of one low."""
BATCH_BYTES_MAX = 1 << 20
"""Most payload bytes in one transaction: they are linked in one turn of the event loop."""
COLLECT_S = 0.1
"""How long records that nobody waits for come together before they are chained: a transaction costs as much as linking
and storing a hundred of them."""
RETRY_PAUSE_FIRST_S = 0.05
RETRY_PAUSE_MAX_S = 2.0
OVERDUE_S = 10.0
"""How long a batch may take before somebody is told."""
APPENDER = "appender"
"""The part of the node that breaks met here are reported by."""

log = structlog.get_logger()

ChainedCallback = Callable[[LinkedBatch], None]
Connect = Callable[[], Awaitable["asyncpg.Connection[asyncpg.Record]"]]


class _Sent(NamedTuple):
    """A batch that went to PostgreSQL in one statement."""

    linked: LinkedBatch
    is_chained: bool
    """Whether that is known; else it may still be chained, or never."""


class Appender:
    """Chains the backlog of one node. ``on_chained`` runs after each commit, before outcomes resolve."""

    def __init__(
        self,
        *,
        node: Node,
        backlog: Backlog,
        connect: Connect,
        pool: asyncpg.Pool[asyncpg.Record],
        heads: dict[str, ChainHead],
        quarantine: Quarantine,
        breaks: FoundBreaks,
        entry_check: EntryCheck,
        metrics: Metrics,
        on_chained: ChainedCallback,
        on_failure: Callable[[LedgerError], None],
    ) -> None:
        self._node = node
        self._backlog = backlog
        self._connect = connect
        self._connection: asyncpg.Connection[asyncpg.Record] | None = None
        self.heads = SeenHeads(node, quarantine, heads)
        self._quarantine = quarantine
        self._breaks = breaks
        self._metrics = metrics
        self._on_chained = on_chained
        self._on_failure = on_failure
        self._linkers: dict[str, Linker] = {}
        self._ahead = LinkingAhead(pool, self._linkers)
        self.promised = Promised(entry_check, pool, lambda tenant_id, found: breaks.report(tenant_id, found, APPENDER))
        self._at_once = LinkingAtOnce(self.heads.known, self.promised, self._linkers)
        self._storing: StoringAhead | None = None
        """While ``run`` goes on."""
        self._is_returning = False
        """Whether the last batch held records that were in the chain already, imported while this node was away: then
        the next one probably does too, and what stands in the chain is looked up first."""
        self._work = asyncio.Event()
        self._drained = asyncio.Event()
        self._collecting: asyncio.TimerHandle | None = None
        self._locked = LockedTenants(
            quarantine,
            backlog,
            is_reading=self.promised.is_reading,
            connected=self._connected,
            on_fault=self._retry_later,
            on_due=self._work.set,
        )
        self._began_s: float | None = None
        """When the batch under way began, None while none is."""
        self.database_error: str | None = None
        """Why the last attempt failed, None while all is well."""

    @property
    def is_chaining(self) -> bool:
        """Whether a transaction is under way; ``on_chained`` is called at its end, if it is committed."""
        return self._began_s is not None

    @property
    def fault(self) -> str | None:
        """Why nothing is chained, None while all is well."""
        if self.database_error is not None or self._began_s is None:
            return self.database_error
        took_s = time.monotonic() - self._began_s
        return f"PostgreSQL has not taken a batch for {took_s:.0f} s" if took_s >= OVERDUE_S else None

    def head_seq(self, tenant_id: str) -> int:
        """Where the tenant's chain ends, as far as this node has seen; 0 where it has not."""
        head = self.heads.known.get(tenant_id)
        return 0 if head is None else head.seq

    def wake(self) -> None:
        """There may be newly committed records, or somebody waits for one: then, or when they fill a batch or half of
        the backlog, or are stored ahead, they are chained at once, else within ``COLLECT_S``."""
        self._ahead.more()
        if self.is_chaining or not self._has_committed():
            return  # ``run`` looks again behind the transaction, and the WAL calls once something is committed
        chained = self._node.chained
        is_due = (self._storing and self._storing.batch) or self._backlog.is_due(BATCH_ENTRIES_MAX, BATCH_BYTES_MAX)
        if is_due or chained.wanted_lsn > chained.lsn:
            self._work.set()
        elif self._backlog and self._collecting is None:
            self._collecting = asyncio.get_running_loop().call_later(COLLECT_S, self._collected)

    def _collected(self) -> None:
        self._collecting = None
        self._work.set()

    async def run(self) -> None:
        """Chain what is committed, for ever; ends by cancellation, or when the node has failed."""
        self._storing = StoringAhead(self._connect)
        try:
            while True:
                await self._work.wait()
                self._work.clear()
                await self._locked.chain_free(self._waiting_of, self._chain_next)
                if batch := self._next():
                    await self._chain_next(batch)
                    self.wake()
                if not self._has_committed():
                    self._drained.set()
        except LedgerError as error:
            log.error("appender_stopped", error=str(error))
            self._on_failure(error)
        finally:
            self._drained.set()
            self._ahead.cancel()
            self.promised.cancel()
            self._storing.cancel()
            self._storing = None
            if self._connection is not None:
                self._connection.terminate()

    async def drain(self, timeout_s: float) -> None:
        """Have ``run`` chain all that is committed, as far as it comes within ``timeout_s`` seconds."""
        deadline_s = time.monotonic() + timeout_s
        while self._has_committed() and (left_s := deadline_s - time.monotonic()) > 0:
            self._drained.clear()
            self._work.set()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._drained.wait(), left_s)

    async def chain_committed(self) -> None:
        """Chain all that is committed now.

        Raises:
            LedgerError: the node cannot go on.
        """
        while batch := self._next():
            await self._chain(batch)

    def _has_committed(self) -> bool:
        return self._backlog.has_committed(self._node.committed.lsn)

    def _next(self) -> list[Pending]:
        """The next batch; what was linked ahead of it is not looked at once more."""
        if self._storing and self._backlog.begins_with(self._storing.batch):
            return list(self._storing.batch)
        linked = self._ahead.batch
        if self._backlog.begins_with(linked):
            return [*linked, *self._peek_following(0, len(linked), self._ahead.payload_bytes)]
        return self._backlog.peek(self._node.committed.lsn, BATCH_ENTRIES_MAX, BATCH_BYTES_MAX)

    def _waiting_of(self, tenant_id: str) -> Sequence[Pending]:
        """The first batch of a tenant that is passed over."""
        return self._backlog.peek_aside(tenant_id, BATCH_ENTRIES_MAX, BATCH_BYTES_MAX)

    # --- one batch --------------------------------------------------------------------------------

    async def _chain_next(self, batch: Sequence[Pending]) -> None:
        self._began_s = time.monotonic()
        try:
            await self._chain(batch)
        finally:
            self._began_s = None

    async def _chain(self, batch: Sequence[Pending]) -> None:
        """Chain ``batch``, splitting it when Postgres refuses a record in it."""
        try:
            linked = await self._commit(batch, refused_sqlstate=None)
        except asyncpg.PostgresError as error:
            if isinstance(error, asyncpg.UniqueViolationError) and not self._is_returning:
                log.warning("records_chained_by_another_way", lsn=batch[0].lsn, error=str(error))
                self._is_returning = True
                await self._chain(batch)
                return
            if await self._waited_for_fence(batch):
                await self._chain(batch)
                return
            if len(batch) > 1:
                middle = len(batch) // 2
                await self._chain(batch[:middle])
                await self._chain(batch[middle:])
                return
            linked = await self._chain_refused(batch[0], error)
        self._publish(batch, linked)
        await self._quarantine.release(batch)

    async def _chain_refused(self, pending: Pending, error: asyncpg.PostgresError) -> LinkedBatch:
        """What becomes of the one event that Postgres will not take: a REFUSED entry takes its place or, when that
        will not go in either, or a row that is not of the chain is in its place, its tenant is quarantined."""
        log.error("record_refused", lsn=pending.lsn, sqlstate=error.sqlstate, error=str(error))
        if not isinstance(error, asyncpg.UniqueViolationError):
            try:
                return await self._commit((pending,), refused_sqlstate=error.sqlstate)
            except asyncpg.PostgresError as again:
                error = again
        reason = f"Postgres refuses its next entry ({error.sqlstate}): {error}"
        self._begin_quarantine(ChainDamagedError(pending.tenant_id, reason), APPENDER)
        return await self._commit((pending,), refused_sqlstate=None)

    async def _waited_for_fence(self, batch: Sequence[Pending]) -> bool:
        """Whether PostgreSQL would not even move the position of the node: then no record is at fault. Returns once it
        would."""
        waited = False
        while True:
            try:
                connection = await self._connected()
                rehearsal = connection.transaction()
                await rehearsal.start()
                new_lsn = max(self._node.chained.lsn, batch[-1].lsn)
                await chaining.advance_and_lock(connection, self._step_to(new_lsn), ())
                await chaining.check_deferred(connection)
                await rehearsal.rollback()
                return waited
            except DATABASE_FAULTS as error:
                waited = True
                self._retry_later(error)
                await asyncio.sleep(RETRY_PAUSE_MAX_S)

    def found_damaged(self, error: ChainDamagedError) -> None:
        """An import found the rows of a tenant damaged: no entry is appended to it."""
        if error.tenant_id not in self._quarantine:
            self._begin_quarantine(error, "import")

    def _begin_quarantine(self, error: ChainDamagedError, met_by: str) -> None:
        self._breaks.report_error(error, met_by)
        self._quarantine.begin(error.tenant_id, error.reason, self.heads.known.get(error.tenant_id), self._backlog)

    def _publish(self, batch: Sequence[Pending], linked: LinkedBatch) -> None:
        self._ahead.pause()
        self._backlog.drop(batch, self._quarantine.locked)
        self._is_returning = linked.is_returning
        for tenant_id, t_hlc, lsn in linked.conflicts:
            log.error("hlc_conflict", tenant_id=tenant_id, hlc=t_hlc, lsn=lsn)
        for tenant, links in linked.links.items():
            self.heads.known[tenant] = head_of(links)
        self.promised.chained(linked)
        self._metrics.chain_entries.inc(len(linked.log_rows))
        self._on_chained(linked)
        linked.settle(batch, self._quarantine.locked)
        self._node.chained.advance(batch[-1].lsn)

    async def _commit(self, batch: Sequence[Pending], *, refused_sqlstate: str | None) -> LinkedBatch:
        """Run the transaction until it is known to be committed.

        Raises:
            asyncpg.PostgresError: Postgres refuses the data, SQLSTATE class 22, 23 or 54; nothing was stored.
            FencedError: another process took over this WAL.
            DatabaseWentBackError: Postgres lost what it had.
        """
        new_lsn = max(self._node.chained.lsn, batch[-1].lsn)
        if (stored := await self._commit_stored(batch, new_lsn)) is not None:
            return stored
        unanswered: LinkedBatch | None = None
        if refused_sqlstate is None and (sent := await self._commit_at_once(batch, new_lsn)) is not None:
            if sent.is_chained:
                self.database_error = None
                return sent.linked
            unanswered = sent.linked
        pause_s = RETRY_PAUSE_FIRST_S
        while True:
            linked = unanswered
            try:
                await self._drop_stored()
                await self._quarantine.hold(batch)
                connection = await self._connected()
                decided = [name for name in tenants_decided_by(batch) if name not in self._quarantine]
                if waiting := await self.promised.prepare(connection, decided):
                    self._locked.begin(waiting, HISTORY_READ)
                    continue
                transaction = connection.transaction()
                await transaction.start()
                try:
                    linked = await self._write(connection, batch, new_lsn, refused_sqlstate)
                except (asyncpg.PostgresError, ChainDamagedError):
                    await transaction.rollback()
                    raise
                await self._quarantine.hold(batch)  # a tenant may be found damaged meanwhile, and be passed over
                await transaction.commit()
                self.database_error = None
                return linked
            except ChainDamagedError as error:
                self._begin_quarantine(error, APPENDER)
                continue
            except asyncpg.LockNotAvailableError as error:
                if await self._locked.found(batch):
                    continue
                self._retry_later(error)
            except asyncpg.PostgresError as error:
                if chaining.is_record_fault(error):
                    raise
                self._retry_later(error)
            except DATABASE_FAULTS as error:
                self._retry_later(error)
            if linked is not None and await self._was_committed(new_lsn):
                self.database_error = None
                return linked
            await self._drop_stored()
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, RETRY_PAUSE_MAX_S)

    async def _commit_stored(self, batch: Sequence[Pending], new_lsn: Lsn) -> LinkedBatch | None:
        """Commit what was stored ahead, if that is ``batch`` as it is to be chained; None when nothing of it is left,
        and all is to be done as usual."""
        storing = self._storing
        if storing is None or storing.ahead is None or storing.batch != batch or self._quarantine:
            return None
        linked = storing.ahead.linked
        self._link_ahead(batch, linked)
        if (stored := await storing.take(self._connection)) is None:
            return None
        self._connection, is_sent = stored.connection, False
        self._store_ahead()
        try:
            if not self._quarantine and await stored.move(self._step_to(new_lsn)):
                is_sent = True
                await stored.commit()
                self.database_error = None
                return linked
        except DATABASE_FAULTS as error:
            log.debug("not_committed_ahead", error=str(error))
        await storing.end(stored)
        return linked if is_sent and await self._was_committed(new_lsn) else None

    async def _commit_at_once(self, batch: Sequence[Pending], new_lsn: Lsn) -> _Sent | None:
        """Chain a small batch in one statement; None, and nothing is done, where that is not to be.

        Of a statement without an answer PostgreSQL may still have to begin the first step, so unlike a transaction that
        has passed the fence it may come into effect though its position was found as it was.
        """
        is_usual = not self._quarantine and not self._is_returning and batch[0].lsn > self._node.chained.lsn
        if not is_usual or (at_once := self._at_once.link(batch)) is None:
            return None
        try:
            await self._drop_stored()
            self._ahead.cancel()
            outcome = await at_once.commit(await self._connected(), self._step_to(new_lsn))
            if outcome is AtOnce.CHAINED:
                return _Sent(at_once.linked, is_chained=True)
            if outcome is AtOnce.ELSEWHERE:
                self._at_once.pause()
            return None
        except DATABASE_FAULTS as error:
            if isinstance(error, asyncpg.PostgresError) and chaining.is_record_fault(error):
                return None
            self._at_once.pause()
            if isinstance(error, asyncpg.LockNotAvailableError | asyncpg.DeadlockDetectedError):
                return None
            self._retry_later(error)
        return _Sent(at_once.linked, is_chained=await self._was_committed(new_lsn))

    async def _drop_stored(self) -> None:
        """Leave nothing of what was stored ahead: it was linked onto a batch that may become another."""
        self._ahead.pause()
        if self._storing is not None:
            await self._storing.drop()

    def _store_ahead(self) -> None:
        """Store what is linked of the next batch while this one is committed."""
        if self._storing is not None and self._storing.may_start:
            self._ahead.hand_over(ENTRIES_MIN, self._storing.start)

    def _retry_later(self, error: Exception) -> None:
        if self.database_error is None:
            log.warning("chaining_interrupted", error=str(error), kind=type(error).__name__)
        self.database_error = f"{type(error).__name__}: {error}"
        if self._connection is not None:
            self._connection.terminate()
            self._connection = None

    async def _connected(self) -> asyncpg.Connection[asyncpg.Record]:
        if self._connection is None or self._connection.is_closed():
            self._connection = await self._connect()
        return self._connection

    async def _was_committed(self, new_lsn: Lsn) -> bool:
        """Whether the transaction whose COMMIT got no answer took effect."""
        while True:
            try:
                connection = await self._connected()
                async with connection.transaction():
                    position = await chaining.read_position(connection, self._node.node_id)
                    return is_moved(position, self._node, new_lsn)
            except DATABASE_FAULTS as error:
                self._retry_later(error)
                await asyncio.sleep(RETRY_PAUSE_MAX_S)

    # --- inside the transaction -------------------------------------------------------------------

    async def _write(
        self,
        connection: asyncpg.Connection[asyncpg.Record],
        batch: Sequence[Pending],
        new_lsn: Lsn,
        refused_sqlstate: str | None,
    ) -> LinkedBatch:
        # 1. the fence and the heads
        quarantine = self._quarantine
        tenants = {pending.tenant_id for pending in batch if pending.tenant_id not in quarantine}
        begun = {name for name in tenants_begun_by(batch) if name not in quarantine}
        heads = await chaining.advance_and_lock(connection, self._step_to(new_lsn), sorted(tenants | begun))
        if heads is None:
            is_moved(await chaining.read_position(connection, self._node.node_id), self._node, new_lsn)
            raise asyncpg.InterfaceError("the fence refused once and then held; trying again")

        # 2. heads of new tenants
        new_tenants: set[str] = set()
        if missing := (tenants | begun) - heads.keys():
            self.heads.check_never_seen(missing)
            new_tenants = await chaining.create_heads(connection, sorted(missing))
            if new_tenants != missing:
                begun_elsewhere = await chaining.read_heads(connection, sorted(missing - new_tenants))
                for tenant in sorted(missing - new_tenants - begun_elsewhere.keys()):
                    raise ChainDamagedError(tenant, "PostgreSQL dropped its new row of scheduler.chain_heads")
                raise asyncpg.InterfaceError("another node began the same tenant; trying again")
            heads.update((tenant, ChainHead(0, None, None)) for tenant in missing)
        new_tenants |= await previous.begun_unrecorded(connection, begun - new_tenants)
        self.heads.learn_time(heads, await self.heads.check(connection, heads))

        # 3. decide and link, unless that was done ahead
        decided = tenants_decided_by(batch)
        machines = await self.promised.at(connection, {name: heads[name] for name in sorted(decided & heads.keys())})
        is_usual = refused_sqlstate is None and not new_tenants and not decided and not self._quarantine
        linked = await self._ahead.take(connection, batch, heads) if is_usual else None
        if linked is None:
            self._is_returning = self._is_returning or batch[0].lsn <= self._node.chained.lsn
            chained = await previous.standing(connection, batch) if self._is_returning else None
            linked = link_batch(
                batch,
                heads=heads,
                new_tenants=new_tenants,
                chained_keys=await previous.chained_keys(
                    connection, [each for each in batch if each.tenant_id in heads]
                ),
                linkers=self._linkers,
                chained=chained,
                machines=machines,
                refused_sqlstate=refused_sqlstate,
                held_back=self._quarantine.outcome_of if self._quarantine else None,
            )

        # 4. store
        if linked.log_rows:
            on_sent = partial(self._link_ahead, batch, linked)
            await chaining.copy_entries(connection, linked.log_rows, on_sent)
            self._store_ahead()
        if linked.idempotency_rows:
            await idempotency.store_lines(connection, linked.idempotency_rows)
        if linked.links:
            await chaining.move_heads(connection, linked.heads())
        return linked

    def _step_to(self, new_lsn: Lsn) -> Step:
        """What the fence must let through."""
        node = self._node
        return Step(node.node_id, node.epoch, node.chained.lsn, new_lsn, node.committed.lsn)

    def _link_ahead(self, batch: Sequence[Pending], linked: LinkedBatch) -> None:
        """Link the next batch while PostgreSQL stores the rows of this one."""
        if not self._is_returning and not self._quarantine:
            self._ahead.start(partial(self._peek_following, len(batch)), linked, self.heads.known)

    def _peek_following(self, stored: int, linked: int, linked_bytes: int) -> Sequence[Pending]:
        """What comes behind so many records of this batch and of the next one, as far as that has room."""
        bytes_max = BATCH_BYTES_MAX - linked_bytes
        entries_max, committed_lsn = BATCH_ENTRIES_MAX - linked, self._node.committed.lsn
        piece = self._backlog.peek(committed_lsn, entries_max, bytes_max, skip=stored + linked)
        is_next = piece and piece[0].lsn > self._node.chained.lsn and (not linked or len(piece[0].payload) <= bytes_max)
        return piece if is_next else []
