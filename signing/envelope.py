"""DSSE envelopes: a payload, its type, and signatures over both.

Format (github.com/secure-systems-lab/dsse, envelope.md and protocol.md)::

    {"payload": base64, "payloadType": text, "signatures": [{"keyid": text, "sig": base64}]}
    signed bytes = "DSSEv1" SP LEN(type) SP type SP LEN(payload) SP payload

``LEN`` counts bytes, in ASCII decimal. Worked example: type ``http://example.com/HelloWorld`` and payload
``hello world`` are signed as ``DSSEv1 29 http://example.com/HelloWorld 11 hello world``.

``keyid`` is outside the signed bytes: it only narrows which keys are tried, and may be absent.
"""

from __future__ import annotations

import base64
from typing import Any, NamedTuple

from ledger.errors import SignatureError, UnknownKeyError, refuse
from signing.keys import Keyring, PublicKey, Signer
from signing.strict import decode_base64

PAYLOAD_TYPE = "application/vnd.in-toto+json"

PAYLOAD_BYTES_MAX = 16 * 2**20
SIGNATURES_MAX = 16
KEY_ID_CHARACTERS_MAX = 256


class EnvelopeSignature(NamedTuple):
    """One signature and the unauthenticated hint at its key, empty when absent."""

    key_id: str
    signature: bytes


class Envelope(NamedTuple):
    """A well-formed envelope; nothing in it is verified."""

    payload_type: str
    payload: bytes
    signatures: tuple[EnvelopeSignature, ...]


class Signed(NamedTuple):
    """The keys that signed an envelope. ``verdict`` is ``ok``, ``unknown_key``, or ``not_checked`` without keys."""

    verdict: str
    detail: str | None
    """Why it is not ok."""
    key_ids: tuple[str, ...]
    """Held keys whose signature is valid."""


def pae(payload_type: str, payload: bytes) -> bytes:
    """Pre-authentication encoding: the bytes that are signed (DSSE protocol.md, Signature Definition)."""
    type_bytes = payload_type.encode()
    return b"DSSEv1 %d %b %d %b" % (len(type_bytes), type_bytes, len(payload), payload)


def sign(payload: bytes, *signers: Signer, payload_type: str = PAYLOAD_TYPE) -> dict[str, object]:
    """The envelope, as JSON values, with a signature by each of ``signers``.

    Raises:
        SigningUnavailableError: a signer cannot be reached.
    """
    message = pae(payload_type, payload)
    return {
        "payload": base64.b64encode(payload).decode(),
        "payloadType": payload_type,
        "signatures": [
            {"keyid": signer.key_id, "sig": base64.b64encode(signer.sign(message)).decode()} for signer in signers
        ],
    }


def verify(envelope: object, keys: object, *, payload_type: str = PAYLOAD_TYPE) -> bytes:
    """The payload, once a key of ``keys`` is found to have signed it.

    ``keys`` is anything that ``Keyring.of`` accepts. An envelope carries no time. So validity windows are not checked
    here, and a revoked key is never valid; ``snapshot.open_snapshot`` judges both by the signed HLC.

    Raises:
        UnknownKeyError: no held key signed it, or all that did are revoked.
        SignatureError: malformed, of another type, or a held key's signature is invalid.
        InvalidInputError: ``keys`` are no keys.
    """
    keyring, parsed = Keyring.of(keys), parse(envelope, payload_type)
    signed = judge(parsed, keyring)
    if signed.detail is not None:
        raise UnknownKeyError(signed.detail)
    return parsed.payload


def parse(envelope: object, payload_type: str) -> Envelope:
    """The parts of an envelope of ``payload_type``, unverified. Fields that DSSE does not name are ignored.

    Raises:
        SignatureError: malformed, over a bound, or of another type.
    """
    if not isinstance(envelope, dict):
        raise SignatureError("an envelope must be a JSON object")
    if envelope.get("payloadType") != payload_type:
        raise SignatureError(f"payloadType of the envelope is not {payload_type}")
    payload = decode_base64(envelope.get("payload"), "payload", url_safe=True)
    signatures: Any = envelope.get("signatures")
    is_bounded = isinstance(signatures, list) and 1 <= len(signatures) <= SIGNATURES_MAX
    refuse(
        SignatureError,
        (len(payload) > PAYLOAD_BYTES_MAX, f"payload is over {PAYLOAD_BYTES_MAX} bytes"),
        (not is_bounded, f"signatures must be a list of 1 to {SIGNATURES_MAX}"),
    )
    return Envelope(payload_type, payload, tuple(_signature(item) for item in signatures))


def _signature(item: object) -> EnvelopeSignature:
    if not isinstance(item, dict):
        raise SignatureError("a signature must be a JSON object")
    key_id = "" if item.get("keyid") is None else item["keyid"]
    if not isinstance(key_id, str) or len(key_id) > KEY_ID_CHARACTERS_MAX:
        raise SignatureError(f"keyid must be text of at most {KEY_ID_CHARACTERS_MAX} characters")
    return EnvelopeSignature(key_id, decode_base64(item.get("sig"), "sig", url_safe=True))


def signers_of(envelope: Envelope, keyring: Keyring) -> tuple[PublicKey, ...]:
    """The keys of the ring that signed the envelope, at least one; their validity windows are not checked.

    Raises:
        UnknownKeyError: none of the key ids is in the ring.
        SignatureError: a signature that names a key of the ring is invalid; or none names a key, and none is valid.
    """
    message = pae(envelope.payload_type, envelope.payload)
    signers: list[PublicKey] = []
    is_any_tried = False
    for key_id, signature in envelope.signatures:
        named = keyring.get(key_id)
        candidates = tuple(keyring) if not key_id else () if named is None else (named,)
        made = [key for key in candidates if key.made(signature, message)]
        if named is not None and not made:
            raise SignatureError(f"the signature by key {key_id} does not hold")
        is_any_tried |= bool(candidates)
        signers += made
    if signers:
        return tuple(signers)
    if not is_any_tried:
        named_ids = ", ".join(repr(key_id[:64]) for key_id, _ in envelope.signatures)
        raise UnknownKeyError(f"none of the keys that signed is known: {named_ids}")
    raise SignatureError("no signature holds, by any of the keys")


def judge(opened: Envelope, keyring: Keyring | None) -> Signed:
    """Verify an envelope that carries no time by the keys of ``keyring``: a revoked key is never valid.

    Raises:
        SignatureError: it names a held key that did not sign it.
    """
    if keyring is None:
        return Signed("not_checked", None, ())
    try:
        signers = signers_of(opened, keyring)
    except UnknownKeyError as error:
        return Signed("unknown_key", str(error), ())
    key_ids = tuple(key.key_id for key in signers)
    if any(key.revoked_from_hlc is None for key in signers):
        return Signed("ok", None, key_ids)
    return Signed(
        "unknown_key", f"key {signers[0].key_id} is revoked from HLC {signers[0].revoked_from_hlc} on", key_ids
    )
