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


class Some(NamedTuple):
    """The first rows of a table, how many it has, and, where that is known, all others as one row."""

    rows: list[Row]
    all: int
    rest: Row | None = None


Contents = dict[str, Any]
"""The tables as the page shows them, by name; moments are in milliseconds."""


def contents(report: dict[str, Any], folder: Path) -> Contents:
    """What the page on ``report`` shows of the tables in ``folder``.

    ``windows`` are in order; each row says how many ``windows`` it stands for, more than 1 where nothing happened in
    any of them, and how many jobs were ``open`` when it ended. ``by_tenant`` are the jobs created in each window by the
    largest tenants; the last, of tenant None, by all others. ``measures`` are empty where no stats were given.
    """
    opened = [row["open"] for row in rows_of(folder, "open")]
    every = [{**row, "open": opened[at]} for at, row in enumerate(_in_ms(rows_of(folder, "windows")))]
    windows = folded(every)
    tenants = largest(rows_of(folder, "tenants"), "tenant_id", "created")
    labels = rows_of(folder, "labels") if report["by"] else []
    by_field = {name: [row for row in labels if row["field"] == name] for name in report["by"]}
    return {
        "windows": windows,
        "tenants": tenants,
        "dcs": largest(rows_of(folder, "dcs"), "dc", "ended"),
        "hours": rows_of(folder, "hours"),
        "by_tenant": _by_tenant(folder, windows, [row["tenant_id"] for row in tenants.rows[:TENANTS_PLOTTED]]),
        **{name: _in_ms(rows_of(folder, name, ROWS_MAX)) for name in ("longest", "stuck", "cancelled", "cancellers")},
        "reasons": _some(folder, "reasons"),
        "labels": [(name, Some(rows[:GROUPS_MAX], len(rows))) for name, rows in by_field.items()],
        "who": {name: _some(folder, name) for name in access.TABLES},
        "ledger": Some(rows_of(folder, "ledger", GROUPS_MAX), report["read"]["tenants"]),
        "measures": rows_of(folder, "measures", ROWS_MAX) if (folder / "parquet" / "measures").is_dir() else [],
    }


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


def largest(rows: list[Row], key: str, by: str) -> Some:
    """The ``GROUPS_MAX`` groups with most ``by``; counts of the others are added, their percentiles are not known."""
    ordered = sorted(rows, key=lambda row: (-row[by], row[key] is None, row[key] or ""))
    kept, others = ordered[:GROUPS_MAX], ordered[GROUPS_MAX:]
    if not others:
        return Some(kept, len(kept))
    rest: Row = {name: sum(row[name] for row in others) for name in _COUNTS}
    for rate, count in _RATES.items():
        rest[rate] = rest[count] / rest["ended"] if rest["ended"] else None
    rest |= {f"{span}_p{each}_s": None for span in SPANS for each in PERCENTILES}
    return Some(kept, len(ordered), rest)


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
Legend = Sequence[tuple[str, str]]
_RATE_OF: Final = {"cancelled": "cancellation_rate", "timed_out": "timeout_rate", "failed": "failure_rate"}
_NAME_MAX: Final = 24
_TICKS_APART_MIN: Final = 0.045
"""Ticks that are closer would stand on one another."""


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

    windows: list[Row]
    width_ms: int
    clock: Clock

    @property
    def per(self) -> str:
        """``per day``, ``per 6 hours``."""
        return f"per {width_text(self.width_ms).removeprefix('1 ')}"

    def plot(
        self, title: str, note: str, label: str, y: Axis, texts: Sequence[Sequence[str]], legend: Legend = ()
    ) -> Plot:
        """A plot without marks; ``texts`` are the lines that each window shows under the pointer."""
        gaps = [at for at, row in enumerate(self.windows) if row["windows"] > 1]
        tips = [
            "\n".join([moment_text(row["window"], self.clock), *(self._empty(row) or texts[at])])
            for at, row in enumerate(self.windows)
        ]
        return Plot(title, note, label, _ticks(self.windows, self.width_ms, self.clock), y, tips, gaps, legend)

    def _empty(self, row: Row) -> list[str]:
        if row["windows"] == 1:
            return []
        end = moment_text(row["window"] + row["windows"] * self.width_ms, self.clock)
        return [f"until {end}", f"nothing happened, {count_text(row['open'])} jobs open"]


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


def figures(report: dict[str, Any], shown: Contents) -> dict[str, Plot]:
    """The plots by name; ``tenants`` only where there is more than one."""
    period, windows = report["period"], shown["windows"]
    time = _Time(windows, period["window_ms"], Clock(period["clock"]))
    created, is_open = ([row[name] for row in windows] for name in ("created", "open"))
    most, every = count_text(max(created)), count_text(sum(created))
    totals = {name: sum(row[name] for row in windows) for name in OUTCOME_LABELS}
    outcomes = ", ".join(f"{count_text(totals[name])} {text.lower()}" for name, text in OUTCOME_LABELS.items())
    made = {
        "created": _bars(
            time,
            ("Jobs created", time.per),
            f"Bar chart: jobs created {time.per}, at most {most}, {every} in all",
            [Series("created", "s-created", created)],
        ),
        "ended": _bars(
            time,
            ("Jobs ended, by outcome", time.per),
            f"Stacked bar chart: jobs that ended {time.per}, by outcome; in all {outcomes}",
            [
                Series(text.lower(), f"s-{name}", [row[name] for row in windows])
                for name, text in OUTCOME_LABELS.items()
            ],
            legend=[(f"s-{name}", text) for name, text in OUTCOME_LABELS.items() if totals[name]],
        ),
        "open": _bars(
            time,
            ("Jobs open", "at the end of each window: created, and not ended"),
            f"Bar chart: jobs open at the end of each window, at most {count_text(max(is_open))}",
            [Series("open at its end", "s-created", is_open)],
        ),
        "queue": _percentiles(time, "queue", "Queue time", "from creation to acceptance"),
        "run": _percentiles(time, "run", "Run time", "from acceptance to end"),
        "hours": _hours(shown["hours"], time.clock),
    }
    if len(shown["by_tenant"]) > 1:
        tenants = [
            Series("all others" if tenant is None else _short(tenant), "t-rest" if tenant is None else f"t{at}", counts)
            for at, (tenant, counts) in enumerate(shown["by_tenant"])
        ]
        told = ", ".join(f"{each.label} {count_text(sum(each.values))}" for each in tenants)
        label = f"Stacked bar chart: jobs created {time.per}, by tenant: {told}"
        legend = [(each.style, each.label) for each in tenants]
        made["tenants"] = _bars(time, ("Jobs created, by tenant", time.per), label, tenants, "{1}: {0}", legend)
    return made


def _bars(
    time: _Time, heading: tuple[str, str], label: str, series: Sequence[Series], tip: str = "{} {}", legend: Legend = ()
) -> Plot:
    """Stacked counts by window; ``heading`` is title and note, ``tip`` the form of a count and the name it is of."""
    by_window = [*zip(*(each.values for each in series), strict=True)]
    names = [each.label for each in series]
    texts = [
        [tip.format(count_text(count), name) for name, count in zip(names, counts, strict=True)][::-1]
        for counts in by_window
    ]
    return stacked(time.plot(*heading, label, linear_axis(max(map(sum, by_window))), texts, legend), series)


def _percentiles(time: _Time, span: str, title: str, what: str) -> Plot:
    names = {each: f"{span}_p{each}_s" for each in PERCENTILES}
    known = [row[name] for row in time.windows for name in names.values() if row[name] is not None]
    label = f"Line chart: {title.lower()} {time.per}, median, 90th and 99th percentile, on a logarithmic scale"
    texts = [
        [
            *(f"p{each}: {duration_text(row[name])}" for each, name in reversed(names.items())),
            f"{count_text(row[f'{span}_jobs'])} jobs",
        ]
        for row in time.windows
    ]
    series = [Series(f"p{each}", f"p{each}", [row[name] for row in time.windows]) for each, name in names.items()]
    legend = (("p50", "p50: half of the jobs are quicker"), ("p90", "p90: 9 of 10"), ("p99", "p99: 99 of 100"))
    y = duration_axis(max(known, default=1))
    return lines(time.plot(title, f"{what}, {time.per}, logarithmic scale", label, y, texts, legend), series)


def _hours(hours: list[Row], clock: Clock) -> Plot:
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
    day = "of the trace's day" if clock is Clock.TRACE else "of the day, UTC"
    note = f"share of those that ended, by hour {day}"
    legend = [(f"s-{name}", OUTCOME_LABELS[name]) for name, rate in _RATE_OF.items() if any(row[rate] for row in hours)]
    y = linear_axis(max(shares), is_share=True)
    series = [
        Series(OUTCOME_LABELS[name], f"s-{name}", [row[rate] for row in hours]) for name, rate in _RATE_OF.items()
    ]
    return stacked(Plot("Jobs that did not complete", note, label, hour_ticks(), y, tips, legend=legend), series)


def _short(name: str) -> str:
    shown = visible(name)
    return shown if len(shown) <= _NAME_MAX else f"{shown[: _NAME_MAX - 1]}…"
