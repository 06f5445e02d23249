"""What the page shows of the tables: read back from Parquet, cut to what a page can hold."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from datetime import UTC, datetime
from itertools import accumulate, groupby
from pathlib import Path
from typing import Any, Final, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from pipeline.report import access
from pipeline.report.folder import Row, rows_of, table, visible
from pipeline.report.page.plots import (
    Axis,
    Box,
    Frame,
    Plot,
    Series,
    Tick,
    duration_axis,
    hour_ticks,
    linear_axis,
    lines,
    stacked,
    time_ticks,
)
from pipeline.report.period import Clock, count_text, duration_text, moment_text, rate_text, width_text
from pipeline.report.summaries import OUTCOMES, PERCENTILES, SPANS

GROUPS_MAX: Final = 20
ROWS_MAX: Final = 15
TENANTS_PLOTTED: Final = 5
EMPTY_WINDOWS_MIN: Final = 4
"""So many windows in a row in which nothing happened are shown as one."""

_COUNTS: Final = ("created", "accepted", "ended", *OUTCOMES, *(f"{span}_jobs" for span in SPANS))
_RATES: Final = {"failure_rate": "failed", "cancellation_rate": "cancelled", "timeout_rate": "timed_out"}


class Groups(NamedTuple):
    """The largest groups of a table, and all others as one row; ``others`` is how many that row stands for."""

    rows: list[Row]
    rest: Row | None
    others: int


class Some(NamedTuple):
    """The first rows of a table, and how many it has."""

    rows: list[Row]
    all: int


class Contents(NamedTuple):
    """The tables as the page shows them; moments are in milliseconds."""

    windows: list[Row]
    """In order; ``windows`` is how many each stands for, more than 1 where nothing happened in any of them; ``open``
    is how many jobs were open when it ended."""
    tenants: Groups
    dcs: Groups
    hours: list[Row]
    by_tenant: list[tuple[str | None, list[int]]]
    """Jobs created in each window by the largest tenants; the last, of tenant None, by all others."""
    longest: list[Row]
    stuck: list[Row]
    cancelled: list[Row]
    cancellers: list[Row]
    reasons: Some
    labels: list[tuple[str, Some]]
    """The values of each field by which jobs are counted."""
    who: dict[str, Some]
    """The tables of ``pipeline.report.access``, by name."""
    ledger: list[Row]
    ledger_tenants: int
    measures: list[Row]
    """What running jobs counted; empty where no stats were given."""


def contents(report: dict[str, Any], folder: Path) -> Contents:
    """What the page on ``report`` shows of the tables in ``folder``."""
    opened = [row["open"] for row in rows_of(folder, "open")]
    every = [{**row, "open": opened[at]} for at, row in enumerate(_in_ms(rows_of(folder, "windows")))]
    windows = folded(every)
    tenants = largest(rows_of(folder, "tenants"), "tenant_id", "created")
    return Contents(
        windows,
        tenants,
        largest(rows_of(folder, "dcs"), "dc", "ended"),
        rows_of(folder, "hours"),
        _by_tenant(folder, windows, [row["tenant_id"] for row in tenants.rows[:TENANTS_PLOTTED]]),
        _in_ms(rows_of(folder, "longest", ROWS_MAX)),
        _in_ms(rows_of(folder, "stuck", ROWS_MAX)),
        _in_ms(rows_of(folder, "cancelled", ROWS_MAX)),
        rows_of(folder, "cancellers", ROWS_MAX),
        _some(folder, "reasons"),
        _labels(folder, report["by"]),
        {name: _some(folder, name) for name in access.TABLES},
        rows_of(folder, "ledger", GROUPS_MAX),
        report["read"]["tenants"],
        rows_of(folder, "measures", ROWS_MAX) if (folder / "parquet" / "measures").is_dir() else [],
    )


def _some(folder: Path, name: str) -> Some:
    return Some(_in_ms(rows_of(folder, name, ROWS_MAX)), table(folder, name).count_rows())


def folded(windows: list[Row]) -> list[Row]:
    """``windows`` with each stretch of ``EMPTY_WINDOWS_MIN`` or more in which nothing happened as one."""
    made: list[Row] = []
    for is_empty, stretch in groupby(windows, lambda row: not (row["created"] or row["accepted"] or row["ended"])):
        rows = list(stretch)
        if is_empty and len(rows) >= EMPTY_WINDOWS_MIN:
            made.append({**rows[0], "windows": len(rows)})
        else:
            made += ({**row, "windows": 1} for row in rows)
    return made


def _labels(folder: Path, names: list[str]) -> list[tuple[str, Some]]:
    rows = rows_of(folder, "labels") if names else []
    by_field = [(name, [row for row in rows if row["field"] == name]) for name in names]
    return [(name, Some(found[:GROUPS_MAX], len(found))) for name, found in by_field]


def largest(rows: list[Row], key: str, by: str) -> Groups:
    """The ``GROUPS_MAX`` groups with most ``by``; counts of the others are added, their percentiles are not known."""
    ordered = sorted(rows, key=lambda row: (-row[by], row[key] is None, row[key] or ""))
    kept, others = ordered[:GROUPS_MAX], ordered[GROUPS_MAX:]
    if not others:
        return Groups(kept, None, 0)
    rest: Row = {name: sum(row[name] for row in others) for name in _COUNTS}
    for rate, count in _RATES.items():
        rest[rate] = rest[count] / rest["ended"] if rest["ended"] else None
    rest |= {f"{span}_p{each}_s": None for span in SPANS for each in PERCENTILES}
    return Groups(kept, rest, len(others))


def _by_tenant(folder: Path, windows: list[Row], names: list[str]) -> list[tuple[str | None, list[int]]]:
    """One row of counts for each of ``names``, and one for what they leave of each window."""
    found = table(folder, "tenant_windows").to_table(
        columns=["window", "tenant_id", "created"], filter=pc.field("tenant_id").isin(pa.array(names, pa.string()))
    )
    counts = {(row["tenant_id"], row["window"]): row["created"] for row in _in_ms(found.to_pylist())}
    of_names = {name: [counts.get((name, window["window"]), 0) for window in windows] for name in names}
    rest = [window["created"] - sum(created[at] for created in of_names.values()) for at, window in enumerate(windows)]
    return [*of_names.items(), *([(None, rest)] if any(rest) else [])]


def _in_ms(rows: list[Row]) -> list[Row]:
    """``rows`` with moments in milliseconds, whichever clock they are of."""
    return [{name: _ms(name, value) for name, value in row.items()} for row in rows]


_MOMENTS: Final = frozenset(("window", "created", "accepted", "ended", "last_event", "cancel_requested"))


def _ms(name: str, value: Any) -> Any:
    if isinstance(value, datetime):
        moment = value if value.tzinfo is not None else value.replace(tzinfo=UTC)
        return round(moment.timestamp() * 1000)
    return round(value * 1000) if name in _MOMENTS and isinstance(value, float) else value


# --- plots ----------------------------------------------------------------------------------------


OUTCOME_LABELS: Final = {
    "completed": "Completed",
    "cancelled": "Cancelled",
    "timed_out": "Timed out",
    "failed": "Failed",
}
"""From the bottom of a bar to its top: what went wrong is what varies at the top."""
_RATE_OF: Final = {"cancelled": "cancellation_rate", "timed_out": "timeout_rate", "failed": "failure_rate"}
_NAME_MAX: Final = 24
_TICKS_APART_MIN: Final = 0.045
"""Ticks that are closer would stand on one another."""


class Figure(NamedTuple):
    """One plot with what stands around it; ``legend`` is (class, label)."""

    title: str
    note: str
    plot: Plot
    legend: Sequence[tuple[str, str]]


def figures(report: dict[str, Any], shown: Contents) -> dict[str, Figure]:
    """The plots by name; ``tenants`` only where there is more than one."""
    period, windows = report["period"], shown.windows
    clock, width_ms = Clock(period["clock"]), period["window_ms"]
    time = _Time(
        _ticks(windows, width_ms, clock), windows, width_ms, clock, f"per {width_text(width_ms).removeprefix('1 ')}"
    )
    made = {"created": _created(time), "ended": _ended(time), "open": _open(time)}
    made |= {"queue": _span(time, "queue"), "run": _span(time, "run")}
    if len(shown.by_tenant) > 1:
        made["tenants"] = _tenants(time, shown.by_tenant)
    made["hours"] = _hours(shown.hours, clock)
    return made


class ShareBar(NamedTuple):
    """A small bar of 100 %; ``parts`` are (class, place) from left to right."""

    label: str
    parts: Sequence[tuple[str, Box]]


def outcome_bar(row: Row) -> ShareBar | None:
    """How the jobs of a group ended; None where none did."""
    shares = {name: row[name] / row["ended"] for name in OUTCOME_LABELS if row["ended"] and row[name]}
    label = ", ".join(f"{rate_text(share)} {OUTCOME_LABELS[name].lower()}" for name, share in shares.items())
    lefts = accumulate(shares.values(), initial=0.0)
    places = (Box(left * 100, share * 100, height=12) for left, share in zip(lefts, shares.values(), strict=False))
    parts = [(f"s-{name}", place) for name, place in zip(shares, places, strict=True)]
    return ShareBar(label, parts) if row["ended"] else None


class _Time(NamedTuple):
    """The axis of time that most plots share."""

    ticks: list[Tick]
    windows: list[Row]
    width_ms: int
    clock: Clock
    per: str

    def tips(self, lines_of: Any) -> list[str]:
        """What each window says under the pointer: when it began, and ``lines_of`` it."""
        return [
            "\n".join([moment_text(row["window"], self.clock), *(self._empty(row) or lines_of(at, row))])
            for at, row in enumerate(self.windows)
        ]

    def _empty(self, row: Row) -> list[str]:
        if row["windows"] == 1:
            return []
        end = moment_text(row["window"] + row["windows"] * self.width_ms, self.clock)
        return [f"until {end}", f"nothing happened, {count_text(row['open'])} jobs open"]

    def frame(self, what: str, y: Axis, lines_of: Any) -> Frame:
        gaps = [at for at, row in enumerate(self.windows) if row["windows"] > 1]
        return Frame(what, self.ticks, y, self.tips(lines_of), gaps)


def _ticks(windows: list[Row], width_ms: int, clock: Clock) -> list[Tick]:
    """Ticks of the time that ``windows`` cover; none within a stretch that is shown as one."""
    start_ms, count = windows[0]["window"], len(windows)
    first = [(row["window"] - start_ms) // width_ms for row in windows]
    total = first[-1] + windows[-1]["windows"]
    ticks: list[Tick] = []
    for tick in time_ticks(start_ms, start_ms + total * width_ms, clock):
        slot = bisect_right(first, tick.at * total + 1e-9) - 1
        within = tick.at * total - first[slot]
        at = (slot + (within if windows[slot]["windows"] == 1 else 0)) / count
        is_apart = not ticks or at - ticks[-1].at >= _TICKS_APART_MIN
        if is_apart and (windows[slot]["windows"] == 1 or within < 1e-9):
            ticks.append(tick._replace(at=at))
    return ticks


def _created(time: _Time) -> Figure:
    values = [row["created"] for row in time.windows]
    label = f"Bar chart: jobs created {time.per}, at most {count_text(max(values))}, {count_text(sum(values))} in all"
    frame = time.frame(label, linear_axis(max(values)), lambda _, row: [f"{count_text(row['created'])} created"])
    plot = stacked(frame, [Series("Created", "s-created", values)])
    return Figure("Jobs created", time.per, plot, ())


def _open(time: _Time) -> Figure:
    values = [row["open"] for row in time.windows]
    label = f"Bar chart: jobs open at the end of each window, at most {count_text(max(values))}"
    frame = time.frame(label, linear_axis(max(values)), lambda _, row: [f"{count_text(row['open'])} open at its end"])
    plot = stacked(frame, [Series("Open", "s-created", values)])
    return Figure("Jobs open", "at the end of each window: created, and not ended", plot, ())


def _ended(time: _Time) -> Figure:
    values = [row["ended"] for row in time.windows]
    totals = {name: sum(row[name] for row in time.windows) for name in OUTCOME_LABELS}
    told = ", ".join(f"{count_text(total)} {OUTCOME_LABELS[name].lower()}" for name, total in totals.items())
    label = f"Stacked bar chart: jobs that ended {time.per}, by outcome; in all {told}"

    def lines_of(_: int, row: Row) -> list[str]:
        return [f"{count_text(row[name])} {text.lower()}" for name, text in reversed(OUTCOME_LABELS.items())]

    series = [Series(text, f"s-{name}", [row[name] for row in time.windows]) for name, text in OUTCOME_LABELS.items()]
    plot = stacked(time.frame(label, linear_axis(max(values)), lines_of), series)
    legend = [(f"s-{name}", text) for name, text in OUTCOME_LABELS.items() if totals[name]]
    return Figure("Jobs ended, by outcome", time.per, plot, legend)


_SPAN_TEXTS: Final = {
    "queue": ("Queue time", "from creation to acceptance"),
    "run": ("Run time", "from acceptance to end"),
}


def _span(time: _Time, span: str) -> Figure:
    names = [f"{span}_p{each}_s" for each in PERCENTILES]
    known = [row[name] for row in time.windows for name in names if row[name] is not None]
    title, what = _SPAN_TEXTS[span]
    label = f"Line chart: {title.lower()} {time.per}, median, 90th and 99th percentile, on a logarithmic scale"

    def lines_of(_: int, row: Row) -> list[str]:
        told = [f"p{each}: {duration_text(row[name])}" for each, name in zip(PERCENTILES, names, strict=True)]
        return [*reversed(told), f"{count_text(row[f'{span}_jobs'])} jobs"]

    series = [
        Series(f"p{each}", f"p{each}", [row[name] for row in time.windows])
        for each, name in zip(PERCENTILES, names, strict=True)
    ]
    plot = lines(time.frame(label, duration_axis(max(known, default=1)), lines_of), series)
    legend = (("p50", "p50: half of the jobs are quicker"), ("p90", "p90: 9 of 10"), ("p99", "p99: 99 of 100"))
    return Figure(title, f"{what}, {time.per}, logarithmic scale", plot, legend)


def _tenants(time: _Time, by_tenant: list[tuple[str | None, list[int]]]) -> Figure:
    named = [
        (f"t{at}" if tenant is not None else "t-rest", "all others" if tenant is None else _short(tenant), created)
        for at, (tenant, created) in enumerate(by_tenant)
    ]
    values = [row["created"] for row in time.windows]
    label = f"Stacked bar chart: jobs created {time.per}, by tenant: " + ", ".join(
        f"{name} {count_text(sum(created))}" for _, name, created in named
    )

    def lines_of(at: int, _: Row) -> list[str]:
        return [f"{name}: {count_text(created[at])}" for _, name, created in reversed(named)]

    series = [Series(name, style, created) for style, name, created in named]
    plot = stacked(time.frame(label, linear_axis(max(values)), lines_of), series)
    return Figure("Jobs created, by tenant", time.per, plot, [(style, name) for style, name, _ in named])


def _hours(hours: list[Row], clock: Clock) -> Figure:
    shares = [sum(row[rate] or 0 for rate in _RATE_OF.values()) for row in hours]
    tips = [
        "\n".join(
            [
                f"{row['hour']:02}:00 to {row['hour'] + 1:02}:00",
                *(f"{rate_text(row[rate])} {OUTCOME_LABELS[name].lower()}" for name, rate in _RATE_OF.items()),
                f"of {count_text(row['ended'])} jobs that ended",
            ]
        )
        for row in hours
    ]
    label = "Stacked bar chart: share of ended jobs that failed, timed out or were cancelled, by hour of the day"
    frame = Frame(label, hour_ticks(), linear_axis(max(shares), is_share=True), tips)
    series = [
        Series(OUTCOME_LABELS[name], f"s-{name}", [row[rate] for row in hours]) for name, rate in _RATE_OF.items()
    ]
    legend = [(f"s-{name}", OUTCOME_LABELS[name]) for name, rate in _RATE_OF.items() if any(row[rate] for row in hours)]
    day = "of the trace's day" if clock is Clock.TRACE else "of the day, UTC"
    return Figure(
        "Jobs that did not complete", f"share of those that ended, by hour {day}", stacked(frame, series), legend
    )


def _short(name: str) -> str:
    shown = visible(name)
    return shown if len(shown) <= _NAME_MAX else f"{shown[: _NAME_MAX - 1]}…"
