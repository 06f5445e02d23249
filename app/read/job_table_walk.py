"""Compares the job table with the chains, at a bounded share of the time: what lists answer on its word.

A read of a job, and a list that names it, compare its row with its entries. A list of one status is not shown the rows
that claim another one, so a false status hides a job from it. Here every row is compared, whoever asks::

    every INTERVAL_S, for each tenant, as far as the table has followed
      RANGE_ENTRIES of the log at a time: the jobs whose last entry is among them
        all entries of each are folded, and its row MUST be what they fold to

A row that is not is reported, and written again from the entries. Rows of jobs that have no entry are found by
verification.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

import asyncpg
import structlog

from app.read.folded_jobs import FoldedJobs
from app.runtime.tasks.running import paced
from app.store import job_table
from app.store.chain_reads import list_tenants
from app.store.reading import reading
from ledger.errors import ChainDamagedError, DatabaseUnavailableError

if TYPE_CHECKING:
    from app.store.reading import Pool

SHARE: Final = 0.02
"""Most of the time that the walk takes, waiting for the database included."""
INTERVAL_S: Final = 3600.0
"""Rest between two walks over all tenants, and before one goes on that the database interrupted."""
RANGE_ENTRIES: Final = 500
"""Entries of the log whose jobs are compared at a time."""

log = structlog.get_logger()


class JobTableWalk:
    """The walk of one node; belongs to its event loop."""

    def __init__(self, pool: Pool, folded: FoldedJobs, report: Callable[[ChainDamagedError, str], object]) -> None:
        self._pool = pool
        self._folded = folded
        self._report = report
        self.walks_done = 0

    async def run(self) -> None:
        """Walk again and again; ends by cancellation."""
        while True:
            try:
                async with reading(self._pool) as connection:
                    tenants = await list_tenants(connection)
                for tenant_id in tenants:
                    await self._walk(tenant_id)
                self.walks_done += 1
            except (DatabaseUnavailableError, asyncpg.DataError) as error:
                log.warning("job_table_walk_delayed", error=str(error))
            await asyncio.sleep(INTERVAL_S)

    async def _walk(self, tenant_id: str) -> None:
        after_seq = 0
        while True:
            async with paced(SHARE):
                try:
                    async with reading(self._pool, snapshot=True) as connection:
                        place = await job_table.place(connection, tenant_id)
                        if place is None or after_seq >= place.seq:
                            return
                        to_seq = min(after_seq + RANGE_ENTRIES, place.seq)
                        found = await job_table.jobs_ending(connection, tenant_id, after_seq, to_seq, place.seq)
                        stored = await job_table.rows_of(connection, tenant_id, found)
                        met = await self._folded.compare(connection, tenant_id, stored, place.seq)
                except ChainDamagedError as error:
                    self._report(error, "job_table_walk")
                    return
            for each in met:
                self._report(each, "job_table_walk")
            after_seq = to_seq
