"""Where the marks of plots stand: bars that are stacked, and lines of percentiles.

``plots.j2`` draws them as inline SVG, without script.

Across, positions are in percent, so a plot is as wide as its place and its text is never scaled; up and down they are
pixels. The axes are drawn into the padding that the style sheet gives ``svg.plot``. Colours, dashes and the patterns of
paper are the style sheet's: a series is known by its class alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Final, NamedTuple

from pipeline.report.period import DAY_MS, HOUR_MS, MINUTE_MS, SECOND_MS, WEEK_MS, Clock

HEIGHT: Final = 220
BAR_SHARE: Final = 0.82
"""How much of its slot a bar fills."""
VIEW: Final = 10_000
"""Width of the box that lines are stretched from."""
_LABEL_PX: Final = 15


class Series(NamedTuple):
    """One series of a plot; ``style`` is its class in the style sheet. None is no value."""

    label: str
    style: str
    values: Sequence[Any]


class Box(NamedTuple):
    """A rectangle: percent across, pixels down."""

    left: float
    width: float
    top: float = 0
    height: float = HEIGHT


class Line(NamedTuple):
    """One series as a path of ``VIEW`` by ``HEIGHT``, with a dot for each value that has no neighbour."""

    series: Series
    path: str
    dots: Sequence[tuple[float, float]]
    end_y: float | None
    """Where its name stands at its end, None where it has none."""


class Plot(NamedTuple):
    """One plot: what stands around it, its axes, the text of each slot under the pointer, and its bars or lines."""

    title: str
    note: str
    label: str
    """What it says to those who cannot see it."""
    x_ticks: Sequence[Tick]
    y: Axis
    tips: Sequence[str]
    gaps: Sequence[int] = ()
    """Slots that stand for a stretch in which nothing happened."""
    legend: Sequence[tuple[str, str]] = ()
    """Class and label of each series."""
    bars: Sequence[tuple[str, Sequence[Box]]] = ()
    lines: Sequence[Line] = ()

    def slot(self, at: int) -> Box:
        """The whole of a slot."""
        width = 100 / len(self.tips)
        return Box(at * width, width)


def stacked(plot: Plot, series: Sequence[Series]) -> Plot:
    """``plot`` with bars in each slot, one series on the other, the first at the bottom."""
    below, bars = [0.0] * len(plot.tips), []
    for each in series:
        boxes = []
        for at, value in enumerate(each.values):
            if value:
                slot = plot.slot(at)
                bottom, top = (HEIGHT * (1 - plot.y.share(total)) for total in (below[at], below[at] + value))
                left, width = slot.left + slot.width * (1 - BAR_SHARE) / 2, slot.width * BAR_SHARE
                boxes.append(Box(left, width, top, bottom - top))
                below[at] += value
        bars.append((each.style, boxes))
    return plot._replace(bars=bars)


def lines(plot: Plot, series: Sequence[Series]) -> Plot:
    """``plot`` with a line for each series through the middles of the slots, broken where there is no value, named at
    its end: names are moved apart so that none stands on another."""
    drawn, lowest = [_line(plot.y, each) for each in series], HEIGHT + float(_LABEL_PX)
    for at, line in sorted(enumerate(drawn), key=lambda each: -(each[1].end_y or 0)):
        if line.end_y is not None:
            lowest = min(line.end_y, lowest - _LABEL_PX)
            drawn[at] = line._replace(end_y=lowest)
    return plot._replace(lines=drawn)


def _line(y: Axis, series: Series) -> Line:
    values, steps, dots, end_y = series.values, [], [], None
    for at, value in enumerate(values):
        if value is None:
            continue
        x, end_y = (at + 0.5) / len(values), HEIGHT * (1 - y.share(value))
        is_joined = at > 0 and values[at - 1] is not None
        steps.append(f"{'L' if is_joined else 'M'}{x * VIEW:.0f} {end_y:.2f}")
        if not is_joined and (at + 1 == len(values) or values[at + 1] is None):
            dots.append((x * 100, end_y))
    return Line(series, "".join(steps), dots, end_y)


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
    """A mark on an axis; a minor one is left out where there is little room."""

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
    """An axis from 0 that reaches a round number at or above ``largest``, counts in whole steps, shares in percent."""
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
    text = _percent if is_share else _thousands
    return Axis(top, [Tick(at / count, text(step * at)) for at in range(count + 1)])


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
    first_ms = -(-start_ms // step_ms) * step_ms
    moments = range(first_ms, end_ms, step_ms)
    return [
        Tick((at_ms - start_ms) / span_ms, _time(at_ms, step_ms, clock), is_minor=index % 2 == 1)
        for index, at_ms in enumerate(moments)
    ]


def hour_ticks() -> list[Tick]:
    """Ticks under 24 bars, one an hour; the text stands under the middle of its bar."""
    return [Tick((hour + 0.5) / 24, f"{hour:02}", is_minor=hour % 3 != 0) for hour in range(24)]


def _time(at_ms: int, step_ms: int, clock: Clock) -> str:
    """The time of day where ticks stand closer than days, but at midnight, which begins the next day."""
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
    if value >= 1_000_000:
        return f"{value / 1_000_000:g} M"
    return f"{value:,.0f}"


def _percent(value: float) -> str:
    return f"{value * 100:.3g} %"
