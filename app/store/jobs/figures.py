"""SQL of the figures of jobs: how many jobs of a tenant have which status, by hour, data centre, error and field.

A *cell* of ``job_figures`` counts the jobs of one status whose hour is in one period, and keeps the classes of their
run times (``ledger.machines.job_figures``)::

    (dc, field, value)     of one data centre, '' of all; with one value of a field, '' and '' of all jobs
    (hours, hour)          of a period of so many hours, which begins at a multiple of them: 1, 24 or 768
    runs, run_jobs         classes of run times in order, and the jobs in each
    run_min_ms, run_max_ms the shortest and the longest run time, exactly

A job counts once in each cell that its figure names: in one period of each length, and in each of its data centres. So
cells of one length add up to all jobs, and any range of hours is covered by few cells (``covered``).

Of a field inside the spec at most ``VALUES_MAX`` values are counted by themselves in one of the longest periods: the
first by the order of creations in the log. A line of 0 hours *admits* a value, in the period that begins at ``hour``.
Jobs with values that were not admitted count in cells of the field ``other <field>``, a job once.

The cells are what the rows of the job table say together: ``app.store.jobs.table``, which writes and removes these,
moves the cells in the same transaction, by the figures and run times that the rows had and have. Counts are added and
subtracted. An extreme is not: where a job that had it leaves a cell, it is read from the rows whose run time is in the
cell's first or last class.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Final, NamedTuple

import asyncpg

from app.store.following import EMPTY_TIMEOUT_S
from app.store.reading import turned
from ledger.machines.job_figures import (
    BOUNDS_MS,
    FAILURES,
    HOUR_MAX,
    HOUR_MS,
    PERIODS_HOURS,
    VALUES_MAX,
    Extremes,
    Figure,
    counted_name,
    kept,
    read_figure,
    run_class,
)

if TYPE_CHECKING:
    from app.store import Connection

BY_STATUS: Final = "status"
BY_HOUR: Final = "hour"
BY_DAY: Final = "day"
BY_DC: Final = "dc"
ERROR: Final = "error"
"""The field of the errors of jobs that failed or timed out."""
_OTHER: Final = "other "
"""Before a field: of its values that are not counted by themselves."""
Counted = tuple[str, str, str | None, int | None]
"""Tenant, status, figure and run time of a job."""

_KEY: Final = "tenant_id, field, hours, hour, dc, value, status"
# Each cell is found by the primary key, whatever PostgreSQL expects of the parameters.
_MOVE: Final = f"""
INSERT INTO scheduler.job_figures AS f ({_KEY}, jobs, traced, runs, run_jobs, run_min_ms, run_max_ms)
SELECT {_KEY}, jobs, traced, runs::smallint[], run_jobs::integer[], run_min_ms, run_max_ms
  FROM unnest($1::text[], $2::text[], $3::integer[], $4::integer[], $5::text[], $6::text[], $7::text[], $8::bigint[],
              $9::bigint[], $10::text[], $11::text[], $12::bigint[], $13::bigint[])
       AS n({_KEY}, jobs, traced, runs, run_jobs, run_min_ms, run_max_ms)
    ON CONFLICT ({_KEY}) DO UPDATE
       SET jobs = f.jobs + excluded.jobs, traced = f.traced + excluded.traced,
           run_min_ms = least(f.run_min_ms, excluded.run_min_ms),
           run_max_ms = greatest(f.run_max_ms, excluded.run_max_ms),
           (runs, run_jobs) = (
           SELECT coalesce(array_agg(run ORDER BY run), '{{}}'), coalesce(array_agg(jobs ORDER BY run), '{{}}')
             FROM (SELECT run, sum(jobs)::integer AS jobs
                     FROM (SELECT * FROM unnest(f.runs, f.run_jobs)
                            UNION ALL SELECT * FROM unnest(excluded.runs, excluded.run_jobs)) AS each(run, jobs)
                    GROUP BY run HAVING sum(jobs) <> 0) AS of_class)
"""
_OF_CELL: Final = " AND ".join(f"f.{name} = n.{name}" for name in _KEY.split(", "))
_CLEAR: Final = f"""
DELETE FROM scheduler.job_figures f
 USING unnest($1::text[], $2::text[], $3::integer[], $4::integer[], $5::text[], $6::text[], $7::text[]) AS n({_KEY})
 WHERE {_OF_CELL} AND f.jobs = 0
"""
# Cells that lost an extreme, or all run times.
_LOST: Final = f"""
SELECT {", ".join(f"f.{name}" for name in _KEY.split(", "))}, f.traced, f.runs[1], f.runs[cardinality(f.runs)]
  FROM unnest($1::text[], $2::text[], $3::integer[], $4::integer[], $5::text[], $6::text[], $7::text[], $8::bigint[],
              $9::bigint[]) AS n({_KEY}, gone_min_ms, gone_max_ms)
  JOIN scheduler.job_figures f ON {_OF_CELL}
 WHERE f.runs = '{{}}' OR n.gone_min_ms <= f.run_min_ms OR n.gone_max_ms >= f.run_max_ms
"""
_RAN: Final = """
SELECT w.tenant_id, w.status, ran.*
  FROM unnest($1::text[], $2::text[], $3::bigint[], $4::bigint[], $5::bigint[], $6::bigint[])
       AS w(tenant_id, status, from_ms, below_ms, created_from_ms, created_below_ms)
 CROSS JOIN LATERAL (
       SELECT figure, min(run_ms), max(run_ms) FROM scheduler.jobs j
        WHERE j.tenant_id = w.tenant_id AND j.status = w.status AND {run} >= w.from_ms AND {run} < w.below_ms
          AND {created} >= w.created_from_ms AND {created} < w.created_below_ms
          AND j.run_ms IS NOT NULL AND j.figure IS NOT NULL
        GROUP BY figure OFFSET 0) AS ran
"""
_RAN_BY: Final = {
    True: _RAN.format(run="j.run_ms + 0", created="j.created_physical"),
    False: _RAN.format(run="j.run_ms", created="j.created_physical + 0"),
}
"""By whether the rows are found by their creation, which is in one hour, or by their run time: no index has a sum."""
_SET_EXTREMES: Final = f"""
UPDATE scheduler.job_figures f SET run_min_ms = n.run_min_ms, run_max_ms = n.run_max_ms
  FROM unnest($1::text[], $2::text[], $3::integer[], $4::integer[], $5::text[], $6::text[], $7::text[], $8::bigint[],
              $9::bigint[]) AS n({_KEY}, run_min_ms, run_max_ms)
 WHERE {_OF_CELL}
"""
_VALUES: Final = "unnest($1::text[], $2::text[], $3::integer[], $4::text[])"
_IS_ADMITTED: Final = """
f.tenant_id = n.tenant_id AND f.field = n.field AND f.hours = 0 AND f.hour = n.hour AND f.dc = '' AND f.value = n.value
AND f.status = ''
"""
_ADMIT: Final = f"""
WITH new AS (
    SELECT n.*, row_number() OVER (PARTITION BY tenant_id, field, hour ORDER BY number) AS place
      FROM {_VALUES} WITH ORDINALITY AS n(tenant_id, field, hour, value, number)
     WHERE (SELECT true FROM scheduler.job_figures f WHERE {_IS_ADMITTED}) IS NULL
), known AS (
    SELECT n.*, (SELECT count(*) FROM (SELECT FROM scheduler.job_figures f
                                        WHERE f.tenant_id = n.tenant_id AND f.field = n.field AND f.hours = 0
                                          AND f.hour = n.hour LIMIT {VALUES_MAX}) AS admitted) AS values
      FROM (SELECT DISTINCT tenant_id, field, hour FROM new) AS n
)
INSERT INTO scheduler.job_figures ({_KEY}, jobs, traced, runs, run_jobs)
SELECT tenant_id, field, 0, hour, '', value, '', 0, 0, '{{}}', '{{}}'
  FROM new JOIN known USING (tenant_id, field, hour) WHERE place + values <= {VALUES_MAX}
"""
# A subquery of one row, because EXISTS may be answered from a hash of the whole table.
_ADMITTED: Final = f"""
SELECT n.tenant_id, n.field, n.hour, n.value FROM {_VALUES} AS n(tenant_id, field, hour, value)
 WHERE (SELECT true FROM scheduler.job_figures f WHERE {_IS_ADMITTED})
"""
_FORGET: Final = f"""
DELETE FROM scheduler.job_figures m USING unnest($1::text[], $2::text[], $3::integer[]) AS n(tenant_id, field, hour)
 WHERE m.tenant_id = n.tenant_id AND m.field = n.field AND m.hours = 0 AND m.hour = n.hour
   AND NOT EXISTS (SELECT FROM scheduler.job_figures f
                    WHERE f.tenant_id = n.tenant_id AND f.field IN (n.field, '{_OTHER}' || n.field)
                      AND f.hours = {PERIODS_HOURS[-1]} AND f.hour = n.hour AND f.dc = '')
"""
# Hours are compared with the rows, longer periods with the hours. Extremes are lines of their own, as runs -1 and -2.
_DIFFERENCE: Final = f"""
WITH counted AS (
    SELECT tenant_id, status, figure::json AS parts, width_bucket(run_ms, $2::bigint[]) - 1 AS run, count(*) AS jobs,
           min(run_ms) AS min_ms, max(run_ms) AS max_ms
      FROM scheduler.jobs WHERE tenant_id = $1 AND figure IS NOT NULL GROUP BY tenant_id, status, figure, run
), expected AS (
    SELECT tenant_id, field, 1 AS hours, each.hour, dc, value, status, run, sum(jobs)::bigint AS jobs,
           sum(jobs * traced)::bigint AS traced, min(min_ms) AS min_ms, max(max_ms) AS max_ms
      FROM counted
     CROSS JOIN LATERAL (SELECT (parts ->> 0)::integer AS hour, (parts ->> 1)::integer AS traced) AS each
     CROSS JOIN LATERAL (SELECT '' UNION ALL SELECT json_array_elements_text(parts -> 2)) AS d(dc)
     CROSS JOIN LATERAL (SELECT '', ''
                          UNION ALL SELECT '{ERROR}', coalesce(parts ->> 3, '')
                                     WHERE status = ANY('{{{",".join(FAILURES)}}}')
                          UNION ALL (
                         SELECT DISTINCT CASE WHEN f.value IS NULL THEN '{_OTHER}' || n.field ELSE n.field END,
                                coalesce(f.value, '')
                           FROM (SELECT '' || $1, key, each.hour / {PERIODS_HOURS[-1]} * {PERIODS_HOURS[-1]},
                                        json_array_elements_text(value)
                                   FROM json_each(parts -> 4)) AS n(tenant_id, field, hour, value)
                           LEFT JOIN scheduler.job_figures f ON {_IS_ADMITTED})
                         ) AS f(field, value)
     GROUP BY tenant_id, field, each.hour, dc, value, status, run
), stored AS (
    SELECT {_KEY}, jobs, traced, runs, run_jobs, run_min_ms AS min_ms, run_max_ms AS max_ms
      FROM scheduler.job_figures WHERE tenant_id = $1 AND hours > 0
), longer AS (
    SELECT tenant_id, field, p.hours, hour / p.hours * p.hours AS hour, dc, value, status, jobs, traced, runs, run_jobs,
           min_ms, max_ms
      FROM stored JOIN unnest('{{{",".join(map(str, PERIODS_HOURS[1:]))}}}'::integer[]) AS p(hours) ON stored.hours = 1
), difference AS (
    SELECT {_KEY}, NULL::integer AS run, jobs, traced FROM expected
     UNION ALL SELECT {_KEY}, run, jobs, 0 FROM expected WHERE run IS NOT NULL
     UNION ALL SELECT {_KEY}, e.run, e.ms + 1, 0
                 FROM (SELECT {_KEY}, min(min_ms) AS min_ms, max(max_ms) AS max_ms
                         FROM (SELECT {_KEY}, min_ms, max_ms FROM expected
                                UNION ALL SELECT {_KEY}, min_ms, max_ms FROM longer) AS each GROUP BY {_KEY}) AS cell
                CROSS JOIN LATERAL (VALUES (-1, min_ms), (-2, max_ms)) AS e(run, ms) WHERE e.ms IS NOT NULL
     UNION ALL SELECT {_KEY}, NULL, jobs, traced FROM longer
     UNION ALL SELECT {_KEY}, kept.run, kept.jobs, 0
                 FROM longer CROSS JOIN unnest(runs, run_jobs) AS kept(run, jobs)
     UNION ALL SELECT {_KEY}, NULL, -jobs, -traced FROM stored
     UNION ALL SELECT {_KEY}, kept.run, -kept.jobs, 0
                 FROM stored CROSS JOIN unnest(runs, run_jobs) AS kept(run, jobs)
     UNION ALL SELECT {_KEY}, e.run, -e.ms - 1, 0
                 FROM stored CROSS JOIN LATERAL (VALUES (-1, min_ms), (-2, max_ms)) AS e(run, ms)
                WHERE e.ms IS NOT NULL
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
SELECT ({{name}})::text, status, jobs, traced, {{times}} {_CELLS}
 WHERE ({{name}})::text = ANY($7::text[])
"""
_TIMES: Final = "runs, run_jobs, run_min_ms, run_max_ms"
_WITHOUT_TIMES: Final = "'{}'::smallint[], '{}'::integer[], NULL, NULL"
TIMED_GROUPS_MAX: Final = 200
"""Most groups that are read with their run times, which are nearly all of what a group costs: some 0.1 ms each."""


# Each job has an entry, so that few more rows than $4 are read whose hour is in the period.
_ENTRIES: Final = """
SELECT coalesce(sum(entries), 0)::bigint FROM (
    SELECT cardinality(seqs) AS entries FROM scheduler.jobs
     WHERE tenant_id = $1 AND substring(figure FROM '^.([0-9]{1,9}),')::integer BETWEEN $2 AND $3 - 1
     LIMIT $4 + 1) AS counted
"""


async def move(connection: Connection, jobs: Mapping[Counted, int]) -> None:
    """Move the cells by so many jobs more, or fewer, which the rows of the job table have or had. The caller MUST hold
    the positions of the job table's follower in the chains of these tenants."""
    alike = _alike(jobs)
    admitted = await _admitted(connection, ((tenant_id, figure) for tenant_id, _, figure, _ in alike))
    changes = {key: change for key, change in _changes(alike, admitted).items() if change.is_any}
    if rows := [
        (*key, change.jobs, change.traced, _array(change.runs), _array(change.runs.values()), *change.come)
        for key, change in changes.items()
    ]:
        await connection.execute(_MOVE, *turned(rows, 13))
    if fewer := [key for key, change in changes.items() if change.jobs < 0]:
        await connection.execute(_CLEAR, *turned(fewer, 7))
        await _forget(connection, fewer)
    if gone := [(*key, *change.gone) for key, change in changes.items() if change.gone != _NO_TIMES]:
        await _correct_extremes(connection, await connection.fetch(_LOST, *turned(gone, 9)))


async def _correct_extremes(connection: Connection, lost: Iterable[asyncpg.Record]) -> None:
    """Set the extremes of cells of ``_LOST`` by the rows of the job table."""
    cells: dict[_Cell, Extremes] = {}
    ranges: dict[bool, set[tuple[str, str, int, int, int, int]]] = {True: set(), False: set()}
    for *key, traced, first, last in lost:
        cell: _Cell = (key[0], key[1], key[2], key[3], key[4], key[5], key[6])
        cells[cell] = _NO_TIMES
        # A job whose hour is that of a trace may have been created at any time.
        begin_ms = 0 if traced else key[3] * HOUR_MS
        end_ms = _EVER_MS if traced else begin_ms + key[2] * HOUR_MS
        ranges[not traced and key[2] == 1] |= {
            (key[0], key[6], BOUNDS_MS[run], BOUNDS_MS[run + 1], begin_ms, end_ms)
            for run in (first, last)
            if run is not None and 0 <= run < len(BOUNDS_MS) - 1
        }
    if not cells:
        return
    ran = [
        (tenant_id, status, figure, times)
        for is_by_creation, wanted in ranges.items()
        if wanted
        for tenant_id, status, text, *times in await connection.fetch(_RAN_BY[is_by_creation], *turned([*wanted], 6))
        if (figure := read_figure(text)) is not None
    ]
    admitted = await _admitted(connection, ((tenant_id, figure) for tenant_id, _, figure, _ in ran))
    for tenant_id, status, figure, times in ran:
        for cell in _cells(tenant_id, status, figure, admitted):
            if cell in cells:
                cells[cell] = cells[cell].joined(*times)
    await connection.execute(_SET_EXTREMES, *turned([(*cell, *found) for cell, found in cells.items()], 9))


_Value = tuple[str, str, int, str]
"""Tenant, field, begin of the longest period, and value."""


async def admit(connection: Connection, creations: Iterable[tuple[str, str]]) -> None:
    """Admit values of the fields of these creations, as far as there is room: tenant and figure of each, in the order
    of the log. The caller MUST hold the positions as for ``move``, and MUST come here before it counts the jobs."""
    figures = ((tenant_id, figure) for tenant_id, text in creations if (figure := read_figure(text)) is not None)
    if values := dict.fromkeys(value for tenant_id, figure in figures for value in _values(tenant_id, figure)):
        await connection.execute(_ADMIT, *turned([*values], 4))


async def _admitted(connection: Connection, figures: Iterable[tuple[str, Figure]]) -> Collection[_Value]:
    """The values of these figures that are counted by themselves."""
    values = {value for tenant_id, figure in figures for value in _values(tenant_id, figure)}
    return {*map(tuple, await connection.fetch(_ADMITTED, *turned([*values], 4)))} if values else ()


async def _forget(connection: Connection, cells: Iterable[_Cell]) -> None:
    """Of these cells, which may have been removed: where no job with a value is left in a period, none is admitted."""
    left = {
        (tenant_id, field.removeprefix(_OTHER), hour)
        for tenant_id, field, hours, hour, dc, _, _ in cells
        if hours == PERIODS_HOURS[-1] and not dc and field not in ("", ERROR)
    }
    if left:
        await connection.execute(_FORGET, *turned([*left], 3))


def _values(tenant_id: str, figure: Figure) -> Iterator[_Value]:
    period = figure.hour // PERIODS_HOURS[-1] * PERIODS_HOURS[-1]
    return ((tenant_id, name, period, value) for name, value in figure.values)


_Cell = tuple[str, str, int, int, str, str, str]
"""The values of ``_KEY``."""
_NO_TIMES: Final = Extremes()
_EVER_MS: Final = 2**63 - 1


@dataclass(slots=True)
class _Change:
    """So many jobs more in a cell."""

    jobs: int = 0
    traced: int = 0
    runs: Counter[int] = field(default_factory=Counter)
    """By class of run times."""
    come: Extremes = _NO_TIMES
    """The extremes of run times that the cell gets."""
    gone: Extremes = _NO_TIMES
    """Of those that leave it."""

    @classmethod
    def of(cls, traced: int, times: Mapping[int | None, int]) -> _Change:
        """Of jobs of one figure, by their run times."""
        jobs = sum(times.values())
        change = cls(jobs, jobs * traced)
        known = {run_ms: count for run_ms, count in times.items() if run_ms is not None and count}
        for run_ms, count in known.items():
            change.runs[run_class(run_ms)] += count
        change.come = _NO_TIMES.joined(*(run_ms for run_ms, count in known.items() if count > 0))
        change.gone = _NO_TIMES.joined(*(run_ms for run_ms, count in known.items() if count < 0))
        return change

    def add(self, other: _Change) -> None:
        self.jobs += other.jobs
        self.traced += other.traced
        for run, count in other.runs.items():
            self.runs[run] += count
            if not self.runs[run]:
                del self.runs[run]
        self.come = self.come.joined(*other.come)
        self.gone = self.gone.joined(*other.gone)

    @property
    def is_any(self) -> bool:
        """Whether it changes a cell."""
        return bool(self.jobs or self.traced or self.runs or self.gone != _NO_TIMES)


def _array(numbers: Iterable[int]) -> str:
    return f"{{{','.join(map(str, numbers))}}}"


_Alike = tuple[str, str, Figure, Mapping[int | None, int]]
"""Jobs of one tenant, status and figure: how many more, or fewer, of each run time."""


def _alike(jobs: Mapping[Counted, int]) -> Sequence[_Alike]:
    """The jobs that differ only in their run times. An edited text that is no figure counts nothing: a recount finds
    what it should have."""
    alike: defaultdict[tuple[str, str, str], Counter[int | None]] = defaultdict(Counter)
    for (tenant_id, status, text, run_ms), count in jobs.items():
        if count and text is not None:
            alike[tenant_id, status, text][run_ms] += count
    return [
        (tenant_id, status, figure, times)
        for (tenant_id, status, text), times in alike.items()
        if (figure := read_figure(text)) is not None
    ]


def _changes(alike: Iterable[_Alike], admitted: Collection[_Value]) -> dict[_Cell, _Change]:
    """The changes of all cells."""
    changes: defaultdict[_Cell, _Change] = defaultdict(_Change)
    for tenant_id, status, figure, times in alike:
        change = _Change.of(figure.traced, times)
        for cell in _cells(tenant_id, status, figure, admitted):
            changes[cell].add(change)
    return changes


def _cells(tenant_id: str, status: str, figure: Figure, admitted: Collection[_Value]) -> Iterator[_Cell]:
    """Each cell in which a job of this figure counts."""
    values = {("", ""): None} | {
        (value[1], value[3]) if value in admitted else (_OTHER + value[1], ""): None
        for value in _values(tenant_id, figure)
    }
    if status in FAILURES:
        values[ERROR, figure.error or ""] = None
    for hours in PERIODS_HOURS:
        for dc in ("", *figure.dcs):
            for name, value in values:
                yield tenant_id, name, hours, figure.hour // hours * hours, dc, value, status


async def empty(connection: Connection, tenant_ids: Sequence[str]) -> None:
    """Remove the figures of these tenants, which are followed from their first entry on."""
    await connection.execute(
        "DELETE FROM scheduler.job_figures WHERE tenant_id = ANY($1::text[])", tenant_ids, timeout=EMPTY_TIMEOUT_S
    )


async def difference(connection: Connection, tenant_id: str) -> str | None:
    """A cell that is not what the rows of the tenant's jobs say together, as text; None if all are. Reads all rows."""
    try:
        row = await connection.fetchrow(_DIFFERENCE, tenant_id, BOUNDS_MS, timeout=EMPTY_TIMEOUT_S)
    except asyncpg.DataError as error:
        return f"a row of the job table holds no figure: {error}"
    return None if row is None else ", ".join(f"{name} {value!r}" for name, value in row.items())


class Group(NamedTuple):
    """The jobs of one group."""

    statuses: Counter[str]
    """Jobs by status."""
    runs: Counter[int]
    """Ended jobs by the class of their run times."""
    extremes: Extremes
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
    are. More than ``TIMED_GROUPS_MAX`` groups have no run times."""
    return await _read(connection, wanted, limit, counted_name(wanted.by))


async def other(connection: Connection, wanted: Wanted) -> Group | None:
    """The jobs whose value of a field is not counted by itself; None if there are none."""
    groups, _ = await _read(connection, wanted, 1, _OTHER + counted_name(wanted.by))
    return groups.get("")


async def _read(connection: Connection, wanted: Wanted, limit: int, field: str) -> tuple[dict[str, Group], int]:
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
        "" if name != "f.value" else field,
        kept(wanted.dc),
        *turned(covered(wanted.first, wanted.below, lengths), 3),
    )
    found = await connection.fetch(_GROUPS.format(**form), *given, limit)
    groups = {each[0]: Group(Counter(), Counter(), _NO_TIMES, 0) for each in found}
    for group, status, jobs, traced, runs, run_jobs, *extremes in await connection.fetch(
        _READ.format(times=_TIMES if len(groups) <= TIMED_GROUPS_MAX else _WITHOUT_TIMES, **form), *given, [*groups]
    ):
        known = groups[group]
        known.statuses[status] += jobs
        known.runs.update(dict(zip(runs, run_jobs, strict=True)))
        groups[group] = known._replace(traced=known.traced + traced, extremes=known.extremes.joined(*extremes))
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
