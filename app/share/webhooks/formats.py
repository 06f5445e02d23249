"""What a receiver is sent of an entry, by the format that its webhook asks for. Pure functions of the entry.

    standard            the entry as ``GET /v1/chain/entries`` lists it; over HTTP several in one object
    cloudevents         one event of CloudEvents 1.0 in structured mode, whose ``data`` is the entry as listed
    cloudevents-batch   an array of such events
    ocsf                an event of OCSF 1.8.0; over HTTP an array of them

OCSF: an event of a job is Scheduled Job Activity (class 1006), every other entry a Base Event (class 0). ``raw_data``
is the payload, ``unmapped`` the rest of the entry as listed, so that nothing which a verifier needs is left out.

docs/webhooks.md has the mapping as tables.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any, Final, NamedTuple

import orjson

from app.runtime.answers import json_bytes
from app.runtime.settings.types import is_fetched_url, is_syslog_url
from app.store.chain_reads import ListedEntry
from ledger import names
from ledger.facts.events import (
    ACTOR,
    EVENTS_BY_ACTION,
    TRACEPARENT,
    TYPE_OF_ACTION,
    CommitmentAction,
    Part,
    SystemAction,
)


class Format(StrEnum):
    """What a receiver is sent each entry as."""

    STANDARD = "standard"
    CLOUDEVENTS = "cloudevents"
    CLOUDEVENTS_BATCH = "cloudevents-batch"
    OCSF = "ocsf"


_OF_ENTRIES: Final = frozenset({Format.STANDARD, Format.CLOUDEVENTS, Format.OCSF})
"""Formats that a single entry has: one message of syslog holds one."""


def is_receiver(url: str, form: str) -> bool:
    """Whether entries can be delivered there in this format."""
    if is_syslog_url(url):
        return form in _OF_ENTRIES
    return is_fetched_url(url) and form in {*Format}


class Severity(NamedTuple):
    """How grave an entry is, as RFC 5424 (6.2.1) and as OCSF have it."""

    syslog: int
    ocsf: int


INFORMATIONAL: Final = Severity(6, 1)
NOTICE: Final = Severity(5, 2)
WARNING: Final = Severity(4, 3)
ERROR: Final = Severity(3, 3)
CRITICAL: Final = Severity(2, 5)
_SEVERITIES: Final[Mapping[str, Severity]] = {
    **{
        action: ERROR if event.part is Part.END else NOTICE
        for action, event in EVENTS_BY_ACTION.items()
        if event.tone == "bad"
    },
    CommitmentAction.PROPOSE_REJECTED: NOTICE,
    **dict.fromkeys((SystemAction.REFUSED, SystemAction.CONFLICT, SystemAction.ACCESS_REFUSED), WARNING),
    SystemAction.WEBHOOK_DEAD_LETTERED: WARNING,
    **dict.fromkeys((SystemAction.KEY_REVOKED, SystemAction.REGION_KEY_REVOKED), WARNING),
    **dict.fromkeys((SystemAction.BREAK_FOUND, SystemAction.LOG_FORKED, SystemAction.WAL_LOST), CRITICAL),
}
"""By action; every other is informational."""

CLOUDEVENT: Final = "application/cloudevents+json"
CLOUDEVENTS_BATCH: Final = "application/cloudevents-batch+json"
JSON: Final = "application/json"
SPEC_VERSION: Final = "1.0"
DATA_SCHEMA: Final = "https://tallystick.dev/chain-entry/v1"
"""Names the form of ``data``; there is nothing behind it."""
TYPE_PREFIX: Final = "dev.tallystick"
STANDARD_TYPE: Final = "chain.entries"

OCSF_VERSION: Final = "1.8.0"
JOB_CLASS: Final = 1006
_CREATE, _UPDATE, _START, _OTHER = 1, 2, 6, 99
_ACTIVITY: Final[Mapping[Part, int]] = {
    Part.CREATION: _CREATE,
    Part.ACCEPTANCE: _START,
    Part.PROGRESS: _UPDATE,
    Part.WORKFLOW: _UPDATE,
}
"""The activity of an event by the part of the job's state that it updates; OCSF has none for ends and cancellations."""
_QUEUED, _RUNNING, _STOPPED = 2, 3, 4
_RUN_STATE: Final[Mapping[Part, int]] = {
    Part.CREATION: _QUEUED,
    Part.ACCEPTANCE: _RUNNING,
    Part.PROGRESS: _RUNNING,
    Part.WORKFLOW: _RUNNING,
    Part.END: _STOPPED,
}
_SUCCESS, _FAILURE = 1, 2
_DETAILS: Final = ("error", "timeout_type", "final_status", "reason")
"""Fields of events that say how it came to the status."""

_WORDS = re.compile("[A-Z][a-z]*")
_SPAN = re.compile(names.SPAN)


def http_body(
    form: str, webhook_id: str, entries: Sequence[ListedEntry], source: str, *, redelivered: bool
) -> tuple[str, bytes]:
    """Media type and body of a message with these entries. ``source`` is the origin of the tenant's log. CLOUDEVENTS
    takes one entry."""
    match Format(form):
        case Format.STANDARD:
            envelope = {
                "type": STANDARD_TYPE,
                "webhook_id": webhook_id,
                "tenant_id": entries[0].tenant_id,
                "redelivered": redelivered,
                "entries": [entry.as_listed() for entry in entries],
            }
            return JSON, json_bytes(envelope)
        case Format.CLOUDEVENTS:
            (entry,) = entries
            return CLOUDEVENT, json_bytes(cloud_event(entry, source))
        case Format.CLOUDEVENTS_BATCH:
            return CLOUDEVENTS_BATCH, json_bytes([cloud_event(entry, source) for entry in entries])
        case Format.OCSF:
            return JSON, json_bytes([ocsf_event(entry, source) for entry in entries])


def document(form: str, entry: ListedEntry, source: str) -> bytes:
    """The JSON of one entry."""
    match Format(form):
        case Format.STANDARD:
            return json_bytes(entry.as_listed())
        case Format.OCSF:
            return json_bytes(ocsf_event(entry, source))
        case _:
            return json_bytes(cloud_event(entry, source))


def severity_of(action: str) -> Severity:
    """How grave an entry of this action is."""
    return _SEVERITIES.get(action, INFORMATIONAL)


def cloud_event(entry: ListedEntry, source: str) -> dict[str, Any]:
    """The entry as an event of CloudEvents 1.0. ``source`` and ``id`` together name one entry for ever."""
    listed = entry.as_listed()
    attributes = {
        "specversion": SPEC_VERSION,
        "id": _id(entry),
        "source": source,
        "type": cloud_event_type(entry.action),
        "subject": entry.job_id,
        "time": listed["at"],
        "datacontenttype": JSON,
        "dataschema": DATA_SCHEMA,
        "sequence": f"{entry.seq:016}",
        TRACEPARENT: _span(_payload(entry)),
    }
    return {**{name: value for name, value in attributes.items() if value is not None}, "data": listed}


def cloud_event_type(action: str) -> str:
    """The type of an entry's event: ``dev.tallystick.job.completed``, ``dev.tallystick.ledger.key_rotated``."""
    if (event := EVENTS_BY_ACTION.get(action)) is not None:
        subject, *words = _WORDS.findall(event.name)
    else:
        subject = "commitment" if action in {*CommitmentAction} else "ledger"
        words = [action]
    return f"{TYPE_PREFIX}.{subject}.{'_'.join(words)}".lower()


def ocsf_event(entry: ListedEntry, source: str) -> dict[str, Any]:
    """The entry as an event of OCSF."""
    payload = _payload(entry)
    span = _span(payload)
    metadata = {
        "version": OCSF_VERSION,
        "product": {"name": "Tallystick", "vendor_name": "Tallystick"},
        "uid": _id(entry),
        "event_code": entry.action,
        "tenant_uid": entry.tenant_id,
        "log_name": source,
        "sequence": entry.seq,
        "logged_time": int(entry.created_at.timestamp() * 1000),
        **({"correlation_uid": span.split("-")[1]} if span else {}),
    }
    listed = entry.as_listed()
    del listed["payload"]
    event = EVENTS_BY_ACTION.get(entry.action)
    activity = _OTHER if event is None else _ACTIVITY.get(event.part, _OTHER)
    class_uid = 0 if event is None else JOB_CLASS
    name = TYPE_OF_ACTION.get(entry.action, entry.action)
    found: dict[str, Any] = {
        "category_uid": class_uid // 1000,
        "class_uid": class_uid,
        "activity_id": activity,
        "activity_name": name,
        "type_uid": class_uid * 100 + activity,
        "severity_id": severity_of(entry.action).ocsf,
        "time": entry.hlc_physical,
        "message": f"{name} {entry.job_id}",
        "metadata": metadata,
        "raw_data": entry.payload,
        "unmapped": listed,
    }
    if event is not None:
        place = _text(payload, "dc_id") or _text(payload, "failed_dc")
        found["device"] = {
            "type_id": _OTHER,
            "type": "data centre" if place else "node",
            "name": place or entry.hlc_node,
        }
        found["job"] = {"name": entry.job_id}
        if (run_state := _RUN_STATE.get(event.part)) is not None:
            found["job"]["run_state_id"] = run_state
        found["status_id"] = _FAILURE if event.part is Part.END and event.tone == "bad" else _SUCCESS
        if (detail := next(filter(None, (_text(payload, name) for name in _DETAILS)), None)) is not None:
            found["status_detail"] = detail
        if (actor := _text(payload, ACTOR)) is not None:
            found["actor"] = {"user": {"uid": actor}}
    return found


def _id(entry: ListedEntry) -> str:
    return f"{entry.tenant_id}/{entry.seq}"


def _payload(entry: ListedEntry) -> Mapping[str, Any]:
    """The payload; empty where an imported one is no object."""
    try:
        found = orjson.loads(entry.payload)
    except orjson.JSONDecodeError:
        return {}
    return found if isinstance(found, dict) else {}


def _span(payload: Mapping[str, Any]) -> str | None:
    """The span of the event; an imported one may have anything there."""
    found = _text(payload, TRACEPARENT)
    return found if found is not None and _SPAN.fullmatch(found) else None


def _text(payload: Mapping[str, Any], name: str) -> str | None:
    """A member that is a text: it may also be encrypted, or erased."""
    value = payload.get(name)
    return value if isinstance(value, str) and value else None
