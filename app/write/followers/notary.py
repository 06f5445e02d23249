"""The notary: appends each tenant's chained entries to its Merkle tree, and signs checkpoints and snapshots.

For many tenants with new entries together::

    1. trees and checkpoints are advanced to the heads of the chains                         (tree_follower)
    2. snapshots are made, and signed unless ``chain.sign_snapshots`` is off: one for every
       ``chain.batch_size`` entries, a shorter one once the oldest entry without one has waited
       ``chain.batch_interval``, or on request                                               (snapshotter)

Each step takes several tenants in one transaction. If it fails, each of them gets a transaction of its own. Each tenant
gets one turn a round, of a bounded number of links and snapshots. A tenant with more entries gets its next turn in the
next round. So no tenant waits for another's backlog.

Invariants, per tenant::

    chained_seq >= tree_size >= signed_seq
    checkpoint beside the WAL <= tree_size

It works after the commit path: if signing fails, chaining goes on and the notary retries. If only the signer of
snapshots fails, trees and checkpoints go on as well.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field

import asyncpg

from app.runtime.logs import log
from app.runtime.metrics import Metrics
from app.runtime.postgres import DATABASE_FAULTS, text_of
from app.runtime.settings.config import ChainSettings
from app.runtime.state.found_breaks import FoundBreaks
from app.runtime.state.node import Node
from app.runtime.tasks import is_set_within
from app.store import Connection
from app.store import notary as store
from app.store.appended import AppendedEntries
from app.store.reading import Pool, reading, run_in
from app.trust.key_in_use import KeyInUse
from app.write.followers.checkpoints import CheckpointJournal
from app.write.followers.followers import LongLocks
from app.write.followers.job_indexer import JobIndexer
from app.write.followers.signed_chain import OwnEntries, unforeseen
from app.write.followers.snapshotter import Snapshotter
from app.write.followers.tree_follower import FollowedTenant, TenantMemory, TreeFollower, is_signed_by_any
from ledger.errors import (
    ChainBrokenError,
    ChainDamagedError,
    KeyConflictError,
    LedgerError,
    SignerAwayError,
    StoredTreeBehindError,
    StoredTreeError,
    StoredTreeLockedError,
)
from ledger.facts.events import SYSTEM_TENANT
from ledger.names import is_readable_tenant
from ledger.positions import BEFORE_FIRST, Lsn
from ledger.verification.verdict import Break
from signing.checkpoint import Checkpoint
from signing.keys import PublicKey
from signing.private_keys import FileSigner

TENANTS_SIGNED_A_TURN = 64
"""Most tenants that get snapshots between two turns of the trees, so that checkpoints do not wait for thousands."""
SNAPSHOTS_PER_TURN = 20
"""Snapshots signed for one tenant before others get their turn."""
TENANTS_PER_TRANSACTION_MAX = 64
"""Trees that grow in one transaction; other nodes wait for its locks."""
TURNS_AT_ONCE_MAX = 4
"""Concurrent transactions, so that none waits for the fsync of another."""
BROKEN_RETRY_S = 60.0
"""Pause before a tenant with broken rows is retried, which may read its whole chain."""
HOUSEKEEPING_INTERVAL_S = 1.0
"""How often tenants without new entries are checked, for ``chain.batch_interval`` and retries."""
NOTARY = "notary"
"""The part of the node named in reports of breaks found here."""

Step = Callable[[Connection, Sequence[str]], Awaitable[None]]
"""A step for several tenants, which are locked."""


@dataclass(kw_only=True, eq=False)
class Notary:
    """Advances trees, checkpoints and snapshots of all tenants to the heads of their chains."""

    node: Node
    pool: Pool
    checkpoints: CheckpointJournal
    own: OwnEntries
    keys: KeyInUse
    breaks: FoundBreaks
    log_origin: str
    settings: ChainSettings
    metrics: Metrics
    on_signed: list[Callable[[Mapping[str, int]], None]] = field(default_factory=list, init=False)
    """Each is called with the sizes of tenants' trees once their checkpoints are stored."""

    def __post_init__(self) -> None:
        self._memory = TenantMemory()
        self._tenants = self._memory.tenants
        batch_size = self.settings.batch_size
        self._trees = TreeFollower(
            node=self.node,
            memory=self._memory,
            checkpoints=self.checkpoints,
            own=self.own,
            keys=self.keys,
            origin=self.origin,
            batch_size=batch_size,
        )
        self._indexer = JobIndexer(keys=self.keys, origin=self.origin)
        self._snapshots = Snapshotter(
            self.node.node_id, self.keys, batch_size, self.settings.sign_snapshots, self.metrics, self._indexer
        )
        self._due: set[str] = set()
        """Tenants to follow."""
        self._unsigned: set[str] = set()
        """Followed tenants with a full batch to sign; they wait while the signer does not answer."""
        self._retry_at_s: dict[str, float] = {}
        """Time of the next retry of tenants with broken rows."""
        self._locks = LongLocks("signing_delayed")
        self.locked = self._locks.tenants
        """Tenants whose trees another session has kept locked for long."""
        self._rebuilding: asyncio.Task[None] | None = None
        self._turns = asyncio.Semaphore(TURNS_AT_ONCE_MAX)
        self._wake = asyncio.Event()
        self._hurry = asyncio.Event()
        """Set while somebody waits for a checkpoint."""
        self._watermark: tuple[Lsn, dict[str, int]] = (BEFORE_FIRST, {})
        self.signed_lsn = BEFORE_FIRST
        """Every record of this node's WAL up to here is chained and covered by a snapshot."""
        self.last_error: str | None = None
        """Why signing or following failed last, None after a success."""
        self._has_failed = False
        """Whether signing or following failed in the current pass."""

    def origin(self, tenant_id: str) -> str:
        """Origin line, and key name, of the tenant's log."""
        return f"{self.log_origin}/{tenant_id}"

    @property
    def checkpoint_fault(self) -> str | None:
        """Why the last checkpoints could not be stored beside the WAL, None if they could."""
        return self._trees.checkpoint_fault

    def chained(self, linked: AppendedEntries) -> None:
        """``linked`` was committed, by the appender or an import; two commits may come in any order."""
        now_s = time.monotonic()
        for tenant_id, rows in linked.links.items():
            tenant = self._tenants[tenant_id]
            self._memory.remember(tenant, rows)
            self.own.chained(tenant_id, rows[0].seq, rows[-1].seq)
            # Another node may sign this first; this node still stores a checkpoint that covers it.
            self._sign_again(tenant_id, rows[-1].seq)
            tenant.unsigned_since_s = tenant.unsigned_since_s or now_s
        self._wake.set()

    async def run(self) -> None:
        """Follow and sign until cancelled."""
        try:
            await self._find_behind()
            while True:
                if self._due <= self.locked and not (self._unsigned and self._may_snapshot()):
                    await is_set_within(self._wake, HOUSEKEEPING_INTERVAL_S)
                collect_s = self.settings.checkpoint_interval.total_seconds() / 4
                await is_set_within(self._hurry, collect_s if self.last_error is None else HOUSEKEEPING_INTERVAL_S)
                self._wake.clear()
                self._hurry.clear()
                self._has_failed = False
                # The signatures of a key that is not admitted would not be trusted, and would replace those of another
                # node.
                if self.keys.not_admitted is None:
                    await self._follow_and_sign()
                if not self._has_failed:
                    self.last_error = None
        except Exception as error:
            self.last_error = text_of(error)
            raise
        finally:
            if self._rebuilding is not None:
                self._rebuilding.cancel()

    async def _follow_and_sign(self) -> None:
        """One round."""
        await self._in_turns(self._take_due(), TENANTS_PER_TRANSACTION_MAX, self._follow)
        if self._may_snapshot():
            overdue = {name for name, tenant in self._tenants.items() if self._is_overdue(tenant)}
            wanted = (self._unsigned | overdue) - self._retry_at_s.keys()
            # A random part, so that tenants that cannot be signed do not block the others.
            now = set(random.sample(sorted(wanted), min(len(wanted), TENANTS_SIGNED_A_TURN)))
            self._unsigned = wanted - now
            # A slow signer holds up few tenants; a key in a file never waits.
            is_slow = self.settings.sign_snapshots and not isinstance(self.keys.signer, FileSigner)
            await self._in_turns(now, 1 if is_slow else TENANTS_PER_TRANSACTION_MAX, self._sign)
            await self._in_turns(self._indexer.due() - self._retry_at_s.keys(), 1, self._index)
        self._raise_watermark()

    def _may_snapshot(self) -> bool:
        """Whether snapshots can be made now; unsigned ones need no signer."""
        return not self.settings.sign_snapshots or self.keys.may_try()

    async def _find_behind(self) -> None:
        """Note the tenants that an earlier process left unfollowed or unsigned, retrying until Postgres answers."""
        while True:
            try:
                async with self.pool.acquire() as connection:
                    behind = await store.tenants_behind(connection)
                    tree_sizes = await store.tree_sizes(connection)
                break
            except DATABASE_FAULTS as error:
                self._retry_later((), error)
            await asyncio.sleep(HOUSEKEEPING_INTERVAL_S)
        if unreadable := {name for name in (*behind, *tree_sizes) if not is_readable_tenant(name)}:
            detail = f"there are heads or trees of tenants that no tenant can be called: {sorted(unreadable)[:10]!r}"
            self.breaks.report(SYSTEM_TENANT, Break(0, "head", detail, None, detail), NOTARY)
        for tenant_id in behind.keys() - unreadable:
            tenant = self._tenants[tenant_id]
            tenant.head_seq = max(tenant.head_seq, behind[tenant_id])
            tenant.unsigned_since_s = time.monotonic()
            self._due.add(tenant_id)
        for tenant_id in tree_sizes.keys() - unreadable:
            if not self._trees.is_kept(tenant_id, tree_sizes[tenant_id]):
                self._sign_again(tenant_id, tree_sizes[tenant_id])

    def _sign_again(self, tenant_id: str, upto_seq: int) -> None:
        """Sign a checkpoint of the tenant's tree up to this seq at least, and store it beside the WAL."""
        tenant = self._tenants[tenant_id]
        tenant.is_kept = False
        tenant.head_seq = max(tenant.head_seq, upto_seq)
        self._due.add(tenant_id)

    def sign_soon(self, tenant_ids: Iterable[str]) -> None:
        """Somebody waits for a checkpoint of what these tenants have: sign without collecting more."""
        if self.last_error is None and not self._due.isdisjoint(tenant_ids):
            self._hurry.set()

    async def sign_checkpoints_again(self, counting: Sequence[PublicKey]) -> None:
        """Schedule a new signature for each tenant whose newest checkpoint none of these trusted keys signed.

        Raises:
            DATABASE_FAULTS: the checkpoints cannot be read.
        """
        async with self.pool.acquire() as connection, connection.transaction(readonly=True):
            async for tenant_id, tree_size, note in store.checkpoints(connection):
                if is_readable_tenant(tenant_id) and not is_signed_by_any(note, self.origin(tenant_id), counting):
                    self._sign_again(tenant_id, tree_size)
        self._wake.set()

    async def keep_followed(self, notes: Mapping[str, str], anchors: Mapping[str, Checkpoint | None]) -> list[str]:
        """Store checkpoints of other nodes beside the WAL, each proved to extend its anchor, as
        ``TreeFollower.keep_followed``; returns the tenants with a stored one. A tenant that is being signed here, or
        whose stored checkpoint is no longer the anchor, is skipped this time."""
        async with AsyncExitStack() as held:
            # In sorted order, as in all code that holds several locks, so that there is no deadlock.
            free = [name for name in sorted(notes) if not self._tenants[name].lock.locked()]
            for name in free:
                await held.enter_async_context(self._tenants[name].lock)
            # The stored checkpoint never goes back: below it this node has forgotten which entries are its own.
            proved = {name: notes[name] for name in free if self.checkpoints.newest(name) == anchors[name]}
            try:
                faults = await run_in(self.pool.acquire(), self._trees.keep_followed, proved)
            except DATABASE_FAULTS as error:
                log.debug("checkpoints_not_followed", error=str(error))
                return []
        for name, fault in faults.items():
            if isinstance(fault, ChainBrokenError):
                self._note_fault(name, fault)
        return [name for name in proved if name not in faults]

    def _take_due(self) -> set[str]:
        """The tenants to follow now. A tenant with broken rows waits for its retry; damaged trees are rebuilt one after
        the other, in the background."""
        now_s = time.monotonic()
        settled = {name for name in self.node.unsigned if not self.breaks.open(name)}
        for name in [name for name, at_s in self._retry_at_s.items() if at_s <= now_s or name in settled]:
            del self._retry_at_s[name]
            self._due.add(name)
        due, self._due = (self._due | settled) - self._retry_at_s.keys(), set()
        damaged = sorted(name for name in due if self._tenants[name].is_tree_damaged)
        if damaged and self._rebuilding is None:
            self._rebuilding = asyncio.create_task(self._rebuild_trees(damaged))
        return due.difference(damaged)

    def rebuild(self, tenant_id: str) -> None:
        """The stored tree or checkpoint was found damaged: rebuild both from the chain, in the background."""
        tenant = self._tenants[tenant_id]
        tenant.is_tree_damaged, tenant.is_kept = True, False
        self._due.add(tenant_id)
        self._wake.set()

    @contextmanager
    def rebuilds_if_damaged(self, tenant_id: str) -> Iterator[None]:
        """A read of the tenant's stored tree: if that is damaged, or no trusted key signed its checkpoint, both are
        rebuilt in the background."""
        try:
            yield
        except (ChainDamagedError, KeyConflictError):
            self.rebuild(tenant_id)
            raise

    async def _rebuild_trees(self, names: Sequence[str]) -> None:
        """Rebuild the stored trees of these tenants from their chains, each in its own transaction. A tenant whose lock
        is held, perhaps for long, is retried later."""
        try:
            for name in names:
                await self._in_turn((name,), self._rebuild)
        finally:
            self._rebuilding = None
            # Trees that were found damaged meanwhile.
            self._due.update(name for name, tenant in self._tenants.items() if tenant.is_tree_damaged)
            if not self._due <= self.locked:
                self._wake.set()

    # --- turns ------------------------------------------------------------------------------------

    async def _in_turns(self, names: Iterable[str], together: int, step: Step) -> None:
        """``step`` for all of these tenants, for so many ``together``; several turns at once."""
        ordered = sorted(names)
        groups = (ordered[first : first + together] for first in range(0, len(ordered), together))
        await asyncio.gather(*(self._in_turn(group, step) for group in groups))

    async def _in_turn(self, names: Sequence[str], step: Step) -> None:
        """``step`` for these tenants, in sorted order, except those that are in another turn. If it fails for several,
        each gets a turn of its own. The fault of one is noted."""
        async with self._turns:
            busy = {name for name in names if self._tenants[name].lock.locked()}
            self._due |= busy
            free = [name for name in names if name not in busy]
            try:
                if free:
                    async with self._signing(free), self.pool.acquire() as connection:
                        await step(connection, free)
                return
            except SignerAwayError:
                return self._unsigned.update(free)
            except Exception as error:
                if len(free) == 1:
                    return self._note_fault(free[0], error)
                is_outage = isinstance(error, DATABASE_FAULTS) and not isinstance(error, asyncpg.PostgresError)
                if is_outage or self.checkpoint_fault is not None:
                    return self._retry_later(free, error)
                log.debug("signing_each_tenant_alone", error=str(error))
        for name in free:
            await self._in_turn((name,), step)

    @asynccontextmanager
    async def _signing(self, names: Iterable[str]) -> AsyncIterator[None]:
        """The locks of these tenants; after a failure that is not the signer's, their state in memory is dropped."""
        tenants = [self._tenants[name] for name in names]
        async with AsyncExitStack() as held:
            for tenant in tenants:
                await held.enter_async_context(tenant.lock)
            try:
                yield
            except SignerAwayError:
                raise
            except BaseException:
                for tenant in tenants:
                    tenant.tree = tenant.signed_seq = None
                raise

    async def _follow(self, connection: Connection, names: Sequence[str]) -> None:
        """Take one turn for these trees, in one transaction."""
        faults = await self._trees.advance(connection, names)
        self._tell_signed(names)
        for name in names:
            if name in faults:
                self._note_fault(name, faults[name])
                continue
            self._locks.ended(name)
            if not self.breaks.open(name):
                # Its newest rows are sound, but a break below must be repaired and acknowledged first.
                self.node.unsigned.pop(name, None)
            tenant = self._tenants[name]
            assert tenant.tree is not None
            if tenant.tree.size < tenant.head_seq:
                self._due.add(name)
            if self._is_snapshot_due(tenant):
                self._unsigned.add(name)

    async def _sign(self, connection: Connection, names: Sequence[str]) -> None:
        """Take one turn for the snapshots of these tenants."""
        tenants = {name: self._tenants[name] for name in names}
        for name in names:
            if tenants[name].tree is None:
                await self._advance_alone(connection, name)
        await self._snapshots.sign(
            connection, tenants, {name for name in names if self._is_overdue(tenants[name])}, SNAPSHOTS_PER_TURN
        )
        for name, tenant in tenants.items():
            self._memory.forget_signed(tenant)
            if self._is_snapshot_due(tenant):
                self._due.add(name)

    async def _index(self, connection: Connection, names: Sequence[str]) -> None:
        """Take one turn for the indexes of jobs of these tenants, which are behind their snapshots."""
        for name in names:
            tenant = self._tenants[name]
            if tenant.tree is not None and tenant.signed_seq is not None:
                await self._indexer.follow(connection, name, tenant)

    async def _rebuild(self, connection: Connection, names: Sequence[str]) -> None:
        for name in names:
            await self._trees.rebuild(connection, name)
            log.info("stored_tree_made_again", tenant_id=name)
            self.breaks.mended(name, kinds=("tree",))
            tenant = self._tenants[name]
            tenant.tree, tenant.is_tree_damaged, tenant.is_kept = None, False, False
            self._indexer.make_again(name, tenant)
            self._due.add(name)
            if self.keys.not_admitted is None:
                # Immediately: while the earlier checkpoint is stored, each reader of it triggers another rebuild.
                await self._advance_alone(connection, name)

    async def _advance_alone(self, connection: Connection, tenant_id: str, *, waits: bool = False) -> int:
        """Take one turn for one tenant's tree; the caller holds its lock. Returns its size or raises its fault."""
        for fault in (await self._trees.advance(connection, (tenant_id,), waits=waits)).values():
            raise fault
        self._tell_signed((tenant_id,))
        tree = self._tenants[tenant_id].tree
        return 0 if tree is None else tree.size

    def _tell_signed(self, names: Iterable[str]) -> None:
        trees = {name: self._tenants[name].tree for name in names}
        sizes = {name: tree.size for name, tree in trees.items() if tree is not None}
        for call in self.on_signed:
            call(sizes)

    def _note_fault(self, tenant_id: str, error: Exception) -> None:
        """One tenant could not be followed or signed."""
        if not isinstance(error, (LedgerError, *DATABASE_FAULTS)):
            error = unforeseen(tenant_id, error)
        if isinstance(error, StoredTreeLockedError):
            self._locks.met(tenant_id)
            self._due.add(tenant_id)
            return
        self._locks.ended(tenant_id)
        if isinstance(error, StoredTreeError):
            if isinstance(error, StoredTreeBehindError):
                log.info("stored_tree_behind", tenant_id=tenant_id, found=str(error))
            else:
                log.error("stored_tree_damaged", tenant_id=tenant_id, error=str(error))
                self.breaks.report(tenant_id, Break(0, "tree", str(error), None, str(error)), NOTARY)
            self.rebuild(tenant_id)
        elif isinstance(error, ChainBrokenError):
            self.breaks.report_error(error, NOTARY)
            self.node.unsigned[tenant_id] = str(error)
            self._retry_at_s[tenant_id] = time.monotonic() + BROKEN_RETRY_S
        else:
            self._retry_later((tenant_id,), error)

    def _retry_later(self, names: Sequence[str], error: Exception) -> None:
        """Schedule a retry of these tenants."""
        self._has_failed, self.last_error = True, text_of(error)
        log.warning("signing_delayed", tenants=names[:10], error=self.last_error)
        self._due.update(names)

    async def sign_now(self, tenant_id: str) -> list[dict[str, object]]:
        """Advance tree, checkpoint and snapshots of the tenant to its head; returns the new snapshots.

        Raises:
            SigningUnavailableError: the signer does not answer, a checkpoint cannot be kept, or rows were changed.
            DatabaseUnavailableError: PostgreSQL fails or does not answer.
        """
        if self.keys.not_admitted is not None:
            raise SignerAwayError(self.keys.not_admitted)
        tenant = self._tenants[tenant_id]
        target_seq = tenant.head_seq
        async with self._signing((tenant_id,)), reading(self.pool, timeout_s=None) as connection:
            size_before, size = -1, 0
            try:
                while size_before < size and not 0 < target_seq <= size:
                    size_before, size = size, await self._advance_alone(connection, tenant_id, waits=True)
            except LedgerError as fault:
                self._note_fault(tenant_id, fault)
                raise
            made = await self._snapshots.sign(connection, {tenant_id: tenant}, (tenant_id,))
            self._memory.forget_signed(tenant)
            return made

    def _is_snapshot_due(self, tenant: FollowedTenant) -> bool:
        """Whether a batch is full, or the signed seq of the tenant must be read."""
        return tenant.signed_seq is None or tenant.head_seq - tenant.signed_seq >= self.settings.batch_size

    def _is_overdue(self, tenant: FollowedTenant) -> bool:
        """Whether an entry has waited for a snapshot for as long as it may; a damaged tree is rebuilt first."""
        oldest_s = time.monotonic() - self.settings.batch_interval.total_seconds()
        since_s = tenant.unsigned_since_s
        return since_s is not None and since_s <= oldest_s and not tenant.is_tree_damaged

    def unsigned_age_s(self) -> float:
        """How long the oldest entry without a snapshot has waited; 0 if there is none."""
        now_s = time.monotonic()
        since_s = (tenant.unsigned_since_s for tenant in tuple(self._tenants.values()))
        return now_s - min((each for each in since_s if each is not None), default=now_s)

    def _raise_watermark(self) -> None:
        """Raise ``signed_lsn`` once every tenant that was unsigned at the watermark has been signed that far."""
        lsn, waiting = self._watermark
        waiting = {name: seq for name, seq in waiting.items() if (self._tenants[name].signed_seq or 0) < seq}
        if not waiting:
            self.signed_lsn, lsn = lsn, self.node.chained.lsn
            waiting = {
                name: each.head_seq for name, each in self._tenants.items() if (each.signed_seq or 0) < each.head_seq
            }
        self._watermark = (lsn, waiting)
