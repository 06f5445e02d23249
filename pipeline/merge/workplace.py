"""The folder beside what comes out, in which bundles are made until all are whole; dead runs leave none."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from ledger.errors import InvalidInputError
from pipeline.own_folder import own_folder

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
    with _named(folder), own_folder(folder, PREFIX) as work:
        yield work


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
