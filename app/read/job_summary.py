"""The figures of jobs as ``GET /v1/jobs/summary`` shows them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, Final

from app.store.jobs.figures import BY_DAY, BY_HOUR, ERROR, Group, Wanted
from ledger import rfc3339
from ledger.machines.job_figures import HOUR_MAX, HOUR_MS, Extremes, run_times

Figures = tuple[Mapping[str, Group], Mapping[str, Group], int, Group | None]
"""The groups by status, the wanted groups, how many of these there are, and jobs whose value is not counted by
itself."""
NO_FIGURES: Final[Figures] = ({}, {}, 0, None)


def summary_of(
    wanted: Wanted, by_status: Mapping[str, Group], groups: Mapping[str, Group], found: int, other: Group | None
) -> dict[str, Any]:
    """The answer without its consistency."""
    return {
        "tenant_id": wanted.tenant_id,
        "by": wanted.by,
        "dc": wanted.dc or None,
        **dict(zip(("since", "until"), bounds_of(wanted), strict=True)),
        "all": _counted(by_status.values()),
        "groups": [{"value": _value(wanted.by, name), **_counted([group])} for name, group in groups.items()],
        "groups_left_out": found - len(groups),
        "other": None if other is None else _counted([other]),
    }


def bounds_of(wanted: Wanted) -> tuple[str | None, str | None]:
    """The first hour and the one after the last, None without a bound."""
    return (
        _hour(wanted.first) if wanted.first else None,
        _hour(wanted.below) if wanted.below <= HOUR_MAX else None,
    )


def _value(by: str, name: str) -> str | None:
    """The value that a group has in common; a value of a field may be the empty text, an error that is none has it."""
    if by in (BY_HOUR, BY_DAY):
        return _hour(int(name))
    return name if name or by != ERROR else None


def _counted(groups: Iterable[Group]) -> dict[str, Any]:
    statuses, runs, extremes, traced = Counter[str](), Counter[int](), Extremes(), 0
    for group in groups:
        statuses.update(group.statuses)
        runs.update(group.runs)
        extremes = extremes.joined(*group.extremes)
        traced += group.traced
    return {
        "jobs": statuses.total(),
        "by_trace_time": traced,
        "statuses": dict(sorted(statuses.items())),
        "run_times": None if (times := run_times(runs, extremes)) is None else times._asdict(),
    }


def _hour(hour: int) -> str | None:
    return rfc3339.text_of(hour * HOUR_MS)
