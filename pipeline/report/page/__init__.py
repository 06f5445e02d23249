"""The page of a report: one self-contained HTML file, built from the written tables."""

from __future__ import annotations

from datetime import UTC, datetime
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.parse import quote

import pyarrow as pa
import pyarrow.compute as pc
from jinja2 import Environment

from pipeline.page import MINUTE_MS, NOTHING, environment, inline
from pipeline.report import Clock, access, amount_text, moment_text, width_text
from pipeline.report.folder import Row, cut, named_rows_of, rows_of, table, with_chain
from pipeline.report.page import plots
from pipeline.report.tables import ENDED_JOBS_MIN, OUTCOMES, PERCENTILES, RATES, SPANS

TEXT_MAX: Final = 120
NAME_MAX: Final = 24
"""Longest name of a tenant in a legend."""
COMMAND_MAX: Final = 4_000
"""Longest command shown; a command is useful only if whole."""
_HERE: Final = Path(__file__).parent


def write_page(report: dict[str, Any], folder: Path) -> None:
    """Write ``report.html`` for the headline numbers ``report`` and the tables in ``folder``."""
    (folder / "report.html").write_text(page(report, contents(report, folder)), encoding="utf-8")


def templates(period: dict[str, Any]) -> Environment:
    """The templates of a page, with the filters that write numbers, times and texts of ``period``."""
    clock, width_ms = Clock(period["clock"]), period["window_ms"]
    templates = environment(_HERE)
    templates.filters.update(
        amount=amount_text,
        width=width_text,
        window=lambda at_ms: moment_text(at_ms, clock, "%H:%M:%S" if width_ms % MINUTE_MS else "%H:%M", zone=""),
        exact=lambda at_ms: moment_text(at_ms, clock),
        moment=lambda at_ms: NOTHING if at_ms is None else moment_text(at_ms, clock, "%H:%M", zone=""),
        utc=lambda at_ms: NOTHING if at_ms is None else moment_text(at_ms, Clock.HLC, "%H:%M", zone=""),
        ends=lambda row: sum(row[name] for name in access.ENDS),
        text=lambda value: NOTHING if value is None else cut(value, TEXT_MAX),
        command=lambda value: NOTHING if value is None else cut(value, COMMAND_MAX),
    )
    templates.globals.update(
        linear_axis=plots.linear_axis,
        duration_axis=plots.duration_axis,
        stacked=plots.stacked,
        named_at_end=plots.named_at_end,
        series_of=plots.series_of,
        legend_of=plots.legend_of,
        hour_ticks=plots.HOUR_TICKS,
        plot_height=plots.HEIGHT,
        plot_view=plots.VIEW,
        bar_share=plots.BAR_SHARE,
    )
    return templates


def page(report: dict[str, Any], shown: Contents) -> str:
    """The page as HTML."""
    clock, width_ms = Clock(report["period"]["clock"]), report["period"]["window_ms"]
    by_tenant = [
        (cut(tenant, NAME_MAX), f"t{at}", counts) if tenant is not None else ("all others", "t-rest", counts)
        for at, (tenant, counts) in enumerate(shown["by_tenant"])
    ]
    return (
        templates(report["period"])
        .get_template("report.html.j2")
        .render(
            report=report,
            shown=shown,
            by_tenant=by_tenant,
            per=f"per {width_text(width_ms).removeprefix('1 ')}",
            window_ticks=plots.window_ticks(shown["windows"], width_ms, clock),
            on_trace=clock is Clock.TRACE,
            job_url=partial(_job_url, report["console"]),
            ended_jobs_min=ENDED_JOBS_MIN,
            **inline(),
        )
    )


def _job_url(console: str | None, row: Row) -> str | None:
    """The console's URL of the job of ``row``; None without a console, and for invalid names."""
    names = (row.get("tenant_id"), row.get("job_id"))
    if console is None or not all(names):
        return None
    return f"{console}/console#/job/" + "/".join(quote(str(name), safe="") for name in names)


# --- what it shows of the tables ------------------------------------------------------------------

GROUPS_MAX: Final = 20
ROWS_MAX: Final = 15
TENANTS_PLOTTED: Final = 5
EMPTY_WINDOWS_MIN: Final = 4
"""From this many on, consecutive windows without events are shown as one."""

_COUNTS: Final = ("created", "accepted", "ended", *OUTCOMES, *(f"{span}_jobs" for span in SPANS))


class Some(NamedTuple):
    """The first rows of a table, its row count, and all other rows as one, if known."""

    rows: list[Row]
    all: int
    rest: Row | None = None


Contents = dict[str, Any]
"""The tables as the page shows them, by name; moments are in milliseconds."""


def contents(report: dict[str, Any], folder: Path) -> Contents:
    """The contents of the page on ``report``, from the tables in ``folder``.

    ``windows`` are in order. Each row has the number of ``windows`` it covers, more than 1 for a stretch without
    events, and the number of jobs ``open`` at its end. ``by_tenant`` are the jobs created in each window by the
    largest tenants; the last row, of tenant None, is all others. ``measures`` are empty if no stats were given.
    """
    opened = [row["open"] for row in rows_of(folder, "open")]
    windows = folded([{**row, "open": opened[at]} for at, row in enumerate(_in_ms(rows_of(folder, "windows")))])
    tenants = largest(named_rows_of(folder, "tenants"), "tenant_id", "created")
    labels = rows_of(folder, "labels") if report["by"] else []
    by_field = {name: [row for row in labels if row["field"] == name] for name in report["by"]}
    return {
        "windows": windows,
        "tenants": tenants,
        "dcs": largest(rows_of(folder, "dcs"), "dc", "ended"),
        "hours": rows_of(folder, "hours"),
        "by_tenant": _by_tenant(folder, windows, [row["tenant_id"] for row in tenants.rows[:TENANTS_PLOTTED]]),
        **{
            name: _in_ms(named_rows_of(folder, name, ROWS_MAX))
            for name in ("longest", "stuck", "cancelled", "cancellers")
        },
        "reasons": _some(folder, "reasons"),
        "labels": [(name, Some(rows[:GROUPS_MAX], len(rows))) for name, rows in by_field.items()],
        "who": {name: _some(folder, name) for name in access.TABLES},
        "ledger": Some(named_rows_of(folder, "ledger", GROUPS_MAX), report["read"]["tenants"]),
        "measures": rows_of(folder, "measures", ROWS_MAX) if (folder / "parquet" / "measures").is_dir() else [],
    }


def _some(folder: Path, name: str) -> Some:
    return Some(_in_ms(named_rows_of(folder, name, ROWS_MAX)), table(folder, name).count_rows())


def folded(windows: list[Row]) -> list[Row]:
    """``windows`` with each stretch of ``EMPTY_WINDOWS_MIN`` or more without events as one."""
    made: list[Row] = []
    for is_empty, stretch in groupby(windows, lambda row: not (row["created"] or row["accepted"] or row["ended"])):
        rows = list(stretch)
        if is_empty and len(rows) >= EMPTY_WINDOWS_MIN:
            made.append({**rows[0], "windows": len(rows)})
        else:
            made += ({**row, "windows": 1} for row in rows)
    return made


def largest(rows: list[Row], key: str, by: str) -> Some:
    """The ``GROUPS_MAX`` groups with most ``by``; the others are summed, without percentiles."""
    ordered = sorted(rows, key=lambda row: (-row[by], row[key] is None, row[key] or ""))
    kept, others = ordered[:GROUPS_MAX], ordered[GROUPS_MAX:]
    if not others:
        return Some(kept, len(kept))
    rest: Row = {name: sum(row[name] for row in others) for name in _COUNTS}
    rest |= {rate: rest[count] / rest["ended"] if rest["ended"] else None for count, rate in RATES.items()}
    rest |= {f"{span}_p{each}_s": None for span in SPANS for each in PERCENTILES}
    return Some(kept, len(ordered), rest)


def _by_tenant(folder: Path, windows: list[Row], names: list[str]) -> list[tuple[str | None, list[int]]]:
    """One row of counts for each of ``names``, and one for the rest of each window."""
    # The name of a chain ends with its tenant.
    shown = {each for name in names if name is not None for each in (name, name.rpartition("/")[2])}
    tenants = pa.array(sorted(shown), pa.string())
    found = table(folder, "tenant_windows").to_table(
        columns=["window", "tenant_id", "ledger", "created"], filter=pc.field("tenant_id").isin(tenants)
    )
    rows = _in_ms([with_chain(row) for row in found.to_pylist()])
    counts = {(row["tenant_id"], row["window"]): row["created"] for row in rows}
    of_names = {name: [counts.get((name, window["window"]), 0) for window in windows] for name in names}
    rest = [window["created"] - sum(created[at] for created in of_names.values()) for at, window in enumerate(windows)]
    return [*of_names.items(), *([(None, rest)] if any(rest) else [])]


def _in_ms(rows: list[Row]) -> list[Row]:
    """``rows`` with moments in milliseconds of either clock."""
    return [{name: _ms(name, value) for name, value in row.items()} for row in rows]


_MOMENTS: Final = frozenset(("window", "created", "accepted", "ended", "last_event", "cancel_requested"))


def _ms(name: str, value: Any) -> Any:
    if isinstance(value, datetime):
        return round((value if value.tzinfo is not None else value.replace(tzinfo=UTC)).timestamp() * 1000)
    return round(value * 1000) if name in _MOMENTS and isinstance(value, float) else value
