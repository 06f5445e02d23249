"""The queue of a WAL, and the writer's loop over it, which writes records to the disk as batches.

Always true, and asserted where it can break::

    next_lsn > written_lsn >= durable_lsn
    HLCs rise with LSNs
    records queued and not durable <= entries_max of the bounds, their bytes <= bytes_max

There are two implementations: ``Queue`` here is the specification; ``wal._native.Queue`` does the same in C. It frames
records when they are appended, and writes batch after batch without the interpreter's lock (``wal.native``). Both
queues refuse a faulty record without a reason; only ``fault_of`` finds the reason.

When the next batch is written:

    the log is idle                     at once
    a batch is being written            when that is done; until then the next collects
    a batch of several was written      its writers are about to append again, so the next is held open until about as
                                        many records are queued, for ``batch_timeout_us`` at most
    ... and many arrived meanwhile      at once; the others arrive while that batch is written
    ... and they take longer than the   when half of them arrived: the log syncs one half while the other half arrives
    sync took
    ``expect`` was called               as after a batch of that many: writers that waited for more than their records'
                                        durability, such as for a quorum, are about to append again

``durable_fd`` is a descriptor, usually an eventfd, to which the queue writes 8 bytes after the sync of each batch. It
writes to ``shipper_fd`` before the sync, too, once ``written_lsn`` has risen, so that the shipper sends a batch to
other machines while this node syncs it.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from ledger.errors import InvalidInputError, LedgerError, RecordTooLargeError, WalFullError
from ledger.facts.events import BATCH_RECORD_TYPE
from ledger.hlc import Hlc
from ledger.positions import Lsn
from wal.format import BATCH_RECORD_BYTES, RECORD_HEADER_BYTES, QueuedRecord, batch_of, encode_record
from wal.log import Log

LINGER_ENTRIES_MIN = 2
"""A batch is held open only after one of at least so many records: a lone writer never waits."""

LINGER_PART = 3
"""A batch is not held open if at least this part (1/3) of the previous batch's count arrived during its write."""

HALF_MIN = 16
"""Half of the writers suffice only if half is at least so many: each sync costs processor time, too."""

HALF_AFTER = 3
"""Half of them suffice only if they took at least this part (1/3) of the last sync to arrive: then two syncs of half a
batch each are faster than one sync and the wait for all, during which the disk is idle."""

DURABLE_BATCHES_MAX = 4096
"""The queue keeps at most so many durable batches that were not taken, and drops the oldest; ``durable_lsn`` covers
all of them."""

NO_FD = -1
"""No descriptor: the queue wakes no thread."""

_WAKE_UP = (1).to_bytes(8, "little")
_RECORD_TYPES = frozenset(range(1, 256)) - {BATCH_RECORD_TYPE}


class Bounds(NamedTuple):
    """Limits of a queue and of its batches."""

    node_id: str
    payload_bytes_max: int
    entries_max: int
    bytes_max: int
    batch_entries_max: int
    batch_bytes_max: int
    batch_timeout_s: float


QueueState = tuple[int, int, int, int, int]
"""The next record is checked against these: its LSN, the last durable LSN, the bytes of all records not durable, and
the physical and logical part of the last HLC."""


class DurableBatch(NamedTuple):
    """A batch that became durable. ``lsn`` is that of its last record."""

    lsn: int
    sync_s: float
    entries: int


def fault_of(records: Sequence[QueuedRecord], bounds: Bounds, state: QueueState) -> LedgerError | None:
    """Why a queue in this state refuses these records; None if it accepts them."""
    next_lsn, durable_lsn, waiting_bytes, *last_hlc = state
    last, waiting, more_bytes = tuple(last_hlc), next_lsn - 1 - durable_lsn, 0
    for hlc, record_type, payload in records:
        length = RECORD_HEADER_BYTES + len(payload)
        if len(payload) > bounds.payload_bytes_max:
            return RecordTooLargeError(
                f"a record of {length} bytes is over wal.record_bytes_max = "
                f"{bounds.payload_bytes_max + RECORD_HEADER_BYTES}"
            )
        if hlc[2] != bounds.node_id or hlc[:2] <= last:
            return InvalidInputError(f"HLC {hlc} is not of node {bounds.node_id}, or not above the one before it")
        if not (0 <= hlc[0] < 2**63 and 0 <= hlc[1] < 2**32):
            return InvalidInputError(f"HLC {hlc} does not fit a record")
        if record_type not in _RECORD_TYPES:
            return InvalidInputError(f"{record_type} is not the type of a record")
        last = hlc[:2]
        more_bytes += length
    if waiting + len(records) > bounds.entries_max:
        return _full(waiting, len(records), bounds.entries_max, "records")
    if waiting_bytes + more_bytes > bounds.bytes_max:
        return _full(waiting_bytes, more_bytes, bounds.bytes_max, "bytes")
    return None


def _full(waiting: int, more: int, most: int, what: str) -> WalFullError:
    return WalFullError(
        f"{waiting} {what} wait to become durable, no room for {more} more within {most}; try again later"
    )


class Queue:
    """The queue in Python: the specification of the queue in C, and its replacement if C is not built.

    Only the writer's thread calls ``write``; any thread may call the other methods.
    """

    def __init__(self, bounds: Bounds, log: Log, durable_fd: int, shipper_fd: int = NO_FD) -> None:
        self._bounds = bounds
        self._log = log
        self._durable_fd = durable_fd
        self._shipper_fd = shipper_fd
        self._changed = threading.Condition(threading.Lock())
        """Guards all attributes below. Held for a moment, never during a system call."""
        self._records: list[QueuedRecord] = []
        self._bytes = 0
        """Bytes of all records not durable: those queued, and those of the batch being written."""
        self.next_lsn = log.next_lsn
        """LSN of the next record; all below it are queued, written or durable."""
        self.durable_lsn = log.durable_lsn
        """Everything up to here is synced."""
        self._last: tuple[int, int] = (-1, -1)
        self._is_closed = False
        self._wanted = 0
        """How many queued records the writer thread sleeps for; 0 when it is awake."""
        self._durable: deque[DurableBatch] = deque(maxlen=DURABLE_BATCHES_MAX)
        self._held_entries = 1
        """How many records the next batch waits for, since ``_held_at_s`` of the monotonic clock; half of them suffice
        from ``_half_at_s`` on."""
        self._held_at_s = float("-inf")
        self._half_at_s = float("inf")

    @property
    def written_lsn(self) -> Lsn:
        """The last LSN given to the operating system. MUST NOT be taken for durable."""
        return self._log.written_lsn

    def append(self, hlc: Hlc, record_type: int, payload: bytes) -> Lsn | None:
        """Queue one record and return its LSN; None if it is refused, for a reason that ``fault_of`` finds."""
        return self.append_all(((hlc, record_type, payload),))

    def append_all(self, records: Sequence[QueuedRecord]) -> Lsn | None:
        """Queue records one after the other, all or none, and return the LSN of the first; None as ``append``."""
        with self._changed:
            if self._is_closed or fault_of(records, self._bounds, self._state()) is not None:
                return None
            first_lsn = self.next_lsn
            for hlc, _, payload in records:
                self._bytes += RECORD_HEADER_BYTES + len(payload)
                self._last = hlc[:2]
            self._records += records
            self.next_lsn = Lsn(first_lsn + len(records))
            if self._wanted and (len(self._records) >= self._wanted or self._bytes >= self._bounds.batch_bytes_max):
                self._changed.notify()
        return first_lsn

    def state(self) -> QueueState:
        with self._changed:
            return self._state()

    def take_durable(self) -> list[tuple[int, float, int]]:
        """A ``DurableBatch`` for each that became durable since the last call."""
        with self._changed:
            taken: list[tuple[int, float, int]] = list(self._durable)
            self._durable.clear()
        return taken

    def expect(self, entries: int) -> None:
        """Hold the next batch open for so many writers, if they are several. They waited for more than their records'
        durability, and are about to append again."""
        if entries >= LINGER_ENTRIES_MIN:
            with self._changed:
                self._hold_open(entries, float("inf"))

    def close(self) -> None:
        """Accept no more records; the queued ones are written without waiting for others."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()

    def write(self, log: Log, until_s: float) -> bool:
        """Write and sync one or several batches, and wake the waiting threads. Returns at ``until_s`` of the monotonic
        clock, or after the batch that is then being written; False if the queue is closed and empty.

        Raises:
            WalError, OSError: nothing above ``durable_lsn`` may be acknowledged any more.
        """
        with self._changed:
            while len(self._records) < (awaited := self._awaited())[0]:
                entries, wake_at_s = awaited
                left_s = until_s - time.monotonic()
                if left_s <= 0:
                    return True
                self._wanted = entries
                self._changed.wait(min(left_s, max(0.0, wake_at_s - time.monotonic())))
                self._wanted = 0
            records, body_bytes = self._take()
        if records:
            self._commit(log, records, body_bytes)
        return bool(records)

    # Called with the lock held, except the last.

    def _state(self) -> QueueState:
        return self.next_lsn, self.durable_lsn, self._bytes, *self._last

    def _hold_open(self, entries: int, half_after_s: float) -> None:
        """Hold the next batch open for so many records, unless many have arrived; half suffice after that time."""
        entries = min(entries, self._bounds.batch_entries_max)
        is_held_open = entries >= LINGER_ENTRIES_MIN and len(self._records) * LINGER_PART < entries
        self._held_entries = entries if is_held_open else 1
        self._held_at_s = time.monotonic()
        self._half_at_s = self._held_at_s + half_after_s if (entries + 1) // 2 >= HALF_MIN else float("inf")

    def _awaited(self) -> tuple[int, float]:
        """How many records the next batch waits for, 0 once the queue is closed; and until which time of the monotonic
        clock this answer holds."""
        entries, until_s = self._held_entries, self._held_at_s + self._bounds.batch_timeout_s
        if self._half_at_s < until_s:
            half = (entries + 1) // 2
            entries, until_s = (half, until_s) if len(self._records) < half else (entries, self._half_at_s)
        if self._is_closed:
            return 0, until_s
        is_over = time.monotonic() >= until_s or self._bytes >= self._bounds.batch_bytes_max
        return (1, float("inf")) if is_over else (entries, until_s)

    def _take(self) -> tuple[list[QueuedRecord], int]:
        """The next batch and its bytes."""
        queue, bounds = self._records, self._bounds
        if len(queue) <= bounds.batch_entries_max and self._bytes <= bounds.batch_bytes_max:
            self._records = []
            return queue, self._bytes
        entries, total = 0, 0
        for _, _, payload in queue[: bounds.batch_entries_max]:
            record_bytes = RECORD_HEADER_BYTES + len(payload)
            if entries and total + record_bytes > bounds.batch_bytes_max:
                break
            total += record_bytes
            entries += 1
        self._records = queue[entries:]
        return queue[:entries], total

    def _commit(self, log: Log, records: list[QueuedRecord], body_bytes: int) -> None:
        """Encode, write and sync one batch, wake the threads that wait for it, and write zeros ahead for the next."""
        entries = len(records)
        last_lsn = Lsn(log.next_lsn + entries - 1)
        body = b"".join(
            encode_record(Lsn(lsn), hlc.pack(), kind, payload)
            for lsn, (hlc, kind, payload) in enumerate(records, log.next_lsn)
        )
        log.append(batch_of(log.next_lsn, last_lsn, records[-1][0].pack(), body), body)
        wake(self._shipper_fd)
        began_s = time.perf_counter()
        log.sync()
        sync_s = time.perf_counter() - began_s
        with self._changed:
            self.durable_lsn = last_lsn
            self._bytes -= body_bytes
            self._durable.append(DurableBatch(last_lsn, sync_s, entries))
            self._hold_open(entries, sync_s / HALF_AFTER)
        wake(self._durable_fd)
        wake(self._shipper_fd)
        log.prepare(BATCH_RECORD_BYTES + body_bytes)


def wake(fd: int) -> None:
    """Write 8 bytes to this descriptor, unless it is ``NO_FD`` or full: then a wake-up is pending already."""
    if fd != NO_FD:
        try:
            os.write(fd, _WAKE_UP)
        except BlockingIOError:
            return
