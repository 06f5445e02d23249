"""The WAL of a starting node is judged against Postgres and recovered, and its losses are listed: steps 5 and 6 of
``app.node.start.procedure``.

Abandoned ranges are kept in ``lost.json`` until ``_system`` records them (``runtime.state.losses``). Records that an
earlier process could not chain, because the chain of their tenant was damaged or its rows were locked, are listed in
``held.json`` (``app.write.pending.quarantine``) and stay in the WAL.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TypeVar

from app.node.start.checks import accepting, judge_wal, load_control, set_aside
from app.runtime.logs import log
from app.runtime.state.losses import ASIDE, CUT, LOST, Aside, LsnRange, merged
from app.store import Connection
from app.store.chaining import WalPosition
from app.write.chain import view
from app.write.pending import quarantine
from app.write.pending.backlog import Pending, pending_of
from app.write.pending.linking import tenant_begun_by, tenants_begun_by
from app.write.pending.quarantine import TenantDamage
from ledger.chain import record
from ledger.errors import ChainDamagedError, StartRefusedError, WalCorruptError
from ledger.hlc import Hlc
from ledger.positions import BEFORE_FIRST, Lsn, after, before
from wal import control as wal_control
from wal import reader as wal_reader
from wal import recovery as wal_recovery
from wal import truncation
from wal.control import Control, History, history_since, history_up_to
from wal.recovery import Survey

Value = TypeVar("Value")


@dataclass(slots=True)
class FoundWal:
    """A WAL whose every record is sound and durable, and the records that it no longer holds."""

    folder: Path
    node_id: str
    known: Control | None
    """The control file; None when there is none or the WAL was abandoned."""
    is_given_up: bool
    """Whether the folder held another WAL than Postgres knows; it was moved away, and a new one starts."""
    recovered: Survey
    chained_lsn: Lsn
    kept_lsn: Lsn
    """Last LSN that is in this WAL or chained."""
    last_lsn: Lsn
    """Last LSN that was ever known durable: new records get higher ones."""
    lost: list[LsnRange]
    held: dict[str, TenantDamage]
    """By tenant, records that earlier processes could not chain."""
    aside_hlc: Hlc | None = None
    """The highest HLC of logs that were moved away and are not read yet."""

    def highest_hlc(self) -> Hlc:
        """The highest HLC in the WAL, the control file and the logs that were moved away."""
        hlcs = [self.known.highest_hlc if self.known else None, self.recovered.highest_hlc, self.aside_hlc]
        return max((hlc for hlc in hlcs if hlc is not None), default=Hlc(0, 0, self.node_id))

    def history(self) -> History:
        """The epochs of the records here; taken from the segments if the control file has an earlier version or is
        gone."""
        found = self.recovered
        whole = self.known.history if self.known and self.known.history else found.history
        return history_up_to(history_since(whole, before(found.first_lsn)), found.last_lsn)

    def unchained(self) -> Iterator[Pending]:
        """Every unchained record, in LSN order: records held back, then records beyond ``chained_lsn``.

        Raises:
            StartRefusedError: the list of records held back is not of this WAL.
        """
        tenant_of = {lsn: tenant_id for tenant_id, damage in self.held.items() for lsn in damage.lsns}
        for pending in self.records(min([after(self.chained_lsn), *tenant_of]), self.last_lsn):
            if pending.lsn <= self.chained_lsn and pending.lsn not in tenant_of:
                continue
            if tenant_of.pop(pending.lsn, pending.tenant_id) != pending.tenant_id:
                raise StartRefusedError(
                    f"{self.folder / quarantine.NAME} lists LSN {pending.lsn} under another tenant than "
                    f"{pending.tenant_id}, whose event it is: it is not of this WAL; restore the right one"
                )
            yield pending

    def records(self, from_lsn: Lsn, to_lsn: Lsn) -> Iterator[Pending]:
        """The records from ``from_lsn`` on that the WAL holds up to ``to_lsn``."""
        if from_lsn > to_lsn:
            return
        for entry in wal_reader.read(self.folder, from_lsn, self.node_id):
            if entry.lsn > to_lsn:
                return
            yield pending_of(entry)


async def find_wal(
    folder: Path,
    node_id: str,
    position: WalPosition | None,
    *,
    accept_lost_wal: bool,
    restoring: bool = False,
    may_end_early: bool = False,
) -> FoundWal:
    """Steps 5 and 6 of a start, without the check of Postgres' claims. When ``restoring``, Postgres may be older than
    the WAL, and the WAL may start after its position. With ``may_end_early`` the WAL may lack the newest records that
    Postgres knows of: the members that held them were given up.

    Raises:
        StartRefusedError, WalCorruptError: WAL and Postgres do not belong together, or records are gone.
    """
    # 5. a. WAL and Postgres belong together
    lost, held = LOST.load(folder), quarantine.load(folder)
    known, is_damaged = load_control(folder, accept_lost_wal=accept_lost_wal)
    is_given_up = is_damaged or judge_wal(
        node_id, known, position, accept_lost_wal=accept_lost_wal, restoring=restoring
    )
    chained_lsn = position.chained_lsn if position else BEFORE_FIRST
    for damage in held.values():
        # Records beyond the chained position are in the backlog anyway, unless a torn tail cut them.
        damage.lsns = {lsn for lsn in damage.lsns if lsn <= chained_lsn}
    if is_given_up:
        lost, held = _give_up(folder, position, lost, held, chained_lsn)

    # 5. b. recovery
    durable_lsn = max(chained_lsn, position.seen_durable_lsn if position else BEFORE_FIRST)
    if known is not None and not is_given_up:
        durable_lsn = max(durable_lsn, known.durable_lsn)
    if accept_lost_wal:
        ASIDE.store(folder, ASIDE.load(folder) | {CUT: Aside(chained_lsn, is_known=True)})
    recovered = await _recover(
        folder, node_id, BEFORE_FIRST if may_end_early else durable_lsn, accept_lost=accept_lost_wal
    )

    # 6. what is gone, and was accepted as gone
    lost += _give_up_held(
        held, recovered, chained_lsn, node_id, None if accept_lost_wal else accepting(restoring=restoring)
    )
    _list_waiting(folder, node_id, held, recovered, chained_lsn)
    if recovered.first_lsn > chained_lsn + 1:
        if not restoring:
            lost.append(_gap(node_id, chained_lsn, recovered.first_lsn, accept_lost_wal=accept_lost_wal))
        chained_lsn = before(recovered.first_lsn)
    kept_lsn = max(recovered.last_lsn, chained_lsn)
    last_lsn = max(kept_lsn, durable_lsn)
    if is_given_up or kept_lsn < durable_lsn:
        lost.append((kept_lsn + 1, last_lsn))
    if kept_lsn == chained_lsn:
        chained_lsn = last_lsn
    aside_hlc = await asyncio.to_thread(_aside_hlc, folder, node_id)
    return FoundWal(
        folder, node_id, known, is_given_up, recovered, chained_lsn, kept_lsn, last_lsn, lost, held, aside_hlc
    )


def _give_up(
    folder: Path, position: WalPosition | None, lost: list[LsnRange], held: dict[str, TenantDamage], chained_lsn: Lsn
) -> tuple[list[LsnRange], dict[str, TenantDamage]]:
    """Move the WAL away. Returns what is lost, with the records in it that ``held`` lists, and ``held`` without."""
    lost, held = lost + _not_found(held, range(0), chained_lsn), _without_records(held)
    LOST.store(folder, lost)
    set_aside(folder, position)
    quarantine.store(folder, held)
    return lost, held


def _gap(node_id: str, chained_lsn: Lsn, first_lsn: Lsn, *, accept_lost_wal: bool) -> LsnRange:
    """The range between the chained position and the first record of the WAL, if it is accepted as lost."""
    if not accept_lost_wal:
        raise StartRefusedError(
            f"Postgres has chained up to LSN {chained_lsn}, but the WAL of node {node_id} begins with {first_lsn}: "
            "segments were removed, or the database went back. Bring them or the newer database back, or start once "
            "with --accept-lost-wal: what is between is given up and named in _system"
        )
    return chained_lsn + 1, first_lsn - 1


def _without_records(held: dict[str, TenantDamage]) -> dict[str, TenantDamage]:
    """The tenants that stay quarantined although their records are abandoned; for other chains that fail its checks the
    start is refused."""
    return {
        tenant_id: TenantDamage(damage.reason, damage.seen)
        for tenant_id, damage in held.items()
        if damage.from_lsn is None or damage.seen is not None
    }


async def _recover(folder: Path, node_id: str, must_hold_lsn: Lsn, *, accept_lost: bool) -> Survey:
    try:
        recovered = await to_its_end(
            partial(wal_recovery.recover, folder, node_id, must_hold_lsn, accept_lost=accept_lost)
        )
    except OSError as error:
        raise StartRefusedError(
            f"the WAL in {folder} cannot be recovered: {error}. Free space where the disk is full, make that file "
            "readable, or put it back; move it away only if it is no segment of this WAL. Nothing acknowledged "
            "is lost by trying again"
        ) from error
    if recovered.cut is not None:
        log.warning("wal_recovery_cut_torn_tail", **recovered.cut)
    return recovered


def _aside_hlc(folder: Path, node_id: str) -> Hlc | None:
    """The highest HLC of the logs that were moved away and are not read yet: no new event may reuse one of theirs."""
    found: list[Hlc | None] = []
    for name in ASIDE.load(folder):
        if name != CUT:
            found.append(truncation.highest_hlc(folder / name, node_id))
            with suppress(WalCorruptError):
                control = wal_control.load(folder / name)
                found.append(control.highest_hlc if control is not None and control.node_id == node_id else None)
    return max((hlc for hlc in found if hlc is not None), default=None)


def _list_waiting(
    folder: Path, node_id: str, held: dict[str, TenantDamage], recovered: Survey, chained_lsn: Lsn
) -> None:
    """List each record in the WAL that waited for a lock: the file lists only the first of them."""
    waiting = {
        tenant_id: (damage, damage.from_lsn) for tenant_id, damage in held.items() if damage.from_lsn is not None
    }
    first_lsn = max([recovered.first_lsn, min((from_lsn for _, from_lsn in waiting.values()), default=BEFORE_FIRST)])
    last_lsn = min(chained_lsn, recovered.last_lsn)
    for damage, from_lsn in waiting.values():
        damage.from_lsn = None
        if first_lsn <= from_lsn <= last_lsn:
            damage.lsns.add(from_lsn)
    if waiting and first_lsn <= last_lsn:
        for entry in wal_reader.read(folder, first_lsn, node_id, last_lsn):
            listed = waiting.get(record.decode(entry.payload).tenant_id)
            if listed is not None and entry.lsn >= listed[1]:
                listed[0].lsns.add(entry.lsn)


def _give_up_held(
    held: dict[str, TenantDamage], recovered: Survey, chained_lsn: Lsn, node_id: str, how_to_accept: str | None
) -> list[LsnRange]:
    """The ranges of records held back that are no longer in the WAL, abandoned if the operator accepts that;
    ``how_to_accept`` is None if the operator does."""
    found = range(recovered.first_lsn, recovered.last_lsn + 1)
    gone = _not_found(held, found, chained_lsn)
    if gone and how_to_accept is not None:
        raise StartRefusedError(
            f"{quarantine.NAME} lists LSN {gone[0][0]}, which is not chained yet, but the WAL of node {node_id} goes "
            f"from {recovered.first_lsn} to {recovered.last_lsn}: segments were removed. Bring them back, or "
            f"{how_to_accept}: what they held is given up and named in _system"
        )
    for damage in held.values():
        damage.lsns = {lsn for lsn in damage.lsns if lsn in found}
    return gone


def _not_found(held: dict[str, TenantDamage], found: range, chained_lsn: Lsn) -> list[LsnRange]:
    """The ranges of records held back that are not in ``found``.

    Only the first LSN is known of a tenant that waits for a lock. So the range up to ``chained_lsn`` is taken, though
    it includes chained records of other tenants.
    """
    gone = [(lsn, lsn) for damage in held.values() for lsn in damage.lsns if lsn not in found]
    if first_lsns := [damage.from_lsn for damage in held.values() if damage.from_lsn is not None]:
        first_lsn = min(first_lsns)
        before_found = (first_lsn, min(chained_lsn, Lsn(found.start - 1)))
        behind_found = (max(first_lsn, Lsn(found.stop)), chained_lsn)
        gone += [(first, last) for first, last in (before_found, behind_found) if first <= last]
    return merged(gone)


async def to_its_end(work: Callable[[], Value], give_up: Callable[[], object] = lambda: None) -> Value:
    """The result of ``work``, run in a thread. A cancelled caller calls ``give_up`` and waits for the thread, so that
    the lock is held until it ends."""
    working = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        return await asyncio.shield(working)
    except asyncio.CancelledError:
        give_up()
        await asyncio.gather(working, return_exceptions=True)  # no caller is left for its outcome
        raise


# --- what PostgreSQL claims -----------------------------------------------------------------------

RECORDS_A_LOOKUP = 1000


async def check_chained(connection: Connection, wal: FoundWal, *, trusted_lsn: Lsn) -> None:
    """Lower ``wal.chained_lsn`` to the last record below which every one above ``trusted_lsn`` is in the chain.

    ``wal_positions.chained_lsn`` can be edited by an administrator of the database. The control file beside the WAL
    cannot: it says up to where this node has seen its records chained, and lags by at most
    ``hlc.persistence_interval``. So only the records between the two are looked up, by HLC and digest. One of them is
    chained when the chain has

    - the event itself, or a REFUSED or CONFLICT entry that keeps it;
    - for a record that is as old as what left with a prune, an entry of its job that left: its own left too;
    - for the first record of a tenant, the entry by which another node created the tenant;
    - for a keyed line that is acknowledged only once it is chained, the line that came first.

    From the first record without any of these on, the appender chains the records again, or finds them in the chain.
    """
    held = {lsn for damage in wal.held.values() for lsn in damage.lsns}
    records = wal.records(
        max(after(trusted_lsn), wal.recovered.first_lsn), min(wal.chained_lsn, wal.recovered.last_lsn)
    )
    while batch := list(islice(records, RECORDS_A_LOOKUP)):
        missing = await _first_missing(connection, [pending for pending in batch if pending.lsn not in held])
        if missing is not None:
            log.error(
                "chained_position_not_borne_out",
                claimed_lsn=wal.chained_lsn,
                chained_lsn=missing.lsn - 1,
                tenant_id=missing.tenant_id,
                hlc=missing.hlc.text(),
                done="what the chain lacks is chained from the WAL; somebody edited scheduler.wal_positions, or rows",
            )
            wal.chained_lsn = before(missing.lsn)
            return


async def _first_missing(connection: Connection, batch: Sequence[Pending]) -> Pending | None:
    absent = await view.unchained(connection, batch)
    if not absent:
        return None
    unrecorded = await view.unrecorded(connection, tenants_begun_by(absent))
    decided = await _lost_to_another(connection, [each for each in absent if not each.answered_early])
    for pending in absent:
        begun = tenant_begun_by(pending)
        if pending.lsn not in decided and (begun is None or begun in unrecorded):
            return pending
    return None


async def _lost_to_another(connection: Connection, keyed: Sequence[Pending]) -> set[Lsn]:
    """LSNs of records for whose key the chain has another event."""
    try:
        keys = await view.read_keys(connection, keyed)
    except ChainDamagedError:
        # The appender meets the same row, and quarantines the tenant.
        return set()
    lsns = set()
    for pending in keyed:
        assert pending.idempotency is not None
        route, key, line, body_digest = pending.idempotency
        lines = keys.get((pending.tenant_id, route, key), {})
        if line in lines or any(winner.body_digest != body_digest for winner in lines.values()):
            lsns.add(pending.lsn)
    return lsns
