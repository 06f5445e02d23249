"""What every verifying command reads and shows alike: a kept checkpoint, the colours of verdicts."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from ledger.errors import InvalidInputError

CHECKPOINT_BYTES_MAX: Final = 1 << 20
"""Longest text that may be a kept checkpoint."""
_COLOURS: Final = {"ok": "green", "not_checked": "yellow", "unknown_key": "magenta", "broken": "red"}


def read_checkpoint(path: Path) -> str:
    """The text of a kept checkpoint; bytes that are no text do not open as one.

    Raises:
        InvalidInputError: it is too long for a checkpoint.
        OSError: the file cannot be read.
    """
    with path.open("rb") as file:
        content = file.read(CHECKPOINT_BYTES_MAX + 1)
    if len(content) > CHECKPOINT_BYTES_MAX:
        raise InvalidInputError(f"{path} is over {CHECKPOINT_BYTES_MAX} bytes, too much for a checkpoint")
    return content.decode("utf-8", "replace")


def coloured(verdict: str) -> str:
    """The verdict on one aspect as markup."""
    return f"[{_COLOURS[verdict]}]{verdict}[/]"
