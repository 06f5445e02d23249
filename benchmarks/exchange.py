"""Ledgers of regions that exchange, each a service with a database of its own on the same PostgreSQL.

``exchange_lag_s``: how long after it is chained in one ledger an entry is chained in the other of two. For half a
minute 5,000 events a second come in at one, evenly, over 10 tenants, in requests of 500 lines. Ten times a second both
are asked how many entries they have; the time from when one had chained as many as the other has imported is the lag.

``exchange_global_p50`` and ``_p99``: how long a write waits that is acknowledged once a majority of three ledgers has
it. For 20 s 50 jobs a second are submitted at one, evenly, each counted from the moment at which it was due.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import time
import urllib.request
from bisect import bisect_left
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import lru_cache

import orjson
import uvloop

from app.dev.cluster import free_port
from benchmarks.apart import apart
from benchmarks.bench import Bench
from benchmarks.events import TENANTS, job_events
from benchmarks.http_client import Client, Target, post
from benchmarks.processes import tally_serve
from benchmarks.row import Outcome, Row, expect

EVENTS_A_SECOND = 5000
SECONDS = 30
LINES_A_REQUEST = 500
LOOK_S = 0.1
CAUGHT_UP_TIMEOUT_S = 60.0
LAG_S_MAX = 5.0
REGIONS = ("use1", "euw1", "aps1")
WRITES_A_SECOND = 50
WRITE_SECONDS = 20
WRITERS = 64
"""Connections, more than writes that wait at once."""
P50_S_MAX, P99_S_MAX = 0.15, 0.3


@contextmanager
def _ledgers(bench: Bench, count: int) -> Iterator[list[str]]:
    """The addresses of so many ledgers that exchange, each of whose GLOBAL writes waits for a majority."""
    with ExitStack() as stack:
        regions = REGIONS[:count]
        folders = [stack.enter_context(bench.fresh_folder()) for _ in regions]
        databases = [stack.enter_context(bench.fresh_database()).service_url for _ in regions]
        urls = {region: f"http://127.0.0.1:{free_port()}" for region in regions}
        trusted = folders[0] / "trusted"
        trusted.mkdir()
        for region, folder, database in zip(regions, folders, databases, strict=True):
            with tally_serve(database, folder / "data") as url:
                (trusted / f"{region}.json").write_bytes(_keys(url))
        for region, folder, database in zip(regions, folders, databases, strict=True):
            peers = [{"url": url, "region": other} for other, url in urls.items() if other != region]
            settings = {
                "TALLY_REGION": region,
                "TALLY_PORT": urls[region].rsplit(":", 1)[1],
                "TALLY_BUNDLE__TRUSTED_KEYS": str(trusted),
                "TALLY_EXCHANGE__PEERS": json.dumps(peers),
                "TALLY_EXCHANGE__IS_GLOBAL": str(count > 2).lower(),
            }
            stack.enter_context(tally_serve(database, folder / "data", settings))
        yield list(urls.values())


def measure_lag(bench: Bench) -> Outcome:
    """Half a minute of load on one of two."""
    with _ledgers(bench, 2) as urls:
        lags_s = apart(_run, urls[0], urls[1])
    cuts = statistics.quantiles(lags_s, n=100)
    return Outcome(
        cuts[98], LAG_S_MAX, LAG_S_MAX / cuts[98], 1, f"median {cuts[49]:.2f} s, longest {max(lags_s):.2f} s"
    )


def _keys(url: str) -> bytes:
    with urllib.request.urlopen(f"{url}/v1/keys", timeout=30) as answer:
        said: bytes = answer.read()
    expect(bool(json.loads(said)["keys"]), "the node published no key")
    return said


def _run(here: str, there: str) -> list[float]:
    return uvloop.run(_load(Target.of(here), Target.of(there)))


async def _load(here: Target, there: Target) -> list[float]:
    """The lag at each look, in seconds."""
    numbers = random.Random(0)
    events = EVENTS_A_SECOND * SECONDS
    chained: list[tuple[int, float]] = []
    """Events that were answered as chained, in all, and when."""
    lags_s: list[float] = []
    sender, looker = await Client.connect(here), await Client.connect(there)
    requests = []
    for number in range(events // LINES_A_REQUEST):
        tenant_id = TENANTS[number % len(TENANTS)]
        lines: list[bytes] = []
        while len(lines) < LINES_A_REQUEST:
            job_id = f"exchanged-{number}-{len(lines)}"
            lines += [orjson.dumps({"tenant_id": tenant_id, **event}) for event in job_events(numbers, job_id)]
        requests.append(b"\n".join(lines[:LINES_A_REQUEST]))
    began_s = time.perf_counter()

    async def send() -> None:
        for number, body in enumerate(requests):
            await asyncio.sleep(began_s + number * LINES_A_REQUEST / EVENTS_A_SECOND - time.perf_counter())
            await sender.ask(post("/v1/events?durability=GLOBAL", body, "ndjson"), 200)
            chained.append(((number + 1) * LINES_A_REQUEST, time.perf_counter()))

    async def look() -> None:
        deadline_s = began_s + SECONDS + CAUGHT_UP_TIMEOUT_S
        imported = 0
        while imported < events:
            expect(time.perf_counter() < deadline_s, f"{imported} of {events} events were imported")
            await asyncio.sleep(LOOK_S)
            imported = (await looker.get("/v1/exchange"))["peers"][0]["imported_entries"]
            now_s = time.perf_counter()
            at = bisect_left(chained, (imported + 1, 0.0))
            lags_s.append(now_s - chained[at][1] if at < len(chained) else 0.0)

    async with asyncio.TaskGroup() as both:
        both.create_task(send())
        both.create_task(look())
    return lags_s


@lru_cache(maxsize=1)
def _waits_s(bench: Bench) -> list[float]:
    """The time that each write of 20 s waited, in seconds, ascending."""
    with _ledgers(bench, 3) as urls:
        return apart(_run_writes, urls[0])


def _run_writes(url: str) -> list[float]:
    return uvloop.run(_write(Target.of(url)))


async def _write(target: Target) -> list[float]:
    job = {"tenant_id": TENANTS[0], "spec": {"image": "a"}, "assigned_dcs": list(REGIONS), "durability": "GLOBAL"}
    request = post("/v1/jobs", orjson.dumps(job), "json")
    free: asyncio.Queue[Client] = asyncio.Queue()
    for _ in range(WRITERS):
        free.put_nowait(await Client.connect(target))
    waits_s: list[float] = []

    async def write(due_s: float) -> None:
        await asyncio.sleep(due_s - time.perf_counter())
        client = await free.get()
        answer = await client.ask(request, 201)
        waits_s.append(time.perf_counter() - due_s)
        free.put_nowait(client)
        expect(orjson.loads(answer.body)["durability"]["achieved"] == "GLOBAL", "a write was not acknowledged GLOBAL")

    await write(time.perf_counter())  # the tenant begins in each ledger
    waits_s.clear()
    began_s = time.perf_counter()
    async with asyncio.TaskGroup() as writes:
        for number in range(WRITES_A_SECOND * WRITE_SECONDS):
            writes.create_task(write(began_s + number / WRITES_A_SECOND))
    return sorted(waits_s)


def _global_row(name: str, percent: int, most_s: float) -> Row:
    def measure(bench: Bench) -> Outcome:
        waits_s = _waits_s(bench)
        cuts = statistics.quantiles(waits_s, n=100)
        waited_s = cuts[percent - 1]
        return Outcome(waited_s, most_s, most_s / waited_s, 1, f"of {len(waits_s)}, longest {waits_s[-1]:.2f} s")

    what = f"p{percent} of a write that a majority of three ledgers acknowledges, at {WRITES_A_SECOND}/s"
    return Row(name, "s", 1.0, f"{what}, against {most_s:g} s", measure)


GLOBAL_P50 = _global_row("exchange_global_p50", 50, P50_S_MAX)
GLOBAL_P99 = _global_row("exchange_global_p99", 99, P99_S_MAX)
LAG = Row(
    "exchange_lag_s",
    "s",
    1.0,
    f"p99 of how long an entry that one ledger chained is lacking in another that exchanges with it, at "
    f"{EVENTS_A_SECOND:,} events a second, against {LAG_S_MAX:g} s",
    measure_lag,
)
