"""Makes a report: the steps from entries to files, in order.

1. Fold the entries, read once and kept for step 4, into one row a job; count the entries read.
2. Choose clock and period from the data and the request.
3. Write the jobs, then from them the tables of counts and the lists.
4. Write the access tables from the entries and those of ``_system``.
5. Make CSV files, headline numbers and page from the written tables, and move all into place.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Final, NamedTuple

from pyspark import StorageLevel
from pyspark.sql import DataFrame

from ledger.errors import InvalidInputError
from ledger.facts.statuses import STATUSES
from pipeline.report import Asked, Clock, Period, access, choose_period, moment_text, tables
from pipeline.report import folder as files
from pipeline.report.jobs import before_end, counted, facts, fold
from pipeline.report.page import write_page
from pipeline.report.tables import OUTCOMES, PERCENTILES, SPANS

FORMAT: Final = "tallystick.report.v1"
TABLES: Final = (*tables.COUNTS, "open", *tables.LISTS, *access.TABLES, "ledger")


class Made(NamedTuple):
    """The sources and the command that a report shows."""

    place: str
    tenants: list[str]
    """Requested tenants; empty for all."""
    log_origins: list[str]
    version: str
    made_at: datetime
    command: str
    verify_command: str
    by: Sequence[str] = ()
    """Fields of the spec, such as ``spec.image``, by whose values jobs are counted."""
    console: str | None = None
    """Base URL of the service whose console shows the jobs."""
    ledgers: Sequence[str] = ()
    """Names of the ledgers read; empty if rows name none."""
    unread: Sequence[Mapping[str, str]] = ()
    """Ledgers that could not be read, each with the ``error``."""
    left: Sequence[Mapping[str, Any]] = ()
    """Chains that are read from a later seq, because what came before left the database."""


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

    ``system`` are the entries of ``_system``, None if unknown. ``stats`` are windows of ``pipeline.stats.read``;
    windows in the period are added.

    Raises:
        InvalidInputError: there is no job event, or there are too many windows.
        ConfigurationError: ``dest`` holds something else.
    """
    with files.replaced(dest) as fresh:
        stated = before_end(facts(entries, made.by), asked.clock, asked.end_ms).persist(StorageLevel.DISK_ONLY)
        try:
            known = counted(stated)
            read = tables.overall(known).collect()[0].asDict()
            period = _period(asked, read, round(made.made_at.timestamp() * 1000))
            files.write_table(tables.by_tenant(known), fresh, "ledger")
            timed = fold(known, period.clock).persist(StorageLevel.DISK_ONLY)
            numbers = _write_tables(timed, period, stuck_after_ms, fresh)
            if made.by:
                files.write_table(tables.by_label(timed, period, made.by), fresh, "labels")
            before = None if asked.start_ms is None else tables.before(timed, period).collect()[0].asDict()
            who = access.write(known, timed, system, made.tenants, asked, period, fresh)
            timed.unpersist()
            if stats is not None:
                tables.write_measures(stats, made.tenants, period, fresh)
        finally:
            stated.unpersist()
        for name in (*TABLES, *(["labels"] if made.by else ()), *(() if stats is None else tables.MEASURES)):
            files.write_csv(fresh, name)
        report = _headline(period, made, read, numbers, who, before, fresh)
        (fresh / "report.json").write_text(json.dumps(report, indent=2) + "\n")
        write_page(report, fresh)
    return report


def _period(asked: Asked, facts: dict[str, Any], now_ms: int) -> Period:
    is_in_trace = facts["job_events"] and facts["job_events"] == facts["trace_events"]
    clock = asked.clock or (Clock.TRACE if is_in_trace else Clock.HLC)
    name = "trace" if clock is Clock.TRACE else "hlc"
    first_ms, last_ms = facts[f"first_{name}_ms"], facts[f"last_{name}_ms"]
    if first_ms is None or last_ms is None:
        with_time, hint = (" with a trace_time", ": use --time hlc") if asked.clock is Clock.TRACE else ("", "")
        where = f"to report on{hint}" if asked.end_ms is None else "before --to"
        raise InvalidInputError(f"there is no job event{with_time} {where}")
    return choose_period(asked, clock, first_ms, last_ms, now_ms)


def _write_tables(timed: DataFrame, period: Period, stuck_after_ms: int | None, fresh: Path) -> dict[str, Any]:
    """Write all tables of jobs; returns numbers that no table contains."""
    counted = tables.summarise(tables.happenings(timed, period)).persist(StorageLevel.DISK_ONLY)
    for name in tables.COUNTS:
        files.write_table(tables.of(counted, name, period), fresh, name)
    counted.unpersist()
    files.write_table(tables.openings(timed, period), fresh, "open")
    whole = files.rows_of(fresh, "all")[0]
    after_ms = tables.stuck_after_ms(stuck_after_ms, whole["total_jobs"], whole["total_p99_s"])
    for name, query in {"jobs": tables.JOBS, **tables.LISTS}.items():
        files.write_table(tables.of_jobs(query, timed, period, after_ms), fresh, name)
    totals = tables.of_jobs(tables.TOTALS, timed, period, after_ms).collect()[0].asDict()
    return {**totals, "stuck_after_ms": after_ms, "stuck_after_is_asked": stuck_after_ms is not None}


def _headline(
    period: Period,
    made: Made,
    read: dict[str, Any],
    numbers: dict[str, Any],
    who: dict[str, Any],
    before: dict[str, Any] | None,
    folder: Path,
) -> dict[str, Any]:
    """The headline numbers of the report with tables in ``folder``; ``who`` are those of the access tables,
    ``before`` the counts of the previous period, if known. Plain ASCII as JSON, even for non-ASCII names."""
    whole = files.rows_of(folder, "all")[0]
    made_at = made.made_at.isoformat(timespec="seconds").replace("+00:00", "Z")
    return {
        "format": FORMAT,
        "period": {
            "clock": str(period.clock),
            "from": moment_text(period.start_ms, period.clock),
            "to": moment_text(period.end_ms, period.clock),
            "start_ms": period.start_ms,
            "end_ms": period.end_ms,
            "window_ms": period.window_ms,
            "first_window_ms": period.first_window_ms,
        },
        **_counted(whole),
        "before": None if before is None else _counted(before),
        "at_end": {
            "jobs": numbers["jobs"],
            "open": numbers["open"],
            "stuck": numbers["stuck"],
            "known_to": moment_text(period.known_ms, period.clock),
            "known_to_ms": period.known_ms,
            "stuck_after_s": numbers["stuck_after_ms"] / 1000,
            "stuck_after_is_asked": numbers["stuck_after_is_asked"],
            "by_status": {status: numbers[f"status_{status}"] for status in STATUSES},
        },
        "cancel_requests": numbers["cancel_requests"],
        "who": who,
        "left_out": {
            "private_values": read["private_values"],
            "jobs_with_times_backwards": numbers["backwards"],
            "jobs_without_time": numbers["undated"],
            "events_without_trace_time": (
                read["job_events"] - read["trace_events"] if period.clock is Clock.TRACE else 0
            ),
        },
        "read": {
            "place": made.place,
            "log_origins": made.log_origins,
            "ledgers": [*made.ledgers],
            "unread": [*made.unread],
            "left": [*made.left],
            "tenants_asked": made.tenants,
            **{name: read[name] for name in ("tenants", "entries", "job_events", "first_hlc", "last_hlc")},
        },
        "made": {"at": made_at, "version": made.version, "command": made.command, "verify": made.verify_command},
        "by": [*made.by],
        "console": made.console,
    }


def _counted(whole: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "in_period": {name: whole[name] for name in ("created", "accepted", "ended", *OUTCOMES)},
        "rates": {name: whole[name] for name in ("failure_rate", "cancellation_rate", "timeout_rate")},
        "times_s": {
            span: {"jobs": whole[f"{span}_jobs"], **{f"p{each}": whole[f"{span}_p{each}_s"] for each in PERCENTILES}}
            for span in SPANS
        },
    }
