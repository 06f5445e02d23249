"""Ends and revocations of keys that a node has seen in the chain: ``<wal folder>/ended-keys``, replaced whole.

The database may be changed or turned back; what ended stays ended all the same. One JSON object by key id::

    {"06e3fd8fda29bb60": {"not_after": "2024-01-01T00:00:00Z", "revoked_from_hlc": null}}
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

import orjson
import structlog

from ledger.errors import ConfigurationError, InvalidInputError
from ledger.hlc import Hlc
from signing.public_key import PublicKey
from wal.segment import store_file

NAME = "ended-keys"

log = structlog.get_logger()


class KeyBounds(NamedTuple):
    """The earliest end and the earliest revocation of one key."""

    not_after: datetime | None
    revoked_from_hlc: Hlc | None


class EndedKeys:
    """Only ever narrows. Belongs to one event loop."""

    def __init__(self, wal_folder: Path) -> None:
        """Raises ConfigurationError when the file is damaged."""
        self._path = wal_folder / NAME
        self._bounds = _load(self._path)
        self._storing = asyncio.Lock()
        self._is_stored = True

    async def narrowed(self, keys: Mapping[str, PublicKey]) -> dict[str, PublicKey]:
        """``keys`` by id, none of which counts longer than it ever did; how long they do is remembered from now on."""
        narrow = {key_id: self.bounded(key) for key_id, key in keys.items()}
        for key_id, key in narrow.items():
            bounds = KeyBounds(key.not_after, key.revoked_from_hlc)
            if bounds != self._bounds.get(key_id, KeyBounds(None, None)):
                self._bounds[key_id], self._is_stored = bounds, False
        async with self._storing:
            if not self._is_stored:
                await self._store()
        return narrow

    def bounded(self, key: PublicKey) -> PublicKey:
        """``key``, counting no longer than this node has seen."""
        known = self._bounds.get(key.key_id)
        if known is None:
            return key
        bounded = PublicKey.of(key.material, not_after=known.not_after, revoked_from_hlc=known.revoked_from_hlc)
        return key.narrowed(bounded)

    async def _store(self) -> None:
        self._is_stored = True
        content = {
            key_id: {
                "not_after": bounds.not_after.isoformat() if bounds.not_after else None,
                "revoked_from_hlc": bounds.revoked_from_hlc.text() if bounds.revoked_from_hlc else None,
            }
            for key_id, bounds in self._bounds.items()
        }
        try:
            await asyncio.to_thread(store_file, self._path, orjson.dumps(content, option=orjson.OPT_INDENT_2))
        except OSError as error:
            self._is_stored = False
            log.error("ended_keys_not_stored", error=str(error))


def _load(path: Path) -> dict[str, KeyBounds]:
    try:
        return {
            key_id: KeyBounds(
                datetime.fromisoformat(item["not_after"]) if item["not_after"] else None,
                Hlc.parse(item["revoked_from_hlc"]) if item["revoked_from_hlc"] else None,
            )
            for key_id, item in orjson.loads(path.read_bytes()).items()
        }
    except FileNotFoundError:
        return {}
    except (ValueError, KeyError, TypeError, AttributeError, InvalidInputError) as error:
        raise ConfigurationError(
            f"{path}, which says which keys have ended, is damaged ({error}); restore it, or move it away once "
            "tally verify has found the chain of _system whole"
        ) from error
