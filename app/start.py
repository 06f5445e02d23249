"""Starting a node: from a folder and a database to a WAL that may be written.

In this order, each step refused with what to do when it does not hold::

    1. the ids of the node; the lock on its WAL folder
    2. Postgres answers and has the schema this version knows
    3. the WAL is the one Postgres knows, and Postgres is not older than the WAL       (judge_wal)
    4. recovery: the torn tail cut, the rest checked and fsynced
    5. the WAL ends at or above all that is known durable; --accept-lost-wal records what is gone
    6. no chain is shorter than, or differs from, its checkpoint beside the WAL; the origin is the ledger's
    7. a higher epoch, first in the control file, then in Postgres
    8. the clock starts from the highest of wall clock, control file, WAL and Postgres, and learns from the heads
       that nodes of this ledger left
    9. what the WAL holds beyond the chain goes to the backlog
   10. the keys of the node are published, before anything is signed with them
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import asyncpg
import structlog

from app import identity, lost_wal
from app.config import Settings
from app.identity import Identity
from app.node import Node
from app.start_checks import check_chain, judge_wal, load_control, set_aside
from app.store import chaining, migrate
from app.store import node as node_store
from app.store.chaining import ChainHead
from app.store.faults import DATABASE_FAULTS
from app.write.backlog import Pending
from app.write.checkpoints import CheckpointFolder
from ledger import record
from ledger.errors import ClockSkewError, InvalidInputError, StartRefusedError
from ledger.events import ACTIONS, SystemAction
from ledger.hlc import Clock, Hlc
from signing import key_file
from wal import control as wal_control
from wal import lock as wal_lock
from wal import reader as wal_reader
from wal import recovery as wal_recovery
from wal.control import Control
from wal.segment import sync_folder

CONNECT_WAIT_S = 30.0
"""How long a start waits for Postgres to answer."""
CONNECT_PAUSE_S = 0.5

Value = TypeVar("Value")

log = structlog.get_logger()


@dataclass(slots=True)
class StartedNode:
    """What a start hands to the wiring."""

    node: Node
    folder: Path
    lock: wal_lock.Lock
    next_lsn: int
    previous_lsn: int
    """Last LSN that the WAL still holds; below ``next_lsn - 1`` when records were given up."""
    recovered: list[Pending]
    heads: dict[str, ChainHead]
    checkpoints: CheckpointFolder
    signer: key_file.FileSigner
    log_signer: key_file.FileSigner
    log_origin: str
    lost: tuple[int, int] | None
    """A range given up by ``--accept-lost-wal`` that ``_system`` does not record yet; others are kept in
    ``app.lost_wal`` for the next start."""

    def signers(self) -> list[key_file.FileSigner]:
        """The keys this node signs with, each once."""
        return list({signer.key_id: signer for signer in (self.signer, self.log_signer)}.values())


async def connect(url: str, wait_s: float) -> asyncpg.Connection[asyncpg.Record]:
    """A connection, trying for ``wait_s`` seconds while Postgres does not answer.

    Raises:
        StartRefusedError: it still does not, or it refuses this user or database.
    """
    loop = asyncio.get_running_loop()
    deadline_s = loop.time() + wait_s
    while True:
        try:
            return await asyncpg.connect(url, timeout=5)
        except (asyncpg.InvalidAuthorizationSpecificationError, asyncpg.InvalidCatalogNameError) as error:
            raise StartRefusedError(f"Postgres refuses: {error}; check database_url") from error
        except (OSError, asyncpg.PostgresError, TimeoutError) as error:
            if loop.time() > deadline_s:
                raise StartRefusedError(
                    f"Postgres does not answer ({type(error).__name__}: {error}); start it or check database_url"
                ) from error
        await asyncio.sleep(CONNECT_PAUSE_S)


async def start_node(settings: Settings, database_url: str, *, accept_lost_wal: bool) -> StartedNode:
    """Bring this node up to the point where its WAL may be opened for append.

    Raises:
        StartRefusedError, WalLockedError, WalCorruptError, ConfigurationError: as the module says.
    """
    # 1. who, and alone
    _make_durably(settings.wal_dir)
    who = identity.load_or_make(settings.wal_dir, settings.node_id, settings.gate)
    folder = settings.wal_dir / who.node_id
    lock = wal_lock.acquire(folder)
    try:
        connection = await connect(database_url, CONNECT_WAIT_S)
        try:
            started = await _start_locked(settings, who, folder, lock, connection, accept_lost_wal)
            await _publish_keys(connection, started)
            return started
        except (asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError) as error:
            raise went_away(error) from error
        finally:
            with contextlib.suppress(*DATABASE_FAULTS):
                await connection.close(timeout=5)
    except BaseException:
        lock.release()
        raise


def _make_durably(folder: Path) -> None:
    """Make ``folder`` and what is missing above it, so that the names outlive a power cut."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in missing:
        sync_folder(path.parent)


def went_away(error: Exception) -> StartRefusedError:
    """The refusal when Postgres answered and then failed."""
    return StartRefusedError(
        f"Postgres failed during the start ({type(error).__name__}: {error}); nothing is lost, start again"
    )


async def _publish_keys(connection: asyncpg.Connection[asyncpg.Record], started: StartedNode) -> None:
    """Publish this node's keys, valid for whatever they may have to sign: what it will write, what the WAL holds
    beyond the chain, and what no snapshot covers yet."""
    node = started.node
    now_ms = time.time_ns() // 1_000_000
    # A wall clock that is set back after this must not lead to HLCs from before the keys count.
    node.clock.observe(Hlc(now_ms, 0, node.node_id))
    oldest_ms = min([now_ms, *(pending.hlc.physical_ms for pending in started.recovered[:1])])
    for key in started.signers():
        await node_store.add_key(connection, key.key_id, key.algorithm, key.public_key_pem, node.node_id, oldest_ms)


async def _start_locked(
    settings: Settings,
    who: Identity,
    folder: Path,
    lock: wal_lock.Lock,
    connection: asyncpg.Connection[asyncpg.Record],
    accept_lost_wal: bool,
) -> StartedNode:
    # 2. the database
    await migrate.check_schema(connection)
    who = await _claim_job_ids(connection, settings, who)
    async with connection.transaction():
        position = await chaining.read_position(connection, who.node_id)

    # 3. WAL and Postgres belong together
    known, foreign = load_control(folder, accept_lost_wal=accept_lost_wal)
    foreign = foreign or judge_wal(who.node_id, known, position, accept_lost_wal=accept_lost_wal)
    if foreign:
        set_aside(folder)

    # 4. recovery
    chained_lsn = position.chained_lsn if position else 0
    durable_lsn = max(chained_lsn, position.seen_durable_lsn if position else 0)
    if known is not None and not foreign:
        durable_lsn = max(durable_lsn, known.durable_lsn)
    recovered = await _to_its_end(
        partial(wal_recovery.recover, folder, who.node_id, durable_lsn, accept_lost=accept_lost_wal)
    )
    if recovered.cut is not None:
        log.warning("wal_recovery_cut_torn_tail", **asdict(recovered.cut))

    # 5. what is gone, and was accepted as gone
    lost = lost_wal.load(folder)
    if recovered.first_lsn > chained_lsn + 1:
        if not accept_lost_wal:
            raise StartRefusedError(
                f"Postgres has chained up to LSN {chained_lsn}, but the WAL of node {who.node_id} begins with "
                f"{recovered.first_lsn}: segments were removed, or the database went back. Bring them or the newer "
                "database back, or start once with --accept-lost-wal to give up what is between"
            )
        lost.append((chained_lsn + 1, recovered.first_lsn - 1))
        chained_lsn = recovered.first_lsn - 1
    kept_lsn = max(recovered.last_lsn, chained_lsn)
    last_lsn = max(kept_lsn, durable_lsn)
    if foreign or kept_lsn < durable_lsn:
        lost.append((kept_lsn + 1, last_lsn))
    if kept_lsn == chained_lsn:
        chained_lsn = last_lsn

    # 6. chains and checkpoints
    signer = key_file.load_or_generate(settings.signing_key_uri)
    log_signer = key_file.log_signer(signer)
    checkpoints = CheckpointFolder(folder)
    heads = await node_store.read_heads(connection)
    for tenant_id, note in checkpoints.load_all().items():
        await check_chain(connection, tenant_id, heads.get(tenant_id), note, log_signer)

    origin = settings.log.origin or f"tallystick.local/{secrets.token_hex(6)}"
    kept_origin = await node_store.log_origin(connection, origin)
    if settings.log.origin and kept_origin != settings.log.origin:
        raise StartRefusedError(
            f"log.origin is {settings.log.origin}, but this ledger began as {kept_origin}; an origin never changes"
        )

    # 7. a higher epoch
    wal_id = None if foreign else known.wal_id if known else recovered.wal_id
    wal_id = wal_id or wal_control.new_wal_id()
    epoch = 1 + max(known.epoch if known else 0, position.epoch if position else 0, recovered.last_epoch)
    hlcs = [known.highest_hlc if known else None, recovered.highest_hlc]
    highest = max((hlc for hlc in hlcs if hlc is not None), default=Hlc(0, 0, who.node_id))
    lost_wal.store(folder, lost)
    wal_control.store(
        folder,
        Control(
            wal_id=wal_id,
            node_id=who.node_id,
            epoch=epoch,
            highest_hlc=highest,
            durable_lsn=last_lsn,
            chained_lsn=chained_lsn,
            signed_lsn=min(known.signed_lsn if known else 0, chained_lsn),
        ),
    )
    ends = dict(recovered.epoch_ends)
    if position is not None:
        ends[position.epoch] = kept_lsn
    async with connection.transaction():
        if not await node_store.take_epoch(
            connection,
            node_id=who.node_id,
            wal_id=wal_id,
            epoch=epoch,
            chained_lsn=chained_lsn,
            ends=ends,
            expected=position,
        ):
            raise StartRefusedError(
                f"another process took over node {who.node_id} while this one was starting; "
                "only one may run: stop one, or give them different node ids"
            )
    log.info("wal_epoch_bump", node_id=who.node_id, epoch=epoch, last_lsn=last_lsn)

    # 8. the clock
    in_chain = await node_store.highest_hlc(connection, who.node_id, highest)
    clock = Clock(who.node_id, settings.hlc.max_clock_skew_ms, last=max(highest, in_chain or highest))
    for head in heads.values():
        if head.hlc is not None:
            with contextlib.suppress(ClockSkewError, InvalidInputError):
                hlc = Hlc.parse(head.hlc)
                if await chaining.is_node(connection, hlc.node_id):
                    clock.receive(hlc, time.time_ns() // 1_000_000)

    # 9. the backlog
    pending = list(_unchained(folder, who.node_id, chained_lsn, last_lsn))
    lost = await _unrecorded(connection, who.node_id, lost, pending)
    lost_wal.store(folder, lost)
    node = Node(who.node_id, settings.region, who.gate, wal_id, epoch, clock)
    node.durable.advance(last_lsn)
    node.committed.advance(last_lsn)
    node.chained.advance(chained_lsn)
    return StartedNode(
        node=node,
        folder=folder,
        lock=lock,
        next_lsn=last_lsn + 1,
        previous_lsn=recovered.last_lsn,
        recovered=pending,
        heads=heads,
        checkpoints=checkpoints,
        signer=signer,
        log_signer=log_signer,
        log_origin=kept_origin,
        lost=lost[0] if lost else None,
    )


async def _to_its_end(work: Callable[[], Value]) -> Value:
    """What ``work`` returns, run in a thread. A cancelled start waits for it, so that it holds the lock as long."""
    working = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        return await asyncio.shield(working)
    except asyncio.CancelledError:
        await asyncio.wait((working,))
        raise


async def _claim_job_ids(connection: asyncpg.Connection[asyncpg.Record], settings: Settings, who: Identity) -> Identity:
    while not await node_store.claim_job_ids(connection, settings.region, who.gate, who.node_id):
        if settings.gate is not None:
            raise StartRefusedError(
                f"gate {who.gate} in region {settings.region} makes job ids for another node; "
                "give each node its own gate"
            )
        who = identity.with_new_gate(settings.wal_dir, who)
    return who


async def _unrecorded(
    connection: asyncpg.Connection[asyncpg.Record], node_id: str, lost: list[lost_wal.Range], pending: list[Pending]
) -> list[lost_wal.Range]:
    """Which of these ranges neither ``_system`` nor the backlog records."""
    if not lost:
        return []
    recorded = await node_store.recorded_losses(connection, node_id)
    for event in pending:
        if ACTIONS[event.record_type] == SystemAction.WAL_LOST:
            facts = json.loads(event.payload)
            recorded.add((facts["first_lsn"], facts["last_lsn"]))
    return [each for each in lost if each not in recorded]


def _unchained(folder: Path, node_id: str, chained_lsn: int, last_lsn: int) -> Iterator[Pending]:
    """What the WAL holds beyond the chain."""
    if chained_lsn >= last_lsn:
        return
    for entry in wal_reader.read(folder, chained_lsn + 1, node_id):
        event = record.decode(entry.payload)
        yield Pending(
            entry.lsn,
            entry.epoch,
            entry.hlc,
            entry.type,
            event.tenant_id,
            event.job_id,
            event.payload,
            event.idempotency,
            None,
        )
