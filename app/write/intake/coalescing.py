"""Collects records before they are appended to the WAL, so that one sync serves many.

*Records answered once they are chained.* A record that arrives while a transaction runs is chained by the next one, so
an earlier sync gains nothing. Such records are collected until the transaction ends, at most ``GATHER_S``, and appended
together. If no transaction runs, they are appended at the end of this turn of the event loop.

The clients that a transaction answers are about to send again, and a transaction of twice the size costs little more.
So the collected records wait for as many more as the last append had, at most half of the time since then. Without that
wait, clients that write together split into three groups, and each group pays for a transaction of its own.

*Single records answered once they are durable.* They are collected until a turn of the event loop adds none, at most
``COMPANY_S`` or ``COMPANY_ENTRIES``. A lone writer waits one empty turn. One sync and one wake-up of the loop and of
the clients then serve many. All other records are appended immediately, after the collected ones.

Nothing is acknowledged here: a collected record is in no file yet, like a record in the queue of the WAL. Its LSN and
HLC are drawn already, and the next record gets the following ones.
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
"""Longest that a record waits for the end of a transaction: a hanging transaction must not keep it from the disk."""

RETURN_PART = 0.5
"""Part of the time since the last append for which collected records wait for the answered clients to send again."""

COMPANY_S = 0.001
"""Longest that a single record is held to be synced together with others."""
COMPANY_ENTRIES = 32
"""Collected records that are appended without further waiting."""


class WriteCoalescer:
    """Appends all records of a node to ``wal``; no other object does. Belongs to one event loop.

    ``is_chaining`` reports whether a transaction runs at whose end ``chained`` is called. ``on_failure`` gets the error
    that kept collected records from the WAL.
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
        """Records collected at the last turn while single durable records wait; else 0."""
        self._company_until_s = 0.0
        self._given = 0
        """Size of the last append, 0 once a transaction has ended after it."""
        self._given_at_s = 0.0
        self._wanted = 0
        """Number of records to collect while the answered clients are about to send again; else 0."""

    @property
    def next_lsn(self) -> Lsn:
        """LSN of the next record."""
        return Lsn(self._wal.next_lsn + len(self._records))

    def append_all(self, records: Sequence[QueuedRecord]) -> Lsn:
        """Append the collected records, then these, as ``GroupCommit.append_all``."""
        if self._records:
            self.flush()
        return self._wal.append_all(records)

    def append_until_chained(self, record: QueuedRecord) -> Lsn:
        """The LSN of a record that MUST NOT be acknowledged before it is chained. The WAL MUST be able to take it."""
        lsn = self.next_lsn
        self._records.append(record)
        if self._wanted and len(self._records) >= self._wanted:
            self.flush()
        elif self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(GATHER_S, self.flush) if self._is_chaining() else loop.call_soon(self.flush)
        return lsn

    def append_until_durable(self, record: QueuedRecord) -> Lsn:
        """The LSN of a record that is answered once it is durable. The WAL MUST be able to take it."""
        lsn = self.next_lsn
        self._records.append(record)
        if not self._company:
            loop = asyncio.get_running_loop()
            self._company, self._company_until_s = len(self._records), loop.time() + COMPANY_S
            loop.call_soon(self._look, loop)
        return lsn

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        """Append the collected records, unless this turn added more."""
        waiting = len(self._records)
        if self._company < waiting < COMPANY_ENTRIES and loop.time() < self._company_until_s:
            self._company = waiting
            loop.call_soon(self._look, loop)
            return
        self._company = 0
        self.flush()

    def chained(self) -> None:
        """A transaction is over: append the collected records, together with what the answered clients send now."""
        given, self._given = self._given, 0
        if not self._records or not given:
            self.flush()
            return
        if self._timer is not None:
            self._timer.cancel()
        self._wanted = len(self._records) + given
        self._timer = asyncio.get_running_loop().call_later(
            min((time.monotonic() - self._given_at_s) * RETURN_PART, GATHER_S), self.flush
        )

    def flush(self) -> None:
        """Append the collected records."""
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
