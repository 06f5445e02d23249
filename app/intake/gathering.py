"""Where records come together on their way into the WAL that nobody hears of before they are chained.

Who waits for the chain gains nothing by a sync that ends while another transaction chains: what it syncs is chained by
the next one in any case. So those records come together for as long, and are given to the WAL in one piece: once the
transaction is over, which is when the next could take them, or after ``GATHER_S``; where none is under way, at the end
of this turn of the event loop, with what else came in it. All others are given to it at once, behind those that wait.

Nothing is acknowledged by it: records that wait are in no file yet, as those in the queue of the WAL are in none. Their
LSNs and HLCs are drawn, in order, and the next record has those behind them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from ledger.errors import LedgerError
from ledger.positions import Lsn
from wal.format import QueuedRecord
from wal.group_commit import GroupCommit

GATHER_S = 0.01
"""Longest that a record waits for the end of a transaction: one that hangs must not keep it from the disk."""


class Gathering:
    """The way of all records of a node into ``wal``. Belongs to one event loop, and is the only one that appends.

    ``is_chaining`` says whether a transaction is under way at whose end ``flush`` is called. ``on_failure`` is told
    what keeps records from the WAL that were taken already.
    """

    def __init__(
        self, wal: GroupCommit, is_chaining: Callable[[], bool], on_failure: Callable[[LedgerError], None]
    ) -> None:
        self._wal = wal
        self._is_chaining = is_chaining
        self._on_failure = on_failure
        self._records: list[QueuedRecord] = []
        self._timer: asyncio.Handle | None = None

    @property
    def next_lsn(self) -> Lsn:
        """What the next record will have."""
        return Lsn(self._wal.next_lsn + len(self._records))

    def append_all(self, records: Sequence[QueuedRecord]) -> Lsn:
        """As ``GroupCommit.append_all``, behind those that wait, which then wait no longer."""
        if self._records:
            self.flush()
        return self._wal.append_all(records)

    def append_soon(self, record: QueuedRecord) -> Lsn:
        """The LSN of a record that MUST NOT be acknowledged before it is chained. It MUST be one that the WAL takes."""
        lsn = self.next_lsn
        self._records.append(record)
        if self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(GATHER_S, self.flush) if self._is_chaining() else loop.call_soon(self.flush)
        return lsn

    def flush(self) -> None:
        """Give the WAL what waits."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not self._records:
            return
        records, self._records = self._records, []
        try:
            self._wal.append_all(records)
        except LedgerError as error:
            self._on_failure(error)
