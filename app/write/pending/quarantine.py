"""Tenants whose chain this node cannot extend, and their events that wait in its WAL until it can.

A tenant that waits for a lock, or until its commitments are read, is not damaged. Its records wait in memory, in order,
and this process chains them once the wait ends. The file lists only the first of them, as ``from_lsn``: a start looks
up every record of the tenant from there on.

A damaged tenant MUST NOT stop the node or another tenant. Its records are passed over when the rest of the log is
chained, and listed in ``<wal folder>/held.json``, replaced by temp file, fsync, rename and directory fsync::

    {"version": 2, "tenants": {"acme": {"reason": "…", "seen": [41, "64 hex digits"], "lsns": [17, 18, 23]},
                               "beta": {"reason": "…", "seen": null, "lsns": [], "from_lsn": 20}}}

``seen`` is the last sound head of the chain that this node saw, null if there was none.

Invariants::

    a record at or below chained_lsn is chained, or its LSN is in the file, or at or above its tenant's from_lsn
    a record whose LSN is in the file is in the WAL

So the file is written before ``chained_lsn`` passes a record, and no segment with a listed record is removed. A crash
may leave chained records in the file: each record is looked up by its HLC before it is chained.

*Waiting tenants* are passed over, and chained as soon as their wait ends: another session kept their rows locked, or
their commitments were read from a long history. Their records stay in the backlog.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Final, Literal

import asyncpg
import msgspec
from msgspec import Meta

from app.runtime.logs import log
from app.runtime.state.kept_files import KeptFile
from app.runtime.state.node import ROWS_LOCKED
from app.store import chaining
from app.store.chaining import ChainHead
from app.store.commit import InDoubt, or_in_doubt
from app.write.pending.backlog import Backlog, Pending
from app.write.pending.linking import tenants_begun_by
from ledger.errors import HeldBackError, QuarantinedError
from ledger.positions import Lsn

NAME = "held.json"
VERSION: Final = 2

_Lsn = Annotated[Lsn, Meta(ge=1)]


@dataclass(slots=True)
class TenantDamage:
    """Why a tenant was quarantined, the last sound head of its chain, and the waiting records."""

    reason: str
    seen: tuple[int, str] | None
    lsns: set[_Lsn] = field(default_factory=set)
    from_lsn: _Lsn | None = None
    """LSN of the first record that waits for a lock, None if none does."""


class _File(msgspec.Struct):
    version: Literal[1, 2]
    tenants: dict[str, TenantDamage]


_FILE: Final = KeptFile[_File](
    NAME,
    _File,
    b'{"version":2,"tenants":{}}',
    "it lists acknowledged events that are not chained yet: restore it",
)


def load(wal_folder: Path) -> dict[str, TenantDamage]:
    """The damages in the file, by tenant.

    Raises:
        StartRefusedError: it cannot be read.
    """
    return _FILE.load(wal_folder).tenants


def store(wal_folder: Path, damages: dict[str, TenantDamage]) -> None:
    """Replace the file with these damages; durable on return. Blocks on the disk.

    Raises:
        OSError: the write failed; the old file is intact.
    """
    _FILE.store(wal_folder, _File(VERSION, damages))


class Quarantine:
    """The damaged and the waiting tenants of one node. Belongs to one event loop."""

    def __init__(
        self,
        wal_folder: Path,
        damaged: dict[str, str],
        listed: dict[str, TenantDamage],
        waiting: dict[str, str] | None = None,
    ) -> None:
        """``damaged`` gives the reason of each quarantined tenant, ``waiting`` that of each waiting tenant. This object
        updates both for others to read.

        ``listed`` is the content of the file: these tenants, and others whose records are retried.
        """
        self.waiting = {} if waiting is None else waiting
        self._ends_of_wait: dict[str, asyncio.Event] = {}
        self._folder = wal_folder
        self._damaged = damaged
        self._listed = listed
        self._stored = _encoded(listed)
        """What the file holds of ``_listed``."""

    def __contains__(self, tenant_id: object) -> bool:
        return tenant_id in self._damaged or tenant_id in self.waiting

    def __bool__(self) -> bool:
        return bool(self._damaged or self.waiting)

    def check(self, tenant_id: str) -> None:
        """Return if the tenant's chain takes entries.

        Raises:
            QuarantinedError: it is quarantined.
        """
        if (reason := self._damaged.get(tenant_id)) is not None:
            raise QuarantinedError(tenant_id, reason)

    def check_chained(self, entered: Iterable[Pending]) -> None:
        """Return if none of these records, all at or below ``chained_lsn``, was passed over.

        Raises:
            HeldBackError: names the first record that was.
        """
        if not self._listed:
            return
        for pending in entered:
            if (listed := self._listed.get(pending.tenant_id)) is not None and pending.lsn in listed.lsns:
                raise self.held_back(pending)

    def held_back(self, pending: Pending) -> HeldBackError:
        """The outcome of a record that is passed over."""
        tenant_id = pending.tenant_id
        reason = self._damaged.get(tenant_id) or self._listed[tenant_id].reason
        return HeldBackError(
            tenant_id, reason, job_id=pending.job_id, hlc=pending.hlc.text(), epoch=pending.epoch, lsn=pending.lsn
        )

    def outcome_of(self, pending: Pending) -> HeldBackError | None:
        """The outcome of a record that is passed over, None if its tenant only waits."""
        return None if pending.tenant_id in self.waiting else self.held_back(pending)

    def keeps_from(self) -> Lsn | None:
        """Lowest listed LSN, which the WAL must keep; None if there is none."""
        kept = [lsn for damage in self._listed.values() for lsn in (damage.from_lsn, *damage.lsns) if lsn is not None]
        return min(kept, default=None)

    def begin_wait(self, tenant_id: str, reason: str, backlog: Iterable[Pending]) -> None:
        """Start a wait of the tenant: its records in ``backlog``, and later ones, are passed over."""
        log.warning("tenant_waits", tenant_id=tenant_id, reason=reason)
        self.waiting[tenant_id] = reason
        self._ends_of_wait.setdefault(tenant_id, asyncio.Event())
        first_lsn = min(pending.lsn for pending in backlog if pending.tenant_id == tenant_id)
        listed = self._listed.setdefault(tenant_id, TenantDamage(reason, None))
        listed.from_lsn = min(first_lsn, listed.from_lsn or first_lsn)

    async def end_wait(self, tenant_id: str) -> None:
        """End the wait of the tenant: all its waiting records are chained."""
        log.info("tenant_chained_again", tenant_id=tenant_id)
        self._ends_of_wait.pop(tenant_id).set()
        self._listed[tenant_id].from_lsn = None
        await self.release(())

    async def waited(self, tenant_ids: Iterable[str], timeout_s: float) -> bool:
        """Return True once none of these tenants waits; False after ``timeout_s``."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                for event in [self._ends_of_wait[each] for each in tenant_ids if each in self._ends_of_wait]:
                    await event.wait()
            return True
        return False

    def begin(self, tenant_id: str, reason: str, seen: ChainHead | None, backlog: Iterable[Pending]) -> None:
        """Quarantine the tenant, with all its records in ``backlog``."""
        lsns = {pending.lsn for pending in backlog if pending.tenant_id == tenant_id}
        log.error("tenant_quarantined", tenant_id=tenant_id, reason=reason, records_held=len(lsns))
        self._damaged[tenant_id] = reason
        listed = self._listed.setdefault(tenant_id, TenantDamage(reason, None))
        listed.reason = reason
        listed.lsns |= lsns
        if seen is not None and seen.chain_link is not None:
            listed.seen = (seen.seq, seen.chain_link)

    async def hold(self, batch: Sequence[Pending]) -> None:
        """List every record of ``batch`` that is passed over on the disk.

        Raises:
            OSError: the write failed; ``chained_lsn`` MUST NOT pass these records.
        """
        for pending in batch if self._damaged else ():
            if pending.tenant_id in self._damaged:
                self._listed[pending.tenant_id].lsns.add(pending.lsn)
        await self._store()

    async def release(self, batch: Sequence[Pending]) -> None:
        """Remove the chained records of ``batch`` from the list; records of quarantined tenants stay."""
        for pending in batch if self._listed else ():
            if pending.tenant_id in self._listed and pending.tenant_id not in self._damaged:
                self._listed[pending.tenant_id].lsns.discard(pending.lsn)
        for tenant_id in self._listed.keys() - self._damaged.keys():
            if not self._listed[tenant_id].lsns and self._listed[tenant_id].from_lsn is None:
                del self._listed[tenant_id]
        try:
            await self._store()
        except OSError as error:
            # The next start finds that these records are chained.
            log.warning("held_records_not_stored", error=str(error))

    async def _store(self) -> None:
        """Write the list if it has changed."""
        content = _encoded(self._listed)
        if content != self._stored:
            await asyncio.to_thread(store, self._folder, self._listed)
            self._stored = content


def _encoded(damages: dict[str, TenantDamage]) -> bytes:
    return msgspec.json.encode(damages, order="deterministic")


RETRY_S = 0.5
"""Interval of retries of waiting tenants."""


class WaitingTenants:
    """The tenants that the appender of ``backlog`` passes over.

    ``is_reading`` reports whether the history of a tenant is being read, ``connected`` returns a connection,
    ``on_fault`` gets the error of PostgreSQL, ``on_due`` is called when ``chain_unblocked`` is due.
    """

    def __init__(
        self,
        quarantine: Quarantine,
        backlog: Backlog,
        *,
        is_reading: Callable[[str], bool],
        connected: Callable[[], Awaitable[asyncpg.Connection[asyncpg.Record]]],
        on_fault: Callable[[Exception], None],
        on_due: Callable[[], None],
    ) -> None:
        self._quarantine = quarantine
        self._backlog = backlog
        self._is_reading = is_reading
        self._connected = connected
        self._on_fault = on_fault
        self._on_due = on_due
        self._timer: asyncio.TimerHandle | None = None
        """Timer of the next retry; None if it is due or no tenant waits."""

    async def find(self, batch: Sequence[Pending]) -> bool:
        """Pass over the tenants of ``batch`` whose rows another session keeps locked; returns whether there are any."""
        locked = await self._locked_of([each for each in batch if each.tenant_id not in self._quarantine])
        if locked is None:
            return False
        self.begin(locked, ROWS_LOCKED)
        return bool(locked)

    def begin(self, tenant_ids: Iterable[str], reason: str) -> None:
        """Pass these tenants over from now on."""
        for tenant_id in sorted(tenant_ids):
            self._quarantine.begin_wait(tenant_id, reason, self._backlog)
            self._retry_later()

    async def chain_unblocked(
        self, next_of: Callable[[str], Sequence[Pending]], chain: Callable[[Sequence[Pending]], Awaitable[None]]
    ) -> None:
        """``chain`` the batches, given by ``next_of``, of the tenants whose wait has ended; does nothing before the
        next retry is due."""
        if not (waiting := self._quarantine.waiting) or self._timer is not None:
            return
        for tenant_id in sorted(waiting):
            if self._is_reading(tenant_id):
                continue
            batch = next_of(tenant_id)
            if (locked := await self._locked_of(batch)) is None:
                break
            if locked:
                continue
            del waiting[tenant_id]
            while batch and tenant_id not in waiting:
                await chain(batch)
                batch = next_of(tenant_id)
            if tenant_id not in waiting:
                await self._quarantine.end_wait(tenant_id)
        if waiting:
            self._retry_later()

    async def _locked_of(self, batch: Sequence[Pending]) -> set[str] | None:
        """The tenants of ``batch`` with a locked row that it needs; None if PostgreSQL does not answer."""
        own = {pending.tenant_id for pending in batch}
        found = await or_in_doubt(self._locked({*own, *tenants_begun_by(batch)}))
        if isinstance(found, InDoubt):
            self._on_fault(found.error)
            return None
        return found & own

    async def _locked(self, tenant_ids: Iterable[str]) -> set[str]:
        return await chaining.locked_tenants(await self._connected(), sorted(tenant_ids))

    def _retry_later(self) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(RETRY_S, self._retry_now)

    def _retry_now(self) -> None:
        self._timer = None
        self._on_due()
