"""SQL of private fields: declarations of tenants, wrapped keys of subjects, the records of both that are to be chained,
and their chained entries.

A change takes the next revision under the lock of the one row of ``privacy_state`` and commits with it, so ``revision >
known`` never misses a change. Keys are made while that row cannot change, so none is wrapped by a master key that has
been replaced.

An attacker who controls the database can write anything into these rows. A reader gets the original values, or
PrivacyDamagedError; lists return their damaged rows separately. The tables follow the chains: entries about
declarations and erasures are recomputed before a field is declared or a key destroyed because of them. Imported entries
apply only to the ledger that made them, and are left out.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from datetime import datetime
from itertools import groupby
from operator import itemgetter
from typing import Any, NamedTuple, TypeVar

import asyncpg
import orjson

from app.store import Connection
from app.store.entry_check import EntryCheck
from app.store.jobs.table import ENTRY
from app.store.reading import columns, fetch_as, fetch_column, fetch_one_as, fetch_tuples, fetch_value, json_in, turned
from ledger.errors import ChainDamagedError, InvalidInputError, PrivacyDamagedError, reported_as
from ledger.facts.events import SystemAction
from ledger.private_fields import facts_of, name_of
from ledger.verification import ENTRY_COLUMNS

ENTRIES_AT_ONCE = 1000
UNKNOWN_TAG = b""
"""Subject tag of a destroyed key that this database never held: no keyed hash is empty."""


class PrivacyEntry(NamedTuple):
    """A verified entry; ``seq`` is None while only the WAL has it, and ``at_ms`` is the time of its HLC."""

    tenant_id: str
    seq: int | None
    name: str
    payload: str | bytes
    at_ms: int


class PrivacyEntries(NamedTuple):
    """Verified entries, and for each tenant the first entry that is not as it was chained."""

    said: list[PrivacyEntry]
    damaged: list[ChainDamagedError]


_SEQ, _NAME, _PAYLOAD, _AT_MS = map(ENTRY_COLUMNS.index, ("seq", "job_id", "payload", "hlc_physical"))
_CHAINED = f"""
    SELECT l.tenant_id, {ENTRY}
      FROM scheduler.chain_heads AS h
     CROSS JOIN LATERAL (
           SELECT * FROM scheduler.scheduler_log
            WHERE tenant_id = h.tenant_id AND job_id >= $2 AND job_id < $3 AND action = $1 AND origin IS NULL
              AND seq <= h.head_seq
           OFFSET 0
           ) AS l
"""
"""One lookup in the index of job ids for each tenant, as the subjects of these entries share a prefix. OFFSET keeps the
planner from reading the whole log instead."""


_DECLARATIONS = (SystemAction.PRIVACY_DECLARED, "privacy:", "privacy;")


async def declaration_entries(connection: Connection, check: EntryCheck) -> PrivacyEntries:
    """Every declaration in the chains of all tenants."""
    return await _recomputed(
        connection, check, await fetch_tuples(connection, f"{_CHAINED} ORDER BY l.tenant_id, l.seq", *_DECLARATIONS)
    )


async def last_declaration_entry(connection: Connection, check: EntryCheck, tenant_id: str) -> PrivacyEntry | None:
    """The last declaration of the tenant's chain, None without one.

    Raises:
        ChainDamagedError: it is not what was chained.
    """
    return await _first(
        connection, check, f"{_CHAINED} WHERE h.tenant_id = $4 ORDER BY l.seq DESC LIMIT 1", *_DECLARATIONS, tenant_id
    )


async def find_entry(
    connection: Connection, check: EntryCheck, tenant_id: str, action: SystemAction, facts_id: str
) -> PrivacyEntry | None:
    """The tenant's entry of this action and id, None without one.

    Raises:
        ChainDamagedError: it is not what was chained.
    """
    return await _first(
        connection,
        check,
        f"""
        SELECT l.tenant_id, {ENTRY} FROM scheduler.scheduler_log AS l
         WHERE tenant_id = $1 AND job_id = $2 AND action = $3 AND origin IS NULL
           AND seq <= (SELECT head_seq FROM scheduler.chain_heads WHERE tenant_id = $1) ORDER BY seq LIMIT 1
        """,
        tenant_id,
        name_of(action, facts_id),
        action,
    )


async def erasure_entries(connection: Connection, check: EntryCheck) -> AsyncIterator[PrivacyEntries]:
    """Every erasure in the chains, ``ENTRIES_AT_ONCE`` at a time; within a transaction."""
    cursor = await connection.cursor(_CHAINED, *(SystemAction.SUBJECT_ERASED, "erasure:", "erasure;"))
    while rows := await cursor.fetch(ENTRIES_AT_ONCE):
        yield await _recomputed(connection, check, list(map(tuple, rows)))


async def _recomputed(connection: Connection, check: EntryCheck, rows: Sequence[tuple[Any, ...]]) -> PrivacyEntries:
    """Verify rows of (tenant, ``*ENTRY_COLUMNS``); the valid ones keep their order."""
    found = PrivacyEntries([], [])
    for tenant_id, of_tenant in groupby(rows, itemgetter(0)):
        entries = [row[1:] for row in of_tenant]
        if (damage := await _damage(connection, check, tenant_id, entries)) is not None:
            found.damaged.append(damage)
            entries = [row for row in entries if await _damage(connection, check, tenant_id, [row]) is None]
        found.said.extend(_entry_of(tenant_id, row) for row in entries)
    return found


async def _damage(
    connection: Connection, check: EntryCheck, tenant_id: str, entries: Sequence[tuple[Any, ...]]
) -> ChainDamagedError | None:
    try:
        await check.require(connection, tenant_id, entries)
    except ChainDamagedError as error:
        return error
    return None


async def _first(connection: Connection, check: EntryCheck, query: str, *asked: object) -> PrivacyEntry | None:
    for tenant_id, *row in await fetch_tuples(connection, query, *asked):
        await check.require(connection, tenant_id, [tuple(row)])
        return _entry_of(tenant_id, row)
    return None


def _entry_of(tenant_id: str, row: Sequence[Any]) -> PrivacyEntry:
    return PrivacyEntry(tenant_id, row[_SEQ], row[_NAME], row[_PAYLOAD], row[_AT_MS])


async def not_destroyed(connection: Connection, keys: Sequence[tuple[str, str]]) -> set[tuple[str, str]]:
    """The keys (tenant, key id) among these that are living, or not in the table."""
    return {
        *await fetch_tuples(
            connection,
            """
            SELECT n.tenant_id, n.key_id FROM unnest($1::text[], $2::text[]) AS n(tenant_id, key_id)
              LEFT JOIN scheduler.subject_keys AS k ON k.tenant_id = n.tenant_id AND k.key_id = n.key_id
             WHERE k.key_id IS NULL OR k.wrapped_key IS NOT NULL
            """,
            *turned(keys, 2),
        )
    }


async def destroy_erased(connection: Connection, tenant_id: str, key_ids: Sequence[str], revision: int) -> None:
    """Destroy these keys for good, unknown ones too, so that none can be restored."""
    await connection.execute(
        """
        INSERT INTO scheduler.subject_keys AS k (tenant_id, key_id, subject_tag, erased_at, erased_revision)
        SELECT $1, key_id, $3, now(), $4 FROM unnest($2::text[]) AS key_id
            ON CONFLICT (tenant_id, key_id) DO UPDATE
               SET wrapped_key = NULL, erased_at = excluded.erased_at, erased_revision = excluded.erased_revision
             WHERE k.wrapped_key IS NOT NULL
        """,
        tenant_id,
        key_ids,
        UNKNOWN_TAG,
        revision,
    )


ERASED_FETCHED_MAX = 10_000
"""Most erased keys that one query for new erasures returns."""
REWRAPPED_AT_ONCE = 1000

Value = TypeVar("Value")


class PrivacyState(NamedTuple):
    """The ledger's own row. ``wrapped_secret`` is the secret of its keyed hashes."""

    revision: int
    master_key_id: str
    wrapped_secret: bytes


class DeclaredFields(NamedTuple):
    """The declaration of one tenant, in dotted names."""

    tenant_id: str
    fields: list[str]
    subject: str | None
    revision: int


class SubjectKey(NamedTuple):
    """One key; ``wrapped_key`` is None once it was destroyed."""

    key_id: str
    subject_tag: bytes
    wrapped_key: bytes | None


class PrivacyRecord(NamedTuple):
    """A change that the tenant's chain must record, and the seq of its entry, None until it is chained."""

    tenant_id: str
    revision: int
    action: str
    facts: dict[str, Any]
    seq: int | None
    created_at: datetime


class RowFault(NamedTuple):
    """A damaged row; ``revision`` is None when it has none."""

    tenant_id: str
    revision: int | None
    reason: str


_DECLARED = f"SELECT {columns(DeclaredFields)} FROM scheduler.private_fields"

_KEYS = f"SELECT {columns(SubjectKey)} FROM scheduler.subject_keys WHERE tenant_id = $1"

_RECORDS = f"SELECT {columns(PrivacyRecord, ('created_at',))} FROM scheduler.privacy_records"

# --- the ledger's own row -------------------------------------------------------------------------


async def read_state(connection: Connection, *, is_locked: bool = False) -> PrivacyState | None:
    """The state of the ledger; None before the first declaration. With ``is_locked`` no key is made or destroyed until
    this transaction ends."""
    query = f"SELECT {columns(PrivacyState)} FROM scheduler.privacy_state {'FOR UPDATE' if is_locked else ''}"
    if (state := await fetch_one_as(connection, PrivacyState, query)) is not None and None in state:
        raise PrivacyDamagedError("the row of privacy_state is not as it was written; bring it back from a backup")
    return state


async def begin(connection: Connection, master_key_id: str, wrapped_secret: bytes) -> PrivacyState:
    """The state of the ledger, created with these values if there is none."""
    await connection.execute(
        """
        INSERT INTO scheduler.privacy_state (revision, master_key_id, wrapped_secret) VALUES (0, $1, $2)
            ON CONFLICT DO NOTHING
        """,
        master_key_id,
        wrapped_secret,
    )
    state = await read_state(connection)
    assert state is not None
    return state


async def next_revision(connection: Connection) -> int:
    """Take the next revision; other sessions wait until this transaction ends."""
    try:
        revision: int | None = await connection.fetchval(
            "UPDATE scheduler.privacy_state SET revision = revision + 1, updated_at = now() RETURNING revision"
        )
    except (asyncpg.NumericValueOutOfRangeError, asyncpg.NotNullViolationError):
        revision = None
    if revision is None:
        raise PrivacyDamagedError("privacy_state has no revision to go on from; bring its row back from a backup")
    return revision


async def replace_master(connection: Connection, master_key_id: str, wrapped_secret: bytes) -> None:
    """Store the new master key id and the secret that it wraps."""
    await connection.execute(
        """
        UPDATE scheduler.privacy_state
           SET master_key_id = $1, wrapped_secret = $2, revision = revision + 1, updated_at = now()
        """,
        master_key_id,
        wrapped_secret,
    )


# --- declarations ---------------------------------------------------------------------------------


async def declared_since(connection: Connection, revision: int) -> tuple[list[DeclaredFields], list[RowFault]]:
    """Declarations above ``revision``, and the damaged ones among them; 0 gives all."""
    return _told_apart(
        await connection.fetch(f"{_DECLARED} WHERE revision > $1 OR revision IS NULL OR $1 = 0", revision), _declared
    )


async def read_declared(connection: Connection, tenant_id: str) -> DeclaredFields | None:
    """The tenant's last declaration."""
    row = await connection.fetchrow(f"{_DECLARED} WHERE tenant_id = $1", tenant_id)
    return None if row is None else _declared(row)


def _declared(row: asyncpg.Record) -> DeclaredFields:
    fields, revision = json_in(row["fields"]), row["revision"]
    if not isinstance(fields, list) or not all(isinstance(field, str) for field in fields) or revision is None:
        raise PrivacyDamagedError(
            f"the row of tenant {row['tenant_id']} in private_fields is not as it was written; the tenant may declare "
            "its fields again"
        )
    return DeclaredFields(row["tenant_id"], fields, row["subject"], revision)


def _told_apart(
    rows: Iterable[asyncpg.Record], parse: Callable[[asyncpg.Record], Value]
) -> tuple[list[Value], list[RowFault]]:
    """The parsed rows, and the damaged ones."""
    sound, faults = [], []
    for row in rows:
        try:
            sound.append(parse(row))
        except PrivacyDamagedError as error:
            faults.append(RowFault(row["tenant_id"], row["revision"], str(error)))
    return sound, faults


async def declare(connection: Connection, declared: DeclaredFields) -> None:
    """Store the tenant's new declaration."""
    await connection.execute(
        """
        INSERT INTO scheduler.private_fields (tenant_id, fields, subject, revision) VALUES ($1, $2, $3, $4)
            ON CONFLICT (tenant_id) DO UPDATE
               SET fields = excluded.fields, subject = excluded.subject, revision = excluded.revision,
                   updated_at = now()
        """,
        declared.tenant_id,
        orjson.dumps(declared.fields).decode(),
        declared.subject,
        declared.revision,
    )


# --- keys -----------------------------------------------------------------------------------------


async def living_keys(connection: Connection, tenant_id: str, tags: Sequence[bytes]) -> list[SubjectKey]:
    """The living key of each subject that has one."""
    return await fetch_as(
        connection,
        SubjectKey,
        f"{_KEYS} AND subject_tag = ANY($2::bytea[]) AND wrapped_key IS NOT NULL",
        tenant_id,
        tags,
    )


async def find_keys(connection: Connection, tenant_id: str, key_ids: Sequence[str]) -> list[SubjectKey]:
    """The keys among these that this ledger made, living or not."""
    return await fetch_as(connection, SubjectKey, f"{_KEYS} AND key_id = ANY($2::text[])", tenant_id, key_ids)


async def any_living_key(connection: Connection) -> bool:
    """Whether any subject of any tenant has a key."""
    return bool(
        await connection.fetchval("SELECT EXISTS (SELECT FROM scheduler.subject_keys WHERE wrapped_key IS NOT NULL)")
    )


async def add_keys(
    connection: Connection, tenant_id: str, keys: Iterable[tuple[str, bytes, bytes]], master_key_id: str
) -> None:
    """Store keys (key id, subject tag, wrapped key) of subjects without a living key; none if ``master_key_id`` is no
    longer the ledger's master key."""
    await connection.execute(
        """
        WITH state AS MATERIALIZED (
            SELECT FROM scheduler.privacy_state WHERE master_key_id = $5 FOR SHARE
        )
        INSERT INTO scheduler.subject_keys (tenant_id, key_id, subject_tag, wrapped_key)
        SELECT $1, key_id, subject_tag, wrapped_key
          FROM unnest($2::text[], $3::bytea[], $4::bytea[]) AS n(key_id, subject_tag, wrapped_key)
         WHERE EXISTS (SELECT FROM state)
         ORDER BY subject_tag
            ON CONFLICT DO NOTHING
        """,
        tenant_id,
        *zip(*keys, strict=True),
        master_key_id,
    )


async def destroy_keys(connection: Connection, tenant_id: str, tag: bytes, revision: int) -> list[str]:
    """Destroy the living keys of the subject, for good; returns their ids."""
    return await fetch_column(
        connection,
        """
        UPDATE scheduler.subject_keys SET wrapped_key = NULL, erased_at = now(), erased_revision = $3
         WHERE tenant_id = $1 AND subject_tag = $2 AND wrapped_key IS NOT NULL RETURNING key_id
        """,
        tenant_id,
        tag,
        revision,
    )


async def last_erasure(connection: Connection, tenant_id: str, tag: bytes) -> int | None:
    """Revision of the subject's newest erasure; None when there was none."""
    return await fetch_value(
        connection,
        int,
        "SELECT max(erased_revision) FROM scheduler.subject_keys WHERE tenant_id = $1 AND subject_tag = $2",
        tenant_id,
        tag,
    )


async def erased_since(connection: Connection, revision: int) -> list[tuple[str, str, bytes]] | None:
    """(tenant, key id, subject tag) of keys destroyed above ``revision``; None if there are more than
    ``ERASED_FETCHED_MAX``."""
    rows = await fetch_tuples(
        connection,
        "SELECT tenant_id, key_id, subject_tag FROM scheduler.subject_keys WHERE erased_revision > $1 LIMIT $2",
        revision,
        ERASED_FETCHED_MAX + 1,
    )
    return None if len(rows) > ERASED_FETCHED_MAX else rows


async def living_keys_after(connection: Connection, tenant_id: str, key_id: str) -> list[tuple[str, str, bytes]]:
    """The next (tenant, key id, wrapped key) in order, at most ``REWRAPPED_AT_ONCE``."""
    return await fetch_tuples(
        connection,
        """
        SELECT tenant_id, key_id, wrapped_key FROM scheduler.subject_keys
         WHERE (tenant_id, key_id) > ($1, $2) AND wrapped_key IS NOT NULL ORDER BY tenant_id, key_id LIMIT $3
        """,
        tenant_id,
        key_id,
        REWRAPPED_AT_ONCE,
    )


async def rewrap(connection: Connection, keys: Sequence[tuple[str, str, bytes]]) -> None:
    """Store these keys (tenant, key id, wrapped key) as wrapped now."""
    await connection.execute(
        """
        UPDATE scheduler.subject_keys AS k SET wrapped_key = n.wrapped_key
          FROM unnest($1::text[], $2::text[], $3::bytea[]) AS n(tenant_id, key_id, wrapped_key)
         WHERE k.tenant_id = n.tenant_id AND k.key_id = n.key_id
        """,
        *zip(*keys, strict=True),
    )


# --- what the chain must say ----------------------------------------------------------------------


async def add_record(connection: Connection, record: PrivacyRecord, node_id: str) -> None:
    """Record a change that the tenant's chain must hold; ``node_id`` chains it if this process ends first."""
    await connection.execute(
        """
        INSERT INTO scheduler.privacy_records (tenant_id, revision, action, facts, seq, node_id, created_at)
        VALUES ($1, $2, $3, $4, $5, $6, $7)
        """,
        record.tenant_id,
        record.revision,
        record.action,
        orjson.dumps(record.facts).decode(),
        record.seq,
        node_id,
        record.created_at,
    )


async def read_record(connection: Connection, tenant_id: str, revision: int) -> PrivacyRecord | None:
    """The record of ``revision``."""
    row = await connection.fetchrow(f"{_RECORDS} WHERE tenant_id = $1 AND revision = $2", tenant_id, revision)
    return None if row is None else _record(row)


async def check_noted(connection: Connection, declared: DeclaredFields) -> None:
    """Return if the record of the declaration's revision matches it.

    Raises:
        PrivacyDamagedError: it does not: one of the rows was edited.
    """
    record = await read_record(connection, declared.tenant_id, declared.revision)
    noted = None if record is None else (record.facts.get("fields"), record.facts.get("subject"))
    if noted != (declared.fields, declared.subject):
        raise PrivacyDamagedError(
            f"what tenant {declared.tenant_id} should have declared at {declared.revision} is not what was noted"
        )


async def open_records(connection: Connection, node_id: str) -> tuple[list[PrivacyRecord], list[RowFault]]:
    """This node's records that are not known to be chained, oldest first; and the damaged rows among them."""
    return _told_apart(
        await connection.fetch(f"{_RECORDS} WHERE node_id = $1 AND seq IS NULL ORDER BY revision", node_id), _record
    )


async def declaration_records(connection: Connection) -> tuple[list[PrivacyRecord], list[RowFault]]:
    """The records of declarations, oldest first; and the damaged rows among them."""
    return _told_apart(
        await connection.fetch(f"{_RECORDS} WHERE action = $1 ORDER BY revision", SystemAction.PRIVACY_DECLARED),
        _record,
    )


def _record(row: asyncpg.Record) -> PrivacyRecord:
    where = f"the row of tenant {row['tenant_id']} at revision {row['revision']} in privacy_records"
    with reported_as(PrivacyDamagedError, f"{where} is not as it was written", InvalidInputError):
        facts = facts_of(row["action"], json_in(row["facts"]))
    if row["revision"] is None or row["created_at"] is None:
        raise PrivacyDamagedError(f"{where} is not as it was written")
    return PrivacyRecord(row["tenant_id"], row["revision"], row["action"], facts, row["seq"], row["created_at"])


async def close_record(connection: Connection, record: PrivacyRecord, seq: int) -> None:
    """Note that the record is chained at ``seq``."""
    await connection.execute(
        "UPDATE scheduler.privacy_records SET seq = $3 WHERE tenant_id = $1 AND revision = $2",
        record.tenant_id,
        record.revision,
        seq,
    )
