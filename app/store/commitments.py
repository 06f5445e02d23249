"""SQL of commitments: which entries say what is promised, now and at any earlier seq.

The table is an index that a follower keeps; what is promised = what its rows name, as far as it has followed, and the
entries beyond that. Both are read in one statement, so the answer is that of the chain in that snapshot. Imported
entries, those with an origin, are history and never count.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from app.store.following import FollowedEntry
from app.store.job_table import PLACES
from ledger.machines.events import CommitmentAction
from ledger.machines.promises import INDEX_PREFIX, NODE_PREFIX

if TYPE_CHECKING:
    from app.store import Connection

ROWS_AT_ONCE = 2000
_PROMISES = frozenset({CommitmentAction.PROPOSE_ACCEPTED, CommitmentAction.CAPACITY_SET})

_SAYS = "action IN ('PROPOSE_ACCEPTED', 'CAPACITY_SET') AND origin IS NULL"
_OF_REVOCATION = (
    f"CASE WHEN job_id ~ '^{INDEX_PREFIX}[0-9]{{1,18}}$' THEN substr(job_id, {len(INDEX_PREFIX) + 1})::bigint END"
)


def _of_a_node(row: str) -> str:
    """Whether ``row`` is a capacity, as the index of those has it."""
    return f"{row}.subject >= '{NODE_PREFIX}' AND {row}.subject < '{NODE_PREFIX[:-1]};'"


_ADD = """
INSERT INTO scheduler.commitments (tenant_id, seq, ended_seq, subject)
SELECT * FROM unnest($1::text[], $2::bigint[], $3::bigint[], $4::text[])
"""
_REVOKE = """
UPDATE scheduler.commitments AS c SET ended_seq = r.ended_seq
  FROM unnest($1::text[], $2::bigint[], $3::bigint[]) AS r(tenant_id, seq, ended_seq)
 WHERE c.tenant_id = r.tenant_id AND c.seq = r.seq AND c.ended_seq IS NULL AND c.seq < r.ended_seq
"""
_REPLACE = f"""
UPDATE scheduler.commitments AS c SET ended_seq = r.ended_seq
  FROM unnest($1::text[], $2::text[], $3::bigint[]) AS r(tenant_id, subject, ended_seq)
 WHERE c.tenant_id = r.tenant_id AND c.subject = r.subject AND {_of_a_node("c")}
   AND c.ended_seq IS NULL AND c.seq < r.ended_seq
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
       AND {_of_a_node("n")}
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


class PromiseEntry(NamedTuple):
    """One entry that says what is promised. Without an action the table names an entry that does not."""

    seq: int
    action: str | None
    payload: str | None


async def take(connection: Connection, followed: Mapping[str, Sequence[FollowedEntry]]) -> None:
    """Follow these entries of each tenant, which come next."""
    added: dict[tuple[str, int], tuple[int | None, str]] = {}
    newest: dict[tuple[str, str], int] = {}
    revoked: list[tuple[str, int, int]] = []
    replaced: list[tuple[str, str, int]] = []
    for tenant_id, entries in followed.items():
        for entry in entries:
            if entry.action not in _PROMISES or entry.origin is not None:
                continue
            seq, subject = entry.seq, entry.job_id
            if (target := _revoked_by(subject)) is not None:
                if (tenant_id, target) in added:
                    added[tenant_id, target] = seq, added[tenant_id, target][1]
                else:
                    revoked.append((tenant_id, target, seq))
                continue
            if entry.action == CommitmentAction.CAPACITY_SET:
                if (before := newest.get((tenant_id, subject))) is None:
                    replaced.append((tenant_id, subject, seq))
                else:
                    added[tenant_id, before] = seq, subject
                newest[tenant_id, subject] = seq
            added[tenant_id, seq] = None, subject
    if revoked:
        await connection.execute(_REVOKE, *zip(*revoked, strict=True))
    if replaced:
        await connection.execute(_REPLACE, *zip(*replaced, strict=True))
    if added:
        rows = [(tenant_id, seq, *more) for (tenant_id, seq), more in added.items()]
        await connection.execute(_ADD, *zip(*rows, strict=True))


def _revoked_by(subject: str) -> int | None:
    """The index that an entry about ``subject`` revokes, None where it revokes none."""
    target = subject.removeprefix(INDEX_PREFIX)
    return int(target) if target != subject and target.isascii() and target.isdigit() and len(target) <= 18 else None


async def empty(connection: Connection, tenant_ids: Sequence[str]) -> None:
    """Remove the rows of these tenants."""
    await connection.execute(_EMPTY, tenant_ids)


async def live(connection: Connection, tenant_id: str, head_seq: int) -> AsyncIterator[PromiseEntry]:
    """All entries that make up what is promised at the head, in seq order, and revocations that were not followed yet;
    the transaction holds the head locked."""
    async for row in connection.cursor(_LIVE, tenant_id, head_seq, prefetch=ROWS_AT_ONCE):
        yield PromiseEntry(*row)


async def since(connection: Connection, tenant_id: str, after_seq: int, head_seq: int) -> AsyncIterator[PromiseEntry]:
    """The entries after one seq that change what is promised."""
    async for row in connection.cursor(_SINCE, tenant_id, after_seq, head_seq, prefetch=ROWS_AT_ONCE):
        yield PromiseEntry(*row)


async def page(
    connection: Connection, tenant_id: str, as_of_seq: int, after_seq: int, limit: int, *, capacities: bool
) -> list[PromiseEntry]:
    """What was promised once the entry ``as_of_seq`` was there, or what nodes had, by seq from above ``after_seq``."""
    rows = await connection.fetch(_PAGE, tenant_id, as_of_seq, after_seq, capacities, limit)
    return [PromiseEntry(*row) for row in rows]
