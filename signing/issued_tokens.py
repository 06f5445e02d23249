"""Tokens of callers, as the chain of ``_system`` says them.

The facts, as payloads of entries (docs/formats/tokens.md)::

    TOKEN_ISSUED   token_id, name, digest, rights, tenants, expires_at or none, issued_by or none; statement
    TOKEN_REVOKED  token_id, revoked_by or none

``digest`` is the SHA-256 of the token, in hex: nobody can make the token of it. ``statement`` is the envelope of
:mod:`signing.key_statement` around the other facts, by a key that the ledger admits, so whoever can only write to the
database issues none. Which entries count is said by :mod:`signing.key_history`.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Annotated, NamedTuple

import msgspec
from msgspec import UNSET, Meta, UnsetType

from ledger.chain.form import Hash
from ledger.errors import InvalidInputError
from ledger.facts.events import SystemAction
from ledger.hlc import Hlc

SUBJECT_PREFIX = "token:"
"""What ``job_id`` of an entry about a token begins with; the token's id follows."""
AFTER_SUBJECTS = "token;"
"""The first text, in the order of bytes, that no subject of a token comes after."""
ACTIONS = frozenset({SystemAction.TOKEN_ISSUED, SystemAction.TOKEN_REVOKED})

_Name = Annotated[str, Meta(min_length=1)]


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


class _Facts(msgspec.Struct):
    token_id: _Name
    name: _Name
    digest: Hash
    rights: tuple[str, ...]
    tenants: tuple[str, ...]
    expires_at: Annotated[datetime, Meta(tz=True)] | UnsetType = UNSET
    issued_by: _Name | UnsetType = UNSET


def read(facts: Mapping[str, object], issued_hlc: Hlc) -> IssuedToken:
    """The token that an entry of these facts, at this HLC, issues.

    Raises:
        InvalidInputError: they describe none.
    """
    try:
        said = msgspec.convert(facts, _Facts)
        expires_at = None if said.expires_at is UNSET else said.expires_at.astimezone(UTC)
    except (msgspec.ValidationError, OverflowError) as error:
        raise InvalidInputError(f"the facts of a token are malformed: {error}") from error
    digest, issued_by = bytes.fromhex(said.digest), None if said.issued_by is UNSET else said.issued_by
    return IssuedToken(said.token_id, said.name, digest, said.rights, said.tenants, issued_hlc, expires_at, issued_by)
