"""What every verifying command reads and shows alike: a kept checkpoint, the colours of verdicts."""

from __future__ import annotations

from pathlib import Path
from typing import Final

CHECKPOINT_BYTES_MAX: Final = 1 << 20
"""A kept checkpoint is read so far."""
_COLOURS: Final = {"ok": "green", "not_checked": "yellow", "unknown_key": "magenta", "broken": "red"}


def read_checkpoint(path: Path) -> str:
    """The text of a kept checkpoint; bytes that are no text do not open as one.

    Raises:
        OSError: the file cannot be read.
    """
    with path.open("rb") as file:
        return file.read(CHECKPOINT_BYTES_MAX).decode("utf-8", "replace")


def coloured(verdict: str) -> str:
    """The verdict on one aspect as markup."""
    return f"[{_COLOURS[verdict]}]{verdict}[/]"
