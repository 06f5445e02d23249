"""Access tables: senders of events, creators of jobs, readers of payloads, and allowed and refused acts.

The sender of an event is its ``actor``. Reads of payloads are entries of the tenants' own chains (PAYLOADS_READ, if
``privacy.log_reads`` names the tenant). Acts and refusals are entries of ``_system``. A missing name means an
unknown principal. Principals with a private name share one row of their tenant, without a name.

Events and jobs count in the period of the report. The ledger's own records count within the requested bounds, as
reads may follow the last event. They have no trace time, so a report on a trace counts all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812

from ledger.facts.events import ACTOR, EVENTS_BY_ACTION, SystemAction
from ledger.machines.jobs import payload_of
from pipeline.arrow import ddl_of, rows_of
from pipeline.places.protocol import CHAIN_SEPARATOR, ChainName
from pipeline.report import Asked, Clock, Period
from pipeline.report.folder import in_order, table, write_table
from pipeline.report.jobs import SHOWN, shown_count, shown_text
from pipeline.report.tables import moment, within

TABLES: Final = ("actors", "readers", "acts", "refusals")
ENDS: Final = ("complete", "fail", "timeout")
_WHO: Final = ("actor.text AS actor", "coalesce(actor.is_private, false) AS is_private")
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

    ``known`` are rows of ``pipeline.report.jobs``, ``timed`` the jobs on the report's clock, ``system`` the entries
    of ``_system``, None if unknown. Only entries that name one of ``tenants`` are included; all if it is empty.
    """
    write_table(actors(known, timed, period), folder, "actors")
    write_table(readers(known, asked), folder, "readers")
    recorded = _recorded(known.sparkSession, system, tenants, asked).persist()
    for kind, name, by in (("act", "acts", ("right", "route")), ("refusal", "refusals", ("route", "problem"))):
        write_table(counted(recorded.where(F.col("kind") == kind), name, *by), folder, name)
    others = recorded.agg(F.coalesce(F.sum("others"), F.lit(0)).alias("count")).collect()[0]["count"]
    recorded.unpersist()
    read = table(folder, "readers").to_table(columns=["tenant_id", "reads"])
    is_known, is_private = system is not None, pc.field("is_private")
    return {
        "events_without_actor": _total(folder, "actors", "events", pc.field("actor").is_null() & ~is_private),
        "events_of_private_actors": _total(folder, "actors", "events", is_private),
        "reads": pc.sum(read["reads"]).as_py() or 0,
        "tenants_with_reads": len(pc.unique(read["tenant_id"])),
        "acts": _total(folder, "acts", "acts") if is_known else None,
        "refusals": _total(folder, "refusals", "refusals") if is_known else None,
        "refusals_not_listed": others if is_known else None,
    }


def _total(folder: Path, name: str, column: str, where: pc.Expression | None = None) -> int:
    return pc.sum(table(folder, name).to_table(columns=[column], filter=where)[column]).as_py() or 0


def actors(known: DataFrame, timed: DataFrame, period: Period) -> DataFrame:
    """One row a tenant and actor, most events first: events by action, and the jobs that the actor created first."""
    at_ms = "trace_ms" if period.clock is Clock.TRACE else "event_ms"
    rows = known.sparkSession.sql(
        f"""
        SELECT tenant_id, actor, is_private, count(action) AS events, count_if(action IS NULL) AS jobs_created,
               {", ".join(f"count_if(action = '{action}') AS `{action.lower()}`" for action in EVENTS_BY_ACTION)}
          FROM (SELECT tenant_id, {", ".join(_WHO)}, action FROM {{known}}
                 WHERE action IS NOT NULL AND {within(at_ms, period)}
                 UNION ALL
                SELECT tenant_id, created_by, array_contains(split(private_fields, ' '), 'created_by'), NULL
                  FROM {{timed}} WHERE {within("created_ms", period)})
         GROUP BY tenant_id, actor, is_private
        """,
        known=known,
        timed=timed,
    )
    return in_order(rows, F.desc("events"), F.desc("jobs_created"), "tenant_id", "actor", "is_private")


def readers(known: DataFrame, asked: Asked) -> DataFrame:
    """One row a tenant, reader and way to read, most reads first; a read of one job counts as one job."""
    rows = known.sparkSession.sql(
        f"""
        SELECT tenant_id, {", ".join(_WHO)}, read.route AS route, count(*) AS reads, sum(read.jobs) AS jobs,
               sum(read.events) AS events, sum(read.entries) AS entries, max(at.physical_ms) AS last_ms
          FROM {{known}} WHERE read IS NOT NULL AND {_within_asked("at.physical_ms", asked)} GROUP BY ALL
        """,
        known=known,
    )
    return (
        in_order(rows, F.desc("reads"), "tenant_id", "actor", "route")
        .withColumn("last", F.expr(moment("last_ms", Clock.HLC)))
        .drop("last_ms")
    )


def counted(rows: DataFrame, name: str, *by: str) -> DataFrame:
    """One row an actor, tenant and value of ``by``: counts of allowed or refused acts, most first."""
    keys = ("actor", *by, "tenant_id")
    each = (
        rows.selectExpr(*_WHO, *by, "tenant_id", "count", "at_ms")
        .groupBy(*keys, "is_private")
        .agg(F.sum("count").alias(name), F.max("at_ms").alias("last_ms"))
    )
    return in_order(each, F.desc(name), *keys, "is_private").selectExpr(
        *keys, "is_private", name, f"{moment('last_ms', Clock.HLC)} AS last"
    )


def _within_asked(name: str, asked: Asked) -> str:
    bounds = ((">=", asked.start_ms), ("<", asked.end_ms)) if asked.clock is not Clock.TRACE else ()
    return " AND ".join(["true", *(f"{name} {sign} {at_ms}" for sign, at_ms in bounds if at_ms is not None)])


def _recorded(spark: SparkSession, system: DataFrame | None, tenants: Sequence[str], asked: Asked) -> DataFrame:
    """The acts and refusals in entries of ``_system``, including those that are only counted there."""
    if system is None:
        return spark.createDataFrame([], ddl_of(_RECORDED))
    rows = (
        system.where(F.col("action").isin(str(SystemAction.ACT_ALLOWED), str(SystemAction.ACCESS_REFUSED)))
        .where(_within_asked("hlc_physical", asked))
        .select("action", "hlc_physical", "payload", "tenant_id")
        .mapInArrow(_told, ddl_of(_RECORDED))
    )
    named = F.substring_index("tenant_id", CHAIN_SEPARATOR, -1)
    return rows.where((F.col("kind") == "others") | named.isin(*tenants)) if tenants else rows


def _told(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        rows = [
            {**row, "tenant_id": _in_ledger(chain, row["tenant_id"])}
            for action, at_ms, payload, chain in rows_of(batch)
            for row in _rows(action, at_ms, payload_of(payload))
        ]
        yield pa.RecordBatch.from_pylist(rows, _RECORDED)


def _in_ledger(chain: str, tenant_id: str | None) -> str | None:
    """The name of the chain of ``tenant_id``, if there is one, in the ledger whose ``_system`` chain is named."""
    ledger = ChainName.parse(chain).ledger
    return tenant_id if ledger is None else str(ChainName(ledger, tenant_id or ""))


def _rows(action: str, at_ms: int, payload: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The rows of one entry; fields of a wrong type count as missing."""
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
