"""The appender: one task per node, from committed WAL records to chained rows.

A record is committed once a quorum of the log holds it; a batch is ``Committed`` once PostgreSQL stored it.

For each batch::

    1. read what the chains hold of it; most of that is in memory                         (write.chain.view)
    2. decide duplicates and proposals, assign seq, link                                  (write.pending.linking)
    3. list the records that are passed over on the disk                                  (write.pending.quarantine)
    4. commit: one transaction checks the fence, compares the heads under their locks, stores rows and keyed lines,
       moves heads and position                                                           (store.commit)
    5. only then resolve the outcomes and raise the chained watermark

While PostgreSQL commits a large batch, the rows of the next one are linked and copied            (write.chain.pipeline)

Invariants::

    chained_lsn in PostgreSQL == LSN of the last event of the last committed batch
    node.chained.lsn <= chained_lsn in PostgreSQL

The answer to the commit decides the next step:

==============  ======================================================================================================
Committed       publish
HeadsMoved      read the heads again, link again
KeysChained     read the chained lines of the keys, link again
RowRefused      a row exists already: the events were imported while this node was down. Read their entries, link again.
                Otherwise halve the batch; a REFUSED entry takes the place of a single event. If PostgreSQL refuses
                that too, the tenant is quarantined. If PostgreSQL refuses even to move the position of the node, no
                record is at fault: retry
TenantDamaged   quarantine the tenant: its events are passed over, all others go on
RowsLocked      pass over the tenants whose rows are locked, until they are free           (write.pending.quarantine)
Fenced          read the position under lock: another epoch or a lower position stops the node. A position at the end of
                the batch means that an earlier, unanswered statement committed it
InDoubt         read the position under lock: it shows whether the batch was committed. If not, retry with growing
                pauses, without limit
==============  ======================================================================================================
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial

import asyncpg
from asyncpg.transaction import Transaction

from app.runtime.logs import log
from app.runtime.metrics import Metrics
from app.runtime.state.found_breaks import FoundBreaks
from app.runtime.state.node import HISTORY_READ, Node
from app.runtime.tasks import is_set_within
from app.store import chaining, commit
from app.store.appended import head_of
from app.store.chaining import ChainHead, Step, WalPosition
from app.store.commit import (
    Answer,
    Batch,
    Committed,
    Fenced,
    HeadsMoved,
    InDoubt,
    KeysChained,
    RowRefused,
    RowsLocked,
    TenantDamaged,
    or_in_doubt,
)
from app.store.commitments import FloorOf
from app.store.entry_check import EntryCheck
from app.write.chain import view as views
from app.write.chain.commitments import CommitmentMemory
from app.write.chain.pipeline import NextBatch, Pipeline
from app.write.chain.view import EMPTY_HEAD, Heads, is_moved
from app.write.pending.backlog import Backlog, Pending
from app.write.pending.linking import ChainView, KeyedLines, LinkedBatch, link, tenants_begun_by, tenants_decided_by
from app.write.pending.quarantine import Quarantine, WaitingTenants
from app.write.pending.requests import RequestName
from ledger.chain import Linker
from ledger.errors import ChainDamagedError, LedgerError
from ledger.positions import Lsn

BATCH_ENTRIES_MAX = 4000
"""Most events in one transaction: enough to amortise the commit, few enough to keep the latency low."""
BATCH_BYTES_MAX = 1 << 20
"""Most payload bytes in one transaction: they are linked in one turn of the event loop."""
PIPELINED_ENTRIES_MIN = 1000
"""Fewer are left to be chained with what comes meanwhile: a transaction costs as much as a hundred of them."""
COLLECT_S = 0.1
"""How long records that no caller waits for are collected before they are chained: a transaction costs as much as
linking and storing a hundred records."""
RETRY_PAUSE_FIRST_S = 0.05
RETRY_PAUSE_MAX_S = 2.0
OVERDUE_S = 10.0
"""How long a batch may take before that is reported as a fault."""
APPENDER = "appender"
"""The part of the node named in reports of breaks found here."""

ChainedCallback = Callable[[LinkedBatch], None]
Connect = Callable[[], Awaitable["asyncpg.Connection[asyncpg.Record]"]]


class _BatchAttempt:
    """State of one batch between attempts to commit it."""

    def __init__(self, batch: Sequence[Pending], *, checks_entries: bool) -> None:
        self.batch = batch
        self.checks_entries = checks_entries
        """Whether events of the batch may be in the chain already and must be looked up."""
        self.checks_keys = checks_entries
        """Whether its keyed lines may be in the chain already and must be looked up."""
        self.refused: RowRefused | None = None
        """Why a REFUSED entry takes the place of its one event."""
        self.linked: LinkedBatch | None = None
        """The batch as last linked."""
        self.in_doubt: LinkedBatch | None = None
        """The batch as first sent in a statement with an unknown outcome; the server may still execute it."""
        self.pause_s = RETRY_PAUSE_FIRST_S


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
        floor_of: FloorOf,
        metrics: Metrics,
        on_chained: ChainedCallback,
        on_failure: Callable[[LedgerError], None],
    ) -> None:
        self._node = node
        self._backlog = backlog
        self._connect = connect
        self._connection: asyncpg.Connection[asyncpg.Record] | None = None
        self.heads = Heads(node, quarantine, heads)
        self._quarantine = quarantine
        self._breaks = breaks
        self._metrics = metrics
        self._on_chained = on_chained
        self._on_failure = on_failure
        self._linkers: dict[str, Linker] = {}
        self._pipeline = Pipeline(connect)
        self._keyed: Mapping[RequestName, KeyedLines] = {}
        """The keyed lines of the last batch."""
        self._sent: tuple[Sequence[Pending], LinkedBatch] | None = None
        """The batch that PostgreSQL commits, once all of its rows were sent."""
        self.commitments = CommitmentMemory(
            entry_check, pool, lambda tenant_id, found: breaks.report(tenant_id, found, APPENDER), floor_of
        )
        self._expects_existing = False
        """Whether the last batch held records that were chained already, imported while this node was down. The next
        batch probably holds some, too."""
        self._work = asyncio.Event()
        self._drained = asyncio.Event()
        self._collecting: asyncio.TimerHandle | None = None
        self._waiting = WaitingTenants(
            quarantine,
            backlog,
            is_reading=self.commitments.is_reading,
            connected=self._connected,
            on_fault=self._reconnect,
            on_due=self._work.set,
        )
        self._began_s: float | None = None
        """Start time of the current batch, None between batches."""
        self.database_error: str | None = None
        """Why the last attempt failed, None after a success."""

    @property
    def is_chaining(self) -> bool:
        """Whether a batch is being chained; ``on_chained`` is called at its end, if it is committed."""
        return self._began_s is not None

    @property
    def fault(self) -> str | None:
        """Why nothing is chained, None if there is no fault."""
        if self.database_error is not None or self._began_s is None:
            return self.database_error
        took_s = time.monotonic() - self._began_s
        return f"PostgreSQL has not taken a batch for {took_s:.0f} s" if took_s >= OVERDUE_S else None

    def head_seq(self, tenant_id: str) -> int:
        """The last seq of the tenant's chain that this node has seen; 0 if none."""
        return self.heads.seen.get(tenant_id, EMPTY_HEAD).seq

    def wake(self) -> None:
        """Records may have been committed, or a request waits for one. If a request waits, a batch is full or the
        backlog half full, chaining starts immediately, else within ``COLLECT_S``."""
        if self.is_chaining:
            self._copy_next()
            return  # ``run`` checks again after the transaction
        if not self._has_committed():
            return  # the WAL calls once a record is committed
        chained = self._node.chained
        if self._backlog.is_due(BATCH_ENTRIES_MAX, BATCH_BYTES_MAX) or chained.wanted_lsn > chained.lsn:
            self._work.set()
        elif self._backlog and self._collecting is None:
            self._collecting = asyncio.get_running_loop().call_later(COLLECT_S, self._collected)

    def _collected(self) -> None:
        self._collecting = None
        self._work.set()

    async def run(self) -> None:
        """Chain committed records until cancelled or the node has failed."""
        try:
            while True:
                await self._work.wait()
                self._work.clear()
                await self._waiting.chain_unblocked(self._next_of, self._chain_timed)
                if batch := self._next():
                    await self._chain_timed(batch)
                    self.wake()
                if not self._has_committed():
                    self._drained.set()
        except LedgerError as error:
            log.error("appender_stopped", error=str(error))
            self._on_failure(error)
        finally:
            self._drained.set()
            self._pipeline.close()
            self.commitments.cancel()
            if self._connection is not None:
                self._connection.terminate()

    async def drain(self, timeout_s: float) -> None:
        """Let ``run`` chain all committed records, for at most ``timeout_s`` seconds."""
        deadline_s = time.monotonic() + timeout_s
        while self._has_committed() and (left_s := deadline_s - time.monotonic()) > 0:
            self._drained.clear()
            self._work.set()
            await is_set_within(self._drained, left_s)

    async def chain_committed(self) -> None:
        """Chain all records that are committed now.

        Raises:
            LedgerError: the node cannot go on.
        """
        while batch := self._next():
            await self._chain(batch)

    def found_damaged(self, error: ChainDamagedError) -> None:
        """An import found the rows of a tenant damaged: quarantine the tenant."""
        if error.tenant_id not in self._quarantine:
            self._begin_quarantine(error, "import")

    def _has_committed(self) -> bool:
        return self._backlog.has_committed(self._node.committed.lsn)

    def _next(self) -> Sequence[Pending]:
        if self._backlog.begins_with(self._pipeline.batch):
            return self._pipeline.batch
        return self._backlog.peek(self._node.committed.lsn, BATCH_ENTRIES_MAX, BATCH_BYTES_MAX)

    def _next_of(self, tenant_id: str) -> Sequence[Pending]:
        """The first batch of a tenant that is passed over."""
        return self._backlog.peek_deferred(tenant_id, BATCH_ENTRIES_MAX, BATCH_BYTES_MAX)

    # --- one batch --------------------------------------------------------------------------------

    async def _chain_timed(self, batch: Sequence[Pending]) -> None:
        self._began_s = time.monotonic()
        try:
            await self._chain(batch)
        finally:
            self._began_s = None

    async def _chain(self, batch: Sequence[Pending]) -> None:
        """Link and commit ``batch`` until it is committed; it is split if PostgreSQL refuses a record in it.

        Raises:
            FencedError: another process took over this WAL.
            DatabaseWentBackError: PostgreSQL lost committed data.
        """
        is_below = batch[0].lsn <= self._node.chained.lsn
        attempt = _BatchAttempt(batch, checks_entries=self._expects_existing or is_below)
        while True:
            match await self._attempt(attempt):
                case Committed():
                    assert attempt.linked is not None
                    return await self._publish(batch, attempt.linked)
                case HeadsMoved():
                    self.heads.moved(self._tenants_of(batch))
                case KeysChained():
                    attempt.checks_keys = True
                case TenantDamaged(error):
                    self._begin_quarantine(error, APPENDER)
                case RowsLocked(error):
                    if not await self._waiting.find(batch):
                        await self._pause(attempt, error)
                case Fenced() | InDoubt() as answer:
                    if (committed := await self._resolve_in_doubt(attempt, answer)) is not None:
                        return await self._publish(batch, committed)
                case RowRefused() as refusal:
                    if await self._handle_row_refused(attempt, refusal):
                        return None

    async def _attempt(self, attempt: _BatchAttempt) -> Answer:
        """The answer to one attempt. Unless it was committed, the next batch is not what was copied."""
        answer = await commit.errors_as_values(self._link_and_commit(attempt))
        self._sent = None
        if answer != Committed():
            self._pipeline.drop()
        return answer

    async def _link_and_commit(self, attempt: _BatchAttempt) -> Answer:
        """Link the batch onto the chains as they are, and commit it."""
        batch = attempt.batch
        attempt.linked = None
        connection = await self._connected()
        view = await self._view(connection, attempt)
        pipelined = self._pipeline.linked(batch, view.heads)
        linked = pipelined or link(batch, view, self._linkers)
        # A tenant may be found damaged at any time; then it is passed over.
        await self._quarantine.hold(batch)
        attempt.linked = linked
        copied: Transaction | None = None
        if pipelined is not None:
            following = self._next_batch(batch, linked)  # PostgreSQL still copies this one.
            if (taken := await self._pipeline.take(connection)) is not None:
                self._connection = connection = taken.connection
                copied = taken.transaction
                self._sent = batch, linked
                self._copy_next(following)
        answer = await commit.commit(
            connection,
            Batch(
                self._step_to(self._lsn_after(batch)),
                [(name, view.heads[name], head_of(links)) for name, links in linked.links.items()],
                linked.log_rows,
                linked.keyed_rows,
                view.heads.keys() - self.heads.seen.keys(),
                are_keys_checked=attempt.checks_keys,
            ),
            copied=copied,
            on_sent=partial(self._on_sent, batch, linked),
        )
        # Another node has the lock of a head, and is about to move it.
        return HeadsMoved() if copied is not None and isinstance(answer, RowsLocked) else answer

    # --- the batch after it -----------------------------------------------------------------------

    def _on_sent(self, batch: Sequence[Pending], linked: LinkedBatch) -> None:
        self._sent = batch, linked
        self._copy_next()

    def _copy_next(self, following: NextBatch | None = None) -> None:
        """Copy the batch after the one that PostgreSQL commits, if enough of it is committed in the WAL."""
        if self._sent is None or self._pipeline.batch:
            return
        following = following or self._next_batch(*self._sent)
        if following is not None:
            self._pipeline.start(following)

    def _next_batch(self, batch: Sequence[Pending], linked: LinkedBatch) -> NextBatch | None:
        """The batch after ``batch``, linked onto what that leaves; None if it is small, or PostgreSQL has to be asked
        something first."""
        waiting = len(self._backlog) - len(batch)
        if not self.is_chaining or waiting < PIPELINED_ENTRIES_MIN or self._quarantine or self._pipeline.is_paused:
            return None
        following = self._backlog.peek(self._node.committed.lsn, BATCH_ENTRIES_MAX, BATCH_BYTES_MAX, behind=len(batch))
        if len(following) < PIPELINED_ENTRIES_MIN or linked.has_existing:
            return None
        if tenants_begun_by(following) or tenants_decided_by(following):
            return None
        heads = {
            name: head_of(linked.links[name]) if name in linked.links else self.heads.seen.get(name, EMPTY_HEAD)
            for name in sorted(self._tenants_of(following))
        }
        if EMPTY_HEAD in heads.values():
            return None
        return NextBatch(following, heads, link(following, ChainView(heads=heads, before=linked.keyed), self._linkers))

    async def _view(self, connection: asyncpg.Connection[asyncpg.Record], attempt: _BatchAttempt) -> ChainView:
        """What the chains hold of the batch.

        Raises:
            ChainDamagedError: a chain MUST NOT be extended.
            DATABASE_FAULTS: PostgreSQL does not answer.
        """
        batch, quarantine = attempt.batch, self._quarantine
        begun = {name for name in tenants_begun_by(batch) if name not in quarantine}
        wanted = {name for name in self._tenants_of(batch) if name not in quarantine}
        seen = await self.heads.read(connection, wanted)
        heads = {name: seen.get(name, EMPTY_HEAD) for name in sorted(wanted)}
        decided = {name: heads[name] for name in tenants_decided_by(batch) if name in heads}
        commitments, reading = await self.commitments.at(connection, decided) if decided else ({}, ())
        if reading:
            self._waiting.begin(reading, HISTORY_READ)
            heads = {name: head for name, head in heads.items() if name not in quarantine}
        taken = [each for each in batch if each.tenant_id in heads]
        return ChainView(
            heads=heads,
            keys=await views.read_keys(connection, taken) if attempt.checks_keys else {},
            before={} if attempt.checks_keys else self._keyed,
            entries=await views.read_entries(connection, taken) if attempt.checks_entries else {},
            commitments=commitments,
            unrecorded=await views.unrecorded(connection, begun) if begun else (),
            refused_sqlstate=attempt.refused.sqlstate if attempt.refused else None,
            deferred=quarantine.outcome_of,
        )

    async def _handle_row_refused(self, attempt: _BatchAttempt, refusal: RowRefused) -> bool:
        """Act on a row that PostgreSQL refuses; returns whether the batch was chained in halves."""
        batch = attempt.batch
        if refusal.is_duplicate and not attempt.checks_entries:
            log.warning("records_chained_by_another_way", lsn=batch[0].lsn, error=refusal.message)
            attempt.checks_entries = attempt.checks_keys = True
            return False
        if await self._wait_until_position_moves(batch):
            return False
        if len(batch) > 1:
            middle = len(batch) // 2
            await self._chain(batch[:middle])
            await self._chain(batch[middle:])
            return True
        log.error("record_refused", lsn=batch[0].lsn, sqlstate=refusal.sqlstate, error=refusal.message)
        if refusal.is_duplicate or attempt.refused is not None:
            attempt.refused = None
            reason = f"Postgres refuses its next entry ({refusal.sqlstate}): {refusal.message}"
            self._begin_quarantine(ChainDamagedError(batch[0].tenant_id, reason), APPENDER)
        else:
            attempt.refused = refusal
        return False

    async def _wait_until_position_moves(self, batch: Sequence[Pending]) -> bool:
        """Wait until PostgreSQL would move the position of the node. Returns whether it refused that at first: then no
        record is at fault."""
        step, has_waited = self._step_to(self._lsn_after(batch)), False
        while isinstance(failure := await or_in_doubt(self._dry_run(step)), InDoubt):
            has_waited = True
            self._reconnect(failure.error)
            await asyncio.sleep(RETRY_PAUSE_MAX_S)
        return has_waited

    async def _dry_run(self, step: Step) -> None:
        await commit.dry_run(await self._connected(), step)

    async def _resolve_in_doubt(self, attempt: _BatchAttempt, answer: Fenced | InDoubt) -> LinkedBatch | None:
        """The batch as it was committed, if only the answer was lost; None, after a pause, if it was not committed.

        Raises:
            FencedError, DatabaseWentBackError: the position of the node has another epoch, or is lower.
        """
        if isinstance(answer, InDoubt):
            self._reconnect(answer.error)
        while isinstance(position := await or_in_doubt(self._position()), InDoubt):
            self._reconnect(position.error)
            await asyncio.sleep(RETRY_PAUSE_MAX_S)
        if is_moved(position, self._node, self._lsn_after(attempt.batch)):
            return attempt.in_doubt or attempt.linked
        if isinstance(answer, InDoubt):
            attempt.in_doubt = attempt.in_doubt or attempt.linked
        await self._pause(attempt)
        return None

    async def _position(self) -> WalPosition | None:
        """The position of the node, once no running transaction can move it."""
        connection = await self._connected()
        async with connection.transaction():
            return await chaining.read_position(connection, self._node.node_id)

    async def _pause(self, attempt: _BatchAttempt, error: Exception | None = None) -> None:
        if error is not None:
            self._reconnect(error)
        await asyncio.sleep(attempt.pause_s)
        attempt.pause_s = min(2 * attempt.pause_s, RETRY_PAUSE_MAX_S)

    async def _publish(self, batch: Sequence[Pending], linked: LinkedBatch) -> None:
        """Publish a committed batch: positions first, then the outcomes."""
        self.database_error = None
        self._backlog.drop(batch, self._quarantine.waiting)
        self._expects_existing = linked.has_existing
        self._keyed = linked.keyed
        for tenant_id, t_hlc, lsn in linked.conflicts:
            log.error("hlc_conflict", tenant_id=tenant_id, hlc=t_hlc, lsn=lsn)
        self.heads.seen.update((tenant_id, head_of(links)) for tenant_id, links in linked.links.items())
        self.commitments.chained(linked)
        self._metrics.count("scheduler_chain_entries", len(linked.log_rows))
        self._on_chained(linked)
        linked.resolve_futures(batch, self._quarantine.waiting)
        self._node.chained.advance(batch[-1].lsn)
        await self._quarantine.release(batch)

    def _begin_quarantine(self, error: ChainDamagedError, met_by: str) -> None:
        self._breaks.report_error(error, met_by)
        seen = self.heads.seen.get(error.tenant_id)
        self._quarantine.begin(error.tenant_id, error.reason, seen, self._backlog)

    # --- the way to PostgreSQL --------------------------------------------------------------------

    def _tenants_of(self, batch: Sequence[Pending]) -> set[str]:
        """The tenants whose heads a batch needs: those of its events, and the new tenants that it records."""
        return {*(pending.tenant_id for pending in batch), *tenants_begun_by(batch)}

    def _lsn_after(self, batch: Sequence[Pending]) -> Lsn:
        """The position of the node once ``batch`` is chained; records that were passed over earlier do not move it."""
        return max(self._node.chained.lsn, batch[-1].lsn)

    def _step_to(self, new_lsn: Lsn) -> Step:
        node = self._node
        return Step(node.node_id, node.epoch, node.chained.lsn, new_lsn, node.committed.lsn)

    def _reconnect(self, error: Exception) -> None:
        """Drop the connection and report why; the next use opens a new one."""
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
