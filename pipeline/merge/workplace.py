"""The folder beside what comes out, in which bundles are made until all are whole, and what dead runs left of theirs.

A run holds a lock (flock) on its folder for as long as it lives. So a folder whose lock is free is one of a run that
was killed, and goes. Folders are made, locked and swept under a lock on the folder they are in.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from ledger.errors import InvalidInputError

PREFIX: Final = ".merge-"
_FULL: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
"""What the writing of an open file fails with, which names none."""


def refuse_unless_a_folder_can_be(output: Path) -> None:
    """Look for a file that stands where a folder above ``output`` is or has to be made.

    Raises:
        InvalidInputError: there is one.
    """
    there = next(parent for parent in output.absolute().parents if os.path.lexists(parent))
    if not there.is_dir():
        raise InvalidInputError(f"{there} is no folder, so {output} cannot be made")


def refuse_unless_files_can_be(paths: list[Path]) -> None:
    """Look for what cannot be replaced by a file.

    Raises:
        InvalidInputError: there is something.
    """
    for path in paths:
        if path.exists() and not path.is_file():
            raise InvalidInputError(f"{path} is there already and no file: a bundle cannot take its name")


@contextmanager
def workplace(folder: Path) -> Iterator[Path]:
    """A folder for this run in ``folder``, which is made if need be; those of dead runs are removed.

    Raises:
        OSError: nothing can be written there; it names ``folder``, whatever file it was.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with _named(folder):
        with _locked(folder, fcntl.LOCK_EX):
            for left in folder.glob(f"{PREFIX}*"):
                _remove_if_dead(left)
            work = Path(tempfile.mkdtemp(prefix=PREFIX, dir=folder))
            lock = _open(work)
            fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            yield work
        finally:
            shutil.rmtree(work, ignore_errors=True)
            os.close(lock)


def _remove_if_dead(work: Path) -> None:
    if work.is_symlink() or not work.is_dir():
        return
    try:
        with _locked(work, fcntl.LOCK_EX | fcntl.LOCK_NB):
            shutil.rmtree(work, ignore_errors=True)
    except (BlockingIOError, FileNotFoundError, PermissionError):
        return  # It lives, is gone by itself, or is somebody else's.


@contextmanager
def _locked(folder: Path, how: int) -> Iterator[None]:
    descriptor = _open(folder)
    try:
        fcntl.flock(descriptor, how)
        yield
    finally:
        os.close(descriptor)


def _open(folder: Path) -> int:
    return os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)


@contextmanager
def _named(folder: Path) -> Iterator[None]:
    """What goes wrong with a file in the work folder is said of ``folder``, which is what the user named."""
    try:
        yield
    except OSError as error:
        begin = str(folder / PREFIX)
        if str(error.filename or "").startswith(begin) or (error.filename is None and error.errno in _FULL):
            raise OSError(error.errno, error.strerror, str(folder)) from error
        raise
