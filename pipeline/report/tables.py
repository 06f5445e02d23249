"""The tables of a report, mostly one query each: counts by window, tenant, data centre, hour of the day and field;
notable jobs; stats that running jobs reported; and the entries read.

A job counts as created, accepted and ended in the window of each event. Its queue time counts in the window of its
acceptance; its run time and total time count in the window of its end, whatever the outcome. Rates are shares of the
ended jobs.

Percentiles are nearest-rank, so each is the time of an actual job. In groups of over ``EXACT_JOBS_MAX`` jobs the
rank may be off by one part in that many, which bounds a task's memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from pyspark.sql import DataFrame, Window
from pyspark.sql import functions as F  # noqa: N812

from ledger.facts.statuses import CANCELLED, COMPLETED, ENDED, FAILED, STATUSES, TIMED_OUT
from pipeline.page import DAY_MS, HOUR_MS
from pipeline.report import Clock, Period
from pipeline.report.folder import in_order, write_table

EXACT_JOBS_MAX: Final = 10_000
PERCENTILE_ACCURACY: Final = 2 * EXACT_JOBS_MAX + 1
"""When Spark merges sketches of two tasks, ranks are exact while twice the jobs of each are fewer than this."""
PERCENTILES: Final = (50, 90, 99)
TIMESTAMP_MS_MAX: Final = 253_402_300_799_999
"""9999-12-31, the last time with a text form; a later, forged time is shown as none."""
LABELS_MAX: Final = 1_000
"""Most listed values of a field."""
OUTCOMES: Final = {"completed": COMPLETED, "failed": FAILED, "cancelled": CANCELLED, "timed_out": TIMED_OUT}
SPANS: Final = ("queue", "run", "total")
"""Durations of a job."""
_KEYS: Final = ("window_ms", "tenant_id", "dc", "hour")
_SETS: Final = {
    "tenant_windows": ("window_ms", "tenant_id"),
    "windows": ("window_ms",),
    "tenants": ("tenant_id",),
    "dcs": ("dc",),
    "hours": ("hour",),
    "all": (),
}
COUNTS: Final = tuple(_SETS)
"""The tables of counts."""
_ADDED_UP: Final = (
    *(f"count_if(kind = '{name}') AS {name}" for name in ("created", "accepted", "ended")),
    *(f"count_if(status = '{status}') AS {name}" for name, status in OUTCOMES.items()),
    *(f"count({span}_ms) AS {span}_jobs" for span in SPANS),
    *(
        f"percentile_approx({span}_ms, array({', '.join(f'{each / 100}D' for each in PERCENTILES)}), "
        f"{PERCENTILE_ACCURACY}) AS {span}_percentiles"
        for span in SPANS
    ),
)
"""Counts of happenings, and their times."""
RATES: Final = {"failed": "failure_rate", "cancelled": "cancellation_rate", "timed_out": "timeout_rate"}
_SHOWN: Final = (
    *(f"coalesce({name}, 0) AS {name}" for name in ("created", "accepted", "ended", *OUTCOMES)),
    *(f"round({name} / nullif(ended, 0), 6) AS {rate}" for name, rate in RATES.items()),
    *(
        column
        for span in SPANS
        for column in (
            f"coalesce({span}_jobs, 0) AS {span}_jobs",
            *(f"get({span}_percentiles, {at}) / 1000D AS {span}_p{each}_s" for at, each in enumerate(PERCENTILES)),
        )
    ),
)
"""The same in table form; no rate if no job ended."""


def moment(name: str, clock: Clock) -> str:
    """The SQL expression that converts a moment in milliseconds to table form."""
    if clock is Clock.TRACE:
        return f"{name} / 1000D"
    return f"CASE WHEN {name} BETWEEN 0 AND {TIMESTAMP_MS_MAX} THEN timestamp_millis({name}) END"


def within(name: str, period: Period) -> str:
    """The condition that a moment in milliseconds lies in ``period``."""
    return f"{name} >= {period.start_ms} AND {name} < {period.end_ms}"


# --- counts ---------------------------------------------------------------------------------------


def happenings(timed: DataFrame, period: Period, *also: str) -> DataFrame:
    """One row for each creation, acceptance and end within the period, with window, hour of the day (UTC) and the
    columns ``also``."""
    each = timed.selectExpr(
        *("tenant_id", "dc", *also),
        """stack(3, 'created', created_ms, bigint(NULL), bigint(NULL), bigint(NULL), string(NULL),
                    'accepted', accepted_ms, queue_ms, NULL, NULL, NULL,
                    'ended', ended_ms, NULL, run_ms, total_ms, status)
               AS (kind, at_ms, queue_ms, run_ms, total_ms, status)""",
    )
    return each.where(within("at_ms", period)).selectExpr(
        "*",
        f"{_window_of('at_ms', period)} AS window_ms",
        f"int(floor(pmod(at_ms, {DAY_MS}) / {HOUR_MS})) AS hour",
    )


def _window_of(name: str, period: Period) -> str:
    first_ms, width_ms = period.first_window_ms, period.window_ms
    return f"{first_ms} + floor(({name} - {first_ms}) / {width_ms}) * {width_ms}"


def summarise(happenings: DataFrame) -> DataFrame:
    """Every table of counts at once; ``of`` takes one out."""
    sets = [[F.col(key) for key in keys] for keys in _SETS.values()]
    return happenings.groupingSets(sets, *_KEYS).agg(F.grouping_id(*_KEYS).alias("set"), *map(F.expr, _ADDED_UP))


def of(summaries: DataFrame, name: str, period: Period) -> DataFrame:
    """The table ``name``, in order of its keys."""
    keys, spark = _SETS[name], summaries.sparkSession
    rows = summaries.where(F.col("set") == sum(1 << at for at, key in enumerate(reversed(_KEYS)) if key not in keys))
    if name == "windows":
        every = spark.range(period.first_window_ms, period.end_ms, period.window_ms)
        rows = every.toDF("window_ms").join(rows, "window_ms", "left")
    if name == "hours":
        rows = spark.range(24).selectExpr("int(id) AS hour").join(rows, "hour", "left")
    if name == "all":  # Without happenings there is no row.
        rows = spark.range(1).drop("id").join(rows, F.lit(True), "left")
    shown = [f"{moment(key, period.clock)} AS window" if key == "window_ms" else key for key in keys]
    return (in_order(rows, *keys) if keys else rows).selectExpr(*shown, *_SHOWN)


def before(timed: DataFrame, period: Period) -> DataFrame:
    """The table ``all`` of the previous period of equal length."""
    length_ms = period.end_ms - period.start_ms
    last = period._replace(start_ms=period.start_ms - length_ms, end_ms=period.start_ms)
    return of(summarise(happenings(timed, last)), "all", last)


def by_label(timed: DataFrame, period: Period, names: Sequence[str]) -> DataFrame:
    """Counts by the value of each field of ``names`` at the job's creation, from ``labels``.

    Each field has the ``LABELS_MAX`` values with the most created or ended jobs. Private values are one row.
    """
    shown = F.transform(
        F.arrays_zip(F.array(*map(F.lit, names)).alias("field"), F.col("labels").alias("value")), lambda each: each
    )
    most = Window.partitionBy("field").orderBy(F.desc(F.col("created") + F.col("ended")), "value", "is_private")
    rows = (
        happenings(timed.withColumn("label", F.explode(shown)), period, "label")
        .groupBy(
            F.col("label.field").alias("field"),
            F.col("label.value.text").alias("value"),
            F.coalesce("label.value.is_private", F.lit(False)).alias("is_private"),
        )
        .agg(*map(F.expr, _ADDED_UP))
        .withColumn("place", F.row_number().over(most))
        .where(F.col("place") <= LABELS_MAX)
    )
    return in_order(rows, "field", "place").selectExpr("field", "value", "is_private", *_SHOWN)


def openings(timed: DataFrame, period: Period) -> DataFrame:
    """How many jobs were open at the end of each window: created by then, and not ended.

    A job that ended before its creation was never open. Earlier events count in the first window.
    """
    return timed.sparkSession.sql(
        f"""
        SELECT {moment("window_ms", period.clock)} AS window, open
          FROM (SELECT window_ms, sum(coalesce(change, 0)) OVER (ORDER BY window_ms) AS open
                  FROM (SELECT id AS window_ms FROM range({{first_window_ms}}, {{end_ms}}, {{window_ms}}))
                  LEFT JOIN (SELECT greatest({_window_of("at_ms", period)}, {{first_window_ms}}) AS window_ms,
                                    sum(change) AS change
                               FROM (SELECT created_ms AS at_ms, 1 AS change FROM {{timed}}
                                      UNION ALL
                                     SELECT greatest(ended_ms, created_ms), -1 FROM {{timed}}
                                      WHERE created_ms IS NOT NULL AND ended_ms IS NOT NULL)
                              WHERE at_ms < {{end_ms}} GROUP BY 1) USING (window_ms))
         ORDER BY window_ms
        """,
        timed=timed,
        **period._asdict(),
    )


# --- jobs -----------------------------------------------------------------------------------------

LIST_ROWS_MAX: Final = 100_000
"""Most jobs of a list, in its order; the jobs table has all."""
LONGEST_ROWS_MAX: Final = 1_000
STUCK_MS_MIN: Final = HOUR_MS
STUCK_MS_UNKNOWN: Final = DAY_MS
"""Silence after which a job counts as stuck, while too few jobs have ended for an estimate."""
ENDED_JOBS_MIN: Final = 100

JOBS: Final = f"""
SELECT tenant_id, job_id, status, dc, created, accepted, ended,
       {", ".join(f"{span}_ms / 1000D AS {span}_s" for span in SPANS)},
       created_by, cancel_requested, cancelled_by, cancel_reason, error, failed_dc, private_fields, last_event,
       created_hlc, last_hlc, last_seq, events
  FROM {{timed}}
"""
"""The jobs as they are written: times of the ledger's clock as timestamps, those of a trace in seconds."""
LISTS: Final = {
    # Jobs by run time, longest first: those that ended in the period, and those at work at its end, so far.
    "longest": f"""
        SELECT tenant_id, job_id, status, dc, took_ms / 1000D AS run_s,
               IF(ended_ms IS NULL, 'so far', 'ended') AS run_is, accepted, ended
          FROM (SELECT *, CASE WHEN is_open THEN {{known_ms}} - accepted_ms
                               WHEN ended_ms >= {{start_ms}} AND ended_ms < {{end_ms}} THEN run_ms END AS took_ms
                  FROM {{timed}})
         WHERE took_ms >= 0 ORDER BY took_ms DESC, tenant_id, job_id LIMIT {LONGEST_ROWS_MAX}
    """,
    # Open jobs without an event for too long, longest silence first.
    "stuck": f"""
        SELECT tenant_id, job_id, status, dc, silent_ms / 1000D AS silent_s, last_event, created, last_hlc, last_seq
          FROM {{timed}} WHERE is_stuck ORDER BY silent_ms DESC, tenant_id, job_id LIMIT {LIST_ROWS_MAX}
    """,
    # Jobs whose cancellation was requested in the period, newest first, with requester and reason.
    "cancelled": f"""
        SELECT tenant_id, job_id, status, dc, cancel_requested, cancelled_by, cancel_reason, private_fields, ended
          FROM {{timed}} WHERE is_cancel_asked ORDER BY cancelled_ms DESC, tenant_id, job_id LIMIT {LIST_ROWS_MAX}
    """,
    # Number of cancellations per requester, most first; requesters with a private name are one row.
    "cancellers": f"""
        SELECT cancelled_by, array_contains(split(private_fields, ' '), 'cancelled_by') AS is_private,
               count(*) AS jobs, count_if(status = '{CANCELLED}') AS cancelled,
               count_if(status <> '{CANCELLED}') AS not_yet, count(DISTINCT tenant_id) AS tenants
          FROM {{timed}} WHERE is_cancel_asked GROUP BY ALL
         ORDER BY jobs DESC, cancelled_by, is_private LIMIT {LIST_ROWS_MAX}
    """,
    # Reasons why jobs that ended in the period did not complete, most first: by outcome and its given text.
    # The newest job of each is its example. Private texts of an outcome are one row.
    "reasons": f"""
        SELECT status, reason, is_private, jobs, tenants, newest.ended, newest.tenant_id, newest.job_id
          FROM (SELECT status, IF(status = '{CANCELLED}', cancel_reason, error) AS reason,
                       array_contains(split(private_fields, ' '),
                                      IF(status = '{CANCELLED}', 'cancel_reason', 'error')) AS is_private,
                       count(*) AS jobs, count(DISTINCT tenant_id) AS tenants,
                       max(struct(ended_ms, tenant_id, job_id, ended)) AS newest
                  FROM {{timed}}
                 WHERE ended_ms >= {{start_ms}} AND ended_ms < {{end_ms}}
                   AND status IN ('{FAILED}', '{TIMED_OUT}', '{CANCELLED}')
                 GROUP BY ALL)
         ORDER BY jobs DESC, status, reason, is_private LIMIT {LIST_ROWS_MAX}
    """,
}
"""Notable jobs: the longest, the stuck, and the not completed."""
TOTALS: Final = f"""
SELECT count(*) AS jobs, {", ".join(f"count_if(status = '{each}') AS status_{each}" for each in STATUSES)},
       count_if(is_open) AS open, count_if(is_stuck) AS stuck, count_if(is_cancel_asked) AS cancel_requests,
       count_if(is_backwards) AS backwards, count_if(last_ms IS NULL) AS undated
  FROM {{timed}}
"""
"""One row: numbers of jobs, by status at the end of the period, and in the lists."""
_MOMENTS: Final = {
    **{name: f"{name}_ms" for name in ("created", "accepted", "ended")},
    "cancel_requested": "cancelled_ms",
    "last_event": "last_ms",
}


def stuck_after_ms(asked_ms: int | None, ended_jobs: int, total_p99_s: float | None) -> int:
    """Silence in milliseconds after which an open job counts as stuck.

    By default the 99th percentile of the total time of ended jobs, at least an hour. A job is never silent for
    longer than its total time, so at most 1 in 100 good jobs looks stuck.
    """
    if asked_ms is not None:
        return asked_ms
    if ended_jobs < ENDED_JOBS_MIN or total_p99_s is None:
        return STUCK_MS_UNKNOWN
    return max(STUCK_MS_MIN, round(total_p99_s * 1000))


def of_jobs(query: str, timed: DataFrame, period: Period, stuck_after_ms: int) -> DataFrame:
    """The result of ``query``, one of the above, on ``timed``, with moments in table form and each job's state at
    the end of the period."""
    shown = timed.selectExpr(
        "*",
        *(f"{moment(column, period.clock)} AS {name}" for name, column in _MOMENTS.items()),
        f"status NOT IN {(*sorted(ENDED),)} AS is_open",
        f"{period.known_ms} - last_ms AS silent_ms",
        f"is_open AND silent_ms > {stuck_after_ms} AS is_stuck",
        f"{within('cancelled_ms', period)} AS is_cancel_asked",
    )
    return timed.sparkSession.sql(query, timed=shown, **period._asdict())


# --- what running jobs reported -------------------------------------------------------------------


MEASURES: Final = ("measures", "measure_windows")


def write_measures(stats: DataFrame, tenants: Sequence[str], period: Period, folder: Path) -> None:
    """Write the tables of stats within ``period``, of ``tenants`` or, if empty, of all."""
    windows = by_window(stats, tenants, period).persist()
    write_table(measures(windows, period), folder, "measures")
    write_table(
        in_order(windows, "window_ms", "tenant_id", "dc", F.desc("what"), "name").selectExpr(
            f"{moment('window_ms', period.clock)} AS window",
            *("tenant_id", "dc", "what", "name", "amount"),
            f"amount / ({period.window_ms} / 1000D) AS per_second",
        ),
        folder,
        "measure_windows",
    )
    windows.unpersist()


def by_window(stats: DataFrame, tenants: Sequence[str], period: Period) -> DataFrame:
    """``window_ms, tenant_id, dc, what, name, amount`` of the columns of ``pipeline.stats.read``."""
    at_ms = "unix_millis(window_start)"
    return stats.sparkSession.sql(
        f"""
        SELECT {_window_of(at_ms, period)} AS window_ms, tenant_id, dc_id AS dc, what, name, sum(sum) AS amount
          FROM {{stats}} WHERE what IN ('reports', 'count') AND {within(at_ms, period)} GROUP BY ALL
        """,
        stats=stats.where(F.col("tenant_id").isin(*tenants)) if tenants else stats,
    )


def measures(windows: DataFrame, period: Period) -> DataFrame:
    """One row a name: total, average over the period, best window, and numbers of tenants and data centres."""
    rows = windows.sparkSession.sql(
        """
        SELECT what, name, sum(amount) AS amount, sum(amount) / (({end_ms} - {start_ms}) / 1000D) AS per_second,
               max(in_window) / ({window_ms} / 1000D) AS most_per_second,
               count(DISTINCT tenant_id) AS tenants, count(DISTINCT dc) AS dcs
          FROM (SELECT *, sum(amount) OVER (PARTITION BY what, name, window_ms) AS in_window FROM {windows})
         GROUP BY what, name
        """,
        windows=windows,
        **period._asdict(),
    )
    return in_order(rows, F.desc("what"), F.desc("amount"), "name")


# --- what was read --------------------------------------------------------------------------------


_READ: Final = (
    *("count(*) AS entries", "count(action) AS job_events", "count(trace_ms) AS trace_events"),
    "sum(private) AS private_values",
    *(
        f"concat_ws(':', {which}(at).physical_ms, {which}(at).logical, {which}(at).node) AS {name}_hlc"
        for which, name in (("min", "first"), ("max", "last"))
    ),
)
"""Counts of entries by kind, and their first and last HLC."""


def by_tenant(facts: DataFrame) -> DataFrame:
    """One row a tenant: entries, range of seq and HLC, jobs, job events, and private values, which are not shown."""
    counts = (
        "count(DISTINCT IF(action IS NOT NULL, job_id, NULL)) AS jobs",
        "min(seq) AS first_seq",
        "max(seq) AS last_seq",
    )
    rows = facts.groupBy("tenant_id").agg(*map(F.expr, (*_READ, *counts)))
    return in_order(rows, "tenant_id").select(
        *("tenant_id", "entries", "first_seq", "last_seq", "first_hlc", "last_hlc"),
        *("jobs", "job_events", "trace_events", "private_values"),
    )


def overall(facts: DataFrame) -> DataFrame:
    """One row for everything: counts, the first and last time on either clock."""
    times = (
        *("min(event_ms) AS first_hlc_ms", "max(event_ms) AS last_hlc_ms"),
        *("min(trace_ms) AS first_trace_ms", "max(trace_ms) AS last_trace_ms"),
    )
    return facts.agg(*map(F.expr, ("count(DISTINCT tenant_id) AS tenants", *_READ, *times)))
