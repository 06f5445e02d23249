"""Importing bundles: verified whole first, then merged into the chains of their tenants in bounded transactions.

One import of some files, in order::

    1. the keys that this ledger trusts are read; without any nothing is imported
    2. every bundle is verified wholly against them; in the same pass its entries are collected and sorted into the
       order of the merge: (HLC, origin log, seq there)
    3. once all bundles are valid: an entry that is not acceptable in this ledger is rejected
    4. new tenants are created
    5. batch by batch, each in one transaction that holds the heads: an entry that is already chained is a duplicate,
       the rest is chained; with it the progress of this set of bundles is stored. While PostgreSQL stores the rows of
       one batch, the next is looked up, decided and linked; if the heads have changed by then, that is repeated under
       their locks

Nothing is stored before 4, so an invalid bundle leaves nothing. After that the import may stop anywhere: importing the
same set again, here or on another node of the ledger, continues after the last batch, and a fully imported set adds
nothing. The stored progress is verified in the chains before it is used. Imports bypass the WAL and do not change the
clock; the locks of the heads serialize them with the appenders of this and other nodes.
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Final

import asyncpg

from app.runtime.logs import log
from app.runtime.metrics import Metrics
from app.runtime.postgres import DATABASE_FAULTS
from app.runtime.state.node import Node
from app.share.bundle.merging import Departures, ReadyBatch, Sorter, decide_and_link, read_existing
from app.share.bundle.staging import StagedFile, check_disk_room
from app.share.bundle.taking import (
    Born,
    Expect,
    TakenBundle,
    Terms,
    check_births,
    check_relayed,
    signed_manifest,
    take_verified,
)
from app.store import Connection, chaining, exchange, exclusions
from app.store import node as node_store
from app.store.appended import AppendedEntries
from app.store.chain_reads import find_by_seq, find_existing
from app.store.chaining import ChainHead
from app.store.exchange import Import
from app.store.notary import read_leaf_hashes, read_link
from app.store.reading import run_in
from app.trust.retention import RetentionReader
from ledger.bundle.merge import ClockBounds, Incoming, decide, events_to_find, note_beginning, set_digest
from ledger.chain import Linker
from ledger.errors import (
    BundleInvalidError,
    ChainDamagedError,
    ClockSkewError,
    ConfigurationError,
    DatabaseUnavailableError,
    InvalidInputError,
    NotReadyError,
    UntrustedKeyError,
    reported_as,
)
from ledger.machines.exclusions import NO_STATEMENTS
from signing.files import close_for_good
from signing.keys import Keyring, KnownCallers
from signing.manifest import RangeManifest

ENTRIES_A_TRANSACTION: Final = 1000
BYTES_A_TRANSACTION: Final = 8 << 20
"""Payload bytes in one transaction, unless a single entry is longer."""
CONFLICTS_LISTED_MAX: Final = 1000
"""Conflicts listed in an answer; all are counted and chained."""
BEGIN_TENANT_TIMEOUT_S: Final = 60.0


@dataclass(slots=True)
class _Set:
    """The bundles of one import, verified, and their entries in order."""

    digest: str
    """SHA-256 over the bundles' digests, sorted."""
    tenants: frozenset[str]
    beginnings: Mapping[str, Incoming]
    """First entry of each chain of an older link version, or of the range of it, by tenant."""
    in_order: Iterator[Incoming]
    is_held: bool
    """Whether memory holds all of them."""
    outcome: Import
    """The outcome so far, which is stored unless the set was fully imported before."""
    followed_log: str | None = None
    """The log of a peer whose next range this is, fetched or brought."""


class BundleImporter:
    """Imports bundles into one ledger for one node, one set at a time."""

    def __init__(
        self,
        *,
        pool: asyncpg.Pool[asyncpg.Record],
        node: Node,
        folder: Path,
        trusted_keys: Path | None,
        begin_tenant: Callable[[str], Awaitable[None]],
        read_heads: Callable[..., Awaitable[dict[str, ChainHead]]],
        on_imported: Callable[[AppendedEntries], None],
        on_damaged: Callable[[ChainDamagedError], None],
        metrics: Metrics,
        retention: RetentionReader,
        disk_reserve_bytes: int = 0,
        trusting: Callable[[Keyring], Keyring] = lambda ring: ring,
        callers: Callable[[], KnownCallers] = KnownCallers,
    ) -> None:
        """``folder`` is for what sorting does not hold in memory; it leaves ``disk_reserve_bytes`` free on that disk.
        ``read_heads`` reads heads and rejects those of a database that went back, as ``Heads.stored``; ``on_imported``
        runs after each commit, ``on_damaged`` when rows of a tenant are found damaged. ``trusting`` gives the trusted
        keys, from those of the file; ``callers`` gives those of this ledger."""
        self._pool = pool
        self._node = node
        self._folder = folder
        self._trusted_keys = trusted_keys
        self._begin_tenant = begin_tenant
        self._read_heads = read_heads
        self._on_imported = on_imported
        self._on_damaged = on_damaged
        self._metrics = metrics
        self._retention = retention
        self._disk_reserve_bytes = disk_reserve_bytes
        self._trusting = trusting
        self._callers = callers
        self._turn = asyncio.Lock()
        self._linkers: dict[str, Linker] = {}

    async def log_unfinished(self) -> None:
        """Log the imports that an earlier process left unfinished; repeating their calls finishes them."""
        with contextlib.suppress(*DATABASE_FAULTS):
            async with self._pool.acquire() as connection:
                for digest, position, entries in await exchange.unfinished_imports(connection):
                    log.warning("bundle_import_unfinished", set_digest=digest, position=position, entries=entries)

    async def check_trusting(self) -> None:
        """Return if there are trusted keys to import from.

        Raises:
            UntrustedKeyError: there are none, so no upload needs to be read.
        """
        await asyncio.to_thread(self.keys)

    async def check_asked_for(self, file: StagedFile, expect: Expect) -> None:
        """Return if the bundle that another ledger sent is the expected one. A long one that is not is rejected here,
        before other imports wait for it.

        Raises:
            UntrustedKeyError: no trusted keys are configured, or none of them signed the bundle.
            BundleRefusedError: it is no whole bundle.
            Exception: as ``expect``.
        """
        expect(await asyncio.to_thread(lambda: signed_manifest(file, self.keys())))

    async def run(
        self,
        files: Sequence[StagedFile],
        *,
        dry_run: bool,
        admit: Callable[[RangeManifest], Awaitable[None]] | None = None,
        expect: Expect | None = None,
    ) -> Import:
        """Import the bundles in ``files``, or with ``dry_run`` do everything except storing. Once all bundles are
        valid, ``admit`` is called with each manifest and rejects one that the caller may not import. With ``expect`` it
        is one bundle, in which a peer sent the range of its chain that follows what was imported of it: it is rejected
        before it is verified if it is not the expected one.

        Raises:
            UntrustedKeyError: no trusted keys are configured, or none of them signed a bundle.
            BundleRefusedError: a bundle is not valid, or an entry of it is not acceptable in a ledger.
            ClockSkewError: an entry is further ahead than ``hlc.max_clock_skew``.
            InvalidInputError: the bundle is of ``_system``, or is the beginning of a chain that already exists.
            ArchivedError: an entry may have left here with a prune; batches before it are stored.
            NotReadyError: the service stops, another node imports the same, or the disk is too full to sort on.
            ChainDamagedError: PostgreSQL did not store all of a batch, or a chain has changed since this node's append.
            DatabaseUnavailableError, DatabaseWentBackError: stored batches remain; repeat the call.
        """
        async with self._turn, contextlib.AsyncExitStack() as stack:
            began_s = time.perf_counter()
            spill = tempfile.SpooledTemporaryFile(1, dir=str(self._folder))  # noqa: SIM115
            stack.callback(close_for_good, spill)
            sorter = Sorter(spill, partial(check_disk_room, self._folder, self._disk_reserve_bytes))
            with self._naming_faults():
                terms = await self._terms(sorter)
            taken = await asyncio.to_thread(self._take, files, terms, expect)
            if admit is not None:
                for each in taken:
                    await admit(each.manifest)
            with self._naming_faults():
                bundles = await self._as_set(taken, sorter)
                bundles.followed_log = await self._followed_log(taken, is_next_range=expect is not None)
                await (self._pretend if dry_run else self._store)(bundles)
            outcome = bundles.outcome
            log.info(
                "bundles_imported",
                set_digest=bundles.digest,
                bundles=outcome.bundles,
                entries=outcome.entries,
                imported=outcome.imported,
                duplicates=outcome.duplicates,
                conflicts=len(outcome.conflicts),
                dry_run=dry_run,
                seconds=round(time.perf_counter() - began_s, 3),
            )
            return outcome

    @contextlib.contextmanager
    def _naming_faults(self) -> Iterator[None]:
        try:
            yield
        except ChainDamagedError as error:
            self._on_damaged(error)
            raise
        except DATABASE_FAULTS as error:
            if isinstance(error, asyncpg.PostgresError) and chaining.is_record_fault(error):
                raise BundleInvalidError(f"PostgreSQL refuses an entry of these bundles: {error}") from error
            raise DatabaseUnavailableError(
                f"the database does not answer ({type(error).__name__}); import the same bundles again to go on"
            ) from error

    # --- before anything is stored ----------------------------------------------------------------

    def keys(self) -> Keyring:
        """The keys that this ledger trusts; runs in a thread.

        Raises:
            UntrustedKeyError: there are none.
        """
        ring = self.known_keys()
        if not len(ring):
            raise UntrustedKeyError(
                "this ledger trusts no keys to import from: name a PEM file, a folder of them or saved /v1/keys JSON "
                "in bundle.trusted_keys, or admit the key of a peer (tally peer list)"
            )
        return ring

    def known_keys(self) -> Keyring:
        """The same, where there may be none.

        Raises:
            UntrustedKeyError: the file of keys cannot be read.
        """
        ring = Keyring(())
        if self._trusted_keys is not None:
            with reported_as(UntrustedKeyError, "bundle.trusted_keys", ConfigurationError):
                ring = Keyring.load(self._trusted_keys, may_be_absent=True)
        # Callers of other ledgers are theirs to judge, and so is what had to be signed there (decision 0110).
        return Keyring(self._trusting(ring), callers=KnownCallers(self._callers().by_key))

    async def _terms(self, sorter: Sorter) -> Terms:
        bounds = ClockBounds(self._node.wall.now_ms() + self._node.clock.max_clock_skew_ms, self._node.clock.last)
        log_origin = await run_in(self._pool.acquire(), node_store.log_origin)
        loop = asyncio.get_running_loop()

        def check_born(tenant_id: str, born: Born) -> None:
            asyncio.run_coroutine_threadsafe(self._check_born(tenant_id, born), loop).result()

        def check_of_others(tenant_id: str, source_log: str, relayed: Sequence[Incoming]) -> None:
            checked = self._check_relayed(tenant_id, source_log, relayed, log_origin)
            asyncio.run_coroutine_threadsafe(checked, loop).result()

        return Terms(bounds, log_origin, check_born, check_of_others, sorter)

    def _take(self, files: Sequence[StagedFile], terms: Terms, expect: Expect | None) -> list[TakenBundle]:
        """The verified bundles; runs in a thread."""
        keys = self.keys()
        # Each bundle once, in an order that does not depend on the file names.
        by_digest = [file for _, file in sorted({file.digest: file for file in files}.items())]
        return [take_verified(file, keys, terms, expect) for file in by_digest]

    async def _as_set(self, taken: Sequence[TakenBundle], sorter: Sorter) -> _Set:
        beginnings = dict[str, Incoming]()
        for each in taken:
            try:
                each.refuse_if_wrong()
            except ClockSkewError:
                self._node.clock.skew_rejections += 1
                raise
            if each.beginning is not None:
                note_beginning(beginnings, each.beginning)
        return _Set(
            set_digest([each.file.digest for each in taken]),
            frozenset(each.manifest.tenant_id for each in taken),
            beginnings,
            sorter.entries() if sorter.is_small else await asyncio.to_thread(sorter.entries),
            sorter.is_held,
            Import(len(taken), sum(each.count for each in taken)),
        )

    async def _followed_log(self, taken: Sequence[TakenBundle], *, is_next_range: bool) -> str | None:
        """The log of a peer whose next range this is: one that was fetched, or the bundle that an operator brings of
        what left the peer. None if it is no such range."""
        if len(taken) != 1:
            return None
        manifest = taken[0].manifest
        if not is_next_range:
            async with self._pool.acquire() as connection:
                seen = (await exchange.positions(connection, manifest.tenant_id)).get(manifest.origin)
            is_next_range = seen is not None and seen.imported_seq == manifest.from_seq - 1
        return manifest.origin if is_next_range else None

    async def _check_born(self, tenant_id: str, born: Born) -> None:
        async with self._pool.acquire() as connection:
            chained = await find_by_seq(connection, tenant_id, list(born))
            left = await read_leaf_hashes(connection, tenant_id, born.keys() - chained.keys())
        check_births(born, chained, left)

    async def _check_relayed(
        self, tenant_id: str, source_log: str, relayed: Sequence[Incoming], log_origin: str | None
    ) -> None:
        async with self._pool.acquire() as connection:
            stated = await exclusions.statements(connection, [tenant_id], log_origin)
            if source_log not in stated.get(tenant_id, NO_STATEMENTS).exclusions(None).logs:
                return
            wanted = events_to_find(relayed)[tenant_id]
            found = await find_existing(connection, tenant_id, wanted)
        check_relayed(source_log, relayed, {t_hlc: entry.event for t_hlc, entry in found.items()})

    async def _check_beginnings(self, connection: Connection, beginnings: Mapping[str, Incoming]) -> None:
        for tenant_id, first in beginnings.items():
            before = None if first.seq == 1 else await read_link(connection, tenant_id, first.seq - 1)
            if before != first.prev_chain_link:
                raise InvalidInputError(
                    f"a chain of an older link version can only be imported from its beginning on; the entries before "
                    f"seq {first.seq} are not those of tenant {tenant_id} here"
                )
            if await read_link(connection, tenant_id, first.seq) not in (None, first.chain_link):
                raise InvalidInputError(
                    f"a chain of an older link version can only be imported as the beginning of an empty chain; tenant "
                    f"{tenant_id} has other entries from seq {first.seq} on"
                )

    # --- storing ----------------------------------------------------------------------------------

    async def _store(self, bundles: _Set) -> None:
        async with self._pool.acquire() as connection:
            await self._check_beginnings(connection, bundles.beginnings)
            heads = await self._read_heads(connection, bundles.tenants)
            stored = await exchange.read_import(connection, bundles.digest)
        if missing := bundles.tenants - heads.keys():
            for tenant_id in sorted(missing):
                await self._begin(tenant_id)
            heads = await run_in(self._pool.acquire(), self._read_heads, bundles.tenants)
            if missing := bundles.tenants - heads.keys():
                raise NotReadyError(f"tenant {min(missing)} has not begun yet; import the same bundles again")
        begun = bundles.outcome._replace(from_seqs={tenant: head.seq for tenant, head in heads.items()})
        if stored is not None:
            begun = begun._replace(has_ended=True) if stored.has_ended else stored
        bundles.outcome = begun._replace(heads=heads)
        batches = self._unstored(bundles)
        ready = await self._prepare(bundles, await anext(batches, None), heads)
        while ready is not None:
            if self._node.shutting_down:
                raise NotReadyError("the service stops; import the same bundles again to go on")
            ready = await self._store_and_prepare(bundles, ready, batches)

    async def _unstored(self, bundles: _Set) -> AsyncIterator[Sequence[Incoming]]:
        """The entries after the stored position, in batches. Every batch before it is first looked up in the chains. If
        one is incomplete there, the stored progress is wrong, and everything from that batch on is decided again."""
        seen, is_borne_out = 0, True
        async for batch in _batches(islice(bundles.in_order, bundles.outcome.position), bundles.is_held):
            if is_borne_out and await self._is_chained(batch):
                seen += len(batch)
                continue
            if is_borne_out:
                is_borne_out = False
                outcome = bundles.outcome
                log.error("import_progress_not_borne_out", set_digest=bundles.digest, position=outcome.position)
                await run_in(self._pool.acquire(), exchange.restart_import, bundles.digest, seen)
                bundles.outcome = outcome._replace(imported=0, duplicates=seen, jobs_changed=0, conflicts=())
            yield batch
        async for batch in _batches(bundles.in_order, bundles.is_held):
            yield batch

    async def _is_chained(self, batch: Sequence[Incoming]) -> bool:
        async with self._pool.acquire() as connection:
            departures = Departures(self._retention, was_taken=True)
            return not decide(batch, await read_existing(connection, batch, departures)).placed

    async def _begin(self, tenant_id: str) -> None:
        try:
            async with asyncio.timeout(BEGIN_TENANT_TIMEOUT_S):
                await self._begin_tenant(tenant_id)
        except TimeoutError as error:
            raise NotReadyError(f"tenant {tenant_id} could not begin; import the same bundles again") from error

    async def _store_and_prepare(
        self, bundles: _Set, ready: ReadyBatch, batches: AsyncIterator[Sequence[Incoming]]
    ) -> ReadyBatch | None:
        """Store a batch and prepare the next one meanwhile, from the known heads and entries after this one. Returns
        the next batch, None after the last."""
        # Before its rows are sent, a transaction is round trips, which the thread that prepares the next would delay.
        sent = asyncio.Event()
        storing = asyncio.create_task(self._store_batch(bundles, ready, sent.set))
        storing.add_done_callback(lambda _: sent.set())
        try:
            await sent.wait()
            entries = await anext(batches, None)
            then = await self._prepare(bundles, entries, ready.heads_after, ready)
        except asyncio.CancelledError:
            storing.cancel()
            await asyncio.wait((storing,))
            raise
        except Exception:
            await storing
            raise
        stored = await storing
        return then if stored is ready else await self._prepare(bundles, entries, stored.heads_after, stored)

    async def _prepare(
        self,
        bundles: _Set,
        entries: Sequence[Incoming] | None,
        heads: Mapping[str, ChainHead],
        before: ReadyBatch | None = None,
    ) -> ReadyBatch | None:
        if entries is None:
            return None
        return await run_in(
            self._pool.acquire(), decide_and_link, entries, heads, self._linkers, self._departures(bundles), before
        )

    def _departures(self, bundles: _Set) -> Departures:
        return Departures(self._retention, bundles.outcome.has_ended, bundles.followed_log)

    async def _store_batch(self, bundles: _Set, ready: ReadyBatch, on_sent: Callable[[], None]) -> ReadyBatch:
        """Store one batch in one transaction. Returns the stored batch, which is ``ready`` unless the heads changed.
        ``on_sent`` is called once its rows are being sent."""
        before = bundles.outcome
        async with self._pool.acquire() as connection, connection.transaction():
            # 1. lock this set and the heads
            if not before.has_ended:
                now = await exchange.begin_import(connection, bundles.digest, before, self._node.node_id)
                if (now.imported, now.duplicates) != (before.imported, before.duplicates):
                    raise NotReadyError("another node imports the same bundles now; import them again later")
            heads = await self._read_heads(connection, ready.existing, chaining.lock_heads)
            # 2. if another appender moved a head, decide and link again
            if any(head != ready.heads[tenant] for tenant, head in heads.items()):
                heads_now, departures = {**ready.heads, **heads}, self._departures(bundles)
                ready = await decide_and_link(connection, ready.entries, heads_now, self._linkers, departures)
            decided, appended = ready.decided, ready.appended
            changed = await exchange.count_untouched(connection, decided.jobs(), before.from_seqs)
            # 3. store
            if decided.placed:
                await chaining.copy_entries(connection, appended.log_rows, on_sent)
                await chaining.move_heads(connection, appended.heads())
            after = _with_batch(before, ready, changed)
            if not before.has_ended:
                await exchange.advance_import(
                    connection,
                    bundles.digest,
                    after,
                    has_new_conflicts=len(after.conflicts) > len(before.conflicts),
                )
        bundles.outcome = after
        self._metrics.count("scheduler_chain_entries", len(decided.placed))
        self._metrics.count("bundle_imported_entries", len(decided.placed))
        self._on_imported(appended)
        return ready

    # --- all but storing --------------------------------------------------------------------------

    async def _pretend(self, bundles: _Set) -> None:
        """As ``_store``, onto the current heads, without storing."""
        touched: set[tuple[str, str]] = set()
        ready: ReadyBatch | None = None
        async with self._pool.acquire() as connection:
            await self._check_beginnings(connection, bundles.beginnings)
            heads = await chaining.read_heads(connection, sorted(bundles.tenants))
            heads = {tenant: heads.get(tenant, ChainHead(0, None, None)) for tenant in bundles.tenants}
            has_ended = await exchange.has_ended(connection, bundles.digest)
            bundles.outcome = outcome = bundles.outcome._replace(heads=heads, has_ended=has_ended)
            async for batch in _batches(bundles.in_order, bundles.is_held):
                if self._node.shutting_down:
                    raise NotReadyError("the service stops")
                departures = self._departures(bundles)
                ready = await decide_and_link(connection, batch, outcome.heads, self._linkers, departures, ready)
                jobs = ready.decided.jobs()
                outcome = _with_batch(outcome, ready, len(jobs - touched))
                touched |= jobs
        bundles.outcome = outcome


def _with_batch(outcome: Import, batch: ReadyBatch, jobs_changed: int) -> Import:
    """The outcome plus that of ``batch``."""
    decided = batch.decided
    if decided.conflicts:
        log.error("hlc_conflict", count=len(decided.conflicts), first=decided.conflicts[0])
    return outcome._replace(
        imported=outcome.imported + len(decided.placed),
        duplicates=outcome.duplicates + decided.duplicates,
        jobs_changed=outcome.jobs_changed + jobs_changed,
        conflicts=[*outcome.conflicts, *decided.conflicts][:CONFLICTS_LISTED_MAX],
        heads={**outcome.heads, **batch.heads_after},
    )


async def _batches(in_order: Iterator[Incoming], is_held: bool) -> AsyncIterator[Sequence[Incoming]]:
    """Entries in order, bounded in number and bytes, read in a thread unless memory holds them."""
    held: list[Incoming] = []

    def take() -> list[Incoming]:
        batch, size = held[:], sum(len(entry.payload) for entry in held)
        held.clear()
        for entry in islice(in_order, ENTRIES_A_TRANSACTION - len(batch)):
            size += len(entry.payload)
            if batch and size > BYTES_A_TRANSACTION:
                held.append(entry)
                break
            batch.append(entry)
        return batch

    while batch := take() if is_held else await asyncio.to_thread(take):
        yield batch
