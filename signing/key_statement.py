"""Statements about keys: what whoever may change the keys of a ledger signs, and an entry of ``_system`` carries.

A DSSE envelope (:mod:`signing.envelope`) of type ``PAYLOAD_TYPE`` around canonical JSON::

    {"action": "KEY_ADMITTED",
     "after": {"chain_link": "9d…64 hex…", "seq": 3},
     "facts": {"algorithm": …, "key_id": …, "node_id": …, "public_key_pem": …},
     "root_key_id": "06e3fd8fda29bb60"}

``action`` and ``facts`` are those of the entry, whole, but for the statement itself. ``after`` names an earlier entry
about a key in the same chain; its link binds everything before it, so the statement says nothing in any other ledger,
not even in one that has the same root key. Nothing in it is a time: when it counts follows from its place in the chain.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from ledger import canonical
from ledger.errors import InvalidInputError, SignatureError
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
