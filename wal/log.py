"""The files of one WAL, open for append: batches of bytes, rotation, sync. No queue, no thread, and no clock but to
say how long a sync took.

A node's group commit stands on it, and so does whoever keeps the log of another node: both append batches as they stand
in a segment. Belongs to one thread at a time; only ``retire`` may be called from any.

Always true, and asserted where it can break::

    next_lsn > written_lsn >= durable_lsn
    batches written and not synced <= 1
    every segment but the last is synced, and as long as what it holds

After an OSError or WalError nothing more may be appended: what the file then holds is for recovery to judge.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from ledger.positions import Epoch, Lsn
from wal import native
from wal.format import (
    BATCH_RECORD_BYTES,
    SEGMENT_HEADER_BYTES,
    BatchRecord,
    QueuedRecord,
    SegmentHeader,
    batch_of,
    encode_batch,
    encode_records,
)
from wal.guard import FolderGuard, check_named
from wal.replication.proposer import Written
from wal.segment import create_segment, segment_name, write_fully
from wal.spare import Spare

SPARE_AFTER_BYTES = 1 << 20
"""A segment is written ahead once this much stands in one that was not: an idle node needs none."""
NEXT_SPARE_AFTER_SHARE = 0.5
"""Behind a segment that was written ahead, the next is once this part of it is used: early enough to be ready in time,
and a node that stops writing has not written zeros for nothing."""


class Log:
    """One WAL folder, in a segment of its own epoch. The caller MUST hold the folder's lock and MUST have recovered
    the log before.

    ``next_lsn`` is what the first record will have; ``previous_lsn`` the last one in the log, where LSNs are left out.

    Raises:
        WalError: the segment of this epoch is there already.
        OSError: the segment cannot be made.
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
        """What the first record of the next batch must have."""
        self.written_lsn = Lsn(next_lsn - 1)
        """Given to the operating system up to here. MUST NOT be taken for durable."""
        self.durable_lsn = Lsn(next_lsn - 1)
        """Everything up to here is synced."""
        self._descriptor = -1
        self._path = folder
        self._inode = 0
        self._offset = 0
        self._is_ahead = False
        """Zeros were written ahead in this segment; behind the last batch they go when it is finished."""
        self._guard = FolderGuard(folder)
        self._spare = Spare(folder, segment_bytes)
        self._spare_after_bytes = min(SPARE_AFTER_BYTES, segment_bytes // 4)
        self._next_spare_after_bytes = int(segment_bytes * NEXT_SPARE_AFTER_SHARE)
        self._open_segment(Lsn(next_lsn - 1) if previous_lsn is None else previous_lsn)

    def append(self, batch: BatchRecord, body: bytes) -> None:
        """Write one batch: the BATCH record and ``body``, the records that it announces, in one system call.

        ``body`` MUST be as ``wal.format`` says and fit ``batch``; it is not looked at again. Nothing of it is durable
        when this returns. A segment that is full, or a spare that is ready, is moved on to first.

        Raises:
            WalError, OSError: some of it may have been written.
        """
        assert self.written_lsn == self.durable_lsn
        assert batch.first_lsn == self.next_lsn
        assert batch.body_bytes == len(body)
        opening = encode_batch(batch)
        self._make_room(len(opening) + len(body))
        write_fully(self._descriptor, (opening, body), self._offset)
        self._wrote(len(opening) + len(body), batch.last_lsn)

    def sync(self) -> None:
        """Make what was written durable.

        Raises:
            OSError: it may be lost, and a later sync would prove nothing.
            WalError: the segment has lost its name; what was synced into it would not be found.
        """
        os.fdatasync(self._descriptor)
        check_named(self._path, self._inode)
        self.durable_lsn = self.written_lsn

    def commit(
        self,
        hashed: bytes,
        records: Sequence[QueuedRecord],
        body_bytes: int,
        ship: Callable[[Written], None] | None = None,
    ) -> float:
        """``append`` and ``sync`` of one batch, and the seconds that the sync took: these records, all of the node with
        this hash, whose encoding has ``body_bytes``.

        Where C does it, the interpreter's lock is given up once for all of it: each time that it is asked for again,
        the event loop may first do all that it has to do.

        Raises:
            WalError, OSError: as ``append`` and ``sync``.
        """
        assert self.written_lsn == self.durable_lsn
        size = BATCH_RECORD_BYTES + body_bytes
        self._make_room(size)
        first_lsn, last_lsn = self.next_lsn, Lsn(self.next_lsn + len(records) - 1)
        if ship is not None:
            body = encode_records(first_lsn, hashed, records)
            batch = batch_of(first_lsn, last_lsn, records[-1][0].pack(), body)
            self.append(batch, body)
            ship(Written(first_lsn, last_lsn, encode_batch(batch) + body))
            began_s = time.perf_counter()
            self.sync()
            return time.perf_counter() - began_s
        file = self._descriptor, self._offset, os.fsencode(self._path), self._inode
        done = native.commit_records(*file, first_lsn, hashed, records, body_bytes)
        if done is None:
            body = encode_records(first_lsn, hashed, records)
            self.append(batch_of(first_lsn, last_lsn, records[-1][0].pack(), body), body)
            began_s = time.perf_counter()
            self.sync()
            return time.perf_counter() - began_s
        sync_s, is_named = done
        self._wrote(size, last_lsn)
        if not is_named:
            check_named(self._path, self._inode)
        self.durable_lsn = last_lsn
        return sync_s

    def rotate(self) -> None:
        """Leave the segment, all of which is synced, and go on in a new one of the same epoch; not while it is empty,
        as the next would have its name."""
        assert self.written_lsn == self.durable_lsn
        if self._offset == SEGMENT_HEADER_BYTES:
            return
        self._finish_segment()
        self._open_segment(Lsn(self.next_lsn - 1))

    def check(self) -> None:
        """Return when no file of the log was taken away.

        Raises:
            WalError: names the first that was.
        """
        self._spare.check()
        self._guard.check()

    def retire(self, name: str) -> None:
        """The segment of this name is about to be removed, as nobody needs it any more."""
        self._guard.retire(name)

    def close(self) -> None:
        """Finish the segment, all of which is synced, and let the files go.

        Raises:
            OSError: the zeros written ahead may still stand behind the last batch, which harms nothing.
        """
        self._finish_segment()
        self._spare.discard()

    def abandon(self) -> None:
        """Let the files go as they are after a failure: recovery decides what of them counts."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
        self._spare.discard()

    def _make_room(self, size: int) -> None:
        """Move on to the next segment when this one is full, or a spare is ready."""
        is_full = self._offset + size > self._segment_bytes
        if is_full or (self._spare.ready and not self._is_ahead):
            self.rotate()

    def _wrote(self, size: int, last_lsn: Lsn) -> None:
        self._offset += size
        self.written_lsn = last_lsn
        self.next_lsn = Lsn(last_lsn + 1)
        if self._offset >= (self._next_spare_after_bytes if self._is_ahead else self._spare_after_bytes):
            self._spare.prepare()

    def _open_segment(self, previous_lsn: Lsn) -> None:
        header = SegmentHeader(self.node_id, self._wal_id, self._epoch, self.next_lsn, previous_lsn)
        self._spare.check()
        self._is_ahead = self._spare.take()
        self._descriptor = create_segment(self._folder, header, prepared=self._is_ahead)
        self._path = self._folder / segment_name(self.next_lsn, self._epoch)
        self._inode = os.fstat(self._descriptor).st_ino
        self._guard.made(self._path.name, self._inode)
        self._offset = SEGMENT_HEADER_BYTES

    def _finish_segment(self) -> None:
        if self._is_ahead:
            os.ftruncate(self._descriptor, self._offset)
            os.fsync(self._descriptor)
        os.close(self._descriptor)
        self._descriptor = -1
