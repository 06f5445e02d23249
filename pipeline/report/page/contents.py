"""What the page shows of the tables: read back from Parquet, cut to what a page can hold."""

from __future__ import annotations

from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path
from typing import Any, Final, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from pipeline.report import access
from pipeline.report.folder import Row, rows_of, table
from pipeline.report.summaries import OUTCOMES, PERCENTILES, SPANS

GROUPS_MAX: Final = 20
ROWS_MAX: Final = 15
TENANTS_PLOTTED: Final = 5
EMPTY_WINDOWS_MIN: Final = 4
"""So many windows in a row in which nothing happened are shown as one."""

_COUNTS: Final = ("created", "accepted", "ended", *OUTCOMES, *(f"{span}_jobs" for span in SPANS))
_RATES: Final = {"failure_rate": "failed", "cancellation_rate": "cancelled", "timeout_rate": "timed_out"}


class Groups(NamedTuple):
    """The largest groups of a table, and all others as one row; ``others`` is how many that row stands for."""

    rows: list[Row]
    rest: Row | None
    others: int


class Some(NamedTuple):
    """The first rows of a table, and how many it has."""

    rows: list[Row]
    all: int


class Contents(NamedTuple):
    """The tables as the page shows them; moments are in milliseconds."""

    windows: list[Row]
    """In order; ``windows`` is how many each stands for, more than 1 where nothing happened in any of them; ``open``
    is how many jobs were open when it ended."""
    tenants: Groups
    dcs: Groups
    hours: list[Row]
    by_tenant: list[tuple[str | None, list[int]]]
    """Jobs created in each window by the largest tenants; the last, of tenant None, by all others."""
    longest: list[Row]
    stuck: list[Row]
    cancelled: list[Row]
    cancellers: list[Row]
    reasons: Some
    labels: list[tuple[str, Some]]
    """The values of each field by which jobs are counted."""
    who: dict[str, Some]
    """The tables of ``pipeline.report.access``, by name."""
    ledger: list[Row]
    ledger_tenants: int
    measures: list[Row]
    """What running jobs counted; empty where no stats were given."""


def contents(report: dict[str, Any], folder: Path) -> Contents:
    """What the page on ``report`` shows of the tables in ``folder``."""
    opened = [row["open"] for row in rows_of(folder, "open")]
    every = [{**row, "open": opened[at]} for at, row in enumerate(_in_ms(rows_of(folder, "windows")))]
    windows = folded(every)
    tenants = largest(rows_of(folder, "tenants"), "tenant_id", "created")
    return Contents(
        windows,
        tenants,
        largest(rows_of(folder, "dcs"), "dc", "ended"),
        rows_of(folder, "hours"),
        _by_tenant(folder, windows, [row["tenant_id"] for row in tenants.rows[:TENANTS_PLOTTED]]),
        _in_ms(rows_of(folder, "longest", ROWS_MAX)),
        _in_ms(rows_of(folder, "stuck", ROWS_MAX)),
        _in_ms(rows_of(folder, "cancelled", ROWS_MAX)),
        rows_of(folder, "cancellers", ROWS_MAX),
        _some(folder, "reasons"),
        _labels(folder, report["by"]),
        {name: _some(folder, name) for name in access.TABLES},
        rows_of(folder, "ledger", GROUPS_MAX),
        report["read"]["tenants"],
        rows_of(folder, "measures", ROWS_MAX) if (folder / "parquet" / "measures").is_dir() else [],
    )


def _some(folder: Path, name: str) -> Some:
    return Some(_in_ms(rows_of(folder, name, ROWS_MAX)), table(folder, name).count_rows())


def folded(windows: list[Row]) -> list[Row]:
    """``windows`` with each stretch of ``EMPTY_WINDOWS_MIN`` or more in which nothing happened as one."""
    made: list[Row] = []
    for is_empty, stretch in groupby(windows, lambda row: not (row["created"] or row["accepted"] or row["ended"])):
        rows = list(stretch)
        if is_empty and len(rows) >= EMPTY_WINDOWS_MIN:
            made.append({**rows[0], "windows": len(rows)})
        else:
            made += ({**row, "windows": 1} for row in rows)
    return made


def _labels(folder: Path, names: list[str]) -> list[tuple[str, Some]]:
    rows = rows_of(folder, "labels") if names else []
    by_field = [(name, [row for row in rows if row["field"] == name]) for name in names]
    return [(name, Some(found[:GROUPS_MAX], len(found))) for name, found in by_field]


def largest(rows: list[Row], key: str, by: str) -> Groups:
    """The ``GROUPS_MAX`` groups with most ``by``; counts of the others are added, their percentiles are not known."""
    ordered = sorted(rows, key=lambda row: (-row[by], row[key] is None, row[key] or ""))
    kept, others = ordered[:GROUPS_MAX], ordered[GROUPS_MAX:]
    if not others:
        return Groups(kept, None, 0)
    rest: Row = {name: sum(row[name] for row in others) for name in _COUNTS}
    for rate, count in _RATES.items():
        rest[rate] = rest[count] / rest["ended"] if rest["ended"] else None
    rest |= {f"{span}_p{each}_s": None for span in SPANS for each in PERCENTILES}
    return Groups(kept, rest, len(others))


def _by_tenant(folder: Path, windows: list[Row], names: list[str]) -> list[tuple[str | None, list[int]]]:
    """One row of counts for each of ``names``, and one for what they leave of each window."""
    found = table(folder, "tenant_windows").to_table(
        columns=["window", "tenant_id", "created"], filter=pc.field("tenant_id").isin(pa.array(names, pa.string()))
    )
    counts = {(row["tenant_id"], row["window"]): row["created"] for row in _in_ms(found.to_pylist())}
    of_names = {name: [counts.get((name, window["window"]), 0) for window in windows] for name in names}
    rest = [window["created"] - sum(created[at] for created in of_names.values()) for at, window in enumerate(windows)]
    return [*of_names.items(), *([(None, rest)] if any(rest) else [])]


def _in_ms(rows: list[Row]) -> list[Row]:
    """``rows`` with moments in milliseconds, whichever clock they are of."""
    return [{name: _ms(name, value) for name, value in row.items()} for row in rows]


_MOMENTS: Final = frozenset(("window", "created", "accepted", "ended", "last_event", "cancel_requested"))


def _ms(name: str, value: Any) -> Any:
    if isinstance(value, datetime):
        moment = value if value.tzinfo is not None else value.replace(tzinfo=UTC)
        return round(moment.timestamp() * 1000)
    return round(value * 1000) if name in _MOMENTS and isinstance(value, float) else value
