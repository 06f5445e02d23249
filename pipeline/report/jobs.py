"""The facts that entries state about jobs, one row an entry, and the resulting jobs, one row a job.

Tasks read the fact of an entry with ``ledger.machines.jobs.said_of_row``, as every fold of jobs does. A fact counts
whatever its payload holds, a field of the wrong type counts as missing, and a CONFLICT entry states the fact of the
event that it holds. An entry that records a read of payloads names the reader and the route.

A fact of an excluded log does not count (``ledger.machines.exclusions``): its row remains, without the fact.

Spark groups the facts of a job in one task, which folds them as the service does. If a time precedes the one it
should follow (two nodes' clocks, an inaccurate trace), there is no duration: the job is marked ``is_backwards`` and
left out of the percentiles.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial, reduce
from itertools import groupby
from operator import attrgetter, itemgetter
from typing import Any, Final, NamedTuple

import msgspec
import orjson
import pyarrow as pa
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812

from ledger.canonical import INTEGER_MAX
from ledger.errors import TenantNotFoundError
from ledger.facts.events import ACTOR, EVENTS_BY_ACTION, SYSTEM_TENANT, SystemAction
from ledger.facts.statuses import ENDED, FAILED
from ledger.machines import jobs
from ledger.machines.exclusions import NO_STATEMENTS, SUBJECT, log_of, statements_of
from ledger.machines.job_fold import HlcParts, JobFold, traced_ms
from ledger.machines.jobs import payload_of, said_of_row
from ledger.private_fields import PRIVATE_MARK
from pipeline.arrow import batched, ddl_of, rows_of
from pipeline.places import OpenPlace
from pipeline.places.protocol import CHAIN_SEPARATOR, ChainName, Times
from pipeline.report import Clock
from pipeline.source import entries as entries_of

TENANTS_ASKED_MAX: Final = 20
"""Most tenants whose log origin is read; the tenants of a ledger nearly always share it."""
TEXT_CHARACTERS_MAX: Final = 500
"""Longest text, such as an error, in a table; the ledger holds the rest."""
COUNT_MAX: Final = 10**9
"""A larger count, which no service writes, counts as missing, so that sums fit 64 bits."""
COLUMNS: Final = (
    *("tenant_id", "seq", "job_id", "hlc_physical", "hlc_logical", "hlc_node"),
    *("action", "payload", "payload_digest"),
)
"""Columns of an entry that a report reads, beside its origin."""
OWN_LOG: Final = "own_log"
"""Column with the log of the chain that an entry was read from."""
_EVENT: Final = [name for name in COLUMNS if name not in ("seq", "payload")]
"""Columns that are equal in entries of different bundles if these hold the same event."""

_PRIVATE_BEGIN: Final = f'{{"{PRIVATE_MARK}":{{'
"""Prefix of a private value in canonical JSON. Inside a string its quotes would be escaped."""
_COUNTS_OF_READ: Final = ("jobs", "events", "entries")
_READ: Final = pa.struct([("route", pa.string()), *((name, pa.int64()) for name in _COUNTS_OF_READ)])
_HLC: Final = pa.struct([("physical_ms", pa.int64()), ("logical", pa.int64()), ("node", pa.string())])

Shown = tuple[str | None, bool]
"""A text as a table shows it, and whether it is private; the text of a private one is None."""
SHOWN: Final = pa.struct([("text", pa.string()), ("is_private", pa.bool_())])

_FACTS: Final = pa.schema(
    [
        *(("tenant_id", pa.string()), ("seq", pa.int64()), ("job_id", pa.string()), ("at", _HLC)),
        *(("action", pa.string()), ("event_ms", pa.int64()), ("trace_ms", pa.int64()), ("private", pa.int64())),
        *(("actor", SHOWN), ("read", _READ), ("fact", pa.binary())),
        *(("log", pa.string()), ("statement", pa.binary())),
    ]
)


class JobFact(NamedTuple):
    """The part of an event's statement about its job that a report shows."""

    action: str
    hlc: HlcParts
    digest: str
    fields: dict[str, Any]
    """The fields of the payload that the fold of jobs reads."""
    trace_ms: int | None
    requestor: Shown | None
    reason: Shown | None
    error: Shown | None
    failed_dc: str | None
    actor: Shown | None
    labels: list[Shown | None]


decode_fact: Final = msgspec.msgpack.Decoder(JobFact).decode


# --- which entries --------------------------------------------------------------------------------


def entries(
    spark: SparkSession, places: Sequence[OpenPlace], tenants: Collection[str] | None, before_ms: int | None
) -> DataFrame:
    """The entries of all ``places`` with an HLC before ``before_ms``. An event in several copies is returned once;
    ledgers with names stay apart, and ``tenant_id`` has the names of their chains."""
    wanted = _wanted(places, tenants)
    return _union(spark, [(place, names) for place, names in wanted if names] or wanted[:1], before_ms)


def system_entries(spark: SparkSession, places: Sequence[OpenPlace], before_ms: int | None) -> DataFrame | None:
    """The entries of ``_system``, likewise; None if no place has its chain."""
    wanted = [(place, names) for place in places if (names := place.chains_of([SYSTEM_TENANT]))]
    return _union(spark, wanted, before_ms) if wanted else None


def left_of(place: OpenPlace, tenants: Collection[str] | None) -> list[dict[str, Any]]:
    """The chains in a report whose first entries left, and are not read from an archive, each with its first seq."""
    names = place.chains_of(tenants) if tenants else _without_system(place)
    return [
        ChainName.parse(chain).named({"tenant_id": ChainName.parse(chain).tenant_id, "from_seq": floor.to_seq + 1})
        for chain, floor in place.floors(names).items()
    ]


def _union(spark: SparkSession, wanted: Sequence[tuple[OpenPlace, list[str]]], before_ms: int | None) -> DataFrame:
    times = Times(to_ms=None if before_ms is None else before_ms - 1)
    each = [
        entries_of(spark, place, tenants=names, columns=COLUMNS, times=times).withColumn(
            OWN_LOG, _own_log(place, names)
        )
        for place, names in wanted
    ]
    union = reduce(DataFrame.unionByName, each)
    is_apart = len(each) == 1 or all(None not in place.ledgers() for place, _ in wanted)
    return union if is_apart else union.dropDuplicates(_EVENT)


def _own_log(place: OpenPlace, tenants: Sequence[str]) -> Column:
    origin = next((found for name in tenants[:1] if (found := place.log_origin(name)) is not None), None)
    own = F.concat(F.lit(f"{origin}/"), F.substring_index("tenant_id", CHAIN_SEPARATOR, -1))
    return F.lit(None).cast("string") if origin is None else own


def _wanted(places: Sequence[OpenPlace], tenants: Collection[str] | None) -> list[tuple[OpenPlace, list[str]]]:
    """The chains of each place in a report: those of the requested tenants, else all but the ledger's own.

    Raises:
        TenantNotFoundError: no ledger has a requested tenant.
    """
    if not tenants:
        return [(place, _without_system(place)) for place in places]
    if len(places) == 1 and None in places[0].ledgers():
        return [(places[0], sorted(tenants))]
    found = [(place, place.chains_of(tenants)) for place in places]
    for name in sorted({*tenants} - {ChainName.parse(chain).tenant_id for _, chains in found for chain in chains}):
        raise TenantNotFoundError(f"there is no tenant {name!r} in {', '.join(map(str, places))}")
    return found


def _without_system(place: OpenPlace) -> list[str]:
    return [chain for chain in place.tenants() if ChainName.parse(chain).tenant_id != SYSTEM_TENANT]


def log_origins(places: Sequence[OpenPlace], tenants: Collection[str] | None) -> list[str]:
    """The origins of the logs in ``places``, without the tenant, read from the first tenants of each place."""
    asked = [(place, name) for place, names in _wanted(places, tenants) for name in names[:TENANTS_ASKED_MAX]]
    return sorted({origin for place, tenant_id in asked if (origin := place.log_origin(tenant_id)) is not None})


# --- what they state ------------------------------------------------------------------------------


def facts(entries: DataFrame, by: Sequence[str] = ()) -> DataFrame:
    """One row an entry: ``tenant_id, seq, job_id``, its own HLC as ``at``, and the ``fact`` it states about its job.

    ``entries`` has ``COLUMNS``, and ``origin`` and ``OWN_LOG`` if logs are known. If the entry is no job event,
    ``action`` is None, as are ``event_ms`` and ``trace_ms``, the event's time on each clock, and ``fact``, an encoded
    ``JobFact``. ``private`` counts the private values of the payload. ``actor`` sent the event, or did the read in
    ``read``: its route, and the numbers of jobs, events and entries. The labels of a fact that creates a job are the
    values of the fields ``by``, such as ``spec.image``. ``log`` first chained the entry; ``statement`` is one about an
    excluded log.
    """
    nothing = F.lit(None).cast("string")
    born = [F.col(name) if name in entries.columns else nothing.alias(name) for name in ("origin", OWN_LOG)]
    return entries.select(*COLUMNS, *born).mapInArrow(partial(_facts, [name.split(".") for name in by]), ddl_of(_FACTS))


def before_end(facts: DataFrame, clock: Clock | None, end_ms: int | None) -> DataFrame:
    """The rows of ``facts`` that a report ending at ``end_ms`` covers."""
    if end_ms is None:
        return facts
    return facts.where(f"{'action IS NULL OR trace_ms' if clock is Clock.TRACE else 'at.physical_ms'} < {end_ms:d}")


def counted(facts: DataFrame) -> DataFrame:
    """The rows of ``facts``, those of excluded logs without what they state about jobs."""
    stated: dict[str, list[Any]] = {}
    for row in facts.where("statement IS NOT NULL").select("tenant_id", "statement").collect():
        stated.setdefault(row.tenant_id, []).append(msgspec.msgpack.decode(row.statement))
    is_excluded = F.lit(False)
    for tenant_id, rows in stated.items():
        logs = statements_of(NO_STATEMENTS, rows, None).exclusions(None).logs
        is_excluded |= (F.col("tenant_id") == tenant_id) & F.col("log").isin(*logs)
    if not stated:
        return facts
    lost = ("action", "event_ms", "trace_ms", "fact")
    return facts.withColumns({name: F.when(~F.coalesce(is_excluded, F.lit(False)), F.col(name)) for name in lost})


def _facts(paths: Sequence[Sequence[str]], batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    return (pa.RecordBatch.from_pylist([_row(paths, *row) for row in rows_of(batch)], _FACTS) for batch in batches)


def _row(
    paths: Sequence[Sequence[str]],
    tenant_id: str,
    seq: Any,
    job_id: Any,
    physical_ms: Any,
    logical: Any,
    node: Any,
    own_action: Any,
    payload: Any,
    own_digest: Any,
    origin: Any = None,
    own_log: str | None = None,
) -> dict[str, Any]:
    own_hlc = (physical_ms, logical, node)
    row = {"tenant_id": tenant_id, "seq": seq, "job_id": job_id, "at": own_hlc, "private": 0}
    row["log"] = own_log if origin is None else log_of(origin)
    if job_id == SUBJECT:
        # Other places have other logs of their own, so each statement names its log.
        born = _json({"log": row["log"]})
        row["statement"] = msgspec.msgpack.encode((job_id, seq, *own_hlc, own_action, own_digest, payload, born))
    found = said_of_row(job_id, seq, *own_hlc, own_action, own_digest, payload)
    if found is None or found[0] not in EVENTS_BY_ACTION:
        return row | _read(payload) if own_action == SystemAction.PAYLOADS_READ else row
    action, given, hlc, digest = found
    text = _json(given) if action != own_action else payload if isinstance(payload, str) else ""
    fact = JobFact(
        action,
        hlc,
        digest,
        _fields(given),
        traced_ms(given.get("trace_time")),
        shown_text(given, "requestor"),
        shown_text(given, "reason"),
        shown_text(given, {"FAIL": "error", "TIMEOUT": "timeout_type"}.get(action, "")),
        _string(given, "failed_dc"),
        shown_text(given, ACTOR),
        [_label(given, path) for path in paths] if action == "ENQUEUE" else [],
    )
    return row | {
        "action": action,
        "event_ms": hlc[0],
        "trace_ms": fact.trace_ms,
        "private": text.count(_PRIVATE_BEGIN),
        "actor": fact.actor,
        "fact": msgspec.msgpack.encode(fact),
    }


def _fields(given: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a payload that decide a job's status, if of the right type."""
    fence, dc, assigned = given.get("fence_token"), given.get("dc_id"), given.get("assigned_dcs")
    is_right = {
        "fence_token": type(fence) is int and 0 <= fence <= INTEGER_MAX,
        "dc_id": isinstance(dc, str),
        "assigned_dcs": isinstance(assigned, list) and all(isinstance(name, str) for name in assigned),
    }
    return {name: given[name] for name in is_right if is_right[name]}


def _label(given: Mapping[str, Any], path: Sequence[str]) -> Shown | None:
    for name in path[:-1]:
        inner = given.get(name)
        if not isinstance(inner, dict):
            return None
        if PRIVATE_MARK in inner:
            return None, True
        given = inner
    return shown_text(given, path[-1])


def _read(payload: Any) -> dict[str, Any]:
    given = payload_of(payload)
    counts = {name: shown_count(given, name) for name in _COUNTS_OF_READ}
    if "job_id" in given and "events" not in given:
        counts["jobs"] = 1
    return {"actor": shown_text(given, ACTOR), "read": {"route": _string(given, "route"), **counts}}


def _string(given: Mapping[str, Any], name: str) -> str | None:
    value = given.get(name)
    return value[:TEXT_CHARACTERS_MAX] if isinstance(value, str) else None


def shown_text(given: Mapping[str, Any], name: str) -> Shown | None:
    """The text of a value in a table: a string unchanged, another value as JSON, a private one without text."""
    if (value := given.get(name)) is None:
        return None
    shown = value if isinstance(value, str) else _json(value)
    is_private = isinstance(value, dict) and _PRIVATE_BEGIN in shown
    return None if is_private else shown[:TEXT_CHARACTERS_MAX], is_private


def shown_count(given: Mapping[str, Any], name: str) -> int:
    """The count in a value that a table sums, up to ``COUNT_MAX``; other values are ignored."""
    value = given.get(name)
    return value if type(value) is int and 0 <= value <= COUNT_MAX else 0


def _json(value: Any) -> str:
    return orjson.dumps(value).decode()


# --- jobs -----------------------------------------------------------------------------------------


_SPANS: Final = {"queue": ("created", "accepted"), "run": ("accepted", "ended"), "total": ("created", "ended")}
"""Durations of a job, each with its start and end."""
_OF_WORK: Final = frozenset(("EXECUTE", "DISPATCH", "WORKFLOW_COMPLETE"))
"""Actions that a job may have any number of times; a single such event is not shown."""
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
    """One row a job of ``pipeline.report.jobs``, with moments and durations in milliseconds of ``clock``."""
    return (
        facts.select("tenant_id", "job_id", "seq", "fact")
        .repartition("tenant_id", "job_id")
        .sortWithinPartitions("tenant_id", "job_id")
        .mapInArrow(partial(_folded, clock), ddl_of(_JOB))
    )


def _folded(clock: Clock, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    by_job = groupby((row for batch in batches for row in rows_of(batch)), key=itemgetter(0, 1))
    folded = (_job(tenant_id, job_id, of_job, clock) for (tenant_id, job_id), of_job in by_job)
    return batched((tuple(job[name] for name in _JOB.names) for job in folded if job is not None), _JOB)


def _job(tenant_id: str, job_id: str, rows: Iterable[tuple[Any, ...]], clock: Clock) -> dict[str, Any] | None:
    """The row of one job from its entries, (tenant, job, seq, fact) each; None if it has no known event."""
    # 1. Fold. Bundles of several sites may contain one seq twice, so the fold identifies an event by its index here.
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
    with_dc = sorted((fact for fact in held.values() if "dc_id" in fact.fields), key=attrgetter("hlc", "digest"))
    first_accepted = next((fact for fact in with_dc if fact.action == "DEQUEUE"), None)
    ended = end or next((fact for fact in reversed(with_dc) if fact.action == "CANCEL_ACK" and has_ended), None)
    failed_dc = end.failed_dc if end is not None and status == FAILED else None
    dcs = [failed_dc, max(state.accepted, key=state.accepted.__getitem__, default=None)]
    dcs += state.created.assigned_dcs[:1] if state.created is not None else []
    # 3. The row.
    moments = {"created": created, "accepted": first_accepted, "cancelled": cancel, "ended": ended}
    is_on_trace = clock is Clock.TRACE
    at_ms = {
        name: None if fact is None else fact.trace_ms if is_on_trace else fact.hlc[0] for name, fact in moments.items()
    }
    at_ms["last"] = last_trace_ms if is_on_trace else state.last_hlc[0]
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
        **_times(at_ms),
    }


def _hlc_text(hlc: HlcParts) -> str:
    return "{}:{}:{}".format(*hlc)


def _times(at_ms: Mapping[str, int | None]) -> dict[str, Any]:
    """The moments, and the durations between them; None if a moment is missing or the order is reversed."""
    row: dict[str, Any] = {"is_backwards": False, **{f"{name}_ms": moment for name, moment in at_ms.items()}}
    for name, (first, then) in _SPANS.items():
        begin_ms, end_ms = at_ms[first], at_ms[then]
        span_ms = None if begin_ms is None or end_ms is None else end_ms - begin_ms
        is_backwards = span_ms is not None and span_ms < 0
        row["is_backwards"] |= is_backwards
        row[f"{name}_ms"] = None if is_backwards else span_ms
    return row
