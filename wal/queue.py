"""The queue of a WAL, and the writer's loop over it: records come in at one end, and leave at the other as batches on
the disk.

Always true, and asserted where it can break::

    next_lsn > written_lsn >= durable_lsn
    HLCs rise with LSNs
    records queued and not durable <= entries_max of the bounds, their bytes <= bytes_max

It is there twice: ``PythonQueue`` is the specification, and ``wal._native.Queue`` does the same in C, where it frames
records when they are appended and writes batch after batch without the interpreter's lock (``wal.native``). Only
``fault_of`` says what is wrong with a record; both queues just refuse it.

A batch begins at once when the log is idle. While one is written, the next collects. Behind a batch of several, their
writers are about to come back: the next is held open until about as many records are queued again, for
``batch_timeout_us`` at the most. Not so where many came while it was written: they go at once, and the others come back
while that is done. Nor where coming back takes them longer than the sync took: then half of them go, and the log syncs
one half while the other comes. Writers who wait for more than that, an answer of others, come back later: ``expect``
says when.

Whoever wants to know what is durable listens to the bell: a descriptor, an eventfd as a rule, to which 8 bytes are
written once a batch, after its sync. That of whoever ships batches elsewhere is rung before each sync, too, as soon as
``written_lsn`` has risen: what he ships is under way while it is synced here.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from ledger.errors import InvalidInputError, LedgerError, RecordTooLargeError, WalFullError
from ledger.facts.events import BATCH_RECORD_TYPE
from ledger.hlc import Hlc, node_hash
from ledger.positions import Lsn
from wal.format import BATCH_RECORD_BYTES, RECORD_HEADER_BYTES, QueuedRecord, batch_of, encode_records
from wal.log import Log

LINGER_ENTRIES_MIN = 2
"""A batch is held open only behind one of at least so many records: a lone writer never waits."""

LINGER_PART = 3
"""Nor is it where one of so many, beside those of the batch before, came while that was written: they need not wait for
it."""

HALF_MIN = 16
"""Half of them are enough where that is at least so many: each sync is work of the processor, too."""

HALF_AFTER = 3
"""And where they came no sooner than one of so many parts of the last sync: two syncs of half a batch each then take
less time than one and the coming back of all, for which the disk stands still."""

HEARD_MAX = 4096
"""Of more batches than this that nobody has asked for, the oldest are forgotten; what is durable never is."""

NO_BELL = -1

_RING = (1).to_bytes(8, "little")
_RECORD_TYPES = frozenset(range(1, 256)) - {BATCH_RECORD_TYPE}


class Bounds(NamedTuple):
    """What a queue takes, and what it makes of it."""

    node_id: str
    payload_bytes_max: int
    entries_max: int
    bytes_max: int
    batch_entries_max: int
    batch_bytes_max: int
    batch_timeout_s: float


class Stand(NamedTuple):
    """Where a queue stands: what the next record is held against. ``waiting_bytes`` are those of all that is not
    durable, queued or being written."""

    next_lsn: int
    durable_lsn: int
    waiting_bytes: int
    last_physical_ms: int
    last_logical: int


class HeardBatch(NamedTuple):
    """A batch that became durable."""

    lsn: int
    """That of its last record."""
    sync_s: float
    entries: int


class Queue(Protocol):
    """What both queues are. ``append``, ``append_all``, ``expect``, ``close``, ``heard`` and the LSNs may be used by
    any thread, ``write`` by the one that writes."""

    @property
    def next_lsn(self) -> int:
        """What the next record will have; all below it are queued, written or durable."""

    @property
    def written_lsn(self) -> int:
        """Given to the operating system up to here. MUST NOT be taken for durable."""

    @property
    def durable_lsn(self) -> int:
        """Everything up to here is synced."""

    def append(self, hlc: Hlc, record_type: int, payload: bytes) -> int | None:
        """Queue one record: its LSN; None, and nothing is queued, where ``fault_of`` is to say what is wrong."""

    def append_all(self, records: Sequence[QueuedRecord]) -> int | None:
        """Queue records one behind the other, all or none: the LSN of the first; None as ``append``."""

    def stand(self) -> tuple[int, int, int, int, int]:
        """A ``Stand``."""

    def heard(self) -> list[tuple[int, float, int]]:
        """A ``HeardBatch`` for each that became durable since the last call."""

    def expect(self, entries: int) -> None:
        """So many writers, who waited for more than their records' durability, are about to come back: the next batch
        is held open for them, if they are several."""

    def close(self) -> None:
        """Take nothing more; what is queued is written, without waiting for company."""

    def write(self, log: Log, until_s: float) -> bool:
        """Write and sync batches, one or several, and ring the bells; return by this time of the monotonic
        clock, or behind the batch that is then written. False when nothing is left and no more comes.

        Raises:
            WalError, OSError: nothing above ``durable_lsn`` may be acknowledged any more.
        """


def fault_of(records: Sequence[QueuedRecord], bounds: Bounds, stand: Stand) -> LedgerError | None:
    """Why a queue that stands so does not take these records; None when it does."""
    last = (stand.last_physical_ms, stand.last_logical)
    waiting, more_bytes = stand.next_lsn - 1 - stand.durable_lsn, 0
    for hlc, record_type, payload in records:
        length = RECORD_HEADER_BYTES + len(payload)
        if len(payload) > bounds.payload_bytes_max:
            most = bounds.payload_bytes_max + RECORD_HEADER_BYTES
            return RecordTooLargeError(f"a record of {length} bytes is over wal.record_bytes_max = {most}")
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
    if stand.waiting_bytes + more_bytes > bounds.bytes_max:
        return _full(stand.waiting_bytes, more_bytes, bounds.bytes_max, "bytes")
    return None


def _full(waiting: int, more: int, most: int, what: str) -> WalFullError:
    return WalFullError(
        f"{waiting} {what} wait to become durable, no room for {more} more within {most}; try again later"
    )


class PythonQueue:
    """The queue in Python: the specification of the one in C, and what works where there is none."""

    def __init__(self, bounds: Bounds, log: Log, bell: int, shipper_bell: int = NO_BELL) -> None:
        self._bounds = bounds
        self._log = log
        self._node_hash = node_hash(bounds.node_id)
        self._bell = bell
        self._shipper_bell = shipper_bell

        self._lock = threading.Lock()
        """Guards what follows up to the alarm. Held for a moment, never over a system call."""
        self._records: list[QueuedRecord] = []
        self._bytes = 0
        """Of all that is not durable: what is queued, and the batch that is being written."""
        self._next_lsn: int = log.next_lsn
        self._durable_lsn: int = log.durable_lsn
        self._last: tuple[int, int] = (-1, -1)
        self._is_refusing = False
        self._wanted = 0
        """How many queued records the writer thread sleeps for; 0 when it is awake."""
        self._heard: deque[HeardBatch] = deque(maxlen=HEARD_MAX)
        self._is_held_open = False
        """Whether the batch to come waits for writers who are about to come back."""
        self._held_entries = 0
        """For so many records."""
        self._held_at_s = float("-inf")
        """Since when, as ``time.monotonic`` tells it."""
        self._half_at_s = float("inf")
        """From when on half of them are enough."""
        self._alarm = threading.Lock()
        """Held while nothing is to be told; released to wake the writer thread."""
        self._alarm.acquire()

    @property
    def next_lsn(self) -> int:
        """As ``Queue`` says."""
        return self._next_lsn

    @property
    def written_lsn(self) -> int:
        """As ``Queue`` says."""
        return self._log.written_lsn

    @property
    def durable_lsn(self) -> int:
        """As ``Queue`` says."""
        return self._durable_lsn

    def append(self, hlc: Hlc, record_type: int, payload: bytes) -> int | None:
        """As ``Queue`` says."""
        return self.append_all(((hlc, record_type, payload),))

    def append_all(self, records: Sequence[QueuedRecord]) -> int | None:
        """As ``Queue`` says."""
        with self._lock:
            if self._is_refusing or fault_of(records, self._bounds, self._stand()) is not None:
                return None
            first_lsn = self._next_lsn
            for hlc, _, payload in records:
                self._bytes += RECORD_HEADER_BYTES + len(payload)
                self._last = hlc[:2]
            self._records += records
            self._next_lsn += len(records)
            if self._wanted and (len(self._records) >= self._wanted or self._bytes >= self._bounds.batch_bytes_max):
                self._wake()
        return first_lsn

    def stand(self) -> Stand:
        """As ``Queue`` says."""
        with self._lock:
            return self._stand()

    def heard(self) -> list[tuple[int, float, int]]:
        """As ``Queue`` says."""
        with self._lock:
            heard: list[tuple[int, float, int]] = list(self._heard)
            self._heard.clear()
        return heard

    def expect(self, entries: int) -> None:
        """As ``Queue`` says."""
        if entries >= LINGER_ENTRIES_MIN:
            with self._lock:
                self._hold_open(entries, float("inf"))

    def close(self) -> None:
        """As ``Queue`` says."""
        with self._lock:
            self._is_refusing = True
            if self._wanted:
                self._wake()

    def _stand(self) -> Stand:
        return Stand(self._next_lsn, self._durable_lsn, self._bytes, *self._last)

    def _hold_open(self, entries: int, half_after_s: float) -> None:
        """Hold the next batch open for so many, but where many have come; half are enough after that long. The lock is
        held."""
        entries = min(entries, self._bounds.batch_entries_max)
        self._is_held_open = entries >= LINGER_ENTRIES_MIN and len(self._records) * LINGER_PART < entries
        self._held_entries = entries
        self._held_at_s = time.monotonic()
        self._half_at_s = self._held_at_s + half_after_s if (entries + 1) // 2 >= HALF_MIN else float("inf")

    def _wake(self) -> None:
        """Wake the writer thread, which sleeps. The lock is held."""
        self._wanted = 0
        self._alarm.release()

    # Everything below runs on the writer thread.

    def write(self, log: Log, until_s: float) -> bool:
        """As ``Queue`` says: one batch."""
        if not self._await_company(until_s) or not self._await_queued(1, until_s):
            return True
        with self._lock:
            if self._is_held_open and not self._is_refusing:
                return True  # since one came, others were said to come
            records, body_bytes = self._take()
        if records:
            self._commit(log, records, body_bytes)
        return bool(records)

    def _await_company(self, until_s: float) -> bool:
        """Sleep while the next batch is held open; False when it still is at this time."""
        while True:
            with self._lock:
                entries, wake_at_s = self._held_entries, self._held_at_s + self._bounds.batch_timeout_s
                is_there = len(self._records) >= entries or self._bytes >= self._bounds.batch_bytes_max
                if self._half_at_s < wake_at_s:
                    half = (entries + 1) // 2
                    if len(self._records) < half:
                        entries = half
                    else:
                        wake_at_s = self._half_at_s
                if not self._is_held_open or self._is_refusing or is_there or time.monotonic() >= wake_at_s:
                    self._is_held_open = False
                    return True
            if time.monotonic() >= until_s:
                return False
            self._await_queued(entries, min(wake_at_s, until_s))

    def _await_queued(self, records: int, until_s: float) -> bool:
        """Sleep until so many are queued or a full batch is, or the queue closes; False when time was up before."""
        with self._lock:
            if self._is_refusing or len(self._records) >= records or self._bytes >= self._bounds.batch_bytes_max:
                return True
            self._wanted = records
        if self._alarm.acquire(timeout=max(0.0, until_s - time.monotonic())):
            return True
        with self._lock:
            rung = self._wanted == 0
            self._wanted = 0
        if rung:
            self._alarm.acquire()
        return rung

    def _take(self) -> tuple[list[QueuedRecord], int]:
        """The next batch and its bytes. The lock is held."""
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
        """Encode, write and sync one batch, tell, and make room for the next while it comes."""
        entries = len(records)
        last_lsn = Lsn(log.next_lsn + entries - 1)
        body = encode_records(log.next_lsn, self._node_hash, records)
        log.append(batch_of(log.next_lsn, last_lsn, records[-1][0].pack(), body), body)
        ring(self._shipper_bell)
        began_s = time.perf_counter()
        log.sync()
        sync_s = time.perf_counter() - began_s
        with self._lock:
            self._durable_lsn = last_lsn
            self._bytes -= body_bytes
            self._heard.append(HeardBatch(last_lsn, sync_s, entries))
            self._hold_open(entries, sync_s / HALF_AFTER)
        ring(self._bell)
        ring(self._shipper_bell)
        log.prepare(BATCH_RECORD_BYTES + body_bytes)


def ring(bell: int) -> None:
    """Tell whoever listens."""
    if bell != NO_BELL:
        try:
            os.write(bell, _RING)
        except BlockingIOError:
            return  # who listens has not heard for long, and will
