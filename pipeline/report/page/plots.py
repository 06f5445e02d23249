"""Where the marks of plots stand: bars that are stacked, and lines of percentiles.

``plots.j2`` draws them as inline SVG, without script.

Across, positions are in percent, so a plot is as wide as its place and its text is never scaled; up and down they are
pixels. The axes are drawn into the padding that the style sheet gives ``svg.plot``. Colours, dashes and the patterns of
paper are the style sheet's: a series is known by its class alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from pipeline.report.page.axes import Axis, Tick

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
    values: Sequence[float | None]


class Frame(NamedTuple):
    """What a plot is drawn in: its axes, what it says to those who cannot see it, and the text of each slot."""

    label: str
    x_ticks: Sequence[Tick]
    y: Axis
    tips: Sequence[str]
    gaps: Sequence[int] = ()
    """Slots that stand for a stretch in which nothing happened."""


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
    """What is drawn in a frame: bars by style, or lines."""

    frame: Frame
    bars: Sequence[tuple[str, Sequence[Box]]] = ()
    lines: Sequence[Line] = ()

    @property
    def slots(self) -> list[tuple[Box, str]]:
        """The whole of each slot, and what it tells under the pointer."""
        width = 100 / len(self.frame.tips)
        return [(Box(at * width, width), tip) for at, tip in enumerate(self.frame.tips)]

    @property
    def gaps(self) -> list[Box]:
        """The slots in which nothing happened."""
        width = 100 / len(self.frame.tips)
        return [Box(at * width, width) for at in self.frame.gaps]


def stacked(frame: Frame, series: Sequence[Series]) -> Plot:
    """Bars of each slot, one series on the other, the first at the bottom."""
    slot = 100 / len(frame.tips)
    width, below, bars = slot * BAR_SHARE, [0.0] * len(frame.tips), []
    for each in series:
        boxes = []
        for at, value in enumerate(each.values):
            if value:
                bottom, top = (HEIGHT * (1 - frame.y.share(total)) for total in (below[at], below[at] + value))
                boxes.append(Box(at * slot + (slot - width) / 2, width, top, bottom - top))
                below[at] += value
        bars.append((each.style, boxes))
    return Plot(frame, bars=bars)


def lines(frame: Frame, series: Sequence[Series]) -> Plot:
    """A line for each series through the middles of the slots, broken where there is no value, named at its end: names
    are moved apart so that none stands on another."""
    drawn, lowest = [_line(frame, each) for each in series], HEIGHT + float(_LABEL_PX)
    for at, line in sorted(enumerate(drawn), key=lambda each: -(each[1].end_y or 0)):
        if line.end_y is not None:
            lowest = min(line.end_y, lowest - _LABEL_PX)
            drawn[at] = line._replace(end_y=lowest)
    return Plot(frame, lines=drawn)


def _line(frame: Frame, series: Series) -> Line:
    values, steps, dots, end_y = series.values, [], [], None
    for at, value in enumerate(values):
        if value is None:
            continue
        x, end_y = (at + 0.5) / len(values), HEIGHT * (1 - frame.y.share(value))
        is_joined = at > 0 and values[at - 1] is not None
        steps.append(f"{'L' if is_joined else 'M'}{x * VIEW:.0f} {end_y:.2f}")
        if not is_joined and (at + 1 == len(values) or values[at + 1] is None):
            dots.append((x * 100, end_y))
    return Line(series, "".join(steps), dots, end_y)
