"""The local log as it was when quorums got their floor (``LOCAL_GROUP_SYNC``, November 2026): group commit in Python,
with a spare file of zeros written ahead.

What a writer pays here is what it paid then: a record framed and queued under a lock, one write and one ``fdatasync`` a
batch, a look whether the file still has its name, and one call of the event loop a batch, which wakes each writer. Left
out is what costs nothing in a run: refusals, bounds of the queue, the look at other files twice a second.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from zlib import crc32

SEGMENT_BYTES = 64 << 20
SEGMENT_HEADER_BYTES = 128
BATCH_ENTRIES_MAX = 1000
BATCH_BYTES_MAX = 1 << 20
BATCH_TIMEOUT_S = 500e-6
LINGER_ENTRIES_MIN = 2
SPARE_AFTER_BYTES = 1 << 20
NEXT_SPARE_AFTER_SHARE = 0.5
ZEROS = bytes(1 << 20)
BATCH_RECORD_TYPE = 16
PENDING = 1

_pack_crc = struct.Struct(">I").pack
_pack_tail = struct.Struct(">IQQI4sBB").pack
_pack_batch = struct.Struct(">QQII").pack
_HEADER_BYTES = struct.Struct(">IIQQI4sBB").size


class Watermark:
    """Where the log is durable, and who waits for that. Belongs to one event loop."""

    def __init__(self) -> None:
        self.lsn = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    def reached(self, lsn: int) -> asyncio.Future[None]:
        """Resolves once the watermark is at ``lsn``."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if self.lsn >= lsn:
            future.set_result(None)
            return future
        at = len(self._waiting)
        while at and self._waiting[at - 1][0] > lsn:
            at -= 1
        self._waiting.insert(at, (lsn, future))
        return future

    def advance(self, lsn: int) -> None:
        """Raise the watermark, and resolve whoever waited for it."""
        if lsn <= self.lsn:
            return
        self.lsn = lsn
        waiting = self._waiting
        while waiting and waiting[0][0] <= lsn:
            future = waiting.popleft()[1]
            if not future.done():
                future.set_result(None)


class Spare:
    """The segment to come, as a file of zeros that is synced before it is needed."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "spare"
        self._thread: threading.Thread | None = None
        self._stopped = threading.Event()
        self.ready = False

    def prepare(self) -> None:
        """Begin to make it, if that was not begun since the last was taken."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._fill, daemon=True)
            self._thread.start()

    def take(self, path: Path) -> bool:
        """Whether the spare is there, and is the file at ``path`` now."""
        if not self.ready:
            return False
        os.rename(self._path, path)
        self._thread, self.ready = None, False
        return True

    def discard(self) -> None:
        """Make it no more."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join()
        with contextlib.suppress(FileNotFoundError):
            self._path.unlink()

    def _fill(self) -> None:
        descriptor = os.open(self._path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
        try:
            for offset in range(0, SEGMENT_BYTES, len(ZEROS)):
                if self._stopped.is_set():
                    return
                os.pwrite(descriptor, ZEROS, offset)
                os.fdatasync(descriptor)
            os.fsync(descriptor)
            self.ready = True
        finally:
            os.close(descriptor)


class LocalLog:
    """The writer of a log in ``folder``. ``on_durable(lsn)`` is called on its thread, once a batch."""

    def __init__(self, folder: Path, node_id: str, on_durable: Callable[[int], object]) -> None:
        self._folder = folder
        self._node_hash = hashlib.sha256(node_id.encode()).digest()[:4]
        self._on_durable = on_durable
        self._lock = threading.Lock()
        self._queue: list[bytes] = []
        self._queue_bytes = 0
        self._next_lsn = 1
        self._durable_lsn = 0
        self._last_hlc = (-1, -1)
        self._closing = False
        self._wanted = 0
        self._bell = threading.Lock()
        self._bell.acquire()
        self._resolved_at = float("-inf")
        self._resolved_entries = 0
        self._ahead = False
        self._spare = Spare(folder)
        self.failure: Exception | None = None
        self._open_segment(1)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def append(self, physical_ms: int, logical: int, record_type: int, payload: bytes) -> int:
        """Queue one record; its LSN."""
        with self._lock:
            lsn = self._next_lsn
            hlc = (physical_ms, logical)
            assert hlc > self._last_hlc
            length = _HEADER_BYTES + len(payload)
            tail = _pack_tail(length, lsn, physical_ms, logical, self._node_hash, PENDING, record_type)
            summed = tail + payload
            made = [_pack_crc(crc32(summed)) + summed]
            self._queue += made
            self._queue_bytes += length
            self._next_lsn = lsn + 1
            self._last_hlc = hlc
            if self._wanted and (len(self._queue) >= self._wanted or self._queue_bytes >= BATCH_BYTES_MAX):
                self._wanted = 0
                self._bell.release()
        return lsn

    def close(self) -> None:
        """Make all durable that is queued."""
        with self._lock:
            self._closing = True
            if self._wanted:
                self._wanted = 0
                self._bell.release()
        self._thread.join()
        if self.failure is not None:
            raise self.failure

    def _run(self) -> None:
        try:
            while batch := self._collect():
                self._write(batch)
            os.close(self._descriptor)
            self._spare.discard()
        except Exception as error:
            self.failure = error

    def _collect(self) -> list[bytes]:
        while not self._await_queued(1, 0.5):
            pass
        expected = min(self._resolved_entries, BATCH_ENTRIES_MAX)
        if expected >= LINGER_ENTRIES_MIN:
            left_s = self._resolved_at + BATCH_TIMEOUT_S - time.monotonic()
            if left_s > 0:
                self._await_queued(expected, left_s)
        with self._lock:
            return self._take()

    def _await_queued(self, records: int, timeout_s: float) -> bool:
        with self._lock:
            if self._closing or len(self._queue) >= records or self._queue_bytes >= BATCH_BYTES_MAX:
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

    def _take(self) -> list[bytes]:
        queue = self._queue
        if len(queue) <= BATCH_ENTRIES_MAX and self._queue_bytes <= BATCH_BYTES_MAX:
            self._queue = []
            return queue
        entries, total = 1, len(queue[0])
        for record in queue[1:BATCH_ENTRIES_MAX]:
            total += len(record)
            if total > BATCH_BYTES_MAX:
                break
            entries += 1
        self._queue = queue[entries:]
        return queue[:entries]

    def _write(self, batch: list[bytes]) -> None:
        first_lsn, last_lsn = self._durable_lsn + 1, self._durable_lsn + len(batch)
        body = b"".join(batch)
        announced = _pack_batch(first_lsn, last_lsn, len(body), crc32(body))
        length = _HEADER_BYTES + len(announced)
        tail = _pack_tail(length, first_lsn, *self._last_hlc, self._node_hash, PENDING, BATCH_RECORD_TYPE) + announced
        opening = _pack_crc(crc32(tail)) + tail
        size = len(opening) + len(body)
        full = self._offset + size > SEGMENT_BYTES and self._offset > SEGMENT_HEADER_BYTES
        if full or (self._spare.ready and not self._ahead):
            if self._ahead:
                os.ftruncate(self._descriptor, self._offset)
                os.fsync(self._descriptor)
            os.close(self._descriptor)
            self._open_segment(first_lsn)
        written = os.pwritev(self._descriptor, (opening, body), self._offset)
        assert written == size
        self._offset += size
        after = int(SEGMENT_BYTES * NEXT_SPARE_AFTER_SHARE) if self._ahead else SPARE_AFTER_BYTES
        if self._offset >= after:
            self._spare.prepare()
        os.fdatasync(self._descriptor)
        assert os.stat(self._path).st_ino == self._inode
        with self._lock:
            self._durable_lsn = last_lsn
            self._queue_bytes -= len(body)
        self._resolved_entries = len(batch)
        self._resolved_at = time.monotonic()
        self._on_durable(last_lsn)

    def _open_segment(self, base_lsn: int) -> None:
        self._path = self._folder / f"{base_lsn:020d}.wal"
        self._ahead = self._spare.take(self._path)
        self._descriptor = os.open(self._path, os.O_CREAT | os.O_RDWR, 0o600)
        os.pwrite(self._descriptor, bytes(SEGMENT_HEADER_BYTES), 0)
        os.fsync(self._descriptor)
        self._inode = os.fstat(self._descriptor).st_ino
        self._offset = SEGMENT_HEADER_BYTES
