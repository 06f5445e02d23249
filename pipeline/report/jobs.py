"""One row a job: its state as ``ledger.machines.job_fold`` folds it, and when it came how far on the clock of a report.

Spark brings the facts of a job together in one task, which folds them as the service does. A time that lies before the
one it should follow (two nodes' clocks, a trace with slips) makes no duration: the job is marked ``is_backwards`` and
left out of the percentiles.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from itertools import groupby
from operator import itemgetter
from typing import Any, Final

import pyarrow as pa
from pyspark.sql import DataFrame

from ledger.facts.statuses import ENDED, FAILED, STATUSES
from ledger.machines import jobs
from ledger.machines.job_fold import JobFold
from ledger.machines.job_state import HlcParts
from pipeline.arrow import batched, ddl_of, rows_of
from pipeline.report.facts import SHOWN, JobFact, decode_fact
from pipeline.report.period import Clock

OPEN_STATUSES: Final = tuple(status for status in STATUSES if status not in ENDED)
_SPANS: Final = {"queue": ("created", "accepted"), "run": ("accepted", "ended"), "total": ("created", "ended")}
"""Durations of a job, and the moments that each lies between."""
_OF_WORK: Final = frozenset(("EXECUTE", "DISPATCH", "WORKFLOW_COMPLETE"))
"""Actions of the events that a job may have any number of; nothing of one alone is shown."""
_MOMENTS: Final = ("created", "accepted", "cancelled", "ended", "last")
_TEXTS: Final = ("created_by", "cancelled_by", "cancel_reason", "error")
_JOB: Final = pa.schema(
    [
        *((name, pa.string()) for name in ("tenant_id", "job_id", "status", "dc", "failed_dc", *_TEXTS)),
        *((name, pa.string()) for name in ("private_fields", "created_hlc", "last_hlc")),
        *((f"{name}_ms", pa.int64()) for name in (*_MOMENTS, *_SPANS)),
        *(("last_seq", pa.int64()), ("events", pa.int64()), ("is_backwards", pa.bool_())),
        ("labels", pa.list_(SHOWN)),
    ]
)


def fold(facts: DataFrame, clock: Clock) -> DataFrame:
    """One row a job of ``pipeline.report.facts``, with moments and durations in milliseconds of ``clock``."""
    by_job = facts.select("tenant_id", "job_id", "seq", "fact").repartition("tenant_id", "job_id")
    return by_job.sortWithinPartitions("tenant_id", "job_id").mapInArrow(partial(_folded, clock), ddl_of(_JOB))


def _folded(clock: Clock, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    rows = (row for batch in batches for row in rows_of(batch))
    by_job = groupby(rows, key=itemgetter(0, 1))
    folded = (_job(tenant_id, job_id, of_job, clock) for (tenant_id, job_id), of_job in by_job)
    return batched((tuple(job[name] for name in _JOB.names) for job in folded if job is not None), _JOB)


def _job(tenant_id: str, job_id: str, rows: Iterable[tuple[Any, ...]], clock: Clock) -> dict[str, Any] | None:
    """The row of one job, from its entries: (tenant, job, seq, fact) each; None where no event of it is known."""
    # 1. Fold. Bundles of several sites may give two events one seq, so the fold knows each by its place here.
    folding, held, events, last_seq = JobFold(job_id), dict[int, JobFact](), 0, 0
    last_trace_ms: int | None = None
    for _, _, seq, encoded in rows:
        last_seq = max(last_seq, seq or 0)
        if encoded is None:
            continue
        fact = decode_fact(encoded)
        folding.add(fact.action, fact.fields, fact.hlc, fact.digest, events)
        if fact.action not in _OF_WORK:
            held[events] = fact
        if fact.trace_ms is not None:
            last_trace_ms = max(fact.trace_ms, fact.trace_ms if last_trace_ms is None else last_trace_ms)
        events += 1
    if not events:
        return None
    # 2. The facts that count.
    state = folding.state()
    status = jobs.status(state)
    has_ended = status in ENDED
    created = None if state.created is None else held[state.created.order[-1]]
    cancel = None if state.cancel is None else held[state.cancel[-1]]
    end = held[state.end.rank[-1]] if state.end is not None and has_ended else None
    first_accepted = min(_with_dc(held, "DEQUEUE"), key=_order, default=None)
    last_acknowledged = max(_with_dc(held, "CANCEL_ACK"), key=_order, default=None) if has_ended else None
    failed_dc = end.failed_dc if end is not None and status == FAILED else None
    dcs = [failed_dc, max(state.accepted, key=state.accepted.__getitem__, default=None)]
    dcs += state.created.assigned_dcs[:1] if state.created is not None else []
    # 3. The row.
    moments = {"created": created, "accepted": first_accepted, "cancelled": cancel, "ended": end or last_acknowledged}
    at_ms = {name: None if fact is None else _at_ms(fact, clock) for name, fact in moments.items()}
    at_ms["last"] = state.last_hlc[0] if clock is Clock.HLC else last_trace_ms
    shown = {
        "created_by": None if created is None else created.actor,
        "cancelled_by": None if cancel is None else cancel.requestor,
        "cancel_reason": None if cancel is None else cancel.reason,
        "error": None if end is None else end.error,
    }
    return {
        "tenant_id": tenant_id,
        "job_id": job_id,
        "status": status,
        "failed_dc": failed_dc,
        "dc": next((dc for dc in dcs if dc is not None), None),
        **{name: None if text is None else text[0] for name, text in shown.items()},
        "private_fields": " ".join(name for name, text in shown.items() if text is not None and text[1]),
        "created_hlc": None if created is None else _hlc_text(created.hlc),
        "last_hlc": _hlc_text(state.last_hlc),
        "last_seq": last_seq,
        "events": events,
        "labels": None if created is None else created.labels,
        **{f"{name}_ms": moment for name, moment in at_ms.items()},
        **_spans(at_ms),
    }


def _with_dc(held: Mapping[int, JobFact], action: str) -> Iterator[JobFact]:
    return (fact for fact in held.values() if fact.action == action and "dc_id" in fact.fields)


def _order(fact: JobFact) -> tuple[HlcParts, str]:
    return fact.hlc, fact.digest


def _at_ms(fact: JobFact, clock: Clock) -> int | None:
    return fact.trace_ms if clock is Clock.TRACE else fact.hlc[0]


def _hlc_text(hlc: HlcParts) -> str:
    return "{}:{}:{}".format(*hlc)


def _spans(at_ms: Mapping[str, int | None]) -> dict[str, Any]:
    """The durations between moments, None where one of the two is missing or they run backwards."""
    row: dict[str, Any] = {"is_backwards": False}
    for name, (first, then) in _SPANS.items():
        begin_ms, end_ms = at_ms[first], at_ms[then]
        span_ms = None if begin_ms is None or end_ms is None else end_ms - begin_ms
        is_backwards = span_ms is not None and span_ms < 0
        row["is_backwards"] |= is_backwards
        row[f"{name}_ms"] = None if is_backwards else span_ms
    return row
