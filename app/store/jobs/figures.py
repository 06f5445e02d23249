"""SQL of the figures of jobs: how many jobs of a tenant have which status, by hour, data centre, error and field.

A *cell* of ``job_figures`` counts the jobs of one status whose hour is in one period, and keeps the classes of their
run times (``ledger.machines.job_figures``)::

    (dc, field, value)     of one data centre, '' of all; with one value of a field, '' and '' of all jobs
    (hours, hour)          of a period of so many hours, which begins at a multiple of them: 1, 24 or 768
    runs, run_jobs         classes of run times in order, and the jobs in each

A job counts once in each cell that its figure names: in one period of each length, and in each of its data centres. So
cells of one length add up to all jobs, and any range of hours is covered by few cells (``covered``).

The cells are what the rows of the job table say together: ``app.store.jobs.table``, which writes and removes these,
moves the cells in the same transaction, by the figures that the rows had and have.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Final, NamedTuple

import asyncpg

from app.store.following import EMPTY_TIMEOUT_S
from app.store.reading import turned
from ledger.machines.job_figures import FAILURES, HOUR_MAX, PERIODS_HOURS, Parts, counted_name, kept, parts_of

if TYPE_CHECKING:
    from app.store import Connection

BY_STATUS: Final = "status"
BY_HOUR: Final = "hour"
BY_DAY: Final = "day"
BY_DC: Final = "dc"
ERROR: Final = "error"
"""The field of the errors of jobs that failed or timed out."""
Counted = tuple[str, str, str | None]
"""Tenant, status and figure of a job."""

_KEY: Final = "tenant_id, field, hours, hour, dc, value, status"
# Each cell is found by the primary key, whatever PostgreSQL expects of the parameters.
_MOVE: Final = f"""
INSERT INTO scheduler.job_figures AS f ({_KEY}, jobs, traced, runs, run_jobs)
SELECT {_KEY}, jobs, traced, runs::smallint[], run_jobs::integer[]
  FROM unnest($1::text[], $2::text[], $3::integer[], $4::integer[], $5::text[], $6::text[], $7::text[], $8::bigint[],
              $9::bigint[], $10::text[], $11::text[])
       AS n({_KEY}, jobs, traced, runs, run_jobs)
    ON CONFLICT ({_KEY}) DO UPDATE
       SET jobs = f.jobs + excluded.jobs, traced = f.traced + excluded.traced,
           (runs, run_jobs) = (
           SELECT coalesce(array_agg(run ORDER BY run), '{{}}'), coalesce(array_agg(jobs ORDER BY run), '{{}}')
             FROM (SELECT run, sum(jobs)::integer AS jobs
                     FROM (SELECT * FROM unnest(f.runs, f.run_jobs)
                            UNION ALL SELECT * FROM unnest(excluded.runs, excluded.run_jobs)) AS each(run, jobs)
                    GROUP BY run HAVING sum(jobs) <> 0) AS of_class)
"""
_CLEAR: Final = f"""
DELETE FROM scheduler.job_figures f
 USING unnest($1::text[], $2::text[], $3::integer[], $4::integer[], $5::text[], $6::text[], $7::text[]) AS n({_KEY})
 WHERE {" AND ".join(f"f.{name} = n.{name}" for name in _KEY.split(", "))} AND f.jobs = 0
"""
# Hours are compared with the rows, longer periods with the hours.
_DIFFERENCE: Final = f"""
WITH counted AS (
    SELECT tenant_id, status, figure::json AS parts, count(*) AS jobs FROM scheduler.jobs
     WHERE tenant_id = $1 AND figure IS NOT NULL GROUP BY tenant_id, status, figure
), expected AS (
    SELECT tenant_id, field, 1 AS hours, each.hour, dc, value, status, run, sum(jobs)::bigint AS jobs,
           sum(jobs * traced)::bigint AS traced
      FROM counted
     CROSS JOIN LATERAL (SELECT (parts ->> 0)::integer AS hour, (parts ->> 1)::integer AS traced,
                                (parts ->> 3)::smallint AS run) AS each
     CROSS JOIN LATERAL (SELECT '' UNION ALL SELECT json_array_elements_text(parts -> 2)) AS d(dc)
     CROSS JOIN LATERAL (SELECT '', ''
                          UNION ALL SELECT '{ERROR}', coalesce(parts ->> 4, '')
                                     WHERE status = ANY('{{{",".join(FAILURES)}}}')
                          UNION ALL SELECT key, json_array_elements_text(value) FROM json_each(parts -> 5)
                         ) AS f(field, value)
     GROUP BY tenant_id, field, each.hour, dc, value, status, run
), stored AS (
    SELECT {_KEY}, NULL::smallint AS run, jobs, traced FROM scheduler.job_figures WHERE tenant_id = $1
     UNION ALL
    SELECT {_KEY}, kept.run, kept.jobs, 0 FROM scheduler.job_figures
     CROSS JOIN unnest(runs, run_jobs) AS kept(run, jobs) WHERE tenant_id = $1
), difference AS (
    SELECT {_KEY}, NULL::smallint AS run, jobs, traced FROM expected
     UNION ALL SELECT {_KEY}, run, jobs, 0 FROM expected WHERE run IS NOT NULL
     UNION ALL SELECT tenant_id, field, p.hours, hour / p.hours * p.hours, dc, value, status, run, jobs, traced
                 FROM stored JOIN unnest('{{{",".join(map(str, PERIODS_HOURS[1:]))}}}'::integer[]) AS p(hours)
                   ON stored.hours = 1
     UNION ALL SELECT {_KEY}, run, -jobs, -traced FROM stored
)
SELECT {_KEY}, coalesce(sum(jobs) FILTER (WHERE run IS NULL), 0)::bigint AS lacking
  FROM difference GROUP BY {_KEY}, run HAVING sum(jobs) <> 0 OR sum(traced) <> 0 LIMIT 1
"""
# Cells of groups by ``name``. OFFSET 0 has each range found by the primary key, whatever PostgreSQL expects of the
# parameters.
_CELLS: Final = """
  FROM unnest($4::integer[], $5::integer[], $6::integer[]) AS p(hours, first, below)
 CROSS JOIN LATERAL (
       SELECT * FROM scheduler.job_figures f
        WHERE f.tenant_id = $1 AND f.field = $2 AND f.hours = p.hours AND f.hour >= p.first AND f.hour < p.below
          AND {of_dc} OFFSET 0) AS f
"""
_GROUPS: Final = f"""
SELECT ({{name}})::text, count(*) OVER () {_CELLS} GROUP BY {{name}} ORDER BY {{order}} LIMIT $7
"""
_READ: Final = f"""
SELECT ({{name}})::text, status, jobs, traced, runs, run_jobs {_CELLS} WHERE ({{name}})::text = ANY($7::text[])
"""


# Each job has an entry, so that few more rows than $4 are read whose hour is in the period.
_ENTRIES: Final = """
SELECT coalesce(sum(entries), 0)::bigint FROM (
    SELECT cardinality(seqs) AS entries FROM scheduler.jobs
     WHERE tenant_id = $1 AND substring(figure FROM '^.([0-9]{1,9}),')::integer BETWEEN $2 AND $3 - 1
     LIMIT $4 + 1) AS counted
"""


async def move(connection: Connection, jobs: Mapping[Counted, int]) -> None:
    """Move the cells by so many jobs more, or fewer, of each tenant, status and figure. The caller MUST hold the
    positions of the job table's follower in the chains of these tenants."""
    changes = {key: change for key, change in _changes(jobs).items() if change.jobs or change.traced or change.runs}
    if rows := [
        (*key, change.jobs, change.traced, _array(change.runs), _array(change.runs.values()))
        for key, change in changes.items()
    ]:
        await connection.execute(_MOVE, *turned(rows, 11))
    if fewer := [key for key, change in changes.items() if change.jobs < 0]:
        await connection.execute(_CLEAR, *turned(fewer, 7))


_Cell = tuple[str, str, int, int, str, str, str]
"""The values of ``_KEY``."""


@dataclass(slots=True)
class _Change:
    """So many jobs more in a cell, or of figures that differ only in their run times."""

    jobs: int = 0
    traced: int = 0
    runs: Counter[int] = field(default_factory=Counter)

    def add(self, jobs: int, traced: int, runs: Mapping[int, int]) -> None:
        self.jobs += jobs
        self.traced += traced
        for run, count in runs.items():
            self.runs[run] += count
            if not self.runs[run]:
                del self.runs[run]


def _array(numbers: Iterable[int]) -> str:
    return f"{{{','.join(map(str, numbers))}}}"


def _changes(jobs: Mapping[Counted, int]) -> dict[_Cell, _Change]:
    """The changes of all cells. An edited text that is no figure changes none: a recount finds what it should have."""
    alike: defaultdict[tuple[str, str, Parts], _Change] = defaultdict(_Change)
    for (tenant_id, status, figure), count in jobs.items():
        if count and figure is not None and (parts := parts_of(figure)) is not None:
            runs = {} if parts.run is None else {parts.run: count}
            alike[tenant_id, status, parts._replace(run=None)].add(count, count * parts.traced, runs)
    changes: defaultdict[_Cell, _Change] = defaultdict(_Change)
    for (tenant_id, status, parts), change in alike.items():
        for key in _cells(parts, status):
            changes[tenant_id, *key, status].add(change.jobs, change.traced, change.runs)
    return changes


def _cells(parts: Parts, status: str) -> Iterator[tuple[str, int, int, str, str]]:
    """Field, period, data centre and value of each cell in which a job of this figure counts."""
    values = [("", ""), *parts.values]
    if status in FAILURES:
        values.append((ERROR, parts.error or ""))
    for hours in PERIODS_HOURS:
        for dc in ("", *parts.dcs):
            for name, value in values:
                yield name, hours, parts.hour // hours * hours, dc, value


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
    """``status``, ``hour``, ``day``, ``dc``, ``error``, or a field by which the tenant is searched."""
    dc: str = ""
    first: int = 0
    below: int = HOUR_MAX + 1


async def read(connection: Connection, wanted: Wanted, limit: int) -> tuple[dict[str, Group], int]:
    """At most ``limit`` groups, the newest hours or days or those of most jobs, in this order; and how many there
    are."""
    name, lengths = {
        BY_STATUS: ("f.status", PERIODS_HOURS),
        BY_HOUR: ("f.hour", PERIODS_HOURS[:1]),
        BY_DAY: (f"f.hour / {PERIODS_HOURS[1]} * {PERIODS_HOURS[1]}", PERIODS_HOURS[:2]),
        BY_DC: ("f.dc", PERIODS_HOURS),
    }.get(wanted.by, ("f.value", PERIODS_HOURS))
    form = {
        "name": name,
        "of_dc": "f.dc <> '' AND $3 IN ('', f.dc)" if wanted.by == BY_DC else "f.dc = $3",
        "order": f"{name} DESC" if wanted.by in (BY_HOUR, BY_DAY) else f"sum(f.jobs) DESC, {name}",
    }
    given = (
        wanted.tenant_id,
        "" if name != "f.value" else counted_name(wanted.by),
        kept(wanted.dc),
        *turned(covered(wanted.first, wanted.below, lengths), 3),
    )
    found = await connection.fetch(_GROUPS.format(**form), *given, limit)
    groups = {each[0]: Group(Counter(), Counter(), 0) for each in found}
    for group, status, jobs, traced, runs, run_jobs in await connection.fetch(_READ.format(**form), *given, [*groups]):
        known = groups[group]
        known.statuses[status] += jobs
        known.runs.update(dict(zip(runs, run_jobs, strict=True)))
        groups[group] = known._replace(traced=known.traced + traced)
    return groups, found[0][1] if found else 0


async def entries(connection: Connection, wanted: Wanted, entries_max: int) -> int:
    """The number of entries that the jobs of these hours follow from; only a lower bound beyond ``entries_max``."""
    count: int = await connection.fetchval(_ENTRIES, wanted.tenant_id, wanted.first, wanted.below, entries_max)
    return count


def covered(first: int, below: int, lengths: Sequence[int] = PERIODS_HOURS) -> list[tuple[int, int, int]]:
    """Ranges of periods that together are the hours from ``first`` on below ``below``: (length, first, below) each."""
    ranges = []
    for hours, longer in pairwise(lengths):
        inner_first = min(-(-first // longer) * longer, below)
        inner_below = max(below // longer * longer, inner_first)
        ranges += [(hours, first, inner_first), (hours, inner_below, below)]
        first, below = inner_first, inner_below
    return [each for each in (*ranges, (lengths[-1], first, below)) if each[1] < each[2]]
