"""Making a report: the steps from entries to files, in order.

1. Fold the entries, read once and kept for step 4, into one row a job; what was read is counted on the way.
2. Choose clock and period from what there is and what was asked for.
3. Write the jobs, then from them the tables of counts and the lists.
4. Write who did what, out of the entries and those of ``_system``.
5. From what was written make CSV files, headline numbers and page, and move all into place.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from pyspark import StorageLevel

from ledger.errors import InvalidInputError
from pipeline.report import access, headline, jobs, lists, running, summaries
from pipeline.report import folder as files
from pipeline.report.jobs import fold
from pipeline.report.page.build import write_page
from pipeline.report.period import Asked, Clock, Period, choose_clock, choose_period
from pipeline.report.said import said

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

LISTS = ("longest", "stuck", "cancelled", "cancellers", "reasons")
TABLES = (*(name for name in summaries.TABLES), "open", *LISTS, *access.TABLES, "ledger")


class Made(NamedTuple):
    """What a report says it was made from, and by what; all of it is shown."""

    place: str
    tenants: list[str]
    """Those asked for; empty for all."""
    log_origins: list[str]
    version: str
    made_at: datetime
    command: str
    verify_command: str
    by: Sequence[str] = ()
    """Fields of the spec, such as ``spec.image``, by whose values jobs are counted."""
    console: str | None = None
    """Base URL of the service whose console links of jobs lead to."""


def make(
    entries: DataFrame,
    asked: Asked,
    stuck_after_ms: int | None,
    made: Made,
    dest: Path,
    stats: DataFrame | None = None,
    system: DataFrame | None = None,
) -> dict[str, Any]:
    """Write the report on ``entries`` to the folder ``dest``; returns its headline numbers, those of report.json.

    ``system`` are the entries of ``_system``, None where they are not known.
    ``stats`` are windows of ``pipeline.stats.read``, of which those in the period are added.

    Raises:
        InvalidInputError: there is no job event to report on, or the windows are too many.
        ConfigurationError: ``dest`` holds something else.
    """
    with files.replaced(dest) as fresh:
        known = jobs.before_end(said(entries, made.by), asked.clock, asked.end_ms).persist(StorageLevel.DISK_ONLY)
        folded = fold(known).persist(StorageLevel.DISK_ONLY)
        try:
            overall = jobs.overall(folded).first()
            assert overall is not None
            facts = overall.asDict()
            period = _period(asked, facts, round(made.made_at.timestamp() * 1000))
            files.write_table(jobs.by_tenant(folded), fresh, "ledger")
            timed = jobs.on_clock(folded, period.clock).persist(StorageLevel.DISK_ONLY)
            numbers = _write_tables(timed, period, stuck_after_ms, fresh)
            if made.by:
                files.write_table(summaries.by_label(timed, period, made.by), fresh, "labels")
            last = None if asked.start_ms is None else summaries.before(timed, period).first()
            who = access.write(known, timed, system, made.tenants, asked, period, fresh)
            timed.unpersist()
            if stats is not None:
                running.write(stats, made.tenants, period, fresh)
        finally:
            folded.unpersist()
            known.unpersist()
        for name in (*TABLES, *(["labels"] if made.by else ()), *(running.TABLES if stats is not None else ())):
            files.write_csv(fresh, name)
        report = headline.report(period, made, facts, numbers, who, None if last is None else last.asDict(), fresh)
        headline.write(report, fresh)
        write_page(report, fresh)
    return report


def _period(asked: Asked, facts: dict[str, Any], now_ms: int) -> Period:
    clock = choose_clock(asked, facts["job_events"] or 0, facts["trace_events"] or 0)
    name = "trace" if clock is Clock.TRACE else "hlc"
    first_ms, last_ms = facts[f"first_{name}_ms"], facts[f"last_{name}_ms"]
    if first_ms is None or last_ms is None:
        raise InvalidInputError(_nothing(asked))
    return choose_period(asked, clock, first_ms, last_ms, now_ms)


def _nothing(asked: Asked) -> str:
    kind = "job event with a trace_time" if asked.clock is Clock.TRACE else "job event"
    if asked.end_ms is not None:
        return f"there is no {kind} before --to"
    return f"there is no {kind} to report on" + (": use --time hlc" if asked.clock is Clock.TRACE else "")


def _write_tables(timed: DataFrame, period: Period, stuck_after_ms: int | None, fresh: Path) -> dict[str, Any]:
    """Write all tables; returns numbers that are in none of them."""
    files.write_table(jobs.table(timed, period.clock), fresh, "jobs")
    counted = summaries.summarise(summaries.happenings(timed, period)).persist(StorageLevel.DISK_ONLY)
    for name in summaries.TABLES:
        files.write_table(summaries.of(counted, name, period), fresh, name)
    counted.unpersist()
    files.write_table(summaries.openings(timed, period), fresh, "open")
    whole = files.rows_of(fresh, "all")[0]
    after_ms = lists.stuck_after_ms(stuck_after_ms, whole["total_jobs"], whole["total_p99_s"])
    files.write_table(lists.longest(timed, period), fresh, "longest")
    files.write_table(lists.stuck(timed, period, after_ms), fresh, "stuck")
    files.write_table(lists.cancelled(timed, period), fresh, "cancelled")
    files.write_table(lists.cancellers(timed, period), fresh, "cancellers")
    files.write_table(lists.reasons(timed, period), fresh, "reasons")
    totals = lists.totals(timed, period, after_ms).first()
    assert totals is not None
    return {**totals.asDict(), "stuck_after_ms": after_ms, "stuck_after_is_asked": stuck_after_ms is not None}
