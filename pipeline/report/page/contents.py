"""What the page shows of the tables: read back from Parquet, cut to what a page can hold."""

from __future__ import annotations

from datetime import UTC, datetime
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
    tenants: Groups
    dcs: Groups
    hours: list[Row]
    by_tenant: list[tuple[str | None, list[int]]]
    """Jobs created in each window by the largest tenants; the last, of tenant None, by all others."""
    longest: list[Row]
    stuck: list[Row]
    cancelled: list[Row]
    cancellers: list[Row]
    who: dict[str, Some]
    """The tables of ``pipeline.report.access``, by name."""
    ledger: list[Row]
    ledger_tenants: int
    measures: list[Row]
    """What running jobs counted; empty where no stats were given."""


def contents(report: dict[str, Any], folder: Path) -> Contents:
    """What the page on ``report`` shows of the tables in ``folder``."""
    windows = _in_ms(rows_of(folder, "windows"))
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
        {name: _some(folder, name) for name in access.TABLES},
        rows_of(folder, "ledger", GROUPS_MAX),
        report["read"]["tenants"],
        rows_of(folder, "measures", ROWS_MAX) if (folder / "parquet" / "measures").is_dir() else [],
    )


def _some(folder: Path, name: str) -> Some:
    return Some(_in_ms(rows_of(folder, name, ROWS_MAX)), table(folder, name).count_rows())


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
