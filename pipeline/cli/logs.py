"""The files that Spark's logs go to, one a run, of which the newest are kept."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

FOLDER_VARIABLE: Final = "TALLY_PIPELINE_LOGS"
LOG_FILES_MAX: Final = 50
"""How many there are at most, that of the run which begins included."""


def log_file(command: str) -> Path:
    """A new file for this run, in the folder the environment names, else the working folder's ``logs``.

    The oldest make room for it: those that were written to least recently, by runs that have ended.
    """
    folder = Path(os.environ.get(FOLDER_VARIABLE) or "logs").absolute()
    folder.mkdir(parents=True, exist_ok=True)
    old = sorted((_written_ns(file), file) for file in folder.glob("pipeline-*.log"))
    ended = [file for _, file in old if not _is_running(file)]
    for file in ended[: max(0, len(old) - LOG_FILES_MAX + 1)]:
        with suppress(FileNotFoundError):  # Another run was faster.
            file.unlink()
    return folder / f"pipeline-{command}-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{os.getpid()}.log"


def _is_running(file: Path) -> bool:
    """Whether a process has the id that the run of ``file`` had."""
    try:
        os.kill(int(file.stem.rpartition("-")[2]), 0)
    except PermissionError:
        return True
    except (OSError, ValueError, OverflowError):
        return False
    return True


def _written_ns(file: Path) -> int:
    try:
        return file.stat().st_mtime_ns
    except FileNotFoundError:
        return 0
