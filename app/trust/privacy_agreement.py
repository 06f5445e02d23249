"""Reconcile the tables of private fields with the chains, which are the authority.

A database that was restored from a backup, or edited, may have keys that a chain says were destroyed, and lack
declarations that a chain has. At every start, before the first event is accepted, and while a tenant is in doubt::

    SUBJECT_ERASED       every key it names is destroyed, known or not
    PRIVACY_DECLARED     the newest declaration is in force; where the table has another, it is declared again

Which declaration is newest: the tables record each with a revision, in the order of the changes. Two concurrent
declarations may be chained in the other order, so among the recorded ones the highest revision wins. A declaration that
the tables lack wins over the recorded ones, unless the chain has it before their winner. The fields of the chain's last
declaration are always private too, so a re-inserted old row never exposes a field. A declaration that is chained again
is not a new one: it is recorded with the entry that the chain has.

Where entries left with a prune, the PRUNED entry that counts speaks for them: the declaration that it carries is the
first of the chain, and the keys that records up to its floor name are destroyed, if they are those whose digest it
carries. If they are not, the tenant is damaged.

Entries are recomputed before they have any effect. One that is not what was chained declares and destroys
nothing, and its tenant is in doubt.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any, NamedTuple

import orjson

from app.runtime.logs import log
from app.store import Connection
from app.store import privacy as store
from app.store.entry_check import EntryCheck
from app.store.privacy import DeclaredFields, PrivacyEntry, PrivacyRecord, RowFault
from app.store.privacy_history import erased_up_to, record_erasure
from app.trust.retention import FieldsAtFloor, RetentionReader
from app.trust.subject_keys import SubjectKeys
from ledger.errors import ChainDamagedError, InvalidInputError, PrivacyUnavailableError, reported_as
from ledger.facts.events import SystemAction
from ledger.machines.carried import ErasedKeys
from ledger.private_fields import Declaration, declaration_of, facts_of, name_of

NO_REVISION = 0
"""Revision of keys that are destroyed while the ledger has no revisions, and of declarations that are in no table:
below all others."""

Doubts = dict[str, str]
"""Why a tenant's declaration is uncertain, by tenant."""


class Unchained(NamedTuple):
    """Entries about private fields in this node's WAL that no chain has yet, oldest first."""

    declarations: Sequence[PrivacyEntry] = ()
    erasures: Sequence[PrivacyEntry] = ()


class Agreed(NamedTuple):
    """Tenants whose tables cannot be reconciled, and why; the last declaration in the chains of the others; damage
    found in entries, once or twice for each tenant; and the declaration in force of tenants whose table has another,
    with ``NO_REVISION`` if only a chain, or the WAL of this node, has it."""

    doubts: Doubts
    said_last: dict[str, Declaration]
    damaged: list[ChainDamagedError]
    behind: list[PrivacyRecord]


async def agree(
    connection: Connection,
    check: EntryCheck,
    keys: SubjectKeys,
    node_id: str,
    unchained: Unchained,
    retention: RetentionReader | None = None,
) -> Agreed:
    """Reconcile the tables with the chains, as far as possible.

    Raises:
        one of DATABASE_FAULTS: Postgres does not answer, or rejects the change.
    """
    floors, damaged = ({}, []) if retention is None else await retention.all_private_fields(connection)
    try:
        if await store.read_state(connection) is None:
            is_said_below = any(floor.fields.to_json() for floor in floors.values())
            if not (is_said_below or damaged or await _is_anything_said(connection, check, unchained)):
                return Agreed({}, {}, [], [])
            await keys.begin(connection)
    except PrivacyUnavailableError as error:
        log.error("privacy_without_state", error=str(error))
    async with connection.transaction():
        doubts = await _destroy(connection, keys, unchained.erasures, node_id)
        async for erasures in store.erasure_entries(connection, check):
            doubts |= await _destroy(connection, keys, erasures.said, node_id)
            damaged += erasures.damaged
        damaged += await _destroy_left(connection, keys, floors)
    # One state of the database: a declaration that is chained meanwhile is also recorded as chained.
    async with connection.transaction(isolation="repeatable_read", readonly=True):
        compared = await _compared(connection, check, unchained.declarations, floors, damaged)
    if compared.behind:
        try:
            async with connection.transaction():
                await store.read_state(connection, is_locked=True)
                compared = await _compared(connection, check, unchained.declarations, floors, damaged)
                for newest in compared.behind:
                    await _declare_again(connection, newest, node_id)
        except PrivacyUnavailableError as error:
            for each in compared.behind:
                compared.doubts[each.tenant_id] = f"its table is behind its chain: {error}"
    return compared._replace(doubts=doubts | compared.doubts, damaged=[*damaged, *compared.damaged])


async def _is_anything_said(connection: Connection, check: EntryCheck, unchained: Unchained) -> bool:
    if unchained.declarations or unchained.erasures or any(await store.declaration_entries(connection, check)):
        return True
    async with connection.transaction():
        async for _ in store.erasure_entries(connection, check):
            return True
    return False


# --- erasures -------------------------------------------------------------------------------------


async def _destroy(connection: Connection, keys: SubjectKeys, entries: Iterable[PrivacyEntry], node_id: str) -> Doubts:
    """Destroy the keys that these entries name, and record each entry."""
    erased, doubts = [], Doubts()
    for entry in entries:
        try:
            erased.append((entry, _facts(entry, SystemAction.SUBJECT_ERASED), _time(entry)))
        except InvalidInputError as error:
            doubts[entry.tenant_id] = f"its entry {entry.name} (seq {entry.seq}) does not say who was erased: {error}"
    named = [(entry.tenant_id, key_id) for entry, facts, _ in erased for key_id in facts["key_ids"]]
    keys.destroyed(named)
    left = await store.not_destroyed(connection, named)
    for entry, facts, at in erased if left else ():
        tenant_id = entry.tenant_id
        if key_ids := [key_id for key_id in facts["key_ids"] if (tenant_id, key_id) in left]:
            revision = await _revision(connection)
            await store.destroy_erased(connection, tenant_id, key_ids, revision)
            if revision != NO_REVISION:
                record = PrivacyRecord(tenant_id, revision, SystemAction.SUBJECT_ERASED, facts, entry.seq, at)
                await store.add_record(connection, record, node_id)
            log.warning("erased_keys_destroyed_again", tenant_id=tenant_id, seq=entry.seq, key_ids=key_ids)
    return doubts


async def _destroy_left(
    connection: Connection, keys: SubjectKeys, floors: Mapping[str, FieldsAtFloor]
) -> list[ChainDamagedError]:
    """Destroy the keys that erasures named which left; returns an error for each tenant whose records do not name
    exactly these."""
    damaged = []
    for tenant_id, floor in floors.items():
        key_ids = await erased_up_to(connection, tenant_id, floor.seq)
        if ErasedKeys.of(key_ids) != floor.fields.erased:
            reason = (
                f"scheduler.privacy_records does not name the {floor.fields.erased.count} keys that erasures up to seq "
                f"{floor.seq} destroyed, which left with a prune; bring its rows back from the archive: tally privacy "
                f"restore --tenant {tenant_id}"
            )
            damaged.append(ChainDamagedError(tenant_id, reason))
            continue
        named = [(tenant_id, key_id) for key_id in sorted(key_ids)]
        keys.destroyed(named)
        if living := [key_id for _, key_id in sorted(await store.not_destroyed(connection, named))]:
            await store.destroy_erased(connection, tenant_id, living, await _revision(connection))
            log.warning("erased_keys_destroyed_again", tenant_id=tenant_id, seq=floor.seq, key_ids=living)
    return damaged


async def bring_back_erasures(
    connection: Connection, tenant_id: str, floor: FieldsAtFloor, entries: Iterable[tuple[str, PrivacyEntry]]
) -> int:
    """Have the records name the keys that erasures up to the floor destroyed, by these entries that left, each after
    the node that made it; returns how many records said anything else. A node that runs finds them within seconds.

    Raises:
        InvalidInputError: the entries do not name the keys whose digest the PRUNED entry carries, or the records name
            others beside them. Nothing was changed.
        PrivacyUnavailableError: there is no state of private fields to add to.
    """
    action, named, changed = SystemAction.SUBJECT_ERASED, set[str](), 0
    async with connection.transaction():
        for node_id, entry in entries:
            facts = _facts(entry, action)
            named.update(facts["key_ids"])
            record = PrivacyRecord(tenant_id, NO_REVISION, action, facts, entry.seq, _time(entry))
            changed += await record_erasure(connection, record, node_id)
        if ErasedKeys.of(named) != floor.fields.erased:
            raise InvalidInputError(
                f"the entries name {len(named)} erased keys, and not the {floor.fields.erased.count} of which the "
                f"PRUNED entry of tenant {tenant_id} carries the digest"
            )
        if others := await erased_up_to(connection, tenant_id, floor.seq) - named:
            raise InvalidInputError(
                f"scheduler.privacy_records also names {len(others)} keys that no entry of tenant {tenant_id} up to "
                f"seq {floor.seq} erased, such as {min(others)}: remove those rows"
            )
    return changed


async def _revision(connection: Connection) -> int:
    try:
        async with connection.transaction():
            return await store.next_revision(connection)
    except PrivacyUnavailableError:
        return NO_REVISION


# --- declarations ---------------------------------------------------------------------------------


async def _compared(
    connection: Connection,
    check: EntryCheck,
    unchained: Sequence[PrivacyEntry],
    floors: Mapping[str, FieldsAtFloor],
    known_damage: Sequence[ChainDamagedError],
) -> Agreed:
    """Compare the tables with the chains of all tenants but those of ``known_damage``, in one state of the database or
    while nothing can be recorded.

    The chains are read last, so that they have every declaration that is recorded as chained.
    """
    noted: dict[str, list[PrivacyRecord]] = defaultdict(list)
    records, faults = await store.declaration_records(connection)
    for record in records:
        if not _has_left(record, floors.get(record.tenant_id, FieldsAtFloor())):
            noted[record.tenant_id].append(record)
    rows, _ = await store.declared_since(connection, 0)
    declared = {row.tenant_id: row for row in rows}
    chained: dict[str, list[PrivacyEntry]] = defaultdict(list)
    for tenant_id, floor in floors.items():
        if (said := _entry_at(tenant_id, floor)) is not None:
            chained[tenant_id].append(said)
    declarations = await store.declaration_entries(connection, check)
    for entry in (*declarations.said, *unchained):
        if entry.seq is None or entry.seq > floors.get(entry.tenant_id, FieldsAtFloor()).seq:
            chained[entry.tenant_id].append(entry)
    compared = Agreed({}, {}, declarations.damaged, [])
    damaged = {error.tenant_id for error in (*declarations.damaged, *known_damage)}
    for tenant_id in {*chained, *noted, *(fault.tenant_id for fault in faults)} - damaged:
        try:
            newest = _newest(
                tenant_id,
                chained[tenant_id],
                noted[tenant_id],
                [fault for fault in faults if fault.tenant_id == tenant_id],
            )
            last = _said_last(chained[tenant_id])
        except InvalidInputError as error:
            compared.doubts[tenant_id] = str(error)
            continue
        row = declared.get(tenant_id)
        if newest is not None and (row is None or row[1:] != (*_fields_and_subject(newest.facts), newest.revision)):
            compared.behind.append(newest)
        if last is not None:
            compared.said_last[tenant_id] = last
    return compared


def _has_left(record: PrivacyRecord, floor: FieldsAtFloor) -> bool:
    """Whether a declaration left and was not the last one that did."""
    declared = floor.fields.declared
    is_last = declared is not None and declared.id == record.facts["id"]
    return record.seq is not None and record.seq <= floor.seq and not is_last


def _entry_at(tenant_id: str, floor: FieldsAtFloor) -> PrivacyEntry | None:
    """The last declaration that left, as its entry had it; None if none did."""
    if (declared := floor.fields.declared) is None:
        return None
    return PrivacyEntry(tenant_id, declared.seq, declared.name, orjson.dumps(declared.facts), declared.at_ms)


def _newest(
    tenant_id: str, chained: Sequence[PrivacyEntry], noted: Sequence[PrivacyRecord], faults: Sequence[RowFault]
) -> PrivacyRecord | None:
    """The declaration of the tenant that is in force.

    Raises:
        InvalidInputError: rows that decide it are damaged.
    """
    known = {name_of(SystemAction.PRIVACY_DECLARED, record.facts["id"]): record for record in noted}
    place = {entry.name: number for number, entry in enumerate(chained)}
    last = noted[-1] if noted else None
    last_place = None if last is None else place.get(name_of(SystemAction.PRIVACY_DECLARED, last.facts["id"]))
    for fault in faults:
        if last is None or last_place is None or fault.revision is None or fault.revision > last.revision:
            raise InvalidInputError(fault.reason)
    if last is not None and last_place is not None:
        entry = chained[last_place]
        if _facts_or_none(entry) not in (None, last.facts):
            raise InvalidInputError(f"what was noted at revision {last.revision} is not what its entry says")
    elif last is not None and last.seq is not None:
        raise InvalidInputError(f"what was noted at revision {last.revision} as seq {last.seq} is in no chain")
    unknown = [entry for entry in chained if entry.name not in known]
    if unknown and (last_place is None or place[unknown[-1].name] > last_place):
        entry, action = unknown[-1], SystemAction.PRIVACY_DECLARED
        with reported_as(InvalidInputError, f"its entry {entry.name} does not say what is private", InvalidInputError):
            return PrivacyRecord(tenant_id, NO_REVISION, action, _facts(entry, action), entry.seq, _time(entry))
    return None if last is None else last._replace(seq=None if last_place is None else chained[last_place].seq)


def _said_last(chained: Sequence[PrivacyEntry]) -> Declaration | None:
    """The last declaration of a chain; None if it has none, or none that can be read: then the recorded one is in
    force.

    Raises:
        InvalidInputError: it is not a valid declaration.
    """
    facts = _facts_or_none(chained[-1]) if chained else None
    return None if facts is None else declaration_of(*_fields_and_subject(facts))


def _fields_and_subject(facts: dict[str, Any]) -> tuple[list[str], str | None]:
    return facts["fields"], facts.get("subject")


async def _declare_again(connection: Connection, newest: PrivacyRecord, node_id: str) -> None:
    tenant_id, revision = newest.tenant_id, await store.next_revision(connection)
    fields, subject = _fields_and_subject(newest.facts)
    await store.declare(connection, DeclaredFields(tenant_id, fields, subject, revision))
    await store.add_record(connection, newest._replace(revision=revision), node_id)
    log.warning("privacy_declared_again", tenant_id=tenant_id, revision=revision, seq=newest.seq, fields=fields)


# --- both -----------------------------------------------------------------------------------------


def _facts(entry: PrivacyEntry, action: SystemAction) -> dict[str, Any]:
    try:
        facts = facts_of(action, orjson.loads(entry.payload))
    except (orjson.JSONDecodeError, TypeError) as error:
        raise InvalidInputError(str(error)) from error
    if name_of(action, facts["id"]) != entry.name:
        raise InvalidInputError("id: is not the one that the entry is about", ("id",))
    return facts


def _facts_or_none(entry: PrivacyEntry) -> dict[str, Any] | None:
    with suppress(InvalidInputError):
        return _facts(entry, SystemAction.PRIVACY_DECLARED)
    return None


async def is_said_last(
    connection: Connection, check: EntryCheck, declared: DeclaredFields, floor: FieldsAtFloor
) -> bool:
    """Whether ``declared`` is the last declaration of the tenant's chain.

    Raises:
        ChainDamagedError: its last declaration is not as it was chained.
    """
    entry = await store.last_declaration_entry(connection, check, declared.tenant_id)
    if entry is None or (entry.seq is not None and entry.seq <= floor.seq):
        entry = _entry_at(declared.tenant_id, floor)
    facts = None if entry is None else _facts_or_none(entry)
    return facts is not None and _fields_and_subject(facts) == (declared.fields, declared.subject)


def says(entry: PrivacyEntry, record: PrivacyRecord) -> bool:
    """Whether the entry matches the record."""
    with suppress(InvalidInputError):
        return _facts(entry, SystemAction(record.action)) == record.facts
    return False


def _time(entry: PrivacyEntry) -> datetime:
    with reported_as(InvalidInputError, "its time is none", OverflowError, ValueError, OSError, TypeError):
        return datetime.fromtimestamp(entry.at_ms / 1000, UTC)
