"""Statements about retention in entries of a tenant's chain, by an admitted key.

The key signs canonical JSON in a DSSE envelope (:mod:`signing.envelope`) of type ``PAYLOAD_TYPE``::

    {"action": "PRUNED", "facts": {…all of the entry's but type and statement…}, "log": "tallystick.example/acme"}

``log`` is the log of the chain, so a statement is of no use in the chain of another tenant. After a fork the log has
another origin and the chain goes on, so a statement counts whose log is of the same tenant; of another ledger no key is
admitted. ``after`` in the facts names the entry about retention before it, so a statement is of no use at another place
of its chain either (:mod:`ledger.machines.retention`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import orjson

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
    return {**facts, FIELD: envelope.sign(payload(action, facts, log), signer, payload_type=PAYLOAD_TYPE)}


def _log_in(stated: bytes, log: str) -> str:
    """The log that a statement names if it is of the tenant of ``log``, as before a fork; else ``log``."""
    try:
        named = orjson.loads(stated)["log"]
    except (ValueError, TypeError, KeyError):
        return log
    is_of_tenant = isinstance(named, str) and named.rpartition("/")[2] == log.rpartition("/")[2]
    return named if is_of_tenant else log


def judge(log: str, keyring: Keyring | None, action: str, facts: Mapping[str, Any], hlc: str) -> str:
    """Whether a key of ``keyring`` vouches for these facts of an entry at ``hlc`` in the chain of ``log``, as
    ``ledger.machines.retention.Judge`` says."""
    try:
        at = Hlc.parse(hlc)
        parsed = envelope.parse(facts.get(FIELD), PAYLOAD_TYPE)
        if parsed.payload != payload(action, facts, _log_in(parsed.payload, log)):
            return "broken"
        if keyring is None:
            return "not_checked"
        is_valid = any(key.refusal(at) is None for key in envelope.signers_of(parsed, keyring))
    except UnknownKeyError:
        return "unknown_key"
    except (SignatureError, InvalidInputError):
        return "broken"
    return "ok" if is_valid else "unknown_key"
