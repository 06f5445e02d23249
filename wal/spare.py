"""Space written ahead: the segment to come, as a file of zeros that is synced before it is needed.

A write into such space changes no metadata, so its fdatasync needs no journal commit of the file system:
about half the time for small batches, less for large ones. The zeros are written by a thread of its own,
and only once a node has written enough to need them.

A spare that cannot be made, on a full disk above all, is done without; no record is at stake.
"""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path

from wal.guard import check_named
from wal.segment import NEW_FILE, SPARE_NAME, opened, write_fully

STEP_BYTES = 1 << 20
"""Zeros synced at once: small, so that batches synced meanwhile do not wait long behind them."""

_ZEROS = bytes(STEP_BYTES)


class Spare:
    """The spare of one folder; its methods belong to the writer thread."""

    def __init__(self, folder: Path, size_bytes: int) -> None:
        self._path = folder / SPARE_NAME
        self._size_bytes = size_bytes
        self._thread: threading.Thread | None = None
        self._stopped = threading.Event()
        self._ready = False
        self._inode = 0

    @property
    def ready(self) -> bool:
        """The file is there, whole and synced."""
        return self._ready

    def check(self) -> None:
        """Return unless a spare that is ready is not where it was made.

        Raises:
            WalError: it was removed, renamed or replaced.
        """
        if self._ready:
            check_named(self._path, self._inode)

    def prepare(self) -> None:
        """Begin to make the spare, if that was not begun since the last was taken."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._fill, name="wal-spare", daemon=True)
            self._thread.start()

    def take(self) -> bool:
        """True when the caller may make the spare its segment; it then belongs to the caller."""
        if not self._ready:
            return False
        self._ready = False
        self._thread = None
        return True

    def discard(self) -> None:
        """Stop, and remove what was not taken."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join()
            self._path.unlink(missing_ok=True)
            self._ready = False

    def _fill(self) -> None:
        try:
            with opened(self._path, NEW_FILE) as descriptor:
                for start in range(0, self._size_bytes, STEP_BYTES):
                    if self._stopped.is_set():
                        return
                    write_fully(descriptor, (_ZEROS[: self._size_bytes - start],), start)
                    os.fdatasync(descriptor)
                self._inode = os.fstat(descriptor).st_ino
        except OSError:
            # Done without: the writer goes on in segments that grow, and the space is given back.
            with contextlib.suppress(OSError):
                self._path.unlink(missing_ok=True)
            return
        self._ready = True
