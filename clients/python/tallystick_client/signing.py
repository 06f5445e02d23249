"""Signing events with a key of the caller's own, so that nobody else can make them (docs/formats/signed-events.md).

Keys in files need the package ``cryptography``: ``pip install 'tallystick-client[sign]'``. A signer of another kind,
such as an HSM, has two members: ``key_id`` and ``sign``.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import time
from collections.abc import Mapping, Sequence
from math import isfinite
from pathlib import Path
from typing import Any, Final, Protocol

EARLY_MS: Final = 60_000
"""How far before now an event may be recorded: clocks differ."""
WINDOW_MS: Final = 3600 * 1000
SPOOLED_WINDOW_MS: Final = 6 * 24 * 3600 * 1000 - EARLY_MS
"""How long after now it may be: a spool keeps events for days, and the ledger allows six in all."""
NOT_STORED: Final = ("tenant_id", "job_id", "durability", "subject", "signature")
_JOB: Final = re.compile(r"/v1/jobs/([^/]+)/(events|cancel)")
_INTEGER_MAX: Final = 2**53 - 1


class Signer(Protocol):
    """A key of a caller."""

    key_id: str
    """The first 16 hex digits of SHA-256 of its SubjectPublicKeyInfo in DER."""

    def sign(self, message: bytes) -> bytes:
        """The signature over ``message``: Ed25519, ECDSA over P-256 with SHA-256 in DER, or ML-DSA-44."""


class KeyFile:
    """A private key in a PEM file: Ed25519, P-256 or ML-DSA-44."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """
        Raises:
            ValueError: the file holds no such key, unencrypted; OSError: it cannot be read.
        """
        try:
            from cryptography.exceptions import UnsupportedAlgorithm
            from cryptography.hazmat.primitives import hashes, serialization
            from cryptography.hazmat.primitives.asymmetric import ec
        except ImportError:
            raise ValueError("signing needs a package: pip install 'tallystick-client[sign]'") from None
        try:
            key: Any = serialization.load_pem_private_key(Path(path).read_bytes(), password=None)
        except (ValueError, TypeError, UnsupportedAlgorithm) as error:
            raise ValueError(f"{path} holds no unencrypted private key in PEM") from error
        form = serialization.PublicFormat.SubjectPublicKeyInfo
        der = key.public_key().public_bytes(serialization.Encoding.DER, form)
        self.key_id = hashlib.sha256(der).hexdigest()[:16]
        is_ecdsa = isinstance(key, ec.EllipticCurvePrivateKey)
        self._sign = (lambda message: key.sign(message, ec.ECDSA(hashes.SHA256()))) if is_ecdsa else key.sign

    def sign(self, message: bytes) -> bytes:
        """As ``Signer``."""
        signature: bytes = self._sign(message)
        return signature


def signer_of(given: Signer | str | os.PathLike[str]) -> Signer:
    """The signer that ``sign_with`` names: itself, or a key file."""
    return KeyFile(given) if isinstance(given, str | os.PathLike) else given


class EventSigner:
    """Signs the requests of one client."""

    def __init__(self, signer: Signer, window_ms: int = WINDOW_MS) -> None:
        self._signer = signer
        self._window_ms = window_ms

    def body(self, path: str, body: Mapping[str, Any], key: str) -> dict[str, Any]:
        """The body of a POST with its signature; ``key`` is its Idempotency-Key.

        Raises:
            ValueError: such an event cannot be signed.
        """
        about = _JOB.fullmatch(path)
        types = {None: "JobCreated", "cancel": "JobCancellationRequested"}
        type_name = body.get("type") or types.get(about[2] if about else None)
        event = {"fence_token": 1, **body, "type": type_name}
        job_id = about[1] if about else body.get("job_id")
        said = self._said(key)
        signature = {**said, "sig": self._sign(message_of(event, job_id, said))}
        return {"fence_token": 1, **body, "signature": signature}

    def header(self, content: bytes, key: str) -> str:
        """The header ``Tally-Signature`` of a request of these lines of JSON, each with its fence token.

        Raises:
            ValueError: one of them cannot be signed.
        """
        said, events = self._said(key), [json.loads(line) for line in content.splitlines()]
        leaves = [hashlib.sha256(b"\0" + message_of(event, event.get("job_id"), said)).digest() for event in events]
        root = {**said, "root": root_of(leaves).hex(), "size": len(leaves)}
        message = b"tallystick.signed-events.v1\n" + canonical(root)
        return json.dumps({**said, "sig": self._sign(message)}, separators=(",", ":"))

    def _said(self, key: str) -> dict[str, Any]:
        now_ms = time.time_ns() // 1_000_000
        times = {"not_before_ms": now_ms - EARLY_MS, "not_after_ms": now_ms + self._window_ms}
        return {"id": key, "key_id": self._signer.key_id, **times}

    def _sign(self, message: bytes) -> str:
        return base64.b64encode(self._signer.sign(message)).decode()


def message_of(event: Mapping[str, Any], job_id: object, said: Mapping[str, Any]) -> bytes:
    """The bytes that are signed of one event, or hashed as a leaf.

    Raises:
        ValueError: it names no job or has a subject, or holds a number without canonical form.
    """
    if not isinstance(job_id, str) or event.get("subject") is not None:
        raise ValueError("a signed event names its job_id, and has no subject: private fields cannot be signed")
    header = canonical({**said, "job_id": job_id, "tenant_id": event["tenant_id"]})
    payload = canonical({name: value for name, value in event.items() if name not in NOT_STORED})
    return b"\n".join((b"tallystick.signed-event.v1", header, payload))


def root_of(leaves: Sequence[bytes]) -> bytes:
    """Root of the tree over these leaf hashes (RFC 9162)."""
    level = list(leaves)
    while len(level) > 1:
        pairs = zip(level[::2], level[1::2], strict=False)
        level = [hashlib.sha256(b"\1" + left + right).digest() for left, right in pairs] + level[len(level) & ~1 :]
    return level[0]


def canonical(value: Any) -> bytes:
    """Canonical JSON (RFC 8785).

    Raises:
        ValueError: it has none.
    """
    return _text(value).encode()


def _text(value: Any) -> str:
    if value is None or isinstance(value, bool | str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, int) and abs(value) <= _INTEGER_MAX:
        return str(value)
    if isinstance(value, int | float) and isfinite(value):
        return _number(float(value))
    if isinstance(value, Mapping):
        names = sorted(value, key=lambda name: name.encode("utf-16-be"))
        return "{" + ",".join(f"{_text(name)}:{_text(value[name])}" for name in names) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(_text, value)) + "]"
    raise ValueError(f"{value!r:.100} has no canonical form in JSON")


def _number(number: float) -> str:
    """A number as ECMAScript prints it (RFC 8785, 3.2.2.3)."""
    if number == int(number) and abs(number) < 1e21:
        return str(int(number))
    mantissa, _, exponent = repr(number).partition("e")
    if not exponent:
        return mantissa
    power = int(exponent)
    if -7 < power < 0:
        sign = "-" if mantissa.startswith("-") else ""
        return f"{sign}0.{'0' * (-power - 1)}{mantissa.lstrip('-').replace('.', '')}"
    return f"{mantissa.removesuffix('.0')}e{power:+d}"
