"""Private keys in files, and the seam where other signers go.

A key file is one unencrypted PKCS #8 block in PEM, mode 0600. It appears whole or not at all: written
and fsynced under another name, linked into place (which never overwrites), folder fsynced. A key file
that group or others can read is refused, and no rights are ever changed.
"""

from __future__ import annotations

import os
import re
import secrets
import stat
from pathlib import Path
from typing import Protocol
from urllib.parse import unquote, urlsplit

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)

from ledger.errors import ConfigurationError, InvalidInputError
from signing.public_key import ALGORITHMS, ECDSA_P256, ED25519, PublicKey

KEY_FILE_BYTES_MAX = 16 * 2**10
KEY_FILE_MODE = 0o600
LOG_KEY_SUFFIX = ".log-key.pem"

PrivateMaterial = Ed25519PrivateKey | ec.EllipticCurvePrivateKey

_SCHEME = re.compile(r"([a-zA-Z][a-zA-Z0-9+.-]*):")


class Signer(Protocol):
    """What envelopes and notes need of a key; a KMS or HSM signer (securesystemslib) fits behind it."""

    @property
    def public_key(self) -> PublicKey:
        """The public half, without a validity window."""
        ...

    @property
    def key_id(self) -> str:
        """Id of the key, as in ``PublicKey``."""
        ...

    def sign(self, message: bytes) -> bytes:
        """Signature over ``message``, in the form that ``PublicKey.made`` checks.

        Raises:
            SigningUnavailableError: the key cannot be reached now.
        """
        ...


class FileSigner:
    """Signs with a private key held in memory, read from ``path``. Safe for threads."""

    __slots__ = ("_private", "path", "public_key")

    def __init__(self, path: Path, private: PrivateMaterial) -> None:
        self.path = path
        self.public_key = PublicKey.of(private.public_key())
        self._private = private

    def __repr__(self) -> str:
        return f"FileSigner({self.path}, key_id={self.key_id}, algorithm={self.algorithm})"

    @property
    def key_id(self) -> str:
        """Id of the key, as in ``PublicKey``."""
        return self.public_key.key_id

    @property
    def algorithm(self) -> str:
        """``ed25519`` or ``ecdsa-p256``."""
        return self.public_key.algorithm

    @property
    def public_key_pem(self) -> str:
        """The public half, PEM ``PUBLIC KEY``."""
        return self.public_key.public_key_pem

    def sign(self, message: bytes) -> bytes:
        """Signature over ``message``: 64 bytes for Ed25519, DER over SHA-256 for P-256."""
        if isinstance(self._private, Ed25519PrivateKey):
            return self._private.sign(message)
        return self._private.sign(message, ec.ECDSA(SHA256()))


def private_of(pem: bytes) -> PrivateMaterial:
    """The key that a PEM private key block holds.

    Raises:
        InvalidInputError: not such a block, encrypted, or not Ed25519 or P-256.
    """
    try:
        private = load_pem_private_key(pem, password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise InvalidInputError(f"not an unencrypted PEM private key: {error}") from error
    if isinstance(private, Ed25519PrivateKey):
        return private
    if isinstance(private, ec.EllipticCurvePrivateKey) and isinstance(private.curve, ec.SECP256R1):
        return private
    raise InvalidInputError(f"keys must be Ed25519 or ECDSA P-256, not {type(private).__name__}")


def generate(path: str | Path, algorithm: str = ED25519) -> FileSigner:
    """Make a new key and its file; folders that are missing are made for this user alone.

    When it returns, the key survives a power loss.

    Raises:
        ConfigurationError: the file exists, cannot be made, or the algorithm is not known.
    """
    if algorithm not in ALGORITHMS:
        raise ConfigurationError(f"key algorithm {algorithm!r} is not one of {', '.join(ALGORITHMS)}")
    path = Path(path)
    private = _new_private(algorithm)
    pem = private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    try:
        _make_folder(path.parent)
        _write_new(path, pem)
    except FileExistsError as error:
        raise ConfigurationError(f"key file {path} exists already; it was left as it is") from error
    except OSError as error:
        raise ConfigurationError(f"key file {path} cannot be made: {error.strerror}") from error
    return FileSigner(path, private)


def _new_private(algorithm: str) -> PrivateMaterial:
    if algorithm == ECDSA_P256:
        return ec.generate_private_key(ec.SECP256R1())
    return Ed25519PrivateKey.generate()


def load(uri: str) -> FileSigner:
    """The signer that ``uri`` names: a path, or ``file:`` and a path.

    Raises:
        ConfigurationError: there is no such file, others can read it, or it holds no usable key.
    """
    path = path_of(uri)
    try:
        return FileSigner(path, private_of(_read_private(path)))
    except InvalidInputError as error:
        raise ConfigurationError(f"key file {path} cannot be used: {error}") from error
    except OSError as error:
        raise ConfigurationError(f"key file {path} cannot be read: {error.strerror}") from error


def load_or_generate(uri: str, algorithm: str = ED25519) -> FileSigner:
    """The signer that ``uri`` names, made with ``algorithm`` if there is no file yet.

    A file that exists keeps its algorithm. Of several processes that start at once, one makes the key and
    all use it.

    Raises:
        ConfigurationError: as ``load`` and ``generate``.
    """
    path = path_of(uri)
    if not os.path.exists(path):
        try:
            return generate(path, algorithm)
        except ConfigurationError:
            if not os.path.exists(path):
                raise
    return load(uri)


def log_signer(signer: FileSigner) -> FileSigner:
    """The Ed25519 key that signs checkpoints: ``signer`` itself, else a second key kept beside it.

    Raises:
        ConfigurationError: as ``load_or_generate``.
    """
    if signer.algorithm == ED25519:
        return signer
    second = load_or_generate(str(signer.path.absolute()) + LOG_KEY_SUFFIX, ED25519)
    if second.algorithm != ED25519:
        raise ConfigurationError(f"log key {second.path} must be {ED25519}, not {second.algorithm}")
    return second


def path_of(uri: str) -> Path:
    """The file that a key URI names.

    Raises:
        ConfigurationError: the URI is of a kind that is not supported.
    """
    scheme = _SCHEME.match(uri)
    if scheme is None:
        return Path(uri)
    parts = urlsplit(uri)
    if scheme[1].lower() != "file" or parts.netloc not in ("", "localhost") or not parts.path:
        raise ConfigurationError(f"key URI {uri!r} is not supported; give a path or file:/path/to/key.pem")
    return Path(unquote(parts.path))


def _read_private(path: Path) -> bytes:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        mode = os.fstat(descriptor).st_mode
        if not stat.S_ISREG(mode):
            raise ConfigurationError(f"key file {path} is not a regular file")
        if mode & 0o077:
            raise ConfigurationError(
                f"key file {path} has mode {stat.S_IMODE(mode):04o}, so others can use this key; "
                f"if it may have been read, make a new one, else run: chmod 600 {path}"
            )
        pem = os.read(descriptor, KEY_FILE_BYTES_MAX + 1)
    finally:
        os.close(descriptor)
    if len(pem) > KEY_FILE_BYTES_MAX:
        raise ConfigurationError(f"key file {path} is over {KEY_FILE_BYTES_MAX} bytes, too much for a key")
    return pem


def _write_new(path: Path, content: bytes) -> None:
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.new")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        with os.fdopen(os.open(temporary, flags, KEY_FILE_MODE), "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.link(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    _sync_folder(path.parent)


def _make_folder(folder: Path) -> None:
    if folder.exists():
        return
    _make_folder(folder.parent)
    folder.mkdir(mode=0o700, exist_ok=True)
    _sync_folder(folder.parent)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
