"""``ingest_ndjson``: ``POST /v1/events`` until the last row is chained, against COPY of the very same events.

The rows that the service chained are read back as the bytes of COPY, and go into the table and indexes of
``yardsticks/seed_log.sql`` in a fresh database: in batches of 2000, each a transaction, and all in one transaction. The
faster of the two is what we are compared with; its client has nothing to do but send bytes.
"""

from __future__ import annotations

import asyncio
import base64
import json
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import uvloop

from app.runtime.state.session import MAC_BYTES
from benchmarks.apart import apart
from benchmarks.bench import Bench, expect_fsyncs, wait_for
from benchmarks.copied_rows import SEED_COLUMNS, copy, count_rows, read_back
from benchmarks.events import EVENTS_A_JOB, TENANTS, ndjson, stream
from benchmarks.http_client import Client, Target, post
from benchmarks.ledger_checks import check_service, wait_until_chained
from benchmarks.processes import tally_serve
from benchmarks.row import Outcome, Row, expect, interleave

CONNECTIONS = 4
JOBS_A_CONNECTION = 2000
LINES_A_REQUEST = 2000
EVENTS = CONNECTIONS * JOBS_A_CONNECTION * EVENTS_A_JOB
ROWS_A_BATCH = 2000
_WARM_UP_TENANT = "warm-up"

CHAINED = f"WHERE tenant_id <> '_system' AND tenant_id <> '{_WARM_UP_TENANT}' ORDER BY id"


class Ingested(NamedTuple):
    """What one run of the service took, and the rows it made: lines of COPY's text format, in chained order."""

    rate: float
    entries: Mapping[str, int]
    lines: list[bytes]


def measure(bench: Bench) -> Outcome:
    """Service and COPY in turn; each COPY has the rows of the run before it."""
    ingested: list[Ingested] = []
    faster = Counter[str]()

    def ours() -> float:
        ingested[:] = [_ingest(bench)]
        return ingested[0].rate

    def against() -> float:
        batches, whole = copied(bench, ingested[0], ROWS_A_BATCH), copied(bench, ingested[0], EVENTS)
        bench.say(f"COPY in batches of {ROWS_A_BATCH}: {batches:,.0f}/s, in one transaction: {whole:,.0f}/s")
        faster[f"batches of {ROWS_A_BATCH}" if batches > whole else "one transaction"] += 1
        return max(batches, whole)

    rates = interleave(bench, ours, against)
    how = ", ".join(f"{way} {times} times" for way, times in faster.items())
    return rates.outcome(f"{EVENTS:,} events; the faster COPY was: {how}")


def _ingest(bench: Bench) -> Ingested:
    with bench.fresh_database() as database, bench.fresh_folder() as folder:
        with tally_serve(database.service_url, folder) as url:
            rate, entries = apart(send, url)
            syncs = wait_for(check_service(url, entries))
        bench.say(f"ours: {rate:,.0f}/s; {syncs}")
        return Ingested(rate, entries, wait_for(read_back(database.superuser_url, SEED_COLUMNS, CHAINED)))


def send(url: str) -> tuple[float, dict[str, int]]:
    """(events a second until the last is chained, entries by tenant)."""
    return uvloop.run(_send_all(Target.of(url)))


async def _send_all(target: Target) -> tuple[float, dict[str, int]]:
    entries = Counter[str]()
    bodies: list[list[bytes]] = []
    for number in range(CONNECTIONS):
        entries.update(tenant for tenant, _ in stream(f"stream{number}", JOBS_A_CONNECTION))
        bodies.append(list(ndjson(stream(f"stream{number}", JOBS_A_CONNECTION), LINES_A_REQUEST)))
    return EVENTS / await seconds_until_chained(target, bodies), dict(entries)


async def seconds_until_chained(target: Target, bodies: Sequence[Sequence[bytes]]) -> float:
    """How long the service takes for bodies of ``POST /v1/events``, a connection a list, until all is chained."""
    requests = [[post("/v1/events", body, "ndjson") for body in each] for each in bodies]
    return await seconds_until_answered_and_chained(target, requests)


async def seconds_until_answered_and_chained(target: Target, requests: Sequence[Sequence[bytes]]) -> float:
    """The same, of requests."""
    clients = [await Client.connect(target) for _ in requests]
    warm_up = json.dumps({"tenant_id": _WARM_UP_TENANT, "type": "JobCreated"}).encode()
    await clients[0].ask(post("/v1/events", warm_up, "ndjson"))
    last_lsn = 0

    async def send(client: Client, mine: Sequence[bytes]) -> None:
        nonlocal last_lsn
        for request in mine:
            answer = json.loads((await client.ask(request)).body)
            last_lsn = max(last_lsn, _lsn_of(answer["session"]))

    began_s = time.perf_counter()
    await asyncio.gather(*map(send, clients, requests))
    chained_lsn = await wait_until_chained(clients[0])
    took_s = time.perf_counter() - began_s
    expect(chained_lsn >= last_lsn, f"LSN {last_lsn} was answered, the chain has {chained_lsn}")
    for client in clients:
        client.close()
    return took_s


def copied(bench: Bench, ingested: Ingested, rows_a_batch: int) -> float:
    """Rows a second of COPY, in transactions of so many, into a fresh database."""
    lines = ingested.lines
    expect(len(lines) == sum(ingested.entries.values()), f"{len(lines)} rows were read back, not all")
    with bench.yardstick_database("seed_log") as url:
        before = bench.postgres_fsyncs()
        took_s = uvloop.run(copy(url, SEED_COLUMNS, lines, rows_a_batch))
        expect_fsyncs(bench, before, -(-len(lines) // rows_a_batch), "COPY")
        expect(wait_for(count_rows(url)) == ingested.entries, "COPY stored other rows than the service")
    return len(lines) / took_s


assert len(TENANTS) == 10
ROW = Row(
    "ingest_ndjson",
    "events/s",
    0.53,
    f"POST /v1/events, 10 tenants, {CONNECTIONS} connections, {LINES_A_REQUEST} lines a request, until the last row is "
    "chained, against COPY of the same events into the table and indexes that were first asked for, no service: the "
    "faster of one transaction and batches of 2000",
    measure,
)


def _lsn_of(session: str) -> int:
    """The LSN that a session token names: ``t2 {node_id} {epoch} {lsn} {hlc}``, then its MAC."""
    return int(base64.urlsafe_b64decode(session + "=" * (-len(session) % 4))[:-MAC_BYTES].split()[3])
