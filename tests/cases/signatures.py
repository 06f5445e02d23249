"""Signatures that differ each time they are made: the first one is kept here, so that the corpus stays as it is."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Final

KEPT: Final = Path(__file__).with_suffix(".json")
_used: Final[set[str]] = set()


@cache
def _kept() -> dict[str, str]:
    """Signatures in base64, by SHA-256 of key id and message."""
    found: dict[str, str] = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    return found


def remembered(key_id: str, message: bytes, sign: Callable[[bytes], bytes]) -> bytes:
    """The signature that was kept of this message by this key, else a new one."""
    name = sha256(key_id.encode() + b"\n" + message).hexdigest()[:32]
    _used.add(name)
    if name not in _kept():
        _kept()[name] = base64.b64encode(sign(message)).decode()
    return base64.b64decode(_kept()[name])


def keep() -> None:
    """Store those that this process has used."""
    KEPT.write_text(json.dumps({name: _kept()[name] for name in sorted(_used)}, indent=1) + "\n")
