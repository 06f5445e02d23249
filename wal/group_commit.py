"""Group commit: one thread owns the log, and whoever appends only queues.

Always true, and asserted where it can break::

    next_lsn > written_lsn >= durable_lsn
    HLCs rise with LSNs
    records queued and not durable <= queue_max_entries, their bytes <= queue_max_bytes

Life of a batch, and what a crash in each phase leaves:

    1. collect   records stand in memory; nothing of them is left
    2. encode    the same: header, CRC and payload of each, joined in one pass
    3. write     one system call: BATCH record and body; a torn tail is left, or all of it
    4. sync      all of it is left, or a torn tail
    5. report    all of it is left

From 2 to 4 is one call of the log: other threads have the interpreter meanwhile.

After the sync, and twice a second when idle, the thread looks whether the files are where they were (wal.guard): what
is written into a file that was removed is not acknowledged.

A batch begins at once when the log is idle. While one is written, the next collects. Behind a batch of
several, their writers are about to come back: the next is held open until about as many records are
queued again, for ``batch_timeout_us`` at the most. Not so where many came while it was written: they go
at once, and the others come back while that is done.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from ledger.errors import (
    InvalidInputError,
    RecordTooLargeError,
    WalError,
    WalFullError,
    WalPoisonedError,
)
from ledger.hlc import Hlc, node_hash
from ledger.machines.events import BATCH_RECORD_TYPE
from ledger.positions import Lsn
from wal.format import (
    BATCH_BODY_BYTES_LIMIT,
    RECORD_BYTES_LIMIT,
    RECORD_HEADER_BYTES,
    QueuedRecord,
)
from wal.guard import CHECK_INTERVAL_S
from wal.log import Log
from wal.replication.proposer import Written

LOCAL_GROUP_SYNC = "LOCAL_GROUP_SYNC"
LOCAL_SYNC = "LOCAL_SYNC"
LOCAL_ASYNC = "LOCAL_ASYNC"

QUEUE_BYTES_MAX = 256 << 20
"""Records queued and not durable never hold more memory than this, however many of them are allowed."""

LINGER_ENTRIES_MIN = 2
"""A batch is held open only behind one of at least so many records: a lone writer never waits."""

LINGER_SHARE = 1 / 3
"""Nor is it where so many, beside those of the batch before, came while that was written: they need not wait for it."""

_RECORD_TYPES = frozenset(range(1, 256)) - {BATCH_RECORD_TYPE}

BatchObserver = Callable[[float, int], None]
"""Told of each batch, on the writer thread: seconds that the sync took, records in it."""


class GroupCommit:
    """The one writer of ``log``, which from now on belongs to its thread.

    ``on_durable(lsn)`` is called on the writer thread, once a batch and only after its sync: every
    record up to ``lsn`` is durable. ``on_failure(error)`` is called at most once: nothing above
    ``durable_lsn`` may be acknowledged any more. Neither may block; both usually hand over to an event loop.

    ``ack_mode`` LOCAL_SYNC makes each record a batch of its own. LOCAL_ASYNC is LOCAL_GROUP_SYNC here: what
    is answered before ``on_durable`` is up to the caller.
    """

    def __init__(
        self,
        log: Log,
        *,
        on_durable: Callable[[Lsn], None],
        on_failure: Callable[[WalPoisonedError], None],
        batch_timeout_us: int = 500,
        batch_max_entries: int = 1000,
        batch_max_bytes: int = 1 << 20,
        record_bytes_max: int = 1 << 20,
        queue_max_entries: int = 100_000,
        queue_max_bytes: int = QUEUE_BYTES_MAX,
        ack_mode: str = LOCAL_GROUP_SYNC,
        observe: BatchObserver | None = None,
        ship: Callable[[Written], None] | None = None,
    ) -> None:
        assert RECORD_HEADER_BYTES < record_bytes_max <= RECORD_BYTES_LIMIT
        assert 0 < batch_max_bytes <= BATCH_BODY_BYTES_LIMIT
        assert batch_max_entries > 0
        assert record_bytes_max <= queue_max_bytes
        assert ack_mode in (LOCAL_GROUP_SYNC, LOCAL_SYNC, LOCAL_ASYNC)
        self._log = log
        self._node_id = log.node_id
        self._node_hash = node_hash(log.node_id)
        self._on_durable = on_durable
        self._on_failure = on_failure
        self._observe = observe
        self._ship = ship
        self._batch_timeout_s = batch_timeout_us / 1e6
        self._batch_max_entries = 1 if ack_mode == LOCAL_SYNC else batch_max_entries
        self._batch_max_bytes = batch_max_bytes
        self._payload_bytes_max = record_bytes_max - RECORD_HEADER_BYTES
        self._queue_max_entries = queue_max_entries
        self._queue_max_bytes = queue_max_bytes

        self._lock = threading.Lock()
        """Guards what follows up to the bell. Held for a moment, never over a system call."""
        self._queue: list[QueuedRecord] = []
        self._queue_bytes = 0
        """Of all that is not durable: what is queued, and the batch that is being written."""
        self._next_lsn = log.next_lsn
        self._durable_lsn = log.durable_lsn
        self._last_hlc = Hlc(-1, -1, log.node_id)
        self._refusal: str | None = None
        self._poisoned = False
        self._closing = False
        self._wanted = 0
        """How many queued records the writer thread sleeps for; 0 when it is awake."""
        self._bell = threading.Lock()
        """Held while nothing is to be told; released to wake the writer thread."""
        self._bell.acquire()

        self._resolved_at = float("-inf")
        self._resolved_entries = 0
        self._is_held_open = False
        """The batch to come waits for the writers of the one before."""
        self._check_at = time.monotonic() + CHECK_INTERVAL_S
        self._thread = threading.Thread(target=self._run, name="wal-writer", daemon=True)
        self._thread.start()

    @property
    def next_lsn(self) -> Lsn:
        """What the next record will have; all below it are queued, written or durable."""
        return self._next_lsn

    @property
    def written_lsn(self) -> Lsn:
        """Given to the operating system up to here. MUST NOT be taken for durable."""
        return self._log.written_lsn

    @property
    def durable_lsn(self) -> Lsn:
        """Everything up to here is synced."""
        return self._durable_lsn

    def append(self, hlc: Hlc, record_type: int, payload: bytes) -> Lsn:
        """``append_all`` of one record: its LSN."""
        payload_bytes = len(payload)
        lock = self._lock
        lock.acquire()  # not by "with", which takes three times as long
        try:
            lsn = self._next_lsn
            queue_bytes = self._queue_bytes + payload_bytes + RECORD_HEADER_BYTES
            if (
                self._refusal is None
                and payload_bytes <= self._payload_bytes_max
                and hlc[2] == self._node_id
                and hlc > self._last_hlc
                and record_type in _RECORD_TYPES
                and lsn - self._durable_lsn <= self._queue_max_entries
                and queue_bytes <= self._queue_max_bytes
            ):
                queue = self._queue
                queue.append((hlc, record_type, payload))
                self._queue_bytes = queue_bytes
                self._next_lsn = lsn + 1  # type: ignore[assignment]  # Lsn() is a call
                self._last_hlc = hlc
                if self._wanted and (len(queue) >= self._wanted or queue_bytes >= self._batch_max_bytes):
                    self._ring()
                return lsn
        finally:
            lock.release()
        return self.append_all(((hlc, record_type, payload),))  # which says what is wrong with it

    def append_all(self, records: Sequence[QueuedRecord]) -> Lsn:
        """Queue records one behind the other, all or none, and return the LSN of the first.

        They are NOT durable when this returns: the caller MUST NOT acknowledge one before ``on_durable`` has named
        its LSN or a higher one. Safe to call from any thread; where several do, the HLCs must be drawn in the same
        critical section, since HLCs must rise with LSNs.

        Raises, and has queued nothing then:
            WalPoisonedError: an earlier write failed, or the writer was closed.
            WalFullError: the queue has no room.
            RecordTooLargeError: one is over ``record_bytes_max``, header included.
            InvalidInputError: an HLC is of another node or does not rise, or a type is not a record's.
        """
        node_id, payload_bytes_max = self._node_id, self._payload_bytes_max
        entries = len(records)
        record_bytes = entries * RECORD_HEADER_BYTES
        with self._lock:
            if self._refusal is not None:
                raise WalPoisonedError(self._refusal)
            last_hlc = self._last_hlc
            for hlc, record_type, payload in records:
                if len(payload) > payload_bytes_max:
                    raise _record_too_large(len(payload), payload_bytes_max)
                if hlc[2] != node_id or hlc <= last_hlc:
                    raise InvalidInputError(f"HLC {hlc} is not of node {node_id}, or not above the one before it")
                if record_type not in _RECORD_TYPES:
                    raise InvalidInputError(f"{record_type} is not the type of a record")
                record_bytes += len(payload)
                last_hlc = hlc
            first_lsn = self._next_lsn
            queue_bytes = self._queue_bytes + record_bytes
            waiting = first_lsn - 1 - self._durable_lsn
            if waiting + entries > self._queue_max_entries:
                raise _full(waiting, entries, self._queue_max_entries, "records")
            if queue_bytes > self._queue_max_bytes:
                raise _full(self._queue_bytes, record_bytes, self._queue_max_bytes, "bytes")
            self._queue += records
            self._queue_bytes = queue_bytes
            self._next_lsn = Lsn(first_lsn + entries)
            self._last_hlc = last_hlc
            if self._wanted and (len(self._queue) >= self._wanted or queue_bytes >= self._batch_max_bytes):
                self._ring()
        return first_lsn

    def retire(self, name: str) -> None:
        """The segment of this name is about to be removed, as nobody needs it any more."""
        self._log.retire(name)

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
                self._ring()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise WalError(f"the WAL was not flushed in {timeout_s:g} s; LSN {self._durable_lsn} is durable")
        if self._poisoned:
            raise WalPoisonedError(self._refusal)

    def _ring(self) -> None:
        """Wake the writer thread, which sleeps. The lock is held."""
        self._wanted = 0
        self._bell.release()

    # Everything below runs on the writer thread.

    def _run(self) -> None:
        try:
            while batch := self._collect():
                self._commit(*batch)
            self._log.close()
        except Exception as error:
            self._poison(error)

    def _collect(self) -> tuple[list[QueuedRecord], int] | None:
        """The next batch and its bytes, once it is time to write it; None when nothing is left and no more comes."""
        while self._is_held_open and (left_s := self._resolved_at + self._batch_timeout_s - time.monotonic()) > 0:
            if self._await_queued(self._resolved_entries, min(left_s, CHECK_INTERVAL_S)):
                break
            self._check_folder()
        while not self._await_queued(1, CHECK_INTERVAL_S):
            self._check_folder()
        with self._lock:
            return self._take() if self._queue else None

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

    def _take(self) -> tuple[list[QueuedRecord], int]:
        queue, queue_bytes = self._queue, self._queue_bytes
        if len(queue) <= self._batch_max_entries and queue_bytes <= self._batch_max_bytes:
            self._queue = []
            return queue, queue_bytes
        entries = 1
        total = RECORD_HEADER_BYTES + len(queue[0][2])
        for _, _, payload in queue[1 : self._batch_max_entries]:
            record_bytes = RECORD_HEADER_BYTES + len(payload)
            if total + record_bytes > self._batch_max_bytes:
                break
            total += record_bytes
            entries += 1
        self._queue = queue[entries:]
        return queue[:entries], total

    def _commit(self, records: list[QueuedRecord], body_bytes: int) -> None:
        """Encode, write and sync one batch, then tell."""
        log, entries = self._log, len(records)
        sync_s = log.commit(self._node_hash, records, body_bytes, self._ship)
        with self._lock:
            self._durable_lsn = log.durable_lsn
            self._queue_bytes -= body_bytes
            came = len(self._queue)
        self._is_held_open = entries >= LINGER_ENTRIES_MIN and came < entries * LINGER_SHARE
        self._resolved_entries = entries
        self._resolved_at = time.monotonic()
        self._on_durable(self._durable_lsn)
        if self._observe is not None:
            self._observe(sync_s, entries)
        self._check_folder()

    def _check_folder(self) -> None:
        """Every ``CHECK_INTERVAL_S``, see that no file of the log was taken away."""
        if time.monotonic() >= self._check_at:
            self._log.check()
            self._check_at = time.monotonic() + CHECK_INTERVAL_S

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
        self._log.abandon()
        self._on_failure(poison)


def _record_too_large(payload_bytes: int, payload_bytes_max: int) -> RecordTooLargeError:
    length, most = payload_bytes + RECORD_HEADER_BYTES, payload_bytes_max + RECORD_HEADER_BYTES
    return RecordTooLargeError(f"a record of {length} bytes is over wal.record_bytes_max = {most}")


def _full(waiting: int, more: int, most: int, what: str) -> WalFullError:
    return WalFullError(
        f"{waiting} {what} wait to become durable, no room for {more} more within {most}; try again later"
    )
