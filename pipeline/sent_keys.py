"""A keyring on its way to tasks: as the JSON that ``/v1/keys`` answers."""

from __future__ import annotations

from functools import lru_cache

import orjson

from signing.keys import Keyring


def sent(keyring: Keyring | None) -> str | None:
    """What a task makes the ring from."""
    return None if keyring is None else orjson.dumps(keyring.to_json()).decode()


@lru_cache(maxsize=1)
def keyring_of(sent: str | None) -> Keyring | None:
    """The ring that was sent, made once in each worker."""
    return None if sent is None else Keyring.from_json(orjson.loads(sent))
