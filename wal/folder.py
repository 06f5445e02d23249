"""One writer for each WAL folder: the lock that keeps others out, and the guard that notices missing files.

A file that is removed, renamed or replaced stays open under the writer, and what it writes there would be lost. The
guard watches, by inode, the folder itself, every segment until it is retired, and ``LOCK``; and by name ``control``,
which is replaced all the time. It does not miss what was not there when the writer began, except segments.
"""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress
from pathlib import Path

from ledger.errors import WalError, WalFilesError, WalLockedError
from wal.control import CONTROL_NAME
from wal.segment import FILE_MODE, FOLDER_MODE, list_segments, sync_folder

LOCK_NAME = "LOCK"


class FolderLock:
    """The exclusive ``flock`` on ``LOCK`` of one WAL folder, which is created when it is missing. Never waits.

    The kernel releases the lock when the process ends, however it ends.

    Raises:
        WalLockedError: another process, or another opener in this one, holds it.
        OSError: the file cannot be written; the lock is not held then.
    """

    def __init__(self, folder: Path) -> None:
        if not folder.is_dir():
            folder.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
            sync_folder(folder.parent)
        self._descriptor = os.open(folder / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, f"{os.getpid()}\n".encode(), 0)
        except BlockingIOError:
            holder = os.pread(self._descriptor, 32, 0).decode(errors="replace").strip() or "unknown"
            self.release()
            raise WalLockedError(
                f"WAL folder {folder} is in use by process {holder}; stop it, or give this node another node_id"
            ) from None
        except OSError:
            self.release()
            raise

    def release(self) -> None:
        """Let another process have the folder; a second call does nothing."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


CHECK_INTERVAL_S = 0.5
"""How often the folder is checked, busy or idle: a fault is noticed within a second."""


class FolderGuard:
    """Watches one folder; ``check`` belongs to one thread, ``retire`` may be called from any."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._made_as = os.stat(folder)
        found = _inodes(folder)
        names = {LOCK_NAME, *(segment.name for segment in list_segments(folder))}
        self.watched = {name: inode for name, inode in found.items() if name in names}
        """Inode by name, of ``LOCK`` and the segments that are not removed yet."""
        self._has_control = CONTROL_NAME in found
        self._retired: set[str] = set()

    def made(self, name: str, inode: int) -> None:
        """The writer has a new segment; called on the thread that checks."""
        self.watched[name] = inode

    def retire(self, name: str) -> None:
        """This segment is about to be removed, since it is not needed; MUST be called before it is."""
        self._retired.add(name)

    def check(self) -> None:
        """Return when all is where it was.

        Raises:
            WalError: names the first that is not.
        """
        try:
            is_same = os.path.samestat(os.stat(self._folder), self._made_as)
            found = _inodes(self._folder) if is_same else {}
        except OSError as error:
            raise WalError(f"the WAL folder {self._folder} cannot be read any more: {error}") from error
        if not is_same:
            raise WalError(f"another folder stands in the place of the WAL folder {self._folder}")
        for name, inode in list(self.watched.items()):
            if name in self._retired and name not in found:
                del self.watched[name]
                self._retired.discard(name)
            elif found.get(name) != inode:
                raise gone(self._folder / name)
        if self._has_control and CONTROL_NAME not in found:
            raise gone(self._folder / CONTROL_NAME)
        self._has_control = CONTROL_NAME in found


def check_named(path: Path, inode: int) -> None:
    """Return when the file of this inode still has its name.

    Raises:
        WalError: it was removed, renamed or replaced.
    """
    with suppress(OSError):
        if os.stat(path).st_ino == inode:
            return
    raise gone(path)


def gone(path: Path) -> WalFilesError:
    """The error about a file that is not where the writer has it."""
    return WalFilesError(
        f"{path} was removed, renamed or replaced under the writer", "Put it back before the next start"
    )


def _inodes(folder: Path) -> dict[str, int]:
    """Inode by name of every file in the folder."""
    with os.scandir(folder) as entries:
        return {entry.name: entry.inode() for entry in entries}
