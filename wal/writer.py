"""Group commit: one thread owns the file, and whoever appends only queues.

Always true, and asserted where it can break::

    next_lsn > written_lsn >= durable_lsn
    HLCs rise with LSNs
    batches written and not synced <= 1
    records queued and not durable <= queue_max_entries, their bytes <= queue_max_bytes

Life of a batch, and what a crash in each phase leaves:

    1. collect   records stand in memory; nothing of them is left
    2. write     one system call: BATCH record and body; a torn tail is left, or all of it
    3. fdatasync all of it is left, or a torn tail
    4. report    all of it is left

After the fsync, and twice a second when idle, the writer looks whether the segment still has its name, and whether
the folder has all that it had (wal.guard): what is written into a file that was removed is not acknowledged.

A batch begins at once when the log is idle. While one is written, the next collects. Behind a batch of
several, their writers are about to come back: the next is held open until about as many records are
queued again, for ``batch_timeout_us`` at the most.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from zlib import crc32

from ledger.errors import (
    InvalidInputError,
    RecordTooLargeError,
    RequestTooLargeError,
    WalError,
    WalFullError,
    WalPoisonedError,
)
from ledger.hlc import Hlc, node_hash
from ledger.machines.events import BATCH_RECORD_TYPE
from wal.format import (
    BATCH_BODY_BYTES_LIMIT,
    CRC,
    HLC_AT,
    PENDING,
    RECORD_BYTES_LIMIT,
    RECORD_HEADER_BYTES,
    RECORD_TAIL,
    SEGMENT_HEADER_BYTES,
    BatchRecord,
    SegmentHeader,
    encode_batch,
)
from wal.guard import CHECK_INTERVAL_S, FolderGuard, gone
from wal.segment import create_segment, segment_name, write_fully
from wal.spare import Spare

LOCAL_GROUP_SYNC = "LOCAL_GROUP_SYNC"
LOCAL_SYNC = "LOCAL_SYNC"
LOCAL_ASYNC = "LOCAL_ASYNC"

QUEUE_BYTES_MAX = 256 << 20
"""Records queued and not durable never hold more memory than this, however many of them are allowed."""

LINGER_ENTRIES_MIN = 2
"""A batch is held open only behind one of at least so many records: a lone writer never waits."""

SPARE_AFTER_BYTES = 1 << 20
"""A segment is written ahead once this much stands in one that was not: an idle node needs none."""
NEXT_SPARE_AFTER_SHARE = 0.5
"""Behind a segment that was written ahead, the next is once this part of it is used: early enough to be ready in time,
and a node that stops writing has not written zeros for nothing."""

WalObserver = Callable[[float, int], None]
"""Told of each batch, on the writer thread: seconds that the fsync took, records in it."""

_pack_tail = RECORD_TAIL.pack
_pack_crc = CRC.pack


class WalWriter:
    """The one writer of a WAL folder, in a segment of its own epoch. The caller MUST hold the folder's lock
    and MUST have recovered the log before.

    ``on_durable(lsn)`` is called on the writer thread, once a batch and only after its fsync: every
    record up to ``lsn`` is durable. ``on_failure(error)`` is called at most once: nothing above
    ``durable_lsn`` may be acknowledged any more. Neither may block; both usually hand over to an event loop.

    ``ack_mode`` LOCAL_SYNC makes each record a batch of its own. LOCAL_ASYNC is LOCAL_GROUP_SYNC here: what
    is answered before ``on_durable`` is up to the caller.

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
        epoch: int,
        next_lsn: int,
        on_durable: Callable[[int], None],
        on_failure: Callable[[WalPoisonedError], None],
        previous_lsn: int | None = None,
        batch_timeout_us: int = 500,
        batch_max_entries: int = 1000,
        batch_max_bytes: int = 1 << 20,
        segment_bytes: int = 64 << 20,
        record_bytes_max: int = 1 << 20,
        queue_max_entries: int = 100_000,
        queue_max_bytes: int = QUEUE_BYTES_MAX,
        ack_mode: str = LOCAL_GROUP_SYNC,
        observe: WalObserver | None = None,
    ) -> None:
        assert RECORD_HEADER_BYTES < record_bytes_max <= RECORD_BYTES_LIMIT
        assert 0 < batch_max_bytes <= BATCH_BODY_BYTES_LIMIT
        assert batch_max_entries > 0
        assert record_bytes_max <= queue_max_bytes
        assert ack_mode in (LOCAL_GROUP_SYNC, LOCAL_SYNC, LOCAL_ASYNC)
        self._folder = folder
        self._node_id = node_id
        self._node_hash = node_hash(node_id)
        self._wal_id = wal_id
        self._epoch = epoch
        self._on_durable = on_durable
        self._on_failure = on_failure
        self._observe = observe
        self._batch_timeout_s = batch_timeout_us / 1e6
        self._batch_max_entries = 1 if ack_mode == LOCAL_SYNC else batch_max_entries
        self._batch_max_bytes = batch_max_bytes
        self._segment_bytes = segment_bytes
        self._record_bytes_max = record_bytes_max
        self._queue_max_entries = queue_max_entries
        self._queue_max_bytes = queue_max_bytes

        self._lock = threading.Lock()
        """Guards what follows up to the bell. Held for a moment, never over a system call."""
        self._queue: list[bytes] = []
        self._queue_bytes = 0
        self._next_lsn = next_lsn
        self._durable_lsn = next_lsn - 1
        self._last_hlc = Hlc(-1, -1, node_id)
        self._refusal: str | None = None
        self._poisoned = False
        self._closing = False
        self._wanted = 0
        """How many queued records the writer thread sleeps for; 0 when it is awake."""
        self._bell = threading.Lock()
        """Held while nothing is to be told; released to wake the writer thread."""
        self._bell.acquire()

        self._written_lsn = next_lsn - 1
        self._resolved_at = float("-inf")
        self._resolved_entries = 0
        self._descriptor = -1
        self._path = folder
        self._inode = 0
        self._guard = FolderGuard(folder)
        self._check_at = time.monotonic() + CHECK_INTERVAL_S
        self._offset = 0
        self._ahead = False
        """Zeros were written ahead in this segment; behind the last batch they go when it is finished."""
        self._spare = Spare(folder, segment_bytes)
        self._spare_after_bytes = min(SPARE_AFTER_BYTES, segment_bytes // 4)
        self._next_spare_after_bytes = int(segment_bytes * NEXT_SPARE_AFTER_SHARE)
        self._open_segment(next_lsn, next_lsn - 1 if previous_lsn is None else previous_lsn)
        self._thread = threading.Thread(target=self._run, name="wal-writer", daemon=True)
        self._thread.start()

    @property
    def next_lsn(self) -> int:
        """What the next record will have; all below it are queued, written or durable."""
        return self._next_lsn

    @property
    def written_lsn(self) -> int:
        """Given to the operating system up to here. MUST NOT be taken for durable."""
        return self._written_lsn

    @property
    def durable_lsn(self) -> int:
        """Everything up to here is synced."""
        return self._durable_lsn

    def check_room(self, records: int, record_bytes: int = 0, reserved_bytes: int = 0) -> None:
        """Return when ``records`` more, of ``record_bytes`` together, fit into the queue now, beside ``reserved_bytes``
        that are kept for others.

        Only the thread that appends may rely on it, and only until it appends.

        Raises:
            RequestTooLargeError: they never fit, however empty the queue is.
            WalPoisonedError: nothing is taken any more.
            WalFullError: they do not fit.
        """
        if records > self._queue_max_entries or record_bytes > self._queue_max_bytes:
            raise RequestTooLargeError(
                f"{records} records of {record_bytes} bytes do not go into the queue of the WAL, which takes "
                f"{self._queue_max_entries} records and {self._queue_max_bytes} bytes: send fewer at once"
            )
        with self._lock:
            self._refuse_if_stopped()
            self._refuse_if_full(records, record_bytes + reserved_bytes)

    def append(self, hlc: Hlc, record_type: int, payload: bytes) -> int:
        """Queue one record and return its LSN.

        The record is NOT durable when this returns: the caller MUST NOT acknowledge it before
        ``on_durable`` has named its LSN or a higher one. Safe to call from any thread; where several do,
        the HLC must be drawn in the same critical section, since HLCs must rise with LSNs.

        Raises, and has queued nothing then:
            WalPoisonedError: an earlier write failed, or the writer was closed.
            WalFullError: the queue has no room.
            RecordTooLargeError: over ``record_bytes_max``, header included.
            InvalidInputError: the HLC is of another node or does not rise, or the type is not a record's.
        """
        return self.append_all(((hlc, record_type, payload),))

    def append_all(self, records: Sequence[tuple[Hlc, int, bytes]]) -> int:
        """Queue records (HLC, type, payload) one behind the other, all or none, and return the LSN of the first.

        As ``append`` for each, under one lock: same promise, same errors.
        """
        node_id, node_hash, record_bytes_max = self._node_id, self._node_hash, self._record_bytes_max
        made: list[bytes] = []
        made_bytes = 0
        with self._lock:
            self._refuse_if_stopped()
            first_lsn = lsn = self._next_lsn
            last_hlc = self._last_hlc
            for hlc, record_type, payload in records:
                length = RECORD_HEADER_BYTES + len(payload)
                if length > record_bytes_max:
                    raise _record_too_large(length, record_bytes_max)
                if hlc[2] != node_id or hlc <= last_hlc:
                    raise InvalidInputError(f"HLC {hlc} is not of node {node_id}, or not above the one before it")
                if not 0 < record_type < 256 or record_type == BATCH_RECORD_TYPE:
                    raise InvalidInputError(f"{record_type} is not the type of a record")
                summed = _pack_tail(length, lsn, hlc[0], hlc[1], node_hash, PENDING, record_type) + payload
                made.append(_pack_crc(crc32(summed)) + summed)
                made_bytes += length
                lsn += 1
                last_hlc = hlc
            self._refuse_if_full(len(made), made_bytes)
            self._queue += made
            self._queue_bytes += made_bytes
            self._next_lsn = lsn
            self._last_hlc = last_hlc
            self._ring()
        return first_lsn

    def retire(self, name: str) -> None:
        """The segment of this name is about to be removed, as nobody needs it any more."""
        self._guard.retire(name)

    def close(self, timeout_s: float) -> None:
        """Take nothing more, make everything queued durable, and let the file go. A second call does nothing.

        Raises:
            WalPoisonedError: an earlier write failed; what was queued is lost, and was never acknowledged.
            WalError: it took longer than ``timeout_s`` seconds; the thread goes on.
        """
        with self._lock:
            self._closing = True
            self._refusal = self._refusal or "the WAL writer is closed"
            if self._wanted:
                self._wanted = 0
                self._bell.release()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise WalError(f"the WAL was not flushed in {timeout_s:g} s; LSN {self._durable_lsn} is durable")
        if self._poisoned:
            raise WalPoisonedError(self._refusal)

    def _ring(self) -> None:
        """Wake the writer thread if it sleeps for no more than what is queued. The lock is held."""
        if self._wanted and (len(self._queue) >= self._wanted or self._queue_bytes >= self._batch_max_bytes):
            self._wanted = 0
            self._bell.release()

    def _refuse_if_stopped(self) -> None:
        if self._refusal is not None:
            raise WalPoisonedError(self._refusal)

    def _refuse_if_full(self, records: int, record_bytes: int) -> None:
        waiting = self._next_lsn - 1 - self._durable_lsn
        if waiting + records > self._queue_max_entries:
            raise WalFullError(
                f"{waiting} records wait to become durable, no room for {records} more "
                f"within {self._queue_max_entries}; try again later"
            )
        if self._queue_bytes + record_bytes > self._queue_max_bytes:
            raise WalFullError(
                f"{self._queue_bytes} bytes wait to become durable, no room for {record_bytes} more "
                f"within {self._queue_max_bytes}; try again later"
            )

    # Everything below runs on the writer thread.

    def _run(self) -> None:
        try:
            while batch := self._collect():
                self._write(batch)
            self._finish_segment()
            self._spare.discard()
        except Exception as error:
            self._poison(error)

    def _collect(self) -> list[bytes]:
        """The next batch, once it is time to write it; empty when there is nothing left and no more comes."""
        while not self._await_queued(1, CHECK_INTERVAL_S):
            self._check_folder()
        expected = min(self._resolved_entries, self._batch_max_entries)
        if expected >= LINGER_ENTRIES_MIN:
            left_s = self._resolved_at + self._batch_timeout_s - time.monotonic()
            if left_s > 0:
                self._await_queued(expected, left_s)
        with self._lock:
            return self._take()

    def _await_queued(self, records: int, timeout_s: float) -> bool:
        """Sleep until so many are queued or a full batch is, or the writer closes; False when time was up before."""
        with self._lock:
            if self._closing or len(self._queue) >= records or self._queue_bytes >= self._batch_max_bytes:
                return True
            self._wanted = records
        if self._bell.acquire(timeout=timeout_s):
            return True
        with self._lock:
            rung = self._wanted == 0
            self._wanted = 0
        if rung:
            self._bell.acquire()
        return rung

    def _check_folder(self) -> None:
        """Every ``CHECK_INTERVAL_S``, see that no file of the log was taken away."""
        if time.monotonic() >= self._check_at:
            self._spare.check()
            self._guard.check()
            self._check_at = time.monotonic() + CHECK_INTERVAL_S

    def _check_named(self) -> None:
        """The segment still has its name: what was synced into it will be found."""
        try:
            is_named = os.stat(self._path).st_ino == self._inode
        except OSError:
            is_named = False
        if not is_named:
            raise gone(self._path)

    def _take(self) -> list[bytes]:
        queue = self._queue
        if len(queue) <= self._batch_max_entries and self._queue_bytes <= self._batch_max_bytes:
            self._queue = []
            return queue
        entries = 1
        total = len(queue[0])
        for record in queue[1 : self._batch_max_entries]:
            total += len(record)
            if total > self._batch_max_bytes:
                break
            entries += 1
        self._queue = queue[entries:]
        return queue[:entries]

    def _write(self, batch: list[bytes]) -> None:
        """Write and sync one batch, then tell. The one place where ``durable_lsn`` rises."""
        assert self._written_lsn == self._durable_lsn
        first_lsn = self._durable_lsn + 1
        last_lsn = self._durable_lsn + len(batch)
        body = b"".join(batch)
        opening = encode_batch(BatchRecord(first_lsn, last_lsn, batch[-1][HLC_AT], len(body), crc32(body)))
        size = len(opening) + len(body)
        full = self._offset + size > self._segment_bytes and self._offset > SEGMENT_HEADER_BYTES
        if full or (self._spare.ready and not self._ahead):
            self._finish_segment()
            self._open_segment(first_lsn, first_lsn - 1)
        write_fully(self._descriptor, (opening, body), self._offset)
        self._offset += size
        self._written_lsn = last_lsn
        if self._offset >= (self._next_spare_after_bytes if self._ahead else self._spare_after_bytes):
            self._spare.prepare()
        started = time.perf_counter()
        os.fdatasync(self._descriptor)
        sync_s = time.perf_counter() - started
        self._check_named()
        with self._lock:
            self._durable_lsn = last_lsn
            self._queue_bytes -= len(body)
        self._resolved_entries = len(batch)
        self._resolved_at = time.monotonic()
        self._on_durable(last_lsn)
        if self._observe is not None:
            self._observe(sync_s, len(batch))
        self._check_folder()

    def _open_segment(self, base_lsn: int, previous_lsn: int) -> None:
        header = SegmentHeader(self._node_id, self._wal_id, self._epoch, base_lsn, previous_lsn)
        self._spare.check()
        self._ahead = self._spare.take()
        self._descriptor = create_segment(self._folder, header, prepared=self._ahead)
        self._path = self._folder / segment_name(base_lsn, self._epoch)
        self._inode = os.fstat(self._descriptor).st_ino
        self._guard.made(self._path.name, self._inode)
        self._offset = SEGMENT_HEADER_BYTES

    def _finish_segment(self) -> None:
        """All batches in it are synced; leave it as long as what it holds."""
        if self._ahead:
            os.ftruncate(self._descriptor, self._offset)
            os.fsync(self._descriptor)
        os.close(self._descriptor)
        self._descriptor = -1

    def _poison(self, error: Exception) -> None:
        """Refuse everything from now on. The file stays as it is: recovery decides what of it counts."""
        poison = WalPoisonedError(
            f"the WAL failed above LSN {self._durable_lsn}: {error}. "
            "Nothing above it was acknowledged; the process must restart to recover"
        )
        poison.__cause__ = error
        with self._lock:
            self._poisoned = True
            self._refusal = str(poison)
            self._queue = []
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
        self._spare.discard()
        self._on_failure(poison)


def _record_too_large(length: int, record_bytes_max: int) -> RecordTooLargeError:
    return RecordTooLargeError(f"a record of {length} bytes is over wal.record_bytes_max = {record_bytes_max}")
