"""SQL of the fields that jobs are searched by, and of the terms of each job.

A term is a hash of one field and one value. The follower of the job table keeps the terms of the jobs whose rows it
writes, in the same transaction; those of jobs that were there when their tenant declared fields it adds bit by bit, in
the order of their ids. Until that is done, ``built_to`` says how far it is, and nothing is searched by terms.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, NamedTuple

from app.store.rows import columns, fetch_as
from ledger.errors import ChainDamagedError

if TYPE_CHECKING:
    from app.store import Connection
    from app.store.job_table import JobKey

NARROW_MAX = 1000
"""Jobs of one term that are counted to find the term that has the fewest."""


class SearchFields(NamedTuple):
    """What one tenant declared; ``built_to`` is None once its terms are all there."""

    tenant_id: str
    fields: list[str]
    built_to: str | None
    declared_at: datetime


class JobTerm(NamedTuple):
    """One term of one job, and where that stands in lists."""

    tenant_id: str
    job_id: str
    term: int
    created_physical: int
    created_logical: int
    created_node: str


_DECLARED = f"SELECT {columns(SearchFields)} FROM scheduler.search_fields WHERE tenant_id = ANY($1::text[])"
_UNBUILT = "SELECT tenant_id FROM scheduler.search_fields WHERE built_to IS NOT NULL"
_DECLARE = """
INSERT INTO scheduler.search_fields AS f (tenant_id, fields, built_to) VALUES ($1, $2, '')
    ON CONFLICT (tenant_id) DO UPDATE SET fields = excluded.fields, built_to = '', declared_at = now()
     WHERE f.fields <> excluded.fields
"""
_ADVANCE = """
UPDATE scheduler.search_fields SET built_to = $4 WHERE tenant_id = $1 AND fields = $2 AND built_to = $3
"""
_NEXT_JOBS = """
SELECT job_id FROM scheduler.jobs WHERE tenant_id = $1 AND job_id > $2 ORDER BY job_id LIMIT $3
"""
_REMOVE = """
DELETE FROM scheduler.job_terms t USING unnest($1::text[], $2::text[]) AS job(tenant_id, job_id)
 WHERE t.tenant_id = job.tenant_id AND t.job_id = job.job_id
"""
_ADD = f"""
INSERT INTO scheduler.job_terms ({columns(JobTerm)})
SELECT * FROM unnest($1::text[], $2::text[], $3::bigint[], $4::bigint[], $5::bigint[], $6::text[])
"""
_EMPTY = "DELETE FROM scheduler.job_terms WHERE tenant_id = ANY($1::text[])"
_NARROWEST = """
SELECT term FROM unnest($2::bigint[]) AS wanted(term)
 CROSS JOIN LATERAL (
       SELECT count(*) AS jobs
         FROM (SELECT FROM scheduler.job_terms t
                WHERE t.tenant_id = $1 AND t.term = wanted.term LIMIT $3) AS few) AS counted
 ORDER BY jobs LIMIT 1
"""


async def declared(connection: Connection, tenant_ids: Collection[str]) -> dict[str, SearchFields]:
    """What these tenants declared, of those that did.

    Raises:
        ChainDamagedError: the row of one is none that declaring makes.
    """
    rows = await fetch_as(connection, SearchFields, _DECLARED, list(tenant_ids))
    for row in rows:
        if not isinstance(row.fields, list) or not all(isinstance(field, str) for field in row.fields):
            raise ChainDamagedError(row.tenant_id, f"its row in search_fields names {row.fields}, which are no fields")
    return {row.tenant_id: row for row in rows}


async def unbuilt(connection: Connection) -> list[str]:
    """Tenants whose terms are not all there."""
    return [row["tenant_id"] for row in await connection.fetch(_UNBUILT)]


async def declare(connection: Connection, tenant_id: str, fields: Sequence[str]) -> SearchFields:
    """Have the tenant's jobs searched by these fields, instead of those before; the same again changes nothing."""
    await connection.execute(_DECLARE, tenant_id, fields)
    return (await declared(connection, [tenant_id]))[tenant_id]


async def advance(connection: Connection, of: SearchFields, built_to: str | None) -> None:
    """The terms of more jobs are there; nothing changes if other fields were declared meanwhile."""
    await connection.execute(_ADVANCE, of.tenant_id, of.fields, of.built_to, built_to)


async def next_jobs(connection: Connection, tenant_id: str, after: str, limit: int) -> list[str]:
    """Ids of the tenant's jobs behind one, in their order."""
    return [row["job_id"] for row in await connection.fetch(_NEXT_JOBS, tenant_id, after, limit)]


async def store(connection: Connection, jobs: Sequence[JobKey], terms: Iterable[JobTerm]) -> None:
    """The terms of these jobs, instead of those before."""
    await connection.execute(_REMOVE, *map(list, zip(*jobs, strict=True)))
    if rows := list(terms):
        await connection.execute(_ADD, *map(list, zip(*rows, strict=True)))


async def empty(connection: Connection, tenant_ids: Sequence[str]) -> None:
    """Remove the terms of these tenants' jobs, which are followed from their first entry on."""
    await connection.execute(_EMPTY, tenant_ids)


async def narrowest(connection: Connection, tenant_id: str, terms: Sequence[int]) -> int | None:
    """That of these terms that fewest jobs have, as far as they are counted; None of none."""
    found: int | None = await connection.fetchval(_NARROWEST, tenant_id, terms, NARROW_MAX) if terms else None
    return found
