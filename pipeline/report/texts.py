"""Moments, durations and counts in words for people; the same everywhere on the page. Pure."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Final

from pipeline.report.period import DAY_MS, HOUR_MS, MINUTE_MS, SECOND_MS, Clock

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_UNITS: Final = ((DAY_MS, "d"), (HOUR_MS, "h"), (MINUTE_MS, "min"), (SECOND_MS, "s"))
_ROUND_FROM_DAYS: Final = 100
NOTHING: Final = "–"


def moment_text(at_ms: int, clock: Clock) -> str:
    """A moment to the second: ``2026-11-21 13:45:07 UTC``, or ``day 12, 06:00:00`` of a trace."""
    return _moment(at_ms, clock, "%Y-%m-%d %H:%M:%S UTC", "%H:%M:%S")


def short_moment_text(at_ms: int, clock: Clock) -> str:
    """A moment to the minute, for tables."""
    return _moment(at_ms, clock, "%Y-%m-%d %H:%M", "%H:%M")


def window_text(at_ms: int, width_ms: int, clock: Clock) -> str:
    """Where a window begins, to the minute, or to the second where windows lie closer than minutes."""
    if width_ms % MINUTE_MS == 0:
        return short_moment_text(at_ms, clock)
    return _moment(at_ms, clock, "%Y-%m-%d %H:%M:%S", "%H:%M:%S")


def _moment(at_ms: int, clock: Clock, calendar: str, of_day: str) -> str:
    if clock is Clock.TRACE:
        day, rest_ms = divmod(at_ms, DAY_MS)
        return f"day {day:,}, {(_EPOCH + timedelta(milliseconds=rest_ms)).strftime(of_day)}"
    try:
        return (_EPOCH + timedelta(milliseconds=at_ms)).strftime(calendar)
    except OverflowError:
        return f"{at_ms:,} ms after 1970"


def duration_text(duration_s: float | None) -> str:
    """A duration in its two largest units, ``3 d 4 h``; under a minute to three digits, ``1.25 s``, ``17 ms``."""
    if duration_s is None:
        return NOTHING
    duration_ms = round(duration_s * 1000)
    if duration_ms < SECOND_MS:
        return f"{duration_ms} ms" if duration_ms else "0 s"
    if duration_ms < MINUTE_MS:
        return f"{duration_ms / SECOND_MS:.3g} s"
    for at, (unit_ms, name) in enumerate(_UNITS):
        if duration_ms < unit_ms:
            continue
        smaller_ms, smaller = _UNITS[at + 1]
        count, rest = divmod(round(duration_ms / smaller_ms), unit_ms // smaller_ms)
        if unit_ms == DAY_MS and count >= _ROUND_FROM_DAYS:
            return f"{round(duration_ms / DAY_MS):,} d"
        return f"{count:,} {name} {rest} {smaller}" if rest else f"{count:,} {name}"
    raise AssertionError("a minute is longer than a minute")


def width_text(width_ms: int) -> str:
    """The width of a window: ``1 day``, ``6 hours``."""
    for unit_ms, name in ((7 * DAY_MS, "week"), (DAY_MS, "day"), (HOUR_MS, "hour"), (MINUTE_MS, "minute")):
        if width_ms % unit_ms == 0:
            count = width_ms // unit_ms
            return f"{count:,} {name}s" if count > 1 else f"1 {name}"
    seconds = width_ms / SECOND_MS
    return "1 second" if seconds == 1 else f"{seconds:g} seconds"


def count_text(count: int | None) -> str:
    """A count with its thousands apart."""
    return NOTHING if count is None else f"{count:,}"


def amount_text(amount: float) -> str:
    """A sum or a rate, to three digits below a hundred."""
    return f"{amount:,.0f}" if amount >= 100 or amount == int(amount) else f"{amount:.3g}"


def rate_text(rate: float | None) -> str:
    """A share in percent; a rate above none never reads 0 %, one below all never 100 %."""
    if rate is None:
        return NOTHING
    if 0 < rate < 0.0005:
        return "<0.1 %"
    if 0.9995 <= rate < 1:
        return ">99.9 %"
    return f"{rate * 100:.1f} %" if rate not in (0, 1) else f"{rate * 100:.0f} %"
