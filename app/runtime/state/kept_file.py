"""Small JSON files that a node keeps beside its WAL, each replaced by temp file, fsync, rename and directory fsync.

    first-token.json   {"name", "digest"}     made by ``tally token new --first``; all rights for all tenants
    tokens.json        {"counting": [ids], "revoked": [ids]}
    fenced.json        how often this node was fenced: a fenced process ends before a scraper can see it

The first token counts while the ledger has none, and is issued as soon as the ledger accepts it. A token that this node
knows as revoked stays revoked, whatever becomes of the database. Other files are declared where they are used.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Annotated, Any, Final, Generic, TypeVar

import msgspec

from ledger.errors import StartRefusedError
from signing.files import read_regular
from wal.segment import store_file, sync_folder

Value = TypeVar("Value")


class KeptFile(Generic[Value]):
    """The file ``name`` of a folder, which holds a ``kind``; while it holds ``nothing``, in JSON, there is no file.

    ``remedy`` says what to do about one that cannot be read, or was altered.
    """

    def __init__(self, name: str, kind: Any, nothing: bytes, remedy: str) -> None:
        self.name = name
        self._kind = kind
        self._nothing = nothing
        self._remedy = remedy

    def load(self, folder: Path) -> Value:
        """What it holds.

        Raises:
            StartRefusedError: it cannot be read, or is not of its kind.
        """
        path = folder / self.name
        try:
            found: Value = msgspec.json.decode(read_regular(path) if path.exists() else self._nothing, type=self._kind)
            if found is None and path.exists():
                raise ValueError("it holds null, which is never written")
            return found
        except (msgspec.MsgspecError, ValueError, OSError) as error:
            raise StartRefusedError(f"{path} cannot be read: {error}; {self._remedy}") from error

    def store(self, folder: Path, value: Value) -> None:
        """Keep this and nothing else; durable when this returns."""
        path, content = folder / self.name, msgspec.json.encode(value)
        if content != self._nothing:
            store_file(path, content)
        elif path.exists():
            path.unlink()
            sync_folder(folder)


class FirstToken(msgspec.Struct, frozen=True):
    """Whose the first token is, and its SHA-256 in hex."""

    name: str
    digest: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]


class KeptTokens(msgspec.Struct, frozen=True):
    """Ids of tokens: those that counted when this was written, and all that were ever seen revoked."""

    counting: list[str] = []
    revoked: list[str] = []


FIRST_TOKEN: Final[KeptFile[FirstToken | None]] = KeptFile(
    "first-token.json", FirstToken | None, b"null", "remove it, and make a first token again"
)
KEPT_TOKENS: Final[KeptFile[KeptTokens]] = KeptFile(
    "tokens.json",
    KeptTokens,
    msgspec.json.encode(KeptTokens()),
    "restore it, or move it away: tokens that were revoked then count again if the database was put back",
)


_FENCED: KeptFile[int] = KeptFile("fenced.json", int, b"0", "remove it: it only counts how often this node was fenced")


def times_fenced(folder: Path) -> int:
    """How often the node whose WAL is in ``folder`` was fenced; 0 where that cannot be read, which stops no start."""
    with contextlib.suppress(StartRefusedError):
        return _FENCED.load(folder)
    return 0


def count_fenced(folder: Path) -> None:
    """Count once more; nothing where the disk does not take it."""
    with contextlib.suppress(OSError):
        _FENCED.store(folder, times_fenced(folder) + 1)
