"""SQL of the edge: what a request must ask before its event may enter the WAL."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import NamedTuple

import asyncpg

from app.store import Connection, idempotency, job_table
from app.store.entry_check import Report
from app.store.idempotency import ChainedLine, KeyedEntry
from app.store.job_table import JobFolds, JobKey
from app.store.reading import reading, whole
from app.store.reads import find_refusal
from ledger.errors import ChainDamagedError
from ledger.machines import jobs
from ledger.machines.job_fold import creation_of
from ledger.machines.jobs import JobState

_ENTRY_COLUMN = ChainedLine._fields.index("t_hlc")
"""Where the columns of the entry begin in a line."""
LOOKUP_TIMEOUT_S = 5.0
"""Longest that one lookup may take, the wait for a connection included."""
LOOKUPS_AT_ONCE = 2
"""Lookups of jobs under way together: who comes meanwhile asks with the next one. More would open more connections,
each of which plans the statements anew; a single one could be kept long by a large request."""


class ChainedJob(NamedTuple):
    """What the chain says of one job, with its entries up to ``seq``.

    ``ended`` is why it takes no more events, None while it does; ``creation`` is the ``creation_digest`` of its first
    creation; None where there is none yet, or it holds sealed values, which can be compared with nothing.
    ``is_made`` is False of a job whose creation PostgreSQL refused: it may be created still.
    """

    fence_token: int
    ended: str | None
    creation: str | None
    seq: int = 0
    is_made: bool = True


class EdgeLookups:
    """Which jobs exist, and which keyed lines are chained. All raise DatabaseUnavailableError."""

    def __init__(self, pool: asyncpg.Pool[asyncpg.Record], folds: JobFolds, report: Report) -> None:
        """``report`` is given the error about each entry that is not what was chained."""
        self._pool = pool
        self._folds = folds
        self._report = report
        self._waiting: list[tuple[Sequence[JobKey], asyncio.Future[dict[JobKey, ChainedJob]]]] = []
        self._lookups: set[asyncio.Task[None] | None] = set()

    async def find_jobs(self, wanted: Sequence[JobKey]) -> dict[JobKey, ChainedJob]:
        """What is chained of each (tenant, job id), by the entries of the job: its row in the job table counts for
        nothing. Of a job whose entries somebody damaged nothing is known but that it is there: that is reported, and
        its events are recorded."""
        loop = asyncio.get_running_loop()
        found: asyncio.Future[dict[JobKey, ChainedJob]] = loop.create_future()
        self._waiting.append((wanted, found))
        if len(self._lookups) < LOOKUPS_AT_ONCE:
            self._lookups.add(loop.create_task(self._look_up()))
        return await found

    async def _look_up(self) -> None:
        """Answer all who wait, until nobody does."""
        try:
            await self._answer_all()
        finally:
            # Now, and not by a callback one turn later: who comes in between would wait for what has ended.
            self._lookups.discard(asyncio.current_task())

    async def _answer_all(self) -> None:
        while asking := self._waiting:
            self._waiting = []
            try:
                async with reading(self._pool, timeout_s=LOOKUP_TIMEOUT_S) as connection:
                    known = await self._find_jobs(
                        connection, [*dict.fromkeys(job for jobs, _ in asking for job in jobs)]
                    )
                    # Before the connection is given back, which takes some passes of the event loop.
                    for wanted, found in asking:
                        if not found.done():
                            found.set_result({job: known[job] for job in wanted if job in known})
            except Exception as error:
                for _, found in asking:
                    if not found.done():
                        found.set_exception(error)

    async def newest_keyed(self, tenant_id: str) -> list[KeyedEntry]:
        """The keyed ones among the last entries of the tenant."""
        async with reading(self._pool, timeout_s=LOOKUP_TIMEOUT_S) as connection:
            return await idempotency.newest_keyed(connection, tenant_id)

    async def _find_jobs(self, connection: Connection, wanted: Sequence[JobKey]) -> dict[JobKey, ChainedJob]:
        found, created = {}, set()
        mentioned, refused = await job_table.mentioned(connection, wanted)
        for job in await self._folds.read(connection, mentioned):
            tenant_id, job_id, *_ = job.span
            try:
                if not job.entries and job.known.state is None:
                    raise ChainDamagedError(tenant_id, f"job {job_id} is in the job table and has no entries")
                state, _ = await self._folds.fold(connection, job)
            except ChainDamagedError as error:
                self._report(error, "job_lookup")
                state = JobState(job_id, (0, 0, ""), 0, 0)
            if state is not None:
                found[tenant_id, job_id] = _chained_job(state)
                created.update([(tenant_id, job_id)] if state.created is not None else [])
        for tenant_id, job_id in set(refused) - created:
            refusal = await find_refusal(connection, self._folds.check, tenant_id, job_id)
            if refusal is not None and refusal.is_creation:
                found[tenant_id, job_id] = ChainedJob(0, refusal.text(), None, is_made=False)
        return found

    async def find_lines(self, tenants: Sequence[str], route: int, key: str) -> list[ChainedLine]:
        """Chained lines of a keyed request, in line order.

        Raises:
            ChainDamagedError: a row names no entry, or one with a column that is NULL.
        """
        async with reading(self._pool, timeout_s=LOOKUP_TIMEOUT_S) as connection:
            lines = await idempotency.find_lines(connection, tenants, route, key)
        for line in lines:
            if line[_ENTRY_COLUMN:] == (None,) * (len(line) - _ENTRY_COLUMN):
                raise idempotency.key_row_error(
                    line.tenant_id, key, line.seq, f"names seq {line.seq}, and no entry stands there"
                )
        return [whole(line.tenant_id, line, ("prev_chain_link",)) for line in lines]


def _chained_job(state: JobState) -> ChainedJob:
    created = state.created
    return ChainedJob(
        state.fence,
        jobs.ended_text(jobs.status(state), state.refused),
        None if created is None else creation_of(created.spec, created.assigned_dcs),
        state.last_seq,
    )
