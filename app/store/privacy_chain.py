"""SQL of what the chains say of private fields, and of having the tables follow it.

Entries that were imported count where they were made, and are left out. All others are recomputed before anything is
declared or destroyed on their word.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from app.store.job_table import ENTRY
from app.store.rows import fetch_tuples
from ledger.errors import ChainDamagedError
from ledger.facts.events import SystemAction
from ledger.privacy_facts import name_of
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
_ENTRIES = f"""
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

_IN_ORDER = f"{_ENTRIES} ORDER BY l.tenant_id, l.seq"
_LAST_OF_TENANT = f"{_ENTRIES} WHERE h.tenant_id = $4 ORDER BY l.seq DESC LIMIT 1"
_NAMED = f"""
SELECT l.tenant_id, {ENTRY} FROM scheduler.scheduler_log AS l
 WHERE tenant_id = $1 AND job_id = $2 AND action = $3 AND origin IS NULL
   AND seq <= (SELECT head_seq FROM scheduler.chain_heads WHERE tenant_id = $1) ORDER BY seq LIMIT 1
"""
_NOT_DESTROYED = """
SELECT n.tenant_id, n.key_id FROM unnest($1::text[], $2::text[]) AS n(tenant_id, key_id)
  LEFT JOIN scheduler.subject_keys AS k ON k.tenant_id = n.tenant_id AND k.key_id = n.key_id
 WHERE k.key_id IS NULL OR k.wrapped_key IS NOT NULL
"""
_DESTROY = """
INSERT INTO scheduler.subject_keys AS k (tenant_id, key_id, subject_tag, erased_at, erased_revision)
SELECT $1, key_id, $3, now(), $4 FROM unnest($2::text[]) AS key_id
    ON CONFLICT (tenant_id, key_id) DO UPDATE
       SET wrapped_key = NULL, erased_at = excluded.erased_at, erased_revision = excluded.erased_revision
     WHERE k.wrapped_key IS NOT NULL
"""

_DECLARED = (SystemAction.PRIVACY_DECLARED, "privacy:", "privacy;")
_ERASED = (SystemAction.SUBJECT_ERASED, "erasure:", "erasure;")


async def declarations(connection: Connection, check: EntryCheck) -> PrivacyEntries:
    """Every declaration that a chain holds, of all tenants."""
    return await _recomputed(connection, check, await fetch_tuples(connection, _IN_ORDER, *_DECLARED))


async def last_declaration(connection: Connection, check: EntryCheck, tenant_id: str) -> PrivacyEntry | None:
    """The last declaration of the tenant's chain; None where that has none.

    Raises:
        ChainDamagedError: it is not what was chained.
    """
    return await _first(connection, check, _LAST_OF_TENANT, *_DECLARED, tenant_id)


async def find(
    connection: Connection, check: EntryCheck, tenant_id: str, action: SystemAction, facts_id: str
) -> PrivacyEntry | None:
    """The tenant's entry of this action and id; None where its chain has none.

    Raises:
        ChainDamagedError: it is not what was chained.
    """
    return await _first(connection, check, _NAMED, tenant_id, name_of(action, facts_id), action)


async def erasures(connection: Connection, check: EntryCheck) -> AsyncIterator[PrivacyEntries]:
    """Every erasure that a chain holds, ``ENTRIES_AT_ONCE`` at a time; within a transaction."""
    cursor = await connection.cursor(_ENTRIES, *_ERASED)
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
    rows = await fetch_tuples(connection, query, *asked)
    for tenant_id, *row in rows:
        await check.require(connection, tenant_id, [tuple(row)])
        return _entry_of(tenant_id, row)
    return None


def _entry_of(tenant_id: str, row: Sequence[Any]) -> PrivacyEntry:
    return PrivacyEntry(tenant_id, row[_SEQ], row[_NAME], row[_PAYLOAD], row[_AT_MS])


async def not_destroyed(connection: Connection, keys: Sequence[tuple[str, str]]) -> set[tuple[str, str]]:
    """Those of these keys (tenant, key id) that live, or that the table does not have at all."""
    if not keys:
        return set()
    return {*await fetch_tuples(connection, _NOT_DESTROYED, *zip(*keys, strict=True))}


async def destroy(connection: Connection, tenant_id: str, key_ids: Sequence[str], revision: int) -> None:
    """Have these keys destroyed for good, the unknown ones too, so that nothing brings them back."""
    await connection.execute(_DESTROY, tenant_id, key_ids, UNKNOWN_TAG, revision)
