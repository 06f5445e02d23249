"""SQL of private fields: what tenants declared, the wrapped keys of subjects, what the chains must say of both, and
what they say.

A change takes the next revision under the lock of the one row of ``privacy_state`` and commits with it, so ``revision
> known`` never misses one. Keys are made while that row cannot change, so none is wrapped by a master key that has
been replaced.

An attacker who controls the database can leave anything in these rows. A reader gets what was written, or
PrivacyDamagedError; lists name their damaged rows separately. The tables follow the chains: entries about declarations
and erasures are recomputed before a field is declared or a key destroyed because of them. Imported entries count in
the ledger that made them, and are left out.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from datetime import datetime
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import asyncpg
import orjson

from app.store.job_table import ENTRY
from app.store.reading import columns, fetch_as, fetch_column, fetch_tuples, fetch_value, json_in
from ledger.errors import ChainDamagedError, InvalidInputError, PrivacyDamagedError
from ledger.facts.events import SystemAction
from ledger.private_fields import facts_of, name_of
from ledger.verification import ENTRY_COLUMNS

if TYPE_CHECKING:
    from app.store import Connection
    from app.store.entry_check import EntryCheck

ENTRIES_AT_ONCE = 1000
UNKNOWN_TAG = b""
"""Subject tag of a destroyed key that this database never held: no keyed hash is empty."""


class PrivacyEntry(NamedTuple):
    """An entry, recomputed; ``seq`` is None while only the WAL has it, and ``at_ms`` is its HLC's."""

    tenant_id: str
    seq: int | None
    name: str
    payload: str | bytes
    at_ms: int


class PrivacyEntries(NamedTuple):
    """What the chains say, and what was met of entries that are not what was chained, one of each tenant."""

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
"""One look into the index of job ids a tenant, as what these entries are about begins alike. OFFSET keeps the planner
from reading the whole log instead."""

_CHAINED_IN_ORDER = f"{_CHAINED} ORDER BY l.tenant_id, l.seq"
_LAST_OF_TENANT = f"{_CHAINED} WHERE h.tenant_id = $4 ORDER BY l.seq DESC LIMIT 1"

_DECLARATIONS = (SystemAction.PRIVACY_DECLARED, "privacy:", "privacy;")
_ERASURES = (SystemAction.SUBJECT_ERASED, "erasure:", "erasure;")


async def declaration_entries(connection: Connection, check: EntryCheck) -> PrivacyEntries:
    """Every declaration that a chain holds, of all tenants."""
    return await _recomputed(connection, check, await fetch_tuples(connection, _CHAINED_IN_ORDER, *_DECLARATIONS))


async def last_declaration_entry(connection: Connection, check: EntryCheck, tenant_id: str) -> PrivacyEntry | None:
    """The last declaration of the tenant's chain; None where that has none.

    Raises:
        ChainDamagedError: it is not what was chained.
    """
    return await _first(connection, check, _LAST_OF_TENANT, *_DECLARATIONS, tenant_id)


async def find_entry(
    connection: Connection, check: EntryCheck, tenant_id: str, action: SystemAction, facts_id: str
) -> PrivacyEntry | None:
    """The tenant's entry of this action and id; None where its chain has none.

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
    """Every erasure that a chain holds, ``ENTRIES_AT_ONCE`` at a time; within a transaction."""
    cursor = await connection.cursor(_CHAINED, *_ERASURES)
    while rows := await cursor.fetch(ENTRIES_AT_ONCE):
        yield await _recomputed(connection, check, list(map(tuple, rows)))


async def _recomputed(connection: Connection, check: EntryCheck, rows: Sequence[tuple[Any, ...]]) -> PrivacyEntries:
    """Those of these rows of (tenant, ``*ENTRY_COLUMNS``) that are what was chained, in their order."""
    found = PrivacyEntries([], [])
    for tenant_id, of_tenant in groupby(rows, itemgetter(0)):
        entries = [row[1:] for row in of_tenant]
        damage = await _damage(connection, check, tenant_id, entries)
        if damage is not None:
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
    """Those of these keys (tenant, key id) that live, or that the table does not have at all."""
    if not keys:
        return set()
    return {
        *await fetch_tuples(
            connection,
            """
            SELECT n.tenant_id, n.key_id FROM unnest($1::text[], $2::text[]) AS n(tenant_id, key_id)
              LEFT JOIN scheduler.subject_keys AS k ON k.tenant_id = n.tenant_id AND k.key_id = n.key_id
             WHERE k.key_id IS NULL OR k.wrapped_key IS NOT NULL
            """,
            *zip(*keys, strict=True),
        )
    }


async def destroy_erased(connection: Connection, tenant_id: str, key_ids: Sequence[str], revision: int) -> None:
    """Have these keys destroyed for good, the unknown ones too, so that nothing brings them back."""
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
"""Most erased keys told one by one to a node that asks what is new."""
REWRAPPED_AT_ONCE = 1000

Value = TypeVar("Value")


class PrivacyState(NamedTuple):
    """The ledger's own row. ``wrapped_secret`` is the secret of its keyed hashes."""

    revision: int
    master_key_id: str
    wrapped_secret: bytes


class DeclaredFields(NamedTuple):
    """What one tenant declared, in dotted names."""

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
    """What the tenant's chain must say, and where it does; ``seq`` is None until then."""

    tenant_id: str
    revision: int
    action: str
    facts: dict[str, Any]
    seq: int | None
    created_at: datetime


class RowFault(NamedTuple):
    """A row that is not as it was written; ``revision`` is None when it has none."""

    tenant_id: str
    revision: int | None
    reason: str


_STATE = f"SELECT {columns(PrivacyState)} FROM scheduler.privacy_state"
_BEGIN = """
INSERT INTO scheduler.privacy_state (revision, master_key_id, wrapped_secret) VALUES (0, $1, $2)
    ON CONFLICT DO NOTHING
"""

_DECLARED = f"SELECT {columns(DeclaredFields)} FROM scheduler.private_fields"
_DECLARED_SINCE = f"{_DECLARED} WHERE revision > $1 OR revision IS NULL OR $1 = 0"
_DECLARED_BY = f"{_DECLARED} WHERE tenant_id = $1"

_KEYS = f"SELECT {columns(SubjectKey)} FROM scheduler.subject_keys WHERE tenant_id = $1"
_LIVING_KEYS = f"{_KEYS} AND subject_tag = ANY($2::bytea[]) AND wrapped_key IS NOT NULL"
_KEYS_OF_ID = f"{_KEYS} AND key_id = ANY($2::text[])"

_RECORDS = f"SELECT {columns(PrivacyRecord, ('created_at',))} FROM scheduler.privacy_records"
_RECORD_AT = f"{_RECORDS} WHERE tenant_id = $1 AND revision = $2"
_OPEN_RECORDS = f"{_RECORDS} WHERE node_id = $1 AND seq IS NULL ORDER BY revision"
_RECORDS_OF_ACTION = f"{_RECORDS} WHERE action = $1 ORDER BY revision"

# --- the ledger's own row -------------------------------------------------------------------------


async def read_state(connection: Connection) -> PrivacyState | None:
    """The state of the ledger; None while no tenant has ever declared anything."""
    return _state(await connection.fetchrow(_STATE))


async def lock_state(connection: Connection) -> PrivacyState | None:
    """The state, locked: no key is made or destroyed until this transaction ends."""
    return _state(await connection.fetchrow(f"{_STATE} FOR UPDATE"))


def _state(row: asyncpg.Record | None) -> PrivacyState | None:
    if row is not None and None in tuple(row):
        raise PrivacyDamagedError("the row of privacy_state is not as it was written; bring it back from a backup")
    return PrivacyState(*row) if row else None


async def begin(connection: Connection, master_key_id: str, wrapped_secret: bytes) -> PrivacyState:
    """The state of the ledger, which begins with these values if it has none."""
    await connection.execute(_BEGIN, master_key_id, wrapped_secret)
    state = await read_state(connection)
    assert state is not None
    return state


async def next_revision(connection: Connection) -> int:
    """Take the next revision; others wait for theirs until this transaction ends."""
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
    """From now on this master key wraps everything."""
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
    """Declarations above ``revision``, and the damaged ones of them; from 0 on, all."""
    return _told_apart(await connection.fetch(_DECLARED_SINCE, revision), _declared)


async def read_declared(connection: Connection, tenant_id: str) -> DeclaredFields | None:
    """What the tenant declared last."""
    row = await connection.fetchrow(_DECLARED_BY, tenant_id)
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
    """What these rows hold, and which of them are damaged."""
    sound, faults = [], []
    for row in rows:
        try:
            sound.append(parse(row))
        except PrivacyDamagedError as error:
            faults.append(RowFault(row["tenant_id"], row["revision"], str(error)))
    return sound, faults


async def declare(connection: Connection, declared: DeclaredFields) -> None:
    """Store what the tenant declares from now on."""
    fields = orjson.dumps(declared.fields).decode()
    await connection.execute(
        """
        INSERT INTO scheduler.private_fields (tenant_id, fields, subject, revision) VALUES ($1, $2, $3, $4)
            ON CONFLICT (tenant_id) DO UPDATE
               SET fields = excluded.fields, subject = excluded.subject, revision = excluded.revision,
                   updated_at = now()
        """,
        declared.tenant_id,
        fields,
        declared.subject,
        declared.revision,
    )


# --- keys -----------------------------------------------------------------------------------------


async def living_keys(connection: Connection, tenant_id: str, tags: Sequence[bytes]) -> list[SubjectKey]:
    """The living key of each subject that has one."""
    return await fetch_as(connection, SubjectKey, _LIVING_KEYS, tenant_id, tags)


async def find_keys(connection: Connection, tenant_id: str, key_ids: Sequence[str]) -> list[SubjectKey]:
    """Those of the keys that this ledger made, living or not."""
    return await fetch_as(connection, SubjectKey, _KEYS_OF_ID, tenant_id, key_ids)


async def any_living_key(connection: Connection) -> bool:
    """Whether any subject of any tenant has a key."""
    return bool(
        await connection.fetchval("SELECT EXISTS (SELECT FROM scheduler.subject_keys WHERE wrapped_key IS NOT NULL)")
    )


async def add_keys(
    connection: Connection, tenant_id: str, keys: Iterable[tuple[str, bytes, bytes]], master_key_id: str
) -> None:
    """Store keys (key id, subject tag, wrapped key) of subjects that have no living one; none when another master key
    than ``master_key_id`` wraps the keys of the ledger by now."""
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
    """(tenant, key id, subject tag) of keys destroyed above ``revision``; None when they are too many to tell."""
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
    """Note what the tenant's chain must say; ``node_id`` sees to it should this process end first."""
    said = (record.tenant_id, record.revision, record.action, orjson.dumps(record.facts).decode())
    await connection.execute(
        """
        INSERT INTO scheduler.privacy_records (tenant_id, revision, action, facts, node_id, created_at)
        VALUES ($1, $2, $3, $4, $5, $6)
        """,
        *said,
        node_id,
        record.created_at,
    )


async def read_record(connection: Connection, tenant_id: str, revision: int) -> PrivacyRecord | None:
    """What was noted at ``revision``."""
    row = await connection.fetchrow(_RECORD_AT, tenant_id, revision)
    return None if row is None else _record(row)


async def check_noted(connection: Connection, declared: DeclaredFields) -> None:
    """Return if what was noted at the declaration's revision is this declaration.

    Raises:
        PrivacyDamagedError: it is not: somebody changed one of the rows.
    """
    record = await read_record(connection, declared.tenant_id, declared.revision)
    noted = None if record is None else (record.facts.get("fields"), record.facts.get("subject"))
    if noted != (declared.fields, declared.subject):
        raise PrivacyDamagedError(
            f"what tenant {declared.tenant_id} should have declared at {declared.revision} is not what was noted"
        )


async def open_records(connection: Connection, node_id: str) -> tuple[list[PrivacyRecord], list[RowFault]]:
    """What this node noted and no chain is known to say yet, oldest first; and the damaged rows of them."""
    return _told_apart(await connection.fetch(_OPEN_RECORDS, node_id), _record)


async def declaration_records(connection: Connection) -> tuple[list[PrivacyRecord], list[RowFault]]:
    """What was noted of declarations, oldest first; and the damaged rows of them."""
    return _told_apart(await connection.fetch(_RECORDS_OF_ACTION, SystemAction.PRIVACY_DECLARED), _record)


def _record(row: asyncpg.Record) -> PrivacyRecord:
    where = f"the row of tenant {row['tenant_id']} at revision {row['revision']} in privacy_records"
    try:
        facts = facts_of(row["action"], json_in(row["facts"]))
    except InvalidInputError as error:
        raise PrivacyDamagedError(f"{where} is not as it was written: {error}") from error
    if row["revision"] is None or row["created_at"] is None:
        raise PrivacyDamagedError(f"{where} is not as it was written")
    return PrivacyRecord(row["tenant_id"], row["revision"], row["action"], facts, row["seq"], row["created_at"])


async def close_record(connection: Connection, record: PrivacyRecord, seq: int) -> None:
    """The chain says it, at ``seq``."""
    await connection.execute(
        "UPDATE scheduler.privacy_records SET seq = $3 WHERE tenant_id = $1 AND revision = $2",
        record.tenant_id,
        record.revision,
        seq,
    )
