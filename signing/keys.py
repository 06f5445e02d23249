"""Keys by id: the ring that a verifier holds, and the names that users of keys import.

A ring is read from a PEM file, a folder of files, or saved ``/v1/keys`` JSON (docs/formats/keys.md).
What is in a ring is trusted, so a ring never comes from the thing that is checked with it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from ledger.errors import ConfigurationError, InvalidInputError, LedgerError
from signing.key_file import FileSigner, Signer, generate, load, load_or_generate, log_signer, private_of
from signing.public_key import ALGORITHMS, ECDSA_P256, ED25519, PublicKey
from signing.strict import parse_json

__all__ = [
    "ALGORITHMS",
    "ECDSA_P256",
    "ED25519",
    "FileSigner",
    "Keyring",
    "PublicKey",
    "Signer",
    "generate",
    "load",
    "load_or_generate",
    "log_signer",
]

RING_FILE_BYTES_MAX = 4 * 2**20
RING_FILE_SUFFIXES = (".pem", ".json")
"""Which files of a folder are read; others in it are left alone."""

KEYS_MAX = 1000
"""Bounds what a signature without a key id costs: all keys are tried."""

_PEM_BLOCK = re.compile(r"-----BEGIN ([A-Z0-9 ]+)-----.*?-----END \1-----", re.DOTALL)


class Keyring:
    """Keys by id. A key given twice holds where both say so: narrower window, earlier revocation.

    ``log_verifier_keys`` are the verifier keys of logs that came with the ring, as text; ``root_key_id`` is the key
    that the ledger of the ring began with, None where the ring does not say or is of several.
    """

    def __init__(
        self, keys: Iterable[PublicKey], log_verifier_keys: Iterable[str] = (), root_key_id: str | None = None
    ) -> None:
        self._keys: dict[str, PublicKey] = {}
        self.root_key_id = root_key_id
        self.log_verifier_keys = tuple(dict.fromkeys(log_verifier_keys))
        for key in keys:
            known = self._keys.get(key.key_id)
            self._keys[key.key_id] = key if known is None else known.narrowed(key)
            if len(self._keys) > KEYS_MAX:
                raise InvalidInputError(f"a keyring holds at most {KEYS_MAX} keys")

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
        if isinstance(keys, str):
            return cls(_keys_of_pem(keys))
        if not isinstance(keys, Iterable):
            raise InvalidInputError(f"keys must be a ring, /v1/keys JSON or PEM, not {type(keys).__name__}")
        return cls(key for item in keys for key in _keys_of(item))

    @classmethod
    def from_json(cls, value: object) -> Keyring:
        """The ring that ``/v1/keys`` answers with.

        Raises:
            InvalidInputError: not of that shape, or a key in it is wrong.
        """
        keys = value.get("keys") if isinstance(value, Mapping) else None
        if not isinstance(value, Mapping) or not isinstance(keys, list):
            raise InvalidInputError('keys must be {"keys": [...]} as /v1/keys answers')
        verifier_keys = value.get("log_verifier_keys", [])
        if not isinstance(verifier_keys, list) or not all(isinstance(text, str) for text in verifier_keys):
            raise InvalidInputError("log_verifier_keys must be a list of texts", ("log_verifier_keys",))
        root = value.get("root_key_id")
        if root is not None and not isinstance(root, str):
            raise InvalidInputError("root_key_id must be text", ("root_key_id",))
        return cls([PublicKey.from_json(key) for key in keys], verifier_keys, root)

    @classmethod
    def load(cls, path: str | Path) -> Keyring:
        """The ring in a file (PEM or ``/v1/keys`` JSON), or in all ``.pem`` and ``.json`` files of a folder.

        Of a private key the public half is taken.

        Raises:
            ConfigurationError: it cannot be read, or holds no key.
        """
        path = Path(path)
        try:
            files = sorted(_ring_files(path)) if path.is_dir() else [path]
            rings = [_read_ring(file) for file in files]
        except OSError as error:
            raise ConfigurationError(f"keys cannot be read from {path}: {error.strerror}") from error
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
        )

    def to_json(self) -> dict[str, object]:
        """What ``/v1/keys`` answers; ``from_json`` reads it back."""
        root = {} if self.root_key_id is None else {"root_key_id": self.root_key_id}
        return {
            "keys": [key.to_json() for key in self],
            **root,
            "log_verifier_keys": list(self.log_verifier_keys),
        }


def _ring_files(folder: Path) -> Iterator[Path]:
    return (
        file
        for file in folder.iterdir()
        if file.suffix in RING_FILE_SUFFIXES and not file.name.startswith(".") and file.is_file()
    )


def _read_ring(file: Path) -> Keyring:
    with file.open("rb") as stream:
        content = stream.read(RING_FILE_BYTES_MAX + 1)
    if len(content) > RING_FILE_BYTES_MAX:
        raise ConfigurationError(f"{file} is over {RING_FILE_BYTES_MAX} bytes, too much for keys")
    try:
        text = content.decode()
        if text.lstrip().startswith("{"):
            return Keyring.from_json(parse_json(text, "the file"))
        return Keyring(_keys_of_pem(text))
    except (LedgerError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{file} is neither PEM nor /v1/keys JSON: {error}") from error


def _keys_of(item: object) -> Iterable[PublicKey]:
    if isinstance(item, PublicKey):
        return (item,)
    if isinstance(item, str):
        return _keys_of_pem(item)
    raise InvalidInputError(f"a key must be PEM text, not {type(item).__name__}")


def _keys_of_pem(text: str) -> list[PublicKey]:
    keys = []
    for block in _PEM_BLOCK.finditer(text):
        if block[1].endswith("PRIVATE KEY"):
            keys.append(PublicKey.of(private_of(block[0].encode()).public_key()))
        else:
            keys.append(PublicKey.of(block[0]))
    if not keys:
        raise InvalidInputError("there is no PEM key in the text")
    return keys
