"""One row a job: what ``ledger.machines.job_fold`` keeps of its entries, with the times a report needs.

Of facts that compete the one of highest rank stays, and the JobCreated of lowest HLC; status is as
``ledger.machines.jobs.status`` says. A test ties the two on random histories. Out of these rows come how much was read
of each tenant, and the jobs on the clock of the report, up to its end: a time that lies before the one it should follow
(two nodes' clocks, a trace with slips) makes no duration, the job is marked ``is_backwards`` and left out of the
percentiles.
"""

from __future__ import annotations

from typing import Final

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812

from ledger.machines import jobs
from pipeline.report.folder import in_order
from pipeline.report.period import Clock

STATUS_OF_END = {"COMPLETE": jobs.COMPLETED, "FAIL": jobs.FAILED, "TIMEOUT": jobs.TIMED_OUT}
OPEN_STATUSES: Final = tuple(status for status in jobs.STATUSES if not jobs.is_ended(status))
TIMESTAMP_MS_MAX: Final = 253_402_300_799_999
"""9999-12-31: no later time has a name; a forged one is shown as none."""
_MARKED: Final = ("created_by", "cancelled_by", "cancel_reason", "error")


def fold(said: DataFrame) -> DataFrame:
    """One row a ``(tenant_id, job_id)`` of the rows of ``pipeline.report.said``; ``events`` is 0 where there is no job.

    Moments (``created``, ``accepted``, ``cancelled``, ``ended``, ``last``) are structs with ``physical_ms`` of the HLC
    and ``trace_ms``, None where the job has not come so far.
    """
    action, rank = F.col("action"), F.col("rank")
    hlc = F.struct(
        rank["physical_ms"].alias("physical_ms"), rank["logical"].alias("logical"), rank["node"].alias("node")
    )
    order = F.struct(*hlc_parts(rank), rank["digest"].alias("digest"), "trace_ms", "assigned_dcs", "actor", "labels")
    moment = F.struct(*hlc_parts(rank), "trace_ms")
    has_dc = F.col("dc").isNotNull()

    def latest(actions: list[str], *names: str) -> Column:
        return F.max(F.when(action.isin(actions), F.struct("rank", "action", "trace_ms", *names)))

    folded = said.groupBy("tenant_id", "job_id").agg(
        F.count("*").alias("entries"),
        F.min("seq").alias("first_seq"),
        F.max("seq").alias("last_seq"),
        F.min("at").alias("first_at"),
        F.max("at").alias("last_at"),
        F.sum("private").alias("private"),
        F.count("action").alias("events"),
        F.count(F.when(action.isNotNull(), F.col("trace_ms"))).alias("events_in_trace"),
        F.max(F.when(action.isNotNull(), hlc)).alias("last_hlc"),
        F.max(F.when(action.isNotNull(), F.col("trace_ms"))).alias("last_trace_ms"),
        F.min(F.when(action.isNotNull(), rank["physical_ms"])).alias("first_event_ms"),
        F.min(F.when(action.isNotNull(), F.col("trace_ms"))).alias("first_trace_ms"),
        F.min(F.when(action == "ENQUEUE", order)).alias("created"),
        latest(["CANCEL"], "requestor", "reason").alias("cancel"),
        latest(["COMPLETE", "FAIL", "TIMEOUT"], "error", "failed_dc").alias("end"),
        latest(["EXECUTE", "DISPATCH", "WORKFLOW_COMPLETE"]).alias("run"),
        F.max(F.when((action == "DEQUEUE") & has_dc, F.struct("rank", "dc"))).alias("acceptance"),
        F.min(F.when((action == "DEQUEUE") & has_dc, moment)).alias("accepted"),
        F.max(F.when((action == "CANCEL_ACK") & has_dc, moment)).alias("acknowledged"),
        F.collect_set(F.when(action == "DEQUEUE", F.col("dc"))).alias("accepted_dcs"),
        F.collect_set(F.when(action == "CANCEL_ACK", F.col("dc"))).alias("acked_dcs"),
    )
    return _with_meaning(folded)


def hlc_parts(rank: Column) -> list[Column]:
    """The HLC in a rank, as columns that order as it does."""
    return [rank[name].alias(name) for name in ("physical_ms", "logical", "node")]


def _with_meaning(folded: DataFrame) -> DataFrame:
    """The columns of ``fold`` for what a job's competing facts come to."""
    status, end = _status(), F.col("end")
    at_end = F.struct(end["rank"]["physical_ms"].alias("physical_ms"), end["trace_ms"].alias("trace_ms"))
    at_ack = F.struct(
        F.col("acknowledged.physical_ms").alias("physical_ms"), F.col("acknowledged.trace_ms").alias("trace_ms")
    )
    has_ended = F.col("status").isin([each for each in jobs.STATUSES if jobs.is_ended(each)])
    dc = F.coalesce(
        F.when(F.col("status") == jobs.FAILED, end["failed_dc"]),
        F.col("acceptance.dc"),
        F.try_element_at("created.assigned_dcs", F.lit(1)),
    )
    return folded.withColumn("status", status).select(
        "tenant_id",
        "job_id",
        "entries",
        "events",
        "events_in_trace",
        "private",
        "first_seq",
        "last_seq",
        "first_at",
        "last_at",
        "last_hlc",
        "first_event_ms",
        "first_trace_ms",
        "status",
        dc.alias("dc"),
        F.col("created").alias("creation"),
        _moment("created").alias("created"),
        _moment("accepted").alias("accepted"),
        F.when(F.col("cancel").isNotNull(), _struct_of("cancel.rank.physical_ms", "cancel.trace_ms")).alias(
            "cancelled"
        ),
        F.when(has_ended, F.when(end.isNotNull(), at_end).otherwise(at_ack)).alias("ended"),
        _struct_of("last_hlc.physical_ms", "last_trace_ms").alias("last"),
        F.col("created.actor").alias("created_by"),
        F.col("cancel.requestor").alias("cancelled_by"),
        F.col("cancel.reason").alias("cancel_reason"),
        F.when(has_ended, end["error"]).alias("error"),
        F.when(F.col("status") == jobs.FAILED, end["failed_dc"]).alias("failed_dc"),
        F.col("created.labels").alias("labels"),
    )


def _status() -> Column:
    """``ledger.machines.jobs.status`` of a folded row."""
    ended, cancelled = F.col("end").isNotNull(), F.col("cancel").isNotNull()
    accepted, acked = F.col("accepted_dcs"), F.col("acked_dcs")
    assigned = F.coalesce(F.col("created.assigned_dcs"), F.array().cast("array<string>"))
    asked = F.when(F.size(accepted) > 0, accepted).otherwise(assigned)
    all_acked = (F.size(acked) > 0) & (F.size(F.array_except(asked, acked)) == 0)
    end_fence, run_fence, accepted_fence = (
        F.coalesce(F.col(f"{name}.rank.fence"), F.lit(-1)) for name in ("end", "run", "acceptance")
    )
    status = F.when(cancelled & (ended | all_acked), jobs.CANCELLED).when(cancelled, jobs.CANCELLING)
    status = status.when(accepted_fence > F.greatest(end_fence, run_fence), jobs.ACCEPTED)
    status = status.when(run_fence > end_fence, jobs.RUNNING)
    for action, end_status in STATUS_OF_END.items():
        status = status.when(F.col("end.action") == action, end_status)
    return status.otherwise(jobs.SUBMITTED)


def _moment(name: str) -> Column:
    return F.when(F.col(name).isNotNull(), _struct_of(f"{name}.physical_ms", f"{name}.trace_ms"))


def _struct_of(physical_ms: str, trace_ms: str) -> Column:
    return F.struct(F.col(physical_ms).alias("physical_ms"), F.col(trace_ms).alias("trace_ms"))


def before_end(said: DataFrame, clock: Clock | None, end_ms: int | None) -> DataFrame:
    """The rows of ``pipeline.report.said`` that a report ending at ``end_ms`` knows of."""
    if end_ms is None:
        return said
    if clock is Clock.TRACE:
        return said.where(F.col("action").isNull() | (F.col("trace_ms") < end_ms))
    return said.where(F.col("at.physical_ms") < end_ms)


def on_clock(folded: DataFrame, clock: Clock) -> DataFrame:
    """One row a job of ``pipeline.report.jobs``, with moments and durations in milliseconds of ``clock``."""
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
        "labels",
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
        "created_by",
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


def by_tenant(folded: DataFrame) -> DataFrame:
    """One row a tenant: entries, range of seq and HLC, jobs, job events, and private values, which are not shown."""
    rows = folded.groupBy("tenant_id").agg(
        F.sum("entries").alias("entries"),
        F.min("first_seq").alias("first_seq"),
        F.max("last_seq").alias("last_seq"),
        _text(F.min("first_at")).alias("first_hlc"),
        _text(F.max("last_at")).alias("last_hlc"),
        F.count_if(F.col("events") > 0).alias("jobs"),
        F.sum("events").alias("job_events"),
        F.sum("events_in_trace").alias("trace_events"),
        F.sum("private").alias("private_values"),
    )
    return in_order(rows, "tenant_id")


def overall(folded: DataFrame) -> DataFrame:
    """One row for everything: counts, the first and last time on either clock."""
    return folded.agg(
        F.count_distinct("tenant_id").alias("tenants"),
        F.sum("entries").alias("entries"),
        F.sum("events").alias("job_events"),
        F.sum("events_in_trace").alias("trace_events"),
        F.sum("private").alias("private_values"),
        F.min("first_event_ms").alias("first_hlc_ms"),
        F.max("last_hlc.physical_ms").alias("last_hlc_ms"),
        F.min("first_trace_ms").alias("first_trace_ms"),
        F.max("last.trace_ms").alias("last_trace_ms"),
        _text(F.min("first_at")).alias("first_hlc"),
        _text(F.max("last_at")).alias("last_hlc"),
    )


def _text(hlc: Column) -> Column:
    return F.concat_ws(":", hlc["physical_ms"], hlc["logical"], hlc["node"])
