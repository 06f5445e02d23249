"""Tokens of callers, as the chain of ``_system`` says them.

The facts, as payloads of entries (docs/formats/tokens.md)::

    TOKEN_ISSUED   token_id, name, digest, rights, tenants, expires_at or none, issued_by or none; statement
    TOKEN_REVOKED  token_id, revoked_by or none

``digest`` is the SHA-256 of the token, in hex: nobody can make the token of it. ``statement`` is the envelope of
:mod:`signing.key_statement` around the other facts, by a key that the ledger admits, so whoever can only write to the
database issues none. Which entries count is said by :mod:`signing.key_history`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import NamedTuple

from ledger.errors import InvalidInputError
from ledger.facts.events import SystemAction
from ledger.hlc import Hlc

SUBJECT_PREFIX = "token:"
"""What ``job_id`` of an entry about a token begins with; the token's id follows."""
AFTER_SUBJECTS = "token;"
"""The first text, in the order of bytes, that no subject of a token comes after."""
ACTIONS = frozenset({SystemAction.TOKEN_ISSUED, SystemAction.TOKEN_REVOKED})

_DIGEST = re.compile("[0-9a-f]{64}")


class IssuedToken(NamedTuple):
    """A token that counts, or counted: whose it is, and what it allows for which tenants."""

    token_id: str
    name: str
    digest: bytes
    rights: tuple[str, ...]
    tenants: tuple[str, ...]
    """Patterns: a tenant, the beginning of tenants and ``*``, or ``*`` alone."""
    issued_hlc: Hlc
    expires_at: datetime | None
    issued_by: str | None
    is_revoked: bool = False

    def facts(self) -> dict[str, object]:
        """As the entry has them, without the statement."""
        facts: dict[str, object] = {
            "token_id": self.token_id,
            "name": self.name,
            "digest": self.digest.hex(),
            "rights": list(self.rights),
            "tenants": list(self.tenants),
        }
        if self.expires_at is not None:
            facts["expires_at"] = self.expires_at.isoformat().replace("+00:00", "Z")
        if self.issued_by is not None:
            facts["issued_by"] = self.issued_by
        return facts


def read(facts: Mapping[str, object], issued_hlc: Hlc) -> IssuedToken:
    """The token that an entry of these facts, at this HLC, issues.

    Raises:
        InvalidInputError: they describe none.
    """
    digest = facts.get("digest")
    if not isinstance(digest, str) or _DIGEST.fullmatch(digest) is None:
        raise InvalidInputError("digest: is not 64 hex digits", ("digest",))
    return IssuedToken(
        token_id=_text(facts, "token_id"),
        name=_text(facts, "name"),
        digest=bytes.fromhex(digest),
        rights=_texts(facts, "rights"),
        tenants=_texts(facts, "tenants"),
        issued_hlc=issued_hlc,
        expires_at=_time(facts, "expires_at") if "expires_at" in facts else None,
        issued_by=_text(facts, "issued_by") if "issued_by" in facts else None,
    )


def _text(facts: Mapping[str, object], name: str) -> str:
    value = facts.get(name)
    if not isinstance(value, str) or not value:
        raise InvalidInputError(f"{name}: is no text", (name,))
    return value


def _texts(facts: Mapping[str, object], name: str) -> tuple[str, ...]:
    values = facts.get(name)
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise InvalidInputError(f"{name}: is no list of texts", (name,))
    return tuple(values)


def _time(facts: Mapping[str, object], name: str) -> datetime:
    try:
        time = datetime.fromisoformat(_text(facts, name))
        if time.tzinfo is not None:
            return time.astimezone(UTC)
    except (ValueError, OverflowError):
        pass
    raise InvalidInputError(f"{name}: is no time with a zone", (name,))
