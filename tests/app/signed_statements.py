"""Signed statements of SCITT, as another implementation makes them: with cbor2 alone."""

from __future__ import annotations

from typing import Any

import cbor2
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature
from cryptography.hazmat.primitives.hashes import SHA256

from tests.ledger.callers import Signing

ALGORITHMS = {"ed25519": -8, "ecdsa-p256": -7, "ml-dsa-44": -48}
PAYLOAD = b'{"sbom":"spdx"}'


def protected_of(signing: Signing, **changes: Any) -> dict[Any, Any]:
    """The protected header of a statement; ``claims`` and the labels in ``headers`` take the place of what is usual."""
    claims = changes.get("claims", {1: "https://vendor.example", 2: "pkg:cli@1.2.3"})
    usual = {1: ALGORITHMS[signing.caller.key.algorithm], 3: "application/json", 4: signing.key_id.encode(), 15: claims}
    headers = {**usual, **changes.get("headers", {})}
    return {label: value for label, value in headers.items() if value is not None}


def signed_by(signing: Signing, message: bytes) -> bytes:
    """The signature as COSE has it."""
    private = signing._private
    if isinstance(private, ec.EllipticCurvePrivateKey):
        r, s = decode_dss_signature(private.sign(message, ec.ECDSA(SHA256())))
        return r.to_bytes(32) + s.to_bytes(32)
    return private.sign(message)


def parts_of(signing: Signing, payload: bytes = PAYLOAD, **changes: Any) -> list[Any]:
    protected = changes.get("protected") or cbor2.dumps(protected_of(signing, **changes))
    signature = signed_by(signing, cbor2.dumps(["Signature1", protected, b"", payload]))
    return [protected, changes.get("unprotected", {}), payload, signature]


def statement(signing: Signing, payload: bytes = PAYLOAD, **changes: Any) -> bytes:
    return cbor2.dumps(cbor2.CBORTag(18, parts_of(signing, payload, **changes)))
