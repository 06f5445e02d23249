"""Public keys: how they are named, when they hold, how a signature is checked.

Invariants::

    key_id == first 16 hex digits of SHA-256(SubjectPublicKeyInfo DER of public_key_pem)
    algorithm == ED25519 or ECDSA_P256, and is what public_key_pem holds
    not_before <= not_after, when both are given

Signatures: Ed25519 as in RFC 8032, 64 bytes; ECDSA over P-256 with SHA-256 as DER ``SEQUENCE {r, s}``,
which is what securesystemslib calls ``ecdsa-sha2-nistp256``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cached_property

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_public_key

from ledger.errors import InvalidInputError
from ledger.hlc import Hlc

ED25519 = "ed25519"
ECDSA_P256 = "ecdsa-p256"
ALGORITHMS = (ED25519, ECDSA_P256)

KEY_ID_DIGITS = 16

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)

KeyMaterial = Ed25519PublicKey | ec.EllipticCurvePublicKey


def material_of(public_key_pem: str) -> KeyMaterial:
    """The key that a PEM ``PUBLIC KEY`` block holds.

    Raises:
        InvalidInputError: not such a block, or not Ed25519 or P-256.
    """
    try:
        material = load_pem_public_key(public_key_pem.encode())
    except (ValueError, TypeError, AttributeError, UnsupportedAlgorithm) as error:
        raise InvalidInputError(f"not a PEM public key: {error}") from error
    if isinstance(material, Ed25519PublicKey):
        return material
    if isinstance(material, ec.EllipticCurvePublicKey) and isinstance(material.curve, ec.SECP256R1):
        return material
    raise InvalidInputError(f"keys must be Ed25519 or ECDSA P-256, not {type(material).__name__}")


def _pem_of(material: KeyMaterial) -> str:
    return material.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo).decode()


def _id_of(material: KeyMaterial) -> str:
    der = material.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    return hashlib.sha256(der).hexdigest()[:KEY_ID_DIGITS]


def _algorithm_of(material: KeyMaterial) -> str:
    return ED25519 if isinstance(material, Ed25519PublicKey) else ECDSA_P256


@dataclass(frozen=True)
class PublicKey:
    """One key and when it holds; bounds that are ``None`` do not bind. Times carry a zone.

    Raises:
        InvalidInputError: an invariant of this module does not hold.
    """

    key_id: str
    algorithm: str
    public_key_pem: str
    not_before: datetime | None = None
    not_after: datetime | None = None
    revoked_from_hlc: Hlc | None = None

    def __post_init__(self) -> None:
        if self.key_id != _id_of(self.material):
            raise InvalidInputError(f"key id {self.key_id!r} is not that of its key, {_id_of(self.material)}")
        if self.algorithm != _algorithm_of(self.material):
            raise InvalidInputError(f"key {self.key_id} is not {self.algorithm!r}")
        for name, time in (("not_before", self.not_before), ("not_after", self.not_after)):
            if time is not None and time.tzinfo is None:
                raise InvalidInputError(f"{name} of key {self.key_id} has no time zone")
        if self.not_before is not None and self.not_after is not None and self.not_after < self.not_before:
            raise InvalidInputError(f"key {self.key_id} ends before it begins")

    @classmethod
    def of(
        cls,
        public_key: str | KeyMaterial,
        *,
        not_before: datetime | None = None,
        not_after: datetime | None = None,
        revoked_from_hlc: Hlc | None = None,
    ) -> PublicKey:
        """The key of a PEM block or of `cryptography`; id and algorithm follow from it."""
        material = material_of(public_key) if isinstance(public_key, str) else public_key
        return cls(
            key_id=_id_of(material),
            algorithm=_algorithm_of(material),
            public_key_pem=_pem_of(material),
            not_before=not_before,
            not_after=not_after,
            revoked_from_hlc=revoked_from_hlc,
        )

    @classmethod
    def of_ed25519(cls, raw: bytes) -> PublicKey:
        """The Ed25519 key of 32 bytes as in RFC 8032."""
        try:
            return cls.of(Ed25519PublicKey.from_public_bytes(raw))
        except ValueError as error:
            raise InvalidInputError(f"not an Ed25519 public key: {error}") from error

    @classmethod
    def from_json(cls, value: object) -> PublicKey:
        """The key that one item of ``/v1/keys`` describes; bounds may be absent or null.

        Raises:
            InvalidInputError: not such an item.
        """
        if not isinstance(value, Mapping):
            raise InvalidInputError("a key must be a JSON object")
        revoked = _text(value, "revoked_from_hlc")
        return cls(
            key_id=_text(value, "key_id") or "",
            algorithm=_text(value, "algorithm") or "",
            public_key_pem=_text(value, "public_key_pem") or "",
            not_before=_time(value, "not_before"),
            not_after=_time(value, "not_after"),
            revoked_from_hlc=None if revoked is None else Hlc.parse(revoked),
        )

    def to_json(self) -> dict[str, str | None]:
        """One item of ``/v1/keys``."""
        return {
            "key_id": self.key_id,
            "algorithm": self.algorithm,
            "public_key_pem": self.public_key_pem,
            "not_before": _rfc3339(self.not_before),
            "not_after": _rfc3339(self.not_after),
            "revoked_from_hlc": None if self.revoked_from_hlc is None else self.revoked_from_hlc.text(),
        }

    @cached_property
    def material(self) -> KeyMaterial:
        """The key for `cryptography`."""
        return material_of(self.public_key_pem)

    def ed25519_bytes(self) -> bytes:
        """The 32 bytes of an Ed25519 key.

        Raises:
            InvalidInputError: the key is of another algorithm.
        """
        if not isinstance(self.material, Ed25519PublicKey):
            raise InvalidInputError(f"key {self.key_id} is {self.algorithm}; a signed note needs {ED25519}")
        return self.material.public_bytes_raw()

    def made(self, signature: bytes, message: bytes) -> bool:
        """Whether this key made ``signature`` over ``message``; never raises, says nothing of windows."""
        try:
            if isinstance(self.material, Ed25519PublicKey):
                self.material.verify(signature, message)
            else:
                self.material.verify(signature, message, ec.ECDSA(SHA256()))
        except InvalidSignature:
            return False
        return True

    def refusal(self, hlc: Hlc) -> str | None:
        """Why this key does not count for what was signed at ``hlc``; ``None`` when it does.

        A window is judged by the physical part, both ends included; a revocation by the whole HLC.
        """
        if self.not_before is not None and hlc.physical_ms < _milliseconds(self.not_before):
            return f"key {self.key_id} is valid from {_rfc3339(self.not_before)}, after HLC {hlc}"
        if self.not_after is not None and hlc.physical_ms > _milliseconds(self.not_after):
            return f"key {self.key_id} expired at {_rfc3339(self.not_after)}, before HLC {hlc}"
        if self.revoked_from_hlc is not None and hlc >= self.revoked_from_hlc:
            return f"key {self.key_id} is revoked from HLC {self.revoked_from_hlc} on, and this is HLC {hlc}"
        return None

    def narrowed(self, other: PublicKey) -> PublicKey:
        """The same key as ``other``, with the narrower of both windows and the earlier revocation."""
        return PublicKey.of(
            self.material,
            not_before=max(filter(None, (self.not_before, other.not_before)), default=None),
            not_after=min(filter(None, (self.not_after, other.not_after)), default=None),
            revoked_from_hlc=min(filter(None, (self.revoked_from_hlc, other.revoked_from_hlc)), default=None),
        )


def _milliseconds(time: datetime) -> int:
    return (time - _EPOCH) // timedelta(milliseconds=1)


def _rfc3339(time: datetime | None) -> str | None:
    return None if time is None else time.astimezone(UTC).isoformat().replace("+00:00", "Z")


def _text(value: Mapping[str, object], name: str) -> str | None:
    text = value.get(name)
    if text is not None and not isinstance(text, str):
        raise InvalidInputError(f"{name} of a key must be text", (name,))
    return text


def _time(value: Mapping[str, object], name: str) -> datetime | None:
    text = _text(value, name)
    if text is None:
        return None
    try:
        time = datetime.fromisoformat(text)
        return time.astimezone(UTC) if time.tzinfo is not None else time
    except (ValueError, OverflowError) as error:
        raise InvalidInputError(f"{name} of a key is no RFC 3339 time: {text[:40]!r}", (name,)) from error
