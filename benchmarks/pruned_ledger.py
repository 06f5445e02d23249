"""A ledger with one tenant whose entries leave: it is filled, archived into a folder by the node itself, and pruned."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import asyncpg

from benchmarks.bench import Bench, Database
from benchmarks.events import EVENTS_A_JOB, ndjson, stream
from benchmarks.http_client import Answer, Client, Target, get, post, put
from benchmarks.ledger_checks import wait_until_chained
from benchmarks.processes import tally_serve
from benchmarks.row import expect

TENANT = "bench"
PERIOD_S = 1
CONNECTIONS = 4
LINES_A_REQUEST = 2000
"""Whole lives of jobs, so that connections do not mix the events of one job."""
WAIT_TIMEOUT_S = 1800.0
POLL_S = 0.25
PROBE_PAUSE_S = 0.02
"""Between the answer to a probing write and the next one."""
LOCKS_POLL_S = 0.01
_WAITED_MS = """
SELECT coalesce(max(extract(epoch FROM clock_timestamp() - waiting.waitstart)), 0)::float * 1000
  FROM pg_locks AS waiting
 WHERE NOT waiting.granted AND waiting.waitstart IS NOT NULL AND EXISTS (
       SELECT FROM pg_stat_activity AS holder
        WHERE holder.pid = ANY(pg_blocking_pids(waiting.pid))
          AND (holder.backend_type = 'autovacuum worker' OR holder.query LIKE '%remove_covered%'
               OR EXISTS (SELECT FROM pg_locks AS held
                           WHERE held.pid = holder.pid AND held.granted AND held.mode = 'RowExclusiveLock'
                             AND held.relation = 'scheduler.departed_jobs'::regclass)))
"""
_FIRST = "SELECT min(seq) FROM scheduler.scheduler_log WHERE tenant_id = $1"


class Served(NamedTuple):
    """A ledger whose service is up."""

    database: Database
    archive: Path
    url: str


@contextmanager
def served_ledger(bench: Bench) -> Iterator[Served]:
    """A fresh ledger that archives each second."""
    with bench.fresh_database() as database, bench.fresh_folder() as folder:
        archive = folder / "archive"
        settings = {"TALLY_ARCHIVE__INTERVAL": "1s", "TALLY_ARCHIVE__URL": str(archive)}
        with tally_serve(database.service_url, folder / "node", settings) as url:
            yield Served(database, archive, url)


async def fill(url: str, name: str, entries: int) -> float:
    """Write the lives of jobs whose ids begin with ``name``; events a second until the last is chained."""
    clients = [await Client.connect(Target.of(url)) for _ in range(CONNECTIONS)]
    bodies = ndjson(((TENANT, event) for _, event in stream(name, entries // EVENTS_A_JOB)), LINES_A_REQUEST)
    began_s = time.perf_counter()

    async def send(client: Client) -> None:
        for body in bodies:
            await client.ask(post("/v1/events", body, "ndjson"))

    await asyncio.gather(*map(send, clients))
    await wait_until_chained(clients[0])
    took_s = time.perf_counter() - began_s
    for client in clients:
        client.close()
    return entries / took_s


async def set_period(url: str) -> None:
    """Let entries leave once they are older than ``PERIOD_S``."""
    await _asked(url, put(f"/v1/retention?tenant_id={TENANT}", json.dumps({"period": f"{PERIOD_S}s"}).encode()))


async def until_prunable(url: str) -> float:
    """Sign all, and wait until all may leave that is there now; how long that took."""
    began_s = time.perf_counter()
    to_seq = (await _asked(url, get(f"/v1/chain/head?tenant_id={TENANT}")))["seq"]
    await _asked(url, post("/v1/snapshots", json.dumps({"tenant_id": TENANT}).encode()), (200, 201))
    while (found := await _asked(url, get(f"/v1/retention?tenant_id={TENANT}")))["prunable_to_seq"] < to_seq:
        expect(time.perf_counter() - began_s < WAIT_TIMEOUT_S, f"seq {to_seq} may not leave: {found['stopped_by']}")
        await asyncio.sleep(POLL_S)
    return time.perf_counter() - began_s


async def prune(url: str, to_seq: int | None = None) -> dict[str, Any]:
    """Have entries leave; the answer."""
    wanted = {"tenant_id": TENANT, **({} if to_seq is None else {"to_seq": to_seq})}
    answer: dict[str, Any] = await _asked(url, post("/v1/prunes", json.dumps(wanted).encode()))
    expect(answer["seq"] is not None, f"nothing leaves: {answer['stopped_by']}")
    return answer


async def asked(url: str, request: bytes, statuses: Sequence[int] = (200,)) -> Answer:
    """The answer to one request, on a connection of its own: the service closes those that are idle for long."""
    client = await Client.connect(Target.of(url))
    try:
        answer = await client.answered(request)
        expect(answer.status in statuses, f"answered {answer.status}: {answer.body[:500].decode()}")
        return answer
    finally:
        client.close()


async def _asked(url: str, request: bytes, statuses: Sequence[int] = (200,)) -> Any:
    return json.loads((await asked(url, request, statuses)).body)


async def until_removed(database_url: str, to_seq: int) -> None:
    """Wait until no row up to ``to_seq`` is left."""
    connection = await asyncpg.connect(database_url)
    began_s = time.perf_counter()
    try:
        while (first := await first_seq(connection)) <= to_seq:
            expect(time.perf_counter() - began_s < WAIT_TIMEOUT_S, f"the rows from seq {first} on are not removed")
            await asyncio.sleep(POLL_S)
    finally:
        await connection.close()


async def first_seq(connection: asyncpg.Connection[asyncpg.Record]) -> int:
    """The first entry of the tenant that is there."""
    return int(await connection.fetchval(_FIRST, TENANT))


class Waits(NamedTuple):
    """What single writes of the tenant waited for, one after the other, until they were chained."""

    writes: int
    p50_ms: float
    longest_ms: float
    longest_lock_ms: float
    """The longest that a session waited for a lock of a removal or of autovacuum."""


@asynccontextmanager
async def probing(url: str, database_url: str, name: str) -> AsyncIterator[list[Waits]]:
    """Write a job each ``PROBE_PAUSE_S`` at GLOBAL meanwhile and watch locks; the list has the result afterwards."""
    found: list[Waits] = []
    stopped = asyncio.Event()
    writing = asyncio.create_task(_write(url, name, stopped))
    watching = asyncio.create_task(watch_locks(database_url, stopped))
    try:
        yield found
    finally:
        stopped.set()
        waits_ms, lock_ms = sorted(await writing), await watching
        found.append(
            Waits(len(waits_ms), round(waits_ms[len(waits_ms) // 2], 1), round(waits_ms[-1], 1), round(lock_ms, 1))
        )


async def _write(url: str, name: str, stopped: asyncio.Event) -> list[float]:
    client = await Client.connect(Target.of(url))
    waits_ms: list[float] = []
    while not stopped.is_set() or not waits_ms:
        job = {"tenant_id": TENANT, "job_id": f"{name}-{len(waits_ms)}", "durability": "GLOBAL"}
        request = post("/v1/jobs", json.dumps(job).encode())
        began_s = time.perf_counter()
        await client.ask(request, 201)
        waits_ms.append((time.perf_counter() - began_s) * 1000)
        await asyncio.sleep(PROBE_PAUSE_S)
    client.close()
    return waits_ms


async def watch_locks(database_url: str, stopped: asyncio.Event) -> float:
    """The longest that a session waits until ``stopped`` for a lock of a removal or of autovacuum, in ms. The two
    connections that chain wait for one another, prune or not."""
    connection = await asyncpg.connect(database_url)
    longest_ms = 0.0
    try:
        while not stopped.is_set():
            longest_ms = max(longest_ms, await connection.fetchval(_WAITED_MS))
            await asyncio.sleep(LOCKS_POLL_S)
    finally:
        await connection.close()
    return longest_ms
