"""SQL of the idempotency table: which keyed lines are chained, and where."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from app.store.chaining import copied, dropped

if TYPE_CHECKING:
    from app.store import Connection

RETENTION_DAYS = 7


class ChainedLine(NamedTuple):
    """One chained line of a keyed request, with what its receipt needs."""

    tenant_id: str
    line: int
    body_digest: bytes
    seq: int
    epoch: int
    lsn: int
    t_hlc: str
    job_id: str
    action: str
    payload: str
    chain_link: str
    prev_chain_link: str | None


async def find_lines(connection: Connection, tenant_ids: Sequence[str], route: int, key: str) -> list[ChainedLine]:
    """Chained lines of the keyed request in line order, of any body digest; where no entry stands at the seq that a
    row names, what would come from it is None."""
    rows = await connection.fetch(
        """
        SELECT i.tenant_id, i.line, i.body_digest, i.seq, i.epoch, i.lsn,
               l.t_hlc, l.job_id, l.action, l.payload, l.chain_link, l.prev_chain_link
          FROM scheduler.idempotency i
          LEFT JOIN scheduler.scheduler_log l USING (tenant_id, seq)
         WHERE i.tenant_id = ANY($1::text[]) AND i.route = $2 AND i.key = $3
         ORDER BY i.line
        """,
        tenant_ids,
        route,
        key,
    )
    return [ChainedLine(*row) for row in rows]


async def find_claims(
    connection: Connection, keys: Sequence[tuple[str, int, str]]
) -> list[tuple[tuple[str, int, str], ChainedLine]]:
    """The rows of these (tenant, route, key), with the entries that they name as in ``find_lines``."""
    rows = await connection.fetch(
        """
        SELECT i.route, i.key, i.tenant_id, i.line, i.body_digest, i.seq, i.epoch, i.lsn,
               l.t_hlc, l.job_id, l.action, l.payload, l.chain_link, l.prev_chain_link
          FROM unnest($1::text[], $2::smallint[], $3::text[]) AS wanted(tenant_id, route, key)
          JOIN scheduler.idempotency i USING (tenant_id, route, key)
          LEFT JOIN scheduler.scheduler_log l USING (tenant_id, seq)
        """,
        *zip(*keys, strict=True),
    )
    return [((line[0], route, key), ChainedLine(*line)) for route, key, *line in rows]


async def store_lines(connection: Connection, rows: Sequence[tuple[Any, ...]]) -> None:
    """Add rows of (tenant_id, route, key, line, body_digest, seq, epoch, lsn).

    Raises:
        ChainDamagedError: not all were stored; names a tenant that lacks some. The transaction MUST be rolled back.
    """
    status = await connection.copy_records_to_table(
        "idempotency",
        schema_name="scheduler",
        columns=("tenant_id", "route", "key", "line", "body_digest", "seq", "epoch", "lsn"),
        records=rows,
    )
    if copied(status) == len(rows):
        return
    tenants, routes, keys, lines, *_ = zip(*rows, strict=True)
    row = await connection.fetchrow(
        """
        SELECT n.tenant_id, count(*) AS sent, count(i.seq) AS stored
          FROM unnest($1::text[], $2::smallint[], $3::text[], $4::integer[]) AS n(tenant_id, route, key, line)
          LEFT JOIN scheduler.idempotency i USING (tenant_id, route, key, line)
         GROUP BY n.tenant_id ORDER BY count(*) = count(i.seq), n.tenant_id LIMIT 1
        """,
        tenants,
        routes,
        keys,
        lines,
    )
    assert row is not None
    raise dropped(row["tenant_id"], "idempotency rows", row["sent"], row["stored"])


async def forget_old(connection: Connection) -> None:
    """Drop keys older than the retention."""
    await connection.execute(
        "DELETE FROM scheduler.idempotency WHERE created_at < now() - make_interval(days => $1)",
        RETENTION_DAYS,
    )
