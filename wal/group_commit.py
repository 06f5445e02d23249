"""Group commit: one thread owns the log, and every other thread only queues records.

Always true, and asserted where it can break::

    next_lsn > written_lsn >= durable_lsn
    HLCs rise with LSNs
    records queued and not durable <= queue_max_entries, their bytes <= queue_max_bytes

Life of a batch, and what a crash in each phase leaves:

    1. collect   records are in memory; they are lost
    2. encode    header, CRC and payload of each record, one after the other; they are lost
    3. write     BATCH record and body in one system call; a torn tail, or the whole batch, is left
    4. sync      a torn tail, or the whole batch, is left
    5. report    the whole batch is left

The queue (``wal.queue``) does all five. The queue in C, if it is built, does them without the GIL, batch after batch.
This module has the thread, its end, and the errors of ``append``.

After the sync, and twice a second when idle, the thread checks that the files are still in place (``wal.log``):
records written into a removed file are not acknowledged.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from ledger.errors import WalError, WalPoisonedError, refuse
from ledger.hlc import Hlc
from ledger.positions import Lsn
from wal import native
from wal.format import RECORD_HEADER_BYTES, QueuedRecord
from wal.log import CHECK_INTERVAL_S, Log
from wal.native import Ship
from wal.queue import NO_FD, Bounds, DurableBatch, fault_of

QUEUE_BYTES_MAX = 256 << 20
"""Records queued and not durable never hold more memory than this, whatever their number."""


class GroupCommit:
    """The only writer of ``log``, which belongs to the writer's thread from now on.

    The writer signals ``durable_fd`` and ``shipper_fd`` as ``wal.queue`` describes: ``durable_lsn`` or ``written_lsn``
    has risen, and ``take_durable`` has the batch. The caller closes both once the writer ``has_ended``. The writer
    thread calls ``on_failure(error)`` at most once: nothing above ``durable_lsn`` may be acknowledged any more. The
    callback MUST NOT block.

    With ``batch_max_entries`` of 1 each record is a batch of its own. The caller decides which records it answers
    before they are durable.
    """

    def __init__(
        self,
        log: Log,
        *,
        on_failure: Callable[[WalPoisonedError], None],
        durable_fd: int = NO_FD,
        batch_timeout_us: int = 500,
        batch_max_entries: int = 1000,
        batch_max_bytes: int = 1 << 20,
        record_bytes_max: int = 1 << 20,
        queue_max_entries: int = 100_000,
        queue_max_bytes: int = QUEUE_BYTES_MAX,
        shipper_fd: int = NO_FD,
    ) -> None:
        self._log = log
        self._on_failure = on_failure
        self._bounds = Bounds(
            node_id=log.node_id,
            payload_bytes_max=record_bytes_max - RECORD_HEADER_BYTES,
            entries_max=queue_max_entries,
            bytes_max=queue_max_bytes,
            batch_entries_max=batch_max_entries,
            batch_bytes_max=batch_max_bytes,
            batch_timeout_s=batch_timeout_us / 1e6,
        )
        self._queue = native.make_queue(self._bounds, log, durable_fd, shipper_fd)
        self._append = self._queue.append
        self.expect = self._queue.expect
        self.ship: Ship | None = getattr(self._queue, "ship", None)
        """Ships written batches without the GIL; None if C is not built."""
        self._poison: WalPoisonedError | None = None
        self._closing = False
        self._check_at = time.monotonic() + CHECK_INTERVAL_S
        self._thread = threading.Thread(target=self._run, name="wal-writer", daemon=True)
        self._thread.start()

    @property
    def next_lsn(self) -> Lsn:
        """LSN of the next record; all below it are queued, written or durable."""
        return self._queue.next_lsn

    @property
    def written_lsn(self) -> Lsn:
        """The last LSN given to the operating system. MUST NOT be taken for durable."""
        return self._queue.written_lsn

    @property
    def durable_lsn(self) -> Lsn:
        """Everything up to here is synced."""
        return self._queue.durable_lsn

    def take_durable(self) -> list[DurableBatch]:
        """The batches that became durable since the last call, in their order. Bounded: only the newest are kept."""
        return [DurableBatch(*batch) for batch in self._queue.take_durable()]

    def append(self, hlc: Hlc, record_type: int, payload: bytes) -> Lsn:
        """``append_all`` of one record: its LSN."""
        lsn = self._append(hlc, record_type, payload)
        return self.append_all(((hlc, record_type, payload),)) if lsn is None else lsn

    def append_all(self, records: Sequence[QueuedRecord]) -> Lsn:
        """Queue records one after the other, all or none, and return the LSN of the first.

        They are NOT durable when this returns: the caller MUST NOT acknowledge one before ``durable_lsn`` is its LSN
        or a higher one. Safe to call from any thread; if several do, they MUST draw the HLCs in the same
        critical section, since HLCs must rise with LSNs.

        Raises, and queues nothing then:
            WalPoisonedError: an earlier write failed, or the writer was closed.
            WalFullError: the queue has no room.
            RecordTooLargeError: one is over ``record_bytes_max``, header included.
            InvalidInputError: an HLC is of another node or does not rise, or a type is not a record type.
        """
        while (lsn := self._queue.append_all(records)) is None:
            is_poisoned, closed = self._poison is not None, "the WAL writer is closed"
            refuse(WalPoisonedError, (is_poisoned, str(self._poison)), (self._closing, closed))
            if (fault := fault_of(records, self._bounds, self._queue.state())) is not None:
                raise fault
            # The queue has room again, as records have become durable since: retry.
        return lsn

    @property
    def has_ended(self) -> bool:
        """The writer thread has ended: it writes no more to the log or to the descriptors."""
        return not self._thread.is_alive()

    def retire(self, name: str) -> None:
        """The caller is about to remove the segment of this name, which is no longer needed."""
        self._log.guard.retire(name)

    def close(self, timeout_s: float) -> None:
        """Accept no more records, make the queued ones durable, and close the file. A second call does nothing.

        Raises:
            WalPoisonedError: an earlier write failed; the queued records are lost, and were never acknowledged.
            WalError: it took longer than ``timeout_s`` seconds; the thread continues.
        """
        self._closing = True
        self._queue.close()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise WalError(f"the WAL was not flushed in {timeout_s:g} s; LSN {self.durable_lsn} is durable")
        if self._poison is not None:
            raise WalPoisonedError(str(self._poison))

    # Everything below runs on the writer thread.

    def _run(self) -> None:
        try:
            while self._queue.write(self._log, self._check_at):
                if time.monotonic() >= self._check_at:
                    self._log.guard.check()
                    self._check_at = time.monotonic() + CHECK_INTERVAL_S
            self._log.close()
        except Exception as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        """Refuse all records from now on. The file stays as it is: recovery decides which of its records are kept."""
        poison = WalPoisonedError(
            f"the WAL failed above LSN {self.durable_lsn}: {error}. "
            "Nothing above it was acknowledged; the process must restart to recover"
        )
        poison.__cause__ = error
        self._poison = poison
        self._queue.close()
        try:
            self._log.abandon()
        finally:
            self._on_failure(poison)
