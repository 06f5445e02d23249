"""``watch``: what 2,000 watchers take from the writer: ``ingest_ndjson`` with and without them.

The watchers are 200 of each of the 10 tenants that are written to: 120 watch one job each, 60 a data centre's
cancellations (of which there are none), 5 everything, and 15 would watch everything and take nothing from the moment
at which they are connected. All are connections of one process of its own, which counts what the first kinds are told;
after the run each that watches a job must have been told all of it, and each that watches everything every entry, or
where to start over.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import socket
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Final, cast

import orjson
import uvloop

from benchmarks import ingest
from benchmarks.apart import apart
from benchmarks.bench import Bench, wait_for
from benchmarks.events import EVENTS_A_JOB, TENANTS
from benchmarks.http_client import Client, Target, get, post
from benchmarks.ledger_checks import check_service
from benchmarks.processes import tally_serve
from benchmarks.row import Outcome, Row, expect, interleave

if TYPE_CHECKING:
    from multiprocessing.synchronize import Event

OF_A_TENANT: Final = {"job": 120, "cancellations": 60, "everything": 5, "stalled": 15}
WATCHERS: Final = len(TENANTS) * sum(OF_A_TENANT.values())
SETTINGS: Final = {"TALLY_HTTP__CONNECTIONS_MAX": "3000"}
SETTLE_S: Final = 60.0
"""How long watchers have to be told what is left when the last entry is chained."""


def measure(bench: Bench) -> Outcome:
    """With and without, in turn."""
    told: list[Mapping[str, int]] = []

    def run(*, is_watched: bool) -> float:
        with (
            bench.fresh_database() as database,
            bench.fresh_folder() as folder,
            tally_serve(database.service_url, folder, SETTINGS) as url,
        ):
            apart(begin_tenants, url)
            with watching(url) if is_watched else nullcontext(Counter[str]()) as seen:
                rate, entries = apart(ingest.send, url)
            told.append(seen)
            wait_for(check_service(url, {tenant: count + 1 for tenant, count in entries.items()}))
        bench.say(f"{WATCHERS if is_watched else 0} watchers: {rate:,.0f}/s {dict(told[-1]) or ''}")
        return rate

    rates = interleave(bench, lambda: run(is_watched=True), lambda: run(is_watched=False))
    runs = [seen for seen in told if seen]
    total = Counter[str]()
    for seen in runs:
        total.update(seen)
    what = ", ".join(f"{name} {count / len(runs):,.0f}" for name, count in sorted(total.items()))
    return rates.outcome(f"{WATCHERS} watchers were told, each run: {what}")


def begin_tenants(url: str) -> None:
    """One entry for each tenant, so that it can be watched."""

    async def begin() -> None:
        client = await Client.connect(Target.of(url))
        for tenant in TENANTS:
            body = {"tenant_id": tenant, "job_id": "first", "durability": "GLOBAL"}
            await client.ask(post("/v1/jobs", orjson.dumps(body)), 201)
        client.close()

    uvloop.run(begin())


@contextmanager
def watching(url: str) -> Iterator[Counter[str]]:
    """A process that watches; on leaving, what it was told is in what was given.

    Raises:
        BenchmarkError: a watcher was not told all that it should be.
    """
    context = multiprocessing.get_context("spawn")
    ready, stop, found = context.Event(), context.Event(), context.Queue()
    process = context.Process(target=_watch, args=(url, ready, stop, found))
    process.start()
    told: Counter[str] = Counter()
    try:
        expect(ready.wait(SETTLE_S), "the watchers did not get ready")
        yield told
    finally:
        stop.set()
        counted = found.get(timeout=2 * SETTLE_S)
        process.join()
    expect("error" not in counted, str(counted.get("error")))
    told.update(counted)


def _watch(url: str, ready: Event, stop: Event, found: multiprocessing.Queue[dict[str, int | str]]) -> None:
    try:
        found.put(uvloop.run(_watch_all(Target.of(url), ready, stop)))
    except Exception as error:
        found.put({"error": f"{type(error).__name__}: {error}"})


class _Stream(asyncio.Protocol):
    """One watcher: counts the entries that it is told."""

    def __init__(self, kind: str, request: bytes, wanted: int | None) -> None:
        self.kind = kind
        self.wanted = wanted
        """Entries that it must be told; None of one that takes nothing."""
        self.entries = 0
        self.is_lagged = self.is_open = False
        self._request = request
        self._end = b""

    @property
    def is_done(self) -> bool:
        """Whether it was told all, or where to start over."""
        return self.wanted is None or self.entries >= self.wanted or self.is_lagged

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Ask."""
        self._transport = cast(asyncio.Transport, transport)
        if self.wanted is None:
            transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        """Count what is in a piece; a name of a field may be cut by its end."""
        text = self._end + data
        self.entries += text.count(b"\ndata: ")
        if b"event: lagged\n" in text:
            self.is_lagged = True
            self.entries -= 1
        self._end = text[-len(b"event: lagged") :] if len(text) > 32 else text
        self._end = b"" if b"\ndata: " in self._end else self._end
        if not self.is_open:
            self.is_open = True
            if self.wanted is None:
                self._transport.pause_reading()


async def _watch_all(target: Target, ready: Event, stop: Event) -> dict[str, int | str]:
    loop = asyncio.get_running_loop()
    streams = []
    of_a_tenant = ingest.EVENTS // len(TENANTS)
    for number, tenant in enumerate(TENANTS):
        for kind, count in OF_A_TENANT.items():
            for each in range(count):
                job = f"stream{each % ingest.CONNECTIONS}-{number + each // ingest.CONNECTIONS * len(TENANTS):06d}"
                query, wanted = {
                    "job": (f"&job={job}", EVENTS_A_JOB),
                    "cancellations": (f"&actions=CANCEL&dc={('use1', 'euw1')[each % 2]}", 0),
                    "everything": ("", of_a_tenant),
                    "stalled": ("", None),
                }[kind]
                stream = _Stream(kind, get(f"/v1/watch?tenant_id={tenant}{query}"), wanted)
                streams.append(stream)
                await loop.create_connection(lambda stream=stream: stream, *target)  # type: ignore[misc]
    while not all(stream.is_open for stream in streams):
        await asyncio.sleep(0.01)
    ready.set()
    while not stop.is_set():
        await asyncio.sleep(0.05)
    behind = sum(not stream.is_done for stream in streams)
    began_s = time.perf_counter()
    while not all(stream.is_done for stream in streams):
        missing = next(each for each in streams if not each.is_done)
        waited_s = time.perf_counter() - began_s
        expect(waited_s < SETTLE_S, f"{missing.kind}: {missing.entries} of {missing.wanted} entries")
        await asyncio.sleep(0.05)
    told: Counter[str] = Counter()
    for stream in streams:
        told[f"entries of {stream.kind}"] += stream.entries
    told["lagged"] = sum(stream.is_lagged for stream in streams)
    told["behind at the end"] = behind
    told["settled after ms"] = int((time.perf_counter() - began_s) * 1000)
    return dict(told)


ROW = Row(
    "watch",
    "events/s",
    0.85,
    f"POST /v1/events as ingest_ndjson, until the last row is chained, while {WATCHERS} clients watch the tenants that "
    "are written to, some of which take nothing, against the same without a watcher",
    measure,
)
