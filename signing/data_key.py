"""The key of one subject's private values: seals and opens them with AES-256-GCM.

Nonces are random, so one key serves at most 2^32 values (NIST SP 800-38D 8.3). The form of what is sealed, and what
it is bound to, are in ``ledger.private_fields``.
"""

from __future__ import annotations

import os

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from ledger.errors import PrivateValueError
from ledger.private_fields import NONCE_BYTES, SealedValue

KEY_BYTES = 32
KEY_ID_BYTES = 16


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
