"""``proof_p99_s``: from the answer at GLOBAL to an inclusion proof in a signed checkpoint.

For a minute 1000 events a second come in, evenly, over 10 tenants. Beside them each tenant's checkpoint is asked for
every 20 ms. Each new one has its signature checked, and with it the inclusion proof of the newest event that it
covers is fetched and verified; that moment counts for every event it covers. An event that is proven before its
answer has arrived counts 0.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from typing import NamedTuple

import uvloop

from benchmarks.apart import apart
from benchmarks.bench import Bench, wait_for
from benchmarks.events import TENANTS, job_requests
from benchmarks.http_client import Client, Target, get, post
from benchmarks.ledger_checks import check_service
from benchmarks.processes import tally_serve
from benchmarks.row import Outcome, Row, expect
from ledger import merkle
from signing.checkpoint import Checkpoint, open_checkpoint

EVENTS_A_SECOND = 1000
SECONDS = 60
EVENTS = EVENTS_A_SECOND * SECONDS
CONNECTIONS = 64
POLL_S = 0.02
TOOK_S_MAX = SECONDS * 1.05
"""Longest that the load may take; longer, and the service was not under the load it is judged at."""
PROVEN_TIMEOUT_S = 60.0
CREATED = 201
P99_S_MAX = 1.0


class Proven(NamedTuple):
    """What the client saw; latencies in seconds."""

    p50_s: float
    p99_s: float
    max_s: float
    proofs: int
    answered_p99_ms: float
    took_s: float
    entries: dict[str, int]


def measure(bench: Bench) -> Outcome:
    """One minute of load."""
    with bench.fresh_database() as database, bench.fresh_folder() as folder:
        with tally_serve(database.service_url, folder) as url:
            proven = apart(_prove, url)
            syncs = wait_for(check_service(url, proven.entries))
        bench.say(f"{proven.took_s:.1f} s of load; {syncs}")
    return Outcome(
        proven.p99_s,
        P99_S_MAX,
        P99_S_MAX / proven.p99_s,
        1,
        f"p50 {proven.p50_s:.3f} s, max {proven.max_s:.3f} s, {proven.proofs} proofs verified; "
        f"{EVENTS / proven.took_s:,.0f} events/s, whose answers had a p99 of {proven.answered_p99_ms:.0f} ms",
    )


def _prove(url: str) -> Proven:
    return uvloop.run(_run(Target.of(url)))


async def _run(target: Target) -> Proven:
    clients = [await Client.connect(target) for _ in range(CONNECTIONS)]
    tenants: list[_Tenant] = []
    for tenant_id in TENANTS:
        await clients[0].ask(post("/v1/jobs", job_requests(tenant_id, "GLOBAL", 1)[0]), CREATED)
        keys = await clients[0].get(f"/v1/keys?tenant_id={tenant_id}")
        tenants.append(_Tenant(tenant_id, await Client.connect(target), keys["log_verifier_keys"]))
        await tenants[-1].first_checkpoint()
    requests = [[post("/v1/jobs", body) for body in job_requests(one, "GLOBAL", 100)] for one in TENANTS]
    answer_ms: list[float] = []
    began_s = time.perf_counter()

    async def send(client: Client, first: int) -> None:
        for number in range(first, EVENTS, CONNECTIONS):
            await asyncio.sleep(began_s + number / EVENTS_A_SECOND - time.perf_counter())
            which, turn = number % len(tenants), number // len(tenants)
            sent_s = time.perf_counter()
            answer = await client.ask(requests[which][turn % len(requests[which])], CREATED)
            now_s = time.perf_counter()
            answer_ms.append((now_s - sent_s) * 1000)
            chain = json.loads(answer.body)["chain"]
            tenants[which].answered(chain["seq"], chain["chain_link"], now_s)

    async with asyncio.timeout(SECONDS + PROVEN_TIMEOUT_S), asyncio.TaskGroup() as watching:
        for tenant in tenants:
            watching.create_task(tenant.watch())
        await asyncio.gather(*map(send, clients, range(CONNECTIONS)))
        took_s = time.perf_counter() - began_s
        for tenant in tenants:
            tenant.is_all_answered = True
    expect(took_s <= TOOK_S_MAX, f"the service took {took_s:.1f} s for {SECONDS} s of load")
    latencies_s = sorted(latency_s for tenant in tenants for latency_s in tenant.latencies_s)
    expect(len(latencies_s) == EVENTS, f"{len(latencies_s)} events were proven of {EVENTS}")
    cuts = statistics.quantiles(latencies_s, n=100)
    return Proven(
        p50_s=cuts[49],
        p99_s=cuts[98],
        max_s=latencies_s[-1],
        proofs=sum(tenant.proofs for tenant in tenants),
        answered_p99_ms=statistics.quantiles(answer_ms, n=100)[98],
        took_s=took_s,
        entries={tenant.tenant_id: len(tenant.latencies_s) + 1 for tenant in tenants},
    )


class _Tenant:
    """One tenant's checkpoints, and the events that wait to be covered by one."""

    def __init__(self, tenant_id: str, client: Client, verifier_keys: list[str]) -> None:
        self.tenant_id = tenant_id
        self.latencies_s: list[float] = []
        self.proofs = 0
        self._client = client
        self._verifier_keys = verifier_keys
        self._waiting: dict[int, tuple[bytes, float]] = {}
        """Link and time of the answer, by seq."""
        self._proven_size = 0
        self.is_all_answered = False
        """No further event comes."""

    def answered(self, seq: int, chain_link: str, now_s: float) -> None:
        """An event was answered."""
        if seq <= self._proven_size:
            self.latencies_s.append(0.0)
        else:
            self._waiting[seq] = bytes.fromhex(chain_link), now_s

    async def first_checkpoint(self) -> None:
        """Return once the tenant's log has a checkpoint."""
        async with asyncio.timeout(PROVEN_TIMEOUT_S):
            while (await self._client.get(f"/v1/chain/head?tenant_id={self.tenant_id}"))["tree"] is None:
                await asyncio.sleep(POLL_S)

    async def watch(self) -> None:
        """Ask for the checkpoint and prove what each new one covers, until there is nothing left to prove."""
        while self._waiting or not self.is_all_answered:
            answer = await self._client.ask(get(f"/v1/log/{self.tenant_id}/checkpoint"))
            checkpoint = open_checkpoint(answer.body, self._verifier_keys)
            covered = [seq for seq in self._waiting if seq <= checkpoint.size]
            if covered:
                await self._prove(max(covered), checkpoint)
                now_s = time.perf_counter()
                self._proven_size = checkpoint.size
                for seq in [seq for seq in self._waiting if seq <= checkpoint.size]:
                    self.latencies_s.append(max(0.0, now_s - self._waiting.pop(seq)[1]))
            await asyncio.sleep(POLL_S)

    async def _prove(self, seq: int, checkpoint: Checkpoint) -> None:
        path = f"/v1/chain/proof/inclusion?tenant_id={self.tenant_id}&seq={seq}&tree_size={checkpoint.size}"
        proof = await self._client.get(path)
        merkle.verify_inclusion(
            proof["leaf_index"],
            checkpoint.size,
            merkle.leaf_hash(self._waiting[seq][0]),
            [bytes.fromhex(one) for one in proof["hashes"]],
            checkpoint.root,
        )
        expect(proof["leaf_index"] == seq - 1, f"the proof is of leaf {proof['leaf_index']}, not of seq {seq}")
        self.proofs += 1


ROW = Row(
    "proof_p99_s",
    "s",
    1.0,
    "99th percentile from the answer at GLOBAL to a verified inclusion proof in a signed checkpoint, 1,000 events/s, "
    "10 tenants, 60 s, against 1 s",
    measure,
)
