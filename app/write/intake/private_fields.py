"""Private fields: declared, their subjects erased, and the values of submitted events sealed.

*Changes* are recorded in the tenant's chain. Both take these steps, so that the chain never records a change that was
not made::

    1. one transaction takes the next revision, makes the change and stores a note of the entry to be chained
    2. this node applies the change immediately, other nodes within ``app.trust.privacy_knowledge.REFRESH_S`` and a
       query
    3. the entry is chained once: its key is the random id in it
    4. the note gets the entry's seq

If the process ends in between, the note remains. The next start goes on at 3, and so does the same call on any node.

*Events.* One with a value in a field that its tenant declared private must name the subject: in its member ``subject``,
else in the field that the declaration names. Such an event gets a seal or is refused::

    the declaration is not certain      refused, if it has any field that may be private, or names a subject
    the tenant declared nothing         unchanged; refused if it names a subject, so that an event with a subject is
                                        never stored in clear, whatever this node knows
    text or a list where an object      refused: it may hold values of a declared private path
      with private fields should be
    no private field has a value        unchanged, whether or not it names a subject
    otherwise                           sealed with the subject's key, which is durable by then
"""

from __future__ import annotations

import asyncio
import secrets
from collections import defaultdict
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from app.runtime.logs import log
from app.runtime.postgres import DATABASE_FAULTS
from app.runtime.sharing import in_turns
from app.runtime.state.node import Node
from app.store import Connection
from app.store import privacy as store
from app.store.privacy import DeclaredFields, PrivacyRecord
from app.store.reading import Pool, reading, run_in
from app.trust.privacy_agreement import says
from app.trust.privacy_knowledge import PrivacyKnowledge
from app.trust.subject_keys import Tag
from app.write.intake.system_entries import SystemEntries, facts_of
from app.write.pending.linking import DuplicateLineError
from app.write.pending.requests import Draft, EventLines, FieldSeal, RequestKey
from ledger import canonical, private_fields
from ledger.errors import (
    CanonicalError,
    ChainDamagedError,
    DatabaseUnavailableError,
    DurabilityTimeoutError,
    InvalidEventError,
    InvalidInputError,
    LedgerError,
    PrivacyDamagedError,
    ProblemError,
    WalFullError,
)
from ledger.facts.events import SystemAction
from ledger.facts.problems import SUBJECT_NOT_FOUND
from ledger.private_fields import Declaration, Path, name_of

RETRY_PAUSE_S = 5.0
"""Pause before a start tries again to chain the noted entries."""

_NOT_NOW = (ChainDamagedError, DatabaseUnavailableError, DurabilityTimeoutError, WalFullError, *DATABASE_FAULTS)


Facts = dict[str, object]


@dataclass(eq=False)
class PrivacyChanges:
    """Makes changes; each is durable and chained on return."""

    node: Node
    pool: Pool
    knowledge: PrivacyKnowledge
    system_entries: SystemEntries

    async def declared(self, tenant_id: str) -> Facts | None:
        """The tenant's last declaration and the seq of its entry; None if there is none.

        Raises:
            PrivacyDamagedError: its rows are not as they were written.
        """
        async with reading(self.pool) as connection:
            if (declared := await store.read_declared(connection, tenant_id)) is None:
                if tenant_id in self.knowledge.declarations:
                    raise PrivacyDamagedError(f"the row of tenant {tenant_id} in private_fields is gone")
                return None
            record = await _noted(connection, tenant_id, declared.revision)
            await store.check_noted(connection, declared)
        return _declaration(declared, await self._seq_of(record), record)

    async def declare(self, tenant_id: str, declaration: Declaration) -> Facts:
        """Make these fields private from now on, in place of the earlier ones. Repeating a declaration changes nothing.

        Raises:
            PrivacyUnavailableError: this node has no master key.
            DatabaseUnavailableError, DurabilityTimeoutError, WalFullError: not possible now; retry.
        """
        fields = [".".join(path) for path in declaration.fields]
        subject = None if declaration.subject is None else ".".join(declaration.subject)
        async with reading(self.pool) as connection:
            await self.knowledge.keys.begin(connection)
            async with connection.transaction():
                revision = await store.next_revision(connection)
                before = await _sound(connection, tenant_id)
                if before is None or (before.fields, before.subject) != (fields, subject):
                    declared = DeclaredFields(tenant_id, fields, subject, revision)
                    await store.declare(connection, declared)
                    await self._note(
                        connection,
                        tenant_id,
                        revision,
                        SystemAction.PRIVACY_DECLARED,
                        fields=fields,
                        subject=subject,
                    )
                else:
                    declared = before
            record = await _noted(connection, tenant_id, declared.revision)
        self.knowledge.learn(declared)
        if revision < self.knowledge.revision:
            await self.knowledge.refresh()
        log.info("privacy_declared", tenant_id=tenant_id, revision=declared.revision, fields=fields)
        return _declaration(declared, await self._said(record), record)

    async def erase(self, tenant_id: str, subject: str, reason: str | None) -> Facts:
        """Destroy the subject's key for good; returns the ids of the destroyed keys and the seq of the entry. A
        repeated call returns the newest erasure of the subject.

        Raises:
            ProblemError: the tenant never had a key for this subject.
            PrivacyUnavailableError: this node has no master key, so it cannot find the subject's keys.
            DatabaseUnavailableError, DurabilityTimeoutError, WalFullError: not possible now; retry.
        """
        async with reading(self.pool) as connection:
            if (state := await store.read_state(connection)) is None:
                raise _unknown_subject(tenant_id)
            self.knowledge.keys.use(state)
            tag = self.knowledge.keys.tag(tenant_id, subject)
            async with connection.transaction():
                revision = await store.next_revision(connection)
                if key_ids := await store.destroy_keys(connection, tenant_id, tag, revision):
                    await self._note(
                        connection,
                        tenant_id,
                        revision,
                        SystemAction.SUBJECT_ERASED,
                        key_ids=sorted(key_ids),
                        reason=reason,
                    )
                else:
                    if (erased_revision := await store.last_erasure(connection, tenant_id, tag)) is None:
                        raise _unknown_subject(tenant_id)
                    revision = erased_revision
            record = await _noted(connection, tenant_id, revision)
        for key_id in key_ids:
            self.knowledge.keys.forget(tenant_id, key_id, tag)
        log.info("subject_erased", tenant_id=tenant_id, revision=revision, key_ids=key_ids)
        if record.action != SystemAction.SUBJECT_ERASED:
            raise _damaged(tenant_id, revision)
        return {
            "key_ids": list(record.facts["key_ids"]),
            "seq": await self._said(record),
            "erased_at": record.created_at,
        }

    async def finish(self) -> None:
        """Chain the entries that earlier processes of this node left unchained, retrying until all are chained.

        A damaged chain, which takes no entries, does not delay the others.
        """
        while await self._leaves_unsaid():  # noqa: ASYNC110 (no event reports that an entry can be chained)
            await asyncio.sleep(RETRY_PAUSE_S)

    async def _leaves_unsaid(self) -> bool:
        """Try to chain each noted entry once; returns whether some are left."""
        try:
            open_records, faults = await run_in(reading(self.pool), store.open_records, self.node.node_id)
        except _NOT_NOW as error:
            log.warning("privacy_not_recorded_yet", error=str(error))
            return True
        for fault in faults:
            # The content of the entry is lost; a retry does not help.
            log.error("privacy_record_damaged", tenant_id=fault.tenant_id, error=fault.reason)
        left = False
        for record in open_records:
            try:
                await self._said(record)
            except _NOT_NOW as error:
                log.warning("privacy_not_recorded_yet", tenant_id=record.tenant_id, error=str(error))
                left = True
            except PrivacyDamagedError as error:
                log.error("privacy_record_damaged", tenant_id=record.tenant_id, error=str(error))
        return left

    async def _note(
        self, connection: Connection, tenant_id: str, revision: int, action: SystemAction, **said: object
    ) -> None:
        # The id is random, as the tenant's chain may hold what another ledger recorded of the same tenant.
        facts = facts_of(id=secrets.token_hex(16), **said)
        record = PrivacyRecord(tenant_id, revision, action.value, facts, None, datetime.now(UTC))
        await store.add_record(connection, record, self.node.node_id)

    async def _said(self, record: PrivacyRecord) -> int:
        """Seq of the entry that records ``record``; the entry is written if the chain does not have it."""
        action = SystemAction(record.action)
        name = name_of(action, record.facts["id"])
        if (seq := await self._seq_of(record)) is None:
            try:
                seq = (await self.system_entries.record_once(record.tenant_id, action, name, record.facts)).seq
            except DuplicateLineError:
                seq = await self._seq_of(record)
        if seq is None:
            raise PrivacyDamagedError(f"the chain of tenant {record.tenant_id} lost its entry {name}")
        if seq != record.seq:
            await run_in(reading(self.pool), store.close_record, record, seq)
        return seq

    async def _seq_of(self, record: PrivacyRecord) -> int | None:
        """Seq of the noted entry in the chain, whatever seq the note has; None if it is not there.

        Raises:
            ChainDamagedError: the entry is not what was chained.
            PrivacyDamagedError: the entry differs from the note.
        """
        action, facts_id = SystemAction(record.action), record.facts["id"]
        async with reading(self.pool) as connection:
            entry = await store.find_entry(connection, self.knowledge.check, record.tenant_id, action, facts_id)
            if entry is None and record.seq is not None:
                floor = await self.knowledge.at_floor(connection, record.tenant_id)
                if record.seq <= floor.seq:
                    return record.seq  # It left with a prune.
        if entry is not None and not says(entry, record):
            raise PrivacyDamagedError(
                f"the row of tenant {record.tenant_id} at revision {record.revision} in privacy_records says another "
                f"thing than its entry, seq {entry.seq}"
            )
        return None if entry is None else entry.seq


def _declaration(declared: DeclaredFields, seq: int | None, record: PrivacyRecord) -> Facts:
    return {"fields": declared.fields, "subject": declared.subject, "seq": seq, "declared_at": record.created_at}


async def _noted(connection: Connection, tenant_id: str, revision: int) -> PrivacyRecord:
    if (record := await store.read_record(connection, tenant_id, revision)) is None:
        raise _damaged(tenant_id, revision)
    return record


async def _sound(connection: Connection, tenant_id: str) -> DeclaredFields | None:
    """The tenant's last declaration; None if there is none or its rows are damaged, so that it can be repeated."""
    try:
        if (declared := await store.read_declared(connection, tenant_id)) is not None:
            await _noted(connection, tenant_id, declared.revision)
    except PrivacyDamagedError as error:
        log.error("privacy_declared_over_damage", tenant_id=tenant_id, error=str(error))
        return None
    return declared


def _damaged(tenant_id: str, revision: int) -> PrivacyDamagedError:
    return PrivacyDamagedError(f"privacy_records lacks what tenant {tenant_id} changed at revision {revision}")


def _unknown_subject(tenant_id: str) -> LedgerError:
    return ProblemError(SUBJECT_NOT_FOUND, f"tenant {tenant_id} has no private fields of this subject")


SUBJECT_CHARACTERS_MAX = 256


class Sealing:
    """Gives events of tenants with private fields their seal."""

    def __init__(self, knowledge: PrivacyKnowledge) -> None:
        self._knowledge = knowledge

    def may_have_private(self, draft: Draft) -> bool:
        """Whether ``draft`` may need a seal or a refusal because of private fields; ``prepare`` decides."""
        knowledge = self._knowledge
        return bool(knowledge.doubts) or draft.subject is not None or draft.tenant_id in knowledge.declarations

    async def prepare(self, draft: Draft) -> Draft:
        """``draft``, sealed if need be.

        Raises:
            InvalidInputError: it has private fields and names no subject, or one that is not allowed.
            PrivacyUnavailableError, DatabaseUnavailableError: the key is not available now.
        """
        if (found := self._examine(draft)) is None:
            return draft
        tag, values = found
        keys = await self._knowledge.keys.of_subjects(draft.tenant_id, [tag])
        return draft._replace(seal=FieldSeal(keys[tag], draft.tenant_id, values))

    async def prepare_lines(self, lines: EventLines) -> bool:
        """Seal the lines of one request that need it; returns whether any did.

        Raises:
            InvalidEventError: a line breaks these rules. Otherwise as ``prepare``.
        """
        knowledge, declared = self._knowledge, self._knowledge.declarations
        named = {number for number, draft in lines.drafts.items() if draft.subject is not None}
        if not knowledge.doubts and not named and declared.keys().isdisjoint(lines.tenants):
            return False
        wanted: dict[str, set[Tag]] = defaultdict(set)
        found: dict[int, tuple[Tag, list[tuple[Path, bytes]]]] = {}
        async for number, (tenant_id, _) in in_turns(enumerate(lines.jobs)):
            if not knowledge.doubts and number not in named and tenant_id not in declared:
                continue
            try:
                examined = self._examine(lines[number])
            except InvalidInputError as error:
                raise InvalidEventError(f"line {number + 1}: {error}", number + 1, error.path) from None
            if examined is not None:
                found[number] = examined
                wanted[tenant_id].add(examined[0])
        keys = {tenant: await knowledge.keys.of_subjects(tenant, tags) for tenant, tags in wanted.items()}
        for number, (tag, values) in found.items():
            draft = lines[number]
            lines.put(number, draft._replace(seal=FieldSeal(keys[draft.tenant_id][tag], draft.tenant_id, values)))
        return bool(found)

    def key_of(self, key: RequestKey | None, is_sealed: bool) -> RequestKey | None:
        """``key``; if an event was sealed, with a body digest that does not let an attacker guess private values, also
        where the key is made of that digest."""
        keyed = None if key is None else self._knowledge.keys.body_digest(key.body_digest)
        if key is None or keyed is None:
            return key
        if not is_sealed:
            return key._replace(other_digest=keyed)
        name = keyed.hex() if key.key == key.body_digest.hex() else key.key
        return RequestKey(key.route, name, keyed, key.body_digest)

    def _examine(self, draft: Draft) -> tuple[Tag, list[tuple[Path, bytes]]] | None:
        """The tag of the event's subject, and its private values in canonical form; None if it has none."""
        if self._knowledge.doubts and (draft.subject is not None or private_fields.may_hold_private(draft.fields)):
            self._knowledge.check_certain(draft.tenant_id)
        if (declaration := self._knowledge.declarations.get(draft.tenant_id)) is None and draft.subject is None:
            return None
        if declaration is None:
            raise InvalidInputError(
                f"subject: tenant {draft.tenant_id} has no private fields that this node knows of", ("subject",)
            )
        private_fields.refuse_marks(draft.fields)
        values = []
        for path in declaration.fields:
            private_fields.refuse_hidden(draft.fields, path)
            there, value = private_fields.value_at(draft.fields, path)
            if there:
                values.append((path, _canonical(value, path)))
        return (self._knowledge.keys.tag(draft.tenant_id, _subject_of(draft, declaration)), values) if values else None


def _subject_of(draft: Draft, declaration: Declaration) -> str:
    if draft.subject is not None:
        return draft.subject
    path = declaration.subject or ("subject",)
    there, subject = private_fields.value_at(draft.fields, path) if declaration.subject else (False, None)
    if not there:
        raise InvalidInputError(
            "subject: the event has private fields and does not say whose they are; add this member", ("subject",)
        )
    if not isinstance(subject, str) or not 0 < len(subject) <= SUBJECT_CHARACTERS_MAX:
        raise InvalidInputError(
            f"{'.'.join(path)}: names the subject, so it must be a text of 1 to {SUBJECT_CHARACTERS_MAX} characters",
            path,
        )
    return subject


def _canonical(value: Any, path: Path) -> bytes:
    try:
        return canonical.encode(value)
    except CanonicalError as error:
        raise CanonicalError(str(error), (*path, *error.path)) from None
