"""SQL of lists of jobs of which a filter asks more than their rows tell: candidates in the order of lists, so many at a
time, of which those remain whose entries contain what every job that is found contains.

What remains is found or not by the fold of its entries (``ledger.machines.job_search``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from app.store.job_table import EVER, JobClaim, claimed
from app.store.pages import page_of
from app.store.reads import OLDEST, ORDER, CreatedHlc, ListedRow, size_of_job
from ledger.machines.jobs import STATUSES

if TYPE_CHECKING:
    from app.store import Connection

_BELOW: Final = "(created_physical, created_logical, created_node) < ($2, $3, $4)"
_FROM: Final = "(created_physical, created_logical, created_node) >= ($6, $7, $8)"


class Candidates(NamedTuple):
    """Some of the jobs that were looked at, and how far that was."""

    jobs: list[ListedRow]
    looked_at: int
    last: CreatedHlc | None
    """Creation of the last job that was looked at, or of the last of ``jobs`` where more of them follow; None where no
    job is left."""


# Jobs of each of some statuses, as lists have them: an index has those of one status in order.
_IN_ORDER: Final = f"""
SELECT newest.*, created_physical AS physical, created_logical AS logical, created_node AS node, true AS is_wanted
  FROM unnest($9::text[]) AS listed(status)
 CROSS JOIN LATERAL (
       SELECT * FROM scheduler.jobs
        WHERE tenant_id = $1 AND status = listed.status{{of_actor}} AND {_BELOW} AND {_FROM}
        ORDER BY {ORDER} LIMIT $11) AS newest
 ORDER BY {ORDER} LIMIT $11
"""
# Jobs that have one term, of whichever status: those count as looked at that are not wanted.
_OF_TERM: Final = f"""
SELECT {claimed("j")}, j.tenant_id, newest.job_id,
       newest.created_physical AS physical, newest.created_logical AS logical, newest.created_node AS node,
       coalesce(j.status = ANY($9::text[]){{of_actor}}, false) AS is_wanted
  FROM (SELECT * FROM scheduler.job_terms
         WHERE tenant_id = $1 AND term = ${{term}} AND {_BELOW} AND {_FROM}
         ORDER BY {ORDER} LIMIT $11) AS newest
  LEFT JOIN scheduler.jobs j ON j.tenant_id = newest.tenant_id AND j.job_id = newest.job_id
"""


def _query(source: str) -> str:
    """The query for a part of the jobs of ``source``.

    Contained in an entry is what the text of its payload contains, in small letters; one that keeps another's event
    (CONFLICT) has that in another form, and may contain anything.
    """
    listed = f"""
SELECT j.*, size.bytes
  FROM candidates AS j
 CROSS JOIN LATERAL ({size_of_job("j")}) AS size
 WHERE j.is_wanted AND NOT EXISTS (
       SELECT FROM unnest($10::text[]) AS wanted(fragment)
        WHERE NOT EXISTS (
              SELECT FROM scheduler.scheduler_log l
               WHERE l.tenant_id = $1 AND l.job_id = j.job_id
                 AND (strpos(lower(l.payload::text COLLATE "C"), wanted.fragment) > 0 OR l.action = 'CONFLICT')))
"""
    return f"""
WITH candidates AS MATERIALIZED ({source}), edge AS (
     SELECT count(*) OVER () AS looked_at, physical, logical, node
       FROM candidates ORDER BY physical, logical, node LIMIT 1
)
SELECT edge.*, page.physical, page.logical, page.node, page.job_id, {claimed("page")}, found
  FROM edge
  LEFT JOIN {page_of(listed, "physical DESC, logical DESC, node DESC", limit="$5")} AS page ON true
 ORDER BY number
"""


_JOBS = _query(_IN_ORDER.format(of_actor=""))
_JOBS_OF_ACTOR = _query(_IN_ORDER.format(of_actor=" AND created_by = $12"))
_JOBS_OF_TERM = _query(_OF_TERM.format(of_actor="", term=12))
_JOBS_OF_ACTOR_AND_TERM = _query(_OF_TERM.format(of_actor=" AND j.created_by = $12", term=13))


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
) -> Candidates:
    """Jobs of a tenant, newest first, as ``reads.list_jobs`` has them, that may be found: of at most ``looked_at_max``
    jobs the first ``limit``. With a ``term`` these are the jobs that have it."""
    bounds = (*(below or EVER), limit, *(since or OLDEST))
    query = (_JOBS, _JOBS_OF_ACTOR) if term is None else (_JOBS_OF_TERM, _JOBS_OF_ACTOR_AND_TERM)
    by = tuple(each for each in (actor, term) if each is not None)
    rows = await connection.fetch(
        query[actor is not None], tenant_id, *bounds, statuses or STATUSES, fragments, looked_at_max, *by
    )
    if not rows:
        return Candidates([], 0, None)
    looked_at, *edge = rows[0][:4]
    found = [ListedRow(row[7], JobClaim._make(row[8:-1])) for row in rows if row[7] is not None]
    if found and rows[-1]["found"] > len(found):
        return Candidates(found, looked_at, tuple(rows[-1][4:7]))
    return Candidates(found, looked_at, (edge[0], edge[1], edge[2]) if looked_at == looked_at_max else None)
