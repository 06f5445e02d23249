"""Statements about keys and tokens, and the facts of tokens: what entries of ``_system`` carry.

Whoever may change the keys of a ledger, or issue its tokens, signs canonical JSON in a DSSE envelope
(:mod:`signing.envelope`) of type ``PAYLOAD_TYPE``::

    {"action": "KEY_ADMITTED",
     "after": {"chain_link": "9d…64 hex…", "seq": 3},
     "facts": {"algorithm": …, "key_id": …, "node_id": …, "public_key_pem": …},
     "root_key_id": "06e3fd8fda29bb60"}

``action`` and ``facts`` are those of the entry, whole, but for the statement itself. ``after`` names an earlier entry
about a key in the same chain; its link binds everything before it, so the statement says nothing in any other ledger,
not even in one that has the same root key. Nothing in it is a time: when it counts follows from its place in the chain.

The facts of entries about tokens (docs/formats/tokens.md)::

    TOKEN_ISSUED   token_id, name, digest, rights, tenants, expires_at or none, issued_by or none; statement
    TOKEN_REVOKED  token_id, revoked_by or none

``digest`` is the SHA-256 of the token, in hex: nobody can make the token of it. Who can only write to the database
makes no statement, and so issues no token. Which entries count is said by :mod:`signing.key_history`.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from datetime import UTC, datetime
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import UNSET, Meta, UnsetType

from ledger import canonical, rfc3339
from ledger.chain.form import Hash
from ledger.errors import InvalidInputError, SignatureError
from ledger.facts.events import SystemAction
from ledger.hlc import Hlc
from signing import envelope
from signing.keys import PublicKey, Signer
from signing.strict import parse_json

PAYLOAD_TYPE = "application/vnd.tallystick.key-statement+json"

FIELD = "statement"
"""Under what name the facts of an entry carry the envelope."""


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
    """``facts`` with a statement by ``signer`` that it is so.

    Raises:
        SigningUnavailableError: the signer cannot be reached.
    """
    return {**facts, FIELD: envelope.sign(payload(action, facts, root_key_id, after), signer, PAYLOAD_TYPE)}


class Statement(NamedTuple):
    """A statement that is well-formed: whose it says it is, and the entry it names; nobody vouches for it yet."""

    signer_id: str
    after: Anchor
    payload: bytes
    signature: bytes

    def holds(self, action: str, facts: Mapping[str, object], root_key_id: str, signer: PublicKey) -> bool:
        """Whether ``signer`` made it, about just this change in a ledger that began with that root key."""
        try:
            expected = payload(action, facts, root_key_id, self.after)
        except InvalidInputError:
            return False
        return self.payload == expected and signer.made(self.signature, envelope.pae(PAYLOAD_TYPE, expected))


def read(facts: Mapping[str, object]) -> Statement | None:
    """The statement that the facts of an entry carry, None where there is none that can be one."""
    try:
        parsed = envelope.parse(facts.get(FIELD), PAYLOAD_TYPE)
        said: Any = parse_json(parsed.payload, "the statement")
        after = Anchor(said["after"]["seq"], said["after"]["chain_link"])
        ((key_id, signature),) = parsed.signatures
    except (SignatureError, TypeError, KeyError, ValueError):
        return None
    if type(after.seq) is not int or not isinstance(after.chain_link, str):
        return None
    return Statement(key_id, after, parsed.payload, signature)


def voucher_of(
    action: str,
    facts: Mapping[str, object],
    root_key_id: str | None,
    authorities: Mapping[str, PublicKey],
    anchors: Set[Anchor],
) -> str | None:
    """Id of the key of ``authorities`` whose statement vouches for the facts of an entry, None when none does.

    The statement must name one of ``anchors``.
    """
    statement = read(facts)
    if root_key_id is None or statement is None or statement.after not in anchors:
        return None
    signer = authorities.get(statement.signer_id)
    return signer.key_id if signer is not None and statement.holds(action, facts, root_key_id, signer) else None


def given(**facts: object) -> dict[str, object]:
    """The facts that are not None."""
    return {name: value for name, value in facts.items() if value is not None}


# --- tokens -------------------------------------------------------------------------------------------

TOKEN_PREFIX = "token:"  # noqa: S105
"""What ``job_id`` of an entry about a token begins with; the token's id follows."""
AFTER_TOKENS = "token;"
"""The first text, in the order of bytes, that no subject of a token comes after."""
TOKEN_ACTIONS = frozenset({SystemAction.TOKEN_ISSUED, SystemAction.TOKEN_REVOKED})

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
    """The token that an entry of these facts, at this HLC, issues.

    Raises:
        InvalidInputError: they describe none.
    """
    try:
        said = msgspec.convert(facts, _TokenFacts)
        expires_at = None if said.expires_at is UNSET else said.expires_at.astimezone(UTC)
    except (msgspec.ValidationError, OverflowError) as error:
        raise InvalidInputError(f"the facts of a token are malformed: {error}") from error
    digest, issued_by = bytes.fromhex(said.digest), None if said.issued_by is UNSET else said.issued_by
    return IssuedToken(said.token_id, said.name, digest, said.rights, said.tenants, issued_hlc, expires_at, issued_by)
