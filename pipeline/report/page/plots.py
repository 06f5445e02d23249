"""The plots of the page: their axes, and the positions of bars and lines in their slots.

``plots.j2`` says what each plot shows, and draws it as inline SVG, without script.

Horizontal positions are in percent, so a plot fills its width without scaling text; vertical positions are in
pixels. The axes are drawn into the padding of ``svg.plot``. The style sheet defines colours, dashes and print
patterns; a series has only a class.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Final, NamedTuple

from pipeline.page import DAY_MS, HOUR_MS, MINUTE_MS, SECOND_MS, WEEK_MS
from pipeline.report import Clock
from pipeline.report.folder import Row

HEIGHT: Final = 220
BAR_SHARE: Final = 0.82
"""How much of its slot a bar fills."""
VIEW: Final = 10_000
"""Width of the view box of lines."""
_LABEL_PX: Final = 15

Series = tuple[str, str, Sequence[Any]]
"""Label, class in the style sheet, and values of one series of a plot; None is no value."""


def series_of(rows: Sequence[Row], columns: Iterable[tuple[str, str, str]]) -> list[Series]:
    """A series of each of ``columns``: name, label and class."""
    return [(label, style, [row[name] for row in rows]) for name, label, style in columns]


def legend_of(series: Iterable[Series]) -> list[tuple[str, str]]:
    """Class and label of each series that has a value other than 0."""
    return [(style, label) for label, style, values in series if any(values)]


def stacked(series: Sequence[Series]) -> list[tuple[str, list[tuple[float, float]]]]:
    """Stacked bars, the first series at the bottom: its class, and where each of its bars begins and ends."""
    bars, below = [], [0.0] * len(series[0][2])
    for _, style, values in series:
        above = [start + (value or 0) for start, value in zip(below, values, strict=True)]
        bars.append((style, [*zip(below, above, strict=True)]))
        below = above
    return bars


def named_at_end(series: Sequence[Series], y: Axis) -> list[tuple[Series, float | None]]:
    """Lines with the positions of their names, moved apart so that none overlap."""
    known = ([value for value in values if value is not None] for _, _, values in series)
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


HOUR_TICKS: Final = [Tick((hour + 0.5) / 24, f"{hour:02}", is_minor=hour % 3 != 0) for hour in range(24)]
"""Under 24 bars, one an hour; the text is centred under its bar."""


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


def _time(at_ms: int, step_ms: int, clock: Clock) -> str:
    """The time of day if ticks are closer than a day; the date at midnight."""
    day, rest_ms = divmod(at_ms, DAY_MS)
    if rest_ms and step_ms < DAY_MS:
        return (_EPOCH + timedelta(milliseconds=rest_ms)).strftime("%H:%M" if step_ms >= MINUTE_MS else "%H:%M:%S")
    if clock is Clock.TRACE:
        return f"day {day:,}"
    try:
        moment = _EPOCH + timedelta(milliseconds=at_ms)
    except OverflowError:
        return f"{at_ms:,}"
    return f"{moment.day} {moment:%b}" if step_ms < 300 * DAY_MS else f"{moment:%b} {moment.year}"


def _thousands(value: float) -> str:
    return f"{value / 1_000_000:g} M" if value >= 1_000_000 else f"{value:,.0f}"


_TICKS_APART_MIN: Final = 0.045
"""Ticks that are closer would stand on one another."""


def window_ticks(windows: list[Row], width_ms: int, clock: Clock) -> list[Tick]:
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
