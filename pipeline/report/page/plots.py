"""The plots of the page: their axes, and the values of bars and lines for each slot.

``plots.j2`` draws them as inline SVG, without script.

Horizontal positions are in percent, so a plot fills its width without scaling text; vertical positions are in
pixels. The axes are drawn into the padding of ``svg.plot``. The style sheet defines colours, dashes and print
patterns; a series has only a class.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Final, NamedTuple

from pipeline.report import (
    DAY_MS,
    HOUR_MS,
    MINUTE_MS,
    SECOND_MS,
    WEEK_MS,
    Clock,
    count_text,
    duration_text,
    moment_text,
    rate_text,
    width_text,
)
from pipeline.report.folder import Row, cut
from pipeline.report.tables import PERCENTILES

HEIGHT: Final = 220
BAR_SHARE: Final = 0.82
"""How much of its slot a bar fills."""
VIEW: Final = 10_000
"""Width of the view box of lines."""
_LABEL_PX: Final = 15


class Series(NamedTuple):
    """One series of a plot; ``style`` is its class in the style sheet. None means no value."""

    label: str
    style: str
    values: Sequence[Any]


Plot = dict[str, Any]
"""Data of the template: ``title``, ``note``, ``label`` for screen readers, ``x_ticks``, the axis ``y``, ``tips``,
the tooltip of each slot, ``gaps``, the slots of stretches without events, ``legend``, class and label of each
series, and ``bars`` or ``lines``."""
Legend = Sequence[tuple[str, str]]


def _stacked(series: Sequence[Series]) -> Iterator[tuple[str, list[tuple[float, float]]]]:
    """Stacked bars, the first series at the bottom."""
    below = [0.0] * len(series[0].values)
    for each in series:
        above = [start + (value or 0) for start, value in zip(below, each.values, strict=True)]
        yield each.style, [*zip(below, above, strict=True)]
        below = above


def _named_at_end(series: Sequence[Series], y: Axis) -> list[tuple[Series, float | None]]:
    """Lines with the positions of their names, moved apart so that none overlap."""
    known = ([value for value in each.values if value is not None] for each in series)
    ends = [HEIGHT * (1 - y.share(values[-1])) if values else None for values in known]
    lowest = HEIGHT + float(_LABEL_PX)
    for at, end in sorted(enumerate(ends), key=lambda each: -(each[1] or 0)):
        if end is not None:
            lowest = ends[at] = min(end, lowest - _LABEL_PX)
    return [*zip(series, ends, strict=True)]


# --- axes -----------------------------------------------------------------------------------------


TICKS_AIMED: Final = 8
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_TIME_STEPS_MS: Final = (
    *(SECOND_MS * n for n in (1, 5, 10, 30)),
    *(MINUTE_MS * n for n in (1, 5, 10, 30)),
    *(HOUR_MS * n for n in (1, 3, 6, 12)),
    *(DAY_MS * n for n in (1, 2, 7, 14, 30, 90, 180, 365)),
)
_DURATIONS: Final = (
    (0, "0"),
    (1, "1 ms"),
    (10, "10 ms"),
    (100, "100 ms"),
    (SECOND_MS, "1 s"),
    (10 * SECOND_MS, "10 s"),
    (MINUTE_MS, "1 min"),
    (10 * MINUTE_MS, "10 min"),
    (HOUR_MS, "1 h"),
    (6 * HOUR_MS, "6 h"),
    (DAY_MS, "1 d"),
    (WEEK_MS, "7 d"),
    (30 * DAY_MS, "30 d"),
    (100 * DAY_MS, "100 d"),
    (1000 * DAY_MS, "1,000 d"),
    (10_000 * DAY_MS, "10,000 d"),
)
_APART_MIN: Final = 0.06
"""Ticks of a logarithmic axis that are closer would stand on one another."""
_FINE_UNIT_MAX_MS: Final = 30 * SECOND_MS


class Tick(NamedTuple):
    """A mark on an axis; minor ticks are omitted on narrow plots."""

    at: float
    text: str
    is_minor: bool = False


class Axis(NamedTuple):
    """A scale with its ticks. ``log_unit`` 0 is linear; else ``log(1 + value / log_unit)``, which holds 0 too."""

    top: float
    ticks: list[Tick]
    log_unit: float = 0

    def share(self, value: float) -> float:
        """The position of ``value``."""
        if not self.log_unit:
            return value / self.top
        return math.log1p(value / self.log_unit) / math.log1p(self.top / self.log_unit)


def linear_axis(largest: float, is_share: bool = False) -> Axis:
    """An axis from 0 to a round number at or above ``largest``; counts in whole steps, shares in percent."""
    largest = largest if largest > 0 else (0.1 if is_share else 1)
    rough = largest / 4
    power = 10 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= rough * (1 - 1e-9))
    if not is_share:
        step = max(1, math.ceil(step))
    count = math.ceil(largest / step - 1e-9)
    if is_share:
        count = min(count, round(1 / step)) if step * count > 1 else count
    top = step * count
    text = "{:.3g} %".format if is_share else _thousands
    scale = 100 if is_share else 1
    return Axis(top, [Tick(at / count, text(step * at * scale)) for at in range(count + 1)])


def duration_axis(largest_s: float) -> Axis:
    """A logarithmic axis of durations up to ``largest_s`` seconds, with ticks at times that people count in."""
    largest_ms = max(largest_s * 1000, 10)
    unit_ms = 1 if largest_ms <= _FINE_UNIT_MAX_MS else SECOND_MS
    marks = [mark for mark in _DURATIONS if mark[0] == 0 or mark[0] >= unit_ms]
    top_ms = next((at_ms for at_ms, _ in marks if at_ms >= largest_ms), largest_ms)
    axis = Axis(top_ms / 1000, [], unit_ms / 1000)
    ticks: list[Tick] = []
    for at_ms, text in marks:
        at = axis.share(at_ms / 1000)
        if at_ms <= top_ms and (not ticks or at - ticks[-1].at >= _APART_MIN):
            ticks.append(Tick(at, text))
    return axis._replace(ticks=ticks)


def time_ticks(start_ms: int, end_ms: int, clock: Clock) -> list[Tick]:
    """Ticks on the axis of time from ``start_ms`` to ``end_ms``, at whole days, hours, minutes or seconds."""
    span_ms = end_ms - start_ms
    rough_ms = span_ms / TICKS_AIMED
    step_ms = next(
        (step for step in _TIME_STEPS_MS if step >= rough_ms), -(-span_ms // (TICKS_AIMED * DAY_MS)) * DAY_MS
    )
    moments = range(-(-start_ms // step_ms) * step_ms, end_ms, step_ms)
    return [
        Tick((at_ms - start_ms) / span_ms, _time(at_ms, step_ms, clock), is_minor=index % 2 == 1)
        for index, at_ms in enumerate(moments)
    ]


def hour_ticks() -> list[Tick]:
    """Ticks under 24 bars, one an hour; the text is centred under its bar."""
    return [Tick((hour + 0.5) / 24, f"{hour:02}", is_minor=hour % 3 != 0) for hour in range(24)]


def _time(at_ms: int, step_ms: int, clock: Clock) -> str:
    """The time of day if ticks are closer than a day; the date at midnight."""
    day, rest_ms = divmod(at_ms, DAY_MS)
    if rest_ms and step_ms < DAY_MS:
        form = "%H:%M" if step_ms >= MINUTE_MS else "%H:%M:%S"
        return (_EPOCH + timedelta(milliseconds=rest_ms)).strftime(form)
    if clock is Clock.TRACE:
        return f"day {day:,}"
    try:
        moment = _EPOCH + timedelta(milliseconds=at_ms)
    except OverflowError:
        return f"{at_ms:,}"
    return f"{moment.day} {moment:%b}" if step_ms < 300 * DAY_MS else f"{moment:%b} {moment.year}"


def _thousands(value: float) -> str:
    return f"{value / 1_000_000:g} M" if value >= 1_000_000 else f"{value:,.0f}"


# --- what they show ---------------------------------------------------------------------------------


OUTCOME_LABELS: Final = {
    "completed": "Completed",
    "cancelled": "Cancelled",
    "timed_out": "Timed out",
    "failed": "Failed",
}
"""From the bottom of a bar to its top; failures are at the top, where changes show."""
_RATE_OF: Final = {"cancelled": "cancellation_rate", "timed_out": "timeout_rate", "failed": "failure_rate"}
_NAME_MAX: Final = 24
_TICKS_APART_MIN: Final = 0.045
"""Ticks that are closer would stand on one another."""


def outcome_shares(row: Row) -> dict[str, float]:
    """Shares of the outcomes among the ended jobs of a group; empty if none ended."""
    return {name: row[name] / row["ended"] for name in OUTCOME_LABELS if row["ended"] and row[name]}


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
        """A plot without marks; ``texts`` are the tooltip lines of each window."""
        gaps = [at for at, row in enumerate(self.windows) if row["windows"] > 1]
        tips = [
            "\n".join([moment_text(row["window"], self.clock), *(self._empty(row) or texts[at])])
            for at, row in enumerate(self.windows)
        ]
        return {
            "title": title,
            "note": note,
            "label": label,
            "legend": legend,
            "tips": tips,
            "gaps": gaps,
            "x_ticks": _ticks(self.windows, self.width_ms, self.clock),
            "y": y,
            "bars": (),
            "lines": (),
        }

    def _empty(self, row: Row) -> list[str]:
        if row["windows"] == 1:
            return []
        end = moment_text(row["window"] + row["windows"] * self.width_ms, self.clock)
        return [f"until {end}", f"nothing happened, {count_text(row['open'])} jobs open"]


def _ticks(windows: list[Row], width_ms: int, clock: Clock) -> list[Tick]:
    """Ticks of the time that ``windows`` cover; none within a folded stretch."""
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


def figures(report: dict[str, Any], shown: dict[str, Any]) -> dict[str, Plot]:
    """The plots by name; ``tenants`` only if there are several."""
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
            Series(
                "all others" if tenant is None else cut(tenant, _NAME_MAX),
                "t-rest" if tenant is None else f"t{at}",
                counts,
            )
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
    plot = time.plot(*heading, label, linear_axis(max(map(sum, by_window))), texts, legend)
    return {**plot, "bars": [*_stacked(series)]}


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
    plot = time.plot(
        title, f"{what}, {time.per}, logarithmic scale", label, duration_axis(max(known, default=1)), texts, legend
    )
    return {**plot, "lines": _named_at_end(series, plot["y"])}


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
    return {
        "title": "Jobs that did not complete",
        "note": note,
        "label": label,
        "legend": legend,
        "tips": tips,
        "x_ticks": hour_ticks(),
        "y": y,
        "bars": [*_stacked(series)],
        "lines": (),
        "gaps": (),
    }
