"""``ingest_created``: a tenant's new jobs through ``POST /v1/events`` until chained and followed, against COPY.

The yardstick is that of ``ingest_ndjson``. The note has the processor time of an event, of service and PostgreSQL, all
their processes counted: between machines, and between hours of one machine, that is what compares.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from typing import NamedTuple

import asyncpg
import uvloop

from benchmarks.apart import apart
from benchmarks.bench import Bench, wait_for
from benchmarks.copied_rows import SEED_COLUMNS, read_back
from benchmarks.events import created
from benchmarks.http_client import Target
from benchmarks.ingest import CHAINED, ROWS_A_BATCH, Ingested, copied, seconds_until_chained
from benchmarks.ledger_checks import check_service
from benchmarks.processes import tally_serve
from benchmarks.processor_time import children_with, taken_s
from benchmarks.row import Outcome, Row, expect, interleave

TENANT = "bench"
CONNECTIONS = 4
LINES_A_REQUEST = 1000
EVENTS = 64_000
PAYLOAD_BYTES = 330
FOLLOWED_TIMEOUT_S = 60.0
POLL_S = 0.01
_FOLLOWED = "SELECT seq FROM scheduler.follower_positions WHERE follower = 'jobs' AND tenant_id = $1"


class Cost(NamedTuple):
    """Microseconds of processor time that one event took."""

    service_us: float
    postgres_us: float


def measure(bench: Bench) -> Outcome:
    """Service and COPY in turn; each COPY has the rows of the run before it."""
    ingested: list[Ingested] = []
    costs: list[Cost] = []

    def ours() -> float:
        ingested[:] = [_ingest(bench, costs)]
        return ingested[0].rate

    def against() -> float:
        return max(copied(bench, ingested[0], rows) for rows in (ROWS_A_BATCH, EVENTS))

    rates = interleave(bench, ours, against)
    service_us = statistics.median(cost.service_us for cost in costs)
    postgres_us = statistics.median(cost.postgres_us for cost in costs)
    return rates.outcome(
        f"{EVENTS:,} events; {service_us:.1f} us of the service an event, {postgres_us:.1f} of PostgreSQL"
    )


def _ingest(bench: Bench, costs: list[Cost]) -> Ingested:
    with bench.fresh_database() as database, bench.fresh_folder() as folder:
        with tally_serve(database.service_url, folder) as url:
            service, postgres = children_with("cli"), [bench.postgres_pid()]
            before = taken_s(service), taken_s(postgres)
            took_s = apart(_send, url, database.superuser_url)
            after = taken_s(service), taken_s(postgres)
            costs.append(Cost(*((end - begin) / EVENTS * 1e6 for begin, end in zip(before, after, strict=True))))
            wait_for(check_service(url, {TENANT: EVENTS}))
        bench.say(
            f"ours: {EVENTS / took_s:,.0f}/s, {costs[-1].service_us:.1f} and {costs[-1].postgres_us:.1f} us an event"
        )
        lines = wait_for(read_back(database.superuser_url, SEED_COLUMNS, CHAINED))
        return Ingested(EVENTS / took_s, {TENANT: EVENTS}, lines)


def _send(url: str, database_url: str) -> float:
    return uvloop.run(_send_all(Target.of(url), database_url))


async def _send_all(target: Target, database_url: str) -> float:
    """Seconds until all is chained and in the job table."""
    lines = list(created(TENANT, EVENTS, PAYLOAD_BYTES))
    bodies = [b"\n".join(lines[at : at + LINES_A_REQUEST]) for at in range(0, EVENTS, LINES_A_REQUEST)]
    database = await asyncpg.connect(database_url)
    try:
        chained_s = await seconds_until_chained(target, [bodies[first::CONNECTIONS] for first in range(CONNECTIONS)])
        began_s = time.perf_counter()
        while await database.fetchval(_FOLLOWED, TENANT) != EVENTS:
            expect(
                time.perf_counter() - began_s < FOLLOWED_TIMEOUT_S, "the job table does not reach the end of the chain"
            )
            await asyncio.sleep(POLL_S)
        return chained_s + time.perf_counter() - began_s
    finally:
        await database.close()


ROW = Row(
    "ingest_created",
    "events/s",
    0.24,
    f"POST /v1/events, one tenant, {CONNECTIONS} connections, {LINES_A_REQUEST:,} JobCreated of {PAYLOAD_BYTES} "
    "bytes a request, until chained and in the job table, against COPY of the same events as in ingest_ndjson",
    measure,
)
