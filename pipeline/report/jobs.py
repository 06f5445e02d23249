"""The jobs of a report: folded rows on the clock of the report, up to its end.

A time that lies before the one it should follow (two nodes' clocks, a trace with slips) makes no duration: the job is
marked ``is_backwards`` and left out of the percentiles.
"""

from __future__ import annotations

from typing import Final

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812

from ledger.machines import jobs
from pipeline.report.period import Clock

OPEN_STATUSES: Final = tuple(status for status in jobs.STATUSES if not jobs.is_ended(status))
TIMESTAMP_MS_MAX: Final = 253_402_300_799_999
"""9999-12-31: no later time has a name; a forged one is shown as none."""
_MARKED: Final = ("cancelled_by", "cancel_reason", "error")


def before_end(said: DataFrame, clock: Clock | None, end_ms: int | None) -> DataFrame:
    """The rows of ``pipeline.report.said`` that a report ending at ``end_ms`` knows of."""
    if end_ms is None:
        return said
    if clock is Clock.TRACE:
        return said.where(F.col("action").isNull() | (F.col("trace_ms") < end_ms))
    return said.where(F.col("at.physical_ms") < end_ms)


def on_clock(folded: DataFrame, clock: Clock) -> DataFrame:
    """One row a job of ``pipeline.report.fold``, with moments and durations in milliseconds of ``clock``."""
    part = "trace_ms" if clock is Clock.TRACE else "physical_ms"
    timed = folded.where(F.col("events") > 0).select(
        "tenant_id",
        "job_id",
        "status",
        "dc",
        *(F.col(name)[part].alias(f"{name}_ms") for name in ("created", "accepted", "cancelled", "ended", "last")),
        *(F.col(name)["text"].alias(name) for name in _MARKED),
        "failed_dc",
        F.concat_ws(" ", *(F.when(F.col(name)["is_private"], F.lit(name)) for name in _MARKED)).alias("private_fields"),
        _hlc_text("creation").alias("created_hlc"),
        _hlc_text("last_hlc").alias("last_hlc"),
        "last_seq",
        "events",
    )
    spans = {"queue": ("created", "accepted"), "run": ("accepted", "ended"), "total": ("created", "ended")}
    raw = {name: F.col(f"{end}_ms") - F.col(f"{begin}_ms") for name, (begin, end) in spans.items()}
    is_backwards = F.lit(False)
    for span in raw.values():
        is_backwards |= F.coalesce(span < 0, F.lit(False))
    durations = {f"{name}_ms": F.when(span >= 0, span) for name, span in raw.items()}
    return timed.withColumns({**durations, "is_backwards": is_backwards})


def table(timed: DataFrame, clock: Clock) -> DataFrame:
    """The jobs as they are written: times of the ledger's clock as timestamps, those of a trace in seconds."""
    return timed.select(
        "tenant_id",
        "job_id",
        "status",
        "dc",
        *(moment(f"{name}_ms", clock).alias(name) for name in ("created", "accepted", "ended")),
        *(seconds(f"{name}_ms").alias(f"{name}_s") for name in ("queue", "run", "total")),
        moment("cancelled_ms", clock).alias("cancel_requested"),
        "cancelled_by",
        "cancel_reason",
        "error",
        "failed_dc",
        "private_fields",
        moment("last_ms", clock).alias("last_event"),
        "created_hlc",
        "last_hlc",
        "last_seq",
        "events",
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


def _hlc_text(name: str) -> Column:
    parts = F.col(name)
    return F.when(parts.isNotNull(), F.concat_ws(":", parts["physical_ms"], parts["logical"], parts["node"]))
