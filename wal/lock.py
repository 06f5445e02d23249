"""One writer a WAL folder: an exclusive ``flock`` on the file ``LOCK``, held as long as the process lives."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from types import TracebackType

from ledger.errors import WalLockedError
from wal.segment import FILE_MODE, FOLDER_MODE, sync_folder

LOCK_NAME = "LOCK"


class Lock:
    """A held lock. The kernel lets go of it when the process ends, however it ends."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def release(self) -> None:
        """Let another process have the folder; a second call does nothing."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> Lock:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def acquire(folder: Path) -> Lock:
    """Take the lock of ``folder``, making the folder when it is missing. Never waits.

    Raises:
        WalLockedError: another process, or another opener in this one, holds it.
        OSError: it cannot be written; nobody holds it then.
    """
    if not folder.is_dir():
        folder.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
        sync_folder(folder.parent)
    descriptor = os.open(folder / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
    except BlockingIOError:
        holder = os.pread(descriptor, 32, 0).decode(errors="replace").strip() or "unknown"
        os.close(descriptor)
        raise WalLockedError(
            f"WAL folder {folder} is in use by process {holder}; stop it, or give this node another node_id"
        ) from None
    except OSError:
        os.close(descriptor)
        raise
    return Lock(descriptor)
