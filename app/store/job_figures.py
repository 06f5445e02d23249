"""SQL of the figures of jobs: how many jobs of a tenant have which status, by hour, data centre, error and field.

A *cell* of ``job_figures`` counts the jobs of one status whose hour is in one period, and keeps the classes of their
run times (``ledger.machines.job_figures``)::

    (dc, field, value)     of one data centre, '' of all; with one value of a field, '' and '' of all jobs
    (hours, hour)          of a period of so many hours, which begins at a multiple of them: 1, 24 or 768
    runs, run_jobs         classes of run times in order, and the jobs in each

A job counts once in each cell that its figure names: in one period of each length, and in each of its data centres. So
cells of one length add up to all jobs, and any range of hours is covered by few cells (``covered``).

The cells are what the rows of the job table say together: ``app.store.job_table``, which writes and removes these,
moves the cells in the same transaction, by the figures that the rows had and have.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Final, NamedTuple

import asyncpg

from app.store.following import EMPTY_TIMEOUT_S
from app.store.reading import turned
from ledger.machines.job_figures import FAILURES, HOUR_MAX, PERIODS_HOURS, kept

if TYPE_CHECKING:
    from app.store import Connection

BY_STATUS: Final = "status"
BY_HOUR: Final = "hour"
BY_DC: Final = "dc"
ERROR: Final = "error"
"""The field of the errors of jobs that failed or timed out."""
Counted = tuple[str, str, str | None]
"""Tenant, status and figure of a job."""

_KEY: Final = "tenant_id, field, hours, hour, dc, value, status"
# The cells of ``counted`` (tenant_id, status, figure, jobs), each with a class of run times or without.
_CELLS: Final = f"""
SELECT tenant_id, field, hours, each.hour / hours * hours AS hour, dc, value, status, run,
       sum(jobs)::bigint AS jobs, sum(jobs * traced)::bigint AS traced
  FROM (SELECT tenant_id, status, jobs, figure::json AS parts FROM counted WHERE figure IS NOT NULL) AS counted
 CROSS JOIN LATERAL (SELECT (parts ->> 0)::integer AS hour, (parts ->> 1)::integer AS traced,
                            (parts ->> 3)::smallint AS run) AS each
 CROSS JOIN LATERAL (SELECT '' UNION ALL SELECT json_array_elements_text(parts -> 2)) AS d(dc)
 CROSS JOIN LATERAL (SELECT '', ''
                      UNION ALL SELECT '{ERROR}', coalesce(parts ->> 4, '')
                                 WHERE status = ANY('{{{",".join(FAILURES)}}}')
                      UNION ALL SELECT key, json_array_elements_text(value) FROM json_each(parts -> 5)
                     ) AS f(field, value)
 CROSS JOIN unnest('{{{",".join(map(str, PERIODS_HOURS))}}}'::integer[]) AS p(hours)
 GROUP BY tenant_id, field, hours, each.hour / hours * hours, dc, value, status, run
"""
_MOVE: Final = f"""
WITH counted AS (
    SELECT * FROM unnest($1::text[], $2::text[], $3::text[], $4::bigint[]) AS c(tenant_id, status, figure, jobs)
), change AS MATERIALIZED ({_CELLS}), moved AS (
    SELECT {_KEY}, sum(jobs) AS jobs, sum(traced) AS traced FROM change GROUP BY {_KEY}
), run_times AS (
    SELECT {_KEY}, array_agg(run ORDER BY run) AS runs, array_agg(jobs ORDER BY run) AS run_jobs
      FROM (SELECT {_KEY}, run, sum(jobs)::integer AS jobs
              FROM (SELECT {_KEY}, run, jobs FROM change WHERE run IS NOT NULL
                     UNION ALL
                    SELECT {_KEY}, kept.run, kept.jobs
                      FROM moved JOIN scheduler.job_figures f USING ({_KEY})
                     CROSS JOIN unnest(f.runs, f.run_jobs) AS kept(run, jobs)) AS each
             GROUP BY {_KEY}, run HAVING sum(jobs) <> 0) AS of_class
     GROUP BY {_KEY}
)
MERGE INTO scheduler.job_figures AS f
USING (SELECT * FROM moved LEFT JOIN run_times USING ({_KEY})) AS n
   ON (f.tenant_id, f.field, f.hours, f.hour, f.dc, f.value, f.status)
    = (n.tenant_id, n.field, n.hours, n.hour, n.dc, n.value, n.status)
 WHEN MATCHED AND f.jobs + n.jobs = 0 THEN DELETE
 WHEN MATCHED THEN UPDATE SET jobs = f.jobs + n.jobs, traced = f.traced + n.traced,
                              runs = coalesce(n.runs, '{{}}'), run_jobs = coalesce(n.run_jobs, '{{}}')
 WHEN NOT MATCHED AND n.jobs <> 0 THEN
      INSERT ({_KEY}, jobs, traced, runs, run_jobs)
      VALUES (n.tenant_id, n.field, n.hours, n.hour, n.dc, n.value, n.status, n.jobs, n.traced,
              coalesce(n.runs, '{{}}'), coalesce(n.run_jobs, '{{}}'))
"""
_DIFFERENCE: Final = f"""
WITH counted AS (
    SELECT tenant_id, status, figure, count(*) AS jobs FROM scheduler.jobs WHERE tenant_id = $1
     GROUP BY tenant_id, status, figure
), expected AS (
    SELECT {_KEY}, run, jobs, traced FROM ({_CELLS}) AS cells
), stored AS (
    SELECT {_KEY}, jobs, traced, runs, run_jobs FROM scheduler.job_figures WHERE tenant_id = $1
), difference AS (
    SELECT {_KEY}, NULL::smallint AS run, jobs, traced FROM expected
     UNION ALL SELECT {_KEY}, run, jobs, 0 FROM expected WHERE run IS NOT NULL
     UNION ALL SELECT {_KEY}, NULL, -jobs, -traced FROM stored
     UNION ALL SELECT {_KEY}, kept.run, -kept.jobs, 0 FROM stored CROSS JOIN unnest(runs, run_jobs) AS kept(run, jobs)
)
SELECT {_KEY}, coalesce(sum(jobs) FILTER (WHERE run IS NULL), 0)::bigint AS lacking
  FROM difference GROUP BY {_KEY}, run HAVING sum(jobs) <> 0 OR sum(traced) <> 0 LIMIT 1
"""
# Groups of jobs by ``name``: the first so many of them, and how many there are.
_READ: Final = """
WITH cell AS (
    SELECT {name} AS name, status, jobs, traced, runs, run_jobs
      FROM unnest($4::integer[], $5::integer[], $6::integer[]) AS p(hours, first, below)
      JOIN scheduler.job_figures f
        ON f.tenant_id = $1 AND f.field = $2 AND f.hours = p.hours AND f.hour >= p.first AND f.hour < p.below
     WHERE {of_dc}
), wanted AS (
    SELECT name, count(*) OVER () AS found FROM cell GROUP BY name ORDER BY {order} LIMIT $7
)
SELECT name, status, jobs, traced, runs, run_jobs, found FROM wanted JOIN cell USING (name)
"""


async def move(connection: Connection, jobs: Mapping[Counted, int]) -> None:
    """Move the cells by so many jobs more, or fewer, of each tenant, status and figure. The caller MUST hold the
    positions of the job table's follower in the chains of these tenants."""
    if moved := [(*counted, count) for counted, count in jobs.items() if count and counted[-1] is not None]:
        await connection.execute(_MOVE, *turned(moved, 4))


async def empty(connection: Connection, tenant_ids: Sequence[str]) -> None:
    """Remove the figures of these tenants, which are followed from their first entry on."""
    await connection.execute(
        "DELETE FROM scheduler.job_figures WHERE tenant_id = ANY($1::text[])", tenant_ids, timeout=EMPTY_TIMEOUT_S
    )


async def difference(connection: Connection, tenant_id: str) -> str | None:
    """A cell that is not what the rows of the tenant's jobs say together, as text; None if all are. Reads all rows."""
    try:
        row = await connection.fetchrow(_DIFFERENCE, tenant_id, timeout=EMPTY_TIMEOUT_S)
    except asyncpg.DataError as error:
        return f"a row of the job table holds no figure: {error}"
    return None if row is None else ", ".join(f"{name} {value!r}" for name, value in row.items())


class Group(NamedTuple):
    """The jobs of one group."""

    statuses: Counter[str]
    """Jobs by status."""
    runs: Counter[int]
    """Ended jobs by the class of their run times."""
    traced: int
    """Jobs whose hour is that of a trace."""


class Wanted(NamedTuple):
    """What is counted: jobs of one data centre, '' of all, whose hour is at least ``first`` and below ``below``."""

    tenant_id: str
    by: str
    """``status``, ``hour``, ``dc``, ``error``, or a field by which the tenant is searched."""
    dc: str = ""
    first: int = 0
    below: int = HOUR_MAX + 1


async def read(connection: Connection, wanted: Wanted, limit: int) -> tuple[dict[str, Group], int]:
    """At most ``limit`` groups, the newest hours or those of most jobs, in this order; and how many there are."""
    name = {BY_STATUS: "status", BY_HOUR: "f.hour", BY_DC: "f.dc"}.get(wanted.by, "value")
    rows = await connection.fetch(
        _READ.format(
            name=name,
            of_dc="f.dc <> '' AND $3 IN ('', f.dc)" if wanted.by == BY_DC else "f.dc = $3",
            order="name DESC" if wanted.by == BY_HOUR else "sum(jobs) DESC, name",
        ),
        wanted.tenant_id,
        "" if name != "value" else kept(wanted.by),
        kept(wanted.dc),
        *turned(covered(wanted.first, wanted.below, PERIODS_HOURS[:1] if wanted.by == BY_HOUR else PERIODS_HOURS), 3),
        limit,
    )
    groups: dict[str, Group] = {}
    for group, status, jobs, traced, runs, run_jobs, _ in rows:
        known = groups.get(str(group)) or Group(Counter(), Counter(), 0)
        known.statuses[status] += jobs
        for run, count in zip(runs, run_jobs, strict=True):
            known.runs[run] += count
        groups[str(group)] = known._replace(traced=known.traced + traced)
    return groups, rows[0]["found"] if rows else 0


def covered(first: int, below: int, lengths: Sequence[int] = PERIODS_HOURS) -> list[tuple[int, int, int]]:
    """Ranges of periods that together are the hours from ``first`` on below ``below``: (length, first, below) each."""
    ranges = []
    for hours, longer in pairwise(lengths):
        inner_first = min(-(-first // longer) * longer, below)
        inner_below = max(below // longer * longer, inner_first)
        ranges += [(hours, first, inner_first), (hours, inner_below, below)]
        first, below = inner_first, inner_below
    return [each for each in (*ranges, (lengths[-1], first, below)) if each[1] < each[2]]
