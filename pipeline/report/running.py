"""What running jobs reported of their work, out of windows that ``tally pipeline stats`` wrote, in those of a report.

A window of the stats counts in the window of the report that it begins in. What can be added up is taken: the reports
themselves, and what they counted by name.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from pyspark.sql import functions as F  # noqa: N812

from pipeline.report.folder import in_order, write_table
from pipeline.report.jobs import moment
from pipeline.report.period import SECOND_MS, Period

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

TABLES: Final = ("measures", "measure_windows")
_SUMMED: Final = ("reports", "count")


def write(stats: DataFrame, tenants: Sequence[str], period: Period, folder: Path) -> None:
    """Write the tables of what was reported within ``period``, of ``tenants`` or, when empty, of all."""
    windows = by_window(stats, tenants, period).persist()
    write_table(measures(windows, period), folder, "measures")
    write_table(shown(windows, period), folder, "measure_windows")
    windows.unpersist()


def by_window(stats: DataFrame, tenants: Sequence[str], period: Period) -> DataFrame:
    """``window_ms, tenant_id, dc, what, name, amount`` of the columns of ``pipeline.stats.read``."""
    at_ms = F.unix_millis("window_start")
    rows = stats.where(F.col("what").isin(*_SUMMED) & (at_ms >= period.start_ms) & (at_ms < period.end_ms))
    if tenants:
        rows = rows.where(F.col("tenant_id").isin(*tenants))
    window = period.first_window_ms + F.floor((at_ms - period.first_window_ms) / period.window_ms) * period.window_ms
    grouped = rows.groupBy(window.alias("window_ms"), "tenant_id", F.col("dc_id").alias("dc"), "what", "name")
    return grouped.agg(F.sum("sum").alias("amount"))


def measures(windows: DataFrame, period: Period) -> DataFrame:
    """One row a name: how much in all, on average over the period and in its best window, and from how many."""
    whole = windows.groupBy("what", "name").agg(
        F.sum("amount").alias("amount"),
        F.count_distinct("tenant_id").alias("tenants"),
        F.count_distinct("dc").alias("dcs"),
    )
    each = windows.groupBy("what", "name", "window_ms").agg(F.sum("amount").alias("amount"))
    best = each.groupBy("what", "name").agg(F.max("amount").alias("most"))
    span_s, window_s = (period.end_ms - period.start_ms) / SECOND_MS, period.window_ms / SECOND_MS
    rows = whole.join(best, ["what", "name"]).select(
        "what",
        "name",
        "amount",
        (F.col("amount") / span_s).alias("per_second"),
        (F.col("most") / window_s).alias("most_per_second"),
        "tenants",
        "dcs",
    )
    return in_order(rows, F.desc("what"), F.desc("amount"), "name")


def shown(windows: DataFrame, period: Period) -> DataFrame:
    """The windows as they are written, with the rate in each."""
    rate = F.col("amount") / (period.window_ms / SECOND_MS)
    ordered = in_order(windows, "window_ms", "tenant_id", "dc", F.desc("what"), "name")
    return ordered.select(
        moment("window_ms", period.clock).alias("window"),
        *("tenant_id", "dc", "what", "name", "amount"),
        rate.alias("per_second"),
    )
