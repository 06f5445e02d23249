"""Job analytics over a period: tables, headline numbers and one page, from the entries of any number of tenants.

Entries are read once. Their facts become one row a job; the report's clock turns it into events with times
(``jobs``), and these become the tables (``tables``). Senders, and recorded reads, acts and refusals, become tables
too (``access``). The tables are written as Parquet. The CSV files, the headline numbers and the page are built from
these files, without Spark.

This module holds the period of a report: its clock, bounds and windows. Its functions are pure.

An event has a time on one of two clocks. ``hlc`` is the ledger's own: the time at which it was recorded. ``trace``
is that of a replayed trace: ``trace_time`` in the payload, in seconds since the trace started; the ledger's clock
then only shows the speed of the replay. They cannot be mixed on one axis, so a report uses one of them:

- a bound selects one: an RFC 3339 time or an HLC the ledger's, a plain number the trace's;
- else the trace's is used if every job event has a trace time, as then no event was recorded live.

Invariants::

    start_ms < end_ms        1 <= (end_ms - first_window_ms) / window_ms <= WINDOWS_MAX        known_ms <= end_ms
"""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Final, NamedTuple

from ledger.errors import InvalidInputError
from ledger.hlc import Hlc
from pipeline.page import DAY_MS, HOUR_MS, MINUTE_MS, SECOND_MS, WEEK_MS

WINDOWS_MAX: Final = 400
"""Most windows of a report; a plot of more cannot be read."""
WINDOWS_AIMED: Final = 60
"""Approximate number of windows if no width is given."""

_WIDTHS_MS: Final = (
    *(SECOND_MS * n for n in (1, 2, 5, 10, 30)),
    *(MINUTE_MS * n for n in (1, 2, 5, 10, 30)),
    *(HOUR_MS * n for n in (1, 2, 6, 12)),
    *(DAY_MS * n for n in (1, 2)),
    *(WEEK_MS * n for n in (1, 2, 4, 13, 52)),
)
_MONDAY_MS: Final = 4 * DAY_MS
"""1970-01-05 was a Monday; windows of whole weeks start on Mondays."""
UNITS_MS: Final = {"ms": 1, "s": SECOND_MS, "m": MINUTE_MS, "h": HOUR_MS, "d": DAY_MS, "w": WEEK_MS}
_DURATION: Final = re.compile(r"([0-9]{1,12}(?:\.[0-9]{1,6})?)(ms|s|m|h|d|w)")
_NUMBER: Final = re.compile(r"-?[0-9]{1,12}(?:\.[0-9]{1,6})?")
_MOMENT_MAX: Final = 10**17
"""In milliseconds; the limit of a report, so that widths and sums stay small."""


class Clock(StrEnum):
    """The clock a report is on."""

    HLC = "hlc"
    TRACE = "trace"


Bound = tuple[Clock, int]
"""A requested bound of the period, in milliseconds of its clock."""


class Asked(NamedTuple):
    """The requested part of the period; the rest follows from the data."""

    clock: Clock | None = None
    start_ms: int | None = None
    end_ms: int | None = None
    window_ms: int | None = None


class Period(NamedTuple):
    """``start_ms <= t < end_ms``, in milliseconds since 1970 or since the trace began; windows are contiguous.

    The first window may start before the period, the last end after it. ``known_ms`` is the end of the data: the end
    of the period, or the time of the report if that is earlier. Open jobs are judged as of then.
    """

    clock: Clock
    start_ms: int
    end_ms: int
    window_ms: int
    first_window_ms: int
    known_ms: int


def parse_bound(option: str, text: str) -> Bound:
    """The moment that ``text`` names: an RFC 3339 time, an HLC, or a number of seconds since the trace began.

    Raises:
        InvalidInputError: it is none of them, or too far away; the text names ``option``.
    """
    if _NUMBER.fullmatch(text):
        return Clock.TRACE, round(float(text) * SECOND_MS)
    try:
        if ":" in text and "-" not in text[:5]:
            at_ms = Hlc.parse(text).physical_ms
        else:
            moment = datetime.fromisoformat(text)
            at_ms = round((moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp() * SECOND_MS)
    except (ValueError, InvalidInputError):
        raise InvalidInputError(
            f"{option} {text[:100]!r} is no time: write 2026-01-31T00:00:00Z, an HLC, or seconds of a trace"
        ) from None
    if at_ms > _MOMENT_MAX:
        raise InvalidInputError(f"{option} {text[:100]} lies millions of years away")
    return Clock.HLC, at_ms


def parse_duration(option: str, text: str) -> int:
    """Milliseconds of ``text``, such as 90s, 15m, 6h, 1d or 1w.

    Raises:
        InvalidInputError: it is no duration, or shorter than a millisecond; the text names ``option``.
    """
    if (match := _DURATION.fullmatch(text)) is None:
        raise InvalidInputError(f"{option} {text[:100]!r} is no duration: write it as 90s, 15m, 6h, 1d or 1w")
    if (duration_ms := round(float(match[1]) * UNITS_MS[match[2]])) == 0:
        raise InvalidInputError(f"{option} {text} is no time at all: the shortest is 1ms")
    if duration_ms > _MOMENT_MAX:
        raise InvalidInputError(f"{option} {text} reaches further than any report")
    return duration_ms


def asked(clock: Clock | None, start: str | None, end: str | None, window: str | None) -> Asked:
    """The request of the options; with ``clock`` None the bounds or the data decide.

    Raises:
        InvalidInputError: a value is malformed, the bounds are of two clocks or not of ``clock``, or there would be
            too many windows.
    """
    bounds = [None if text is None else parse_bound(name, text) for name, text in (("--from", start), ("--to", end))]
    clocks = {bound[0] for bound in bounds if bound is not None} | ({clock} if clock is not None else set())
    if len(clocks) > 1:
        raise InvalidInputError(
            "--from, --to and --time must be of one clock: RFC 3339 times and HLCs are of --time hlc, plain seconds "
            "of --time trace"
        )
    start_ms, end_ms = (None if bound is None else bound[1] for bound in bounds)
    if start_ms is not None and end_ms is not None and start_ms >= end_ms:
        raise InvalidInputError("--from must lie before --to")
    wanted = Asked(
        next(iter(clocks), None), start_ms, end_ms, None if window is None else parse_duration("--window", window)
    )
    if wanted.clock is not None and start_ms is not None and end_ms is not None:
        choose_period(wanted, wanted.clock, start_ms, end_ms, end_ms)
    return wanted


def choose_period(asked: Asked, clock: Clock, first_ms: int, last_ms: int, now_ms: int) -> Period:
    """The period of a report on events from ``first_ms`` to ``last_ms``; it ends just after the last event.

    ``now_ms`` is the time of the report on the ledger's clock, whatever ``clock`` is.

    Raises:
        InvalidInputError: there would be more than ``WINDOWS_MAX`` windows, or all events lie outside the bounds.
    """
    start_ms = first_ms if asked.start_ms is None else asked.start_ms
    end_ms = last_ms + 1 if asked.end_ms is None else asked.end_ms
    if start_ms >= end_ms:
        after, before = "--from lies after the last", "--to lies before the first"
        raise InvalidInputError(f"{after if asked.end_ms is None else before} job event there is")
    if max(abs(start_ms), abs(end_ms)) > _MOMENT_MAX:
        raise InvalidInputError("an event's time is millions of years away; bound the report with --from and --to")
    window_ms = asked.window_ms or _width_for(end_ms - start_ms)
    origin_ms = _MONDAY_MS if clock is Clock.HLC and window_ms % WEEK_MS == 0 else 0
    first_window_ms = start_ms - (start_ms - origin_ms) % window_ms
    count = -((first_window_ms - end_ms) // window_ms)
    if count > WINDOWS_MAX:
        raise InvalidInputError(
            f"--window makes {count:,} windows of this period, at most {WINDOWS_MAX} can be shown: make it longer"
        )
    heard_ms = last_ms + 1 if clock is Clock.TRACE else max(last_ms + 1, now_ms)
    return Period(clock, start_ms, end_ms, window_ms, first_window_ms, min(end_ms, heard_ms))


def _width_for(span_ms: int) -> int:
    longest_ms = -(-span_ms // (_WIDTHS_MS[-1] * WINDOWS_AIMED)) * _WIDTHS_MS[-1]
    return next((width_ms for width_ms in _WIDTHS_MS if span_ms <= width_ms * WINDOWS_AIMED), longest_ms)


# --- in words -------------------------------------------------------------------------------------


_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


def moment_text(at_ms: int, clock: Clock, of_day: str = "%H:%M:%S", zone: str = " UTC") -> str:
    """A moment, by default to the second: ``2026-11-21 13:45:07 UTC``, or ``day 12, 06:00:00`` of a trace."""
    if clock is Clock.TRACE:
        day, rest_ms = divmod(at_ms, DAY_MS)
        return f"day {day:,}, {(_EPOCH + timedelta(milliseconds=rest_ms)).strftime(of_day)}"
    try:
        return (_EPOCH + timedelta(milliseconds=at_ms)).strftime(f"%Y-%m-%d {of_day}{zone}")
    except OverflowError:
        return f"{at_ms:,} ms after 1970"


def width_text(width_ms: int) -> str:
    """The width of a window: ``1 day``, ``6 hours``."""
    for unit_ms, name in ((7 * DAY_MS, "week"), (DAY_MS, "day"), (HOUR_MS, "hour"), (MINUTE_MS, "minute")):
        if width_ms % unit_ms == 0:
            count = width_ms // unit_ms
            return f"{count:,} {name}s" if count > 1 else f"1 {name}"
    seconds = width_ms / SECOND_MS
    return "1 second" if seconds == 1 else f"{seconds:g} seconds"


def amount_text(amount: float) -> str:
    """A sum or a rate, to three digits below a hundred."""
    return f"{amount:,.0f}" if amount >= 100 or amount == int(amount) else f"{amount:.3g}"
