"""Two events with one HLC: both are kept, the first chained one as it is, the other in a CONFLICT entry.

An honest node never issues an HLC twice; a copied disk, a restored clock or a forger may. The CONFLICT entry replaces
the other event and has its own HLC, which follows from the held event alone::

    physical and logical of the event's HLC, node "conflict-" + first 40 hex of SHA-256(event)
    event = canonical JSON of [t_hlc, job_id, action, payload_digest]

So the same event gets the same CONFLICT HLC in every import: a second import finds it there. The payload is canonical
JSON::

    {"action", "digest", "hlc", "kept_digest", "payload", "type": "Conflict"}

``payload`` is the held event's payload as a string of the stored bytes, ``digest`` its SHA-256, ``kept_digest`` the
SHA-256 of the payload that was chained first.
"""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import sha256
from typing import Any, Final, NamedTuple

from ledger import canonical
from ledger.errors import InvalidInputError
from ledger.facts.events import CONFLICT_TYPE, VERDICTS, CommitmentAction
from ledger.hlc import Hlc

NODE_PREFIX: Final = "conflict-"
NODE_DIGITS: Final = 40
_FIELDS: Final = frozenset(("action", "digest", "hlc", "kept_digest", "payload", "type"))


class Event(NamedTuple):
    """The identity of an event within its tenant; the digest is lowercase hex."""

    t_hlc: str
    job_id: str
    action: str
    payload_digest: str


class HeldEvent(NamedTuple):
    """The event that a CONFLICT entry holds."""

    event: Event
    hlc: Hlc
    payload: str
    kept_digest: str


def conflict_hlc(event: Event) -> Hlc:
    """The HLC of the CONFLICT entry that holds ``event``.

    Raises:
        InvalidInputError: the event has no valid HLC.
    """
    hlc = Hlc.parse(event.t_hlc)
    return Hlc(
        hlc.physical_ms, hlc.logical, NODE_PREFIX + sha256(canonical.encode(list(event))).hexdigest()[:NODE_DIGITS]
    )


def conflict_payload(event: Event, payload: str, kept_digest: str) -> bytes:
    """The payload of the CONFLICT entry that holds ``event``; the first chained event has ``kept_digest``."""
    return canonical.encode(
        {
            "type": CONFLICT_TYPE,
            "hlc": event.t_hlc,
            "action": event.action,
            "kept_digest": kept_digest,
            "digest": event.payload_digest,
            "payload": payload,
        }
    )


def held_event(payload: Mapping[str, Any], job_id: str) -> HeldEvent | None:
    """The event in the payload of a CONFLICT entry of ``job_id``, None if the payload holds none."""
    if payload.keys() != _FIELDS or not all(isinstance(value, str) for value in payload.values()):
        return None
    try:
        hlc = Hlc.parse(payload["hlc"])
        digest = sha256(payload["payload"].encode()).hexdigest()
    except (InvalidInputError, UnicodeEncodeError):
        return None
    if digest != payload["digest"]:
        return None
    return HeldEvent(
        Event(payload["hlc"], job_id, payload["action"], digest), hlc, payload["payload"], payload["kept_digest"]
    )


ExistingEvents = Mapping[str, Event]
"""The relevant events of one chain by HLC; a CONFLICT entry is an event like any other."""


def find_event(event: Event, existing: ExistingEvents) -> tuple[str | None, str | None]:
    """The HLC at which ``event`` is chained, as itself or in a CONFLICT entry. If it is not chained, but another event
    has its HLC, the payload digest of that event."""
    if (first := existing.get(event.t_hlc)) is None:
        return None, None
    if first == event or _is_verdict_on(event, first):
        return event.t_hlc, None
    beside = conflict_hlc(event).text()
    return (beside, None) if beside in existing else (None, first.payload_digest)


def _is_verdict_on(event: Event, first: Event) -> bool:
    """Whether ``event`` is a proposal in its WAL form, and ``first`` is the verdict that contains it."""
    if event.action != CommitmentAction.PROPOSED or first.action not in VERDICTS or first.job_id != event.job_id:
        return False
    return first.action == CommitmentAction.PROPOSE_REJECTED or first.payload_digest == event.payload_digest
