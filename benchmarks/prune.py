"""``prune``: single ``POST /v1/jobs`` on 64 connections while pruned entries of the same tenant are removed.

A ledger is filled and archived. Then, in each run, a part of it is pruned; the load goes once the first of its rows are
removed, and again when all are gone. So both sides have the same node, and nearly the same seconds.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from typing import NamedTuple

import asyncpg
import uvloop

from benchmarks.apart import apart
from benchmarks.bench import Bench
from benchmarks.events import job_requests
from benchmarks.http_client import post
from benchmarks.load import Load, Side, drive_once, followed
from benchmarks.pruned_ledger import (
    TENANT,
    fill,
    first_seq,
    prune,
    served_ledger,
    set_period,
    until_prunable,
    until_removed,
    watch_locks,
)
from benchmarks.row import RUNS_OF_LIKE, Outcome, Rates, Row, expect

ENTRIES_A_RUN = 120_000
"""More than are removed while the load goes."""
WINDOW_S = 2.0
REQUESTS = 2000
POLL_S = 0.02


class Run(NamedTuple):
    """What one prune saw."""

    during: Load
    without: Load
    removed_per_second: float
    longest_lock_ms: float


def measure(bench: Bench) -> Outcome:
    """Rates of the load while rows go, and without."""
    with served_ledger(bench) as ledger:
        runs = apart(_measure, ledger.url, ledger.database.superuser_url)
    for run in runs:
        bench.say(f"while {run.removed_per_second:,.0f} entries/s go: {run.during}; without: {run.without}")
    ratio = statistics.median(run.during.rate / run.without.rate for run in runs)
    removed = statistics.median(run.removed_per_second for run in runs)
    waited_ms = max(run.longest_lock_ms for run in runs)
    p99_ms = statistics.median(run.during.p99_ms for run in runs), statistics.median(run.without.p99_ms for run in runs)
    rates = Rates([run.during.rate for run in runs], [run.without.rate for run in runs])
    outcome = rates.outcome(
        f"{removed:,.0f} entries/s removed meanwhile; p99 {p99_ms[0]:.1f} ms against {p99_ms[1]:.1f} ms; longest wait "
        f"for a lock of the removal {waited_ms:.0f} ms"
    )
    return outcome._replace(ratio=ratio)


def _measure(url: str, database_url: str) -> list[Run]:
    return uvloop.run(_measure_all(url, database_url))


async def _measure_all(url: str, database_url: str) -> list[Run]:
    await fill(url, "prune", RUNS_OF_LIKE * ENTRIES_A_RUN)
    await set_period(url)
    await until_prunable(url)
    side = Side(url, _jobs, settle=followed)
    database = await asyncpg.connect(database_url)
    runs: list[Run] = []
    try:
        await drive_once(side, WINDOW_S)
        for number in range(1, RUNS_OF_LIKE + 1):
            done = await prune(url, number * ENTRIES_A_RUN)
            stopped = asyncio.Event()
            watching = asyncio.create_task(watch_locks(database_url, stopped))
            while (first := await first_seq(database)) <= done["from_seq"]:
                await asyncio.sleep(POLL_S)
            began_s = time.perf_counter()
            during = await drive_once(side, WINDOW_S)
            last, took_s = await first_seq(database), time.perf_counter() - began_s
            stopped.set()
            expect(first < last <= done["to_seq"], f"of seq {first} to {done['to_seq']} rows went up to {last}")
            await until_removed(database_url, done["to_seq"])
            runs.append(Run(during, await drive_once(side, WINDOW_S), (last - first) / took_s, await watching))
    finally:
        await database.close()
    return runs


def _jobs() -> list[bytes]:
    return [post("/v1/jobs", body) for body in job_requests(TENANT, "LOCAL", REQUESTS)]


ROW = Row(
    "prune",
    "requests/s",
    0.8,
    "POST /v1/jobs at LOCAL, 64 connections, while rows of entries of the same tenant that were pruned are removed, "
    "against the same when they are gone",
    measure,
)
