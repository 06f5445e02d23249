"""What one job counts as in the figures of its tenant, and the run times that such figures keep.

A *figure* is all that a job adds to the counts, besides its status and run time: a JSON array, one text for jobs that
count alike::

    [hour, traced, dcs, error, fields]           trailing nulls are left out

    hour      of its creation, since 1970
    traced    1 if that is the time of a trace (``trace_time``), 0 if it is that of the HLC
    dcs       the data centres that it is assigned to or that accepted it, in order; none if they are more than DCS_MAX
    error     the text with which it failed or timed out
    fields    the texts of each declared search field inside the spec, by field

Of each text its first TEXT_CHARACTERS_MAX characters are kept. A longer name of a field is a hash of it, as no two
fields may have one name.

For example ``[473211,0,["use1"],"OOMKilled"]``. A job without a creation has no figure: no list has it.

*Run time* is from the first acceptance to the end that counts: of the acceptances whose fence is the highest that is
not above that of the end, since a job that is tried again runs again. It is by the clock of a trace if all of these
events carry a ``trace_time``, else by HLC. A job that no data centre accepted has none, nor has one that ends before it
starts.

*Classes* of run times: ``BOUNDS_MS[k] <= run time < BOUNDS_MS[k + 1]``, where both bounds differ by 1 ms or by at most
2 %, so the middle of a class is within 1 % of all its times. Counts by class add up and can be subtracted
(as DDSketch, Masson, Rim and Lee 2019), and integers give the same classes on all machines.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate, chain, pairwise, takewhile
from typing import Any, Final, NamedTuple

import orjson

from ledger.facts.statuses import FAILED, TIMED_OUT
from ledger.machines.job_search import SEARCHED, texts_of
from ledger.machines.jobs import JobState

HOUR_MS: Final = 3_600_000
PERIODS_HOURS: Final = (1, 24, 768)
"""Lengths of the periods by which jobs are counted; each divides the next."""
HOUR_MAX: Final = 2**31 // PERIODS_HOURS[-1] * PERIODS_HOURS[-1] - 1
"""Latest hour of a figure; edited rows may name later ones."""
TEXT_CHARACTERS_MAX: Final = 128
"""Longest text in a figure, so that an index can hold three of them."""
DCS_MAX: Final = 16
"""A job of more data centres counts in none of them: it would be six lines and more for each."""
VALUES_MAX: Final = 1000
"""Most values of a field that are counted by themselves among jobs of one of the longest periods: the first in the
log."""
RUN_MS_MAX: Final = 2**53
"""Longest run time; longer ones count as this."""
FAILURES: Final = (FAILED, TIMED_OUT)
"""The statuses of jobs that have an error."""


def _bounds() -> Iterator[int]:
    bound = 0
    while True:
        yield bound
        bound = max(bound + 1, bound * 102 // 100)


BOUNDS_MS: Final = (*takewhile(lambda bound: bound < 2 * RUN_MS_MAX, _bounds()),)
"""Lower bounds of the classes of run times."""
assert all(after - before <= max(1, before * 0.02) for before, after in pairwise(BOUNDS_MS))


def run_class(run_ms: int) -> int:
    """The class of a run time."""
    return bisect_right(BOUNDS_MS, min(run_ms, RUN_MS_MAX)) - 1


def middle_ms(of_class: int) -> int:
    """A time within 1 % of all of this class."""
    return (BOUNDS_MS[of_class] + BOUNDS_MS[of_class + 1] - 1) // 2


class Extremes(NamedTuple):
    """The shortest and the longest of some run times; None without any."""

    min_ms: int | None = None
    max_ms: int | None = None

    def joined(self, *others: int | None) -> Extremes:
        """The extremes of these and ``others``."""
        known = [each for each in (*self, *others) if each is not None]
        return Extremes(min(known), max(known)) if known else self


class RunTimes(NamedTuple):
    """Run times of so many jobs: exact extremes, and percentiles within 1 %; the ``p``-th is the least that ``p`` % do
    not exceed."""

    jobs: int
    min_ms: int
    p50_ms: int
    p95_ms: int
    max_ms: int


def run_times(counts: Mapping[int, int], extremes: Extremes) -> RunTimes | None:
    """The run times of which so many are in each class; None without any."""
    classes = sorted([of_class for of_class, jobs in counts.items() if jobs > 0])
    upto = list(accumulate(map(counts.__getitem__, classes)))
    if not classes:
        return None
    jobs = upto[-1]
    p50_ms, p95_ms = (middle_ms(classes[bisect_right(upto, (jobs * percent + 99) // 100 - 1)]) for percent in (50, 95))
    # Only edited cells have no extremes.
    min_ms = p50_ms if extremes.min_ms is None else extremes.min_ms
    max_ms = p95_ms if extremes.max_ms is None else extremes.max_ms
    return RunTimes(jobs, min_ms, max(min_ms, min(p50_ms, max_ms)), max(min_ms, min(p95_ms, max_ms)), max_ms)


def figure_of(state: JobState, status: str, fields: Collection[str] = ()) -> str | None:
    """The figure of a job of this status, whose tenant is searched by ``fields``."""
    if (created := state.created) is None:
        return None
    hour, dcs = _hour(created.order[0], created.traced_ms), _dcs(created.assigned_dcs, state.accepted)
    error = None
    if state.end is not None and status in FAILURES:
        text = state.end.outcome.get("error")
        error = kept(text) if isinstance(text, str) else None
    if not fields:
        return _figure(hour, created.traced_ms is not None, dcs, error)
    found = {
        counted_name(field): sorted({kept(text) for text in texts_of(state, (*field.split("."),))})
        for field in sorted(fields)
        if field.startswith(SEARCHED)
    }
    return _json([hour, int(created.traced_ms is not None), dcs, error, found])


def figure_of_new(physical_ms: int, traced_ms: int | None, assigned_dcs: Sequence[str]) -> str:
    """The figure of a job that was only created, at this HLC, whose tenant is searched by no fields."""
    return _figure(_hour(physical_ms, traced_ms), traced_ms is not None, _dcs(assigned_dcs, ()), None)


def _hour(physical_ms: int, traced_ms: int | None) -> int:
    return min(max((physical_ms if traced_ms is None else traced_ms) // HOUR_MS, 0), HOUR_MAX)


def _dcs(assigned: Sequence[str], accepted: Collection[str]) -> tuple[str, ...]:
    if not accepted and len(assigned) == 1 and assigned[0] and kept(assigned[0]) == assigned[0]:
        return (assigned[0],)
    dcs = sorted({kept(dc) for dc in (*assigned, *accepted) if dc})
    return (*dcs,) if len(dcs) <= DCS_MAX else ()


class Figure(NamedTuple):
    """A figure that was read."""

    hour: int
    traced: int
    dcs: tuple[str, ...]
    error: str | None
    values: tuple[tuple[str, str], ...]
    """Of each declared field, by field."""


def read_figure(text: str) -> Figure | None:
    """The figure in a stored text; None for an edited one that holds none."""
    try:
        hour, traced, dcs, error, fields = (*orjson.loads(text), None, None)[:5]
        values = tuple((field, value) for field, of_field in (fields or {}).items() for value in of_field)
        is_figure = (
            hour.__class__ is int
            and 0 <= hour <= HOUR_MAX
            and traced in (0, 1)
            and all(isinstance(text, str) and kept(text) == text for text in (*dcs, error or "", *chain(*values)))
        )
    except (ValueError, TypeError, AttributeError):
        return None
    return Figure(hour, traced, tuple(dcs), error, values) if is_figure else None


def without_fields(figure: str | None) -> str | None:
    """The figure without its fields; a text that is no figure as it is."""
    try:
        parts = orjson.loads(figure or "null")
    except orjson.JSONDecodeError:
        return figure
    return _json(parts[:4]) if isinstance(parts, list) else figure


def kept(text: str) -> str:
    """The part of a text that figures keep; PostgreSQL reads no U+0000."""
    return text[:TEXT_CHARACTERS_MAX].replace("\0", "\ufffd")


def counted_name(field: str) -> str:
    """The name of a field in figures."""
    return field if kept(field) == field else hashlib.sha256(field.encode()).hexdigest()


@lru_cache(maxsize=4096)
def _figure(hour: int, is_traced: bool, dcs: tuple[str, ...], error: str | None) -> str:
    return _json([hour, int(is_traced), dcs, error])


def _json(parts: list[Any]) -> str:
    while parts and parts[-1] in (None, {}):
        parts.pop()
    return orjson.dumps(parts).decode()
