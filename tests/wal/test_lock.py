"""One writer a folder, between processes and inside one, and free again after any death."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ledger.errors import WalLockedError
from wal.segment import LOCK_NAME, FolderLock

HOLDER = """
import sys
from pathlib import Path
from wal.segment import FolderLock
lock = FolderLock(Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


def test_a_second_opener_is_refused_and_told_who_holds_it(tmp_path: Path) -> None:
    folder = tmp_path / "wal" / "node-a"
    lock = FolderLock(folder)
    with pytest.raises(WalLockedError, match=f"process {os.getpid()}"):
        FolderLock(folder)
    lock.release()
    FolderLock(folder).release()


def test_another_process_is_refused_until_the_holder_is_killed(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(WalLockedError, match=f"process {holder.pid}"):
            FolderLock(tmp_path)
        holder.kill()
        holder.wait()
        FolderLock(tmp_path).release()


def test_releasing_twice_is_harmless(tmp_path: Path) -> None:
    lock = FolderLock(tmp_path)
    lock.release()
    other = FolderLock(tmp_path)
    lock.release()
    with pytest.raises(WalLockedError):
        FolderLock(tmp_path)
    other.release()


def test_a_lock_that_a_full_disk_refuses_is_held_by_nobody(tmp_path: Path) -> None:
    (tmp_path / LOCK_NAME).symlink_to("/dev/full")
    for _ in range(2):
        with pytest.raises(OSError, match="Errno"):
            FolderLock(tmp_path)
