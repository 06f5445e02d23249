"""SQL of the import of bundles: its progress, and what else one of its transactions touches."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import orjson

from app.store.chaining import ChainedEntry, ChainHead
from ledger.chain.conflict import Event
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


async def begin(
    connection: Connection, set_digest: str, *, bundles: int, entries: int, from_seqs: Mapping[str, int], node_id: str
) -> ImportProgress:
    """The progress of the set, from nothing when it is new."""
    await connection.execute(
        """
        INSERT INTO scheduler.bundle_import
               (set_digest, bundles, entries, from_seqs, node_id,
                position, imported, duplicates, jobs_changed, conflicts)
        VALUES ($1, $2, $3, $4, $5, 0, 0, 0, 0, '[]') ON CONFLICT (set_digest) DO NOTHING
        """,
        set_digest,
        bundles,
        entries,
        orjson.dumps(from_seqs).decode(),
        node_id,
    )
    return await lock(connection, set_digest)


async def lock(connection: Connection, set_digest: str) -> ImportProgress:
    """The progress of a set that was begun, locked until the transaction ends.

    Raises:
        DatabaseUnavailableError: there is none.
    """
    row = await connection.fetchrow(
        "SELECT from_seqs, position, imported, duplicates, jobs_changed, conflicts, ended_at IS NOT NULL"
        "  FROM scheduler.bundle_import WHERE set_digest = $1 FOR UPDATE",
        set_digest,
    )
    if row is None:
        raise DatabaseUnavailableError(
            "PostgreSQL dropped the row of this import in scheduler.bundle_import without an error; remove the trigger "
            "that does it, and import the same bundles again"
        )
    from_seqs, position, imported, duplicates, jobs_changed, conflicts, has_ended = row
    return ImportProgress(
        orjson.loads(from_seqs),
        position,
        imported,
        duplicates,
        jobs_changed,
        orjson.loads(conflicts),
        has_ended,
    )


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
    await connection.execute(
        """
        UPDATE scheduler.bundle_import
           SET position = $2::bigint + $3::bigint, imported = $2, duplicates = $3, jobs_changed = $4,
               conflicts = coalesce($5::json, conflicts),
               ended_at = CASE WHEN $2::bigint + $3::bigint = entries THEN now() END
         WHERE set_digest = $1
        """,
        set_digest,
        imported,
        duplicates,
        jobs_changed,
        None if conflicts is None else orjson.dumps(conflicts).decode(),
    )


async def restart(connection: Connection, set_digest: str, duplicates: int) -> None:
    """Begin again behind the first ``duplicates`` entries, which the chains were found to hold."""
    await connection.execute(
        "UPDATE scheduler.bundle_import SET position = $2, imported = 0, duplicates = $2, jobs_changed = 0,"
        " conflicts = '[]', ended_at = NULL WHERE set_digest = $1",
        set_digest,
        duplicates,
    )


async def unfinished(connection: Connection) -> list[tuple[str, int, int]]:
    """Set digest, position and entries of each import that was cut short."""
    rows = await connection.fetch(
        "SELECT set_digest, position, entries FROM scheduler.bundle_import WHERE ended_at IS NULL ORDER BY began_at"
    )
    return [(row[0], row[1], row[2]) for row in rows]


async def entries_at(connection: Connection, tenant_id: str, seqs: Sequence[int]) -> dict[int, ChainedEntry]:
    """Entries of the tenant by seq, those of ``seqs`` that stand in its chain: at or below the head."""
    rows = await connection.fetch(
        "SELECT seq, chain_link, prev_chain_link, t_hlc, job_id, action, payload_digest FROM scheduler.scheduler_log"
        " WHERE tenant_id = $1 AND seq = ANY($2::bigint[])"
        "   AND seq <= (SELECT head_seq FROM scheduler.chain_heads WHERE tenant_id = $1)",
        tenant_id,
        seqs,
    )
    return {seq: ChainedEntry(seq, link, prev, Event(*rest)) for seq, link, prev, *rest in rows}


async def count_untouched(
    connection: Connection, jobs: Collection[tuple[str, str]], from_seqs: Mapping[str, int]
) -> int:
    """How many of these (tenant, job id) have no entry yet behind ``from_seqs``, by tenant."""
    tenants = [tenant_id for tenant_id, _ in jobs]
    count: int = await connection.fetchval(
        """
        SELECT count(*)
          FROM unnest($1::text[], $2::text[], $3::bigint[]) AS job(tenant_id, job_id, from_seq)
         WHERE NOT EXISTS (SELECT FROM scheduler.scheduler_log l
                            WHERE l.tenant_id = job.tenant_id AND l.job_id = job.job_id AND l.seq > job.from_seq)
        """,
        tenants,
        [job_id for _, job_id in jobs],
        [from_seqs[tenant_id] for tenant_id in tenants],
    )
    return count


async def lock_heads(connection: Connection, tenant_ids: Sequence[str]) -> dict[str, ChainHead]:
    """Heads of ``tenant_ids`` that exist, locked in tenant order."""
    rows = await connection.fetch(
        "SELECT tenant_id, head_seq, head_chain_link, head_hlc FROM scheduler.chain_heads"
        " WHERE tenant_id = ANY($1::text[]) ORDER BY tenant_id FOR UPDATE",
        tenant_ids,
    )
    return {row["tenant_id"]: ChainHead(*row[1:]) for row in rows}


async def read_heads(connection: Connection, tenant_ids: Sequence[str]) -> dict[str, ChainHead]:
    """Heads of ``tenant_ids`` that exist."""
    rows = await connection.fetch(
        "SELECT tenant_id, head_seq, head_chain_link, head_hlc FROM scheduler.chain_heads"
        " WHERE tenant_id = ANY($1::text[])",
        tenant_ids,
    )
    return {row["tenant_id"]: ChainHead(*row[1:]) for row in rows}
