"""Private keys in files.

A key file is one unencrypted PKCS #8 block in PEM, kept as ``signing.files`` says.
"""

from __future__ import annotations

from pathlib import Path

from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from ledger.errors import ConfigurationError, InvalidInputError
from signing import files
from signing.files import path_of
from signing.keys import ALGORITHMS, ECDSA_P256, ED25519, PrivateMaterial, PublicKey, private_of

LOG_KEY_SUFFIX = ".log-key.pem"


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
    files.make(path, pem)
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
        return FileSigner(path, private_of(files.read(path)))
    except InvalidInputError as error:
        raise ConfigurationError(f"key file {path} cannot be used: {error}") from error


def load_or_generate(uri: str, algorithm: str = ED25519) -> FileSigner:
    """The signer that ``uri`` names, made with ``algorithm`` if there is no file yet.

    A file that exists keeps its algorithm. Of several processes that start at once, one makes the key and
    all use it.

    Raises:
        ConfigurationError: as ``load`` and ``generate``.
    """
    path = path_of(uri)
    return files.load_or_make(path, lambda: load(uri), lambda: generate(path, algorithm))


def log_signer(signer: FileSigner, *, may_generate: bool = True) -> FileSigner:
    """The Ed25519 key that signs checkpoints: ``signer`` itself, else a second key kept beside it.

    Raises:
        ConfigurationError: as ``load_or_generate``, or ``load`` where none may be made.
    """
    if signer.algorithm == ED25519:
        return signer
    uri = str(signer.path.absolute()) + LOG_KEY_SUFFIX
    second = load_or_generate(uri, ED25519) if may_generate else load(uri)
    if second.algorithm != ED25519:
        raise ConfigurationError(f"log key {second.path} must be {ED25519}, not {second.algorithm}")
    return second
