"""What the chain of ``_system`` says of keys: which there are, how long they count, from when on they are revoked.

The facts, as payloads of entries (docs/formats/keys.md)::

    KEY_ADDED     key_id, algorithm, public_key_pem, node_id
    KEY_ROTATED   the same of the new key, and previous_key_id, not_after: how long the one before it counts
    KEY_REVOKED   key_id, revoked_from_hlc, reason or none, node_id

The order of entries does not matter: of several ends and several revocations of one key the earliest counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime, timedelta
from typing import TypeVar

from ledger.errors import InvalidInputError
from ledger.events import SystemAction
from ledger.hlc import Hlc
from signing.public_key import PublicKey

KeyEvent = tuple[str, Mapping[str, object]]
"""Action and payload of one entry."""

Bound = TypeVar("Bound", datetime, Hlc)

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def time_of(physical_ms: int) -> datetime:
    """The time that a physical part of an HLC names."""
    return _EPOCH + timedelta(milliseconds=physical_ms)


def added_facts(key: PublicKey, node_id: str) -> dict[str, object]:
    """Facts of a KEY_ADDED entry."""
    return {
        "key_id": key.key_id,
        "algorithm": key.algorithm,
        "public_key_pem": key.public_key_pem,
        "node_id": node_id,
    }


def rotated_facts(key: PublicKey, node_id: str, previous_key_id: str, not_after_ms: int) -> dict[str, object]:
    """Facts of a KEY_ROTATED entry: ``key`` takes the place of another, which counts up to ``not_after_ms``."""
    not_after = time_of(not_after_ms).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    return {**added_facts(key, node_id), "previous_key_id": previous_key_id, "not_after": not_after}


def revoked_facts(key_id: str, node_id: str, from_hlc: Hlc, reason: str | None) -> dict[str, object]:
    """Facts of a KEY_REVOKED entry."""
    facts: dict[str, object] = {"key_id": key_id, "revoked_from_hlc": from_hlc.text(), "node_id": node_id}
    return facts if reason is None else {**facts, "reason": reason}


def root_key_id(events: Iterable[KeyEvent]) -> str | None:
    """Id of the key that a ledger began with, which names the ledger: the first that ``events``, in the order of the
    chain, introduce. None while there is none."""
    for action, facts in events:
        if action == SystemAction.KEY_ADDED and isinstance(key_id := facts.get("key_id"), str):
            return key_id
    return None


def keys_of(events: Iterable[KeyEvent]) -> dict[str, PublicKey]:
    """The keys that ``events`` introduce, by id, each with its end and its revocation.

    An event that holds no such facts says nothing; what it should have introduced stays unknown.
    """
    introduced: dict[str, PublicKey] = {}
    ends: dict[str, datetime] = {}
    revoked: dict[str, Hlc] = {}
    for action, facts in events:
        try:
            if action in (SystemAction.KEY_ADDED, SystemAction.KEY_ROTATED):
                key = PublicKey.from_json({name: facts.get(name) for name in ("key_id", "algorithm", "public_key_pem")})
                introduced[key.key_id] = key
            if action == SystemAction.KEY_ROTATED:
                _keep_lowest(ends, str(facts.get("previous_key_id")), _time(facts.get("not_after")))
            if action == SystemAction.KEY_REVOKED:
                _keep_lowest(revoked, str(facts.get("key_id")), Hlc.parse(str(facts.get("revoked_from_hlc"))))
        except (InvalidInputError, ValueError, OverflowError):
            continue
    return {
        key_id: PublicKey.of(key.material, not_after=ends.get(key_id), revoked_from_hlc=revoked.get(key_id))
        for key_id, key in introduced.items()
    }


def _time(text: object) -> datetime:
    """The same time in UTC; raises ValueError or OverflowError unless ``text`` is one with a zone."""
    time = datetime.fromisoformat(str(text))
    if time.tzinfo is None:
        raise ValueError("a time without a zone")
    return time.astimezone(UTC)


def _keep_lowest(bounds: dict[str, Bound], key_id: str, bound: Bound) -> None:
    known = bounds.get(key_id)
    bounds[key_id] = bound if known is None else min(known, bound)
