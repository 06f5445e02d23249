"""SQL of the job table, which a follower keeps: its rows, and what a job is.

A row is an index: it names the entries that count (``ledger.machines.job_state.seqs_of``), and what lists go by. What a
job is = the fold of the entries that its row names and of those beyond where the follower stands; all of one statement,
so the answer is that of the chain in that snapshot, however far the follower is behind. The index scheduler_log_job
finds the latter. A position beyond the end of the chain counts as none, and without a position no row counts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from app.store.chaining import dropped
from app.store.following import FollowedEntry, Place
from app.store.rows import json_in
from ledger.errors import ChainDamagedError, InvalidInputError
from ledger.machines import jobs
from ledger.machines.jobs import JobState
from ledger.verification import JOB_COLUMNS

if TYPE_CHECKING:
    from app.store import Connection

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
       (tenant_id, job_id, status, created_physical, created_logical, created_node, created_by, last_seq, seqs)
SELECT tenant_id, job_id, status, created_physical, created_logical, created_node, created_by, last_seq, seqs::bigint[]
  FROM unnest($1::text[], $2::text[], $3::text[], $4::bigint[], $5::bigint[], $6::text[], $7::text[],
              $8::bigint[], $9::text[])
       AS n(tenant_id, job_id, status, created_physical, created_logical, created_node, created_by, last_seq, seqs)
    ON CONFLICT (tenant_id, job_id) DO UPDATE
       SET status = excluded.status, created_physical = excluded.created_physical,
           created_logical = excluded.created_logical, created_node = excluded.created_node,
           created_by = excluded.created_by, last_seq = excluded.last_seq, seqs = excluded.seqs, updated_at = now()
    RETURNING j.tenant_id
)
SELECT tenant_id, count(*) FROM stored GROUP BY tenant_id
"""

PLACES = f"""
SELECT h.tenant_id, h.head_seq, CASE WHEN p.seq <= h.head_seq THEN p.seq END AS seq
  FROM scheduler.chain_heads h
  LEFT JOIN scheduler.follower_positions p ON p.follower = '{FOLLOWER}' AND p.tenant_id = h.tenant_id
"""


_ENTRY: Final = "json_build_array(l.seq, hlc_physical, hlc_logical, hlc_node, action, payload_digest, payload)"


def count_named(row: str) -> str:
    """How many entries ``row``, one of the job table, names; NULL where there is no row."""
    return f"CASE WHEN {row}.job_id IS NOT NULL THEN coalesce(cardinality({row}.seqs), 0) END"


def entries_named(row: str) -> str:
    """The query for the entries that ``row``, one of the job table, names: a JSON array, NULL of none."""
    return f"""
SELECT json_agg({_ENTRY} ORDER BY l.seq) AS entries FROM scheduler.scheduler_log l
 WHERE l.tenant_id = {row}.tenant_id AND l.seq = ANY({row}.seqs) AND l.job_id = {row}.job_id
"""


def jobs_query(wanted: str) -> str:
    """The query for the parts of the jobs of ``wanted``, a relation of tenant_id and job_id: ``JobParts``."""
    return f"""
SELECT w.tenant_id, w.job_id, {count_named("j")} AS named, followed.entries AS followed,
       unfollowed.entries AS unfollowed
  FROM {wanted} AS w(tenant_id, job_id)
  JOIN ({PLACES}) AS place USING (tenant_id)
  LEFT JOIN LATERAL (
       SELECT * FROM scheduler.jobs
        WHERE place.seq IS NOT NULL AND tenant_id = w.tenant_id AND job_id = w.job_id LIMIT 1
       ) AS j ON true
 CROSS JOIN LATERAL ({entries_named("j")}) AS followed
 CROSS JOIN LATERAL (
       SELECT json_agg({_ENTRY} ORDER BY l.seq) AS entries
         FROM (SELECT * FROM scheduler.scheduler_log l
                WHERE l.tenant_id = w.tenant_id AND l.job_id = w.job_id
                  AND l.seq > coalesce(place.seq, 0) AND l.seq <= place.head_seq
                ORDER BY l.seq LIMIT {UNFOLLOWED_MAX + 1}) AS l
       ) AS unfollowed
 WHERE j.job_id IS NOT NULL OR unfollowed.entries IS NOT NULL
"""


_JOBS = jobs_query("unnest((SELECT $1::text[]), (SELECT $2::text[]))")
# Jobs travel as two texts, a value a line: the driver would look at each by itself. Subqueries of one row: EXISTS may
# be answered from a hash of a whole table.
_WANTED = """
unnest(string_to_array($1, E'\\n'), string_to_array($2, E'\\n')) WITH ORDINALITY AS w(tenant_id, job_id, n)
"""
# As ``ledger.machines.refusals.refused_job_id``.
_REFUSED_ID = "'refused:' || encode(sha256(convert_to(w.job_id, 'UTF8')), 'hex')"
_ANY_MENTIONED = f"""
SELECT n FROM {_WANTED}
 WHERE coalesce(
           (SELECT true FROM scheduler.scheduler_log l
             WHERE l.tenant_id = w.tenant_id AND l.job_id IN (w.job_id, {_REFUSED_ID}) LIMIT 1),
           (SELECT true FROM scheduler.jobs j WHERE j.tenant_id = w.tenant_id AND j.job_id = w.job_id), false
       )
"""
_MENTIONED = f"""
SELECT n,
       coalesce(
           (SELECT true FROM scheduler.scheduler_log l
             WHERE l.tenant_id = w.tenant_id AND l.job_id = w.job_id LIMIT 1),
           (SELECT true FROM scheduler.jobs j WHERE j.tenant_id = w.tenant_id AND j.job_id = w.job_id), false
       ) AS has_parts,
       coalesce(
           (SELECT true FROM scheduler.scheduler_log l
             WHERE l.tenant_id = w.tenant_id AND l.job_id = {_REFUSED_ID} LIMIT 1), false
       ) AS has_refusals
  FROM {_WANTED}
"""
_PAST = """
SELECT seq, hlc_physical, hlc_logical, hlc_node, action, payload_digest, payload
  FROM scheduler.scheduler_log
 WHERE tenant_id = $1 AND job_id = $2 AND (hlc_physical, hlc_logical, hlc_node) <= ($3, $4, $5)
 ORDER BY seq
"""
_NAMED = f"""
SELECT l.tenant_id, {", ".join(f"l.{name}" for name in FollowedEntry._fields)}
  FROM unnest($1::text[], $2::text[]) AS wanted(tenant_id, job_id)
  JOIN scheduler.jobs j USING (tenant_id, job_id)
  JOIN scheduler.scheduler_log l ON l.tenant_id = j.tenant_id AND l.seq = ANY(j.seqs) AND l.job_id = j.job_id
 ORDER BY l.tenant_id
"""
EVER = (2**63 - 1, 2**63 - 1, "~")
"""Above every HLC: node ids are made of a-z, 0-9 and -."""
_PLACE = f"SELECT seq, head_seq FROM ({PLACES}) AS place WHERE tenant_id = $1"


class JobParts(NamedTuple):
    """What there is of one job: the entries that its row names, and those that are not followed yet."""

    tenant_id: str
    job_id: str
    named: int | None
    """How many entries the row names, 0 of one that names none; None where the job has no row."""
    followed: str | None
    """JSON of those of them that are there."""
    unfollowed: str | None
    """JSON of at most ``UNFOLLOWED_MAX`` + 1."""

    def merged(self) -> JobState | None:
        """What the job is.

        Raises:
            ChainDamagedError: somebody edited the row or an entry; verification says where.
            UnfollowedError: too many entries are not followed yet; all entries of the job must be folded.
        """
        unfollowed = self._entries_in(self.unfollowed)
        if len(unfollowed) > UNFOLLOWED_MAX:
            raise UnfollowedError
        followed = self._entries_in(self.followed)
        if self.named is not None and (not self.named or len(followed) != self.named):
            raise ChainDamagedError(self.tenant_id, f"entries that make job {self.job_id} are missing")
        try:
            return jobs.folded(self.job_id, None, [*followed, *unfollowed])
        except InvalidInputError as error:
            raise ChainDamagedError(self.tenant_id, f"an entry of job {self.job_id} is none: {error}") from error

    def _entries_in(self, text: str | None) -> list[Any]:
        entries: list[Any] | None = json_in(text or "[]")
        if entries is None:
            raise ChainDamagedError(self.tenant_id, f"a payload of job {self.job_id} cannot be read")
        return entries


class UnfollowedError(Exception):
    """The follower is too far behind for its row to help."""


async def mentioned(connection: Connection, wanted: Sequence[JobKey]) -> tuple[list[JobKey], list[JobKey]]:
    """Those of each (tenant, job id) that have any parts, and those of which PostgreSQL refused events. Of jobs that
    are to be created that is none nearly always, and learned at a tenth of what finding parts costs."""
    there = [wanted[number - 1] for (number,) in await connection.fetch(_ANY_MENTIONED, *_lines(wanted))]
    if not there:
        return [], []
    rows = await connection.fetch(_MENTIONED, *_lines(there))
    found = [(there[number - 1], has_parts, has_refusals) for number, has_parts, has_refusals in rows]
    return [job for job, has_parts, _ in found if has_parts], [job for job, _, has_refusals in found if has_refusals]


def _lines(wanted: Sequence[JobKey]) -> tuple[str, str]:
    """Tenants and job ids, a value a line; no name has several."""
    return "\n".join([tenant_id for tenant_id, _ in wanted]), "\n".join([job_id for _, job_id in wanted])


async def find_parts(connection: Connection, wanted: Sequence[JobKey]) -> list[JobParts]:
    """The parts of each (tenant, job id) that has any."""
    rows = await connection.fetch(_JOBS, [tenant_id for tenant_id, _ in wanted], [job_id for _, job_id in wanted])
    return [JobParts(*row) for row in rows]


async def merged(connection: Connection, parts: JobParts) -> JobState | None:
    """What the job is, as ``JobParts.merged``, whatever is not followed yet."""
    try:
        return parts.merged()
    except UnfollowedError:
        return await folded(connection, parts.tenant_id, parts.job_id)


async def folded(connection: Connection, tenant_id: str, job_id: str) -> JobState | None:
    """What all entries of the job say together, whatever the table has of it: somebody may have removed its row."""
    async with connection.transaction(isolation="repeatable_read", readonly=True):
        return await state_as_of(connection, tenant_id, job_id, EVER)


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
        entries = [(*facts, json_in(payload)) for *facts, payload in rows]
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


async def entries_of(connection: Connection, wanted: Sequence[JobKey]) -> dict[str, list[FollowedEntry]]:
    """The entries that the rows of each (tenant, job id) name, by tenant."""
    rows = await connection.fetch(_NAMED, [tenant_id for tenant_id, _ in wanted], [job_id for _, job_id in wanted])
    return {
        tenant_id: [FollowedEntry(*row[1:]) for row in of_tenant]
        for tenant_id, of_tenant in groupby(rows, itemgetter(0))
    }


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
