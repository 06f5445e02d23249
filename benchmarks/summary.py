"""``summary_1m``: ``GET /v1/jobs/summary`` of a tenant of 1,000,000 jobs, whichever way they are grouped.

The rows of the jobs go where the follower of the job table puts those of new jobs, by the same function, which counts
them: whole lives through the service would take minutes. The jobs are of 30 days, which begin and end within periods of
the figures, and their run times are spread over four powers of ten, so that all cells are there and are full. Requests
come one by one, so on a machine that does nothing else a request takes the processor time of service and PostgreSQL,
which is what is compared: that of the dearest grouping. The note has the medians by the clock.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any, NamedTuple

import asyncpg

from app.store.jobs import table as job_table
from benchmarks.bench import Bench, wait_for
from benchmarks.http_client import Client, Target, post
from benchmarks.load import followed
from benchmarks.processes import tally_serve
from benchmarks.processor_time import children_with, taken_s
from benchmarks.row import Outcome, Row, expect
from ledger.machines.job_figures import HOUR_MS
from ledger.machines.job_fold import JobFold
from ledger.verification.projection_check import job_row

TENANT = "bench"
JOBS = 1_000_000
JOBS_AT_ONCE = 20_000
DAYS = 30
BEGIN_MS = 473_005 * HOUR_MS
MEDIAN_RUN_MS = 60_000
SIGMA = 1.7
"""Of the logarithm of run times."""
DCS = ("use1", "euw1", "aps1")
ERRORS = tuple(f"exit code {number}" for number in range(20))
REQUESTS = 30
MS_MAX = 50.0
SINCE, UNTIL = "2023-12-19T07:30:00Z", "2024-01-14T15:30:00Z"
"""Within the 30 days."""
QUERIES = (
    *(f"by={by}" for by in ("status", "hour", "day", "dc", "error")),
    "by=hour&limit=200",
    "by=hour&limit=1000",
    f"by=status&since={SINCE}&until={UNTIL}",
    f"by=day&since={SINCE}&until={UNTIL}",
    f"by=error&dc=use1&since={SINCE}&until={UNTIL}",
)


def measure(bench: Bench) -> Outcome:
    """Milliseconds of the dearest grouping, against ``MS_MAX``."""
    with (
        bench.fresh_database() as database,
        bench.fresh_folder() as folder,
        tally_serve(database.service_url, folder) as url,
    ):
        processes = [*children_with("cli"), bench.postgres_pid()]
        took, filled_s = wait_for(_ask(url, database.superuser_url, processes))
    dearest_ms = max(each.used_ms for each in took.values())
    each = ", ".join(
        f"{query.partition('&since')[0]}{'*' * ('since' in query)} {ms.used_ms:.0f}, {ms.median_ms:.0f}"
        for query, ms in took.items()
    )
    note = f"{JOBS:,} jobs of {DAYS} days, stored in {filled_s:.0f} s; ms used, and by the clock: {each} (*: some days)"
    return Outcome(dearest_ms, MS_MAX, MS_MAX / dearest_ms, REQUESTS, note)


class _Took(NamedTuple):
    """Milliseconds of one request: of processors, and the median by the clock."""

    used_ms: float
    median_ms: float


async def _ask(url: str, database_url: str, processes: list[int]) -> tuple[dict[str, _Took], float]:
    """What a request takes by query, and the seconds in which the jobs were stored."""
    client = await Client.connect(Target.of(url))
    await client.ask(post("/v1/jobs", b'{"tenant_id":"%s","durability":"GLOBAL"}' % TENANT.encode()), 201)
    await followed(url)
    client.close()
    began_s = time.perf_counter()
    await _fill(database_url)
    filled_s = time.perf_counter() - began_s
    client = await Client.connect(Target.of(url))
    try:
        return {query: await _took(client, query, processes) for query in QUERIES}, filled_s
    finally:
        client.close()


async def _took(client: Client, query: str, processes: list[int]) -> _Took:
    clock_s, used_s = [], taken_s(processes)
    for _ in range(REQUESTS):
        began_s = time.perf_counter()
        found = await client.get(f"/v1/jobs/summary?tenant_id={TENANT}&{query}")
        clock_s.append(time.perf_counter() - began_s)
        expect("&" in query or found["all"]["jobs"] == JOBS + 1, f"{found['all']['jobs']} jobs are counted")
        expect(bool(found["groups"]), f"there are no groups {query}")
    used_s = taken_s(processes) - used_s
    return _Took(used_s / REQUESTS * 1000, statistics.median(clock_s) * 1000)


async def _fill(database_url: str) -> None:
    connection = await asyncpg.connect(database_url)
    try:
        numbers = random.Random(1)
        for first in range(0, JOBS, JOBS_AT_ONCE):
            rows = _piece(numbers, range(first, first + JOBS_AT_ONCE))
            async with connection.transaction():
                expect(await job_table.add(connection, rows), "a job is there already")
            await asyncio.sleep(0)
        await connection.execute("VACUUM (ANALYZE) scheduler.job_figures")
    finally:
        await connection.close()


async def _piece(numbers: random.Random, jobs: range) -> AsyncIterator[list[tuple[Any, ...]]]:
    yield [(TENANT, *row) for row in _rows(numbers, jobs)]


def _rows(numbers: random.Random, jobs: range) -> Iterator[tuple[Any, ...]]:
    """Rows of jobs at the first entry of the chain, as it has no others."""
    for number in jobs:
        at_ms = BEGIN_MS + number * DAYS * 24 * HOUR_MS // JOBS
        run_ms = int(numbers.lognormvariate(0, SIGMA) * MEDIAN_RUN_MS)
        dc, kind = numbers.choice(DCS), numbers.random()
        fold = JobFold(f"job-{number:07d}")
        fold.add("ENQUEUE", {"assigned_dcs": [dc]}, (at_ms, 0, "n"), "", 1)
        fold.add("DEQUEUE", {"dc_id": dc}, (at_ms + 1000, 0, "n"), "", 1)
        if kind < 0.9:
            fold.add("COMPLETE", {}, (at_ms + 1000 + run_ms, 0, "n"), "", 1)
        elif kind < 0.97:
            fold.add("FAIL", {"error": numbers.choice(ERRORS)}, (at_ms + 1000 + run_ms, 0, "n"), "", 1)
        yield job_row(fold.state())


ROW = Row(
    "summary_1m",
    "ms",
    1.0,
    f"GET /v1/jobs/summary of a tenant of {JOBS:,} jobs: processor time of the dearest of its groupings, against "
    f"{MS_MAX:.0f} ms",
    measure,
)
