"""The plots of the page, each with its title, what it says in a sentence, and its legend."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, Final, NamedTuple

from pipeline.report.folder import Row, visible
from pipeline.report.page import axes
from pipeline.report.page.contents import Contents
from pipeline.report.page.plots import Box, Frame, Plot, Series, lines, stacked
from pipeline.report.period import Clock
from pipeline.report.summaries import PERCENTILES
from pipeline.report.texts import count_text, duration_text, moment_text, rate_text, width_text

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

    ticks: list[axes.Tick]
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

    def frame(self, what: str, y: axes.Axis, lines_of: Any) -> Frame:
        gaps = [at for at, row in enumerate(self.windows) if row["windows"] > 1]
        return Frame(what, self.ticks, y, self.tips(lines_of), gaps)


def _ticks(windows: list[Row], width_ms: int, clock: Clock) -> list[axes.Tick]:
    """Ticks of the time that ``windows`` cover; none within a stretch that is shown as one."""
    start_ms, count = windows[0]["window"], len(windows)
    first = [(row["window"] - start_ms) // width_ms for row in windows]
    total = first[-1] + windows[-1]["windows"]
    ticks: list[axes.Tick] = []
    for tick in axes.times(start_ms, start_ms + total * width_ms, clock):
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
    frame = time.frame(label, axes.linear(max(values)), lambda _, row: [f"{count_text(row['created'])} created"])
    plot = stacked(frame, [Series("Created", "s-created", values)])
    return Figure("Jobs created", time.per, plot, ())


def _open(time: _Time) -> Figure:
    values = [row["open"] for row in time.windows]
    label = f"Bar chart: jobs open at the end of each window, at most {count_text(max(values))}"
    frame = time.frame(label, axes.linear(max(values)), lambda _, row: [f"{count_text(row['open'])} open at its end"])
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
    plot = stacked(time.frame(label, axes.linear(max(values)), lines_of), series)
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
    plot = lines(time.frame(label, axes.durations(max(known, default=1)), lines_of), series)
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
    plot = stacked(time.frame(label, axes.linear(max(values)), lines_of), series)
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
    frame = Frame(label, axes.hours(), axes.linear(max(shares), is_share=True), tips)
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
