"""How often a node was fenced, kept beside its WAL: the process that is fenced ends before a scraper can see it."""

from __future__ import annotations

import contextlib
from pathlib import Path

from app.runtime.state.kept_file import KeptFile
from ledger.errors import StartRefusedError

_KEPT: KeptFile[int] = KeptFile("fenced.json", int, b"0", "remove it: it only counts how often this node was fenced")


def load(folder: Path) -> int:
    """How often the node whose WAL is in ``folder`` was fenced; 0 where that cannot be read, which stops no start."""
    with contextlib.suppress(StartRefusedError):
        return _KEPT.load(folder)
    return 0


def count(folder: Path) -> None:
    """Count once more; nothing where the disk does not take it."""
    with contextlib.suppress(OSError):
        _KEPT.store(folder, load(folder) + 1)
