"""A copy of a log in files: a WAL folder like that of a node, kept by a member of its quorum, or by the node itself
while it becomes the writer. Also reads from a node's files the batches that its members lack.

``FileLog`` is the copy for the rules of ``acceptor`` and ``election``. It collects appended records in memory and
writes them as one batch on ``sync``. So there are never two unsynced batches, on which recovery relies
(``wal.recovery``). Every epoch has segments of its own.

``TailReader`` reads for each member the batches that it lacks, usually from the page cache. It looks up the place in
the files once, then remembers it.
"""

from __future__ import annotations

import math
import os
import secrets
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from ledger.errors import WalCorruptError, WalError
from ledger.hlc import Hlc
from ledger.positions import BEFORE_FIRST, NO_EPOCH, Epoch, Lsn, after, before
from wal import control as control_file
from wal.control import Control, History, begin_epoch, epoch_of, history_since, history_up_to
from wal.format import BATCH_RECORD_BYTES, SEGMENT_HEADER_BYTES, WAL_ID_BYTES, batch_of, decode_batch
from wal.log import AppendSpace, Log
from wal.reader import Batch, batches, cut_batch
from wal.recovery import recover
from wal.replication import configuration as configurations
from wal.replication.configuration import Configuration
from wal.replication.messages import Position
from wal.segment import FolderLock, Segment, list_segments, open_regular, read_header
from wal.truncation import CUT_PREFIX, keep_segment, remove_segments, truncate

BATCH_BYTES_MAX = 8 << 20
"""Received batches are joined into one of at most so many bytes; a longer one is written unchanged."""


class Chunk(NamedTuple):
    """Batches in the form of a segment, all of one epoch, after ``previous``; none at the end of the log."""

    previous: Position
    written_in: Epoch
    last_lsn: Lsn
    batches: bytes


class FileLog:
    """The copy in ``folder`` of the log of ``node_id``. It MUST be closed: it holds the folder's lock, unless the
    caller does. A missing copy is created with ``wal_id`` and a random member id.

    ``control`` is the content of the control file; its history and positions may lag. ``configuration`` is the stored
    list of members. ``history`` and ``tail`` include appended records, synced or not. After an OSError or WalError of
    a method that writes, the caller MUST NOT use the copy any more; it may open the copy again.

    Raises:
        WalLockedError: another process or member has the folder's lock.
        WalCorruptError: the copy is damaged; nothing was changed.
        WalError: the copy is of another WAL.
    """

    def __init__(
        self,
        folder: Path,
        node_id: str,
        wal_id: str,
        *,
        segment_bytes: int = 64 << 20,
        lock: FolderLock | None = None,
    ) -> None:
        self._folder, self._segment_bytes = folder, segment_bytes
        self._log: Log | None = None
        self._written_in = NO_EPOCH
        self._unwritten = bytearray()
        """Records appended and not written, after ``durable_lsn``."""
        self._last_hlc = b""
        """Packed HLC of the last of them."""
        self._lock = None if lock is not None else FolderLock(folder)
        try:
            if (control := control_file.load(folder)) is None:
                if list_segments(folder):
                    raise WalCorruptError(control_file.CONTROL_NAME, 0, f"{folder} holds segments and no control file")
                control = Control(
                    wal_id, node_id, NO_EPOCH, Hlc(0, 0, node_id), member_id=secrets.token_hex(WAL_ID_BYTES)
                )
                control_file.store(folder, control)
            if (control.node_id, control.wal_id) != (node_id, wal_id or control.wal_id):
                raise WalError(f"{folder} holds WAL {control.wal_id} of node {control.node_id}")
            self.control = control
            self.configuration = configurations.load(folder, control.generation)
            self._reopen()
        except BaseException:
            self.abandon()
            raise

    def _reopen(self) -> None:
        """Recover the files, and set history and positions from them."""
        control = self.control
        found = recover(self._folder, control.node_id, control.durable_lsn)
        self.cut = found.cut
        """Facts of the torn tail that this recovery cut, None for none."""
        known = control.history or found.history
        self.history: History = history_up_to(history_since(known, before(found.first_lsn)), found.last_lsn)
        if found.history and (not self.history or found.history[-1].epoch != self.history[-1].epoch):
            self.history = begin_epoch(self.history, *found.history[-1])
        self.first_lsn, self._last_lsn = found.first_lsn, found.last_lsn
        self.durable_lsn = found.last_lsn
        """Everything up to here is synced."""
        if self.history != control.history:
            self.store(control)  # the next record is not of an epoch that was cut away

    def close(self) -> None:
        """Write and sync the appended records, and unlock the folder.

        Raises:
            OSError, WalError: they may not be durable; the folder is unlocked nevertheless.
        """
        try:
            self._close_segment()
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Unlock the folder as it is, after a failure; unsynced records may be lost."""
        if self._log is not None:
            self._log.abandon()
            self._log = None
        if self._lock is not None:
            self._lock.release()

    @property
    def tail(self) -> Position:
        """The end of the log, synced or not."""
        return Position(epoch_of(self.history, self._last_lsn) or NO_EPOCH, self._last_lsn)

    def store(self, control: Control) -> None:
        """Store ``control`` with the current history and durable position; durable when this returns."""
        durable_lsn = self.durable_lsn if self.durable_lsn >= self.first_lsn else BEFORE_FIRST
        control = control._replace(
            durable_lsn=durable_lsn,
            committed_lsn=min(control.committed_lsn, durable_lsn),
            chained_lsn=min(control.chained_lsn, control.committed_lsn, durable_lsn),
            signed_lsn=min(control.signed_lsn, control.chained_lsn, control.committed_lsn, durable_lsn),
            generation=self.configuration.generation,
            history=self.history,
        )
        control_file.store(self._folder, control)
        self.control = control

    def configure(self, configuration: Configuration) -> None:
        """Store the list of members; durable when this returns."""
        configurations.store(self._folder, configuration)
        self.configuration = configuration
        self.store(self.control)

    def append(self, written_in: Epoch, batches: bytes | memoryview) -> None:
        """Append batches of one epoch; they MUST be sound and follow the tail. Durable only after ``sync``."""
        if self._log is None or written_in != self._written_in:
            self._begin(written_in)
        data, at = bytes(batches), 0
        while at < len(data):
            batch = decode_batch(data, at, len(data))
            if len(self._unwritten) + batch.body_bytes > BATCH_BYTES_MAX:
                self.sync()
            body_at = at + BATCH_RECORD_BYTES
            at = body_at + batch.body_bytes
            self._unwritten += data[body_at:at]
            self._last_lsn, self._last_hlc = batch.last_lsn, batch.hlc

    def sync(self) -> None:
        """Make all appended records durable."""
        if not self._unwritten:
            return
        assert self._log is not None
        body = bytes(self._unwritten)
        self._log.append(batch_of(after(self.durable_lsn), self._last_lsn, self._last_hlc, body), body)
        self._log.sync()
        self._unwritten.clear()
        self.durable_lsn = self._last_lsn

    def append_space(self) -> AppendSpace | None:
        """Where C may continue the last epoch; the caller then reports the batches to ``wrote``. None if a record is
        not written yet, or that epoch has no segment."""
        if self._log is None or self._unwritten or self._written_in != self.history[-1].epoch:
            return None
        return self._log.append_space(0)

    def wrote(self, offset: int, last_lsn: Lsn) -> None:
        """Batches up to this LSN were written and synced in the append space, which continues at ``offset``."""
        assert self._log is not None
        assert not self._unwritten
        self._log.wrote(offset, last_lsn)
        self._last_lsn = self.durable_lsn = last_lsn

    def truncate(self, last_lsn: Lsn) -> None:
        """Cut the log after ``last_lsn``, durably; other files keep the records above it."""
        self._close_segment()
        self.store(self.control)  # with the whole history: recovery checks the log against it until it is cut
        truncate(self._folder, self.control.node_id, last_lsn)
        self.control = self.control._replace(durable_lsn=last_lsn)
        self._reopen()

    def begin_at(self, first_lsn: Lsn, history: History) -> None:
        """Move all records out of the log into other files, durably; the next record is ``first_lsn``. ``history`` is
        that of the records before it, which the members have removed. It is lost if the log is opened again before the
        next record."""
        self._close_segment()
        self.history, self.first_lsn, self._last_lsn, self.durable_lsn = (), Lsn(1), BEFORE_FIRST, BEFORE_FIRST
        self.store(self.control)
        for segment in reversed(list_segments(self._folder)):
            keep_segment(self._folder, segment, CUT_PREFIX)
        self.first_lsn, self.history = first_lsn, history
        self._last_lsn = self.durable_lsn = before(first_lsn)

    def remove_upto(self, lsn: Lsn) -> list[str]:
        """Remove segments that end at or below ``lsn``, which MUST be committed, durable, and not needed. Returns their
        names."""
        retire = self._log.guard.retire if self._log is not None else lambda _: None
        if removed := remove_segments(self._folder, min(lsn, self.durable_lsn), 0, math.inf, retire):
            self.first_lsn = list_segments(self._folder)[0].base_lsn
        if removed and self._log is not None:
            self._log.guard.check()
        return removed

    def read(self, from_lsn: Lsn, upto_lsn: Lsn, bytes_max: int) -> Chunk:
        """As ``TailReader.read``, after a ``sync``."""
        self.sync()
        return TailReader(self._folder, self.control.node_id, self.history).read(from_lsn, upto_lsn, bytes_max)

    # --- files ------------------------------------------------------------------------------------

    def _begin(self, written_in: Epoch) -> None:
        """Start a segment for this epoch; the control file has the epoch first."""
        self._close_segment()
        if not self.history or self.history[-1].epoch < written_in:
            self.history = begin_epoch(self.history, written_in, after(self.durable_lsn))
        if self.history != self.control.history:
            self.store(self.control)
        for segment in list_segments(self._folder):
            if segment.base_lsn > self.durable_lsn:
                segment.path.unlink()  # without a record: a crash came before its first
        self._written_in = written_in
        self._log = Log(
            self._folder,
            node_id=self.control.node_id,
            wal_id=self.control.wal_id,
            epoch=written_in,
            next_lsn=after(self.durable_lsn),
            segment_bytes=self._segment_bytes,
        )

    def _close_segment(self) -> None:
        if self._log is not None:
            self.sync()
            self._log.close()
            self._log = None


def oldest_whole_lsn(folder: Path) -> Lsn:
    """The oldest record of the log in ``folder`` after which none is missing. Records before a gap, where others were
    given up, are ignored, and so is a segment that is removed meanwhile."""
    oldest = Lsn(1)
    for segment in reversed(list_segments(folder)):
        try:
            previous_lsn = read_header(segment).previous_lsn
        except FileNotFoundError:
            break
        oldest = segment.base_lsn
        if previous_lsn != before(oldest):
            break
    return oldest


PLACES_KEPT = 64
"""The reader remembers the last so many places where members continue."""


class TailReader:
    """Reads the log in ``folder``, whose history ends with the current epoch. Belongs to one thread."""

    def __init__(self, folder: Path, node_id: str, history: History) -> None:
        self._folder, self._node_id, self._history = folder, node_id, history
        self._places: dict[Lsn, tuple[Segment, int]] = {}
        """By first LSN of a batch, existing or next: its segment, and the offset in it. The oldest first."""
        self._last: Chunk | None = None
        """The last result: members that follow closely lack the same batches."""
        self._opened: tuple[Segment, int] | None = None
        """The segment that ``place`` opened last, and its descriptor."""

    def read(self, from_lsn: Lsn, upto_lsn: Lsn, bytes_max: int) -> Chunk:
        """Batches of one epoch from ``from_lsn`` up to ``upto_lsn``, which MUST be written, synced or not: at least one
        record, and no more than about ``bytes_max``. ``upto_lsn`` MUST NOT fall from one call to the next.

        Raises:
            WalError: ``from_lsn`` is older than the log.
            WalCorruptError: the log is damaged there.
        """
        previous_lsn = before(from_lsn)
        if self._last is not None and self._last.previous.lsn == previous_lsn:
            return self._last
        previous = Position(epoch_of(self._history, previous_lsn) or NO_EPOCH, previous_lsn)
        if from_lsn > upto_lsn:
            return Chunk(previous, previous.epoch, previous_lsn, b"")
        segment, offset = self._places.get(from_lsn) or self._look_up(from_lsn)
        found = self._batches(segment, offset, from_lsn, upto_lsn, bytes_max)
        if not found:  # the segment is full or removed
            segment, offset = self._look_up(from_lsn)
            found = self._batches(segment, offset, from_lsn, upto_lsn, bytes_max)
        if not found:
            raise WalError(f"LSN {from_lsn} is no longer in {self._folder}, or never was: its segment ends before it")
        self._keep_place(found[-1].record.last_lsn, segment, found[-1].end)
        last_lsn = min(found[-1].record.last_lsn, upto_lsn)
        parts = [cut_batch(batch, self._node_id, from_lsn, upto_lsn) for batch in found]
        self._last = Chunk(previous, segment.epoch, last_lsn, b"".join(parts))
        return self._last

    def read_again(self) -> None:
        """Drop the batches in memory: the next ``read`` reads the files, and checks every CRC."""
        self._last = None

    def place(self, from_lsn: Lsn) -> tuple[int, int] | None:
        """Descriptor and offset of the batch that begins with ``from_lsn``, or will begin with it unless the segment is
        full by then; valid until the next call. None if ``read`` has not come so far."""
        segment, offset = self._places.get(from_lsn, (None, 0))
        if segment is not None and (self._opened is None or self._opened[0] != segment):
            self.close()
            with suppress(FileNotFoundError):
                self._opened = segment, open_regular(segment.path)
        return None if segment is None or self._opened is None else (self._opened[1], offset)

    def passed(self, upto_lsn: Lsn, offset: int) -> None:
        """C has read the segment of ``place`` up to ``upto_lsn``; the next batch is at ``offset``."""
        assert self._opened is not None
        self._keep_place(upto_lsn, self._opened[0], offset)

    def close(self) -> None:
        """Close the file that ``place`` opened."""
        if self._opened is not None:
            os.close(self._opened[1])
            self._opened = None

    def _look_up(self, from_lsn: Lsn) -> tuple[Segment, int]:
        """The segment that holds ``from_lsn``."""
        segments = list_segments(self._folder)
        behind = [segment for segment in segments if segment.base_lsn <= from_lsn]
        if not behind:
            oldest = segments[0].base_lsn if segments else "none"
            raise WalError(f"LSN {from_lsn} is no longer in {self._folder}, which begins with {oldest}")
        return behind[-1], SEGMENT_HEADER_BYTES

    def _batches(self, segment: Segment, offset: int, from_lsn: Lsn, upto_lsn: Lsn, bytes_max: int) -> list[Batch]:
        """The batches from ``offset`` on; none if the segment ends there, or was removed."""
        found: list[Batch] = []
        with suppress(FileNotFoundError):
            for batch in batches(segment, self._node_id, from_lsn, offset):
                if batch.record.first_lsn > upto_lsn:
                    break
                found.append(batch)
                bytes_max -= batch.end - batch.offset
                if bytes_max <= 0 or batch.record.last_lsn >= upto_lsn:
                    break
        return found

    def _keep_place(self, last_lsn: Lsn, segment: Segment, end: int) -> None:
        """Remember that a batch with this last LSN ends at ``end``."""
        self._places[after(last_lsn)] = segment, end
        while len(self._places) > PLACES_KEPT:
            del self._places[next(iter(self._places))]
