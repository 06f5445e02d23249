"""A starting node and the safekeepers of its WAL: it becomes the one writer, and its folder gets the elected log.

This runs before the WAL is judged against Postgres: an empty, damaged or lagging folder is brought up to the log of a
majority. A losing log is moved away.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, NamedTuple

from app.node.lease import EtcdLeases, Lease, Leases, holder_of
from app.node.start.checks import set_aside
from app.runtime.logs import log
from app.runtime.postgres import DATABASE_FAULTS
from app.runtime.settings.config import Settings
from app.store.chaining import WalPosition
from app.store.node import PostgresLeases
from ledger.errors import StartRefusedError, WalCorruptError, WalError
from ledger.positions import NO_EPOCH, Lsn, after
from wal import control as wal_control
from wal.format import LSN_LIMIT, WAL_ID_BYTES
from wal.replication.election import NOTHING_HELD, Election, Plan, held_in
from wal.replication.file_log import FileLog
from wal.replication.leading import Members, carry_out, elect
from wal.replication.tls import PeerTls, TlsFiles
from wal.segment import FolderLock, list_segments

ATTEMPTS_MAX = 3
"""Retries when the member that supplies the log fails during the copy."""

_OTHER_WAL = "it is another WAL than Postgres knows"


Takeover = Literal["waits", "seizes", "accepts loss"]
"""How a start treats another process that may write the same log. It waits until the lease of that process expires, or
seizes it. If it accepts loss, it seizes the lease and continues with the members that answer, without a quorum: records
that only the others held are lost."""


class Lead(NamedTuple):
    """An epoch of this node's WAL that was won, and its members."""

    members: Members
    plan: Plan
    """``wal_id`` is empty if neither this node nor a member has any of the log; ``committed_lsn`` is above every LSN if
    no safekeeper votes."""
    accepted_loss: bool
    """Whether members that did not answer were given up, with the records that only they held."""


def members_of(settings: Settings) -> Members | None:
    """The safekeepers of this node; None if it keeps its log alone.

    Raises:
        ConfigurationError: a certificate or key cannot be read.
    """
    replication = settings.replication
    if not replication.members:
        return None
    addresses: Mapping[str, str] = {each.address: each.region or settings.region for each in replication.members}
    return Members(
        addresses,
        secrets.token_hex(WAL_ID_BYTES),
        replication.timeout.total_seconds(),
        _tls(replication.tls_ca, replication.tls_cert, replication.tls_key),
    )


def _tls(ca: Path | None, cert: Path | None, key: Path | None) -> PeerTls | None:
    """TLS to servers whose certificates chain to ``ca``, None without a CA; ``cert`` and ``key`` authenticate this
    node.

    Raises:
        ConfigurationError: one cannot be read, or is not what it should be, or others can read the key.
    """
    return None if ca is None else PeerTls(TlsFiles(cert, key, ca), server_side=False)


def regions_of(settings: Settings) -> frozenset[str]:
    """The regions that keep this node's log, its own among them."""
    return frozenset({settings.region} | {each.region or settings.region for each in settings.replication.members})


def quorum_survives(settings: Settings) -> str | None:
    """The failure that a committed record survives, None if no safekeeper votes: that of a node, if a majority of the
    safekeepers runs on other machines, so that a quorum outlives this one."""
    if not settings.wal.ack_mode.is_replicated:
        return None
    home = [each for each in settings.replication.members if each.region in (None, settings.region)]
    return "node" if sum(not each.is_on_loopback for each in home) > len(home) // 2 else "process"


def lease_of(settings: Settings, database_url: str, folder: Path, node_id: str, run: str) -> Lease:
    """The lease on the log of ``node_id``, not taken yet.

    Raises:
        ConfigurationError: a certificate or key cannot be read.
    """
    lease = settings.lease
    leases: Leases = (
        EtcdLeases(lease.etcd_urls, _tls(lease.etcd_ca, lease.etcd_cert, lease.etcd_key))
        if lease.kind == "etcd"
        else PostgresLeases(database_url)
    )
    return Lease(leases, node_id, holder_of(folder), run, lease.ttl.total_seconds(), DATABASE_FAULTS)


def take_lead(
    settings: Settings,
    members: Members,
    folder: Path,
    node_id: str,
    position: WalPosition | None,
    lock: FolderLock,
    *,
    accept_loss: bool = False,
) -> Lead:
    """Win an epoch, and bring the elected log into ``folder``, whose ``lock`` is held. Blocks.

    Raises:
        StartRefusedError: no quorum answers, or the elected log cannot be fetched.
    """
    for attempt in range(1, ATTEMPTS_MAX + 1):
        try:
            return _take_lead(settings, members, folder, node_id, position, lock, accept_loss=accept_loss)
        except WalError as error:
            if attempt == ATTEMPTS_MAX or members.given_up.is_set():
                raise StartRefusedError(
                    f"{error}. Nothing was written. Start safekeepers until a majority answers (tally safekeeper "
                    "status), or look whether another process has taken this node's log over"
                ) from error
            log.warning("election_lost", error=str(error))
    raise AssertionError


def _take_lead(
    settings: Settings,
    members: Members,
    folder: Path,
    node_id: str,
    position: WalPosition | None,
    lock: FolderLock,
    *,
    accept_loss: bool,
) -> Lead:
    own, fault = _open(folder, node_id, position, lock)
    try:
        known_wal_id = position.wal_id if position is not None else ""
        election = Election(
            node_id=node_id,
            run=members.run,
            wal_id=own.control.wal_id if own is not None else known_wal_id,
            own=held_in(own) if own is not None else NOTHING_HELD,
            above=position.epoch if position is not None else NO_EPOCH,
            addresses=members.addresses,
            wants_quorum=settings.wal.ack_mode.is_replicated,
            accept_loss_in=settings.region if accept_loss else None,
        )
        plan = elect(members, election)
        if own is None and plan.donor is not None:
            if fault is not None:
                set_aside(folder, position, is_replaced=fault != _OTHER_WAL)
            own = FileLog(folder, node_id, plan.wal_id, segment_bytes=settings.wal.segment_bytes, lock=lock)
        if own is not None:
            last_lsn = own.tail.lsn
            carry_out(members, plan, own)
            if plan.configuration.is_quorum:  # else another copy may have been written since
                own.store(own.control._replace(epoch=plan.epoch))
            if plan.donor is not None and last_lsn > plan.keep_lsn:
                log.warning("wal_divergent_tail_cut", first_lsn=after(plan.keep_lsn), last_lsn=last_lsn)
    finally:
        if own is not None:
            own.close()
    log.info("wal_lead_won", epoch=plan.epoch, last_lsn=plan.tail.lsn, donor=plan.donor, kept_lsn=plan.keep_lsn)
    if accept_loss:
        log.error(
            "wal_loss_accepted", epoch=plan.epoch, kept_lsn=plan.tail.lsn, members=len(plan.configuration.members)
        )
    if not (settings.wal.ack_mode.is_replicated or plan.configuration.is_quorum):
        plan = plan._replace(committed_lsn=Lsn(LSN_LIMIT))
    return Lead(members, plan, accept_loss)


def _open(
    folder: Path, node_id: str, position: WalPosition | None, lock: FolderLock
) -> tuple[FileLog | None, str | None]:
    """The node's own copy, or None and its fault, if any: the start refuses a fault later, unless a member has supplied
    the elected log."""
    try:
        control = wal_control.load(folder)
        if control is None:
            return None, "it holds segments and no control file" if list_segments(folder) else None
        if position is not None and position.wal_id != control.wal_id:
            return None, _OTHER_WAL
        return FileLog(folder, node_id, "", lock=lock), None
    except WalCorruptError as error:
        log.warning("wal_recovery_damaged", error=str(error))
        return None, str(error)
