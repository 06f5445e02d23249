"""The notary: appends each tenant's chained entries to its Merkle tree, and signs checkpoints and snapshots.

For many tenants with new entries together::

    1. trees and checkpoints are advanced to the heads of the chains, in one transaction    (tree_follower)
    2. snapshots are signed: one for every ``batch_size`` entries, a shorter one once the
       oldest unsigned entry has waited ``batch_interval`` or on request                    (snapshotter)

Each tenant gets one turn a round, of a bounded number of links and snapshots. A tenant with more entries gets its next
turn in the next round. So no tenant waits for another's backlog.

Invariants, per tenant::

    chained_seq >= tree_size >= signed_seq
    checkpoint beside the WAL <= tree_size

It works after the commit path: if signing fails, chaining goes on and the notary retries. If only the signer of
snapshots fails, trees and checkpoints go on as well.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass

import structlog

from app.runtime.metrics import Metrics
from app.runtime.postgres import DATABASE_FAULTS, text_of
from app.runtime.state.found_breaks import FoundBreaks
from app.runtime.state.node import Node
from app.store import Connection
from app.store import notary as store
from app.store.appended import AppendedEntries
from app.store.reading import Pool, reading
from app.trust.key_in_use import KeyInUse
from app.write.followers.checkpoints import CheckpointJournal
from app.write.followers.followers import LongLocks
from app.write.followers.signed_chain import OwnEntries, unforeseen
from app.write.followers.snapshotter import Snapshotter
from app.write.followers.tree_follower import FollowedTenant, TenantMemory, TreeFollower
from ledger.errors import (
    ChainBrokenError,
    ChainDamagedError,
    KeyConflictError,
    LedgerError,
    SignatureError,
    SignerAwayError,
    SigningUnavailableError,
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
from signing.note import is_signed_by

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
"""How often tenants without new entries are checked, for ``batch_interval`` and retries."""
NOTARY = "notary"
"""The part of the node named in reports of breaks found here."""

log = structlog.get_logger()


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
    batch_size: int
    batch_interval_s: float
    checkpoint_interval_s: float
    sign_snapshots: bool
    metrics: Metrics

    def __post_init__(self) -> None:
        self._collect_s = self.checkpoint_interval_s / 4
        self._memory = TenantMemory()
        self._tenants = self._memory.tenants
        self._trees = TreeFollower(
            node=self.node,
            memory=self._memory,
            checkpoints=self.checkpoints,
            own=self.own,
            keys=self.keys,
            origin=self.origin,
            batch_size=self.batch_size,
        )
        self._snapshots = Snapshotter(
            node_id=self.node.node_id, keys=self.keys, batch_size=self.batch_size, metrics=self.metrics
        )
        self._due: set[str] = set()
        self._is_more_due = False
        """Whether more tenants are due for a snapshot than this turn signs."""
        self._unsigned: set[str] = set()
        """Tenants whose snapshots wait until the signer answers again."""
        self._retry_at_s: dict[str, float] = {}
        """Time of the next retry of tenants with broken rows."""
        self._locks = LongLocks("signing_delayed")
        self._rebuilding: asyncio.Task[None] | None = None
        self._turns = asyncio.Semaphore(TURNS_AT_ONCE_MAX)
        self._wake = asyncio.Event()
        self._watermark: tuple[Lsn, dict[str, int]] = (BEFORE_FIRST, {})
        self.signed_lsn = BEFORE_FIRST
        """Every record of this node's WAL up to here is chained and covered by a snapshot, or by a checkpoint
        if snapshots are off."""
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

    @property
    def locked(self) -> set[str]:
        """Tenants whose trees another session has kept locked for long."""
        return self._locks.tenants

    def chained(self, linked: AppendedEntries) -> None:
        """``linked`` was committed, by the appender or an import; two commits may come in any order."""
        now_s = time.monotonic()
        for tenant_id, rows in linked.links.items():
            tenant = self._tenants[tenant_id]
            self._memory.remember(tenant, rows)
            self.own.chained(tenant_id, rows[0].seq, rows[-1].seq)
            tenant.head_seq = max(tenant.head_seq, rows[-1].seq)
            # Another node may sign this first; this node still stores a checkpoint that covers it.
            tenant.is_kept = False
            tenant.unsigned_since_s = tenant.unsigned_since_s or now_s
            self._due.add(tenant_id)
        self._wake.set()

    async def run(self) -> None:
        """Follow and sign until cancelled."""
        await self._find_behind()
        try:
            await self._run()
        except Exception as error:
            self.last_error = text_of(error)
            raise
        finally:
            if self._rebuilding is not None:
                self._rebuilding.cancel()

    async def _run(self) -> None:
        while True:
            if self._due <= self.locked and not self._is_more_due:
                with contextlib.suppress(TimeoutError):
                    # Not ``wait_for``, as in ``TableFollower.run``.
                    async with asyncio.timeout(HOUSEKEEPING_INTERVAL_S):
                        await self._wake.wait()
            await asyncio.sleep(self._collect_s if self.last_error is None else HOUSEKEEPING_INTERVAL_S)
            self._wake.clear()
            self._has_failed = False
            if self.keys.not_admitted is not None:
                # Its signatures would not be trusted, and would replace those of another node.
                self._is_more_due, self.last_error = False, None
                continue
            overdue = self._overdue()
            due = self._take_due(overdue)
            failed = await self._follow_all(sorted(due))
            signing = {name for name in due - failed if name in overdue or self._is_snapshot_due(self._tenants[name])}
            signing, self._unsigned = signing | self._unsigned, set()
            if not self.keys.may_try():
                signing, self._unsigned = set(), signing
            now = _sample(signing)
            self._due |= signing - now
            now -= await self._sign_together(sorted(now - overdue))
            await asyncio.gather(*(self._sign_alone(name, sign_rest=name in overdue) for name in sorted(now)))
            self._raise_watermark()
            if not self._has_failed:
                self.last_error = None

    async def _find_behind(self) -> None:
        """Note the tenants that an earlier process left unfollowed or unsigned, retrying until Postgres answers."""
        while True:
            try:
                async with self.pool.acquire() as connection:
                    behind = await store.tenants_behind(connection)
                    tree_sizes = await store.tree_sizes(connection)
                break
            except DATABASE_FAULTS as error:
                self.last_error = text_of(error)
                log.warning("signing_delayed", error=self.last_error)
            await asyncio.sleep(HOUSEKEEPING_INTERVAL_S)
        unreadable = {name for name in (*behind, *tree_sizes) if not is_readable_tenant(name)}
        if unreadable:
            detail = f"there are heads or trees of tenants that no tenant can be called: {sorted(unreadable)[:10]!r}"
            self.breaks.report(SYSTEM_TENANT, Break(0, "head", detail, None, detail), NOTARY)
        for tenant_id in behind.keys() - unreadable:
            tenant = self._tenants[tenant_id]
            tenant.head_seq = max(tenant.head_seq, behind[tenant_id])
            tenant.unsigned_since_s = time.monotonic()
            self._due.add(tenant_id)
        kept = {name for name in tree_sizes.keys() - unreadable if self._trees.is_kept(name, tree_sizes[name])}
        for tenant_id in tree_sizes.keys() - unreadable - kept:
            self._sign_again(tenant_id, tree_sizes[tenant_id])

    def _sign_again(self, tenant_id: str, tree_size: int) -> None:
        tenant = self._tenants[tenant_id]
        tenant.is_kept = False
        tenant.head_seq = max(tenant.head_seq, tree_size)
        self._due.add(tenant_id)

    async def log_key_changed(self) -> None:
        """Schedule a new signature of every tenant's checkpoint; the earlier key may be revoked any time.

        Raises:
            DATABASE_FAULTS: the tenants cannot be listed.
        """
        async with self.pool.acquire() as connection:
            tree_sizes = await store.tree_sizes(connection)
        for tenant_id, tree_size in tree_sizes.items():
            if is_readable_tenant(tenant_id):
                self._sign_again(tenant_id, tree_size)
        self._wake.set()

    async def keys_revoked(self, counting: Sequence[PublicKey]) -> None:
        """Schedule a new signature for each tenant whose newest checkpoint none of these trusted keys signed.

        Raises:
            DATABASE_FAULTS: the checkpoints cannot be read.
        """
        async with self.pool.acquire() as connection, connection.transaction(readonly=True):
            async for tenant_id, tree_size, note in store.checkpoints(connection):
                if is_readable_tenant(tenant_id) and not _is_signed_by_any(note, self.origin(tenant_id), counting):
                    self._sign_again(tenant_id, tree_size)
        self._wake.set()

    async def keep_followed(self, notes: Mapping[str, str], anchors: Mapping[str, Checkpoint | None]) -> list[str]:
        """Store checkpoints of other nodes beside the WAL, each proved to extend its anchor, as
        ``TreeFollower.keep_followed``; returns the tenants with a stored one. A tenant that is being signed here, or
        whose stored checkpoint is no longer the anchor, is skipped this time."""
        async with AsyncExitStack() as held:
            free = {name: text for name, text in notes.items() if not self._tenants[name].lock.locked()}
            # In sorted order, as in all code that holds several locks, so that there is no deadlock.
            for name in sorted(free):
                await held.enter_async_context(self._tenants[name].lock)
            # The stored checkpoint never goes back: below it this node has forgotten which entries are its own.
            proved = {name: text for name, text in free.items() if self.checkpoints.newest(name) == anchors[name]}
            try:
                async with self.pool.acquire() as connection:
                    faults = await self._trees.keep_followed(connection, proved)
            except DATABASE_FAULTS as error:
                log.debug("checkpoints_not_followed", error=str(error))
                return []
        for name, fault in faults.items():
            if isinstance(fault, ChainBrokenError):
                self._note_fault(name, fault)
        return [name for name in proved if name not in faults]

    def _take_due(self, overdue: set[str]) -> set[str]:
        """The tenants to follow and sign now. A tenant with broken rows waits for its retry; damaged trees are rebuilt
        one after the other, in the background."""
        now_s = time.monotonic()
        settled = {name for name in self.node.unsigned if not self.breaks.open(name)}
        for name in [name for name, at_s in self._retry_at_s.items() if at_s <= now_s or name in settled]:
            del self._retry_at_s[name]
            self._due.add(name)
        self._due |= settled
        due, self._due = (self._due | overdue) - self._retry_at_s.keys(), set()
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
    def mending(self, tenant_id: str) -> Iterator[None]:
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
                if not self._tenants[name].lock.locked():
                    await self._rebuild(name)
        finally:
            self._rebuilding = None
            # Trees that were found damaged meanwhile.
            self._due.update(name for name, tenant in self._tenants.items() if tenant.is_tree_damaged)
            if not self._due <= self.locked:
                self._wake.set()

    async def _rebuild(self, name: str) -> None:
        async with self._turn(name) as (tenant, connection):
            await self._trees.rebuild(connection, name)
            log.info("stored_tree_made_again", tenant_id=name)
            self.breaks.mended(name, kinds=("tree",))
            tenant.tree, tenant.is_tree_damaged, tenant.is_kept = None, False, False
            self._due.add(name)
            if self.keys.not_admitted is None:
                # Immediately: while the earlier checkpoint is stored, each reader of it triggers another rebuild.
                await self._advance_alone(connection, name)

    async def _follow_all(self, names: Sequence[str]) -> set[str]:
        """Take one turn for each tree, many in one transaction; returns the tenants that could not be followed."""
        size = TENANTS_PER_TRANSACTION_MAX
        groups = (self._follow(names[first : first + size]) for first in range(0, len(names), size))
        return set().union(*await asyncio.gather(*groups))

    async def _follow(self, names: Sequence[str]) -> set[str]:
        """Take one turn for these trees in one transaction; returns the tenants that failed or are locked."""
        async with self._turns, AsyncExitStack() as held:
            busy = {name for name in names if self._tenants[name].lock.locked()}
            self._due |= busy
            names = [name for name in names if name not in busy]
            if not names:
                return busy
            for name in names:
                await held.enter_async_context(self._tenants[name].lock)
            try:
                async with self.pool.acquire() as connection:
                    faults = await self._trees.advance(connection, names)
            except BaseException as error:
                for name in names:
                    self._tenants[name].tree = None
                if not isinstance(error, DATABASE_FAULTS):
                    raise
                self._retry_later(names, error)
                return busy.union(names)
            for name in names:
                tenant = self._tenants[name]
                if name in faults:
                    self._note_fault(name, faults[name])
                    continue
                self._locks.ended(name)
                if not self.breaks.open(name):
                    # Its newest rows are sound, but a break below must be repaired and acknowledged first.
                    self.node.unsigned.pop(name, None)
                if tenant.tree is not None and tenant.tree.size < tenant.head_seq:
                    self._due.add(name)
                elif not self.sign_snapshots and tenant.tree is not None:
                    tenant.signed_seq = tenant.tree.size
                    self._memory.forget_signed(tenant)
        return busy.union(faults)

    async def _sign_together(self, names: Sequence[str]) -> set[str]:
        """Sign the next full batches of these tenants in one transaction, if no other step is needed first; returns the
        signed tenants. If it fails, none is signed: each then gets its own turn, which finds its own fault."""
        signed: set[str] = set()
        try:
            async with self._turns, AsyncExitStack() as held:
                tenants: dict[str, FollowedTenant] = {}
                for name in names if self.keys.signs_at_once else ():
                    tenant = self._tenants[name]
                    if not tenant.lock.locked() and self._snapshots.has_full_batch(tenant):
                        tenants[name] = tenant
                        await held.enter_async_context(self._signing(tenant))
                if len(tenants) > 1:
                    async with self.pool.acquire() as connection:
                        signed = set(await self._snapshots.sign_next(connection, tenants))
        except (LedgerError, *DATABASE_FAULTS) as error:
            log.debug("signing_each_tenant_alone", error=str(error))
            return set()
        for name in signed:
            self._memory.forget_signed(self._tenants[name])
            if self._is_snapshot_due(self._tenants[name]):
                self._due.add(name)
        return signed

    async def _sign_alone(self, tenant_id: str, *, sign_rest: bool) -> None:
        """Take one turn for the snapshots of a tenant."""
        async with self._turns, self._turn(tenant_id) as (tenant, connection):
            if tenant.tree is None:
                await self._advance_alone(connection, tenant_id)
            await self._snapshots.sign(
                connection, tenant_id, tenant, sign_rest=sign_rest, snapshots_max=SNAPSHOTS_PER_TURN
            )
            self._memory.forget_signed(tenant)
            if self._is_snapshot_due(tenant):
                self._due.add(tenant_id)

    async def _advance_alone(self, connection: Connection, tenant_id: str, *, waits: bool = False) -> int:
        """Take one turn for one tenant's tree; the caller holds its lock. Returns its size or raises its fault."""
        for fault in (await self._trees.advance(connection, (tenant_id,), waits=waits)).values():
            raise fault
        tree = self._tenants[tenant_id].tree
        return 0 if tree is None else tree.size

    @asynccontextmanager
    async def _turn(self, tenant_id: str) -> AsyncIterator[tuple[FollowedTenant, Connection]]:
        """The tenant, locked, and a connection. A fault inside the context is noted and suppressed."""
        tenant = self._tenants[tenant_id]
        try:
            async with self._signing(tenant), self.pool.acquire() as connection:
                yield tenant, connection
        except LedgerError as error:
            self._note_fault(tenant_id, error)
        except DATABASE_FAULTS as error:
            self._retry_later((tenant_id,), error)
        except Exception as error:
            self._note_fault(tenant_id, unforeseen(tenant_id, error))

    def _note_fault(self, tenant_id: str, error: LedgerError) -> None:
        """One tenant could not be followed or signed."""
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
        elif isinstance(error, SignerAwayError):
            self._unsigned.add(tenant_id)
        else:
            self._retry_later((tenant_id,), error)

    def _retry_later(self, names: Sequence[str], error: BaseException) -> None:
        """Schedule a retry of these tenants."""
        self._has_failed, self.last_error = True, text_of(error)
        log.warning("signing_delayed", tenants=names[:10], error=self.last_error)
        self._due.update(names)

    async def sign_now(self, tenant_id: str) -> list[dict[str, object]]:
        """Advance tree, checkpoint and snapshots of the tenant to its head; returns the new snapshots.

        Raises:
            SigningUnavailableError: ``chain.sign_snapshots`` is off, the signer does not answer, a checkpoint cannot be
                kept, or rows were changed.
            DatabaseUnavailableError: PostgreSQL fails or does not answer.
        """
        if not self.sign_snapshots:
            raise SigningUnavailableError("chain.sign_snapshots is off on this node")
        if self.keys.not_admitted is not None:
            raise SignerAwayError(self.keys.not_admitted)
        tenant = self._tenants[tenant_id]
        target_seq = tenant.head_seq
        async with self._signing(tenant), reading(self.pool, timeout_s=None) as connection:
            size_before, size = -1, 0
            while size_before < size and not 0 < target_seq <= size:
                size_before, size = size, await self._advance_for_reader(connection, tenant_id)
            made = await self._snapshots.sign(connection, tenant_id, tenant, sign_rest=True, snapshots_max=None)
            self._memory.forget_signed(tenant)
            return made

    async def _advance_for_reader(self, connection: Connection, tenant_id: str) -> int:
        """As ``_advance_alone``; a failed write of the checkpoint is not reported as a fault of PostgreSQL."""
        try:
            return await self._advance_alone(connection, tenant_id, waits=True)
        except LedgerError as fault:
            self._note_fault(tenant_id, fault)
            raise
        except OSError as error:
            if self.checkpoint_fault is None:
                raise
            raise SigningUnavailableError(self.checkpoint_fault) from error

    @asynccontextmanager
    async def _signing(self, tenant: FollowedTenant) -> AsyncIterator[None]:
        """The tenant's lock; after a failure that is not the signer's, the tenant's state in memory is dropped."""
        async with tenant.lock:
            try:
                yield
            except SignerAwayError:
                raise
            except BaseException:
                tenant.tree = None
                tenant.signed_seq = None
                raise

    def _is_snapshot_due(self, tenant: FollowedTenant) -> bool:
        """Whether a batch is full, or the signed seq of the tenant must be read."""
        is_due = tenant.signed_seq is None or tenant.head_seq - tenant.signed_seq >= self.batch_size
        return self.sign_snapshots and is_due

    def _overdue(self) -> set[str]:
        """Tenants whose snapshot is overdue; a sample if there are many."""
        self._is_more_due = False
        if not self.sign_snapshots or not self.keys.may_try():
            return set()
        oldest_s = time.monotonic() - self.batch_interval_s
        overdue = {
            name
            for name, tenant in self._tenants.items()
            if tenant.unsigned_since_s is not None
            and tenant.unsigned_since_s <= oldest_s
            and name not in self._retry_at_s
        }
        some = _sample(overdue)
        self._is_more_due = some != overdue
        return some

    def unsigned_age_s(self) -> float:
        """How long the oldest entry without a snapshot has waited; 0 if there is none or snapshots are off."""
        if not self.sign_snapshots:
            return 0.0
        now_s = time.monotonic()
        since_s = (tenant.unsigned_since_s for tenant in tuple(self._tenants.values()))
        return now_s - min((each for each in since_s if each is not None), default=now_s)

    def _raise_watermark(self) -> None:
        """Raise ``signed_lsn`` once every tenant that was unsigned at the watermark has been signed that far."""
        lsn, waiting = self._watermark
        for name in [name for name, seq in waiting.items() if (self._tenants[name].signed_seq or 0) >= seq]:
            del waiting[name]
        if not waiting:
            self.signed_lsn = lsn
            unsigned = {
                name: tenant.head_seq
                for name, tenant in self._tenants.items()
                if (tenant.signed_seq or 0) < tenant.head_seq
            }
            self._watermark = (self.node.chained.lsn, unsigned)


def _is_signed_by_any(note: str, origin: str, keys: Sequence[PublicKey]) -> bool:
    with contextlib.suppress(SignatureError):
        return any(is_signed_by(note, origin, key) for key in keys)
    return False


def _sample(names: set[str]) -> set[str]:
    """``names``, or a random ``TENANTS_SIGNED_A_TURN`` of them, so that tenants that cannot be signed do not block the
    others."""
    return set(random.sample(sorted(names), TENANTS_SIGNED_A_TURN)) if len(names) > TENANTS_SIGNED_A_TURN else names
