"""SQL of commitments: which entries say what is promised, now and at any earlier seq.

The table is an index that a follower keeps; what is promised = what its rows name, as far as it has followed, and the
entries beyond that. Both are read in one statement, so the answer is that of the chain in that snapshot. Imported
entries, those with an origin, are history and never count.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from app.store.job_table import PLACES
from ledger.machines.promises import INDEX_PREFIX, NODE_PREFIX

if TYPE_CHECKING:
    from app.store import Connection

ROWS_AT_ONCE = 2000

_SAYS = "action IN ('PROPOSE_ACCEPTED', 'CAPACITY_SET') AND origin IS NULL"
_OF_REVOCATION = (
    f"CASE WHEN job_id ~ '^{INDEX_PREFIX}[0-9]{{1,18}}$' THEN substr(job_id, {len(INDEX_PREFIX) + 1})::bigint END"
)

_TAKE = f"""
INSERT INTO scheduler.commitments (tenant_id, seq, subject)
SELECT l.tenant_id, l.seq, l.job_id
  FROM unnest($1::text[], $2::bigint[], $3::bigint[]) AS followed(tenant_id, after_seq, upto_seq)
  JOIN scheduler.scheduler_log l
    ON l.tenant_id = followed.tenant_id AND l.seq > followed.after_seq AND l.seq <= followed.upto_seq
 WHERE {_SAYS} AND NOT starts_with(l.job_id, '{INDEX_PREFIX}')
"""
_REVOKE = f"""
UPDATE scheduler.commitments AS c SET ended_seq = r.seq
  FROM (SELECT l.tenant_id, l.seq, {_OF_REVOCATION} AS revoked_seq
          FROM unnest($1::text[], $2::bigint[], $3::bigint[]) AS followed(tenant_id, after_seq, upto_seq)
          JOIN scheduler.scheduler_log l
            ON l.tenant_id = followed.tenant_id AND l.seq > followed.after_seq AND l.seq <= followed.upto_seq
         WHERE {_SAYS} AND starts_with(l.job_id, '{INDEX_PREFIX}')) AS r
 WHERE c.tenant_id = r.tenant_id AND c.seq = r.revoked_seq AND c.ended_seq IS NULL AND c.seq < r.seq
"""
_REPLACE = f"""
UPDATE scheduler.commitments AS c SET ended_seq = n.next_seq
  FROM (SELECT tenant_id, seq, lead(seq) OVER (PARTITION BY tenant_id, subject ORDER BY seq) AS next_seq
          FROM scheduler.commitments
         WHERE ended_seq IS NULL AND (tenant_id, subject) IN (
               SELECT l.tenant_id, l.job_id
                 FROM unnest($1::text[], $2::bigint[], $3::bigint[]) AS followed(tenant_id, after_seq, upto_seq)
                 JOIN scheduler.scheduler_log l
                   ON l.tenant_id = followed.tenant_id AND l.seq > followed.after_seq AND l.seq <= followed.upto_seq
                WHERE {_SAYS} AND action = 'CAPACITY_SET')) AS n
 WHERE c.tenant_id = n.tenant_id AND c.seq = n.seq AND n.next_seq IS NOT NULL
"""
_EMPTY = "DELETE FROM scheduler.commitments WHERE tenant_id = ANY($1::text[])"

_FOLLOWED = f"SELECT coalesce(seq, 0) AS seq FROM ({PLACES}) AS place WHERE tenant_id = $1"
_LIVE = f"""
WITH followed AS ({_FOLLOWED})
SELECT c.seq, l.action, l.payload
  FROM followed JOIN scheduler.commitments c ON c.tenant_id = $1 AND c.seq <= followed.seq AND c.ended_seq IS NULL
  LEFT JOIN scheduler.scheduler_log l ON l.tenant_id = c.tenant_id AND l.seq = c.seq AND {_SAYS}
 UNION ALL
SELECT l.seq, l.action, l.payload FROM followed
  JOIN scheduler.scheduler_log l ON l.tenant_id = $1 AND l.seq > followed.seq AND l.seq <= $2
 WHERE {_SAYS}
 ORDER BY 1
"""
_SINCE = f"""
SELECT seq, action, payload FROM scheduler.scheduler_log
 WHERE tenant_id = $1 AND seq > $2 AND seq <= $3 AND {_SAYS} ORDER BY seq
"""
_PAGE = f"""
WITH followed AS ({_FOLLOWED}), unfollowed AS (
    SELECT l.seq, l.action, l.job_id FROM followed
      JOIN scheduler.scheduler_log l ON l.tenant_id = $1 AND l.seq > followed.seq AND l.seq <= $2 WHERE {_SAYS}
), ended AS (
    SELECT {_OF_REVOCATION} AS seq FROM unfollowed WHERE starts_with(job_id, '{INDEX_PREFIX}')
     UNION ALL
    SELECT n.seq FROM unfollowed u JOIN scheduler.commitments n
        ON n.tenant_id = $1 AND n.subject = u.job_id AND n.ended_seq IS NULL AND u.action = 'CAPACITY_SET'
     UNION ALL
    SELECT u.seq FROM unfollowed u
     WHERE u.action = 'CAPACITY_SET'
       AND EXISTS (SELECT FROM unfollowed v WHERE v.job_id = u.job_id AND v.seq > u.seq)
), wanted AS (
    SELECT c.seq FROM followed JOIN scheduler.commitments c
        ON c.tenant_id = $1 AND c.seq > $3 AND c.seq <= least($2, followed.seq)
     WHERE (c.ended_seq IS NULL OR c.ended_seq > $2) AND starts_with(c.subject, '{NODE_PREFIX}') = $4
     UNION ALL
    SELECT seq FROM unfollowed
     WHERE seq > $3 AND NOT starts_with(job_id, '{INDEX_PREFIX}') AND starts_with(job_id, '{NODE_PREFIX}') = $4
)
SELECT w.seq, l.action, l.payload FROM wanted w
  LEFT JOIN scheduler.scheduler_log l ON l.tenant_id = $1 AND l.seq = w.seq AND {_SAYS}
 WHERE w.seq NOT IN (SELECT seq FROM ended WHERE seq IS NOT NULL)
 ORDER BY w.seq LIMIT $5
"""


class Said(NamedTuple):
    """One entry that says what is promised. Without an action the table names an entry that does not."""

    seq: int
    action: str | None
    payload: str | None


Range = tuple[int, int]
"""Entries that are followed: after this seq, up to that one."""


async def take(connection: Connection, ranges: Mapping[str, Range]) -> None:
    """Follow these entries of each tenant."""
    tenants = list(ranges)
    after, upto = [ranges[name][0] for name in tenants], [ranges[name][1] for name in tenants]
    for statement in (_TAKE, _REVOKE, _REPLACE):
        await connection.execute(statement, tenants, after, upto)


async def empty(connection: Connection, tenant_ids: Sequence[str]) -> None:
    """Remove the rows of these tenants."""
    await connection.execute(_EMPTY, tenant_ids)


async def live(connection: Connection, tenant_id: str, head_seq: int) -> AsyncIterator[Said]:
    """All entries that make up what is promised at the head, in seq order, and revocations that were not followed yet;
    the transaction holds the head locked."""
    async for row in connection.cursor(_LIVE, tenant_id, head_seq, prefetch=ROWS_AT_ONCE):
        yield Said(*row)


async def since(connection: Connection, tenant_id: str, after_seq: int, head_seq: int) -> list[Said]:
    """The entries after one seq that change what is promised."""
    return [Said(*row) for row in await connection.fetch(_SINCE, tenant_id, after_seq, head_seq)]


async def page(
    connection: Connection, tenant_id: str, as_of_seq: int, after_seq: int, limit: int, *, capacities: bool
) -> list[Said]:
    """What was promised once the entry ``as_of_seq`` was there, or what nodes had, by seq from above ``after_seq``."""
    rows = await connection.fetch(_PAGE, tenant_id, as_of_seq, after_seq, capacities, limit)
    return [Said(*row) for row in rows]
