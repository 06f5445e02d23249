"""The digest that binds an event to its Idempotency-Key.

The table of keys can be edited, so its rows alone prove nothing. The payload of a keyed event therefore has one more
member, which the link and every signature cover::

    "idempotency": lowercase hex SHA-256 of the canonical JSON of [tenant_id, route, key, line, body digest as hex]

A row of the table is right if and only if the entry at its seq has the row's digest. A REFUSED or a CONFLICT entry has
the digest of the event that it keeps.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import Any, Final, NamedTuple

import orjson

from ledger import canonical
from ledger.chain.conflict import held_event
from ledger.chain.record import IdempotencyKey
from ledger.facts.events import ACTIONS, VERDICTS, CommitmentAction, SystemAction
from ledger.machines.promises import proposed_payload

MEMBER: Final = "idempotency"
_MEMBER = MEMBER.encode()


class KeptEvent(NamedTuple):
    """The event that an entry is, or keeps."""

    job_id: str
    action: str
    payload: str


def key_digest(tenant_id: str, key: IdempotencyKey) -> str:
    """The value of ``MEMBER`` in the payload of an event of this key."""
    return sha256(canonical.encode([tenant_id, key.route, key.key, key.line, key.body_digest.hex()])).hexdigest()


def members(tenant_ids: Sequence[str], key: IdempotencyKey) -> list[bytes]:
    """The members of events of one keyed request, a comma behind each, for a payload without them. The first is of the
    line of ``key``, the others follow on it."""
    request, end = canonical.encode([key.route, key.key])[1:-1], b',"%b"]' % key.body_digest.hex().encode()
    begins = {each: b"[%b,%b," % (canonical.encode(each), request) for each in set(tenant_ids)}
    return [
        b'"%b":"%b",' % (_MEMBER, sha256(b"%b%d%b" % (begins[tenant_id], number, end)).hexdigest().encode())
        for number, tenant_id in enumerate(tenant_ids, key.line)
    ]


def kept_event(job_id: str, action: str, payload: str) -> KeptEvent | None:
    """The event of an entry: the entry itself, the proposal that was judged, or the event that a REFUSED or CONFLICT
    entry keeps; None if there is none.

    Raises:
        ValueError, TypeError, KeyError: the payload of a REFUSED or judged entry is malformed.
    """
    if action == SystemAction.REFUSED:
        kept = orjson.loads(payload)
        return KeptEvent(
            base64.b64decode(kept["job_id"]).decode(),
            ACTIONS[kept["record_type"]],
            base64.b64decode(kept["payload"]).decode(),
        )
    if action == SystemAction.CONFLICT:
        held = held_event(orjson.loads(payload), job_id)
        return None if held is None else KeptEvent(job_id, held.event.action, held.payload)
    if action in VERDICTS:
        return KeptEvent(job_id, CommitmentAction.PROPOSED.value, proposed_payload(payload).decode())
    return KeptEvent(job_id, action, payload)


def digest_in(payload: Mapping[str, Any]) -> str | None:
    """The key digest in a payload, None if it has none: the event had no key, or is older than this member."""
    digest = payload.get(MEMBER)
    return digest if isinstance(digest, str) else None
