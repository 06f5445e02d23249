"""The files of one WAL, open for append: batches of bytes, rotation, sync, and the guard that notices missing files. No
queue, no thread, no clock.

A node's group commit and a member's copy of another node's log both append batches with it, encoded as in a segment.
Belongs to one thread at a time.

Always true, and asserted where it can break::

    next_lsn > written_lsn >= durable_lsn
    batches written and not synced <= 1
    every segment but the last is synced, and ends after its last batch

After an OSError or WalError nothing more may be appended: recovery decides what the file then holds.

A file that is removed, renamed or replaced stays open in the writer, which would lose what it writes there. The guard
watches, by inode, the folder itself, every segment until it is retired, and ``LOCK``. It watches ``control`` by name,
since that file is replaced all the time. It does not miss a file that did not exist when the writer started, except
segments.
"""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from pathlib import Path

from ledger.errors import WalError, WalFilesError, reported_as
from ledger.positions import Epoch, Lsn
from wal.control import CONTROL_NAME
from wal.format import (
    SEGMENT_HEADER_BYTES,
    BatchRecord,
    SegmentHeader,
    encode_batch,
)
from wal.segment import LOCK_NAME, create_segment, list_segments, segment_name, write_fully

AHEAD_FROM_BYTES = 64 << 10
"""Zeros are written ahead once a segment holds this many bytes: a node that writes little needs none."""
AHEAD_BYTES = 512 << 10
"""At most so many zeros are written ahead, and not more than the segment holds. A sync that writes them takes some
500 us longer; some 30 batches of 64 records after it save 100 us each."""
AHEAD_BATCH_BYTES_MAX = 32 << 10
"""No zeros are written ahead for a larger batch: its own bytes take longer than the file system's journal."""
AHEAD_BATCHES = 2
"""After a batch there must be space for so many of its size, as the next may be somewhat larger."""
_ZEROS = bytes(AHEAD_BYTES)
_NO_SPACE = frozenset((errno.ENOSPC, errno.EDQUOT, errno.EFBIG))


AppendSpace = tuple[int, int, bytes, int, int, int, int]
"""Where C may write batches without ``Log.append``: the descriptor of a file, which MUST keep its path and inode, the
offset at which to continue, the path, the inode, the end of the segment, the end of the zeros written ahead, and the
size of the largest batch, in bytes with its BATCH record, that must not pass that end."""


class Log:
    """One WAL folder, in a segment of its own epoch. The caller MUST hold the folder's lock and MUST have recovered
    the log before.

    ``next_lsn`` is the LSN of the first record; ``previous_lsn`` the last LSN in the log, if LSNs between are skipped.

    Raises:
        WalError: the segment of this epoch exists already.
        OSError: the segment cannot be created.
    """

    def __init__(
        self,
        folder: Path,
        *,
        node_id: str,
        wal_id: str,
        epoch: Epoch,
        next_lsn: Lsn,
        previous_lsn: Lsn | None = None,
        segment_bytes: int = 64 << 20,
    ) -> None:
        self._folder = folder
        self.node_id = node_id
        self._wal_id = wal_id
        self._epoch = epoch
        self._segment_bytes = segment_bytes
        self.next_lsn = next_lsn
        """LSN that the first record of the next batch must have."""
        self.written_lsn = Lsn(next_lsn - 1)
        """The last LSN given to the operating system. MUST NOT be taken for durable."""
        self.durable_lsn = Lsn(next_lsn - 1)
        """Everything up to here is synced."""
        self._descriptor = -1
        self._path = folder
        self._inode = 0
        self._offset = 0
        self._ahead_at = 0
        """Zeros are written ahead before a small batch that would end after this offset. It is the end of the segment
        if the disk had no space for zeros: then this segment gets no more of them."""
        self._zeros_end = 0
        """Where the zeros written ahead end. Closing the segment removes those after the last batch."""
        self.guard = FolderGuard(folder)
        self._open_segment(Lsn(next_lsn - 1) if previous_lsn is None else previous_lsn)

    def append(self, batch: BatchRecord, body: bytes | memoryview) -> None:
        """Write one batch: the BATCH record and ``body``, the records that it announces, in one system call.

        ``body`` MUST be encoded as in ``wal.format`` and match ``batch``; it is not checked. Nothing of it is durable
        when this returns. A full segment is rotated first.

        Raises:
            WalError, OSError: some of it may have been written.
        """
        assert self.written_lsn == self.durable_lsn
        assert batch.first_lsn == self.next_lsn
        opening = encode_batch(batch)
        self._make_space(len(opening) + len(body))
        write_fully(self._descriptor, (opening, body), self._offset)
        self._wrote(len(opening) + len(body), batch.last_lsn)

    def sync(self) -> None:
        """Make the written batches durable.

        Raises:
            OSError: they may be lost, and a later sync would prove nothing.
            WalError: the segment has lost its name; recovery would not find its records.
        """
        os.fdatasync(self._descriptor)
        check_named(self._path, self._inode)
        self.durable_lsn = self.written_lsn

    def append_space(self, size: int) -> AppendSpace:
        """Where C may write and sync batches; the caller then reports them to ``wrote``. ``size`` is the length of the
        next batch with its BATCH record: a full segment is rotated first. If it is 0, there may be no space.

        Raises:
            WalError, OSError: the space cannot be made.
        """
        if size > 0:
            self._make_space(size)
        path, end = os.fsencode(self._path), max(self._segment_bytes, self._offset + size)
        return self._descriptor, self._offset, path, self._inode, end, self._ahead_at, AHEAD_BATCH_BYTES_MAX

    def wrote(self, offset: int, last_lsn: Lsn, small_end: int = 0) -> None:
        """Batches up to this LSN were written and synced without ``append``. The segment continues at ``offset``; the
        zeros written ahead end at ``small_end``, if that is higher than before."""
        self._wrote(offset - self._offset, last_lsn)
        self.durable_lsn = last_lsn
        if small_end > self._ahead_at:
            self._zeros_end = self._ahead_at = small_end

    def prepare(self, size: int) -> None:
        """A batch of ``size`` bytes was synced: write zeros ahead for the next one of this size, if there is no space.
        The records of that batch are still to come, and need not wait for the zeros.

        Raises:
            OSError: the log cannot continue; everything synced is durable.
        """
        is_busy = self._offset >= AHEAD_FROM_BYTES and size <= AHEAD_BATCH_BYTES_MAX
        if is_busy and self._offset + AHEAD_BATCHES * size > self._ahead_at:
            self._write_ahead(self._offset)

    def rotate(self) -> None:
        """Close the segment, all of which is synced, and continue in a new one of the same epoch. An empty segment is
        kept, since the next would have the same name."""
        assert self.written_lsn == self.durable_lsn
        if self._offset == SEGMENT_HEADER_BYTES:
            return
        self.close()
        self._open_segment(Lsn(self.next_lsn - 1))

    def close(self) -> None:
        """Close the segment, all of which is synced: remove the zeros after the last batch, and close the file.

        Raises:
            OSError: the zeros may remain, which is harmless.
        """
        if self._zeros_end > self._offset:
            os.ftruncate(self._descriptor, self._offset)
            os.fsync(self._descriptor)
        self.abandon()

    def abandon(self) -> None:
        """Close the file as it is after a failure: recovery decides which of its records are kept."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def _make_space(self, size: int) -> None:
        """Rotate a full segment, and write zeros after the space for the next batch."""
        if self._offset + size > self._segment_bytes:
            self.rotate()
        if size <= AHEAD_BATCH_BYTES_MAX and self._offset + size > self._ahead_at:
            self._write_ahead(self._offset + size)

    def _write_ahead(self, data_end: int) -> None:
        """Write zeros after ``data_end``; the next sync makes them durable with the data before them. Write none if the
        disk is full, since no record needs them."""
        start = max(data_end, self._zeros_end)
        count = min(data_end + min(self._offset, AHEAD_BYTES), self._segment_bytes) - start
        self._ahead_at = max(start, self._segment_bytes)
        if self._offset < AHEAD_FROM_BYTES:
            self._ahead_at = max(start, min(AHEAD_FROM_BYTES, self._segment_bytes))
        elif count > 0:
            try:
                self._zeros_end = self._ahead_at = start + os.pwrite(self._descriptor, _ZEROS[:count], start)
            except OSError as error:
                if error.errno not in _NO_SPACE:
                    raise

    def _wrote(self, size: int, last_lsn: Lsn) -> None:
        self._offset += size
        self.written_lsn = last_lsn
        self.next_lsn = Lsn(last_lsn + 1)

    def _open_segment(self, previous_lsn: Lsn) -> None:
        self._descriptor = create_segment(
            self._folder, SegmentHeader(self.node_id, self._wal_id, self._epoch, self.next_lsn, previous_lsn)
        )
        self._path = self._folder / segment_name(self.next_lsn, self._epoch)
        self._inode = os.fstat(self._descriptor).st_ino
        self.guard.made(self._path.name, self._inode)
        self._offset = self._ahead_at = self._zeros_end = SEGMENT_HEADER_BYTES


CHECK_INTERVAL_S = 0.5
"""How often the folder is checked, busy or idle: a fault is detected within a second."""


class FolderGuard:
    """Watches one folder; ``check`` belongs to one thread, ``retire`` may be called from any."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._made_as = os.stat(folder)
        found = _inodes(folder)
        names = {LOCK_NAME, *(segment.name for segment in list_segments(folder))}
        self.watched = {name: inode for name, inode in found.items() if name in names}
        """Inode by name, of ``LOCK`` and the segments not removed yet."""
        self._has_control = CONTROL_NAME in found
        self._retired: set[str] = set()

    def made(self, name: str, inode: int) -> None:
        """The writer created a segment. Called on the thread that checks."""
        self.watched[name] = inode

    def retire(self, name: str) -> None:
        """This segment is no longer needed. MUST be called before it is removed."""
        self._retired.add(name)

    def check(self) -> None:
        """Return if every file is in its place.

        Raises:
            WalError: names the first that is not.
        """
        with reported_as(WalError, f"the WAL folder {self._folder} cannot be read any more", OSError):
            is_same = os.path.samestat(os.stat(self._folder), self._made_as)
            found = _inodes(self._folder) if is_same else {}
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
    """Return if the file of this inode still has its name.

    Raises:
        WalError: it was removed, renamed or replaced.
    """
    with suppress(OSError):
        if os.stat(path).st_ino == inode:
            return
    raise gone(path)


def gone(path: Path) -> WalFilesError:
    """The error for a file that is no longer where the writer opened it."""
    return WalFilesError(
        f"{path} was removed, renamed or replaced under the writer", "Put it back before the next start"
    )


def _inodes(folder: Path) -> dict[str, int]:
    """Inode by name of every file in the folder."""
    with os.scandir(folder) as entries:
        return {entry.name: entry.inode() for entry in entries}
