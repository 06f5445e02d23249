"""What each entry says of its job, as columns: tasks ask ``ledger.machines.jobs.said_of_row``, as all who fold jobs do.

As there, a fact counts whatever its payload holds, a field of the wrong type counts as not given, and a CONFLICT entry
says what the event says that it holds. An entry that tells of a read of payloads says who read what.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final

import orjson
import pyarrow as pa
from pyspark.sql import DataFrame

from ledger.canonical import INTEGER_MAX
from ledger.facts.events import ACTOR, EVENTS_BY_ACTION, SystemAction
from ledger.machines.jobs import payload_of, said_of_row
from ledger.private_fields import PRIVATE_MARK
from pipeline.arrow import ddl_of, rows_of

TEXT_CHARACTERS_MAX: Final = 500
"""Longest text, such as an error, that a table holds; the ledger holds the rest."""
COUNT_MAX: Final = 10**9
"""A larger count, which no entry of a service has, counts as not given: sums stay within 64 bits."""
TRACE_SECONDS_MAX: Final = 10**11
"""Times of a trace beyond this, some 3,000 years, count as not given."""
COLUMNS: Final = (
    *("tenant_id", "seq", "job_id", "hlc_physical", "hlc_logical", "hlc_node"),
    *("action", "payload", "payload_digest"),
)
"""Of an entry, what is read."""

_PRIVATE_BEGIN: Final = f'{{"{PRIVATE_MARK}":{{'
"""How a private value begins in canonical JSON. Inside a string the quotes would be escaped."""
_HLC: Final = [("physical_ms", pa.int64()), ("logical", pa.int64()), ("node", pa.string())]
SHOWN: Final = pa.struct([("text", pa.string()), ("is_private", pa.bool_())])
"""A text as a table shows it; None of a private one."""
_COUNTS_OF_READ: Final = ("jobs", "events", "entries")
_READ: Final = pa.struct([("route", pa.string()), *((name, pa.int64()) for name in _COUNTS_OF_READ)])
_SAID: Final = pa.schema(
    [
        *(("tenant_id", pa.string()), ("seq", pa.int64()), ("job_id", pa.string()), ("at", pa.struct(_HLC))),
        ("action", pa.string()),
        ("rank", pa.struct([("fence", pa.int64()), *_HLC, ("digest", pa.string())])),
        *(("trace_ms", pa.int64()), ("dc", pa.string()), ("assigned_dcs", pa.list_(pa.string()))),
        *((name, SHOWN) for name in ("requestor", "reason", "error")),
        *(("failed_dc", pa.string()), ("private", pa.int64()), ("actor", SHOWN), ("read", _READ)),
        ("labels", pa.list_(SHOWN)),
    ]
)


def said(entries: DataFrame, by: Sequence[str] = ()) -> DataFrame:
    """One row an entry: ``tenant_id, seq, job_id``, its own HLC as ``at``, and what it says of the job.

    ``entries`` has ``COLUMNS``. ``action`` is None when the entry is no job event, and with it all that follows:
    ``rank`` (fence, HLC, digest), ``trace_ms``, ``dc`` and the texts. A text is a struct of ``text`` and
    ``is_private``; that of a private value is None. ``private`` counts the private values of the payload. ``actor``
    sent the event, or did the read that ``read`` tells of: its route, and how many jobs, events and entries. ``labels``
    are the values of the fields ``by``, such as ``spec.image``, where a job was created.
    """
    return entries.select(*COLUMNS).mapInArrow(partial(_said, [name.split(".") for name in by]), ddl_of(_SAID))


def _said(paths: Sequence[Sequence[str]], batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        yield pa.RecordBatch.from_pylist([_row(paths, *row) for row in rows_of(batch)], _SAID)


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
) -> dict[str, Any]:
    at = {"physical_ms": physical_ms, "logical": logical, "node": node}
    row = {"tenant_id": tenant_id, "seq": seq, "job_id": job_id, "at": at, "private": 0}
    found = said_of_row(job_id, seq, physical_ms, logical, node, own_action, own_digest, payload)
    if found is None or found[0] not in EVENTS_BY_ACTION:
        return row | _read(payload) if own_action == SystemAction.PAYLOADS_READ else row
    action, given, hlc, digest = found
    text = _json(given) if action != own_action else payload if isinstance(payload, str) else ""
    fence, names = given.get("fence_token"), given.get("assigned_dcs")
    is_list = isinstance(names, list) and all(isinstance(name, str) for name in names)
    error = {"FAIL": "error", "TIMEOUT": "timeout_type"}.get(action, "")
    return row | {
        "action": action,
        "rank": {
            "fence": fence if type(fence) is int and 0 <= fence <= INTEGER_MAX else 0,
            "digest": digest,
            **dict(zip(at, hlc, strict=True)),
        },
        "trace_ms": _trace_ms(given.get("trace_time")),
        "dc": _string(given, "dc_id", None),
        "assigned_dcs": names if is_list else [],
        "requestor": shown_text(given, "requestor"),
        "reason": shown_text(given, "reason"),
        "error": shown_text(given, error),
        "failed_dc": _string(given, "failed_dc", TEXT_CHARACTERS_MAX),
        "private": text.count(_PRIVATE_BEGIN),
        "actor": shown_text(given, ACTOR),
        "labels": [_label(given, path) for path in paths] if action == "ENQUEUE" else None,
    }


def _label(given: Mapping[str, Any], path: Sequence[str]) -> dict[str, Any] | None:
    for name in path[:-1]:
        inner = given.get(name)
        if not isinstance(inner, dict):
            return None
        if PRIVATE_MARK in inner:
            return {"text": None, "is_private": True}
        given = inner
    return shown_text(given, path[-1])


def _read(payload: Any) -> dict[str, Any]:
    given = payload_of(payload)
    counts = {name: shown_count(given, name) for name in _COUNTS_OF_READ}
    if "job_id" in given and "events" not in given:
        counts["jobs"] = 1
    return {
        "actor": shown_text(given, ACTOR),
        "read": {"route": _string(given, "route", TEXT_CHARACTERS_MAX), **counts},
    }


def _trace_ms(seconds: Any) -> int | None:
    is_time = type(seconds) in (int, float) and abs(seconds) <= TRACE_SECONDS_MAX
    return int(seconds * 1000 + (0.5 if seconds > 0 else -0.5)) if is_time else None


def _string(given: Mapping[str, Any], name: str, characters_max: int | None) -> str | None:
    value = given.get(name)
    return value[:characters_max] if isinstance(value, str) else None


def shown_text(given: Mapping[str, Any], name: str) -> dict[str, Any] | None:
    """What a table shows of a value: a string as it is, another value as JSON, nothing of a private one."""
    value = given.get(name)
    if value is None:
        return None
    shown = value if isinstance(value, str) else _json(value)
    is_private = isinstance(value, dict) and _PRIVATE_BEGIN in shown
    return {"text": None if is_private else shown[:TEXT_CHARACTERS_MAX], "is_private": is_private}


def shown_count(given: Mapping[str, Any], name: str) -> int:
    """What a table adds up of a value: a count up to ``COUNT_MAX``, of anything else nothing."""
    value = given.get(name)
    return value if type(value) is int and 0 <= value <= COUNT_MAX else 0


def _json(value: Any) -> str:
    return orjson.dumps(value).decode()
