"""Keeping what leaves a log: whole segments, and the end of one, under names that nothing reads as part of it."""

from __future__ import annotations

import os
from pathlib import Path

from wal.scan import WINDOW_BYTES, end_of_data
from wal.segment import NEW_FILE, UNNAMED_SUFFIX, Segment, opened, sync_folder, write_fully


def set_aside(folder: Path, segment: Segment, prefix: str) -> str:
    """Rename a segment that no longer belongs to the log; its new name, which is durable."""
    aside = _free_name(folder, segment, 0, prefix)
    os.rename(segment.path, aside)
    sync_folder(folder)
    return aside.name


def copy_tail(folder: Path, segment: Segment, offset: int, prefix: str) -> str:
    """Keep the bytes from ``offset`` on in a file of their own, durably; its name."""
    aside = _free_name(folder, segment, offset, prefix)
    unfinished = aside.with_name(aside.name + UNNAMED_SUFFIX)
    with opened(segment.path) as source:
        copy_range(source, unfinished, offset, end_of_data(source, offset))
    os.rename(unfinished, aside)
    sync_folder(folder)
    return aside.name


def copy_range(source: int, target: Path, start: int, end: int, rest: bytes = b"") -> None:
    """Make the file ``target`` of the bytes from ``start`` to ``end`` of an open file, then ``rest``, and sync it."""
    with opened(target, NEW_FILE) as descriptor:
        for at in range(start, end, WINDOW_BYTES):
            data = os.pread(source, min(WINDOW_BYTES, end - at), at)
            write_fully(descriptor, (data,), at - start)
        if rest:
            write_fully(descriptor, (rest,), end - start)
        os.fsync(descriptor)


def _free_name(folder: Path, segment: Segment, offset: int, prefix: str) -> Path:
    """``<prefix><base lsn>-<epoch>-<offset>``, numbered when something earlier took that."""
    name = f"{prefix}{segment.path.stem}-{offset}"
    path = folder / name
    number = 1
    while path.exists():
        number += 1
        path = folder / f"{name}.{number}"
    return path
