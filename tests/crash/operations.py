"""What clients asked of a ledger and what they were told, with times: lines of JSON for checkers of linearizability.

The format is in docs/formats/history.md. An operation whose ``output`` is None may have taken effect at any time after
it was invoked, or never.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import msgspec


class Operation(msgspec.Struct, kw_only=True):
    """One request of a client, or one that it repeated under its key until it was answered."""

    op: Literal["write", "adjust"]
    object: str
    """What it is about: operations on different objects do not concern each other."""
    client: str
    invoked_s: float
    completed_s: float
    """Of one monotonic clock."""
    input: dict[str, Any]
    output: dict[str, Any] | None = None


_decoder = msgspec.json.Decoder(Operation)


def load(path: Path) -> list[Operation]:
    """The operations that a file holds."""
    return [_decoder.decode(line) for line in path.read_bytes().splitlines()]


class Recorder:
    """Writes operations into ``path`` as they are completed; they may be read at any time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = path.open("wb", buffering=0)

    def note(self, operation: Operation) -> None:
        """One more line."""
        self._file.write(msgspec.json.encode(operation) + b"\n")

    def close(self) -> None:
        """No more lines."""
        self._file.close()
