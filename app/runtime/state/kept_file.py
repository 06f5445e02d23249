"""A small JSON file that a node keeps beside its WAL, replaced by temp file, fsync, rename and directory fsync."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Generic, TypeVar

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
