"""``job_proof_ms``: ``GET /v1/chain/proof/job``, of jobs in a chain of a million entries.

Counted is processor time, of the service and of PostgreSQL, since one request at a time waits for neither; the note has
the time from request to answer.

The chain is made in memory and copied in; its snapshots are of before the index of jobs, so the service makes that of
all entries first. A job takes ten events, a snapshot is signed, and proofs are asked for one after the other: of that
job, of jobs all over the chain, and of jobs that have no entry. Every answer is verified.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import asyncpg
import msgspec

from benchmarks.bench import Bench, wait_for
from benchmarks.events import EVENTS_A_JOB, job_events
from benchmarks.http_client import Client, Target, post
from benchmarks.processes import tally_serve
from benchmarks.processor_time import children_with, taken_s
from benchmarks.row import Outcome, Row, expect
from benchmarks.verify import AFTER_START_S, build
from ledger.job_index import BLOCK_ENTRIES, RUNS_MERGED
from ledger.job_index.proof import RunProof, verify_job
from signing.snapshot import open_snapshot

ENTRIES = 1_000_000
ASKED = 200
"""Jobs with entries of the chain, and as many without."""
EVENTS = 10
MS_MAX = 20.0
BYTES_MAX = 30_000
FOLLOW_TIMEOUT_S = 600.0
CREATED = 201
POLL_S = 0.05
_TENANT, _TEN = "bench", "of-ten-events"
_INDEXED = f"""
SELECT coalesce(max(first_leaf + {BLOCK_ENTRIES} * {RUNS_MERGED} ^ level), 0) FROM scheduler.job_index_piece
 WHERE tenant_id = $1
"""
"""The end of the stored runs of the index."""


class _Asked(NamedTuple):
    """Answers about jobs of the chain, and about the job of ``EVENTS``."""

    took_ms: list[float]
    sizes: list[int]
    processor_ms: float
    ten_ms: float
    ten_bytes: int


def measure(bench: Bench) -> Outcome:
    """Milliseconds of processor time a proof."""
    with bench.fresh_database() as database, bench.fresh_folder() as folder:
        build(bench, database, folder, _TENANT, ENTRIES, int((time.time() + AFTER_START_S) * 1000))
        signing = {"TALLY_SIGNING__KEY_URI": f"file:{folder / _TENANT}.pem"}
        with tally_serve(database.service_url, folder / "data", signing) as url:
            asked = wait_for(
                _ask(Target.of(url), database.superuser_url, [bench.postgres_pid(), *children_with("serve")])
            )
    longest = max(asked.ten_bytes, *asked.sizes)
    expect(longest <= BYTES_MAX, f"an answer has {longest:,} bytes, at most {BYTES_MAX:,} may it")
    p50_ms, p99_ms = (sorted(asked.took_ms)[len(asked.took_ms) * part // 100] for part in (50, 99))
    note = (
        f"{ENTRIES:,} entries; from request to answer p50 {p50_ms:.1f} ms, p99 {p99_ms:.1f} ms; "
        f"{statistics.median(asked.sizes):,.0f} bytes, {max(asked.sizes):,} at most; "
        f"a job of {EVENTS} events {asked.ten_ms:.1f} ms, {asked.ten_bytes:,} bytes"
    )
    return Outcome(asked.processor_ms, MS_MAX, MS_MAX / asked.processor_ms, 1, note)


async def _ask(target: Target, database_url: str, pids: list[int]) -> _Asked:
    client = await Client.connect(target)
    try:
        await _indexed(client, database_url)
        numbers = random.Random(1)
        jobs = [f"job-{numbers.randrange(ENTRIES // EVENTS_A_JOB):08d}" for _ in range(ASKED)]
        jobs += [f"nobody-{each}" for each in range(ASKED)]
        before_s = taken_s(pids)
        found = [await _proof(client, job_id) for job_id in jobs]
        processor_ms = 1000 * (taken_s(pids) - before_s) / len(jobs)
        of_ten = [await _proof(client, _TEN) for _ in range(ASKED)]
    finally:
        client.close()
    ten_ms = statistics.median(each[0] for each in of_ten)
    return _Asked([each[0] for each in found], [each[1] for each in found], processor_ms, ten_ms, of_ten[0][1])


async def _indexed(client: Client, database_url: str) -> None:
    """Write the job of ``EVENTS``; once the index has reached the newest snapshot, another snapshot, which has it."""
    created, accepted, *_ = life = job_events(random.Random(1), _TEN)
    await _signed(client, [created, accepted, *life[3:4] * (EVENTS - 2)])
    connection, end_s = await asyncpg.connect(database_url), time.monotonic() + FOLLOW_TIMEOUT_S
    try:
        while await connection.fetchval(_INDEXED, _TENANT) < ENTRIES // BLOCK_ENTRIES * BLOCK_ENTRIES:
            expect(time.monotonic() < end_s, "the index of jobs does not reach the newest snapshot")
            await asyncio.sleep(POLL_S)
    finally:
        await connection.close()
    await _signed(client, job_events(random.Random(1), "one-more")[:1])
    answer = await client.get(f"/v1/chain/proof/job?tenant_id={_TENANT}&job_id={_TEN}")
    expect(answer["tree_size"] > ENTRIES, "the newest snapshot has no index of jobs")


async def _signed(client: Client, events: Sequence[Mapping[str, Any]]) -> None:
    lines = b"".join(json.dumps({"tenant_id": _TENANT, **event}).encode() + b"\n" for event in events)
    await client.ask(post("/v1/events?durability=GLOBAL", lines, kind="ndjson"))
    await client.ask(post("/v1/snapshots", json.dumps({"tenant_id": _TENANT}).encode()), CREATED)


async def _proof(client: Client, job_id: str) -> tuple[float, int]:
    began_s = time.perf_counter()
    answer: dict[str, Any] = await client.get(f"/v1/chain/proof/job?tenant_id={_TENANT}&job_id={job_id}")
    took_ms = 1000 * (time.perf_counter() - began_s)
    claim = open_snapshot(json.dumps(answer["dsse_envelope"]), None).claim
    entries = [(each["leaf_index"], bytes.fromhex(each["leaf_hash"])) for each in answer["entries"]]
    roots = [*claim.index_roots.values()]
    verify_job(job_id, claim.to_seq, roots, entries, msgspec.convert(answer["runs"], list[RunProof]), claim.index_begin)
    return took_ms, len(json.dumps(answer, separators=(",", ":")))


ROW = Row(
    "job_proof_ms",
    "ms",
    1.0,
    f"`GET /v1/chain/proof/job` in a chain of {ENTRIES:,} entries, processor time, PostgreSQL's included, against "
    f"{MS_MAX:.0f} ms; at most {BYTES_MAX:,} bytes",
    measure,
)
