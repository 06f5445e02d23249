"""Entries that the ledger writes about itself: those of ``_system``, and those that a tenant's chain has once.

They take the path of every event, through WAL and backlog; none of them belongs to a job.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

from app.runtime.state.node import Node
from app.store.appended import ChainPosition
from app.trust.quotas import Rate
from app.write.intake.answers import outcome_within
from app.write.intake.coalescing import WriteCoalescer
from app.write.pending.backlog import Backlog, Pending, record_bytes_of
from app.write.pending.linking import DuplicateLineError
from app.write.pending.quarantine import Quarantine
from app.write.pending.requests import LEDGER_ROUTE
from ledger import canonical
from ledger.chain import record
from ledger.chain.record import IdempotencyKey
from ledger.errors import EventRefusedError, RecordTooLargeError
from ledger.facts.events import SYSTEM_RECORD_TYPES, SYSTEM_TENANT, SystemAction
from ledger.hlc import Hlc
from ledger.positions import Lsn, before

_TYPE_OF_ACTION = {action: number for number, action in SYSTEM_RECORD_TYPES.items()}


@dataclass(kw_only=True, eq=False)
class SystemEntries:
    """Writes these entries, in one event loop; ``tenants`` are the tenants with a chain or with queued records."""

    node: Node
    wal: WriteCoalescer
    backlog: Backlog
    quarantine: Quarantine
    tenants: set[str]
    write_timeout_s: float
    record_bytes_max: int
    new_tenants: Rate | None = None
    """How many tenants each principal may create."""

    async def record(self, action: SystemAction, subject: str, facts: dict[str, object]) -> ChainPosition:
        """Write an entry of ``_system`` about ``subject`` and wait until it is chained. A failed node takes it too, as
        long as its WAL does: the next process chains it.

        Raises:
            ChainDamagedError: the chain of ``_system`` takes no entry.
            WalFullError, WalPoisonedError: as ``Submitter.submit``.
        """
        self.quarantine.check(SYSTEM_TENANT)
        self.backlog.check(1, record_bytes_of(1, 0), (SYSTEM_TENANT,))
        pending = self._enter(action, subject, facts)
        pending.outcome = asyncio.get_running_loop().create_future()
        return await pending.outcome

    async def note(
        self, action: SystemAction, subject: str, facts: dict[str, object], tenant_id: str = SYSTEM_TENANT
    ) -> None:
        """Write an entry and wait until it is durable in this node's WAL; it is chained later.

        Raises:
            ChainDamagedError: the tenant's chain takes no entry.
            DurabilityTimeoutError: not durable in time; it may still be.
            WalFullError, WalPoisonedError, FencedError, DatabaseWentBackError: as ``Submitter.submit``.
        """
        pending = self._enter_checked(action, subject, facts, tenant_id)
        await self.node.durable.reached(pending.lsn, self.write_timeout_s)

    async def record_once(
        self, tenant_id: str, action: SystemAction, name: str, facts: dict[str, object]
    ) -> ChainPosition:
        """Write the entry about ``name`` that the tenant's chain has once, even if several nodes try, and wait for it.

        Raises:
            DuplicateLineError: the chain has it already.
            ChainDamagedError, HeldBackError: as ``Submitter.submit``.
            DurabilityTimeoutError: not chained in time; it may still be.
            WalFullError, WalPoisonedError, FencedError, DatabaseWentBackError: as ``Submitter.submit``.
        """
        key = IdempotencyKey(LEDGER_ROUTE, f"{action}:{name}", 0, hashlib.sha256(canonical.encode(facts)).digest())
        pending = self._enter_checked(action, name, facts, tenant_id, key)
        pending.outcome = asyncio.get_running_loop().create_future()
        return await outcome_within(pending.outcome, self.write_timeout_s)

    async def begin_tenant(self, tenant_id: str) -> None:
        """Create a tenant without an event of its own; on return its chain has a head."""
        if tenant_id in self.tenants:
            await self.node.chained.reached(before(self.wal.next_lsn), self.write_timeout_s)
            return
        with contextlib.suppress(DuplicateLineError, EventRefusedError):
            await self.record(SystemAction.TENANT_CREATED, f"tenant:{tenant_id}", {"tenant_id": tenant_id})
        self.tenants.add(tenant_id)

    def enter_epoch_start(self, lsn: Lsn, accepted_loss: bool) -> None:
        """Enter the first record of this epoch, at ``lsn``: once it is committed, so are all before it. It also records
        whether the epoch was started without a quorum."""
        node = self.node
        assert self.wal.next_lsn == lsn
        facts = facts_of(epoch=node.epoch, first_lsn=lsn, node_id=node.node_id, accepted_loss=accepted_loss or None)
        self._enter(SystemAction.EPOCH_START, f"wal:{node.node_id}", facts)

    def charge_new(self, principal: str | None, count: int) -> None:
        """Charge ``count`` new tenants to the quota of ``principal``, before any record of theirs is queued.

        Raises:
            QuotaExceededError: the quota does not allow it now; nothing was charged.
            RequestTooLargeError: the quota never allows so many at once.
        """
        if self.new_tenants is not None and count:
            self.new_tenants.take(principal, count)

    def refuse_unfit(self, tenant_ids: Iterable[str]) -> None:
        """Refuse records if the node was fenced or has failed, even if its WAL would still take them, or if the chain
        of a tenant is damaged. A new tenant needs the chain of ``_system``, too.

        Raises:
            WalPoisonedError, FencedError, DatabaseWentBackError: the node has failed.
            ChainDamagedError: the chain of a tenant, or that of ``_system``, takes no entry.
        """
        if self.node.failure is not None:
            raise self.node.failure.with_traceback(None)
        if not self.quarantine:
            return
        for tenant_id in tenant_ids:
            self.quarantine.check(tenant_id)
            if tenant_id not in self.tenants:
                self.quarantine.check(SYSTEM_TENANT)

    def event(
        self,
        action: SystemAction,
        subject: str,
        facts: dict[str, object],
        lsn: Lsn,
        tenant_id: str = SYSTEM_TENANT,
        key: IdempotencyKey | None = None,
    ) -> Pending:
        """The event at ``lsn``, its HLC drawn now. It MUST be queued before another HLC is drawn."""
        return self._pending(
            _TYPE_OF_ACTION[action], subject, canonical.encode({"type": action.value, **facts}), lsn, tenant_id, key
        )

    def _pending(
        self, kind: int, subject: str, payload: bytes, lsn: Lsn, tenant_id: str, key: IdempotencyKey | None
    ) -> Pending:
        return Pending(
            lsn,
            self.node.epoch,
            self.node.clock.tick(self.node.wall.now_ms()),
            kind,
            tenant_id,
            subject,
            payload,
            key,
            None,
            answered_early=False,
        )

    def begin_in_queue(self, tenant_id: str) -> None:
        """Queue the beginning of a tenant, before its first record; the caller has reserved room."""
        if self._is_new(tenant_id):
            self._enter(SystemAction.TENANT_CREATED, f"tenant:{tenant_id}", {"tenant_id": tenant_id})
            self.tenants.add(tenant_id)

    def enter_about(
        self, kind: int, subject: str, payload: bytes, tenant_id: str, key: IdempotencyKey | None, actor: str | None
    ) -> Pending:
        """Queue an entry about ``subject``, of no job, that is answered once it is chained; the caller awaits its
        outcome.

        Raises:
            RecordTooLargeError: it is longer than a record may be.
            ChainDamagedError, WalFullError, WalPoisonedError, FencedError, DatabaseWentBackError, QuotaExceededError:
                as ``Submitter.submit``; nothing was taken.
        """
        if len(payload) > self.record_bytes_max - 1024:
            raise RecordTooLargeError(
                f"this takes {len(payload)} bytes; wal.record_bytes_max is {self.record_bytes_max}"
            )
        self.admit(tenant_id, len(payload), actor)
        self.begin_in_queue(tenant_id)
        pending = self._pending(kind, subject, payload, self.wal.next_lsn, tenant_id, key)
        self.wal.append_until_chained(record_of(pending))
        pending.outcome = asyncio.get_running_loop().create_future()
        return self._queued(pending)

    async def chain_about(
        self,
        action: SystemAction,
        subject: str,
        payload: bytes,
        tenant_id: str,
        actor: str | None,
        key: IdempotencyKey | None = None,
    ) -> tuple[Hlc, ChainPosition]:
        """Write an entry as ``enter_about``; its HLC and its place, once it is chained.

        Raises:
            LedgerError: as ``enter_about``, or its outcome.
            DurabilityTimeoutError: not chained in time; it may still be.
        """
        pending = self.enter_about(_TYPE_OF_ACTION[action], subject, payload, tenant_id, key, actor)
        assert pending.outcome is not None
        return pending.hlc, await outcome_within(pending.outcome, self.write_timeout_s)

    def _is_new(self, tenant_id: str) -> bool:
        return tenant_id not in self.tenants and tenant_id != SYSTEM_TENANT

    def admit(self, tenant_id: str, payload_bytes: int, actor: str | None) -> None:
        """Refuse an event if the node takes none, the tenant's chain takes none, or the backlog has no room; charge
        ``actor`` for a new tenant.

        Raises:
            ChainDamagedError, WalFullError, WalPoisonedError, FencedError, DatabaseWentBackError, QuotaExceededError:
                nothing was charged.
        """
        self._check(tenant_id, payload_bytes)
        self.charge_new(actor, self._is_new(tenant_id))

    def _check(self, tenant_id: str, payload_bytes: int) -> None:
        """Refuse an entry if the tenant's chain takes none, or the backlog has no room."""
        self.refuse_unfit((tenant_id,))
        records = 1 + self._is_new(tenant_id)
        self.backlog.check(records, record_bytes_of(records, payload_bytes), (tenant_id,))

    def _enter_checked(
        self,
        action: SystemAction,
        subject: str,
        facts: dict[str, object],
        tenant_id: str = SYSTEM_TENANT,
        key: IdempotencyKey | None = None,
    ) -> Pending:
        """Queue an entry, after the beginning of its tenant if that is new."""
        self._check(tenant_id, 0)
        self.begin_in_queue(tenant_id)
        return self._enter(action, subject, facts, tenant_id, key)

    def _enter(
        self,
        action: SystemAction,
        subject: str,
        facts: dict[str, object],
        tenant_id: str = SYSTEM_TENANT,
        key: IdempotencyKey | None = None,
    ) -> Pending:
        pending = self.event(action, subject, facts, self.wal.next_lsn, tenant_id, key)
        self.wal.append_all((record_of(pending),))
        return self._queued(pending)

    def _queued(self, pending: Pending) -> Pending:
        self.backlog.add((pending,))
        self.node.chained.want(pending.lsn)
        return pending


def facts_of(**facts: object) -> dict[str, object]:
    """The facts of an entry, without those that are None."""
    return {name: fact for name, fact in facts.items() if fact is not None}


def record_of(pending: Pending) -> tuple[Hlc, int, bytes]:
    """The event as the WAL takes it."""
    parts = pending.tenant_id, pending.job_id, pending.payload, pending.idempotency, pending.answered_early
    return pending.hlc, pending.record_type, record.encode(*parts)
