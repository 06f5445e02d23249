"""The notary: follows each tenant's chain with its Merkle tree, and signs what it has followed.

For the tenants whose chains have grown, many at once::

    1. lock the stored trees; read the links beyond them; append them; sign a checkpoint of each new size
    2. write the changed tiles, the sizes, roots and checkpoints; commit: one transaction for all
    3. keep the checkpoints beside the WAL: their files are synced together, then renamed, then the folder is synced
    4. sign snapshots: one for every ``batch_size`` entries, a shorter one when the oldest unsigned entry
       has waited ``batch_interval`` or somebody asks

Each tenant gets one turn a round, of a bounded number of links and snapshots; whoever has more to do is in the next
round, with all others that have grown meanwhile. So none waits for another's backlog.

Invariants, per tenant::

    chained_seq >= tree_size >= signed_seq
    checkpoint beside the WAL <= tree_size

It works behind the commit path: when signing fails, chaining goes on and the notary tries again. When it is the signer
of snapshots that fails, trees and checkpoints go on as well.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING

import asyncpg
import orjson
import structlog

from app.metrics import Metrics
from app.node import Node
from app.store import notary as store
from app.store.faults import DATABASE_FAULTS
from app.store.growth import Growth
from app.store.notary import GrownTree, LinkRow
from app.write.before_signing import checked_links, extended_tree, leaf_hashes_of, proved_root, tree_of_chain
from app.write.checkpoints import CheckpointFolder
from app.write.key_in_use import KeyInUse
from app.write.own_entries import OwnEntries
from ledger import merkle, tiles
from ledger.errors import ChainBrokenError, LedgerError, SignerAwayError, SigningUnavailableError, StoredTreeError
from ledger.hlc import Hlc
from ledger.names import is_readable_tenant
from ledger.snapshot import SnapshotClaim
from signing import checkpoint
from signing.checkpoint import Checkpoint, sign_checkpoint
from signing.note import is_signed_by
from signing.note import parse as parse_note
from signing.snapshot import sign_snapshot

if TYPE_CHECKING:
    from app.store import Connection

LINKS_PER_TURN = 10_000
"""Links appended to one tree in one transaction, as this node chained them."""
ENTRIES_PER_TURN = 1000
"""Entries of one tenant read back, checked and appended in one transaction."""
SNAPSHOTS_PER_TURN = 20
"""Snapshots signed for one tenant before others get their turn."""
TENANTS_PER_TRANSACTION_MAX = 64
"""Trees that grow in one transaction; its locks keep other nodes from them for as long."""
RECENT_LINKS_MAX = 200_000
"""Links kept in memory, over all tenants, from being chained here until they are signed; others are read back."""
TURNS_AT_ONCE_MAX = 4
"""Transactions at once, so that the fsyncs of one do not keep the next waiting."""
TREES_CACHED_MAX = 1000
"""Tenants whose tree edge is kept in memory."""
BROKEN_RETRY_S = 60.0
"""Pause before a tenant whose rows are broken is looked at again, which may mean to read its whole chain."""
HOUSEKEEPING_INTERVAL_S = 1.0
"""How often tenants are looked at that have not grown, for ``batch_interval`` and retries."""

log = structlog.get_logger()


class _Tenant:
    """What the notary knows of one tenant between its turns."""

    __slots__ = (
        "first_leaf_seq",
        "head_seq",
        "is_kept",
        "is_tree_damaged",
        "leaves",
        "lock",
        "recent",
        "roots",
        "signed_digest",
        "signed_seq",
        "tree",
        "unkept",
        "unsigned_since_s",
    )

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.head_seq = 0
        """Newest entry that this node chained, or found chained when it started."""
        self.recent: list[LinkRow] = []
        """Newest links that this node chained, without a gap."""
        self.tree: tiles.TileTree | None = None
        self.leaves: list[bytes] = []
        """Leaf hashes of remembered links as they went into ``tree``, without a gap, up to its end."""
        self.first_leaf_seq = 1
        self.roots: dict[int, bytes] = {}
        """Roots that ``tree`` had where a snapshot may end, by size."""
        self.signed_seq: int | None = None
        self.signed_digest: str | None = None
        """SHA-256 of the newest snapshot's DSSE payload."""
        self.unkept: str | None = None
        """The newest checkpoint, as long as it is not beside the WAL."""
        self.is_kept = True
        """False when an earlier process ended between a checkpoint in Postgres and the one beside the WAL."""
        self.is_tree_damaged = False
        """Whether the stored tree is known not to be that of the chain, and is to be made again."""
        self.unsigned_since_s: float | None = None

    def leaves_of(self, from_seq: int, to_seq: int) -> list[bytes]:
        """Leaf hashes of these entries, as far as they are remembered."""
        if from_seq < self.first_leaf_seq:
            return []
        return self.leaves[from_seq - self.first_leaf_seq : to_seq - self.first_leaf_seq + 1]

    def forget_leaves(self, upto_seq: int | None = None) -> None:
        """Drop leaf hashes and roots up to ``upto_seq``, or all."""
        if upto_seq is None:
            self.leaves, self.roots = [], {}
        elif upto_seq >= self.first_leaf_seq:
            self.leaves = self.leaves[upto_seq - self.first_leaf_seq + 1 :]
            self.first_leaf_seq = upto_seq + 1
            self.roots = {size: root for size, root in self.roots.items() if size > upto_seq}


class Notary:
    """Keeps trees, checkpoints and snapshots of all tenants up with their chains."""

    def __init__(
        self,
        *,
        node: Node,
        pool: asyncpg.Pool[asyncpg.Record],
        checkpoints: CheckpointFolder,
        own: OwnEntries,
        keys: KeyInUse,
        log_origin: str,
        batch_size: int,
        batch_interval_s: float,
        checkpoint_interval_s: float,
        sign_snapshots: bool,
        metrics: Metrics,
    ) -> None:
        self._node = node
        self._pool = pool
        self._checkpoints = checkpoints
        self._own = own
        self._keys = keys
        self._log_origin = log_origin
        self._batch_size = batch_size
        self._batch_interval_s = batch_interval_s
        self._collect_s = checkpoint_interval_s / 4
        self._sign_snapshots = sign_snapshots
        self._metrics = metrics
        self._tenants: dict[str, _Tenant] = {}
        self._cached: OrderedDict[str, None] = OrderedDict()
        """Tenants whose tree is kept in memory, the one used last at the end."""
        self._recent_count = 0
        self._grown: set[str] = set()
        self._unsigned: set[str] = set()
        """Tenants whose snapshots wait for the signer to answer again."""
        self._retry_at_s: dict[str, float] = {}
        """When tenants whose rows were found broken are looked at again."""
        self._mending: asyncio.Task[None] | None = None
        self._turns = asyncio.Semaphore(TURNS_AT_ONCE_MAX)
        self._wake = asyncio.Event()
        self._mark: tuple[int, dict[str, int]] = (0, {})
        self.signed_lsn = 0
        """Every record of this node's WAL up to here is chained and covered by a snapshot, or by a checkpoint
        where snapshots are off."""
        self.checkpoint_fault: str | None = None
        """Why the last checkpoints could not be kept beside the WAL, None while they can."""
        self.last_error: str | None = None
        """Why signing or following failed last, None while all is well."""

    def origin(self, tenant_id: str) -> str:
        """Origin line, and key name, of the tenant's log."""
        return f"{self._log_origin}/{tenant_id}"

    def chained(self, linked: Growth) -> None:
        """``linked`` was committed, by the appender or an import: of two that wait, in whatever order."""
        now_s = time.monotonic()
        for tenant_id, rows in linked.links.items():
            tenant = self._tenant(tenant_id)
            self._remember(tenant, rows)
            self._own.chained(tenant_id, rows[0].seq, rows[-1].seq)
            tenant.head_seq = max(tenant.head_seq, rows[-1].seq)
            # Another node may sign this first; here a checkpoint that covers it is kept all the same.
            tenant.is_kept = False
            if tenant.unsigned_since_s is None:
                tenant.unsigned_since_s = now_s
            self._grown.add(tenant_id)
        self._wake.set()

    async def run(self) -> None:
        """Follow and sign, for ever; ends by cancellation."""
        await self._find_behind()
        try:
            await self._run()
        finally:
            if self._mending is not None:
                self._mending.cancel()

    async def _run(self) -> None:
        while True:
            if not self._grown:
                await self._sleep_until_grown()
            await asyncio.sleep(self._collect_s if self.last_error is None else HOUSEKEEPING_INTERVAL_S)
            self._wake.clear()
            self.last_error = None
            overdue = self._overdue()
            due = self._take_due(overdue)
            failed = await self._follow_all(sorted(due))
            signing = {name for name in due - failed if name in overdue or self._is_snapshot_due(self._tenants[name])}
            signing, self._unsigned = signing | self._unsigned, set()
            if not self._keys.may_try():
                signing, self._unsigned = set(), signing
            await asyncio.gather(*(self._attend(name, sign_rest=name in overdue) for name in sorted(signing)))
            self._move_mark()

    async def _find_behind(self) -> None:
        """Note the tenants that an earlier process left to be followed or signed, trying until Postgres answers."""
        while True:
            try:
                async with self._pool.acquire() as connection:
                    behind = await store.tenants_behind(connection)
                    tree_sizes = await store.tree_sizes(connection)
                break
            except DATABASE_FAULTS as error:
                self.last_error = f"{type(error).__name__}: {error}"
                log.warning("signing_delayed", error=self.last_error)
            await asyncio.sleep(HOUSEKEEPING_INTERVAL_S)
        strangers = {*behind, *tree_sizes} - {name for name in (*behind, *tree_sizes) if is_readable_tenant(name)}
        if strangers:
            log.error("chain_break_found", tenants=sorted(strangers), error="no tenant can have such a name")
        for tenant_id, head_seq in behind.items():
            if tenant_id in strangers:
                continue
            tenant = self._tenant(tenant_id)
            tenant.head_seq = max(tenant.head_seq, head_seq)
            tenant.unsigned_since_s = time.monotonic()
            self._grown.add(tenant_id)
        for tenant_id, tree_size in tree_sizes.items():
            if tenant_id not in strangers and not self._is_kept(tenant_id, tree_size):
                self._sign_again(tenant_id, tree_size)

    def _is_kept(self, tenant_id: str, tree_size: int) -> bool:
        """Whether the checkpoint beside the WAL is of that size and by the key that signs now."""
        kept = self._checkpoints.load(tenant_id)
        return (
            kept is not None
            and self._checkpoints.size(tenant_id) >= tree_size
            and is_signed_by(kept, self.origin(tenant_id), self._keys.log_signer.public_key)
        )

    def _sign_again(self, tenant_id: str, tree_size: int) -> None:
        tenant = self._tenant(tenant_id)
        tenant.is_kept = False
        tenant.head_seq = max(tenant.head_seq, tree_size)
        self._grown.add(tenant_id)

    async def log_key_changed(self) -> None:
        """Sign every tenant's checkpoint anew, soon; the earlier key may be revoked any time.

        Raises:
            DATABASE_FAULTS: the tenants cannot be listed.
        """
        async with self._pool.acquire() as connection:
            tree_sizes = await store.tree_sizes(connection)
        for tenant_id, tree_size in tree_sizes.items():
            if is_readable_tenant(tenant_id):
                self._sign_again(tenant_id, tree_size)
        self._wake.set()

    def _take_due(self, overdue: set[str]) -> set[str]:
        """The tenants to attend to now. Those whose rows were found broken wait for their turn; trees to be made again
        are, one after the other, beside everything else."""
        now_s = time.monotonic()
        for name in [name for name, at_s in self._retry_at_s.items() if at_s <= now_s]:
            del self._retry_at_s[name]
            self._grown.add(name)
        due, self._grown = (self._grown | overdue) - self._retry_at_s.keys(), set()
        damaged = sorted(name for name in due if self._tenants[name].is_tree_damaged)
        if damaged and (self._mending is None or self._mending.done()):
            self._mending = asyncio.get_running_loop().create_task(self._mend_trees(damaged))
        return due.difference(damaged)

    def mend(self, tenant_id: str) -> None:
        """The stored tree or checkpoint was found damaged: make both again from the chain soon, in the background."""
        tenant = self._tenant(tenant_id)
        tenant.is_tree_damaged, tenant.is_kept = True, False
        self._grown.add(tenant_id)
        self._wake.set()

    async def _mend_trees(self, names: Sequence[str]) -> None:
        """Make the stored trees of these tenants again from their chains, each in a transaction of its own."""
        for name in names:
            tenant = self._tenants[name]
            log.error("stored_tree_damaged", tenant_id=name, done="it is made again from the chain")
            try:
                async with self._signing(tenant), self._pool.acquire() as connection, connection.transaction():
                    await store.begin_trees(connection, (name,))
                    await store.lock_trees(connection, (name,))
                    await tree_of_chain(connection, name, self._checkpoints.load(name))
            except LedgerError as error:
                self._note_fault(name, error)
            except DATABASE_FAULTS as error:
                self._delayed((name,), error)
            else:
                tenant.tree = None
                tenant.is_tree_damaged, tenant.is_kept = False, False
                self._grown.add(name)
                self._wake.set()

    async def _sleep_until_grown(self) -> None:
        try:
            async with asyncio.timeout(HOUSEKEEPING_INTERVAL_S):
                await self._wake.wait()
        except TimeoutError:
            return

    async def _follow_all(self, names: Sequence[str]) -> set[str]:
        """One turn for the tree of each tenant, many in one transaction; returns those that could not be followed."""
        groups = [
            names[first : first + TENANTS_PER_TRANSACTION_MAX]
            for first in range(0, len(names), TENANTS_PER_TRANSACTION_MAX)
        ]
        return set().union(*await asyncio.gather(*map(self._follow, groups)))

    async def _follow(self, names: Sequence[str]) -> set[str]:
        """One turn for the trees of these tenants in one transaction; returns who failed, or is being signed now."""
        async with self._turns, AsyncExitStack() as held:
            busy = {name for name in names if self._tenants[name].lock.locked()}
            self._grown |= busy
            names = [name for name in names if name not in busy]
            if not names:
                return busy
            for name in names:
                await held.enter_async_context(self._tenants[name].lock)
            try:
                async with self._pool.acquire() as connection:
                    faults = await self._advance(connection, names)
            except BaseException as error:
                for name in names:
                    self._tenants[name].tree = None
                if not isinstance(error, DATABASE_FAULTS):
                    raise
                self._delayed(names, error)
                return busy.union(names)
            for name in names:
                tenant = self._tenants[name]
                if name in faults:
                    self._note_fault(name, faults[name])
                elif tenant.tree is not None and tenant.tree.size < tenant.head_seq:
                    self._grown.add(name)
                elif not self._sign_snapshots and tenant.tree is not None:
                    tenant.signed_seq = tenant.tree.size
                    self._forget_signed(tenant)
        return busy.union(faults)

    async def _attend(self, tenant_id: str, *, sign_rest: bool) -> None:
        """One turn for the snapshots of a tenant."""
        tenant = self._tenants[tenant_id]
        try:
            async with self._turns, self._signing(tenant), self._pool.acquire() as connection:
                if tenant.tree is None:
                    for fault in (await self._advance(connection, (tenant_id,))).values():
                        raise fault
                await self._sign_batches(connection, tenant_id, tenant, sign_rest, SNAPSHOTS_PER_TURN)
                self._forget_signed(tenant)
        except LedgerError as error:
            self._note_fault(tenant_id, error)
        except DATABASE_FAULTS as error:
            self._delayed((tenant_id,), error)
        else:
            if self._is_snapshot_due(tenant):
                self._grown.add(tenant_id)

    def _note_fault(self, tenant_id: str, error: LedgerError) -> None:
        """One tenant could not be followed or signed."""
        if isinstance(error, StoredTreeError):
            log.error("stored_tree_damaged", tenant_id=tenant_id, error=str(error))
            self.mend(tenant_id)
        elif isinstance(error, ChainBrokenError):
            if self._node.unsigned.get(tenant_id) != str(error):
                log.error("chain_break_found", tenant_id=tenant_id, error=str(error))
            self._node.unsigned[tenant_id] = str(error)
            self._retry_at_s[tenant_id] = time.monotonic() + BROKEN_RETRY_S
        elif isinstance(error, SignerAwayError):
            self._unsigned.add(tenant_id)
        else:
            self._delayed((tenant_id,), error)

    def _delayed(self, names: Sequence[str], error: BaseException) -> None:
        """Try these tenants again, later."""
        self.last_error = f"{type(error).__name__}: {error}"
        log.warning("signing_delayed", tenants=names[:10], error=self.last_error)
        self._grown.update(names)

    async def sign_now(self, tenant_id: str) -> list[dict[str, object]]:
        """Bring tree, checkpoint and snapshots of the tenant up to its head; returns the new snapshots.

        Raises:
            SigningUnavailableError: ``chain.sign_snapshots`` is off, the signer does not answer, or rows were changed.
        """
        if not self._sign_snapshots:
            raise SigningUnavailableError("chain.sign_snapshots is off on this node")
        tenant = self._tenant(tenant_id)
        target_seq = tenant.head_seq
        async with self._signing(tenant), self._pool.acquire() as connection:
            size_before = -1
            while tenant.tree is None or size_before < tenant.tree.size:
                size_before = tenant.tree.size if tenant.tree is not None else -1
                for fault in (await self._advance(connection, (tenant_id,))).values():
                    self._note_fault(tenant_id, fault)
                    raise fault
                assert tenant.tree is not None
                if target_seq and tenant.tree.size >= target_seq:
                    break
            made = await self._sign_batches(connection, tenant_id, tenant, True, None)
            self._forget_signed(tenant)
            return made

    @asynccontextmanager
    async def _signing(self, tenant: _Tenant) -> AsyncIterator[None]:
        """The tenant's lock; after a failure, unless it is the signer's, nothing that was known of it is believed."""
        async with tenant.lock:
            try:
                yield
            except SignerAwayError:
                raise
            except BaseException:
                tenant.tree = None
                tenant.signed_seq = None
                raise

    def _tenant(self, tenant_id: str) -> _Tenant:
        tenant = self._tenants.get(tenant_id)
        if tenant is None:
            tenant = self._tenants[tenant_id] = _Tenant()
        return tenant

    def _remember(self, tenant: _Tenant, rows: list[LinkRow]) -> None:
        """Keep ``rows`` for the next turn, unless that would be too much; then they are read back."""
        if tenant.recent and rows[0].seq != tenant.recent[-1].seq + 1:
            self._forget(tenant)
        self._recent_count += len(rows)
        tenant.recent += rows
        if self._recent_count > RECENT_LINKS_MAX:
            for other in self._tenants.values():
                self._forget(other)

    def _forget(self, tenant: _Tenant) -> None:
        self._recent_count -= len(tenant.recent)
        tenant.recent = []
        tenant.forget_leaves()

    def _forget_signed(self, tenant: _Tenant) -> None:
        """Drop kept links that are in the tree and in a snapshot."""
        done_seq = min(tenant.tree.size if tenant.tree is not None else 0, tenant.signed_seq or 0)
        if tenant.recent and tenant.recent[0].seq <= done_seq:
            kept = tenant.recent[done_seq - tenant.recent[0].seq + 1 :]
            self._recent_count -= len(tenant.recent) - len(kept)
            tenant.recent = kept
        tenant.forget_leaves(done_seq)

    def _remembered(self, tenant: _Tenant, from_seq: int, limit: int) -> list[LinkRow]:
        """Links from ``from_seq`` on as this node chained them, none when it does not know any more."""
        if not tenant.recent or not tenant.recent[0].seq <= from_seq <= tenant.recent[-1].seq:
            return []
        start = from_seq - tenant.recent[0].seq
        return tenant.recent[start : start + limit]

    async def _links_to_follow(
        self, connection: Connection, tenant_id: str, tenant: _Tenant, tree_size: int
    ) -> list[LinkRow]:
        """The links behind ``tree_size``: those this node chained, else from Postgres, every row checked."""
        links = self._remembered(tenant, tree_size + 1, LINKS_PER_TURN)
        if not links:
            prev_link = await store.read_link(connection, tenant_id, tree_size)
            rows = await store.read_entries(connection, tenant_id, tree_size + 1, ENTRIES_PER_TURN)
            links = checked_links(tenant_id, tree_size, prev_link, rows, tenant.recent)
            is_kept = self._checkpoints.load(tenant_id) is not None
            links = links[: await self._own.vouched(tenant_id, rows, is_kept=is_kept)]
        return links

    def _overdue(self) -> set[str]:
        if not self._sign_snapshots or not self._keys.may_try():
            return set()
        oldest_s = time.monotonic() - self._batch_interval_s
        return {
            name
            for name, tenant in self._tenants.items()
            if tenant.unsigned_since_s is not None and tenant.unsigned_since_s <= oldest_s
        }

    def _move_mark(self) -> None:
        """Raise ``signed_lsn`` once every tenant that was unsigned at the mark has been signed that far."""
        lsn, waiting = self._mark
        for name in [name for name, seq in waiting.items() if (self._tenants[name].signed_seq or 0) >= seq]:
            del waiting[name]
        if not waiting:
            self.signed_lsn = lsn
            unsigned = {
                name: tenant.head_seq
                for name, tenant in self._tenants.items()
                if (tenant.signed_seq or 0) < tenant.head_seq
            }
            self._mark = (self._node.chained.lsn, unsigned)

    # --- tree and checkpoint ----------------------------------------------------------------------

    async def _advance(self, connection: Connection, names: Sequence[str]) -> dict[str, LedgerError]:
        """Append one turn of links to the tree of each tenant and sign its checkpoint; all in one transaction.

        The caller holds the tenants' locks. What is wrong with one tenant keeps none of the others: returns the faults.
        """
        faults: dict[str, LedgerError] = {}
        grown: dict[str, GrownTree] = {}
        async with connection.transaction():
            if new := [name for name in names if self._tenants[name].tree is None]:
                await store.begin_trees(connection, new)
            locked = await store.lock_trees(connection, names)
            for name in set(names).difference(stored.tenant_id for stored in locked):
                faults[name] = StoredTreeError(f"the stored tree of tenant {name} is gone")
                self._tenants[name].tree = None
            for stored in locked:
                tenant = self._tenants[stored.tenant_id]
                try:
                    grown[stored.tenant_id] = await self._grow(connection, stored, tenant)
                except LedgerError as error:
                    faults[stored.tenant_id] = error
                    tenant.tree = None
            await store.store_trees(connection, [tree for tree in grown.values() if tree.checkpoint is not None])
        for name, tree in grown.items():
            tenant = self._tenants[name]
            tree.tree.forget_changed()
            tenant.tree = tree.tree
            tenant.unkept = tree.checkpoint or tenant.unkept
            self._node.unsigned.pop(name, None)
        await self._keep([name for name in names if name not in faults])
        self._trim_cache(grown)
        return faults

    async def _grow(self, connection: Connection, stored: store.LockedTree, tenant: _Tenant) -> GrownTree:
        """One tenant's tree, one turn of links longer, with the checkpoint that is due."""
        name, tree = stored.tenant_id, tenant.tree
        if tree is None or tree.size != stored.tree_size:
            tree = await extended_tree(connection, stored, self._checkpoints.load(name))
            await self._check_followed(connection, name, tree.size)
            tenant.forget_leaves()
        links = await self._links_to_follow(connection, name, tenant, tree.size)
        self._append(tenant, tree, links)
        if not tree.size or not (links or not tenant.is_kept or not self._covers(stored.checkpoint, name, tree)):
            return GrownTree(name, tree, None)
        head = Checkpoint(self.origin(name), tree.size, tree.root())
        return GrownTree(name, tree, sign_checkpoint(head, self._keys.log_signer))

    async def _check_followed(self, connection: Connection, name: str, tree_size: int) -> None:
        """What another has put into the stored tree, behind what this node keeps a checkpoint of, bears its name only
        where that is true.

        Raises:
            ChainBrokenError: it does not.
        """
        kept_size = self._checkpoints.size(name)
        seq = kept_size
        while rows := await store.read_entries_of(
            connection, name, self._node.node_id, seq + 1, tree_size, ENTRIES_PER_TURN
        ):
            if await self._own.vouched(name, rows, is_kept=kept_size > 0) < len(rows):
                raise SigningUnavailableError(f"tenant {name} grows while it is looked at; it is signed soon")
            seq = rows[-1][0]

    def _covers(self, note: str | None, tenant_id: str, tree: tiles.TileTree) -> bool:
        """Whether ``note`` is a checkpoint of just this tree, by whichever node's key."""
        if note is None:
            return False
        try:
            return checkpoint.parse(parse_note(note).text) == Checkpoint(self.origin(tenant_id), tree.size, tree.root())
        except LedgerError:
            return False

    def _append(self, tenant: _Tenant, tree: tiles.TileTree, links: Sequence[LinkRow]) -> None:
        """Append ``links``; of those that this node chained, the snapshots will need leaf hashes and roots again."""
        leaves = [merkle.leaf_hash(bytes.fromhex(row.chain_link)) for row in links]
        if links and not self._remembered(tenant, links[0].seq, 1):
            tenant.forget_leaves()
            tree.append_leaf_hashes(leaves)
            return
        if not tenant.leaves:
            tenant.first_leaf_seq = tree.size + 1
        tenant.leaves += leaves
        to_boundary = self._batch_size - (tree.size - (tenant.signed_seq or 0)) % self._batch_size
        at = 0
        for end in (*range(to_boundary, len(leaves), self._batch_size), len(leaves)):
            tree.append_leaf_hashes(leaves[at:end])
            tenant.roots[tree.size] = tree.root()
            at = end

    async def _keep(self, names: Sequence[str]) -> None:
        """Bring the newest checkpoints beside the WAL; each is committed by now."""
        unkept = {name: note for name in names if (note := self._tenants[name].unkept) is not None}
        if unkept:
            try:
                await asyncio.to_thread(self._checkpoints.store, unkept)
            except OSError as error:
                self.checkpoint_fault = f"checkpoints cannot be written beside the WAL: {error}"
                raise
            self.checkpoint_fault = None
        log_key = self._keys.log_signer.public_key
        for name, note in unkept.items():
            tenant = self._tenants[name]
            tenant.unkept = None
            self._own.forget(name, checkpoint.parse(parse_note(note).text).size)
            covers = tenant.tree is not None and tenant.tree.size >= tenant.head_seq
            tenant.is_kept = covers and is_signed_by(note, self.origin(name), log_key)

    def _trim_cache(self, used: Iterable[str]) -> None:
        """Keep the trees that were used last."""
        for name in used:
            self._cached[name] = None
            self._cached.move_to_end(name)
        surplus = len(self._cached) - TREES_CACHED_MAX
        for name in [name for name in self._cached if not self._tenants[name].lock.locked()][: max(0, surplus)]:
            del self._cached[name]
            self._tenants[name].tree = None

    # --- snapshots --------------------------------------------------------------------------------

    async def _sign_batches(
        self,
        connection: Connection,
        tenant_id: str,
        tenant: _Tenant,
        sign_rest: bool,
        snapshots_max: int | None,
    ) -> list[dict[str, object]]:
        assert tenant.tree is not None
        since_s = tenant.unsigned_since_s
        if tenant.signed_seq is None:
            await self._load_signed(connection, tenant_id, tenant)
        made: list[dict[str, object]] = []
        while (unsigned := tenant.tree.size - (tenant.signed_seq or 0)) > 0:
            if unsigned < self._batch_size and not sign_rest:
                return made
            if len(made) == snapshots_max:
                tenant.unsigned_since_s = since_s
                return made
            row = await self._sign_batch(connection, tenant_id, tenant)
            if row is None:
                await self._load_signed(connection, tenant_id, tenant)
            else:
                made.append(row)
                self._metrics.batch_snapshots.inc()
                tenant.unsigned_since_s = time.monotonic()
        all_signed = (tenant.signed_seq or 0) >= tenant.head_seq
        tenant.unsigned_since_s = None if all_signed else time.monotonic()
        return made

    def _is_snapshot_due(self, tenant: _Tenant) -> bool:
        """Whether a batch is full, or it must be looked up how far the tenant is signed."""
        if not self._sign_snapshots:
            return False
        return tenant.signed_seq is None or tenant.head_seq - tenant.signed_seq >= self._batch_size

    async def _load_signed(self, connection: Connection, tenant_id: str, tenant: _Tenant) -> None:
        last = await store.last_snapshot(connection, tenant_id)
        digest = None
        if last is not None:
            digest = _payload_digest(last.dsse_envelope)
            if digest is None or not isinstance(last.to_seq, int) or not 0 < last.to_seq <= last.head_seq:
                raise ChainBrokenError(
                    f"tenant {tenant_id} is signed no further: its newest snapshot, up to seq {last.to_seq}, is not "
                    "one of its chain; run tally verify"
                )
        tenant.signed_seq = last.to_seq if last else 0
        tenant.signed_digest = digest

    async def _sign_batch(self, connection: Connection, tenant_id: str, tenant: _Tenant) -> dict[str, object] | None:
        """Sign the next batch; None when another node was first."""
        async with self._keys.signing() as signer:
            claim = await self._claim(connection, tenant_id, tenant, signer.key_id)
            envelope, digest = await self._keys.sign(partial(sign_snapshot, claim, signer))
            row = (
                tenant_id,
                claim.from_seq,
                claim.to_seq,
                claim.snapshot_hlc,
                claim.from_chain_link,
                claim.to_chain_link,
                claim.entry_count,
                claim.merkle_root,
                orjson.dumps(envelope).decode(),
            )
            async with connection.transaction():
                await self._keys.check_window(connection, signer, Hlc.parse(claim.snapshot_hlc))
                inserted = await store.insert_snapshot(connection, row)
        if inserted is None:
            return None
        tenant.signed_seq, tenant.signed_digest = claim.to_seq, digest
        return inserted

    async def _claim(self, connection: Connection, tenant_id: str, tenant: _Tenant, key_id: str) -> SnapshotClaim:
        """What the next batch's snapshot says."""
        assert tenant.tree is not None
        from_seq = (tenant.signed_seq or 0) + 1
        entry_count = min(self._batch_size, tenant.tree.size - from_seq + 1)
        to_seq = from_seq + entry_count - 1
        links = self._remembered(tenant, from_seq, entry_count)
        leaf_hashes, tree_root = tenant.leaves_of(from_seq, to_seq), tenant.roots.get(to_seq)
        if min(len(links), len(leaf_hashes)) < entry_count or tree_root is None:
            if len(links) < entry_count:
                links = await store.read_links(connection, tenant_id, from_seq, entry_count)
            leaf_hashes = leaf_hashes_of(tenant_id, links, entry_count)
            tree_root = await proved_root(connection, tenant_id, tenant.tree, from_seq, leaf_hashes)
        last = links[-1]
        return SnapshotClaim(
            tenant_id=tenant_id,
            from_seq=from_seq,
            to_seq=last.seq,
            from_chain_link=links[0].chain_link,
            to_chain_link=last.chain_link,
            entry_count=len(links),
            merkle_root=merkle.root(leaf_hashes).hex(),
            tree_size=last.seq,
            tree_root=tree_root.hex(),
            snapshot_hlc=last.t_hlc,
            previous_snapshot=tenant.signed_digest,
            node_id=self._node.node_id,
            key_id=key_id,
        )


def _payload_digest(dsse_envelope: str) -> str | None:
    """SHA-256 of what the envelope signs, None where somebody put something else in its place."""
    try:
        return hashlib.sha256(base64.b64decode(orjson.loads(dsse_envelope)["payload"])).hexdigest()
    except (ValueError, TypeError, KeyError):
        return None
