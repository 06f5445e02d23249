"""The jobs that stand out: those that took longest, those that hang, and those that somebody cancelled."""

from __future__ import annotations

from typing import Final

from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812

from ledger.facts.statuses import CANCELLED, FAILED, STATUSES, TIMED_OUT
from pipeline.report.jobs import OPEN_STATUSES
from pipeline.report.period import DAY_MS, HOUR_MS, Period
from pipeline.report.summaries import moment, seconds

TABLES: Final = ("longest", "stuck", "cancelled", "cancellers", "reasons")
LIST_ROWS_MAX: Final = 100_000
"""Most jobs of a list, the first in its order; the jobs table has all."""
LONGEST_ROWS_MAX: Final = 1_000
STUCK_MS_MIN: Final = HOUR_MS
STUCK_MS_UNKNOWN: Final = DAY_MS
"""How long a job may be silent before it counts as stuck, while too few jobs have ended to tell."""
ENDED_JOBS_MIN: Final = 100


def stuck_after_ms(asked_ms: int | None, ended_jobs: int, total_p99_s: float | None) -> int:
    """How long a job that has not ended may be silent before it counts as stuck.

    If not asked for, the time within which 99 of 100 jobs that ended had come to their end, and at least an hour: no
    job can have been silent for longer than it took, so only 1 in 100 good jobs would look stuck.
    """
    if asked_ms is not None:
        return asked_ms
    if ended_jobs < ENDED_JOBS_MIN or total_p99_s is None:
        return STUCK_MS_UNKNOWN
    return max(STUCK_MS_MIN, round(total_p99_s * 1000))


def lists(timed: DataFrame, period: Period, stuck_after_ms: int) -> dict[str, DataFrame]:
    """The rows of each of ``TABLES``."""
    each = (
        longest(timed, period),
        stuck(timed, period, stuck_after_ms),
        cancelled(timed, period),
        cancellers(timed, period),
        reasons(timed, period),
    )
    return dict(zip(TABLES, each, strict=True))


def longest(timed: DataFrame, period: Period) -> DataFrame:
    """Jobs by run time, longest first: those that ended in the period, and those at work at its end, so far."""
    is_open = F.col("status").isin(*OPEN_STATUSES) & F.col("accepted_ms").isNotNull()
    so_far = F.when(is_open, period.known_ms - F.col("accepted_ms"))
    ended_within = (F.col("ended_ms") >= period.start_ms) & (F.col("ended_ms") < period.end_ms)
    rows = timed.withColumn("run_ms", F.coalesce(so_far, F.when(ended_within, F.col("run_ms"))))
    ordered = rows.where("run_ms >= 0").orderBy(F.desc("run_ms"), "tenant_id", "job_id").limit(LONGEST_ROWS_MAX)
    return ordered.select(
        "tenant_id",
        "job_id",
        "status",
        "dc",
        seconds("run_ms").alias("run_s"),
        F.when(F.col("ended_ms").isNull(), "so far").otherwise("ended").alias("run_is"),
        moment("accepted_ms", period.clock).alias("accepted"),
        moment("ended_ms", period.clock).alias("ended"),
    )


def stuck(timed: DataFrame, period: Period, after_ms: int) -> DataFrame:
    """Jobs that have not ended and of which nothing was heard for longer than ``after_ms``, longest silence first."""
    rows = timed.where(F.col("status").isin(*OPEN_STATUSES)).withColumn("silent_ms", period.known_ms - F.col("last_ms"))
    ordered = rows.where(F.col("silent_ms") > after_ms).orderBy(F.desc("silent_ms"), "tenant_id", "job_id")
    return ordered.limit(LIST_ROWS_MAX).select(
        "tenant_id",
        "job_id",
        "status",
        "dc",
        seconds("silent_ms").alias("silent_s"),
        moment("last_ms", period.clock).alias("last_event"),
        moment("created_ms", period.clock).alias("created"),
        "last_hlc",
        "last_seq",
    )


def cancelled(timed: DataFrame, period: Period) -> DataFrame:
    """Jobs whose cancellation was asked for in the period, newest first, with who asked and why."""
    ordered = _cancelled(timed, period).orderBy(F.desc("cancelled_ms"), "tenant_id", "job_id").limit(LIST_ROWS_MAX)
    return ordered.select(
        "tenant_id",
        "job_id",
        "status",
        "dc",
        moment("cancelled_ms", period.clock).alias("cancel_requested"),
        "cancelled_by",
        "cancel_reason",
        "private_fields",
        moment("ended_ms", period.clock).alias("ended"),
    )


def cancellers(timed: DataFrame, period: Period) -> DataFrame:
    """How many jobs each one asked to cancel, most first; all whose name is private are one."""
    is_private = F.array_contains(F.split("private_fields", " "), "cancelled_by")
    named = _cancelled(timed, period).select("cancelled_by", is_private.alias("is_private"), "tenant_id", "status")
    counted = named.groupBy("cancelled_by", "is_private").agg(
        F.count("*").alias("jobs"),
        F.count_if(F.col("status") == "CANCELLED").alias("cancelled"),
        F.count_if(F.col("status") != "CANCELLED").alias("not_yet"),
        F.count_distinct("tenant_id").alias("tenants"),
    )
    return counted.orderBy(F.desc("jobs"), "cancelled_by", "is_private").limit(LIST_ROWS_MAX)


def reasons(timed: DataFrame, period: Period) -> DataFrame:
    """Why jobs that ended in the period did not complete, most first: by outcome and the text that was given for it.

    The newest job of each is its example. Private texts of an outcome are one row.
    """
    is_cancelled = F.col("status") == CANCELLED
    field = F.when(is_cancelled, F.lit("cancel_reason")).otherwise(F.lit("error"))
    each = timed.where(
        (F.col("ended_ms") >= period.start_ms)
        & (F.col("ended_ms") < period.end_ms)
        & F.col("status").isin(FAILED, TIMED_OUT, CANCELLED)
    ).select(
        "status",
        F.when(is_cancelled, F.col("cancel_reason")).otherwise(F.col("error")).alias("reason"),
        F.array_contains(F.split("private_fields", " "), field).alias("is_private"),
        "tenant_id",
        "job_id",
        "ended_ms",
    )
    counted = each.groupBy("status", "reason", "is_private").agg(
        F.count("*").alias("jobs"),
        F.count_distinct("tenant_id").alias("tenants"),
        F.max(F.struct("ended_ms", "tenant_id", "job_id")).alias("newest"),
    )
    ordered = counted.orderBy(F.desc("jobs"), "status", "reason", "is_private").limit(LIST_ROWS_MAX)
    return ordered.select(
        "status",
        "reason",
        "is_private",
        "jobs",
        "tenants",
        moment("newest.ended_ms", period.clock).alias("ended"),
        "newest.tenant_id",
        "newest.job_id",
    )


def totals(timed: DataFrame, period: Period, after_ms: int) -> DataFrame:
    """One row: how many jobs there are, by status at the end of the period, and how many the lists are about."""
    is_open = F.col("status").isin(*OPEN_STATUSES)
    is_cancelled = (F.col("cancelled_ms") >= period.start_ms) & (F.col("cancelled_ms") < period.end_ms)
    by_status = [F.count_if(F.col("status") == status).alias(f"status_{status}") for status in STATUSES]
    return timed.agg(
        F.count("*").alias("jobs"),
        *by_status,
        F.count_if(is_open).alias("open"),
        F.count_if(is_open & (period.known_ms - F.col("last_ms") > after_ms)).alias("stuck"),
        F.count_if(is_cancelled).alias("cancel_requests"),
        F.count_if("is_backwards").alias("backwards"),
        F.count_if(F.col("last_ms").isNull()).alias("undated"),
    )


def _cancelled(timed: DataFrame, period: Period) -> DataFrame:
    asked = F.col("cancelled_ms")
    return timed.where((asked >= period.start_ms) & (asked < period.end_ms))
