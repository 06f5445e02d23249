"""Starting a node: from a folder and a database to a WAL that may be written.

The steps in order; a step that fails refuses the start and says what to do::

    1. the ids of the node; the lock on its WAL folder
    2. where safekeepers vote on who writes, the lease on the log
    3. Postgres answers and has the schema this version knows, with all that guards it  (node.start.connecting), and our
       login cannot take that away; the job ids of this region and gate are those of this node
    4. where safekeepers keep the WAL, too: an epoch is won, and the folder holds the log that counts  (take_lead)
    5. the WAL is the one Postgres knows, and Postgres is not older than the WAL       (judge_wal); recovery: the torn
       tail cut, the rest checked and fsynced
    6. the WAL ends at or above all that is known durable; --accept-lost-wal records what is gone. What Postgres
       claims to be chained is compared with WAL and chain
    7. the origin is the ledger's, and that of the checkpoints beside the WAL; no chain is shorter than, or differs
       from, its checkpoint there; the ledger began with the key that this node knows
    8. the clock starts from the highest of wall clock, control file, WAL and Postgres, and learns from the heads
       that nodes of this ledger left
    9. a higher epoch, first in the control file, then in Postgres
   10. what the WAL holds and the chain does not goes to the backlog
   11. the keys of the node are published, before anything is signed with them; a change of keys that an earlier
       process began is completed
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

from app.node.lease import Lease
from app.node.start.checks import (
    TreeState,
    chain_holds,
    check_chain,
    check_role,
    files_usable,
    kept_origin,
    refuse_ahead,
    report_folders_of_others,
)
from app.node.start.connecting import connected_for_now, connected_to_keep, remedy
from app.node.start.quorum import Lead, Takeover, lease_of, members_of, take_lead
from app.node.start.wal import FoundWal, check_chained, find_wal, to_its_end
from app.runtime.logs import log
from app.runtime.postgres import DATABASE_FAULTS
from app.runtime.settings.config import Settings
from app.runtime.state import kept_files
from app.runtime.state.kept_files import Identity
from app.runtime.state.losses import FORK, LOST, LsnRange, fork_subject
from app.runtime.state.node import Node, WriteRises
from app.runtime.state.session import SECRET_BYTES
from app.store import Connection, chaining
from app.store import node as node_store
from app.store.chaining import ChainEnd, ChainHead, WalPosition
from app.store.sessions import NodeConnection
from app.trust import node_keys
from app.trust.key_chain import KeyChain
from app.trust.key_changes import publish_at_start
from app.write.followers.checkpoints import CheckpointJournal
from app.write.pending import quarantine
from app.write.pending.backlog import Pending
from app.write.pending.quarantine import TenantDamage
from ledger.errors import ClockSkewError, InvalidInputError, LedgerError, StartRefusedError
from ledger.facts.events import ACTIONS, SystemAction
from ledger.hlc import Clock, Hlc
from ledger.positions import BEFORE_FIRST, Epoch, Lsn, after
from objects import sync_folder
from signing.note import COSIGNED_NAME_BYTES_MAX
from wal import control as wal_control
from wal.control import Control, begin_epoch
from wal.format import WAL_ID_BYTES
from wal.replication.leading import Members
from wal.segment import FolderLock

STANDBY_CHECK_TIMEOUT_S = 10.0
"""How long a standby looks at its keys, once: it does not ask for the lease meanwhile."""

COSIGNED_ORIGIN_BYTES_MAX = COSIGNED_NAME_BYTES_MAX - 64
"""Longest origin of a ledger with a second key: a slash and the name of a tenant follow."""


@dataclass(slots=True)
class StartedNode:
    """The result of a start, for the wiring."""

    node: Node
    lock: FolderLock
    control: Control
    """The control file as this start left it; a running node changes only its positions."""
    wal: FoundWal
    """Its ``lost`` are the abandoned ranges that ``_system`` does not record yet; ``held`` has damaged tenants, too."""
    recovered: list[Pending]
    """Unchained records of the WAL."""
    heads: dict[str, ChainHead]
    faulty_trees: dict[str, TreeState]
    """By tenant, stored trees that do not match their chains: the notary rebuilds them."""
    checkpoints: CheckpointJournal
    key_chain: KeyChain
    not_admitted: str | None
    """Why no signature of this node would be trusted; None when its keys are admitted."""
    role_fault: str | None
    """Needless rights of the database login; None when it has none."""
    log_origin: str
    session_secret: bytes
    """The MAC key of this ledger's session tokens."""
    lead: Lead | None
    """The epoch as the safekeepers know it; None if this node keeps its log alone."""
    accepted_loss: bool
    """Whether the operator accepted that records of the WAL are lost: then the WAL does not prove which rows are this
    node's."""
    connection: NodeConnection
    """The connection that this start used, still open."""
    lease: Lease | None = None
    """The lease on the log; None if no other process may write it."""


async def start_node(
    settings: Settings, database_url: str, *, accept_lost_wal: bool, takeover: Takeover = "waits"
) -> StartedNode:
    """Bring this node up to the point where its WAL may be opened for append. If safekeepers vote, the start waits for
    a process that holds the lease, unless ``takeover`` says otherwise.

    The caller closes the connection of the returned node.

    Raises:
        StartRefusedError, WalLockedError, WalCorruptError, ConfigurationError: as the module says.
    """
    with files_usable(settings.wal_dir):
        # 1. who, and alone
        _make_durably(settings.wal_dir)
        who = kept_files.load_or_make(settings.wal_dir, settings.node_id, settings.gate)
        folder = settings.wal_dir / who.node_id
        lock = FolderLock(folder)
        try:
            report_folders_of_others(settings, folder)
            members, lease = members_of(settings), None
            if members is not None and settings.wal.ack_mode.is_replicated:
                lease = lease_of(settings, database_url, folder, who.node_id, members.run)
            # 2. the lease  3. the database
            check_keys = partial(_check_standby_keys, settings, folder, database_url)
            async with _held(lease, takeover, check_keys), connected_to_keep(database_url) as connection:
                started = await _start_locked(
                    settings, who, folder, lock, connection, members, accept_lost_wal, takeover
                )
                started.lease = lease
                # 11. the keys
                await publish_at_start(
                    connection,
                    started.node,
                    started.key_chain,
                    next((pending.hlc.physical_ms for pending in started.recovered), None),
                )
                return started
        except BaseException:
            lock.release()
            raise


@contextlib.asynccontextmanager
async def _held(
    lease: Lease | None, takeover: Takeover, on_waiting: Callable[[], Awaitable[None]]
) -> AsyncIterator[None]:
    """Take the lease, if there is one, renew it for as long as the start takes, and release it if the start fails."""
    if lease is None:
        yield
        return
    try:
        await lease.take(seize=takeover != "waits", on_waiting=on_waiting)
    except DATABASE_FAULTS as error:
        raise StartRefusedError(
            f"the lease on this node's log cannot be asked for: {error}; {remedy(error)}"
        ) from error
    keeping = asyncio.create_task(lease.keep(lambda _: None))  # if another run takes it, the epoch decides
    try:
        yield
    except BaseException:
        await lease.release()
        raise
    finally:
        keeping.cancel()


async def _check_standby_keys(settings: Settings, folder: Path, database_url: str) -> None:
    """Report untrusted keys of a standby now: it may wait for months, and must not fail when it is needed."""
    try:
        async with asyncio.timeout(STANDBY_CHECK_TIMEOUT_S), connected_for_now(database_url) as connection:
            keys = await to_its_end(partial(node_keys.open_keys, folder, settings))
            keys.expect_root(node_keys.offline_root(settings))
            key_chain = KeyChain(CheckpointJournal(folder).load, keys)
            fault = key_chain.admission_fault(await key_chain.history(connection))
    except (LedgerError, TimeoutError, *DATABASE_FAULTS) as error:
        log.warning("standby_keys_not_checked", error=f"{type(error).__name__}: {error}")
        return
    if fault is not None:
        log.warning(
            "standby_could_not_sign",
            error=fault,
            do="give it the keys of the node that writes now, or have its own admitted before it is needed: "
            "docs/replication-runbook.md, A node is dead",
        )


def _make_durably(folder: Path) -> None:
    """Make ``folder`` and its missing parents; the names survive a power cut."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in missing:
        sync_folder(path.parent)


async def _start_locked(
    settings: Settings,
    who: Identity,
    folder: Path,
    lock: FolderLock,
    connection: NodeConnection,
    members: Members | None,
    accept_lost_wal: bool,
    takeover: Takeover,
) -> StartedNode:
    # 3. our login, our job ids
    role_fault = await check_role(connection, is_any_allowed=settings.database_allow_any_role)
    who = await _claim_job_ids(connection, settings, who)
    async with connection.transaction():
        position = await chaining.read_position(connection, who.node_id)

    # 4. the safekeepers
    lead = None
    if members is not None:
        accept_loss = takeover == "accepts loss"
        take = partial(take_lead, settings, members, folder, who.node_id, position, lock, accept_loss=accept_loss)
        lead = await to_its_end(take, members.given_up.set)

    # 5. the WAL  6. what is gone from it, what Postgres claims of it
    accepted_loss = lead is not None and lead.accepted_loss
    wal = await find_wal(folder, who.node_id, position, accept_lost_wal=accept_lost_wal, may_end_early=accepted_loss)
    if accepted_loss:
        wal.lost.append((after(wal.last_lsn), wal.last_lsn))
    await check_chained(connection, wal, trusted_lsn=wal.known.chained_lsn if wal.known else BEFORE_FIRST)

    # 7. chains and checkpoints
    chains = await _judge_chains(connection, settings, folder, wal)

    # 8. the clock
    await refuse_ahead(connection, settings.hlc.max_clock_skew_ms)
    clock = await _start_clock(connection, settings, wal, chains, accept_lost_wal=accept_lost_wal)

    # 9. a higher epoch
    control = await take_epoch(connection, wal, position, lead)

    # 10. the backlog
    pending = await _unchained(connection, wal, chains.log_origin)
    return StartedNode(
        node=_node_of(settings, who, control, clock, wal, chains.damaged),
        lock=lock,
        control=control,
        wal=wal,
        recovered=pending,
        heads=chains.heads,
        faulty_trees=chains.faulty_trees,
        checkpoints=chains.checkpoints,
        key_chain=chains.key_chain,
        not_admitted=chains.not_admitted,
        role_fault=role_fault,
        log_origin=chains.log_origin,
        session_secret=await _session_secret(connection),
        lead=lead,
        accepted_loss=accept_lost_wal,
        connection=connection,
    )


def _node_of(
    settings: Settings, who: Identity, control: Control, clock: Clock, wal: FoundWal, damaged: dict[str, str]
) -> Node:
    """The node, its positions where the WAL has them."""
    rises = None if settings.tracing.endpoint is None else WriteRises()
    node = Node(
        who.node_id, settings.region, who.gate, control.wal_id, control.epoch, clock, damaged=damaged, rises=rises
    )
    node.durable.advance(wal.last_lsn)
    node.committed.advance(max(control.committed_lsn, wal.chained_lsn))
    node.chained.advance(wal.chained_lsn)
    return node


class _Chains(NamedTuple):
    """The chains as a start found them."""

    log_origin: str
    checkpoints: CheckpointJournal
    key_chain: KeyChain
    not_admitted: str | None
    heads: dict[str, ChainHead]
    """Of sound tenants."""
    ends: dict[str, ChainEnd]
    damaged: dict[str, str]
    faulty_trees: dict[str, TreeState]


async def _judge_chains(connection: Connection, settings: Settings, folder: Path, wal: FoundWal) -> _Chains:
    """Step 7. Adds the damaged tenants to ``wal.held``."""
    keys = await to_its_end(partial(node_keys.open_keys, folder, settings))
    keys.expect_root(node_keys.offline_root(settings))
    checkpoints = CheckpointJournal(folder)
    origin = await _log_origin(connection, settings, kept_origin(checkpoints))
    _check_origin(origin, keys)
    key_chain = KeyChain(checkpoints.load, keys)
    heads, damaged = await _read_heads(connection, wal.held)
    faulty_trees: dict[str, TreeState] = {}
    for tenant_id, note in checkpoints.load_all().items():
        head, name = heads.get(tenant_id), f"{origin}/{tenant_id}"
        if tenant_id in damaged:
            continue
        if (tree := await check_chain(connection, tenant_id, head, note, name, keys.log_signer)) != "whole":
            faulty_trees[tenant_id] = tree
    ends = await chaining.read_ends(connection, heads)
    dangling = {name: fault for name, head in heads.items() if (fault := chaining.end_fault(head, ends.get(name)))}
    damaged |= dangling
    _quarantine(dangling, heads, wal.held)
    not_admitted = await _check_keys(connection, key_chain)
    return _Chains(origin, checkpoints, key_chain, not_admitted, heads, ends, damaged, faulty_trees)


async def _session_secret(connection: Connection) -> bytes:
    """The secret of this ledger's session tokens, made by the first start of any node."""
    secret = await node_store.settle_session_secret(connection, secrets.token_bytes(SECRET_BYTES))
    if type(secret) is not bytes or len(secret) != SECRET_BYTES:
        raise StartRefusedError(
            "the row of scheduler.session_secret is not one that a start made: remove it, and the next start makes "
            "another; the session tokens that clients hold are refused then"
        )
    return secret


async def _check_keys(connection: Connection, key_chain: KeyChain) -> str | None:
    """Why no signature of this node would be trusted; None when its keys are admitted.

    Raises:
        StartRefusedError: the ledger began with another key than this node knows.
    """
    history = await key_chain.history(connection)
    if key_chain.is_of_another_root:
        raise StartRefusedError(
            f"{key_chain.fault}. Nothing was written; point database_url to the right ledger, or bring the right "
            "database back"
        )
    fault = key_chain.admission_fault(history)
    if fault is not None:
        log.warning("keys_not_admitted", error=fault)
    return fault


async def _log_origin(connection: Connection, settings: Settings, kept: str | None) -> str:
    """The origin of this ledger's logs, chosen by the first start of any node. ``kept`` is the origin of the
    checkpoints beside the WAL, None when there is none.

    Raises:
        StartRefusedError: it is not the one that checkpoints or settings name.
    """
    if kept is not None and (found := await node_store.log_origin(connection)) != kept:
        said = "has no row" if found is None else f"says {found}"
        raise StartRefusedError(
            f"this node signed the log {kept}, but scheduler.ledger_identity {said}: somebody changed it, or it is "
            "another database. Nothing was written. Point database_url to the right one, bring that back, or put its "
            f"one row back with log_origin {kept}. Leave the checkpoints beside the WAL: without them nothing shows "
            "that entries were cut off. If another node has forked the log, run tally restore --fork here too"
        )
    origin = await node_store.settle_log_origin(
        connection, settings.log.origin or f"tallystick.local/{secrets.token_hex(6)}"
    )
    if settings.log.origin and origin != settings.log.origin:
        raise StartRefusedError(
            f"log.origin is {settings.log.origin}, but this ledger began as {origin}, and an origin never changes: "
            "set log.origin to that or leave it out, or point database_url to the right ledger"
        )
    return origin


def _check_origin(origin: str, keys: node_keys.NodeKeys) -> None:
    """Refuse an origin whose logs the keys cannot sign.

    Raises:
        StartRefusedError: it is too long for a second key.
    """
    if keys.second is not None and len(origin.encode()) > COSIGNED_ORIGIN_BYTES_MAX:
        raise StartRefusedError(
            f"the log origin {origin} of this ledger is longer than {COSIGNED_ORIGIN_BYTES_MAX} bytes, too long for "
            f"what {keys.second.algorithm} signs; an origin never changes: leave out signing.second"
        )


async def _read_heads(
    connection: Connection, held: dict[str, TenantDamage]
) -> tuple[dict[str, ChainHead], dict[str, str]]:
    """The head of every sound tenant, and why the others are damaged: their head is impossible, or an earlier process
    of this node found their chain damaged and it is not repaired. Removes from ``held`` repaired tenants without listed
    records, and adds the damaged ones."""
    heads = await chaining.read_heads(connection)
    damaged = {name: fault for name, head in heads.items() if (fault := chaining.head_fault(head)) is not None}
    for tenant_id, damage in held.items():
        if tenant_id not in damaged and not await chain_holds(connection, tenant_id, heads.get(tenant_id), damage.seen):
            damaged[tenant_id] = damage.reason
    _quarantine(damaged, heads, held)
    for tenant_id in [name for name, damage in held.items() if name not in damaged and not damage.lsns]:
        del held[tenant_id]
    return heads, damaged


def _quarantine(damaged: dict[str, str], heads: dict[str, ChainHead], held: dict[str, TenantDamage]) -> None:
    """Take ``damaged``, tenants and why, out of ``heads`` and add them to ``held``."""
    for tenant_id, reason in damaged.items():
        log.error("tenant_quarantined", tenant_id=tenant_id, reason=reason)
        held.setdefault(tenant_id, TenantDamage(reason, None)).reason = reason
        heads.pop(tenant_id, None)


async def _start_clock(
    connection: Connection,
    settings: Settings,
    wal: FoundWal,
    chains: _Chains,
    *,
    accept_lost_wal: bool,
) -> Clock:
    """A clock that starts above every time this node issued and has learnt from the heads of other nodes.

    A row in Postgres moves the clock only as far as a wall clock can have come, or if the WAL confirms the row: a
    forged row must not drive the clock ahead.
    """
    known = wal.highest_hlc()
    now_ms = time.time_ns() // 1_000_000
    # Without a chain the query is skipped: on a new connection it costs Postgres some 4 ms.
    in_chain = await node_store.highest_hlc(connection, wal.node_id, known) if chains.heads or wal.held else None
    if in_chain is not None and in_chain.physical_ms > now_ms + settings.hlc.max_clock_skew_ms and not accept_lost_wal:
        raise StartRefusedError(
            f"Postgres holds an entry {in_chain} of this node, {in_chain.physical_ms - now_ms} ms ahead of the wall "
            f"clock, and neither WAL nor control file knows a time above {known}: the entry is forged, or this "
            "machine's clock is wrong. Set the clock right; if it is, remove the entry once tally verify has named "
            "it, or start once with --accept-lost-wal to go on above it"
        )
    clock = Clock(wal.node_id, settings.hlc.max_clock_skew_ms, last=max(known, in_chain or known))
    for tenant_id, head in chains.heads.items():
        if head.hlc is not None and chains.ends[tenant_id].is_by_node:
            with contextlib.suppress(ClockSkewError, InvalidInputError):
                clock.receive(Hlc.parse(head.hlc), now_ms)
    if (ahead_ms := clock.offset_ms(now_ms)) > clock.max_clock_skew_ms:
        log.warning("ledger_time_ahead", ahead_ms=ahead_ms, last=clock.last.text(), said_by="/readyz, clock")
    return clock


async def take_epoch(
    connection: Connection, wal: FoundWal, position: WalPosition | None, lead: Lead | None = None
) -> Control:
    """Take a higher epoch (that of ``lead``, if any), first in the control file, then in Postgres. Returns the control
    file as stored."""
    known = wal.known
    wal_id = None if wal.is_given_up else known.wal_id if known else wal.recovered.wal_id
    wal_id = wal_id or (lead.plan.wal_id if lead else None) or secrets.token_hex(WAL_ID_BYTES)
    epochs = (known.epoch if known else 0, position.epoch if position else 0, wal.recovered.last_epoch)
    epoch = Epoch(1 + max(epochs)) if lead is None else lead.plan.epoch
    LOST.store(wal.folder, wal.lost)
    control = Control(
        wal_id=wal_id,
        node_id=wal.node_id,
        epoch=epoch,
        highest_hlc=wal.highest_hlc(),
        durable_lsn=wal.last_lsn,
        # After a failed restore the node must still know how far Postgres once was.
        chained_lsn=Lsn(max(known.chained_lsn if known and not wal.is_given_up else 0, wal.chained_lsn)),
        signed_lsn=Lsn(min(known.signed_lsn if known else 0, wal.chained_lsn)),
        committed_lsn=max(min(lead.plan.committed_lsn, wal.last_lsn), wal.chained_lsn) if lead else wal.last_lsn,
        generation=known.generation if known and not wal.is_given_up else 0,
        history=begin_epoch(wal.history(), epoch, after(wal.last_lsn)),
    )
    wal_control.store(wal.folder, control)
    ends = dict(wal.recovered.epoch_ends)
    if position is not None:
        ends[position.epoch] = wal.kept_lsn
    async with connection.transaction():
        if not await node_store.take_epoch(
            connection,
            node_id=wal.node_id,
            wal_id=wal_id,
            epoch=epoch,
            chained_lsn=wal.chained_lsn,
            ends=ends,
            expected=position,
        ):
            raise StartRefusedError(
                f"another process took over node {wal.node_id} while this one was starting; "
                "only one may run: stop one, or give them different node ids"
            )
    log.info("wal_epoch_bump", node_id=wal.node_id, epoch=epoch, last_lsn=wal.last_lsn)
    return control


async def _claim_job_ids(connection: Connection, settings: Settings, who: Identity) -> Identity:
    while not await node_store.claim_job_ids(connection, settings.region, who.gate, who.node_id):
        if settings.gate is not None:
            raise StartRefusedError(
                f"gate {who.gate} in region {settings.region} makes job ids for another node; "
                "give each node its own gate"
            )
        who = kept_files.with_new_gate(settings.wal_dir, who)
    return who


async def _unchained(connection: Connection, wal: FoundWal, origin: str) -> list[Pending]:
    """Step 10: the records that the chain lacks. Stores what is lost and held, and forgets what is recorded."""
    pending = list(wal.unchained())
    wal.lost = await _unrecorded(connection, wal.node_id, wal.lost, pending)
    LOST.store(wal.folder, wal.lost)
    await _forget_recorded_fork(connection, wal.folder, origin, pending)
    quarantine.store(wal.folder, wal.held)
    return pending


async def _forget_recorded_fork(connection: Connection, folder: Path, origin: str, pending: list[Pending]) -> None:
    """Remove the kept fork if ``_system`` or the backlog records it. A fork that ended before the log got its new
    ``origin`` never happened."""
    fork = FORK.load(folder)
    if fork is None:
        return
    subject, is_given_up = fork_subject(fork.to_origin), fork.to_origin != origin
    if is_given_up:
        log.warning("log_fork_given_up", to_origin=fork.to_origin, origin=origin)
    is_settled = is_given_up or any(event.job_id == subject for event in pending)
    if is_settled or await node_store.is_recorded(connection, SystemAction.LOG_FORKED, subject):
        FORK.store(folder, None)


async def _unrecorded(
    connection: Connection, node_id: str, lost: list[LsnRange], pending: list[Pending]
) -> list[LsnRange]:
    """The ranges that neither ``_system`` nor the backlog records, without duplicates: a start that was interrupted
    between two of its files finds the same range twice."""
    if not lost:
        return []
    recorded = await node_store.recorded_losses(connection, node_id)
    for event in pending:
        if ACTIONS[event.record_type] == SystemAction.WAL_LOST:
            facts = json.loads(event.payload)
            recorded.add((facts["first_lsn"], facts["last_lsn"]))
    return [each for each in dict.fromkeys(lost) if each not in recorded]
