"""Removes the rows that PRUNED entries cover, in small transactions, whichever node or process wrote the entry.

For each tenant whose chain begins at or below what such an entry covers::

    1. the entry counts, by an admitted key, and the stored tree covers it
    2. ENTRIES_A_STEP rows leave, with the rows of their jobs, in one transaction     until none is left

Nothing is remembered between two steps: a process that dies leaves the rest to the next search of any node. Two nodes
at once take turns, by the lock of the follower's position.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

import structlog

from app.runtime.postgres import DATABASE_FAULTS, text_of
from app.runtime.tasks import paced
from app.store import notary, retention
from app.store.departed import departed_tenants
from app.store.job_table import JobFolds
from app.store.reading import Pool, reading
from app.trust.retention import RetentionReader
from ledger.errors import ChainDamagedError, DatabaseUnavailableError, LedgerError

SEARCH_INTERVAL_S: Final = 30.0
"""Pause between two searches for covered rows, which a prune at this node ends."""
ENTRIES_A_STEP: Final = 1000
"""Rows of one transaction."""
SHARE: Final = 0.5
"""Largest share of the time that removing takes, so that writes and autovacuum keep up."""
WAIT_PAUSE_S: Final = 0.2
"""Pause where another session follows or removes entries of a chain, or the tree has not reached the PRUNED entry."""
WAITS_MAX: Final = 50
"""Such pauses for one tenant before the next search continues."""

log = structlog.get_logger()


@dataclass(kw_only=True, eq=False)
class Removal:
    """Removes rows for one node; belongs to its event loop."""

    pool: Pool
    reader: RetentionReader
    folds: JobFolds
    report: Callable[[ChainDamagedError, str], object]

    def __post_init__(self) -> None:
        self._wake = asyncio.Event()

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
                for tenant_id in covered:
                    await self._remove(tenant_id)
            except (DatabaseUnavailableError, *DATABASE_FAULTS) as error:
                log.warning("removal_delayed", error=text_of(error))
            with suppress(TimeoutError):
                async with asyncio.timeout(SEARCH_INTERVAL_S):
                    await self._wake.wait()

    async def _remove(self, tenant_id: str) -> None:
        """Remove all covered rows of one tenant, if the entry that covers them counts."""
        waits = 0
        while waits < WAITS_MAX:
            try:
                async with paced(SHARE):
                    left = await self._step(tenant_id)
            except ChainDamagedError as error:
                self.report(error, "retention")
                return
            except DatabaseUnavailableError:
                raise
            except LedgerError as error:
                log.warning("removal_delayed", tenant_id=tenant_id, error=str(error))
                return
            if left is None:
                waits += 1
                await asyncio.sleep(WAIT_PAUSE_S)
            elif not left:
                return

    async def _step(self, tenant_id: str) -> bool | None:
        """One transaction. Returns whether more may be left, None if this must wait."""
        async with reading(self.pool, timeout_s=None) as connection, connection.transaction():
            known = await self.reader.read(connection, tenant_id)
            if known.floor is None:
                return False
            if await notary.tree_size(connection, tenant_id) < known.floor.seq:
                return None
            self.reader.departed.add(tenant_id)
            # PostgreSQL knows no signatures: what an entry that does not count would cover stays.
            removed = await retention.remove(connection, tenant_id, known.floor.to_seq, ENTRIES_A_STEP, self.folds)
        return None if removed is None else removed > 0
