"""A copy of the files of a node that is running: what a crash at this moment would leave, nearly."""

from __future__ import annotations

import shutil
from contextlib import suppress
from pathlib import Path


def copy_running(folder: Path, to: Path) -> None:
    """Copy a folder in which files are made and renamed meanwhile; one that has another name by now is left out."""

    def copy(source: str, target: str) -> None:
        with suppress(FileNotFoundError):
            shutil.copy2(source, target)

    shutil.copytree(folder, to, copy_function=copy)
