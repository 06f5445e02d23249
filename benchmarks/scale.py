"""``python -m benchmarks.scale``: what grows with entries, tenants, events of one job and nodes, a line a size.

``docs/scale.md`` has the lines of one run and what follows from them. It takes some 25 minutes and 20 GB of disk with
the sizes that are its defaults; others are given by name, as in ``--entries 1000000``. Everything goes through the
service, with its defaults; what a line says is of the machine that the first line names.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import islice
from pathlib import Path

import asyncpg
import orjson
from rich.console import Console

from benchmarks.bench import Bench, Database, wait_for
from benchmarks.events import EVENTS_A_JOB, TENANTS, ndjson, stream
from benchmarks.http_client import Client, Target, get, post
from benchmarks.ledger_checks import wait_until_chained
from benchmarks.machine import describe
from benchmarks.processes import tally_serve
from benchmarks.row import expect

HERE = Path(__file__).resolve().parent
CONNECTIONS = 4
LINES_A_REQUEST = 2000
READS = 200
GROWING_AT_ONCE = 300
SETTLED_TIMEOUT_S = 1800.0
POLL_S = 0.02
TABLES = ("scheduler_log", "jobs", "merkle_tile", "batch_snapshot")
_SIZES = f"""
SELECT relation, sum(pg_total_relation_size(c.oid))::bigint
  FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
 CROSS JOIN LATERAL (SELECT coalesce((SELECT name FROM unnest('{{{",".join(TABLES)}}}'::text[]) AS name
                                       WHERE c.relname = name OR c.relname LIKE name || '_p_'), 'other')) AS t(relation)
 WHERE n.nspname = 'scheduler' AND c.relkind IN ('r', 'm')
 GROUP BY relation
"""
_BEHIND = """
SELECT count(*) FROM scheduler.chain_heads h LEFT JOIN scheduler.merkle_head m USING (tenant_id)
       LEFT JOIN scheduler.follower_positions p ON p.tenant_id = h.tenant_id AND p.follower = 'jobs'
 WHERE m.tree_size IS DISTINCT FROM h.head_seq OR m.checkpoint IS NULL OR p.seq IS DISTINCT FROM h.head_seq
"""


class Scale:
    """Sizes of one kind after another, each a line of what was measured then."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self.console = Console()

    @contextmanager
    def ledger(self) -> Iterator[tuple[Database, Path]]:
        """A fresh database and a fresh folder of a node."""
        with self._bench.fresh_database() as database, self._bench.fresh_folder() as folder:
            yield database, folder

    def tell(self, **measured: object) -> None:
        """One line."""
        self.console.print(json.dumps(measured), highlight=False, markup=False, soft_wrap=True)

    def entries(self, most: int) -> None:
        """A ledger of ``TENANTS`` that grows tenfold from line to line."""
        with self.ledger() as (database, folder):
            events = stream("scale", most // EVENTS_A_JOB + 1)
            stored, size = 0, min(most, 10_000)
            while size <= most:
                began_s = time.perf_counter()
                with tally_serve(database.service_url, folder) as url:
                    started_s = time.perf_counter() - began_s
                    rate = wait_for(ingest(url, ndjson(islice(events, size - stored), LINES_A_REQUEST), size - stored))
                    wait_for(settle(database.superuser_url))
                    read_ms, proof_ms = wait_for(_reads(url, size))
                    verify_s = wait_for(_verify_s(url))
                    memory_mib = wait_for(memory_mib_of(url))
                sizes = wait_for(_sizes(database.superuser_url))
                self.tell(
                    entries=size,
                    per_second=round(rate),
                    start_s=round(started_s, 2),
                    memory_mib=memory_mib,
                    job_p50_ms=read_ms,
                    proof_p50_ms=proof_ms,
                    verify_a_tenth_s=round(verify_s, 2),
                    bytes_an_entry={name: round(bytes_ / size) for name, bytes_ in sorted(sizes.items())},
                    node_bytes_an_entry=round(_folder_bytes(folder) / size),
                )
                stored, size = size, size * 10

    def tenants(self, most: int) -> None:
        """A ledger of one entry a tenant, tenfold the tenants from line to line."""
        with self.ledger() as (database, folder):
            stored, size = 0, min(most, 100)
            while size <= most:
                began_s = time.perf_counter()
                with tally_serve(database.service_url, folder) as url:
                    started_s = time.perf_counter() - began_s
                    names = [f"tenant-{number:06d}" for number in range(stored, size)]
                    began_s = time.perf_counter()
                    rate = wait_for(ingest(url, _creations(names, "first"), len(names)))
                    signed_s = wait_for(settle(database.superuser_url, began_s))
                    grown = random.Random(size).sample(range(size), min(size, GROWING_AT_ONCE))
                    again = [f"tenant-{number:06d}" for number in grown]
                    began_s = time.perf_counter()
                    wait_for(ingest(url, _creations(again, f"again-{size}"), len(again)))
                    grown_s = wait_for(settle(database.superuser_url, began_s))
                    memory_mib = wait_for(memory_mib_of(url))
                self.tell(
                    tenants=size,
                    begun_per_second=round(rate),
                    all_signed_s=round(signed_s, 2),
                    start_s=round(started_s, 2),
                    memory_mib=memory_mib,
                    signed_after_growth_of={len(again): round(grown_s, 3)},
                    files_of_the_node=sum(path.is_file() for path in folder.rglob("*")),
                    node_bytes_a_tenant=round(_folder_bytes(folder) / size),
                )
                stored, size = size, size * 10

    def events_of_a_job(self, most: int) -> None:
        """One job, tenfold the events from line to line."""
        with self.ledger() as (database, folder), tally_serve(database.service_url, folder) as url:
            wait_for(ingest(url, _creations(["acme"], "job"), 1))
            stored, size = 1, min(most, 100)
            while size <= most:
                rate = wait_for(ingest(url, _progress(size - stored), size - stored))
                wait_for(settle(database.superuser_url))
                took_ms = wait_for(_times_ms(url, ["/v1/jobs/job?tenant_id=acme"] * READS))
                self.tell(events_of_a_job=size, per_second=round(rate), job_p50_ms=took_ms)
                stored, size = size, size * 10

    def nodes(self, entries: int) -> None:
        """The same number of entries through one node, and through two of one ledger at once."""
        for count in (1, 2):
            with self.ledger() as (database, folder):
                rate = wait_for(_through(count, database, folder, entries))
                self.tell(nodes=count, entries=entries, per_second=round(rate))


async def ingest(url: str, bodies: Iterator[bytes], events: int) -> float:
    """Events a second until the last is chained."""
    clients = [await Client.connect(Target.of(url)) for _ in range(CONNECTIONS)]
    began_s = time.perf_counter()

    async def send(client: Client) -> None:
        # One generator for all: who is free takes what comes next.
        for body in bodies:
            await client.ask(post("/v1/events", body, "ndjson"))

    await asyncio.gather(*map(send, clients))
    await wait_until_chained(clients[0])
    for client in clients:
        client.close()
    return events / (time.perf_counter() - began_s)


async def _through(count: int, database: Database, folder: Path, entries: int) -> float:
    """Events a second through ``count`` nodes of one ledger, each with streams of its own."""
    with ExitStack() as running:
        urls = [running.enter_context(tally_serve(database.service_url, folder / str(n))) for n in range(count)]
        share = entries // count
        streams = [stream(f"node{number}", share // EVENTS_A_JOB + 1) for number in range(count)]
        bodies = [ndjson(islice(events, share), LINES_A_REQUEST) for events in streams]
        began_s = time.perf_counter()
        await asyncio.gather(*(ingest(url, each, share) for url, each in zip(urls, bodies, strict=True)))
        return entries / (time.perf_counter() - began_s)


def _creations(tenants: Sequence[str], job_id: str) -> Iterator[bytes]:
    lines = [orjson.dumps({"tenant_id": name, "job_id": job_id, "type": "JobCreated"}) for name in tenants]
    for first in range(0, len(lines), LINES_A_REQUEST):
        yield b"\n".join(lines[first : first + LINES_A_REQUEST])


def _progress(events: int) -> Iterator[bytes]:
    line = {"tenant_id": "acme", "job_id": "job", "type": "JobProgressReported", "dc_id": "use1"}
    for first in range(0, events, LINES_A_REQUEST):
        numbers = range(first, min(events, first + LINES_A_REQUEST))
        yield b"\n".join(orjson.dumps({**line, "completed": number}) for number in numbers)


async def settle(url: str, began_s: float = 0.0) -> float:
    """Wait until every chain is followed and its checkpoint signed; the time since ``began_s``."""
    connection = await asyncpg.connect(url)
    deadline_s = time.perf_counter() + SETTLED_TIMEOUT_S
    try:
        while behind := await connection.fetchval(_BEHIND):
            expect(time.perf_counter() < deadline_s, f"{behind} tenants are not followed to their end")
            await asyncio.sleep(POLL_S)
        return time.perf_counter() - began_s
    finally:
        await connection.close()


async def memory_mib_of(url: str) -> int:
    client = await Client.connect(Target.of(url))
    metrics = (await client.ask(get("/metrics"))).body.decode()
    client.close()
    found = re.search(r"^process_resident_memory_bytes (\S+)$", metrics, re.MULTILINE)
    assert found is not None
    return round(float(found[1]) / 2**20)


async def _reads(url: str, entries: int) -> tuple[float, float]:
    """Medians of reading a job and of an inclusion proof, in ms."""
    numbers, jobs = random.Random(entries), max(1, entries // EVENTS_A_JOB - len(TENANTS))
    chosen = [numbers.randrange(jobs) for _ in range(READS)]
    seqs = [1 + numbers.randrange(entries // len(TENANTS) // 2) for _ in range(READS)]
    of_jobs = [f"/v1/jobs/scale-{n:06d}?tenant_id={TENANTS[n % len(TENANTS)]}" for n in chosen]
    proofs = [f"/v1/chain/proof/inclusion?tenant_id={TENANTS[0]}&seq={seq}" for seq in seqs]
    return await _times_ms(url, of_jobs), await _times_ms(url, proofs)


async def _times_ms(url: str, paths: Sequence[str]) -> float:
    client = await Client.connect(Target.of(url))
    took: list[float] = []
    for path in paths:
        began_s = time.perf_counter()
        await client.get(path)
        took.append(time.perf_counter() - began_s)
    client.close()
    return round(statistics.median(took) * 1000, 2)


async def _verify_s(url: str) -> float:
    client = await Client.connect(Target.of(url))
    began_s = time.perf_counter()
    verdict = await client.get(f"/v1/chain/verify?tenant_id={TENANTS[0]}")
    expect(verdict["valid"], f"the chain does not hold: {verdict['first_break']}")
    client.close()
    return time.perf_counter() - began_s


async def _sizes(url: str) -> dict[str, int]:
    connection = await asyncpg.connect(url)
    try:
        return dict(map(tuple, await connection.fetch(_SIZES)))
    finally:
        await connection.close()


def _folder_bytes(folder: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in folder.rglob("*") if path.is_file())


def main() -> None:
    """Measure all kinds up to the sizes asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, size in (("entries", 10_000_000), ("tenants", 10_000), ("events-of-a-job", 100_000), ("nodes", 400_000)):
        parser.add_argument(f"--{name}", type=int, default=size, help=f"the most, {size} by default; 0 for none")
    sizes = vars(parser.parse_args())
    bench = Bench(Path(os.environ.get("BENCH_DIR") or HERE.parent / "var"), Console(stderr=True))
    try:
        scale = Scale(bench)
        scale.tell(**describe(bench.folder, None))
        for kind, most in sizes.items():
            if most:
                getattr(scale, kind)(most)
    finally:
        bench.close()


if __name__ == "__main__":
    main()
