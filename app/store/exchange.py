"""SQL of imports from other ledgers: the progress of imports of bundles, and for each chain of a peer the imported seq
and the newest checkpoint seen.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import asyncpg
import orjson

from app.store import Connection
from app.store.chaining import ChainHead
from app.store.reading import fetch_tuples, like, turned
from ledger.errors import DatabaseUnavailableError
from ledger.facts.events import SystemAction

FORK_SEPARATOR = "\x1e"
"""Stands in the column ``note`` before the checkpoint of a fork. A signed note has no control character but newline."""


class Seen(NamedTuple):
    """The newest checkpoint seen of a peer's chain, and the seq up to which the chain was imported.

    ``fork`` is a signed checkpoint of another tree of the same size, None if the peer showed none. It stays until an
    operator deletes the row.
    """

    note: str
    imported_seq: int
    fork: str | None = None


async def positions(connection: Connection, tenant_id: str) -> dict[str, Seen]:
    """The tenant's chains in other ledgers, by the origin in their checkpoints."""
    found = {}
    for origin, notes, imported_seq in await connection.fetch(
        "SELECT log_origin, note, imported_seq FROM scheduler.exchange_positions WHERE tenant_id = $1", tenant_id
    ):
        note, _, fork = notes.partition(FORK_SEPARATOR)
        found[origin] = Seen(note, imported_seq, fork or None)
    return found


async def saw(connection: Connection, tenant_id: str, log_origin: str, note: str, tree_size: int) -> None:
    """Record a newer checkpoint, which was proved consistent with the one before. A forked chain stays as it is."""
    await connection.execute(
        """
        INSERT INTO scheduler.exchange_positions AS p (log_origin, tenant_id, note, tree_size) VALUES ($2, $1, $3, $4)
            ON CONFLICT (tenant_id, log_origin) DO UPDATE
               SET note = excluded.note, tree_size = excluded.tree_size, updated_at = now()
             WHERE p.tree_size < excluded.tree_size AND strpos(p.note, $5) = 0
        """,
        tenant_id,
        log_origin,
        note,
        tree_size,
        FORK_SEPARATOR,
    )


async def saw_fork(connection: Connection, tenant_id: str, log_origin: str, note: str) -> None:
    """Record a signed checkpoint of another tree of the same size as the newest one seen. The first one stays."""
    await connection.execute(
        """
        UPDATE scheduler.exchange_positions SET note = note || $4::text || $3::text, updated_at = now()
         WHERE tenant_id = $1 AND log_origin = $2 AND strpos(note, $4) = 0
        """,
        tenant_id,
        log_origin,
        note,
        FORK_SEPARATOR,
    )


async def imported(connection: Connection, tenant_id: str, log_origin: str, seq: int) -> None:
    """Record that everything up to ``seq`` was imported."""
    await connection.execute(
        """
        UPDATE scheduler.exchange_positions SET imported_seq = $3, updated_at = now()
         WHERE tenant_id = $1 AND log_origin = $2 AND imported_seq < $3
        """,
        tenant_id,
        log_origin,
        seq,
    )


async def had(connection: Connection, own_origin: str, tenant_ids: Sequence[str]) -> dict[str, int]:
    """By the origin of each log, up to which seq its entries are in the chains of these tenants: those of this ledger,
    ``own_origin``, and what was imported from others."""
    rows: list[tuple[str, int]] = await fetch_tuples(
        connection,
        """
        SELECT $1 || '/' || tenant_id, head_seq FROM scheduler.chain_heads WHERE tenant_id = ANY($2::text[])
         UNION ALL
        SELECT log_origin, imported_seq FROM scheduler.exchange_positions
         WHERE tenant_id = ANY($2::text[]) AND imported_seq > 0
        """,
        own_origin,
        tenant_ids,
    )
    return dict(rows)


async def held_of(
    connection: Connection, origin: str, after: str, limit: int, patterns: Sequence[str], tenant_id: str | None = None
) -> list[tuple[str, int]]:
    """(tenant, seq up to which its chain of the ledger ``origin`` was imported), for tenants of these patterns after
    ``after``, or for one of them. Fewer than ``limit`` are the last page."""
    return await fetch_tuples(
        connection,
        """
        SELECT tenant_id, imported_seq FROM scheduler.exchange_positions
         WHERE log_origin = $1 || '/' || tenant_id AND tenant_id > $2 AND tenant_id LIKE ANY($4::text[])
           AND tenant_id = coalesce($5, tenant_id)
         ORDER BY tenant_id LIMIT $3
        """,
        origin,
        after,
        limit,
        like(patterns),
        tenant_id,
    )


class TenantNews(NamedTuple):
    """The newest checkpoint of a tenant here, and up to which seq its chain in another ledger was imported."""

    tenant_id: str
    checkpoint: str | None
    held: int


async def news_of(
    connection: Connection, origin: str, patterns: Sequence[str], tenant_ids: Sequence[str]
) -> list[TenantNews]:
    """What the ledger ``origin`` may want to know of these tenants, of those of the patterns."""
    return await _news(connection, "h.tenant_id = ANY($3::text[])", origin, like(patterns), tenant_ids)


async def list_news(
    connection: Connection, origin: str, patterns: Sequence[str], after: str, limit: int
) -> list[TenantNews]:
    """The same of all tenants of the patterns after ``after``. Fewer than ``limit`` are the last page."""
    return await _news(connection, f"h.tenant_id > $3 ORDER BY 1 LIMIT {limit}", origin, like(patterns), after)


async def _news(connection: Connection, chosen: str, *given: object) -> list[TenantNews]:
    rows = await fetch_tuples(
        connection,
        f"""
        SELECT h.tenant_id, m.checkpoint, coalesce(p.imported_seq, 0)
          FROM scheduler.chain_heads h
          LEFT JOIN scheduler.merkle_head m USING (tenant_id)
          LEFT JOIN scheduler.exchange_positions p
            ON p.tenant_id = h.tenant_id AND p.log_origin = $1 || '/' || h.tenant_id
         WHERE h.tenant_id LIKE ANY($2::text[]) AND {chosen}
        """,
        *given,
    )
    return [TenantNews(*row) for row in rows]


async def origins(connection: Connection, tenant_id: str, from_seq: int, to_seq: int) -> list[tuple[int, str | None]]:
    """(seq, stored origin) of the entries in this range, in order. An entry that is not stored has no origin."""
    return await fetch_tuples(
        connection,
        """
        SELECT s.seq, l.origin FROM generate_series($2::bigint, $3::bigint) s(seq)
          LEFT JOIN scheduler.scheduler_log l ON l.tenant_id = $1 AND l.seq = s.seq
         ORDER BY s.seq
        """,
        tenant_id,
        from_seq,
        to_seq,
    )


async def holds_payloads(connection: Connection, tenant_id: str, from_seq: int, to_seq: int) -> bool:
    """Whether an entry in this range is more than the record of a read."""
    return bool(
        await connection.fetchval(
            "SELECT EXISTS (SELECT FROM scheduler.scheduler_log"
            " WHERE tenant_id = $1 AND seq BETWEEN $2 AND $3 AND action <> $4)",
            tenant_id,
            from_seq,
            to_seq,
            SystemAction.PAYLOADS_READ,
        )
    )


async def take_turn(connection: Connection, peer: str) -> bool:
    """Whether this session may now poll ``peer``, alone in the ledger, until ``end_turn`` or the end of the session."""
    return bool(
        await connection.fetchval(
            "SELECT pg_try_advisory_lock(hashtextextended('tallystick.exchange ' || $1, 0))", peer
        )
    )


async def end_turn(connection: Connection, peer: str) -> None:
    """Leave ``peer`` to another session."""
    await connection.execute("SELECT pg_advisory_unlock(hashtextextended('tallystick.exchange ' || $1, 0))", peer)


class Import(NamedTuple):
    """The import of one set of bundles, as far as it has come; in the end ``imported + duplicates`` is ``entries``."""

    bundles: int
    entries: int
    from_seqs: Mapping[str, int] = {}
    """Head seq of each of its tenants when it began."""
    position: int = 0
    """Entries decided before this call, in the order of the merge, by the stored row."""
    imported: int = 0
    duplicates: int = 0
    jobs_changed: int = 0
    conflicts: Sequence[Mapping[str, object]] = ()
    has_ended: bool = False
    """Whether an earlier call imported all of it."""
    heads: Mapping[str, ChainHead] = {}
    """The present head of each of its tenants."""

    def to_json(self, *, dry_run: bool) -> dict[str, Any]:
        """The answer of the interfaces."""
        heads = {tenant: {"tenant_id": tenant, **head._asdict()} for tenant, head in sorted(self.heads.items())}
        return {
            "bundles": self.bundles,
            "entries": self.entries,
            "imported": self.imported,
            "duplicates": self.duplicates,
            "conflicts": self.conflicts,
            "jobs_changed": self.jobs_changed,
            "new_head": next(iter(heads.values())),
            "new_heads": heads,
            "dry_run": dry_run,
        }


_IMPORT = """bundles, entries, from_seqs, position, imported, duplicates, jobs_changed, conflicts,
               ended_at IS NOT NULL AS has_ended"""


def _import_of(row: asyncpg.Record) -> Import:
    return Import(*row)._replace(from_seqs=orjson.loads(row["from_seqs"]), conflicts=orjson.loads(row["conflicts"]))


async def read_import(connection: Connection, set_digest: str) -> Import | None:
    """The stored import of the set; None if no batch of it is stored."""
    row = await connection.fetchrow(f"SELECT {_IMPORT} FROM scheduler.bundle_import WHERE set_digest = $1", set_digest)
    return None if row is None else _import_of(row)


async def begin_import(connection: Connection, set_digest: str, begun: Import, node_id: str) -> Import:
    """The stored import of the set, which is ``begun`` if it is new, locked until the transaction ends.

    Raises:
        DatabaseUnavailableError: it was not stored.
    """
    row = await connection.fetchrow(
        f"""
        INSERT INTO scheduler.bundle_import AS stored
               (set_digest, bundles, entries, from_seqs, node_id, position, imported, duplicates, jobs_changed,
                conflicts)
        VALUES ($1, $2, $3, $4, $5, 0, 0, 0, 0, '[]')
            ON CONFLICT (set_digest) DO UPDATE SET position = stored.position
        RETURNING {_IMPORT}
        """,
        set_digest,
        begun.bundles,
        begun.entries,
        orjson.dumps(begun.from_seqs).decode(),
        node_id,
    )
    if row is None:
        raise DatabaseUnavailableError(
            "PostgreSQL dropped the row of this import in scheduler.bundle_import without an error; remove the trigger "
            "that does it, and import the same bundles again"
        )
    return _import_of(row)


async def has_ended(connection: Connection, set_digest: str) -> bool:
    """Whether an earlier call imported all of the set."""
    return bool(
        await connection.fetchval(
            "SELECT ended_at IS NOT NULL FROM scheduler.bundle_import WHERE set_digest = $1", set_digest
        )
    )


async def advance_import(connection: Connection, set_digest: str, reached: Import, *, has_new_conflicts: bool) -> None:
    """Store how far the import has come."""
    await connection.execute(
        """
        UPDATE scheduler.bundle_import
           SET position = $2::bigint + $3::bigint, imported = $2, duplicates = $3, jobs_changed = $4,
               conflicts = coalesce($5::json, conflicts),
               ended_at = CASE WHEN $2::bigint + $3::bigint = entries THEN now() END
         WHERE set_digest = $1
        """,
        set_digest,
        reached.imported,
        reached.duplicates,
        reached.jobs_changed,
        orjson.dumps(reached.conflicts).decode() if has_new_conflicts else None,
    )


async def restart_import(connection: Connection, set_digest: str, duplicates: int) -> None:
    """Restart after the first ``duplicates`` entries, which the chains already hold."""
    await connection.execute(
        """
        UPDATE scheduler.bundle_import
           SET position = $2, imported = 0, duplicates = $2, jobs_changed = 0, conflicts = '[]', ended_at = NULL
         WHERE set_digest = $1
        """,
        set_digest,
        duplicates,
    )


async def unfinished_imports(connection: Connection) -> list[tuple[str, int, int]]:
    """Set digest, position and entries of each interrupted import."""
    return await fetch_tuples(
        connection,
        """
        SELECT set_digest, position, entries FROM scheduler.bundle_import WHERE ended_at IS NULL ORDER BY began_at
        """,
    )


async def count_untouched(
    connection: Connection, jobs: Collection[tuple[str, str]], from_seqs: Mapping[str, int]
) -> int:
    """How many of these (tenant, job id) have no entry after their tenant's seq in ``from_seqs``."""
    return int(
        await connection.fetchval(
            """
            SELECT count(*)
              FROM unnest($1::text[], $2::text[], $3::bigint[]) AS job(tenant_id, job_id, from_seq)
             WHERE NOT EXISTS (SELECT FROM scheduler.scheduler_log l
                                WHERE l.tenant_id = job.tenant_id AND l.job_id = job.job_id AND l.seq > job.from_seq)
            """,
            *turned([(tenant_id, job_id, from_seqs[tenant_id]) for tenant_id, job_id in jobs], 3),
        )
    )
