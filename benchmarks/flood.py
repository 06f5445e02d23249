"""``flood_p99_ms``: what one tenant's single writes take while another floods, in milliseconds.

The flood is 64 connections, each of which sends ``POST /v1/events`` with 1,000 lines at LOCAL as soon as its last
request is answered, whatever the answer. Beside it four connections of another tenant send 200 ``POST /v1/jobs`` a
second at LOCAL, evenly. Three services in turn: without a flood, with one, and with one that gives each tenant a quota.
Clients are processes of their own.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import statistics
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

import orjson
import uvloop

from benchmarks.apart import apart
from benchmarks.bench import Bench
from benchmarks.events import job_requests
from benchmarks.http_client import Client, Target, post
from benchmarks.processes import tally_serve
from benchmarks.row import BenchmarkError, Outcome, Row

if TYPE_CHECKING:
    from multiprocessing.synchronize import Event

FLOOD_CONNECTIONS = 64
FLOOD_LINES = 1000
WRITERS = 4
WRITES_A_SECOND = 200
WARM_UP_S = 2.0
WINDOW_S = 10.0
QUOTA = {"TALLY_QUOTA__TENANT_REQUESTS": "2000", "TALLY_QUOTA__BURST": "1s"}
CREATED = 201


class Writes(NamedTuple):
    """What single writes took, in milliseconds, all answered 201."""

    p50_ms: float
    p99_ms: float
    max_ms: float


def measure(bench: Bench) -> Outcome:
    """One window of each."""
    found: dict[str, Writes] = {}
    for name, settings, is_flooded in (("alone", {}, False), ("flooded", {}, True), ("bounded", QUOTA, True)):
        found[name], answers = run(bench, settings, is_flooded=is_flooded)
        took = found[name]
        bench.say(f"{name}: p50 {took.p50_ms:.1f}, p99 {took.p99_ms:.1f}, max {took.max_ms:.1f} ms; flood {answers}")
    alone, flooded, bounded = (found[name] for name in ("alone", "flooded", "bounded"))
    medians = ", ".join(f"{each.p50_ms:.1f}" for each in (alone, flooded, bounded))
    note = f"p99 without quota {flooded.p99_ms:.1f} ms; p50 alone, flooded, bounded {medians} ms"
    return Outcome(bounded.p99_ms, alone.p99_ms, alone.p99_ms / bounded.p99_ms, 1, note)


def run(bench: Bench, settings: Mapping[str, str], *, is_flooded: bool) -> tuple[Writes, dict[int, int]]:
    """What single writes took, and the answers to the flood by their status."""
    with (
        bench.fresh_database() as database,
        bench.fresh_folder() as folder,
        tally_serve(database.service_url, folder, settings) as url,
    ):
        if not is_flooded:
            return apart(write, url, WARM_UP_S, WINDOW_S), {}
        with flooding(url) as answers:
            took = apart(write, url, WARM_UP_S, WINDOW_S)
        return took, answers


@contextmanager
def flooding(url: str) -> Iterator[Counter[int]]:
    """A process that floods the service; on leaving, the answers that it got are in what was given."""
    context = multiprocessing.get_context("spawn")
    stop, answers = context.Event(), context.Queue()
    process = context.Process(target=_flood, args=(url, stop, answers))
    process.start()
    counted: Counter[int] = Counter()
    try:
        yield counted
    finally:
        stop.set()
        counted.update(answers.get(timeout=60))
        process.join()


def _flood(url: str, stop: Event, answers: multiprocessing.Queue[dict[int, int]]) -> None:
    answers.put(uvloop.run(_send_floods(Target.of(url), stop)))


async def _send_floods(target: Target, stop: Event) -> dict[int, int]:
    line = orjson.dumps({"tenant_id": "flood", "type": "JobCreated", "spec": {"image": "registry.example/render:1.2"}})
    request = post("/v1/events?durability=LOCAL", (line + b"\n") * FLOOD_LINES, "ndjson")
    answers: Counter[int] = Counter()

    async def send() -> None:
        client = await Client.connect(target)
        while not stop.is_set():
            answers[(await client.answered(request)).status] += 1
        client.close()

    await asyncio.gather(*(send() for _ in range(FLOOD_CONNECTIONS)))
    return dict(answers)


def write(url: str, warm_up_s: float, window_s: float) -> Writes:
    """What single writes take in the window."""
    return uvloop.run(_write(Target.of(url), warm_up_s, window_s))


async def _write(target: Target, warm_up_s: float, window_s: float) -> Writes:
    requests = [post("/v1/jobs", body) for body in job_requests("quiet", "LOCAL", 100)]
    clients = [await Client.connect(target) for _ in range(WRITERS)]
    await clients[0].ask(requests[0], CREATED)
    began_s, took_ms = time.perf_counter(), list[float]()

    async def send(client: Client, first: int) -> None:
        for number in range(first, int((warm_up_s + window_s) * WRITES_A_SECOND), WRITERS):
            due_s = began_s + number / WRITES_A_SECOND
            await asyncio.sleep(due_s - time.perf_counter())
            sent_s = time.perf_counter()
            await client.ask(requests[number % len(requests)], CREATED)
            if due_s >= began_s + warm_up_s:
                took_ms.append((time.perf_counter() - sent_s) * 1000)

    await asyncio.gather(*map(send, clients, range(WRITERS)))
    if not took_ms:
        raise BenchmarkError("nothing was answered in the window")
    cuts = statistics.quantiles(took_ms, n=100)
    return Writes(cuts[49], cuts[98], max(took_ms))


ROW = Row(
    "flood_p99_ms",
    "ms",
    0.1,
    "p99 of one tenant's POST /v1/jobs at LOCAL beside a flood of another that has a quota, against the same alone",
    measure,
)
