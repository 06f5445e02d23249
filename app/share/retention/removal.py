"""Removes the rows that PRUNED entries cover, in small transactions, whichever node or process wrote the entry.

For each tenant whose chain begins at or below what such an entry covers::

    1. the entry counts, by an admitted key, and the stored tree covers it
    2. the next entries leave with all others of their jobs, and the rows of these jobs, in one transaction
                                                                                         until none is left

A transaction removes as many entries as take ``STEP_S``. Nothing that a later step needs is remembered: a process that
dies leaves the rest to the next search of any node. Two nodes at once take turns, by the lock of the follower's
position.

Where many entries of a tenant left, the node has PostgreSQL free their pages (``store.retention.vacuum``), in a task of
its own.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

from app.runtime.logs import log
from app.runtime.postgres import DATABASE_FAULTS, text_of
from app.runtime.tasks import is_set_within, paced
from app.store import notary, retention
from app.store.departed import departed_tenants
from app.store.jobs.table import JobFolds
from app.store.reading import Pool, reading
from app.store.sessions import NodeConnection
from app.trust.retention import RetentionReader
from ledger.errors import ChainDamagedError, DatabaseUnavailableError, LedgerError

SEARCH_INTERVAL_S: Final = 30.0
"""Pause between two searches for covered rows, which a prune at this node ends."""
STEP_S: Final = 0.1
"""Time that one transaction should take."""
ENTRIES_A_STEP_MIN: Final = 2000
ENTRIES_A_STEP_MAX: Final = 5000
"""Bounds of the entries of one transaction."""
SHARE: Final = 0.5
"""Largest share of the time that removing takes, so that writes and autovacuum keep up."""
WAIT_PAUSE_S: Final = 0.2
"""Pause where another session follows or removes entries of a chain, or the tree has not reached the PRUNED entry."""
WAITS_MAX: Final = 50
"""Such pauses for one tenant before the next search continues."""


@dataclass(kw_only=True, eq=False)
class Removal:
    """Removes rows for one node; belongs to its event loop."""

    pool: Pool
    reader: RetentionReader
    folds: JobFolds
    report: Callable[[ChainDamagedError, str], object]
    connect: Callable[[], Awaitable[NodeConnection]]
    """Opens a session for VACUUM."""

    def __post_init__(self) -> None:
        self._wake = asyncio.Event()
        self._emptied: dict[str, int] = {}
        """Entries that left since the last VACUUM, by tenant whose removal has ended."""
        self._wake_vacuum = asyncio.Event()
        self._entries_a_step = ENTRIES_A_STEP_MIN

    def wake(self) -> None:
        """A prune was chained at this node."""
        self._wake.set()

    async def run(self) -> None:
        """Remove what is covered until cancelled."""
        while True:
            self._wake.clear()
            try:
                async with reading(self.pool) as connection:
                    covered = await retention.pruned_tenants(connection)
                    self.reader.departed.update(await departed_tenants(connection))
                for tenant_id, first_seq in covered.items():
                    await self._remove(tenant_id, first_seq)
            except (DatabaseUnavailableError, *DATABASE_FAULTS) as error:
                log.warning("removal_delayed", error=text_of(error))
            await is_set_within(self._wake, SEARCH_INTERVAL_S)

    async def _remove(self, tenant_id: str, from_seq: int) -> None:
        """Remove all covered rows of one tenant from ``from_seq`` on, if the entry that covers them counts."""
        waits, next_seq, count = 0, from_seq, 0
        while waits < WAITS_MAX:
            try:
                async with paced(SHARE):
                    found = await self._step(tenant_id, next_seq)
            except ChainDamagedError as error:
                self.report(error, "retention")
                return
            except DatabaseUnavailableError:
                raise
            except LedgerError as error:
                log.warning("removal_delayed", tenant_id=tenant_id, error=str(error))
                return
            if found is None:
                waits += 1
                await asyncio.sleep(WAIT_PAUSE_S)
            elif found.next_seq > next_seq or found.entries:
                waits, next_seq, count = 0, found.next_seq, count + found.entries
            else:
                break
        if count:
            self._emptied[tenant_id] = self._emptied.get(tenant_id, 0) + count
            self._wake_vacuum.set()

    async def vacuum(self) -> None:
        """Have the pages freed that removals emptied, until cancelled.

        Raises:
            DATABASE_FAULTS: PostgreSQL is not available.
        """
        while True:
            await self._wake_vacuum.wait()
            self._wake_vacuum.clear()
            while self._emptied:
                tenant_id, count = self._emptied.popitem()
                connection = await self.connect()
                try:
                    if await retention.vacuum(connection, tenant_id, count):
                        log.info("vacuumed", tenant_id=tenant_id, removed_entries=count)
                finally:
                    connection.terminate()

    async def _step(self, tenant_id: str, from_seq: int) -> retention.Removed | None:
        """One transaction, of what is covered from ``from_seq`` on. None if this must wait."""
        async with reading(self.pool, timeout_s=None) as connection, connection.transaction():
            known = await self.reader.read(connection, tenant_id)
            if known.floor is None or from_seq > known.floor_seq:
                return retention.Removed(0, from_seq)
            if await notary.tree_size(connection, tenant_id) < known.floor.seq:
                return None
            self.reader.departed.add(tenant_id)
            await retention.lock_jobs(connection, tenant_id)
            began_s = time.perf_counter()
            # PostgreSQL knows no signatures: what an entry that does not count would cover stays.
            removed = await retention.remove(
                connection, tenant_id, from_seq, known.floor_seq, self._entries_a_step, self.folds
            )
        if removed is None:
            return None
        times = min(2.0, max(0.5, STEP_S / (time.perf_counter() - began_s)))
        self._entries_a_step = min(ENTRIES_A_STEP_MAX, max(ENTRIES_A_STEP_MIN, int(self._entries_a_step * times)))
        return removed
