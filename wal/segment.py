"""The files of a WAL folder: the lock that excludes other writers; segments, their names and their creation; and
complete, synced writes.

A segment is created under a temporary name, gets its header, and is synced; only then it is renamed to its own name.
The folder is synced before the first batch is written. So::

    a segment has its name  =>  its header is synced, and all batches of earlier segments are
"""

from __future__ import annotations

import fcntl
import os
import re
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from ledger.errors import WalCorruptError, WalError, WalLockedError
from ledger.positions import NO_EPOCH, Epoch, Lsn
from objects import sync_folder
from wal.format import (
    SEGMENT_HEADER_BYTES,
    FormatError,
    SegmentHeader,
    decode_segment_header,
    encode_segment_header,
)

LOCK_NAME = "LOCK"
UNNAMED_SUFFIX = ".tmp"
FILE_MODE = 0o600
NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
"""Flags to open a file that is written from its start."""
FOLDER_MODE = 0o700
_NAME = re.compile(r"([0-9]{20})-([1-9][0-9]{0,18})\.wal")


class FolderLock:
    """The exclusive ``flock`` on ``LOCK`` of one WAL folder, which is created if it is missing. Never waits.

    The kernel releases the lock when the process ends, however it ends.

    Raises:
        WalLockedError: another process, or another lock in this process, holds it.
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
        """Release the lock; a second call does nothing."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class Segment(NamedTuple):
    """One segment file, with the fields of its name; tuple order is log order."""

    base_lsn: Lsn
    epoch: Epoch
    path: Path

    @property
    def name(self) -> str:
        return self.path.name


def segment_name(base_lsn: Lsn, epoch: Epoch) -> str:
    """``<20-digit base lsn>-<epoch>.wal``."""
    return f"{base_lsn:020d}-{epoch}.wal"


def list_segments(folder: Path) -> list[Segment]:
    """All segments of ``folder`` in log order; other files are ignored."""
    found = (_NAME.fullmatch(entry) for entry in os.listdir(folder))
    return sorted(Segment(Lsn(int(name[1])), Epoch(int(name[2])), folder / name[0]) for name in found if name)


def read_header(segment: Segment) -> SegmentHeader:
    """The header of ``segment``.

    Raises:
        FormatError: it is damaged or cut short, or does not match the file's name.
    """
    with opened(segment.path) as descriptor:
        header = decode_segment_header(os.pread(descriptor, SEGMENT_HEADER_BYTES, 0))
    if (header.base_lsn, header.epoch) != (segment.base_lsn, segment.epoch):
        raise FormatError(
            f"the header is that of segment {segment_name(header.base_lsn, header.epoch)}, not of this name"
        )
    return header


def misplaced(
    header: SegmentHeader, *, node_id: str, wal_id: str | None, epoch: Epoch = NO_EPOCH, last_lsn: Lsn | None = None
) -> str | None:
    """Why a segment with this sound header does not belong to this log, or cannot follow a segment of ``epoch`` that
    ends with ``last_lsn``; None if it can. An argument that is None, or no epoch, is not compared.
    """
    follows_lsn, is_new_epoch = header.previous_lsn, header.epoch != epoch
    has_gap = not is_new_epoch and header.base_lsn != follows_lsn + 1
    reasons = (
        (header.node_id != node_id, f"the segment belongs to node {header.node_id}, not to {node_id}"),
        (wal_id not in (None, header.wal_id), f"the segment belongs to WAL {header.wal_id}, not to {wal_id}"),
        (header.epoch < epoch, f"the epoch goes down from {epoch} to {header.epoch}"),
        (
            last_lsn not in (None, follows_lsn),
            f"the segment follows LSN {follows_lsn}, but {last_lsn} is the one before it",
        ),
        (has_gap, f"the segment begins with LSN {header.base_lsn} where {follows_lsn + 1} should stand"),
    )
    return next((reason for applies, reason in reasons if applies), None)


def create_segment(folder: Path, header: SegmentHeader) -> int:
    """Create a segment, with its header and name synced, and return its descriptor, open for writing.

    Raises:
        WalError: a segment of this name exists already.
        OSError: the file system refuses.
    """
    path = folder / segment_name(header.base_lsn, header.epoch)
    if path.exists():
        raise WalError(f"WAL segment {path} is there already; a start must take a higher epoch")
    unnamed = path.with_name(path.name + UNNAMED_SUFFIX)
    descriptor = os.open(unnamed, os.O_RDWR | os.O_CLOEXEC | os.O_CREAT | os.O_TRUNC, FILE_MODE)
    try:
        write_fully(descriptor, (encode_segment_header(header),), 0)
        os.fsync(descriptor)
        os.rename(unnamed, path)
        sync_folder(folder)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def remove_unnamed(folder: Path) -> None:
    """Remove segments that a crash left with their temporary name; no batch was ever written to them."""
    for path in folder.glob(f"*.wal{UNNAMED_SUFFIX}"):
        path.unlink()


def open_regular(path: Path, flags: int = os.O_RDONLY) -> int:
    """A descriptor of the file, by default for reading.

    Raises:
        WalCorruptError: it is not a regular file; reading it could block forever.
        OSError: it cannot be opened.
    """
    descriptor = os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK, FILE_MODE)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise WalCorruptError(path.name, 0, f"{path} is not a regular file")
    return descriptor


@contextmanager
def opened(path: Path, flags: int = os.O_RDONLY) -> Iterator[int]:
    """As ``open_regular``, closed at the end."""
    descriptor = open_regular(path, flags)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def read_file(path: Path) -> bytes:
    """The content of a small file of a log.

    Raises:
        WalCorruptError, OSError: as ``open_regular``.
    """
    with os.fdopen(open_regular(path), "rb") as file:
        return file.read()


def write_fully(descriptor: int, parts: Sequence[bytes | memoryview], offset: int) -> None:
    """Write all of ``parts`` one after the other at ``offset``: one system call, more after a short write.

    Raises:
        OSError: some of it may have been written.
    """
    total = sum(map(len, parts))
    written = os.pwritev(descriptor, parts, offset)
    if written == total:
        return
    rest = memoryview(b"".join(parts))
    while written < total:
        if (step := os.pwrite(descriptor, rest[written:], offset + written)) == 0:
            raise OSError(f"a write of {total - written} bytes wrote nothing")
        written += step


def store_file(path: Path, data: bytes) -> None:
    """Put ``data`` into ``path`` so that a crash leaves either the old file or the new one, whole."""
    temporary = path.with_name(path.name + UNNAMED_SUFFIX)
    try:
        with opened(temporary, NEW_FILE) as descriptor:
            write_fully(descriptor, (data,), 0)
            os.fsync(descriptor)
        os.rename(temporary, path)
    except OSError:
        # A partial file would take the last space of a full disk.
        with suppress(OSError):
            temporary.unlink()
        raise
    sync_folder(path.parent)
