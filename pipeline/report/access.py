"""Who did what: who sent the events and created the jobs, who read payloads, was allowed acts, and was refused.

Events say who sent them in ``actor``, reads of payloads are entries of the tenants' own chains (PAYLOADS_READ, where
``privacy.log_reads`` names the tenant), acts and refusals are entries of ``_system``. Where nobody is named, nobody was
known. Principals whose name is private are one row of their tenant, without a name.

Events and jobs count in the period of the report. What the ledger records of itself counts between the bounds that were
asked for, as reads come after the last event too. It has no time of a trace: in a report on one, all of it counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import Column
from pyspark.sql import functions as F  # noqa: N812

from ledger.facts.events import ACTOR, EVENTS_BY_ACTION, SystemAction
from ledger.machines.jobs import payload_of
from pipeline.arrow import ddl_of, rows_of
from pipeline.report.facts import SHOWN, shown_count, shown_text
from pipeline.report.folder import in_order, table, write_table
from pipeline.report.period import Asked, Clock, Period
from pipeline.report.summaries import moment

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

TABLES: Final = ("actors", "readers", "acts", "refusals")
ENDS: Final = ("complete", "fail", "timeout")
_ACTIONS: Final = tuple(EVENTS_BY_ACTION)
_TEXTS: Final = ("right", "route", "problem", "tenant_id")
_RECORDED: Final = pa.schema(
    [
        *(("kind", pa.string()), ("at_ms", pa.int64()), ("actor", SHOWN)),
        *((name, pa.string()) for name in _TEXTS),
        *(("count", pa.int64()), ("others", pa.int64())),
    ]
)


def write(
    known: DataFrame,
    timed: DataFrame,
    system: DataFrame | None,
    tenants: Sequence[str],
    asked: Asked,
    period: Period,
    folder: Path,
) -> dict[str, Any]:
    """Write the tables; returns their headline numbers.

    ``known`` are rows of ``pipeline.report.facts``, ``timed`` the jobs on the clock of the report, ``system`` the
    entries of ``_system``, None where they are not known. Of these are told those that name one of ``tenants``, all
    when empty.
    """
    write_table(actors(known, timed, period), folder, "actors")
    write_table(readers(known, asked), folder, "readers")
    recorded = _recorded(known.sparkSession, system, tenants, asked).persist()
    write_table(acts(recorded), folder, "acts")
    write_table(refusals(recorded), folder, "refusals")
    others = recorded.agg(F.sum("others")).first()
    recorded.unpersist()
    assert others is not None
    read = table(folder, "readers").to_table(columns=["tenant_id", "reads"])
    is_known = system is not None
    return {
        "events_without_actor": _total(
            folder, "actors", "events", pc.field("actor").is_null() & ~pc.field("is_private")
        ),
        "events_of_private_actors": _total(folder, "actors", "events", pc.field("is_private")),
        "reads": pc.sum(read["reads"]).as_py() or 0,
        "tenants_with_reads": len(pc.unique(read["tenant_id"])),
        "acts": _total(folder, "acts", "acts") if is_known else None,
        "refusals": _total(folder, "refusals", "refusals") if is_known else None,
        "refusals_not_listed": (others[0] or 0) if is_known else None,
    }


def _total(folder: Path, name: str, column: str, where: pc.Expression | None = None) -> int:
    found: int | None = pc.sum(table(folder, name).to_table(columns=[column], filter=where)[column]).as_py()
    return found or 0


def actors(known: DataFrame, timed: DataFrame, period: Period) -> DataFrame:
    """One row a tenant and actor, most events first: events by action, and the jobs whose first creation is of him."""
    at_ms = F.col("trace_ms" if period.clock is Clock.TRACE else "event_ms")
    sent = known.where(F.col("action").isNotNull() & _within(at_ms, period)).select("tenant_id", *_who(), "action")
    is_private = F.array_contains(F.split("private_fields", " "), "created_by")
    created = timed.where(_within(F.col("created_ms"), period)).select(
        "tenant_id", F.col("created_by").alias("actor"), is_private.alias("is_private"), F.lit(None).alias("action")
    )
    counted = sent.unionByName(created).groupBy("tenant_id", "actor", "is_private")
    rows = counted.agg(
        F.count("action").alias("events"),
        F.count_if(F.col("action").isNull()).alias("jobs_created"),
        *(F.count_if(F.col("action") == action).alias(action.lower()) for action in _ACTIONS),
    )
    return in_order(rows, F.desc("events"), F.desc("jobs_created"), "tenant_id", "actor", "is_private")


def readers(known: DataFrame, asked: Asked) -> DataFrame:
    """One row a tenant, reader and way to read, most reads first; a read of one job counts as one job."""
    read = known.where(F.col("read").isNotNull() & _within_asked(F.col("at.physical_ms"), asked))
    grouped = read.groupBy("tenant_id", *_who(), F.col("read.route").alias("route"))
    rows = grouped.agg(
        F.count("*").alias("reads"),
        *(F.sum(F.col("read")[name]).alias(name) for name in ("jobs", "events", "entries")),
        F.max("at.physical_ms").alias("last_ms"),
    )
    ordered = in_order(rows, F.desc("reads"), "tenant_id", "actor", "route")
    return ordered.withColumn("last", moment("last_ms", Clock.HLC)).drop("last_ms")


def acts(recorded: DataFrame) -> DataFrame:
    """One row an actor, right, route and tenant: how often that was allowed, most first."""
    return _counted(recorded.where("kind = 'act'"), "acts", "right", "route")


def refusals(recorded: DataFrame) -> DataFrame:
    """One row an actor, route, problem and tenant: how often that was refused, most first."""
    return _counted(recorded.where("kind = 'refusal'"), "refusals", "route", "problem")


def _counted(rows: DataFrame, name: str, *by: str) -> DataFrame:
    keys = ("actor", *by, "tenant_id")
    grouped = rows.groupBy(*_who(), *by, "tenant_id")
    counted = grouped.agg(F.sum("count").alias(name), F.max("at_ms").alias("last_ms"))
    ordered = in_order(counted, F.desc(name), *keys, "is_private")
    return ordered.select(*keys, "is_private", name, moment("last_ms", Clock.HLC).alias("last"))


def _who() -> list[Column]:
    return [F.col("actor.text").alias("actor"), F.coalesce("actor.is_private", F.lit(False)).alias("is_private")]


def _within(at_ms: Column, period: Period) -> Column:
    return (at_ms >= period.start_ms) & (at_ms < period.end_ms)


def _within_asked(at_ms: Column, asked: Asked) -> Column:
    start_ms, end_ms = (None, None) if asked.clock is Clock.TRACE else (asked.start_ms, asked.end_ms)
    is_late_enough = F.lit(True) if start_ms is None else at_ms >= start_ms
    return is_late_enough if end_ms is None else is_late_enough & (at_ms < end_ms)


def _recorded(spark: SparkSession, system: DataFrame | None, tenants: Sequence[str], asked: Asked) -> DataFrame:
    """The acts and refusals that entries of ``_system`` tell of, those that they only count too."""
    if system is None:
        return spark.createDataFrame([], ddl_of(_RECORDED))
    actions = [str(SystemAction.ACT_ALLOWED), str(SystemAction.ACCESS_REFUSED)]
    those = system.where(F.col("action").isin(actions) & _within_asked(F.col("hlc_physical"), asked))
    rows = those.select("action", "hlc_physical", "payload").mapInArrow(_told, ddl_of(_RECORDED))
    return rows.where((F.col("kind") == "others") | F.col("tenant_id").isin(*tenants)) if tenants else rows


def _told(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        rows = [row for action, at_ms, payload in rows_of(batch) for row in _rows(action, at_ms, payload_of(payload))]
        yield pa.RecordBatch.from_pylist(rows, _RECORDED)


def _rows(action: str, at_ms: int, payload: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """What one entry tells; what somebody edited beyond its types counts as not given."""
    if action == SystemAction.ACT_ALLOWED:
        yield _row("act", at_ms, payload) | {"count": 1}
        return
    listed = payload.get("refusals")
    for refusal in listed if isinstance(listed, list) else ():
        if isinstance(refusal, dict):
            yield _row("refusal", at_ms, refusal) | {"count": shown_count(refusal, "count")}
    if others := shown_count(payload, "others"):
        yield _row("others", at_ms, {}) | {"others": others}


def _row(kind: str, at_ms: int, given: dict[str, Any]) -> dict[str, Any]:
    texts = {name: (shown_text(given, name) or (None,))[0] for name in _TEXTS}
    return {"kind": kind, "at_ms": at_ms, "actor": shown_text(given, ACTOR), **texts}
