"""A fork of the log that ``_system`` does not record yet, kept beside the WAL until it does.

``<wal folder>/fork.json``, replaced by temp file, fsync, rename and directory fsync::

    {"from_origin", "to_origin", "reason", "node_id", "differing_count",
     "differing": [{"tenant_id", "root_hash", "size"}]}

``differing`` are the checkpoints beside the WAL that the chains do not reach any more or do not fit: what was signed
and is not in the ledger. The first ``DIFFERING_LISTED_MAX`` are listed, all are counted.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Final

import msgspec

from ledger.errors import StartRefusedError
from signing.key_history import FORK_PREFIX
from wal.segment import store_file, sync_folder

NAME: Final = "fork.json"
DIFFERING_LISTED_MAX: Final = 100


class SignedHead(msgspec.Struct, frozen=True):
    """A tree head that this node signed for one tenant; ``root_hash`` is lowercase hex."""

    tenant_id: str
    size: int
    root_hash: str


class Fork(msgspec.Struct, frozen=True):
    """Where the log went on under a new origin, and why."""

    from_origin: str
    to_origin: str
    reason: str
    node_id: str
    differing: list[SignedHead]
    differing_count: int

    @property
    def subject(self) -> str:
        """Names this fork in ``_system``; follows from the new origin alone."""
        return subject(self.to_origin)

    def facts(self) -> dict[str, object]:
        """Fields of the LOG_FORKED entry."""
        facts: dict[str, object] = msgspec.to_builtins(self)
        return facts


def subject(to_origin: str) -> str:
    """What the LOG_FORKED entry of the fork to ``to_origin`` is about."""
    return f"{FORK_PREFIX}{hashlib.sha256(to_origin.encode()).hexdigest()[:16]}"


def load(wal_folder: Path) -> Fork | None:
    """The fork that is still to be recorded.

    Raises:
        StartRefusedError: the file cannot be read.
    """
    path = wal_folder / NAME
    try:
        return msgspec.json.decode(path.read_bytes(), type=Fork)
    except FileNotFoundError:
        return None
    except (msgspec.MsgspecError, OSError) as error:
        raise StartRefusedError(f"{path} cannot be read: {error}; restore it, or move it away") from error


def store(wal_folder: Path, fork: Fork) -> None:
    """Keep this fork; durable when this returns."""
    store_file(wal_folder / NAME, msgspec.json.encode(fork))


def forget(wal_folder: Path) -> None:
    """``_system`` records it now."""
    path = wal_folder / NAME
    if path.exists():
        path.unlink()
        sync_folder(wal_folder)
