"""SQL of the job table, which a follower keeps: its rows, and what a job is.

What a job is = its row, merged with its entries beyond where the follower stands; both of one statement, so the answer
is that of the chain in that snapshot, however far the follower is behind. The index scheduler_log_job finds them.
A place beyond the end of the chain is none, and without a place no row counts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import orjson
import structlog

from app.store.chaining import dropped
from app.store.following import Place
from ledger.errors import ChainDamagedError, InvalidInputError
from ledger.machines import jobs
from ledger.machines.jobs import JobState
from ledger.verification import JOB_COLUMNS

if TYPE_CHECKING:
    from app.store import Connection

log = structlog.get_logger()

FOLLOWER = "jobs"
"""Name of the follower that keeps the table."""
UNFOLLOWED_MAX = 500
"""Most entries of one job that are merged with its row; where more are not followed yet, all its entries are folded."""

PAST_ROWS = 500
"""Entries fetched at a time when the past of a job is folded."""

JobKey = tuple[str, str]
"""(tenant, job id)."""

_STORE = """
WITH stored AS (
INSERT INTO scheduler.jobs AS j
       (tenant_id, job_id, status, created_physical, created_logical, created_node, last_seq, state)
SELECT tenant_id, job_id, status, created_physical, created_logical, created_node, last_seq, state::json
  FROM unnest($1::text[], $2::text[], $3::text[], $4::bigint[], $5::bigint[], $6::text[], $7::bigint[], $8::text[])
       AS n(tenant_id, job_id, status, created_physical, created_logical, created_node, last_seq, state)
    ON CONFLICT (tenant_id, job_id) DO UPDATE
       SET status = excluded.status, created_physical = excluded.created_physical,
           created_logical = excluded.created_logical, created_node = excluded.created_node,
           last_seq = excluded.last_seq, state = excluded.state, updated_at = now()
    RETURNING j.tenant_id
)
SELECT tenant_id, count(*) FROM stored GROUP BY tenant_id
"""

PLACES = f"""
SELECT h.tenant_id, h.head_seq, CASE WHEN p.seq <= h.head_seq THEN p.seq END AS seq
  FROM scheduler.chain_heads h
  LEFT JOIN scheduler.follower_positions p ON p.follower = '{FOLLOWER}' AND p.tenant_id = h.tenant_id
"""


def jobs_query(wanted: str) -> str:
    """The query for the parts of the jobs of ``wanted``, a relation of tenant_id and job_id: ``JobParts``."""
    return f"""
SELECT w.tenant_id, w.job_id, j.state, unfollowed.entries
  FROM {wanted} AS w(tenant_id, job_id)
  JOIN ({PLACES}) AS place USING (tenant_id)
  LEFT JOIN scheduler.jobs j ON place.seq IS NOT NULL AND j.tenant_id = w.tenant_id AND j.job_id = w.job_id
 CROSS JOIN LATERAL (
       SELECT json_agg(json_build_array(seq, hlc_physical, hlc_logical, hlc_node, action, payload_digest, payload)
                       ORDER BY seq) AS entries
         FROM (SELECT * FROM scheduler.scheduler_log l
                WHERE l.tenant_id = w.tenant_id AND l.job_id = w.job_id
                  AND l.seq > coalesce(place.seq, 0) AND l.seq <= place.head_seq
                ORDER BY l.seq LIMIT {UNFOLLOWED_MAX + 1}) AS l
       ) AS unfollowed
 WHERE j.job_id IS NOT NULL OR unfollowed.entries IS NOT NULL
"""


_JOBS = jobs_query("unnest((SELECT $1::text[]), (SELECT $2::text[]))")
_PAST = """
SELECT seq, hlc_physical, hlc_logical, hlc_node, action, payload_digest, payload
  FROM scheduler.scheduler_log
 WHERE tenant_id = $1 AND job_id = $2 AND (hlc_physical, hlc_logical, hlc_node) <= ($3, $4, $5)
 ORDER BY seq
"""
_EVER = (2**63 - 1, 2**63 - 1, "~")
"""Above every HLC: node ids are made of a-z, 0-9 and -."""
_PLACE = f"SELECT seq, head_seq FROM ({PLACES}) AS place WHERE tenant_id = $1"


class JobParts(NamedTuple):
    """What there is of one job: its row's state, None where it has none, and the entries that are not followed yet."""

    tenant_id: str
    job_id: str
    state: str | None
    entries: str | None
    """JSON of at most ``UNFOLLOWED_MAX`` + 1."""

    def merged(self) -> JobState | None:
        """What the job is.

        Raises:
            ChainDamagedError: somebody edited the row or an entry; verification says where.
            UnfollowedError: too many entries are not followed yet; all entries of the job must be folded.
        """
        entries: list[Any] = orjson.loads(self.entries) if self.entries else []
        if len(entries) > UNFOLLOWED_MAX:
            raise UnfollowedError
        try:
            state = None if self.state is None else jobs.from_json(self.state)
            return jobs.folded(self.job_id, state, entries)
        except InvalidInputError as error:
            raise ChainDamagedError(self.tenant_id, f"a stored job state is none: {error}") from error


class UnfollowedError(Exception):
    """The follower is too far behind for its row to help."""


async def find_parts(connection: Connection, wanted: Sequence[JobKey]) -> list[JobParts]:
    """The parts of each (tenant, job id) that has any."""
    rows = await connection.fetch(_JOBS, [tenant_id for tenant_id, _ in wanted], [job_id for _, job_id in wanted])
    return [JobParts(*row) for row in rows]


async def merged(connection: Connection, parts: JobParts) -> JobState | None:
    """What the job is, as ``JobParts.merged``, whatever is not followed yet."""
    try:
        return parts.merged()
    except UnfollowedError:
        async with connection.transaction(isolation="repeatable_read", readonly=True):
            return await state_as_of(connection, parts.tenant_id, parts.job_id, _EVER)


async def state_as_of(
    connection: Connection, tenant_id: str, job_id: str, hlc: tuple[int, int, str]
) -> JobState | None:
    """What the entries of the job with an HLC up to ``hlc`` say together; needs an open transaction.

    Raises:
        ChainDamagedError: one of them is none.
    """
    state: JobState | None = None
    cursor = await connection.cursor(_PAST, tenant_id, job_id, *hlc)
    while rows := await cursor.fetch(PAST_ROWS):
        entries = [(*facts, orjson.loads(payload or "null")) for *facts, payload in rows]
        try:
            state = jobs.folded(job_id, state, entries)
        except InvalidInputError as error:
            raise ChainDamagedError(tenant_id, str(error)) from error
    return state


async def place(connection: Connection, tenant_id: str) -> Place | None:
    """How far the table is in the tenant's chain; None when there is no such tenant."""
    row = await connection.fetchrow(_PLACE, tenant_id)
    if row is None:
        return None
    if row["head_seq"] is None:
        raise ChainDamagedError(tenant_id, "its head stands nowhere")
    return Place(row["seq"] or 0, row["head_seq"], row["seq"] is None)


async def load_states(connection: Connection, wanted: Sequence[JobKey]) -> dict[JobKey, JobState]:
    """Stored state of each (tenant, job id) that has one which can be read.

    One that cannot was edited by somebody, and counts as none: the follower must go on, and verification names the job.
    """
    rows = await connection.fetch(
        """
        SELECT j.tenant_id, j.job_id, j.state
          FROM unnest($1::text[], $2::text[]) AS wanted(tenant_id, job_id)
          JOIN scheduler.jobs j USING (tenant_id, job_id)
        """,
        [tenant_id for tenant_id, _ in wanted],
        [job_id for _, job_id in wanted],
    )
    states: dict[JobKey, JobState] = {}
    for tenant_id, job_id, stored in rows:
        try:
            states[tenant_id, job_id] = jobs.from_json(stored)
        except InvalidInputError as error:
            log.error("job_state_malformed", tenant_id=tenant_id, job_id=job_id, error=str(error))
    return states


async def store(connection: Connection, rows: Sequence[tuple[object, ...]]) -> None:
    """Store rows of (tenant, ``*JOB_COLUMNS``), in the order of their jobs.

    Raises:
        ChainDamagedError: not all were stored; names a tenant. The transaction MUST be rolled back.
    """
    columns: Sequence[Sequence[object]] = list(zip(*rows, strict=True)) or [()] * (1 + len(JOB_COLUMNS))
    stored: Mapping[str, int] = dict(map(tuple, await connection.fetch(_STORE, *columns)))
    for tenant_id, count in Counter(str(row[0]) for row in rows).items():
        if stored.get(tenant_id, 0) != count:
            raise dropped(tenant_id, "job rows", count, stored.get(tenant_id, 0))


async def empty(connection: Connection, tenant_ids: Sequence[str]) -> None:
    """Remove the rows of these tenants, which are followed from their first entry on."""
    await connection.execute("DELETE FROM scheduler.jobs WHERE tenant_id = ANY($1::text[])", tenant_ids)
