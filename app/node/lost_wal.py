"""Ranges of a WAL that were given up with ``--accept-lost-wal``, kept beside it until ``_system`` records them.

``<wal folder>/lost.json`` holds ``[[first_lsn, last_lsn], ...]``. A process may end between giving a range up and
chaining the entry that says so; the next start finds it here and records it then. Missing when there is nothing to
record.
"""

from __future__ import annotations

import json
from pathlib import Path

from ledger.errors import StartRefusedError
from wal.segment import store_file, sync_folder

NAME = "lost.json"

LsnRange = tuple[int, int]
"""First and last LSN; the last is below the first when nobody knows how much there was."""


def load(wal_folder: Path) -> list[LsnRange]:
    """The ranges that are still to be recorded.

    Raises:
        StartRefusedError: the file cannot be read.
    """
    path = wal_folder / NAME
    try:
        ranges = [(first, last) for first, last in json.loads(path.read_bytes())]
        if any(type(lsn) is not int or lsn < 0 for each in ranges for lsn in each):
            raise ValueError("an LSN in it is no number")
        return ranges
    except FileNotFoundError:
        return []
    except (ValueError, TypeError, OSError) as error:
        raise StartRefusedError(f"{path} cannot be read: {error}; restore it, or move it away") from error


def store(wal_folder: Path, ranges: list[LsnRange]) -> None:
    """Keep these ranges and no others; durable when this returns."""
    path = wal_folder / NAME
    if ranges:
        store_file(path, json.dumps(ranges).encode())
    elif path.exists():
        path.unlink()
        sync_folder(wal_folder)
