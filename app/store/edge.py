"""SQL of the edge: the lookups of a request before its event may enter the WAL."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import NamedTuple

import asyncpg

from app.store import Connection, idempotency
from app.store.departed import departed
from app.store.entry_check import Report
from app.store.idempotency import ChainedLine, KeyedEntry
from app.store.jobs import table as job_table
from app.store.jobs.table import JobFolds, JobKey
from app.store.reading import reading, run_in, whole
from app.store.reads import find_refusal
from ledger.errors import ChainDamagedError
from ledger.machines import jobs
from ledger.machines.job_fold import creation_of
from ledger.machines.jobs import JobState

_ENTRY_COLUMN = ChainedLine._fields.index("t_hlc")
"""Index of the first column of the entry in a line."""
LOOKUP_TIMEOUT_S = 5.0
"""Longest that one lookup may take, the wait for a connection included."""
LOOKUPS_AT_ONCE = 2
"""Concurrent lookups of jobs; requests that arrive meanwhile share the next one. More lookups would open more
connections, each of which plans the statements again. With a single one a large request could block all others."""


class ChainedJob(NamedTuple):
    """The state of one job by its entries up to ``seq``.

    ``ended`` is why it accepts no more events, None while it does. ``creation`` is the ``creation_digest`` of its first
    creation, None if there is none yet or it holds sealed values, which cannot be compared. ``is_made`` is False if
    PostgreSQL rejected the job's creation: it may still be created.
    """

    fence_token: int
    ended: str | None
    creation: str | None
    seq: int = 0
    is_made: bool = True


class EdgeLookups:
    """Which jobs exist, and which keyed lines are chained. All raise DatabaseUnavailableError."""

    def __init__(self, pool: asyncpg.Pool[asyncpg.Record], folds: JobFolds, report: Report) -> None:
        """``report`` is called with the error of each entry that is not as it was chained."""
        self._pool = pool
        self._folds = folds
        self._report = report
        self._waiting: list[tuple[Sequence[JobKey], asyncio.Future[dict[JobKey, ChainedJob]]]] = []
        self._lookups: set[asyncio.Task[None] | None] = set()

    async def find_jobs(self, wanted: Sequence[JobKey]) -> dict[JobKey, ChainedJob]:
        """The chained state of each (tenant, job id), by the entries of the job and never by its row in the job table.
        If a job's entries are damaged, only its existence is known: the damage is reported, and its events are
        recorded."""
        loop = asyncio.get_running_loop()
        found: asyncio.Future[dict[JobKey, ChainedJob]] = loop.create_future()
        self._waiting.append((wanted, found))
        if len(self._lookups) < LOOKUPS_AT_ONCE:
            self._lookups.add(loop.create_task(self._look_up()))
        return await found

    async def _look_up(self) -> None:
        """Answer waiting requests until there are none."""
        try:
            while asking := self._waiting:
                self._waiting = []
                try:
                    async with reading(self._pool, timeout_s=LOOKUP_TIMEOUT_S) as connection:
                        known = await self._find_jobs(
                            connection, [*dict.fromkeys(job for jobs, _ in asking for job in jobs)]
                        )
                        # Before the connection is released, which takes some turns of the event loop.
                        for wanted, found in asking:
                            if not found.done():
                                found.set_result({job: known[job] for job in wanted if job in known})
                except Exception as error:
                    for _, found in asking:
                        if not found.done():
                            found.set_exception(error)
        finally:
            # Now, and not by a callback one turn later: a request in between would wait for a lookup that has ended.
            self._lookups.discard(asyncio.current_task())

    async def newest_keyed(self, tenant_id: str) -> list[KeyedEntry]:
        """Entries with a key among the last entries of the tenant."""
        return await run_in(reading(self._pool, timeout_s=LOOKUP_TIMEOUT_S), idempotency.newest_keyed, tenant_id)

    async def _find_jobs(self, connection: Connection, wanted: Sequence[JobKey]) -> dict[JobKey, ChainedJob]:
        found, created = {}, set()
        mentioned, refused = await job_table.mentioned(connection, wanted)
        read = await self._folds.read(connection, mentioned, report=lambda error: self._report(error, "job_lookup"))
        for job in read:
            tenant_id, job_id, *_ = job.span
            try:
                if not job.entries and job.known.state is None:
                    raise ChainDamagedError(tenant_id, f"job {job_id} is in the job table and has no entries")
                state = (await self._folds.fold(connection, job)).state
            except ChainDamagedError as error:
                if await departed(connection, [(tenant_id, job_id)]):
                    continue  # it left after it was found
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
        lines = await run_in(
            reading(self._pool, timeout_s=LOOKUP_TIMEOUT_S), idempotency.find_lines, tenants, route, key
        )
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
