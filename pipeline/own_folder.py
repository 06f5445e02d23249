"""A folder of one run: removed at its end, and by a later run where it was killed.

A run holds a lock (flock) on its folder for as long as it lives, and once it has the lock it puts a file there that
says whose the folder is. So a folder with that file whose lock is free is one of a run that was killed. A folder
without it is left alone, whatever its name: it is somebody's.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

MARKER: Final = ".tallystick-run"
"""The file in every folder of a run."""
_SAID: Final = (
    "Temporary files of one run of tally pipeline: a later run removes this folder when that one has ended.\n"
)
_RANDOM: Final = re.compile(r"[a-z0-9_]{8}")
"""What tempfile puts after a prefix."""


@contextmanager
def own_folder(parent: Path, prefix: str) -> Iterator[Path]:
    """A folder in ``parent`` whose name begins with ``prefix``; those of this user's dead runs are removed.

    Raises:
        OSError: it cannot be made.
    """
    for left in parent.glob(f"{prefix}*"):
        if _RANDOM.fullmatch(left.name.removeprefix(prefix)):
            _remove_if_dead(left)
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
    lock = _open(folder)
    try:
        with suppress(OSError):  # A file system without locks: nobody can find the folder dead either.
            fcntl.flock(lock, fcntl.LOCK_EX)
        (folder / MARKER).write_text(_SAID)
        yield folder
    finally:
        _remove(folder)
        os.close(lock)


def _remove_if_dead(folder: Path) -> None:
    with suppress(OSError):  # It is gone by itself, no folder, or somebody else's.
        if folder.lstat().st_uid != os.geteuid():
            return
        lock = _open(folder)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if (folder / MARKER).is_file():
                _remove(folder)
        finally:
            os.close(lock)


def _remove(folder: Path) -> None:
    """Remove ``folder``, its marker last: so that a later run goes on where this one is cut short."""
    with suppress(OSError):
        for path in folder.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            elif path.name != MARKER:
                path.unlink()
    shutil.rmtree(folder, ignore_errors=True)


def _open(folder: Path) -> int:
    return os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
