"""SQL of what the chains say of private fields, and of having the tables follow it.

Entries that were imported count where they were made, and are left out.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from app.store.rows import fetch_as, fetch_one_as, fetch_tuples
from ledger.machines.events import SystemAction

if TYPE_CHECKING:
    from app.store import Connection

ENTRIES_AT_ONCE = 1000
UNKNOWN_TAG = b""
"""Subject tag of a destroyed key that this database never held: no keyed hash is empty."""


class PrivacyEntry(NamedTuple):
    """An entry as it is stored, unchecked; ``seq`` is None while only the WAL has it, and ``at_ms`` is its HLC's."""

    tenant_id: str
    seq: int | None
    name: str
    payload: str | bytes
    at_ms: int


_ENTRIES = """
    SELECT l.tenant_id, l.seq, l.job_id, l.payload, l.hlc_physical
      FROM scheduler.chain_heads AS h
     CROSS JOIN LATERAL (
           SELECT tenant_id, seq, job_id, payload, hlc_physical FROM scheduler.scheduler_log
            WHERE tenant_id = h.tenant_id AND job_id >= $2 AND job_id < $3 AND action = $1 AND origin IS NULL
           OFFSET 0
           ) AS l
"""
"""One look into the index of job ids a tenant, as what these entries are about begins alike. OFFSET keeps the planner
from reading the whole log instead."""

_LAST_OF_TENANT = f"{_ENTRIES} WHERE h.tenant_id = $4 ORDER BY l.seq DESC LIMIT 1"
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


async def declarations(connection: Connection) -> list[PrivacyEntry]:
    """Every declaration that a chain holds, of all tenants."""
    return await fetch_as(connection, PrivacyEntry, f"{_ENTRIES} ORDER BY l.tenant_id, l.seq", *_DECLARED)


async def last_declaration(connection: Connection, tenant_id: str) -> PrivacyEntry | None:
    """The last declaration of the tenant's chain; None where that has none."""
    return await fetch_one_as(connection, PrivacyEntry, _LAST_OF_TENANT, *_DECLARED, tenant_id)


async def erasures(connection: Connection) -> AsyncIterator[list[PrivacyEntry]]:
    """Every erasure that a chain holds, ``ENTRIES_AT_ONCE`` at a time; within a transaction."""
    cursor = await connection.cursor(_ENTRIES, *_ERASED)
    while rows := await cursor.fetch(ENTRIES_AT_ONCE):
        yield [PrivacyEntry(*row) for row in rows]


async def not_destroyed(connection: Connection, keys: Sequence[tuple[str, str]]) -> set[tuple[str, str]]:
    """Those of these keys (tenant, key id) that live, or that the table does not have at all."""
    if not keys:
        return set()
    return {*await fetch_tuples(connection, _NOT_DESTROYED, *zip(*keys, strict=True))}


async def destroy(connection: Connection, tenant_id: str, key_ids: Sequence[str], revision: int) -> None:
    """Have these keys destroyed for good, the unknown ones too, so that nothing brings them back."""
    await connection.execute(_DESTROY, tenant_id, key_ids, UNKNOWN_TAG, revision)
