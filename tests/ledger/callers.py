"""Callers with fixed keys, and what they sign."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any

import orjson
from cryptography.hazmat.primitives.asymmetric import ec, mldsa
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.hashes import SHA256

from ledger import signed_events
from ledger.merkle import leaf_hash, levels_of
from ledger.signed_events import MEMBER
from signing.keys import Caller, KnownCallers, PublicKey, Requirement
from tests.cases.signatures import remembered

Private = Ed25519PrivateKey | ec.EllipticCurvePrivateKey | mldsa.MLDSA44PrivateKey


class Signing:
    """A caller that signs with its private key."""

    def __init__(self, private: Private, name: str = "ci", tenants: Sequence[str] = ("*",)) -> None:
        self._private = private
        self.caller = Caller(PublicKey.of(private.public_key()), name, tuple(tenants))
        self.key_id = self.caller.key.key_id
        self._count = 0

    def sign(self, message: bytes) -> str:
        """The signature as payloads have it."""
        if isinstance(self._private, ec.EllipticCurvePrivateKey):
            signature = self._private.sign(message, ec.ECDSA(SHA256(), deterministic_signing=True))
        elif isinstance(self._private, mldsa.MLDSA44PrivateKey):
            signature = remembered(self.key_id, message, self._private.sign)
        else:
            signature = self._private.sign(message)
        return base64.b64encode(signature).decode()

    def said(self, physical_ms: int, identity: str | None = None) -> dict[str, Any]:
        """What it says of itself in a signature for a minute around this time."""
        self._count += 1
        return {
            "id": identity or f"id-{self._count}",
            "key_id": self.key_id,
            "not_after_ms": physical_ms + 60_000,
            "not_before_ms": physical_ms - 60_000,
        }

    def signed(
        self, tenant_id: str, job_id: str, payload: Mapping[str, Any], physical_ms: int, identity: str | None = None
    ) -> dict[str, Any]:
        """``payload`` with its signature."""
        said = self.said(physical_ms, identity)
        message = signed_events.message(tenant_id, job_id, said, signed_events.signed_payload(payload))
        return {**payload, MEMBER: {**said, "sig": self.sign(message)}}

    def signed_together(
        self,
        tenant_id: str,
        events: Sequence[tuple[str, Mapping[str, Any]]],
        physical_ms: int,
        identity: str | None = None,
    ) -> list[dict[str, Any]]:
        """The payloads of these events, (job id, payload) each, under one signature."""
        said = self.said(physical_ms, identity)
        payloads = [signed_events.signed_payload(payload) for _, payload in events]
        leaves = [
            leaf_hash(signed_events.message(tenant_id, job_id, said, payload))
            for (job_id, _), payload in zip(events, payloads, strict=True)
        ]
        tree = levels_of(leaves)
        sig = self.sign(signed_events.root_message(said, len(leaves), tree[-1][0]))
        members = signed_events.members_of_many(said, sig, tree)
        return [
            {**payload, **orjson.loads(b"{" + member + b"}")}
            for (_, payload), member in zip(events, members, strict=True)
        ]


ED25519 = Signing(Ed25519PrivateKey.from_private_bytes(b"\x07" * 32))
P256 = Signing(ec.derive_private_key(7, ec.SECP256R1()), "nightly")
ML_DSA_44 = Signing(mldsa.MLDSA44PrivateKey.from_seed_bytes(b"\x07" * 32), "pq")
STRANGER = Signing(Ed25519PrivateKey.from_private_bytes(b"\x08" * 32), "stranger")
EVERYBODY = (ED25519, P256, ML_DSA_44)


def known(*signing: Signing, required: Sequence[Requirement] = ()) -> KnownCallers:
    """A ledger's callers, by default all but the stranger."""
    return KnownCallers({each.key_id: each.caller for each in signing or EVERYBODY}, tuple(required))
