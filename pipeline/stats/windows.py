"""Reports put together by tenant, data centre and window of event time.

Each report is taken apart into measures, ``(what, name, amount)``::

    reports   that it came                           summed, times its weight
    total     completed, failed: totals so far       highest of each (job, workflow), these summed; never weighted
    count     what happened in its interval          summed, times its weight
    value     what was measured                      mean, least, most, percentiles; each counted weight times

Two stages, so that the state of a window is small: first by (job, workflow), or for values by what they are to three
significant digits; then by data centre. A window closes ``2 * watermark`` behind the newest time: whoever is not late
(``pipeline.stats.lines``) comes before that, unless files come in another order than they were closed in, by more than
the watermark. Sums are binary64: a 64-bit integer would overflow, and end the stream, for what anybody may send.
"""

from __future__ import annotations

from typing import Final

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as fn

PERCENTILES: Final = {"p50": 0.5, "p95": 0.95, "p99": 0.99}
"""Of values, to three significant digits."""
_SMALLEST_UNIT: Final = 1e-300


def windows_of(reports: DataFrame, window_s: int, watermark_s: int) -> DataFrame:
    """One row a (window, tenant, data centre, what, name), once the window is closed.

    The columns are ``pipeline.stats.output.WINDOW_SCHEMA``. ``reports`` is a stream of
    ``pipeline.stats.lines.accepted``; the result is one for append mode.
    """
    window = f"{window_s} seconds"
    measures = _measures(reports.withWatermark("time", f"{2 * watermark_s} seconds"))
    by_job = measures.groupBy(
        fn.window("time", window), "tenant_id", "dc_id", "what", "name", "job_id", "workflow_id", "value"
    ).agg(
        fn.count(fn.lit(1)).alias("lines"),
        fn.sum("weight").alias("reports"),
        fn.sum(fn.col("amount") * fn.col("weight")).alias("sum"),
        fn.min("amount").alias("min"),
        fn.max("amount").alias("max"),
    )
    by_centre = by_job.groupBy(fn.window("window", window), "tenant_id", "dc_id", "what", "name").agg(
        fn.sum("lines").alias("lines"),
        fn.sum("reports").alias("reports"),
        fn.count("job_id").alias("series"),
        fn.sum("sum").alias("sum"),
        fn.sum("max").alias("latest"),
        fn.min("min").alias("min"),
        fn.max("max").alias("max"),
        fn.percentile("value", list(PERCENTILES.values()), fn.col("reports")).alias("percentiles"),
    )
    return by_centre.select(
        fn.col("window.start").alias("window_start"),
        fn.col("window.end").alias("window_end"),
        "tenant_id",
        "dc_id",
        "what",
        "name",
        "lines",
        "reports",
        _of(("reports", "total"), fn.col("series")).alias("series"),
        _of(("reports", "count"), fn.col("sum")).alias("sum"),
        _of(("reports", "count"), fn.col("sum") / window_s).alias("per_second"),
        _of(("total",), fn.col("latest")).alias("latest"),
        _of(("value",), fn.col("sum") / fn.col("reports")).alias("mean"),
        _of(("value",), fn.col("min")).alias("min"),
        _of(("value",), fn.col("max")).alias("max"),
        *(fn.col("percentiles")[index].alias(name) for index, name in enumerate(PERCENTILES)),
    )


def _of(whats: tuple[str, ...], amount: Column) -> Column:
    """``amount`` in the rows of these measures, null in others."""
    return fn.when(fn.col("what").isin(*whats), amount)


def _measures(reports: DataFrame) -> DataFrame:
    """One row a measure of a report; ``value`` is the rounded amount of a value, and only those belong to no job."""
    found = fn.concat(
        fn.array(_measure("reports", fn.lit("reports"), fn.lit(1.0))),
        *(fn.array(_measure("total", fn.lit(name), fn.col(name))) for name in ("completed", "failed")),
        *(_measures_in(what, f"{what}s") for what in ("count", "value")),
    )
    # The clock is no report. It says so in one condition with the time, or Spark would drop it before it is looked at.
    reported = reports.where(fn.col("tenant_id").isNotNull() | (fn.col("time") < fn.lit(0).cast("timestamp")))
    exploded = reported.select("*", fn.explode(found).alias("measure"))
    of_job = fn.col("measure.what").isin("reports", "total")
    return exploded.where(fn.abs("measure.amount") < fn.lit(float("inf"))).select(
        "time",
        "tenant_id",
        "dc_id",
        "weight",
        "measure.*",
        fn.when(of_job, fn.col("job_id")).alias("job_id"),
        fn.when(of_job, fn.col("workflow_id")).alias("workflow_id"),
        fn.when(fn.col("measure.what") == "value", _rounded(fn.col("measure.amount"))).alias("value"),
    )


def _measure(what: str, name: Column, amount: Column) -> Column:
    return fn.struct(fn.lit(what).alias("what"), name.alias("name"), amount.cast("double").alias("amount"))


def _measures_in(what: str, column: str) -> Column:
    """Each member of a map as a measure; none where there is no map."""
    members = fn.transform(fn.map_entries(column), lambda entry: _measure(what, entry["key"], entry["value"]))
    return fn.coalesce(members, fn.array().cast("array<struct<what: string, name: string, amount: double>>"))


def _rounded(amount: Column) -> Column:
    """``amount`` to three significant digits, so that a window has few different ones."""
    unit = fn.greatest(fn.pow(fn.lit(10.0), fn.floor(fn.log10(fn.abs(amount))) - 2), fn.lit(_SMALLEST_UNIT))
    rounded = fn.rint(amount / unit) * unit
    # Of the largest numbers there are, rounding up would make infinity.
    is_finite = fn.abs(rounded) < fn.lit(float("inf"))
    return fn.when(amount == 0, fn.lit(0.0)).when(is_finite, rounded).otherwise(amount)
