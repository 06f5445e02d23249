"""SQL of the import of bundles: its progress, and what else one of its transactions touches."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import orjson

from app.store.rows import fetch_tuples, turned
from ledger.errors import DatabaseUnavailableError

if TYPE_CHECKING:
    from app.store import Connection


class ImportProgress(NamedTuple):
    """How far the import of one set of bundles has come."""

    from_seqs: Mapping[str, int]
    """Head seq of each of its tenants when it began."""
    position: int
    """Entries decided, in the order of the merge; ``imported + duplicates``."""
    imported: int
    duplicates: int
    jobs_changed: int
    conflicts: Sequence[Mapping[str, object]]
    has_ended: bool


_BEGIN = """
INSERT INTO scheduler.bundle_import
       (set_digest, bundles, entries, from_seqs, node_id, position, imported, duplicates, jobs_changed, conflicts)
VALUES ($1, $2, $3, $4, $5, 0, 0, 0, 0, '[]') ON CONFLICT (set_digest) DO NOTHING
"""
_LOCK = """
SELECT from_seqs, position, imported, duplicates, jobs_changed, conflicts, ended_at IS NOT NULL AS has_ended
  FROM scheduler.bundle_import WHERE set_digest = $1 FOR UPDATE
"""
_ADVANCE = """
UPDATE scheduler.bundle_import
   SET position = $2::bigint + $3::bigint, imported = $2, duplicates = $3, jobs_changed = $4,
       conflicts = coalesce($5::json, conflicts),
       ended_at = CASE WHEN $2::bigint + $3::bigint = entries THEN now() END
 WHERE set_digest = $1
"""
_RESTART = """
UPDATE scheduler.bundle_import
   SET position = $2, imported = 0, duplicates = $2, jobs_changed = 0, conflicts = '[]', ended_at = NULL
 WHERE set_digest = $1
"""
_UNFINISHED = """
SELECT set_digest, position, entries FROM scheduler.bundle_import WHERE ended_at IS NULL ORDER BY began_at
"""
_COUNT_UNTOUCHED = """
SELECT count(*)
  FROM unnest($1::text[], $2::text[], $3::bigint[]) AS job(tenant_id, job_id, from_seq)
 WHERE NOT EXISTS (SELECT FROM scheduler.scheduler_log l
                    WHERE l.tenant_id = job.tenant_id AND l.job_id = job.job_id AND l.seq > job.from_seq)
"""


async def begin(
    connection: Connection, set_digest: str, *, bundles: int, entries: int, from_seqs: Mapping[str, int], node_id: str
) -> ImportProgress:
    """The progress of the set, from nothing when it is new."""
    await connection.execute(_BEGIN, set_digest, bundles, entries, orjson.dumps(from_seqs).decode(), node_id)
    return await lock(connection, set_digest)


async def lock(connection: Connection, set_digest: str) -> ImportProgress:
    """The progress of a set that was begun, locked until the transaction ends.

    Raises:
        DatabaseUnavailableError: there is none.
    """
    row = await connection.fetchrow(_LOCK, set_digest)
    if row is None:
        raise DatabaseUnavailableError(
            "PostgreSQL dropped the row of this import in scheduler.bundle_import without an error; remove the trigger "
            "that does it, and import the same bundles again"
        )
    from_seqs, *counts, conflicts, has_ended = row
    return ImportProgress._make((orjson.loads(from_seqs), *counts, orjson.loads(conflicts), has_ended))


async def advance(
    connection: Connection,
    set_digest: str,
    *,
    imported: int,
    duplicates: int,
    jobs_changed: int,
    conflicts: Sequence[Mapping[str, object]] | None,
) -> None:
    """Move the progress to these counts; ``conflicts`` are all of them, None when none was added."""
    stored = None if conflicts is None else orjson.dumps(conflicts).decode()
    await connection.execute(_ADVANCE, set_digest, imported, duplicates, jobs_changed, stored)


async def restart(connection: Connection, set_digest: str, duplicates: int) -> None:
    """Begin again behind the first ``duplicates`` entries, which the chains were found to hold."""
    await connection.execute(_RESTART, set_digest, duplicates)


async def unfinished(connection: Connection) -> list[tuple[str, int, int]]:
    """Set digest, position and entries of each import that was cut short."""
    return await fetch_tuples(connection, _UNFINISHED)


async def count_untouched(
    connection: Connection, jobs: Collection[tuple[str, str]], from_seqs: Mapping[str, int]
) -> int:
    """How many of these (tenant, job id) have no entry yet behind ``from_seqs``, by tenant."""
    asked = [(tenant_id, job_id, from_seqs[tenant_id]) for tenant_id, job_id in jobs]
    count: int = await connection.fetchval(_COUNT_UNTOUCHED, *turned(asked, 3))
    return count
