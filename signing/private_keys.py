"""Private keys: in files, or in HSMs, Vault and cloud key services, by the URIs of securesystemslib.

A key file is one unencrypted PKCS #8 block in PEM, kept as in ``signing.files``; that of an ML-DSA-44 key, a node's
second one, holds its seed (RFC 9881). Other URIs::

    hsm:[KEYID][?label=TOKEN]                          PKCS #11; PYKCS11LIB names the library, signing.pin the PIN
    hv:NAME[/VERSION]                                  HashiCorp Vault transit; VAULT_ADDR, VAULT_TOKEN
    awskms:KEY                                         AWS KMS
    gcpkms:projects/.../cryptoKeyVersions/N            Google Cloud KMS
    azurekms://VAULT.vault.azure.net/keys/NAME[/...]   Azure Key Vault

The public key is fetched once and kept by the caller. After that the signer is only asked for signatures, and each is
verified with that public key before it is returned. So if the key at a URI is replaced, signing fails. Each client
library finds its own credentials.

Keys of private values: the keys of subjects, and the master key that wraps them and is never in the database. A
subject's key seals with AES-256-GCM. Nonces are random, so one key serves at most 2^32 values (NIST SP 800-38D 8.3).
The form of a sealed value and its associated data are in ``ledger.private_fields``. A master key file is one line,
kept as in ``signing.files``::

    tallystick-master-key-1 <base64 of 32 random bytes>

Wrapped secret: nonce of 12 bytes, then AES-256-GCM of the secret with the tag at its end. Its associated data names
the wrapped key, so that a wrapped key moved to another row does not open. Id of a master key: first 16 hex digits of
SHA-256 over ``"tallystick.master-key-id.v1\\n"`` and the key.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import hashlib
import importlib
import os
import threading
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric import ec, mldsa
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from ledger.errors import ConfigurationError, InvalidInputError, PrivateValueError, SigningUnavailableError, reported_as
from ledger.private_fields import NONCE_BYTES, SealedValue
from signing import files
from signing.files import path_of
from signing.keys import ALGORITHMS, ECDSA_P256, ED25519, ML_DSA_44, PrivateMaterial, PublicKey, Signer, private_of

LOG_KEY_SUFFIX = ".log-key.pem"

_GENERATED: Mapping[str, Callable[[], PrivateMaterial]] = {
    ED25519: Ed25519PrivateKey.generate,
    ECDSA_P256: lambda: ec.generate_private_key(ec.SECP256R1()),
    ML_DSA_44: mldsa.MLDSA44PrivateKey.generate,
}


class FileSigner(Signer):
    """Signs with a private key held in memory, read from ``path``. Safe for threads."""

    def __init__(self, path: Path, private: PrivateMaterial) -> None:
        self.path = path
        self.public_key = PublicKey.of(private.public_key())
        self._private = private

    def __repr__(self) -> str:
        return f"FileSigner({self.path}, key_id={self.key_id}, algorithm={self.algorithm})"

    @property
    def algorithm(self) -> str:
        """``ed25519``, ``ecdsa-p256`` or ``ml-dsa-44``."""
        return self.public_key.algorithm

    @property
    def public_key_pem(self) -> str:
        """The public half, PEM ``PUBLIC KEY``."""
        return self.public_key.public_key_pem

    def sign(self, message: bytes) -> bytes:
        """Signature over ``message``: 64 bytes for Ed25519, 2,420 for ML-DSA-44, DER over SHA-256 for P-256."""
        if isinstance(self._private, ec.EllipticCurvePrivateKey):
            return self._private.sign(message, ec.ECDSA(SHA256()))
        return self._private.sign(message)


def generate(path: str | Path, algorithm: str = ED25519) -> FileSigner:
    """Make a new key and its file; missing folders are created for this user alone.

    When it returns, the key survives a power loss.

    Raises:
        ConfigurationError: the file exists, cannot be made, or the algorithm is not known.
    """
    if algorithm not in _GENERATED:
        raise ConfigurationError(f"key algorithm {algorithm!r} is not one of {', '.join(_GENERATED)}")
    path, private = Path(path), _GENERATED[algorithm]()
    files.make(path, private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    return FileSigner(path, private)


def load(uri: str, algorithms: Collection[str] = ALGORITHMS) -> FileSigner:
    """The signer that ``uri`` names: a path, or ``file:`` and a path.

    Raises:
        ConfigurationError: there is no such file, others can read it, or it holds no key of ``algorithms``.
    """
    path = path_of(uri)
    with reported_as(ConfigurationError, f"key file {path} cannot be used", InvalidInputError):
        signer = FileSigner(path, private_of(files.read(path)))
        if signer.algorithm not in algorithms:
            raise InvalidInputError(f"it holds a key of {signer.algorithm}, not of {' or '.join(algorithms)}")
    return signer


def load_or_generate(uri: str, algorithm: str = ED25519, algorithms: Collection[str] = ALGORITHMS) -> FileSigner:
    """The signer that ``uri`` names, made with ``algorithm`` if there is no file yet.

    A file that exists keeps its algorithm, if that is one of ``algorithms``. Of several processes that start at once,
    one makes the key and all use it.

    Raises:
        ConfigurationError: as ``load`` and ``generate``.
    """
    path = path_of(uri)
    return files.load_or_make(path, lambda: load(uri, algorithms), lambda: generate(path, algorithm))


def second_signer(uri: str, *, may_generate: bool) -> FileSigner:
    """The ML-DSA-44 key in the file that ``uri`` names, made if there is none and that is allowed.

    Raises:
        ConfigurationError: as ``load_or_generate``, or ``load`` where none may be made.
    """
    return load_or_generate(uri, ML_DSA_44, (ML_DSA_44,)) if may_generate else load(uri, (ML_DSA_44,))


def log_signer(signer: FileSigner, *, may_generate: bool = True) -> FileSigner:
    """The Ed25519 key that signs checkpoints: ``signer`` itself, else a second key kept beside it.

    Raises:
        ConfigurationError: as ``load_or_generate``, or ``load`` where none may be made.
    """
    if signer.algorithm == ED25519:
        return signer
    uri = str(signer.path.absolute()) + LOG_KEY_SUFFIX
    return load_or_generate(uri, algorithms=(ED25519,)) if may_generate else load(uri, (ED25519,))


SCHEMES = ("awskms", "azurekms", "gcpkms", "hsm", "hv")

TURN_WAIT_S = 10.0
"""Longest that one signature waits for another."""

_LOGIN_REFUSED = ("PinExpired", "PinIncorrect", "PinInvalid", "PinLenRange", "PinLocked")
"""Errors of PKCS #11 for a wrong PIN; a few in a row lock a token permanently."""

PinSource = Callable[[], str]
"""Returns the PIN of an HSM; called each time it is needed."""


def scheme_of(uri: str) -> str:
    """The scheme of a key URI in lower case, empty for a path."""
    scheme, colon, _ = uri.partition(":")
    return scheme.lower() if colon and scheme.isalpha() else ""


def is_remote(uri: str) -> bool:
    """Whether the URI names a key outside of files."""
    return scheme_of(uri) in SCHEMES


class RemoteSigner(Signer):
    """Signs through securesystemslib with the key at ``key_uri``, for one thread at a time: a token has one login."""

    def __init__(self, key_uri: str, public_key: PublicKey, pin: PinSource) -> None:
        self.key_uri = key_uri
        self.public_key = public_key
        self._pin = pin
        self._backend: Any = None
        self._has_failed = False
        self._is_locked_out = False
        self._turn = threading.Lock()

    def __repr__(self) -> str:
        return f"RemoteSigner({self.key_uri}, key_id={self.key_id}, algorithm={self.public_key.algorithm})"

    def sign(self, message: bytes) -> bytes:
        """Signature over ``message`` that the public key accepts. Blocks for as long as the signer takes.

        Raises:
            SigningUnavailableError: no answer, no login, or a signature by another key.
        """
        if not self._turn.acquire(timeout=TURN_WAIT_S):
            raise SigningUnavailableError(f"the signer at {self.key_uri} still owes an earlier answer")
        try:
            return self._sign(message)
        finally:
            self._turn.release()

    def _sign(self, message: bytes) -> bytes:
        if self._is_locked_out:
            raise SigningUnavailableError(
                f"the token at {self.key_uri} refused the PIN and is not asked again, as it counts wrong ones; "
                "set signing.pin right and start the node again"
            )
        try:
            if self._backend is None:
                self._backend = self._connect()
            signature = bytes.fromhex(self._backend.sign(message).signature)
        except Exception as error:
            # A client library may raise anything, for a lost token or an expired login: the next call reconnects.
            self._backend, self._has_failed = None, True
            self._is_locked_out = type(error).__name__ in _LOGIN_REFUSED
            raise _unavailable(self.key_uri, error) from error
        if not self.public_key.made(signature, message):
            self._backend = None
            raise SigningUnavailableError(
                f"what answers at {self.key_uri} signs with another key than {self.key_id}; "
                "bring that key back, or take the new one with: tally keys rotate --new-key-uri"
            )
        return signature

    def _connect(self) -> Any:
        library = _library()
        if self._has_failed and scheme_of(self.key_uri) == "hsm":
            # A PKCS #11 library that is already loaded does not find a reconnected token.
            importlib.import_module("pkcs11").lib(os.environ["PYKCS11LIB"]).reinitialize()
        key = library.SSlibKey.from_crypto(self.public_key.material, keyid=self.key_id)
        return library.Signer.from_priv_key_uri(self.key_uri, key, lambda _secret: self._pin())


def fetch(uri: str, pin: PinSource) -> RemoteSigner:
    """The signer that ``uri`` names, with its public key, which is fetched now. Blocks.

    Raises:
        ConfigurationError: the URI is malformed, its kind of signer is not installed, or the key is neither Ed25519 nor
            ECDSA P-256.
        SigningUnavailableError: the signer does not answer.
    """
    library = _library()
    try:
        pinned_uri, key = _import(library, uri, pin)
    except (ConfigurationError, SigningUnavailableError):
        raise
    except importlib.import_module("securesystemslib.exceptions").UnsupportedLibraryError as error:
        raise ConfigurationError(
            f"signing.key_uri {uri}: {error}; install tallystick[kms], or securesystemslib with its extra of that name"
        ) from error
    except Exception as error:
        raise _unavailable(uri, error) from error
    public = str(key.keyval["public"])
    with reported_as(ConfigurationError, f"the key at {uri} cannot be used", InvalidInputError):
        # securesystemslib holds an Ed25519 key as hex digits.
        is_pem = public.startswith("-----BEGIN")
        public_key = PublicKey.of(public) if is_pem else PublicKey.of_raw(bytes.fromhex(public))
        return RemoteSigner(pinned_uri, public_key, pin)


def _import(library: ModuleType, uri: str, pin: PinSource) -> tuple[str, Any]:
    parts = urlsplit(uri)
    scheme, rest = scheme_of(uri), parts.path
    if scheme == "hsm":
        if rest and not rest.isdigit():
            raise ConfigurationError(f"key URI {uri!r}: the key id of an HSM is a number, as in hsm:2?label=TOKEN")
        label = dict(parse_qsl(parts.query)).get("label")
        pinned_uri, key, *_ = library.HSMSigner.import_(int(rest) if rest else None, label, lambda _secret: pin())
    elif scheme == "azurekms" and parts.netloc and rest.startswith("/keys/"):
        pinned_uri, key, *_ = library.AzureSigner.import_(parts.netloc.partition(".")[0], rest.split("/")[2])
    elif scheme in _SIGNERS and rest:
        pinned_uri, key, *_ = getattr(library, _SIGNERS[scheme]).import_(
            rest.partition("/")[0] if scheme == "hv" else rest
        )
    else:
        raise ConfigurationError(f"key URI {uri!r} is not supported; docs/formats/keys.md lists the kinds")
    if scheme == "hv" and "/" in rest and pinned_uri != uri:
        raise ConfigurationError(f"key URI {uri!r} is not the newest version, which is {pinned_uri}")
    return pinned_uri, key


_SIGNERS = {"awskms": "AWSSigner", "gcpkms": "GCPSigner", "hv": "VaultSigner"}
"""The signers of securesystemslib that need only a name, by scheme."""


def _library() -> ModuleType:
    """securesystemslib, loaded when a key needs it: it is an extra."""
    try:
        return importlib.import_module("securesystemslib.signer")
    except ImportError as error:
        raise ConfigurationError("keys outside of files need securesystemslib; install tallystick[kms]") from error


def _unavailable(uri: str, error: Exception) -> SigningUnavailableError:
    return SigningUnavailableError(f"the signer at {uri} does not sign: {type(error).__name__}: {str(error)[:300]}")


# --- keys of private values -----------------------------------------------------------------------

KEY_BYTES = 32
KEY_ID_BYTES = 16

_HEAD = b"tallystick-master-key-1 "
_ID_CONTEXT = b"tallystick.master-key-id.v1\n"


class DataKey:
    """A key in use; the log names it by its random ``key_id``. Safe for threads."""

    __slots__ = ("_cipher", "key_id")

    def __init__(self, key_id: str, secret: bytes) -> None:
        self.key_id = key_id
        self._cipher = AESGCM(secret)

    def __repr__(self) -> str:
        return f"DataKey({self.key_id})"

    def seal(self, plaintext: bytes, associated: bytes) -> SealedValue:
        """``plaintext`` under this key and a fresh nonce, bound to ``associated``."""
        nonce = os.urandom(NONCE_BYTES)
        return SealedValue(self.key_id, nonce, self._cipher.encrypt(nonce, plaintext, associated))

    def open(self, sealed: SealedValue, associated: bytes) -> bytes:
        """The plaintext.

        Raises:
            PrivateValueError: sealed by another key or with other associated data, or changed since.
        """
        try:
            return self._cipher.decrypt(sealed.nonce, sealed.ciphertext, associated)
        except InvalidTag:
            raise PrivateValueError(f"a private value does not open with key {sealed.key_id}") from None


def new_key_id() -> str:
    """A random key id, which does not reveal whose key it is."""
    return os.urandom(KEY_ID_BYTES).hex()


def new_secret() -> bytes:
    """A random AES-256 key."""
    return os.urandom(KEY_BYTES)


class MasterKey:
    """A master key in memory, read from ``path``. Safe for threads."""

    __slots__ = ("_cipher", "master_key_id", "path")

    def __init__(self, path: Path, secret: bytes) -> None:
        self.path = path
        self.master_key_id = hashlib.sha256(_ID_CONTEXT + secret).hexdigest()[:16]
        self._cipher = AESGCM(secret)

    def __repr__(self) -> str:
        return f"MasterKey({self.path}, {self.master_key_id})"

    def wrap(self, secret: bytes, context: bytes) -> bytes:
        """``secret`` wrapped; only the same ``context`` unwraps it."""
        nonce = os.urandom(NONCE_BYTES)
        return nonce + self._cipher.encrypt(nonce, secret, context)

    def unwrap(self, wrapped: bytes, context: bytes) -> bytes:
        """The secret that ``wrap`` was given.

        Raises:
            PrivateValueError: wrapped by another key or for another context, or changed since.
        """
        try:
            return self._cipher.decrypt(wrapped[:NONCE_BYTES], wrapped[NONCE_BYTES:], context)
        except (InvalidTag, ValueError):
            raise PrivateValueError(f"a wrapped key does not open with master key {self.master_key_id}") from None

    @classmethod
    def load(cls, uri: str) -> MasterKey:
        """The master key that ``uri`` names: a path, or ``file:`` and a path.

        Raises:
            ConfigurationError: there is no such file, others can read it, or it holds no master key.
        """
        path = files.path_of(uri)
        content = files.read(path)
        head, secret = content[: len(_HEAD)], b""
        with contextlib.suppress(binascii.Error):
            secret = base64.b64decode(content[len(_HEAD) :].rstrip(b"\n"), validate=True)
        if head != _HEAD or len(secret) != KEY_BYTES:
            raise ConfigurationError(
                f"{path} holds no master key; `tally privacy set` makes one where there is no file"
            )
        return cls(path, secret)

    @classmethod
    def generate(cls, uri: str) -> MasterKey:
        """Make a new master key and its file.

        Raises:
            ConfigurationError: the file exists, or cannot be made.
        """
        path, secret = files.path_of(uri), new_secret()
        files.make(path, _HEAD + base64.b64encode(secret) + b"\n")
        return cls(path, secret)

    @classmethod
    def load_or_generate(cls, uri: str) -> MasterKey:
        """The master key that ``uri`` names, made if there is no file yet; of several callers at once one makes it.

        Raises:
            ConfigurationError: as ``load`` and ``generate``.
        """
        return files.load_or_make(files.path_of(uri), lambda: cls.load(uri), lambda: cls.generate(uri))
