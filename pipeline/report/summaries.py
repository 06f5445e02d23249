"""What happened in the period, counted: by window, tenant, data centre and hour of the day.

A job counts as created, accepted and ended each in the window where that happened. How long it had queued counts where
it was accepted, how long it ran, and how long it took in all, where it ended, however it ended. Rates are shares of the
jobs that ended.

Percentiles are nearest-rank: a time that a job really took. Of groups of over ``EXACT_JOBS_MAX`` jobs the rank may be
off by one part in that many, which bounds the memory of a task.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F  # noqa: N812

from ledger.facts.statuses import CANCELLED, COMPLETED, FAILED, TIMED_OUT
from pipeline.report.folder import in_order, write_table
from pipeline.report.period import DAY_MS, HOUR_MS, SECOND_MS, Clock, Period

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


EXACT_JOBS_MAX: Final = 10_000
PERCENTILE_ACCURACY: Final = 2 * EXACT_JOBS_MAX + 1
"""Where Spark adds up sketches of two tasks, ranks stay exact while twice the jobs of either are fewer than this."""
PERCENTILES: Final = (50, 90, 99)
TIMESTAMP_MS_MAX: Final = 253_402_300_799_999
"""9999-12-31: no later time has a name; a forged one is shown as none."""
LABELS_MAX: Final = 1_000
"""Most values of a field that are listed."""
OUTCOMES: Final = {
    "completed": COMPLETED,
    "failed": FAILED,
    "cancelled": CANCELLED,
    "timed_out": TIMED_OUT,
}
SPANS: Final = {"queue": "accepted", "run": "ended", "total": "ended"}
"""Durations, and the kind of happening they count with."""
_KEYS: Final = ("window_ms", "tenant_id", "dc", "hour")
_SETS: Final = {
    "tenant_windows": ("window_ms", "tenant_id"),
    "windows": ("window_ms",),
    "tenants": ("tenant_id",),
    "dcs": ("dc",),
    "hours": ("hour",),
    "all": (),
}
TABLES: Final = tuple(_SETS)


def happenings(timed: DataFrame, period: Period, *also: str) -> DataFrame:
    """One row for each creation, acceptance and end within the period, with window, hour of the day (UTC) and the
    columns ``also``."""
    kinds = [
        _happening("created"),
        _happening("accepted", queue="queue_ms"),
        _happening("ended", run="run_ms", total="total_ms", status="status"),
    ]
    keys = ("tenant_id", "dc", *also)
    each = timed.select(*keys, F.explode(F.array(*kinds)).alias("is")).select(*keys, "is.*")
    within = each.where((F.col("at_ms") >= period.start_ms) & (F.col("at_ms") < period.end_ms))
    offset = F.floor((F.col("at_ms") - period.first_window_ms) / period.window_ms)
    hour = F.floor(F.pmod(F.col("at_ms"), F.lit(DAY_MS)) / HOUR_MS).cast("int")
    return within.withColumns({"window_ms": period.first_window_ms + offset * period.window_ms, "hour": hour})


def summarise(happenings: DataFrame) -> DataFrame:
    """Every table of counts at once; ``of`` takes one out."""
    sets = [[F.col(key) for key in keys] for keys in _SETS.values()]
    return happenings.groupingSets(sets, *_KEYS).agg(F.grouping_id(*_KEYS).alias("set"), *_added_up())


def by_label(timed: DataFrame, period: Period, names: Sequence[str]) -> DataFrame:
    """Counts by the value that each of the fields ``names`` had where a job was created: those that ``labels`` holds.

    The ``LABELS_MAX`` values of each field of which most jobs were created or ended. Private values are one row.
    """
    shown = F.transform(
        F.arrays_zip(F.array(*map(F.lit, names)).alias("field"), F.col("labels").alias("value")), lambda each: each
    )
    labelled = timed.withColumn("label", F.explode(shown))
    counted = (
        happenings(labelled, period, "label")
        .groupBy(
            F.col("label.field").alias("field"),
            F.col("label.value.text").alias("value"),
            F.coalesce("label.value.is_private", F.lit(False)).alias("is_private"),
        )
        .agg(*_added_up())
    )
    most = (F.desc(F.col("created") + F.col("ended")), "value", "is_private")
    place = F.row_number().over(Window.partitionBy("field").orderBy(*most))
    rows = in_order(counted.withColumn("place", place).where(F.col("place") <= LABELS_MAX), "field", "place")
    return rows.select("field", "value", "is_private", *_counts(), *_rates(), *_times())


def openings(timed: DataFrame, period: Period) -> DataFrame:
    """How many jobs were open at the end of each window: created by then, and not ended.

    A job whose end lies before its creation was never open.
    """
    changes = F.array(
        F.struct(F.col("created_ms").alias("at_ms"), F.lit(1).alias("change")),
        F.struct(F.greatest("ended_ms", "created_ms").alias("at_ms"), F.lit(-1).alias("change")),
    )
    has_ended = F.col("ended_ms").isNotNull()
    each = timed.where(F.col("created_ms").isNotNull()).select(F.explode(changes).alias("is"), has_ended.alias("ended"))
    counted = each.where((F.col("is.at_ms") < period.end_ms) & ((F.col("is.change") > 0) | F.col("ended"))).select(
        "is.*"
    )
    # What was before the period counts into its first window.
    offset = F.greatest(F.floor((F.col("at_ms") - period.first_window_ms) / period.window_ms), F.lit(0))
    window = (period.first_window_ms + offset * period.window_ms).alias("window_ms")
    changed = counted.groupBy(window).agg(F.sum("change").alias("change"))
    every = _windows(timed, period)
    so_far = F.sum(F.coalesce("change", F.lit(0))).over(Window.orderBy("window_ms"))
    joined = every.join(changed, "window_ms", "left").withColumn("open", so_far).orderBy("window_ms")
    return joined.select(moment("window_ms", period.clock).alias("window"), "open")


def before(timed: DataFrame, period: Period) -> DataFrame:
    """The table ``all`` of the period as long as ``period`` that ended where it begins."""
    length_ms = period.end_ms - period.start_ms
    last = period._replace(start_ms=period.start_ms - length_ms, end_ms=period.start_ms)
    return of(summarise(happenings(timed, last)), "all", last)


def _added_up() -> list[Column]:
    """What is counted of happenings, and their times."""
    kind, status = F.col("kind"), F.col("status")
    counts = [F.count_if(kind == name).alias(name) for name in ("created", "accepted", "ended")]
    counts += [F.count_if(status == value).alias(name) for name, value in OUTCOMES.items()]
    percentages = F.array(*(F.lit(each / 100) for each in PERCENTILES))
    times = [
        F.percentile_approx(f"{span}_ms", percentages, F.lit(PERCENTILE_ACCURACY)).alias(f"{span}_percentiles")
        for span in SPANS
    ]
    timed = [F.count(f"{span}_ms").alias(f"{span}_jobs") for span in SPANS]
    return [*counts, *timed, *times]


def of(summaries: DataFrame, name: str, period: Period) -> DataFrame:
    """The table ``name``, in order of its keys."""
    keys = _SETS[name]
    number = sum(1 << at for at, key in enumerate(reversed(_KEYS)) if key not in keys)
    rows = summaries.where(F.col("set") == number)
    if name == "windows":
        others = [key for key in _KEYS if key != "window_ms"]
        rows = _windows(rows, period).join(rows.drop(*others), "window_ms", "left")
    if name == "hours":
        rows = rows.sparkSession.range(24).select(F.col("id").cast("int").alias("hour")).join(rows, "hour", "left")
    if name == "all":  # Of no happenings at all there is no row that says so.
        rows = rows.sparkSession.range(1).drop("id").join(rows, F.lit(True), "left")
    ordered = in_order(rows, *keys) if keys else rows
    return ordered.select(*_shown_keys(keys, period), *_counts(), *_rates(), *_times())


def _windows(rows: DataFrame, period: Period) -> DataFrame:
    """Every window of the period, in the session of ``rows``."""
    return rows.sparkSession.range(period.first_window_ms, period.end_ms, period.window_ms).toDF("window_ms")


def _happening(kind: str, **values: str) -> Column:
    def value(name: str, ddl: str) -> Column:
        given = F.col(values[name]) if name in values else F.lit(None)
        return given.cast(ddl).alias(name if name == "status" else f"{name}_ms")

    spans = [value(span, "long") for span in SPANS]
    return F.struct(F.lit(kind).alias("kind"), F.col(f"{kind}_ms").alias("at_ms"), *spans, value("status", "string"))


def _shown_keys(keys: Sequence[str], period: Period) -> list[Column]:
    return [moment(key, period.clock).alias("window") if key == "window_ms" else F.col(key) for key in keys]


def _counts() -> list[Column]:
    names = ("created", "accepted", "ended", *OUTCOMES)
    return [F.coalesce(F.col(name), F.lit(0)).alias(name) for name in names]


def _rates() -> list[Column]:
    """Shares of the jobs that ended; None where none did."""
    ended = F.when(F.col("ended") > 0, F.col("ended"))
    names = {"failed": "failure_rate", "cancelled": "cancellation_rate", "timed_out": "timeout_rate"}
    return [F.round(F.col(name) / ended, 6).alias(rate) for name, rate in names.items()]


def _times() -> list[Column]:
    columns = []
    for span in SPANS:
        columns.append(F.coalesce(F.col(f"{span}_jobs"), F.lit(0)).alias(f"{span}_jobs"))
        for at, percentile in enumerate(PERCENTILES):
            value = F.get(F.col(f"{span}_percentiles"), F.lit(at)) / 1000.0
            columns.append(value.alias(f"{span}_p{percentile}_s"))
    return columns


# --- what running jobs reported -------------------------------------------------------------------


MEASURE_TABLES: Final = ("measures", "measure_windows")
_SUMMED: Final = ("reports", "count")


def write_measures(stats: DataFrame, tenants: Sequence[str], period: Period, folder: Path) -> None:
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


# --- jobs, and what was read ----------------------------------------------------------------------


def job_table(timed: DataFrame, clock: Clock) -> DataFrame:
    """The jobs as they are written: times of the ledger's clock as timestamps, those of a trace in seconds."""
    return timed.select(
        *("tenant_id", "job_id", "status", "dc"),
        *(moment(f"{name}_ms", clock).alias(name) for name in ("created", "accepted", "ended")),
        *(seconds(f"{name}_ms").alias(f"{name}_s") for name in SPANS),
        "created_by",
        moment("cancelled_ms", clock).alias("cancel_requested"),
        *("cancelled_by", "cancel_reason", "error", "failed_dc", "private_fields"),
        moment("last_ms", clock).alias("last_event"),
        *("created_hlc", "last_hlc", "last_seq", "events"),
    )


def moment(name: str, clock: Clock) -> Column:
    """A moment in milliseconds as tables hold it."""
    at = F.col(name)
    if clock is Clock.TRACE:
        return at / 1000.0
    return F.when(at.between(0, TIMESTAMP_MS_MAX), F.timestamp_millis(at))


def seconds(name: str) -> Column:
    """A duration in milliseconds as tables hold it."""
    return F.col(name) / 1000.0


# --- what was read --------------------------------------------------------------------------------


def by_tenant(facts: DataFrame) -> DataFrame:
    """One row a tenant: entries, range of seq and HLC, jobs, job events, and private values, which are not shown."""
    rows = facts.groupBy("tenant_id").agg(
        *_read(),
        F.min("seq").alias("first_seq"),
        F.max("seq").alias("last_seq"),
        F.count_distinct(F.when(F.col("action").isNotNull(), F.col("job_id"))).alias("jobs"),
    )
    seqs_and_hlcs = ("first_seq", "last_seq", "first_hlc", "last_hlc")
    counts = ("jobs", "job_events", "trace_events", "private_values")
    return in_order(rows, "tenant_id").select("tenant_id", "entries", *seqs_and_hlcs, *counts)


def overall(facts: DataFrame) -> DataFrame:
    """One row for everything: counts, the first and last time on either clock."""
    return facts.agg(
        F.count_distinct("tenant_id").alias("tenants"),
        *_read(),
        F.min("event_ms").alias("first_hlc_ms"),
        F.max("event_ms").alias("last_hlc_ms"),
        F.min("trace_ms").alias("first_trace_ms"),
        F.max("trace_ms").alias("last_trace_ms"),
    )


def _read() -> list[Column]:
    """How many entries there are, of what, and their first and last HLC."""
    first, last = F.min("at"), F.max("at")
    return [
        F.count("*").alias("entries"),
        F.count("action").alias("job_events"),
        F.count("trace_ms").alias("trace_events"),
        F.sum("private").alias("private_values"),
        F.concat_ws(":", first["physical_ms"], first["logical"], first["node"]).alias("first_hlc"),
        F.concat_ws(":", last["physical_ms"], last["logical"], last["node"]).alias("last_hlc"),
    ]
