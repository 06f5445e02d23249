"""The keys of private values: those of subjects, and the master key that wraps them, which is never in the database.

A subject's key seals with AES-256-GCM. Nonces are random, so one key serves at most 2^32 values (NIST SP 800-38D 8.3).
The form of what is sealed, and what it is bound to, are in ``ledger.private_fields``.

A master key file is one line, kept as ``signing.files`` says::

    tallystick-master-key-1 <base64 of 32 random bytes>

Wrapped secret: nonce of 12 bytes, then AES-256-GCM of the secret with the tag at its end. Its associated data names
what is wrapped, so that a wrapped key moved to another row does not open. Id of a master key: first 16 hex digits of
SHA-256 over ``"tallystick.master-key-id.v1\\n"`` and the key.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import hashlib
import os
from pathlib import Path

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from ledger.errors import ConfigurationError, PrivateValueError
from ledger.private_fields import NONCE_BYTES, SealedValue
from signing import files

KEY_BYTES = 32
KEY_ID_BYTES = 16

_HEAD = b"tallystick-master-key-1 "
_ID_CONTEXT = b"tallystick.master-key-id.v1\n"


class DataKey:
    """A key in use, under the random ``key_id`` that stands in the log. Safe for threads."""

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
        """What was sealed.

        Raises:
            PrivateValueError: not with this key, or bound to something else, or changed since.
        """
        try:
            return self._cipher.decrypt(sealed.nonce, sealed.ciphertext, associated)
        except InvalidTag:
            raise PrivateValueError(f"a private value does not open with key {sealed.key_id}") from None


def new_key_id() -> str:
    """A random key id: it says nothing of whose key it is."""
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
        """``secret``, to be opened again only with the same ``context``."""
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


def load(uri: str) -> MasterKey:
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
        raise ConfigurationError(f"{path} holds no master key; `tally privacy set` makes one where there is no file")
    return MasterKey(path, secret)


def generate(uri: str) -> MasterKey:
    """Make a new master key and its file.

    Raises:
        ConfigurationError: the file exists, or cannot be made.
    """
    path = files.path_of(uri)
    secret = os.urandom(KEY_BYTES)
    files.make(path, _HEAD + base64.b64encode(secret) + b"\n")
    return MasterKey(path, secret)


def load_or_generate(uri: str) -> MasterKey:
    """The master key that ``uri`` names, made if there is no file yet; of several callers at once one makes it.

    Raises:
        ConfigurationError: as ``load`` and ``generate``.
    """
    return files.load_or_make(files.path_of(uri), lambda: load(uri), lambda: generate(uri))
