"""Statements about retention in entries of a tenant's chain, by an admitted key.

The key signs canonical JSON in a DSSE envelope (:mod:`signing.envelope`) of type ``PAYLOAD_TYPE``::

    {"action": "PRUNED", "facts": {…all of the entry's but type and statement…}, "log": "tallystick.example/acme"}

``log`` is the log of the chain, so a statement is of no use in the chain of another tenant or ledger. ``after`` in the
facts names the entry about retention before it, so a statement is of no use at another place of its chain either
(:mod:`ledger.machines.retention`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from ledger import canonical
from ledger.errors import InvalidInputError, SignatureError, UnknownKeyError
from ledger.hlc import Hlc
from signing import envelope
from signing.keys import Keyring, Signer

PAYLOAD_TYPE: Final = "application/vnd.tallystick.retention-statement+json"
FIELD: Final = "statement"
"""Name of the fact that holds the envelope."""


def payload(action: str, facts: Mapping[str, object], log: str) -> bytes:
    """The bytes that are signed."""
    said = {name: value for name, value in facts.items() if name not in (FIELD, "type")}
    return canonical.encode({"action": str(action), "facts": said, "log": log})


def sign(action: str, facts: Mapping[str, object], log: str, signer: Signer) -> dict[str, object]:
    """``facts`` with a statement about them by ``signer``.

    Raises:
        SigningUnavailableError: the signer cannot be reached.
    """
    return {**facts, FIELD: envelope.sign(payload(action, facts, log), signer, PAYLOAD_TYPE)}


def fault(action: str, facts: Mapping[str, Any], log: str, hlc: str, keyring: Keyring) -> str | None:
    """Why no key of ``keyring`` vouches for these facts of an entry at ``hlc`` in the chain of ``log``; None if one
    does."""
    try:
        at = Hlc.parse(hlc)
        parsed = envelope.parse(facts.get(FIELD), PAYLOAD_TYPE)
        if parsed.payload != payload(action, facts, log):
            return "its statement is about other facts"
        refusals = [key.refusal(at) for key in envelope.signers_of(parsed, keyring)]
    except (UnknownKeyError, SignatureError, InvalidInputError) as error:
        return f"no admitted key signed it: {error}"
    return None if None in refusals else "; ".join(filter(None, refusals))
