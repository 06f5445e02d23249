"""Declaring private fields and erasing subjects: what changes, and what the chain says of it.

Both in this order, so that the chain never says what is not so::

    1. one transaction takes the next revision, makes the change and notes what the chain must say
    2. this node honours it at once, other nodes within ``app.privacy.knowledge.REFRESH_S`` and a query
    3. the tenant's chain says it, once: the entry is keyed by the random id in it
    4. the note gets the entry's seq

A process that ends in between leaves the note: its next start goes on at 3, and so does the same call on any node.
"""

from __future__ import annotations

import asyncio
import secrets
from datetime import UTC, datetime
from typing import TYPE_CHECKING, NamedTuple

import structlog

from app.node import Node
from app.privacy.knowledge import PrivacyKnowledge
from app.store import privacy as store
from app.store.faults import DATABASE_FAULTS
from app.store.privacy import DeclaredFields, PrivacyRecord
from app.store.reading import reading
from app.write.linking import DuplicateLineError
from app.write.submit import Submitter
from ledger.errors import (
    ChainDamagedError,
    DatabaseUnavailableError,
    DurabilityTimeoutError,
    LedgerError,
    SubjectNotFoundError,
    WalFullError,
)
from ledger.events import SystemAction
from ledger.private_fields import Declaration

if TYPE_CHECKING:
    from app.store import Connection
    from app.store.reading import Pool

RETRY_PAUSE_S = 5.0
"""Pause before a start tries again to have the chains say what they must."""

_NOT_NOW = (ChainDamagedError, DatabaseUnavailableError, DurabilityTimeoutError, WalFullError, *DATABASE_FAULTS)

log = structlog.get_logger()


class Declared(NamedTuple):
    """What a tenant declared, and where its chain says so."""

    fields: list[str]
    subject: str | None
    seq: int | None
    declared_at: datetime


class Erased(NamedTuple):
    """The newest erasure of a subject: ids of the keys it destroyed, and where the chain says so."""

    key_ids: list[str]
    seq: int
    erased_at: datetime


class PrivacyChanges:
    """Makes changes, each durable and on record when it returns."""

    def __init__(self, node: Node, pool: Pool, knowledge: PrivacyKnowledge, submitter: Submitter) -> None:
        self._node = node
        self._pool = pool
        self._knowledge = knowledge
        self._submitter = submitter

    async def declared(self, tenant_id: str) -> Declared | None:
        """What the tenant declared last; None when it never did."""
        async with reading(self._pool) as connection:
            return await _read_declared(connection, tenant_id)

    async def declare(self, tenant_id: str, declaration: Declaration) -> Declared:
        """Have these fields private from now on, instead of those before. Saying the same again changes nothing.

        Raises:
            PrivacyUnavailableError: this node has no master key.
            DatabaseUnavailableError, DurabilityTimeoutError, WalFullError: not now; say it again.
        """
        fields = [".".join(path) for path in declaration.fields]
        subject = None if declaration.subject is None else ".".join(declaration.subject)
        async with reading(self._pool) as connection:
            await self._knowledge.keys.begin(connection)
            async with connection.transaction():
                revision = await store.next_revision(connection)
                before = await store.read_declared(connection, tenant_id)
                if before is None or (before.fields, before.subject) != (fields, subject):
                    declared = DeclaredFields(tenant_id, fields, subject, revision)
                    await store.declare(connection, declared)
                    facts: dict[str, object] = {"fields": list(fields), "id": _new_id()}
                    facts |= {} if subject is None else {"subject": subject}
                    await self._note(connection, tenant_id, revision, SystemAction.PRIVACY_DECLARED, facts)
                else:
                    declared = before
            record = await store.read_record(connection, tenant_id, declared.revision)
        self._knowledge.learn(declared)
        log.info("privacy_declared", tenant_id=tenant_id, revision=declared.revision, fields=fields)
        assert record is not None
        return Declared(fields, subject, await self._said(record), record.created_at)

    async def erase(self, tenant_id: str, subject: str, reason: str | None) -> Erased:
        """Destroy the subject's key for good. Said again, the newest erasure of the subject is answered.

        Raises:
            SubjectNotFoundError: the tenant never had a key for this subject.
            PrivacyUnavailableError: this node has no master key, so it cannot tell whose keys are whose.
            DatabaseUnavailableError, DurabilityTimeoutError, WalFullError: not now; say it again.
        """
        async with reading(self._pool) as connection:
            state = await store.read_state(connection)
            if state is None:
                raise _unknown_subject(tenant_id)
            self._knowledge.keys.use(state)
            tag = self._knowledge.keys.tag(tenant_id, subject)
            async with connection.transaction():
                revision = await store.next_revision(connection)
                key_ids = await store.destroy_keys(connection, tenant_id, tag, revision)
                if key_ids:
                    facts: dict[str, object] = {"id": _new_id(), "key_ids": sorted(key_ids)}
                    facts |= {} if reason is None else {"reason": reason}
                    await self._note(connection, tenant_id, revision, SystemAction.SUBJECT_ERASED, facts)
                else:
                    erased_at_revision = await store.last_erasure(connection, tenant_id, tag)
                    if erased_at_revision is None:
                        raise _unknown_subject(tenant_id)
                    revision = erased_at_revision
            record = await store.read_record(connection, tenant_id, revision)
        for key_id in key_ids:
            self._knowledge.keys.forget(tenant_id, key_id, tag)
        log.info("subject_erased", tenant_id=tenant_id, revision=revision, key_ids=key_ids)
        assert record is not None
        return Erased(list(record.facts["key_ids"]), await self._said(record), record.created_at)  # type: ignore[call-overload]

    async def finish(self) -> None:
        """Have the chains say what earlier processes of this node left unsaid, trying until it is done.

        A chain that takes nothing now, as its rows are damaged, holds up no other.
        """
        while True:
            if not await self._leaves_unsaid():
                return
            await asyncio.sleep(RETRY_PAUSE_S)

    async def _leaves_unsaid(self) -> bool:
        """Try all that is unsaid once; whether something is left."""
        try:
            async with reading(self._pool) as connection:
                open_records = await store.open_records(connection, self._node.node_id)
        except _NOT_NOW as error:
            log.warning("privacy_not_recorded_yet", error=str(error))
            return True
        left = False
        for record in open_records:
            try:
                await self._said(record)
            except _NOT_NOW as error:
                log.warning("privacy_not_recorded_yet", tenant_id=record.tenant_id, error=str(error))
                left = True
        return left

    async def _note(
        self, connection: Connection, tenant_id: str, revision: int, action: SystemAction, facts: dict[str, object]
    ) -> None:
        record = PrivacyRecord(tenant_id, revision, action.value, facts, None, datetime.now(UTC))
        await store.add_record(connection, record, self._node.node_id)

    async def _said(self, record: PrivacyRecord) -> int:
        """Seq of the entry that says ``record``, written if the chain does not have it."""
        if record.seq is not None:
            return record.seq
        action, name = SystemAction(record.action), _name_of(record)
        seq = await self._find_chained(record.tenant_id, action, name)
        if seq is None:
            try:
                seq = (await self._submitter.record_once(record.tenant_id, action, name, record.facts)).seq
            except DuplicateLineError:
                seq = await self._find_chained(record.tenant_id, action, name)
        assert seq is not None
        async with reading(self._pool) as connection:
            await store.close_record(connection, record, seq)
        return seq

    async def _find_chained(self, tenant_id: str, action: SystemAction, name: str) -> int | None:
        async with reading(self._pool) as connection:
            return await store.find_chained(connection, tenant_id, action, name)


async def _read_declared(connection: Connection, tenant_id: str) -> Declared | None:
    declared = await store.read_declared(connection, tenant_id)
    if declared is None:
        return None
    record = await store.read_record(connection, tenant_id, declared.revision)
    assert record is not None
    return Declared(declared.fields, declared.subject, record.seq, record.created_at)


def _new_id() -> str:
    """Random, as the tenant's chain may hold what another ledger recorded of the same tenant."""
    return secrets.token_hex(16)


def _name_of(record: PrivacyRecord) -> str:
    """What stands in the entry where others have their job."""
    kind = "privacy" if record.action == SystemAction.PRIVACY_DECLARED else "erasure"
    return f"{kind}:{record.facts['id']}"


def _unknown_subject(tenant_id: str) -> LedgerError:
    return SubjectNotFoundError(f"tenant {tenant_id} has no private fields of this subject")
