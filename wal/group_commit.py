"""Group commit: one thread owns the log, and every other thread only queues records.

Always true, and asserted where it can break::

    next_lsn > written_lsn >= durable_lsn
    HLCs rise with LSNs
    records queued and not durable <= queue_max_entries, their bytes <= queue_max_bytes

Life of a batch, and what a crash in each phase leaves:

    1. collect   records are in memory; they are lost
    2. encode    the same: header, CRC and payload of each, one after the other
    3. write     one system call: BATCH record and body; a torn tail is there, or all of it
    4. sync      all of it is there, or a torn tail
    5. report    all of it is there

All five are done by the queue (``wal.queue``), which is in C where that is built: then the thread goes from one to the
next without the GIL, batch after batch. Here are the thread, its end, and the errors of ``append``.

After the sync, and twice a second when idle, the thread checks that the files are where they were (``wal.log``):
what is written into a file that was removed is not acknowledged.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from ledger.errors import WalError, WalPoisonedError
from ledger.hlc import Hlc
from ledger.positions import Lsn
from wal import native
from wal.format import BATCH_BODY_BYTES_LIMIT, RECORD_BYTES_LIMIT, RECORD_HEADER_BYTES, QueuedRecord
from wal.log import CHECK_INTERVAL_S, Log
from wal.native import Ship
from wal.queue import NO_FD, Bounds, DurableBatch, fault_of

QUEUE_BYTES_MAX = 256 << 20
"""Records queued and not durable never hold more memory than this, however many of them are allowed."""


class GroupCommit:
    """The one writer of ``log``, which from now on belongs to its thread.

    ``durable_fd`` and ``shipper_fd`` are descriptors that are written to as ``wal.queue`` says: then ``durable_lsn`` or
    ``written_lsn`` has risen, and ``take_durable`` has the batch. The caller closes them once the writer ``has_ended``.
    ``on_failure(error)`` is called at most once, on the writer thread: nothing above ``durable_lsn`` may be
    acknowledged any more. It may not block.

    With ``batch_max_entries`` of 1 each record is a batch of its own. What is answered before it is durable is up to
    the caller.
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
        assert RECORD_HEADER_BYTES < record_bytes_max <= RECORD_BYTES_LIMIT
        assert 0 < batch_max_bytes <= BATCH_BODY_BYTES_LIMIT
        assert batch_max_entries > 0
        assert record_bytes_max <= queue_max_bytes
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
        """Ships what is written, without the GIL; None where C is not built."""
        self._poison: WalPoisonedError | None = None
        self._closing = False
        self._check_at = time.monotonic() + CHECK_INTERVAL_S
        self._thread = threading.Thread(target=self._run, name="wal-writer", daemon=True)
        self._thread.start()

    @property
    def next_lsn(self) -> Lsn:
        """What the next record will have; all below it are queued, written or durable."""
        return self._queue.next_lsn

    @property
    def written_lsn(self) -> Lsn:
        """Given to the operating system up to here. MUST NOT be taken for durable."""
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
        """Queue records one behind the other, all or none, and return the LSN of the first.

        They are NOT durable when this returns: the caller MUST NOT acknowledge one before ``durable_lsn`` is its LSN
        or a higher one. Safe to call from any thread; where several do, the HLCs must be drawn in the same
        critical section, since HLCs must rise with LSNs.

        Raises, and has queued nothing then:
            WalPoisonedError: an earlier write failed, or the writer was closed.
            WalFullError: the queue has no room.
            RecordTooLargeError: one is over ``record_bytes_max``, header included.
            InvalidInputError: an HLC is of another node or does not rise, or a type is not a record's.
        """
        while (lsn := self._queue.append_all(records)) is None:
            if self._poison is not None:
                raise WalPoisonedError(str(self._poison))
            if self._closing:
                raise WalPoisonedError("the WAL writer is closed")
            fault = fault_of(records, self._bounds, self._queue.state())
            if fault is not None:
                raise fault
            # What filled the queue has become durable since: try again.
        return lsn

    @property
    def has_ended(self) -> bool:
        """Nothing is written any more, not to the descriptors either."""
        return not self._thread.is_alive()

    def retire(self, name: str) -> None:
        """The segment of this name is about to be removed, since it is not needed any more."""
        self._log.guard.retire(name)

    def close(self, timeout_s: float) -> None:
        """Take nothing more, make everything queued durable, and let the file go. A second call does nothing.

        Raises:
            WalPoisonedError: an earlier write failed; what was queued is lost, and was never acknowledged.
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
        """Refuse all records from now on. The file stays as it is: recovery decides what of it counts."""
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
