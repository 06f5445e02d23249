"""Restoring entries that PostgreSQL lost, or continuing without them. The service cannot run meanwhile: its lock is
held.

From the WAL, in one transaction that is committed only if all of it fits::

    1. the WAL is judged and recovered as at a start, but PostgreSQL may be older than it; every record is looked up
       in the chain by HLC and digest, whatever PostgreSQL says of positions
    2. a higher epoch, so that no other process chains
    3. every record that PostgreSQL does not know is chained, by the appender itself
    4. every chain that got entries has what the checkpoints beside the WAL say was signed

The appender is deterministic: if no other node wrote to a chain, its rows come back with the same links, which step 4
checks. If other nodes wrote, their rows come back first, from bundles (app.share.bundle.recovery).

A fork abandons lost entries: the log continues under a new origin, the checkpoints of the old one are moved away, and
the next start records the fork in ``_system``. Each step may be repeated after a crash.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import asyncpg

from app.node.start import procedure
from app.node.start.checks import accepting, check_chain, files_usable, kept_origin
from app.node.start.connecting import connected_for_now
from app.node.start.wal import FoundWal, check_chained, find_wal
from app.read import verification
from app.runtime.logs import log
from app.runtime.metrics import Metrics
from app.runtime.settings.config import Settings
from app.runtime.state import kept_files
from app.runtime.state.found_breaks import FoundBreaks
from app.runtime.state.kept_files import Identity
from app.runtime.state.losses import DIFFERING_LISTED_MAX, FORK, Fork, SignedHead, fork_subject
from app.runtime.state.node import Node
from app.share.bundle.recovery import RestoredRange, restore_bundle
from app.store import chaining, sessions
from app.store import node as node_store
from app.store.chaining import ChainHead, WalPosition
from app.store.entry_check import EntryCheck
from app.store.sessions import CONNECT_TIMEOUT_S
from app.trust import node_keys
from app.trust.retention import unjudged_commitments
from app.write.chain.appender import BATCH_ENTRIES_MAX, Appender
from app.write.followers.checkpoints import CheckpointJournal
from app.write.pending.backlog import Backlog, Pending
from app.write.pending.quarantine import Quarantine
from ledger.errors import StartRefusedError, WalFilesError
from ledger.facts.events import SYSTEM_TENANT, SystemAction
from ledger.hlc import Clock
from ledger.positions import BEFORE_FIRST, Lsn
from signing import checkpoint as checkpoints_format
from signing.bundle.reader import BundleChainReader, BundleReader
from signing.judging import judge_bundle, refuse_unless_trusted
from signing.keys import Keyring, Signer
from wal import control as wal_control
from wal.segment import FOLDER_MODE, FolderLock


class Grown(NamedTuple):
    """Entries restored to one chain, and its new end."""

    tenant_id: str
    entries: int
    to_seq: int


class _Locked(NamedTuple):
    """A locked WAL folder and a connection to the database it belongs to."""

    who: Identity
    folder: Path
    connection: asyncpg.Connection[asyncpg.Record]


# --- from the WAL -------------------------------------------------------------------------------------


async def restore_from_wal(
    settings: Settings,
    database_url: str,
    on_progress: Callable[[int], None] = lambda _: None,
    *,
    accept_lost_wal: bool = False,
) -> tuple[list[Grown], list[SignedHead]]:
    """Chain the records of the WAL that PostgreSQL lacks; ``on_progress`` gets the count of records so far. Returns the
    restored entries, and the signed heads that other chains still lack.

    With ``accept_lost_wal`` the WAL may be damaged or end early: its sound records are chained, and the next start,
    which must accept the loss as well, records the others as lost.

    Raises:
        StartRefusedError: there is no such WAL, or it does not restore all that was signed. Nothing was stored.
    """
    async with _alone(settings, database_url) as locked:
        before = await chaining.read_heads(locked.connection)
        origin = await node_store.read_log_origin(locked.connection)
        async with _transaction(locked.connection):
            await _chain_wal(settings, database_url, locked, on_progress, accept_lost_wal=accept_lost_wal)
            after = await chaining.read_heads(locked.connection)
            grown, left_behind = _grown(before, after), []
            for head, error in await _lacking(settings, locked, origin):
                if grown and head.tenant_id not in {each.tenant_id for each in grown}:
                    # Other nodes wrote it: their WALs restore it, and until then every start is refused.
                    log.warning("restore_left_behind", tenant_id=head.tenant_id, error=str(error))
                    left_behind.append(head)
                    continue
                raise StartRefusedError(
                    f"the WAL of node {locked.who.node_id} alone does not bring back what this node signed, so nothing "
                    f"was stored: {error}. If other nodes wrote to that chain, or old segments were removed, bring "
                    "rows back with tally restore --from bundle first; tally restore --fork goes on without them"
                ) from error
        if accept_lost_wal:
            await _lower_chained(locked)
    log.info("restored_from_wal", node_id=locked.who.node_id, entries=sum(each.entries for each in grown))
    return grown, left_behind


def _grown(before: dict[str, ChainHead], after: dict[str, ChainHead]) -> list[Grown]:
    begun = {name: before[name].seq if name in before else 0 for name in sorted(after)}
    return [Grown(name, after[name].seq - seq, after[name].seq) for name, seq in begun.items() if after[name].seq > seq]


async def _lower_chained(locked: _Locked) -> None:
    """Lower the chained position of the control file to that of PostgreSQL: the rest is lost, and accepted as lost.
    Else the next start takes PostgreSQL for older than the WAL."""
    position = await chaining.read_position(locked.connection, locked.who.node_id)
    known = wal_control.load(locked.folder)
    if position is None or known is None:
        return
    chained_lsn = min(known.chained_lsn, position.chained_lsn)
    lowered = known._replace(chained_lsn=Lsn(chained_lsn), signed_lsn=Lsn(min(known.signed_lsn, chained_lsn)))
    wal_control.store(locked.folder, lowered)


async def _find_wal(locked: _Locked, position: WalPosition | None, *, accept_lost_wal: bool) -> FoundWal:
    """The WAL of the folder; PostgreSQL may be older than it.

    Raises:
        StartRefusedError: WAL and PostgreSQL do not belong together, or the WAL is damaged or ends early and that is
            not accepted.
    """
    try:
        return await find_wal(
            locked.folder, locked.who.node_id, position, accept_lost_wal=accept_lost_wal, restoring=True
        )
    except WalFilesError as error:
        raise StartRefusedError(
            f"{error.damage}. Where safekeepers vote, start the node once: it takes the log from them. Else restore "
            f"the WAL folder from a copy, or {accepting(restoring=True)}: what is sound in this folder comes back, "
            "what is not is given up and named in _system"
        ) from error


async def _chain_wal(
    settings: Settings,
    database_url: str,
    locked: _Locked,
    on_progress: Callable[[int], None] = lambda _: None,
    *,
    accept_lost_wal: bool,
) -> None:
    """Steps 1 to 3, in the transaction of the caller."""
    # 1. the WAL
    position = await chaining.read_position(locked.connection, locked.who.node_id)
    wal = await _find_wal(locked, position, accept_lost_wal=accept_lost_wal)
    if accept_lost_wal and (wal.known is None or wal.is_given_up):
        return  # all of it was moved away: the next start appends its sound records again
    if wal.known is None:
        raise StartRefusedError(f"{locked.folder} holds no WAL that was in use; nothing can come back from it")
    await check_chained(locked.connection, wal, trusted_lsn=BEFORE_FIRST)
    # 2. a higher epoch
    epoch = (await procedure.take_epoch(locked.connection, wal, position)).epoch
    # 3. the records
    clock = Clock(wal.node_id, settings.hlc.max_clock_skew_ms, last=wal.highest_hlc())
    node = Node(wal.node_id, settings.region, locked.who.gate, wal.known.wal_id, epoch, clock)
    for watermark in (node.durable, node.committed):
        watermark.advance(wal.last_lsn)
    node.chained.advance(wal.chained_lsn)
    backlog = Backlog(settings.wal.backlog_max_entries)
    connections = iter([locked.connection])

    async def connect() -> asyncpg.Connection[asyncpg.Record]:
        for connection in connections:
            return connection
        raise StartRefusedError(
            f"PostgreSQL failed while the WAL was chained ({appender.database_error}); nothing was stored. If another "
            "session keeps locked what is needed here (see pg_locks and pg_stat_activity), end it or wait for it. Run "
            "this again"
        )

    async with sessions.pool(database_url, connections_max=1, timeout_s=CONNECT_TIMEOUT_S) as pool:
        appender = Appender(
            node=node,
            backlog=backlog,
            connect=connect,
            pool=pool,
            heads={},
            quarantine=_NoQuarantine(locked.folder, node.damaged, {}),
            breaks=FoundBreaks(locked.folder),
            entry_check=EntryCheck(CheckpointJournal(locked.folder).newest),
            floor_of=unjudged_commitments,
            metrics=Metrics(),
            on_chained=lambda _: None,
            on_failure=lambda _: None,
        )
        records, done = wal.unchained(), 0
        while batch := list(islice(records, BATCH_ENTRIES_MAX)):
            backlog.add(batch)
            await appender.chain_committed()
            done += len(batch)
            on_progress(done)


class _NoQuarantine(Quarantine):
    """A damaged or locked tenant ends the restore: no record is skipped, and nothing is listed beside the WAL."""

    def begin(self, tenant_id: str, reason: str, seen: ChainHead | None, waiting: Iterable[Pending]) -> None:
        raise StartRefusedError(
            f"the chain of tenant {tenant_id} is damaged: {reason}. Nothing was stored; mend it first"
        )

    def begin_wait(self, tenant_id: str, reason: str, waiting: Iterable[Pending]) -> None:
        raise StartRefusedError(
            f"the chain of tenant {tenant_id} takes no entries: {reason}. Nothing was stored; end that session or wait "
            "for it, and run this again"
        )


async def _lacking(settings: Settings, locked: _Locked, origin: str) -> list[tuple[SignedHead, StartRefusedError]]:
    """Step 4: the checkpoints beside the WAL that chains of the log ``origin`` do not reach or do not match."""
    log_signer = node_keys.open_keys(locked.folder, settings).log_signer
    heads = await chaining.read_heads(locked.connection)
    lacking = []
    for tenant_id, text in CheckpointJournal(locked.folder).load_all().items():
        try:
            await check_chain(
                locked.connection, tenant_id, heads.get(tenant_id), text, f"{origin}/{tenant_id}", log_signer
            )
        except StartRefusedError as error:
            kept = checkpoints_format.read(text)
            lacking.append((SignedHead(tenant_id, kept.size, kept.root.hex()), error))
    return lacking


# --- from bundles -------------------------------------------------------------------------------------


async def restore_from_bundles(
    settings: Settings, database_url: str, files: Sequence[Path], keys: Path | None, *, may_begin_log: bool = False
) -> list[tuple[Path, RestoredRange]]:
    """Restore the entries of these bundles of this ledger, in the order of their ranges, each bundle in one
    transaction.

    ``keys`` are trusted beside this node's own; keys in ``bundle.trusted_keys`` are for other ledgers. With
    ``may_begin_log`` a database on which no node ever started adopts the log of the bundles.

    Raises:
        BundleRefusedError, UntrustedKeyError: a bundle is not valid; nothing was stored.
        StartRefusedError: a bundle does not fit; the ones before it are restored.
    """
    async with _alone(settings, database_url) as locked:
        own = [signer.public_key for signer in node_keys.open_keys(locked.folder, settings).signers()]
        keyring = Keyring([*own, *(Keyring.load(keys) if keys is not None else ())])
        with contextlib.ExitStack() as stack:
            readers = []
            for file in files:
                reader = stack.enter_context(BundleReader.open(file))
                refuse_unless_trusted(str(file), await judge_bundle(BundleChainReader(reader), keyring))
                readers.append((file, reader))
            readers.sort(key=_in_order)
            if may_begin_log and readers:
                await node_store.settle_log_origin(locked.connection, readers[0][1].manifest.log_origin)
            origin = await node_store.read_log_origin(locked.connection)
            return [(file, await restore_bundle(locked.connection, reader, origin)) for file, reader in readers]


def _in_order(each: tuple[Path, BundleReader]) -> tuple[bool, str, int]:
    """``_system`` first, as it names the tenants; then range by range."""
    manifest = each[1].manifest
    return manifest.tenant_id != SYSTEM_TENANT, manifest.tenant_id, manifest.from_seq


def own_signers(settings: Settings) -> list[Signer]:
    """The keys of the node, made if there are none; that of snapshots first.

    A missing WAL folder is made: the node that starts there is a new one.
    """
    settings.wal_dir.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
    who = kept_files.load_or_make(settings.wal_dir, settings.node_id, settings.gate)
    return node_keys.open_keys(settings.wal_dir / who.node_id, settings).signers()


# --- a fork -------------------------------------------------------------------------------------------


async def fork_log(settings: Settings, database_url: str, reason: str, *, accept_lost_wal: bool = False) -> Fork:
    """Continue under a new log origin, without the lost entries. On a ledger that another node has forked already, only
    move this node's checkpoints of the old origin away. ``accept_lost_wal`` is that of ``restore_from_wal``.

    Raises:
        StartRefusedError: the WAL restores all that was signed, or the new origin equals the old one.
    """
    async with _alone(settings, database_url) as locked:
        connection, folder = locked.connection, locked.folder
        fork = FORK.load(folder)
        if fork is None or fork.to_origin != await node_store.read_log_origin(connection):
            fork = await _begin_fork(settings, database_url, locked, reason, accept_lost_wal=accept_lost_wal)
        FORK.store(folder, fork)
        await node_store.fork_log(connection, fork.from_origin, fork.to_origin)
        CheckpointJournal(folder).set_aside()
        verification.forget_positions(folder)
        node_keys.forget_root(folder)
        await _give_up_what_is_gone(locked, accept_lost_wal=accept_lost_wal)
    log.warning("log_forked", from_origin=fork.from_origin, to_origin=fork.to_origin, reason=fork.reason)
    return fork


async def _begin_fork(
    settings: Settings, database_url: str, locked: _Locked, reason: str, *, accept_lost_wal: bool
) -> Fork:
    connection = locked.connection
    origin = await node_store.read_log_origin(connection)
    if (from_origin := kept_origin(CheckpointJournal(locked.folder)) or origin) != origin:
        if not await node_store.is_recorded(connection, SystemAction.LOG_FORKED, fork_subject(origin)):
            raise StartRefusedError(
                f"this node signed the log {from_origin}, the ledger is {origin}, and _system records no fork between "
                "them: it is another ledger; point database_url to the right one"
            )
        return Fork(from_origin, origin, reason, locked.who.node_id, [], 0)
    # Lost entries are those that the WAL does not restore: chain it, compare, and roll back.
    async with _transaction(connection, is_rehearsal=True):
        await _chain_wal(settings, database_url, locked, accept_lost_wal=accept_lost_wal)
        lacking = [head for head, _ in await _lacking(settings, locked, origin)]
    if not lacking:
        raise StartRefusedError(
            "nothing that this node signed is lost, so there is nothing to fork from: start the service, or run tally "
            "restore --from wal first if the start is refused"
        )
    to_origin = settings.log.origin or f"tallystick.local/{secrets.token_hex(6)}"
    if to_origin == origin:
        raise StartRefusedError(f"log.origin is {origin} as before; set it to the name that the log is to go on as")
    return Fork(origin, to_origin, reason, locked.who.node_id, lacking[:DIFFERING_LISTED_MAX], len(lacking))


async def _give_up_what_is_gone(locked: _Locked, *, accept_lost_wal: bool) -> None:
    """Let the next start chain the records that PostgreSQL lacks, and record those that the WAL no longer holds."""
    connection, folder = locked.connection, locked.folder
    position = await chaining.read_position(connection, locked.who.node_id)
    wal = await _find_wal(locked, position, accept_lost_wal=accept_lost_wal)
    chained_lsn = position.chained_lsn if position else 0
    if wal.known is None:
        return
    if wal.chained_lsn > chained_lsn and wal.recovered.first_lsn > chained_lsn + 1:
        gone = (chained_lsn + 1, wal.recovered.first_lsn - 1)
        wal.lost = [*(each for each in wal.lost if each != gone), gone]
    await check_chained(connection, wal, trusted_lsn=BEFORE_FIRST)
    control = await procedure.take_epoch(connection, wal, position)
    signed_lsn = min(control.signed_lsn, wal.chained_lsn)
    wal_control.store(folder, control._replace(chained_lsn=Lsn(wal.chained_lsn), signed_lsn=Lsn(signed_lsn)))


# --- the locked folder --------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def _transaction(
    connection: asyncpg.Connection[asyncpg.Record], *, is_rehearsal: bool = False
) -> AsyncIterator[None]:
    """A transaction, committed at its end unless it is a rehearsal. An error inside is raised unchanged, even if it
    closed the connection."""
    transaction = connection.transaction()
    await transaction.start()
    try:
        yield
    except BaseException:
        if not connection.is_closed():
            await transaction.rollback()
        raise
    await (transaction.rollback() if is_rehearsal else transaction.commit())


@contextlib.asynccontextmanager
async def _alone(settings: Settings, database_url: str) -> AsyncIterator[_Locked]:
    """The WAL folder of the node that the settings name, locked, and a connection to its database."""
    if not settings.wal_dir.is_dir():
        raise StartRefusedError(f"{settings.wal_dir} is not there: wal.dir names the folder of the node's WAL")
    with files_usable(settings.wal_dir):
        who = kept_files.load_or_make(settings.wal_dir, settings.node_id, settings.gate)
        lock = FolderLock(settings.wal_dir / who.node_id)
    try:
        async with connected_for_now(database_url) as connection:
            yield _Locked(who, settings.wal_dir / who.node_id, connection)
    finally:
        lock.release()
