"""Public keys: their ids, their validity and the verification of signatures; the keyring of a verifier; the interface
of signers.

Invariants::

    key_id == first 16 hex digits of SHA-256(SubjectPublicKeyInfo DER of public_key_pem)
    algorithm == ED25519, ECDSA_P256 or ML_DSA_44, and is what public_key_pem holds
    not_before <= not_after, when both are given

Signatures: Ed25519 as in RFC 8032, 64 bytes; ECDSA over P-256 with SHA-256 as DER ``SEQUENCE {r, s}``,
``ecdsa-sha2-nistp256`` in securesystemslib; ML-DSA-44 as in FIPS 204, 2,420 bytes, without a context. A node signs with
an ML-DSA-44 key only beside another key: it is its second key.

A ring is read from a PEM file, a folder of files, or saved ``/v1/keys`` JSON (docs/formats/keys.md).
The keys in a ring are trusted, so a ring never comes from the data that it verifies.
"""

from __future__ import annotations

import hashlib
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from functools import cached_property
from pathlib import Path
from typing import Annotated, NamedTuple, cast

import msgspec
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec, mldsa
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    load_pem_private_key,
    load_pem_public_key,
)
from msgspec import Meta

from ledger import native, rfc3339
from ledger.decoding import convert
from ledger.errors import ConfigurationError, InvalidInputError, LedgerError, refuse, reported_as
from ledger.hlc import Hlc
from signing.files import read_bounded
from signing.strict import parse_json

ED25519 = "ed25519"
ECDSA_P256 = "ecdsa-p256"
ML_DSA_44 = "ml-dsa-44"
ALGORITHMS = (ED25519, ECDSA_P256)
"""Those of a node's first key, and of every other key that signs alone."""

KEY_ID_DIGITS = 16

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)

PrivateMaterial = Ed25519PrivateKey | ec.EllipticCurvePrivateKey | mldsa.MLDSA44PrivateKey
KeyMaterial = Ed25519PublicKey | ec.EllipticCurvePublicKey | mldsa.MLDSA44PublicKey

RING_FILE_BYTES_MAX = 4 * 2**20
RING_FILE_SUFFIXES = (".pem", ".json")
"""Suffixes of the files of a folder that are read; other files are ignored."""

KEYS_MAX = 1000
"""Bounds the cost of a signature without a key id, for which all keys are tried."""

_PEM_BLOCK = re.compile(r"-----BEGIN ([A-Z0-9 ]+)-----.*?-----END \1-----", re.DOTALL)


_NO_PEM = (ValueError, TypeError, UnsupportedAlgorithm)
"""Raised by the library for bytes that hold no usable key."""


def material_of(public_key_pem: str) -> KeyMaterial:
    """The key that a PEM ``PUBLIC KEY`` block holds.

    Raises:
        InvalidInputError: not such a block, or not Ed25519, P-256 or ML-DSA-44.
    """
    with reported_as(InvalidInputError, "not a PEM public key", *_NO_PEM, AttributeError):
        return cast(KeyMaterial, _supported(load_pem_public_key(public_key_pem.encode())))


def private_of(pem: bytes) -> PrivateMaterial:
    """The key that a PEM private key block holds.

    Raises:
        InvalidInputError: not such a block, encrypted, or not Ed25519, P-256 or ML-DSA-44.
    """
    with reported_as(InvalidInputError, "not an unencrypted PEM private key", *_NO_PEM):
        return cast(PrivateMaterial, _supported(load_pem_private_key(pem, password=None)))


def _supported(key: object) -> object:
    is_p256 = isinstance(getattr(key, "curve", None), ec.SECP256R1)
    others = Ed25519PublicKey | Ed25519PrivateKey | mldsa.MLDSA44PublicKey | mldsa.MLDSA44PrivateKey
    if not is_p256 and not isinstance(key, others):
        raise InvalidInputError(f"keys must be Ed25519, ECDSA P-256 or ML-DSA-44, not {type(key).__name__}")
    return key


class KeyJson(msgspec.Struct, frozen=True):
    """One item of ``/v1/keys``, its fields in the order of canonical JSON; bounds may be absent or null."""

    algorithm: str
    key_id: str
    not_after: str | None = None
    not_before: str | None = None
    public_key_pem: str = ""
    revoked_from_hlc: str | None = None


class CallerJson(KeyJson, frozen=True, kw_only=True):
    """One caller in ``/v1/keys``."""

    name: str
    tenants: tuple[str, ...]


class RequirementJson(msgspec.Struct, frozen=True):
    """From an HLC on, the types of event that the callers of a tenant must sign."""

    from_hlc: str
    tenant_id: str
    types: tuple[str, ...]


class KeyringJson(msgspec.Struct, frozen=True):
    """The keys of a ledger in the response of ``/v1/keys``, its fields in the order of canonical JSON."""

    keys: Annotated[list[KeyJson], Meta(max_length=KEYS_MAX)]
    log_verifier_keys: Annotated[list[str], Meta(max_length=KEYS_MAX)] = []
    root_key_id: str | None = None


class SavedKeys(KeyringJson, frozen=True):
    """The same with the second keys, which releases without them pass over, and with the callers of the ledger."""

    callers: list[CallerJson] | None = None
    second_keys: Annotated[list[KeyJson], Meta(max_length=KEYS_MAX)] = []
    signatures_required: list[RequirementJson] = []


def _id_of(material: KeyMaterial) -> str:
    der = material.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    return hashlib.sha256(der).hexdigest()[:KEY_ID_DIGITS]


def _algorithm_of(material: KeyMaterial) -> str:
    if isinstance(material, mldsa.MLDSA44PublicKey):
        return ML_DSA_44
    return ED25519 if isinstance(material, Ed25519PublicKey) else ECDSA_P256


@dataclass(frozen=True)
class PublicKey:
    """One key and its validity window; a bound of ``None`` is no bound. Times carry a zone.

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
        key_id, algorithm = _id_of(self.material), _algorithm_of(self.material)
        refuse(
            InvalidInputError,
            (self.key_id != key_id, f"key id {self.key_id!r} is not that of its key, {key_id}"),
            (self.algorithm != algorithm, f"key {self.key_id} is not {self.algorithm!r}"),
        )
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
        """The key of a PEM block or of `cryptography`; id and algorithm are derived from it."""
        material = material_of(public_key) if isinstance(public_key, str) else public_key
        return cls(
            key_id=_id_of(material),
            algorithm=_algorithm_of(material),
            public_key_pem=material.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo).decode(),
            not_before=not_before,
            not_after=not_after,
            revoked_from_hlc=revoked_from_hlc,
        )

    @classmethod
    def of_raw(cls, raw: bytes, algorithm: str = ED25519) -> PublicKey:
        """The Ed25519 key of 32 bytes as in RFC 8032, or the ML-DSA-44 key of 1,312 bytes as in FIPS 204."""
        of_algorithm = mldsa.MLDSA44PublicKey if algorithm == ML_DSA_44 else Ed25519PublicKey
        with reported_as(InvalidInputError, f"not an {algorithm} public key", ValueError):
            return cls.of(of_algorithm.from_public_bytes(raw))

    @classmethod
    def from_json(cls, value: object) -> PublicKey:
        """The key that one item of ``/v1/keys`` describes.

        Raises:
            InvalidInputError: not such an item.
        """
        with reported_as(InvalidInputError, "not a key as /v1/keys lists them", msgspec.ValidationError):
            said = convert(value, KeyJson)
        return cls(
            key_id=said.key_id,
            algorithm=said.algorithm,
            public_key_pem=said.public_key_pem,
            not_before=_time("not_before", said.not_before),
            not_after=_time("not_after", said.not_after),
            revoked_from_hlc=None if said.revoked_from_hlc is None else Hlc.parse(said.revoked_from_hlc),
        )

    def to_json(self) -> dict[str, str | None]:
        """One item of ``/v1/keys``."""
        return {
            "key_id": self.key_id,
            "algorithm": self.algorithm,
            "public_key_pem": self.public_key_pem,
            "not_before": None if self.not_before is None else rfc3339.written(self.not_before),
            "not_after": None if self.not_after is None else rfc3339.written(self.not_after),
            "revoked_from_hlc": None if self.revoked_from_hlc is None else self.revoked_from_hlc.text(),
        }

    @cached_property
    def material(self) -> KeyMaterial:
        """The key for `cryptography`."""
        return material_of(self.public_key_pem)

    @cached_property
    def der(self) -> bytes:
        """Its SubjectPublicKeyInfo."""
        return self.material.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)

    @property
    def is_second(self) -> bool:
        """Whether a node signs with it only beside another key."""
        return self.algorithm == ML_DSA_44

    def raw(self) -> bytes:
        """The 32 bytes of an Ed25519 key, the 1,312 of an ML-DSA-44 key.

        Raises:
            InvalidInputError: the key is of another algorithm.
        """
        if isinstance(self.material, ec.EllipticCurvePublicKey):
            raise InvalidInputError(f"key {self.key_id} is {self.algorithm}; a signed note needs {ED25519}")
        return self.material.public_bytes_raw()

    def made(self, signature: bytes, message: bytes) -> bool:
        """Whether this key made ``signature`` over ``message``. Never raises; the validity window is not checked."""
        try:
            if isinstance(self.material, ec.EllipticCurvePublicKey):
                self.material.verify(signature, message, ec.ECDSA(SHA256()))
            else:
                self.material.verify(signature, message)
        except InvalidSignature:
            return False
        return True

    def refusal(self, hlc: Hlc) -> str | None:
        """Why this key is not valid for a signature made at ``hlc``; ``None`` if it is.

        A window is judged by the physical part, both ends included; a revocation by the whole HLC.
        """
        if self.not_before is not None and hlc.physical_ms < _milliseconds(self.not_before):
            return f"key {self.key_id} is valid from {rfc3339.written(self.not_before)}, after HLC {hlc}"
        if self.not_after is not None and hlc.physical_ms > _milliseconds(self.not_after):
            return f"key {self.key_id} expired at {rfc3339.written(self.not_after)}, before HLC {hlc}"
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


class Caller(NamedTuple):
    """A caller whose key a ledger registered."""

    key: PublicKey
    """With its revocation, if it is revoked."""
    name: str
    tenants: tuple[str, ...]
    """Patterns of the tenants whose events it may sign."""


def made_all(checks: Sequence[tuple[PublicKey, bytes, bytes]]) -> list[bool]:
    """``PublicKey.made`` for each (key, signature, message). Valid signatures of one key are found in one step, and the
    interpreter's lock is free meanwhile."""
    by_key: dict[str, list[int]] = {}
    for number, (key, _, _) in enumerate(checks):
        by_key.setdefault(key.key_id, []).append(number)
    made = [False] * len(checks)
    for numbers in by_key.values():
        key, given = checks[numbers[0]][0], tuple(checks[number][1:] for number in numbers)
        found = native.signatures_made(key.der, key.algorithm == ECDSA_P256, given) or bytes(len(given))
        for number, is_made, each in zip(numbers, found, given, strict=True):
            made[number] = bool(is_made) or key.made(*each)
    return made


def _milliseconds(time: datetime) -> int:
    return (time - _EPOCH) // timedelta(milliseconds=1)


def _time(name: str, text: str | None) -> datetime | None:
    if text is None:
        return None
    try:
        time = datetime.fromisoformat(text)
        return time.astimezone(UTC) if time.tzinfo is not None else time
    except (ValueError, OverflowError) as error:
        raise InvalidInputError(f"{name} of a key is no RFC 3339 time: {text[:40]!r}", (name,)) from error


class Signer(ABC):
    """A signing key, in a file or in a KMS or HSM (signing.private_keys)."""

    public_key: PublicKey
    """The public half, without a validity window."""

    @property
    def key_id(self) -> str:
        """Id of the key, as in ``PublicKey``."""
        return self.public_key.key_id

    @abstractmethod
    def sign(self, message: bytes) -> bytes:
        """Signature over ``message``, in the form that ``PublicKey.made`` verifies.

        Raises:
            SigningUnavailableError: the key cannot be reached now.
        """


class Requirement(NamedTuple):
    """From ``from_hlc`` on, callers sign the events of these types, and no other need be."""

    from_hlc: Hlc
    tenant_id: str
    types: tuple[str, ...]


class KnownCallers(NamedTuple):
    """The callers of a ledger by key id, and what they must sign, by time."""

    by_key: Mapping[str, Caller] = {}
    required: tuple[Requirement, ...] = ()

    @classmethod
    def of_json(cls, callers: Iterable[CallerJson], required: Iterable[RequirementJson]) -> KnownCallers:
        """As ``/v1/keys`` lists them.

        Raises:
            InvalidInputError: a key is wrong.
        """
        found = [Caller(PublicKey.from_json(msgspec.to_builtins(each)), each.name, each.tenants) for each in callers]
        wanted = sorted(Requirement(Hlc.parse(each.from_hlc), each.tenant_id, each.types) for each in required)
        return cls({each.key.key_id: each for each in found}, tuple(wanted))

    @classmethod
    def merged(cls, known: Sequence[KnownCallers]) -> KnownCallers | None:
        """All of ``known``, None if there is none. A key is revoked from where any says."""
        by_key: dict[str, Caller] = {}
        for key_id, caller in (each for one in known for each in one.by_key.items()):
            if (other := by_key.get(key_id)) is not None:
                ends = filter(None, (caller.key.revoked_from_hlc, other.key.revoked_from_hlc))
                key = replace(caller.key, revoked_from_hlc=min(ends, default=None))
                caller = Caller(key, caller.name, tuple(dict.fromkeys((*other.tenants, *caller.tenants))))
            by_key[key_id] = caller
        return cls(by_key, tuple(sorted({each for one in known for each in one.required}))) if known else None

    def to_json(self) -> dict[str, object]:
        """The members of ``/v1/keys``."""
        return {
            "callers": [
                {**each.key.to_json(), "name": each.name, "tenants": list(each.tenants)}
                for each in self.by_key.values()
            ],
            "signatures_required": [
                {"from_hlc": each.from_hlc.text(), "tenant_id": each.tenant_id, "types": list(each.types)}
                for each in self.required
            ],
        }


class Keyring:
    """Keys by id. A key given twice has the narrower window and the earlier revocation of both.

    ``log_verifier_keys`` are the verifier keys of logs that came with the ring, as text; ``root_key_id`` is the root
    key of the ring's ledger, None if the ring does not name it or is of several ledgers. ``callers`` are the callers
    whose events can be judged, None if the ring does not say. With ``needs_both`` a snapshot or a checkpoint counts
    only if a first key and a second key signed it.
    """

    def __init__(
        self,
        keys: Iterable[PublicKey],
        log_verifier_keys: Iterable[str] = (),
        root_key_id: str | None = None,
        callers: KnownCallers | None = None,
        *,
        needs_both: bool = False,
    ) -> None:
        self._keys: dict[str, PublicKey] = {}
        self.callers = callers
        self.needs_both = needs_both
        self.root_key_id = root_key_id
        self.log_verifier_keys = tuple(dict.fromkeys(log_verifier_keys))
        for key in keys:
            self._keys[key.key_id] = self._keys[key.key_id].narrowed(key) if key.key_id in self._keys else key
            if len(self._keys) > KEYS_MAX:
                raise InvalidInputError(f"a keyring holds at most {KEYS_MAX} keys")

    def __reduce__(self) -> tuple[Callable[[object, bool], Keyring], tuple[object, bool]]:
        """Pickled as its JSON."""
        callers = {} if self.callers is None else self.callers.to_json()
        return Keyring._unpickled, ({**self.to_json(), **callers}, self.needs_both)

    @classmethod
    def _unpickled(cls, value: object, needs_both: bool) -> Keyring:
        ring = cls.from_json(value)
        ring.needs_both = needs_both
        return ring

    def __iter__(self) -> Iterator[PublicKey]:
        return iter(self._keys.values())

    def __len__(self) -> int:
        return len(self._keys)

    def get(self, key_id: str) -> PublicKey | None:
        """The key of that id, if the ring has it."""
        return self._keys.get(key_id)

    @classmethod
    def of(cls, keys: object) -> Keyring:
        """A ring of a ring, a ``/v1/keys`` object, PEM text, or an iterable of PEM texts and keys.

        Raises:
            InvalidInputError: none of these, or a key in it is wrong.
        """
        if isinstance(keys, Keyring):
            return keys
        if isinstance(keys, Mapping):
            return cls.from_json(keys)
        if not isinstance(keys, Iterable):
            raise InvalidInputError(f"keys must be a ring, /v1/keys JSON or PEM, not {type(keys).__name__}")
        items = (keys,) if isinstance(keys, str) else keys
        return cls(key for item in items for key in _keys_of(item))

    @classmethod
    def from_json(cls, value: object) -> Keyring:
        """The ring in a response of ``/v1/keys``.

        Raises:
            InvalidInputError: not of that shape, or a key in it is wrong.
        """
        with reported_as(
            InvalidInputError, 'keys must be {"keys": [...]} as /v1/keys answers', msgspec.ValidationError
        ):
            said = convert(value, SavedKeys)
        callers = None if said.callers is None else KnownCallers.of_json(said.callers, said.signatures_required)
        keys = map(PublicKey.from_json, (*said.keys, *said.second_keys))
        return cls(keys, said.log_verifier_keys, said.root_key_id, callers)

    @classmethod
    def load(cls, path: str | Path, *, may_be_absent: bool = False) -> Keyring:
        """The ring in a file (PEM or ``/v1/keys`` JSON), or in all ``.pem`` and ``.json`` files of a folder.

        Of a private key the public half is taken. With ``may_be_absent`` a path where nothing is, or a folder without
        such files, is an empty ring.

        Raises:
            ConfigurationError: it cannot be read, or holds no key.
        """
        path = Path(path)
        if may_be_absent and (not path.exists() or (path.is_dir() and not any(map(_is_ring_file, path.iterdir())))):
            return cls(())
        with reported_as(ConfigurationError, f"keys cannot be read from {path}", OSError):
            files = sorted(filter(_is_ring_file, path.iterdir())) if path.is_dir() else [path]
            rings = [_read_ring(file) for file in files]
        if not any(rings):
            raise ConfigurationError(f"{path} holds no key; give PEM, a folder of it or saved /v1/keys JSON")
        return cls.merged(rings)

    @classmethod
    def merged(cls, rings: Sequence[Keyring]) -> Keyring:
        """The keys of all ``rings``."""
        roots = {ring.root_key_id for ring in rings if ring.root_key_id is not None}
        return cls(
            (key for ring in rings for key in ring),
            (text for ring in rings for text in ring.log_verifier_keys),
            roots.pop() if len(roots) == 1 else None,
            KnownCallers.merged([ring.callers for ring in rings if ring.callers is not None]),
        )

    def to_json(self) -> dict[str, object]:
        """The keys in the response of ``/v1/keys``; ``from_json`` reads them back. Callers are left out."""
        root = {} if self.root_key_id is None else {"root_key_id": self.root_key_id}
        second = [key.to_json() for key in self if key.is_second]
        return {
            "keys": [key.to_json() for key in self if not key.is_second],
            **({"second_keys": second} if second else {}),
            **root,
            "log_verifier_keys": list(self.log_verifier_keys),
        }

    def demanding_both(self) -> Keyring:
        """The same ring, by which a snapshot or a checkpoint counts only if a first and a second key signed it.

        Raises:
            ConfigurationError: it has no second key.
        """
        if not any(key.is_second for key in self):
            raise ConfigurationError(
                f"both signatures are demanded, and none of the keys is {ML_DSA_44}: give a list of keys that has one"
            )
        return Keyring(self, self.log_verifier_keys, self.root_key_id, self.callers, needs_both=True)

    def demanding_one(self) -> Keyring:
        """The same ring, by which any held key is enough."""
        return Keyring(self, self.log_verifier_keys, self.root_key_id, self.callers) if self.needs_both else self

    def lacks(self, signers: Iterable[PublicKey]) -> str | None:
        """Which of the two signatures that are demanded is not among these valid ones; None if none is."""
        kinds = {key.is_second for key in signers}
        if not self.needs_both or kinds == {False, True}:
            return None
        return (
            f"no signature by a held {'first key' if True in kinds else f'key of {ML_DSA_44}'}, and both are demanded"
        )


def demanding(signatures: str, keyring: Keyring | None) -> Keyring | None:
    """The ring, by which ``any`` held key is enough, or by which ``both`` must have signed, as the option says.

    Raises:
        ConfigurationError: both are demanded of no ring, or of one without a second key.
    """
    if signatures != "both":
        return keyring
    if keyring is None:
        raise ConfigurationError("--signatures both: name the keys that you trust with --keys")
    return keyring.demanding_both()


def _is_ring_file(file: Path) -> bool:
    return file.suffix in RING_FILE_SUFFIXES and not file.name.startswith(".") and file.is_file()


def _read_ring(file: Path) -> Keyring:
    content = read_bounded(file, RING_FILE_BYTES_MAX, "keys", ConfigurationError)
    with reported_as(ConfigurationError, f"{file} is neither PEM nor /v1/keys JSON", LedgerError, UnicodeDecodeError):
        text = content.decode()
        is_json = text.lstrip().startswith("{")
        return Keyring.from_json(parse_json(text, "the file")) if is_json else Keyring(_keys_of_pem(text))


def _keys_of(item: object) -> Iterable[PublicKey]:
    if not isinstance(item, PublicKey | str):
        raise InvalidInputError(f"a key must be PEM text, not {type(item).__name__}")
    return (item,) if isinstance(item, PublicKey) else _keys_of_pem(item)


def _keys_of_pem(text: str) -> list[PublicKey]:
    keys = [
        PublicKey.of(private_of(block[0].encode()).public_key() if block[1].endswith("PRIVATE KEY") else block[0])
        for block in _PEM_BLOCK.finditer(text)
    ]
    if not keys:
        raise InvalidInputError("there is no PEM key in the text")
    return keys
