"""SQL of searches for jobs: candidates for a filter that the job table cannot answer, and the terms of declared
fields.

*Candidates* come in list order, a bounded number at a time. A candidate is a job whose entries contain the text that
every match contains; the fold of its entries decides whether it matches (``ledger.machines.job_search``).

*A term* is a hash of one field and one value. The follower of the job table keeps the terms of the jobs whose rows it
writes, in the same transaction. The terms of jobs that existed before their tenant declared fields are added in steps,
in the order of their ids. ``built_to`` is the position of that work; no search uses terms before its end.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

from app.store.following import EMPTY_TIMEOUT_S
from app.store.jobs.table import EVER, ListedRow, stored
from app.store.reading import columns, fetch_as, fetch_column, fetch_value, page_of
from app.store.reads import OLDEST, ORDER, CreatedHlc, size_of_job
from ledger.errors import ChainDamagedError, InvalidInputError, refuse
from ledger.facts.statuses import STATUSES
from ledger.verification.projection_check import StoredJob

if TYPE_CHECKING:
    from app.store import Connection
    from app.store.jobs.table import JobKey

_BELOW: Final = "(created_physical, created_logical, created_node) < ($2, $3, $4)"
_FROM: Final = "(created_physical, created_logical, created_node) >= ($6, $7, $8)"


class Candidates(NamedTuple):
    """Some of the jobs that were read, and the position of the read."""

    jobs: list[ListedRow]
    looked_at: int
    last: CreatedHlc | None
    """Creation of the last job that was scanned, or of the last of ``jobs`` if more follow; None if no job is left."""


# Jobs of some statuses in list order: an index has the jobs of one status in order.
_IN_ORDER: Final = f"""
SELECT newest.*, created_physical AS physical, created_logical AS logical, created_node AS node, true AS is_wanted
  FROM unnest($9::text[]) AS listed(status)
 CROSS JOIN LATERAL (
       SELECT * FROM scheduler.jobs
        WHERE tenant_id = $1 AND status = listed.status{{of_actor}} AND {_BELOW} AND {_FROM}
        ORDER BY {ORDER} LIMIT $11) AS newest
 ORDER BY {ORDER} LIMIT $11
"""
# Jobs with one term, of any status: unwanted ones count as scanned.
_OF_TERM: Final = f"""
SELECT {stored("j")}, j.tenant_id, newest.job_id,
       newest.created_physical AS physical, newest.created_logical AS logical, newest.created_node AS node,
       coalesce(j.status = ANY($9::text[]){{of_actor}}, false) AS is_wanted
  FROM (SELECT * FROM scheduler.job_terms
         WHERE tenant_id = $1 AND term = ${{term}} AND {_BELOW} AND {_FROM}
         ORDER BY {ORDER} LIMIT $11) AS newest
  LEFT JOIN scheduler.jobs j ON j.tenant_id = newest.tenant_id AND j.job_id = newest.job_id
"""


# A CONFLICT entry may hold a creation.
_CREATED_TWICE: Final = """
   AND (SELECT count(*) FROM (SELECT FROM scheduler.scheduler_log c
                               WHERE c.tenant_id = $1 AND c.job_id = j.job_id AND c.action IN ('ENQUEUE', 'CONFLICT')
                               LIMIT 2) AS creations) = 2
"""


def _query(source: str, condition: str = "") -> str:
    """The query for a part of the jobs of ``source`` of which ``condition`` holds.

    An entry contains a text if its payload does, in lower case; the id of a job counts as an entry. A CONFLICT entry
    holds another event in another form, so it may contain any text.
    """
    listed = f"""
SELECT j.*, size.bytes
  FROM candidates AS j
 CROSS JOIN LATERAL ({size_of_job("j")}) AS size
 WHERE j.is_wanted AND NOT EXISTS (
       SELECT FROM unnest($10::text[]) AS wanted(fragment)
        WHERE strpos(lower(j.job_id COLLATE "C"), wanted.fragment) = 0 AND NOT EXISTS (
              SELECT FROM scheduler.scheduler_log l
               WHERE l.tenant_id = $1 AND l.job_id = j.job_id
                 AND (strpos(lower(l.payload::text COLLATE "C"), wanted.fragment) > 0 OR l.action = 'CONFLICT')))
{condition}
"""
    return f"""
WITH candidates AS MATERIALIZED ({source}), edge AS (
     SELECT count(*) OVER () AS looked_at, physical, logical, node
       FROM candidates ORDER BY physical, logical, node LIMIT 1
)
SELECT edge.*, page.physical, page.logical, page.node, page.job_id, {stored("page")}, found
  FROM edge
  LEFT JOIN {page_of(listed, "physical DESC, logical DESC, node DESC", limit="$5")} AS page ON true
 ORDER BY number
"""


_SOURCES: Final = {
    (False, False): _IN_ORDER.format(of_actor=""),
    (True, False): _IN_ORDER.format(of_actor=" AND created_by = $12"),
    (False, True): _OF_TERM.format(of_actor="", term=12),
    (True, True): _OF_TERM.format(of_actor=" AND j.created_by = $12", term=13),
}
_QUERIES: Final = {
    (*wanted, in_conflict): _query(source, _CREATED_TWICE if in_conflict else "")
    for wanted, source in _SOURCES.items()
    for in_conflict in (False, True)
}
"""By whether the jobs of an actor are wanted, those with a term, and those in conflict."""


async def candidates(
    connection: Connection,
    tenant_id: str,
    statuses: Sequence[str],
    actor: str | None,
    fragments: Sequence[str],
    term: int | None,
    since: CreatedHlc | None,
    below: CreatedHlc | None,
    limit: int,
    looked_at_max: int,
    *,
    in_conflict: bool = False,
) -> Candidates:
    """Candidates among the jobs of a tenant, newest first as in ``reads.list_jobs``: the first ``limit`` of at most
    ``looked_at_max`` scanned jobs. With a ``term``, only jobs that have it; ``in_conflict``, only jobs that may be."""
    rows = await connection.fetch(
        _QUERIES[actor is not None, term is not None, in_conflict],
        tenant_id,
        *(below or EVER),
        limit,
        *(since or OLDEST),
        statuses or STATUSES,
        fragments,
        looked_at_max,
        *(each for each in (actor, term) if each is not None),
    )
    if not rows:
        return Candidates([], 0, None)
    looked_at, *edge = rows[0][:4]
    found = [ListedRow(row[7], StoredJob(*row[7:-1])) for row in rows if row[7] is not None]
    if found and rows[-1]["found"] > len(found):
        return Candidates(found, looked_at, tuple(rows[-1][4:7]))
    return Candidates(found, looked_at, (edge[0], edge[1], edge[2]) if looked_at == looked_at_max else None)


NARROW_MAX = 1000
"""Most jobs of one term that are counted to find the rarest term."""


class SearchFields(NamedTuple):
    """The declaration of one tenant; ``built_to`` is None once its terms are complete."""

    tenant_id: str
    fields: list[str]
    built_to: str | None
    declared_at: datetime


JobTerm = tuple[str, str, int, int, int, str]
"""(tenant, job, term, physical, logical, node): one term of one job, and the job's place in lists."""


async def declared(connection: Connection, tenant_ids: Collection[str]) -> dict[str, SearchFields]:
    """The declarations of these tenants, as far as they made one.

    Raises:
        ChainDamagedError: a row cannot come from a declaration.
    """
    rows = await fetch_as(
        connection,
        SearchFields,
        f"SELECT {columns(SearchFields)} FROM scheduler.search_fields WHERE tenant_id = ANY($1::text[])",
        list(tenant_ids),
    )
    for row in rows:
        if not isinstance(row.fields, list) or not all(isinstance(field, str) for field in row.fields):
            raise ChainDamagedError(row.tenant_id, f"its row in search_fields names {row.fields}, which are no fields")
    return {row.tenant_id: row for row in rows}


async def require_built(connection: Connection, tenant_id: str, field: str) -> None:
    """Return if all jobs of the tenant are indexed by this field.

    Raises:
        InvalidInputError: they are not.
    """
    fields = (await declared(connection, [tenant_id])).get(tenant_id)
    path = f"/v1/tenants/{tenant_id}/search"
    refuse(
        partial(InvalidInputError, path=("by",)),
        (
            fields is None or field not in fields.fields,
            f"by: jobs are counted by declared fields alone, and {field[:100]!r} is none: PUT {path} declares fields",
        ),
        (
            fields is not None and fields.built_to is not None,
            f"by: jobs older than the declaration of {field[:100]!r} are still being counted: ask again once "
            f"GET {path} answers is_built true",
        ),
    )


async def unbuilt(connection: Connection) -> list[str]:
    """Tenants whose terms are not complete."""
    return await fetch_column(connection, "SELECT tenant_id FROM scheduler.search_fields WHERE built_to IS NOT NULL")


async def declare(connection: Connection, tenant_id: str, fields: Sequence[str]) -> SearchFields:
    """Replace the tenant's search fields; the same fields again change nothing."""
    await connection.execute(
        """
        INSERT INTO scheduler.search_fields AS f (tenant_id, fields, built_to) VALUES ($1, $2, '')
            ON CONFLICT (tenant_id) DO UPDATE SET fields = excluded.fields, built_to = '', declared_at = now()
             WHERE f.fields <> excluded.fields
        """,
        tenant_id,
        fields,
    )
    return (await declared(connection, [tenant_id]))[tenant_id]


async def advance_terms(connection: Connection, of: SearchFields, built_to: str | None) -> None:
    """Record that the terms of more jobs are stored; has no effect if other fields were declared meanwhile."""
    await connection.execute(
        """
        UPDATE scheduler.search_fields SET built_to = $4 WHERE tenant_id = $1 AND fields = $2 AND built_to = $3
        """,
        of.tenant_id,
        of.fields,
        of.built_to,
        built_to,
    )


async def next_jobs(connection: Connection, tenant_id: str, after: str, limit: int) -> list[str]:
    """Ids of the tenant's jobs after ``after``, in order."""
    return await fetch_column(
        connection,
        """
        SELECT job_id FROM scheduler.jobs WHERE tenant_id = $1 AND job_id > $2 ORDER BY job_id LIMIT $3
        """,
        tenant_id,
        after,
        limit,
    )


async def store_terms(connection: Connection, jobs: Sequence[JobKey], terms: Iterable[JobTerm]) -> None:
    """Replace the terms of these jobs."""
    await connection.execute(
        """
        DELETE FROM scheduler.job_terms t USING unnest($1::text[], $2::text[]) AS job(tenant_id, job_id)
         WHERE t.tenant_id = job.tenant_id AND t.job_id = job.job_id
        """,
        *map(list, zip(*jobs, strict=True)),
    )
    if rows := list(terms):
        await connection.execute(
            """
            INSERT INTO scheduler.job_terms
                   (tenant_id, job_id, term, created_physical, created_logical, created_node)
            SELECT * FROM unnest($1::text[], $2::text[], $3::bigint[], $4::bigint[], $5::bigint[], $6::text[])
            """,
            *map(list, zip(*rows, strict=True)),
        )


async def empty_terms(connection: Connection, tenant_ids: Sequence[str]) -> None:
    """Remove the terms of these tenants' jobs, which are followed from their first entry on."""
    await connection.execute(
        "DELETE FROM scheduler.job_terms WHERE tenant_id = ANY($1::text[])", tenant_ids, timeout=EMPTY_TIMEOUT_S
    )


async def narrowest(connection: Connection, tenant_id: str, terms: Sequence[int]) -> int | None:
    """The rarest of these terms, as far as their jobs are counted; None without terms."""
    return (
        await fetch_value(
            connection,
            int,
            """
            SELECT term FROM unnest($2::bigint[]) AS wanted(term)
             CROSS JOIN LATERAL (
                   SELECT count(*) AS jobs
                     FROM (SELECT FROM scheduler.job_terms t
                            WHERE t.tenant_id = $1 AND t.term = wanted.term LIMIT $3) AS few) AS counted
             ORDER BY jobs LIMIT 1
            """,
            tenant_id,
            terms,
            NARROW_MAX,
        )
        if terms
        else None
    )
