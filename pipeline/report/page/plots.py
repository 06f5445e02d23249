"""Plots as inline SVG, without script: bars that are stacked, and lines of percentiles.

Across, positions are in percent, so a plot is as wide as its place and its text is never scaled; up and down they are
pixels. The axes are drawn into the padding that the style sheet gives ``svg.plot``. Colours, dashes and the patterns of
paper are the style sheet's: a series is known by its class alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from markupsafe import Markup, escape

from pipeline.report.page.axes import Axis, Tick

HEIGHT: Final = 220
BAR_SHARE: Final = 0.82
"""How much of its slot a bar fills."""
_VIEW: Final = 10_000
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


def stacked(frame: Frame, series: Sequence[Series]) -> Markup:
    """Bars of each slot, one series on the other, the first at the bottom."""
    count = len(frame.tips)
    slot, parts = 100 / count, [_grid(frame)]
    width = slot * BAR_SHARE
    for each in series:
        parts.append(Markup('<g class="mark {}">').format(each.style))
        for at, value in enumerate(each.values):
            if not value:
                continue
            below = sum(other.values[at] or 0 for other in series[: list(series).index(each)])
            top, bottom = (HEIGHT * (1 - frame.y.share(total)) for total in (below + value, below))
            left = at * slot + (slot - width) / 2
            parts.append(_rect(left, width, top, bottom - top))
        parts.append(Markup("</g>"))
    parts.append(_slots(frame.tips))
    return _svg(frame.label, parts)


def lines(frame: Frame, series: Sequence[Series]) -> Markup:
    """A line for each series through the middles of the slots, broken where there is no value, named at its end."""
    count, parts, ends = len(frame.tips), [_grid(frame)], []
    for each in series:
        points = [
            None if value is None else ((at + 0.5) / count, 1 - frame.y.share(value))
            for at, value in enumerate(each.values)
        ]
        parts.append(_path(points, each.style))
        known = [point for point in points if point is not None]
        if known:
            ends.append((known[-1][1] * HEIGHT, each))
    parts += _end_labels(ends)
    parts.append(_slots(frame.tips))
    return _svg(frame.label, parts, "plot lines")


def share_bar(shares: Sequence[tuple[str, float]], label: str) -> Markup:
    """A small bar of 100 % for a table; ``shares`` are (style, share) from left to right."""
    left, parts = 0.0, []
    for style, share in shares:
        if share > 0:
            parts.append(Markup('<g class="mark {}">{}</g>').format(style, _rect(left * 100, share * 100, 0, 12)))
        left += share
    return Markup('<svg class="share" role="img" aria-label="{}" height="12">{}</svg>').format(
        label, Markup("").join(parts)
    )


def _svg(label: str, parts: Sequence[Markup], style: str = "plot") -> Markup:
    body = Markup("").join(parts)
    return Markup('<svg class="{}" role="img" aria-label="{}" height="{}">{}</svg>').format(style, label, HEIGHT, body)


def _grid(frame: Frame) -> Markup:
    parts = []
    for tick in frame.y.ticks:
        y = round(HEIGHT * (1 - tick.at), 1)
        style = "base" if tick.at == 0 else "grid"
        parts.append(Markup('<line class="{}" x1="0" x2="100%" y1="{}" y2="{}"/>').format(style, y, y))
        parts.append(Markup('<text class="y" x="-8" y="{}" dy=".32em">{}</text>').format(y, tick.text))
    for tick in frame.x_ticks:
        x, minor = f"{tick.at * 100:.3f}%", " minor" if tick.is_minor else ""
        parts.append(
            Markup('<line class="tick{}" x1="{}" x2="{}" y1="{}" y2="{}"/>').format(minor, x, x, HEIGHT, HEIGHT + 5)
        )
        parts.append(Markup('<text class="x{}" x="{}" y="{}">{}</text>').format(minor, x, HEIGHT + 19, tick.text))
    return Markup("").join(parts)


def _rect(left: float, width: float, top: float, height: float) -> Markup:
    return Markup('<rect x="{:.3f}%" width="{:.3f}%" y="{:.2f}" height="{:.2f}"/>').format(left, width, top, height)


def _slots(tips: Sequence[str]) -> Markup:
    """Unseen bars over the slots that tell the numbers under the pointer."""
    slot = 100 / len(tips)
    rects = [
        Markup('<rect x="{:.3f}%" width="{:.3f}%" y="0" height="{}"><title>{}</title></rect>').format(
            at * slot, slot, HEIGHT, tip
        )
        for at, tip in enumerate(tips)
    ]
    return Markup('<g class="slots">{}</g>').format(Markup("").join(rects))


def _path(points: Sequence[tuple[float, float] | None], style: str) -> Markup:
    """The line, and a dot for a value that has no neighbour."""
    steps, dots = [], []
    for at, point in enumerate(points):
        if point is None:
            continue
        before = points[at - 1] if at else None
        after = points[at + 1] if at + 1 < len(points) else None
        steps.append(f"{'L' if before else 'M'}{point[0] * _VIEW:.0f} {point[1] * HEIGHT:.2f}")
        if before is None and after is None:
            dots.append(
                Markup('<circle class="{}" cx="{:.3f}%" cy="{:.2f}" r="2.5"/>').format(
                    style, point[0] * 100, point[1] * HEIGHT
                )
            )
    line = (
        Markup('<path class="line {}" d="{}"/>').format(style, "".join(steps)) if len(steps) > len(dots) else Markup()
    )
    return Markup(
        '<svg class="stretch" viewBox="0 0 {} {}" preserveAspectRatio="none" width="100%" height="{}">{}</svg>{}'
    ).format(_VIEW, HEIGHT, HEIGHT, line, Markup("").join(dots))


def _end_labels(ends: Sequence[tuple[float, Series]]) -> list[Markup]:
    """The names of lines at their ends, moved apart so that none stands on another."""
    placed: list[Markup] = []
    lowest: float = HEIGHT + _LABEL_PX
    for y, each in sorted(ends, key=lambda end: -end[0]):
        at = min(y, lowest - _LABEL_PX)
        lowest = at
        placed.append(
            Markup('<text class="end {}" x="100%" dx="8" y="{:.1f}" dy=".32em">{}</text>').format(
                each.style, at, escape(each.label)
            )
        )
    return placed
