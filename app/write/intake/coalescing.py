"""Where records come together on their way into the WAL that nobody hears of before they are chained.

Who waits for the chain gains nothing by a sync that ends while another transaction chains: what it syncs is chained by
the next one in any case. So those records come together for as long, and are given to the WAL in one piece: once the
transaction is over, which is when the next could take them, or after ``GATHER_S``; where none is under way, at the end
of this turn of the event loop, with what else came in it.

Who is answered at the end of a transaction is about to come back, and a transaction of twice as many costs little more.
So what waits then waits on for as many as the WAL was given last, but no longer than half of the time since: otherwise
those who write together fall apart into three groups, each of which pays for a transaction of its own.

A single record that is answered once it is durable goes with those that the turns right behind this one bring, until
one brings none, for ``COMPANY_S`` or ``COMPANY_ENTRIES`` at the most: where nobody else writes that is one turn without
anything in it. One sync, one waking of the loop and of those who read the answers then serve many. All others are given
to the WAL at once, behind those that wait.

Nothing is acknowledged by it: records that wait are in no file yet, as those in the queue of the WAL are in none. Their
LSNs and HLCs are drawn, in order, and the next record has those behind them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from ledger.errors import LedgerError
from ledger.positions import Lsn
from wal.format import QueuedRecord
from wal.group_commit import GroupCommit

GATHER_S = 0.01
"""Longest that a record waits for the end of a transaction: one that hangs must not keep it from the disk."""

RETURN_PART = 0.5
"""Which part of the time between two batches those who were answered may take to come back."""

COMPANY_S = 0.001
"""Longest that a record which somebody waits for waits for company."""
COMPANY_ENTRIES = 32
"""Company enough."""


class WriteCoalescer:
    """The way of all records of a node into ``wal``. Belongs to one event loop, and is the only one that appends.

    ``is_chaining`` says whether a transaction is under way at whose end ``chained`` is called. ``on_failure`` is told
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
        self._company = 0
        """How many waited at the last turn, while company is waited for; else 0."""
        self._company_until_s = 0.0
        self._given = 0
        """How many the WAL was given last, of which no transaction is over."""
        self._given_at_s = 0.0
        self._wanted = 0
        """How many are to wait before they go, while those who were answered are about to come back; else 0."""

    @property
    def next_lsn(self) -> Lsn:
        """What the next record will have."""
        return Lsn(self._wal.next_lsn + len(self._records))

    def append_all(self, records: Sequence[QueuedRecord]) -> Lsn:
        """As ``GroupCommit.append_all``, behind those that wait, which then wait no longer."""
        if self._records:
            self.flush()
        return self._wal.append_all(records)

    def append_until_chained(self, record: QueuedRecord) -> Lsn:
        """The LSN of a record that MUST NOT be acknowledged before it is chained. It MUST be one that the WAL takes."""
        lsn = self.next_lsn
        self._records.append(record)
        if self._wanted and len(self._records) >= self._wanted:
            self.flush()
        elif self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(GATHER_S, self.flush) if self._is_chaining() else loop.call_soon(self.flush)
        return lsn

    def append_until_durable(self, record: QueuedRecord) -> Lsn:
        """The LSN of a record that is answered once it is durable. It MUST be one that the WAL takes."""
        lsn = self.next_lsn
        self._records.append(record)
        if not self._company:
            loop = asyncio.get_running_loop()
            self._company, self._company_until_s = len(self._records), loop.time() + COMPANY_S
            loop.call_soon(self._look, loop)
        return lsn

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        """Give the WAL what waits, unless this turn brought more."""
        waiting = len(self._records)
        if self._company < waiting < COMPANY_ENTRIES and loop.time() < self._company_until_s:
            self._company = waiting
            loop.call_soon(self._look, loop)
            return
        self._company = 0
        self.flush()

    def chained(self) -> None:
        """A transaction is over: what waits is given to the WAL, together with what those who are answered send now."""
        given, self._given = self._given, 0
        if not self._records or not given:
            self.flush()
            return
        if self._timer is not None:
            self._timer.cancel()
        self._wanted = len(self._records) + given
        hold_s = min((time.monotonic() - self._given_at_s) * RETURN_PART, GATHER_S)
        self._timer = asyncio.get_running_loop().call_later(hold_s, self.flush)

    def flush(self) -> None:
        """Give the WAL what waits."""
        self._wanted = 0
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not self._records:
            return
        records, self._records = self._records, []
        self._given, self._given_at_s = len(records), time.monotonic()
        try:
            self._wal.append_all(records)
        except LedgerError as error:
            self._on_failure(error)
