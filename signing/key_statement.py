"""Statements about keys and tokens, and the facts of tokens, in entries of ``_system``.

A key that may change the keys of a ledger, or issue its tokens, signs canonical JSON in a DSSE envelope
(:mod:`signing.envelope`) of type ``PAYLOAD_TYPE``::

    {"action": "KEY_ADMITTED",
     "after": {"chain_link": "9d…64 hex…", "seq": 3},
     "facts": {"algorithm": …, "key_id": …, "node_id": …, "public_key_pem": …},
     "root_key_id": "06e3fd8fda29bb60"}

``action`` and ``facts`` are all those of the entry, except the statement itself. ``after`` names an earlier entry about
a key in the same chain. Its link binds everything before it, so the statement is not valid in any other ledger, not
even in one with the same root key. It holds no time: its validity follows from its place in the chain.

The facts of entries about tokens (docs/formats/tokens.md)::

    TOKEN_ISSUED   token_id, name, digest, rights, tenants, expires_at or none, issued_by or none; statement
    TOKEN_REVOKED  token_id, revoked_by or none

``digest`` is the SHA-256 of the token, in hex, from which the token cannot be derived. An attacker who can only write
to the database cannot make a statement, and so issues no token. :mod:`signing.key_history` decides which entries are
valid.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from datetime import UTC, datetime
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import UNSET, Meta, UnsetType

from ledger import canonical, rfc3339
from ledger.chain.form import Hash
from ledger.decoding import convert
from ledger.errors import InvalidInputError, SignatureError, reported_as
from ledger.facts.events import SystemAction
from ledger.hlc import Hlc
from signing import envelope
from signing.keys import PublicKey, Signer
from signing.strict import parse_json

PAYLOAD_TYPE = "application/vnd.tallystick.key-statement+json"

FIELD = "statement"
"""Name of the fact that holds the envelope."""


class Anchor(NamedTuple):
    """An entry of ``_system`` about a key."""

    seq: int
    chain_link: str


def payload(action: str, facts: Mapping[str, object], root_key_id: str, after: Anchor) -> bytes:
    """The bytes that are signed."""
    said = {name: value for name, value in facts.items() if name not in (FIELD, "type")}
    return canonical.encode(
        {"action": str(action), "after": after._asdict(), "facts": said, "root_key_id": root_key_id}
    )


def sign(
    action: str, facts: Mapping[str, object], root_key_id: str, after: Anchor, signer: Signer
) -> dict[str, object]:
    """``facts`` with a statement about them by ``signer``.

    Raises:
        SigningUnavailableError: the signer cannot be reached.
    """
    said = payload(action, facts, root_key_id, after)
    return {**facts, FIELD: envelope.sign(said, signer, payload_type=PAYLOAD_TYPE)}


def voucher_of(
    action: str,
    facts: Mapping[str, object],
    root_key_id: str | None,
    authorities: Mapping[str, PublicKey],
    anchors: Set[Anchor],
) -> str | None:
    """Id of the key of ``authorities`` whose statement vouches for the facts of an entry, None if none does.

    The statement must be about exactly this change in a ledger with that root key, and name one of ``anchors``.
    """
    try:
        parsed = envelope.parse(facts.get(FIELD), PAYLOAD_TYPE)
        said: Any = parse_json(parsed.payload, "the statement")
        after = Anchor(said["after"]["seq"], said["after"]["chain_link"])
        ((key_id, signature),) = parsed.signatures
        is_nameable = type(after.seq) is int and after in anchors
        if root_key_id is None or not is_nameable or key_id not in authorities:
            return None
        is_about_this = parsed.payload == payload(action, facts, root_key_id, after)
    except (SignatureError, InvalidInputError, TypeError, LookupError, ValueError):
        return None
    holds = is_about_this and authorities[key_id].made(signature, envelope.pae(PAYLOAD_TYPE, parsed.payload))
    return key_id if holds else None


def given(**facts: object) -> dict[str, object]:
    """The facts that are not None."""
    return {name: value for name, value in facts.items() if value is not None}


# --- tokens -------------------------------------------------------------------------------------------

TOKEN_PREFIX = "token:"  # noqa: S105
"""Prefix of ``job_id`` in an entry about a token; the token's id follows."""
AFTER_TOKENS = "token;"
"""The first text, in byte order, after every token's subject."""
TOKEN_ACTIONS = frozenset({SystemAction.TOKEN_ISSUED, SystemAction.TOKEN_REVOKED})

_Name = Annotated[str, Meta(min_length=1)]


class IssuedToken(NamedTuple):
    """A token that is or was valid: its name, its rights and the tenants that they apply to."""

    token_id: str
    name: str
    digest: bytes
    rights: tuple[str, ...]
    tenants: tuple[str, ...]
    """Patterns: a tenant, a prefix and ``*``, or ``*`` alone."""
    issued_hlc: Hlc
    expires_at: datetime | None
    issued_by: str | None
    is_revoked: bool = False

    def facts(self) -> dict[str, object]:
        """As the entry has them, without the statement."""
        return given(
            token_id=self.token_id,
            name=self.name,
            digest=self.digest.hex(),
            rights=list(self.rights),
            tenants=list(self.tenants),
            expires_at=None if self.expires_at is None else rfc3339.written(self.expires_at),
            issued_by=self.issued_by,
        )


class _TokenFacts(msgspec.Struct):
    token_id: _Name
    name: _Name
    digest: Hash
    rights: tuple[str, ...]
    tenants: tuple[str, ...]
    expires_at: Annotated[datetime, Meta(tz=True)] | UnsetType = UNSET
    issued_by: _Name | UnsetType = UNSET


def read_token(facts: Mapping[str, object], issued_hlc: Hlc) -> IssuedToken:
    """The token that an entry with these facts, at this HLC, issues.

    Raises:
        InvalidInputError: the facts describe no token.
    """
    with reported_as(InvalidInputError, "the facts of a token are malformed", msgspec.ValidationError, OverflowError):
        said = convert(facts, _TokenFacts)
        expires_at = None if said.expires_at is UNSET else said.expires_at.astimezone(UTC)
    digest, issued_by = bytes.fromhex(said.digest), None if said.issued_by is UNSET else said.issued_by
    return IssuedToken(said.token_id, said.name, digest, said.rights, said.tenants, issued_hlc, expires_at, issued_by)
