"""The key that a node's ledger began with: ``<wal folder>/root-key``, its id in one line, written once.

Whoever has the database can replace the whole chain of ``_system`` by one that begins with a key of his own. A node
that knows the root believes nothing that such a chain says of keys. A fork of the log may have lost the root, so the
file is removed with it.
"""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import structlog

from app.config import Settings
from ledger.errors import ConfigurationError
from signing.keys import Keyring, PublicKey
from wal.segment import store_file, sync_folder

NAME = "root-key"
_KEY_ID = re.compile(r"[0-9a-f]{16}")

log = structlog.get_logger()


class RootKey:
    """What one node knows. Belongs to one event loop."""

    def __init__(self, wal_folder: Path, expected: str | None = None) -> None:
        """``expected`` is the root that the settings name.

        Raises:
            ConfigurationError: the file is damaged, or says otherwise than the settings.
        """
        self._path = wal_folder / NAME
        self._is_stored = True
        self.key_id = _load(self._path)
        """None as long as this node has seen no root."""
        if expected is not None and self.key_id not in (None, expected):
            raise ConfigurationError(
                f"signing.root_key is key {expected}, but the ledger of this node began with {self.key_id}; a root key "
                "never changes"
            )
        self._is_stored = expected is None or self.key_id == expected
        self.key_id = self.key_id or expected

    async def learn(self, key_id: str) -> None:
        """Keep ``key_id`` as the root, unless one is known."""
        if self.key_id is None:
            self.key_id, self._is_stored = key_id, False
        if self._is_stored or self.key_id != key_id:
            return
        self._is_stored = True
        try:
            await asyncio.to_thread(store_file, self._path, f"{key_id}\n".encode())
        except OSError as error:
            self._is_stored = False
            log.error("root_key_not_stored", error=str(error))

    def refusal(self, found: str | None) -> str:
        """Why a chain that begins with ``found`` is not that of this node's ledger."""
        return (
            f"the chain of _system begins with key {found}, and this node knows its ledger by root key {self.key_id}: "
            "the chain was replaced, or this is another ledger"
        )


def offline_root(settings: Settings) -> PublicKey | None:
    """The root key that the settings name, None when they name none.

    Raises:
        ConfigurationError: it is not in one file, alone.
    """
    if settings.signing.root_key is None:
        return None
    keys = list(Keyring.load(settings.signing.root_key))
    if len(keys) != 1:
        raise ConfigurationError(f"signing.root_key: {settings.signing.root_key} holds {len(keys)} keys, not one")
    return keys[0]


def forget(wal_folder: Path) -> None:
    """Let the node learn the root again."""
    path = wal_folder / NAME
    if path.exists():
        path.unlink()
        sync_folder(wal_folder)


def _load(path: Path) -> str | None:
    try:
        text = path.read_text().strip()
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{path} cannot be read: {error}; restore it, or move it away") from error
    if _KEY_ID.fullmatch(text) is None:
        raise ConfigurationError(f"{path}, which names the ledger's root key, is damaged; restore it, or move it away")
    return text
