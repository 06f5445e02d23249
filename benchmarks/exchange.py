"""``exchange_lag_s``: how long after it is chained an entry of one region's ledger stands in another's.

Two ledgers, each a service with a database of its own on the same PostgreSQL, import from each other. For half a minute
5,000 events a second come in at one, evenly, over 10 tenants, in requests of 500 lines. Ten times a second it is looked
how many entries each has; what one had chained when the other's import reached as many tells the lag.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import time
import urllib.request
from bisect import bisect_left
from contextlib import ExitStack

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
REGIONS = ("use1", "euw1")


def measure(bench: Bench) -> Outcome:
    """Half a minute of load on one of two."""
    with ExitStack() as stack:
        folders = [stack.enter_context(bench.fresh_folder()) for _ in REGIONS]
        databases = [stack.enter_context(bench.fresh_database()).service_url for _ in REGIONS]
        ports = [free_port() for _ in REGIONS]
        trusted = folders[0] / "trusted"
        trusted.mkdir()
        for region, folder, database in zip(REGIONS, folders, databases, strict=True):
            with tally_serve(database, folder / "data") as url:
                (trusted / f"{region}.json").write_bytes(_keys(url))
        urls = []
        for at, region in enumerate(REGIONS):
            peer = {"url": f"http://127.0.0.1:{ports[1 - at]}", "region": REGIONS[1 - at]}
            settings = {
                "TALLY_REGION": region,
                "TALLY_PORT": str(ports[at]),
                "TALLY_BUNDLE__TRUSTED_KEYS": str(trusted),
                "TALLY_EXCHANGE__PEERS": json.dumps([peer]),
            }
            urls.append(stack.enter_context(tally_serve(databases[at], folders[at] / "data", settings)))
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


LAG = Row(
    "exchange_lag_s",
    "s",
    1.0,
    f"p99 of how long an entry that one ledger chained is lacking in another that exchanges with it, at "
    f"{EVENTS_A_SECOND:,} events a second, against {LAG_S_MAX:g} s",
    measure,
)
