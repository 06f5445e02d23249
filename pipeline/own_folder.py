"""A folder of one run: removed at its end, and by a later run where it was killed.

A run holds a lock (flock) on its folder for as long as it lives, so a folder whose lock is free is one of a run that
was killed. Between the making of a folder and its lock a later run may take it for such a one: then another is made.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

TRIES_MAX: Final = 100
"""Folders that are made at most until one is locked before a sweep takes it."""


@contextmanager
def own_folder(parent: Path, prefix: str) -> Iterator[Path]:
    """A folder in ``parent`` whose name begins with ``prefix``; those of this user's dead runs are removed.

    Raises:
        OSError: it cannot be made.
    """
    for left in parent.glob(f"{prefix}*"):
        _remove_if_dead(left)
    folder, lock = _made(parent, prefix)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _made(parent: Path, prefix: str) -> tuple[Path, int]:
    """A new folder, and the descriptor that holds its lock."""
    for _ in range(TRIES_MAX):
        folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        with suppress(FileNotFoundError):
            lock = _open(folder)
            with suppress(OSError):  # A file system without locks: nobody can find the folder dead either.
                fcntl.flock(lock, fcntl.LOCK_EX)
            if folder.is_dir():
                return folder, lock
            os.close(lock)
    raise FileNotFoundError(f"every folder that is made in {parent} is removed by somebody else")


def _remove_if_dead(folder: Path) -> None:
    with suppress(OSError):  # It is gone by itself, no folder, or somebody else's.
        if folder.lstat().st_uid != os.geteuid():
            return
        lock = _open(folder)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(lock)


def _open(folder: Path) -> int:
    return os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
