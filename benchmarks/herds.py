"""``herds``: schedulers that race for the capacity of 50,000 nodes, as the author of seed ``002`` wanted to see it.

Each scheduler is one connection with a view of its own, which is as old as its last look. In order::

    capacities   50,000 nodes are recorded
    steady       10,000 arrivals a minute, evenly, on nodes that their scheduler thinks are free
    herd         every scheduler wants the same few nodes, at once: rounds until each capsule is placed somewhere
    rollout      a mission of 2,000 capsules, in gangs of 16, and the adjustment of its module
    preemption   1,000 capsules are revoked, and as many placed in their stead, all at once
    beyond       arrivals as fast as they are answered

Then the log is read back, and whether any node was ever given more than it has is worked out from its entries alone.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple

import uvloop

from benchmarks.apart import apart
from benchmarks.bench import Bench
from benchmarks.http_client import Client, Target, post
from benchmarks.processes import tally_serve
from benchmarks.row import Outcome, Row, expect

TENANT = "cluster"
NODES = 50_000
SCHEDULERS = 64
CPU, MEMORY = 96_000, 768 << 30
ASKS = {"cpu_millis": 4000, "memory_bytes": 16 << 30}
ARRIVALS_A_MINUTE = 10_000
STEADY_S = 20.0
HERD_NODES, HERD_CAPSULES = 20, 640
GANGS, GANG_MEMBERS = 125, 16
PREEMPTED = 1000
BEYOND_S = 20.0


class Herds(NamedTuple):
    """What the clients saw; times in milliseconds."""

    capacities_a_second: float
    steady_p50_ms: float
    steady_p99_ms: float
    steady_conflicts: int
    herd_rounds: int
    herd_conflicts: int
    herd_s: float
    rollout_s: float
    preemption_s: float
    beyond_a_minute: float
    beyond_p99_ms: float
    answered: Counter[str]
    """Of all phases: accepted, and conflicts by reason."""


class _Race:
    def __init__(self, target: Target) -> None:
        self._target = target
        self._random = random.Random(17)
        self._names = 0
        self.answered: Counter[str] = Counter()
        self.took_ms: list[float] = []
        self.placed: list[int] = []

    async def open(self) -> None:
        self.clients = [await Client.connect(self._target) for _ in range(SCHEDULERS)]

    def name(self) -> str:
        self._names += 1
        return f"capsule-{self._names:08d}"

    async def propose(
        self, client: Client, commitment: dict[str, Any], bet: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """The answer, whatever it is; ``index`` is there either way."""
        body = {"tenant_id": TENANT, "commitment": commitment, "precondition": bet or {"kind": "None"}}
        self._names += 1
        request = post("/v1/commitments", json.dumps(body).encode(), key=f"k{self._names}")
        sent_s = time.perf_counter()
        status, answer, _ = await client.answered(request)
        self.took_ms.append((time.perf_counter() - sent_s) * 1000)
        found: dict[str, Any] = json.loads(answer)
        expect(status in (201, 409), f"a proposal was answered {status}: {found}")
        self.answered["accepted" if status == 201 else found["reason"]] += 1
        if status == 201 and commitment["kind"] == "Placement":
            self.placed.append(found["index"])
        return found

    async def place(self, client: Client, node: str, capsule: str | None = None) -> bool:
        commitment = {
            "kind": "Placement", "capsule": capsule or self.name(), "node": node, "reservation": ASKS, "limit": ASKS
        }  # fmt: skip
        found = await self.propose(client, commitment, {"kind": "NodeFreeOf", "node": node, "at_least": ASKS})
        return "verdict" in found

    async def each(self, work: Callable[[Client, int], Awaitable[None]]) -> float:
        """Have every scheduler do its share; the seconds that it took."""
        began_s = time.perf_counter()
        await asyncio.gather(*(work(client, number) for number, client in enumerate(self.clients)))
        return time.perf_counter() - began_s

    async def capacities(self) -> float:
        body = json.dumps({"tenant_id": TENANT, "capacity": {"cpu_millis": CPU, "memory_bytes": MEMORY}}).encode()

        async def record(client: Client, number: int) -> None:
            for node in range(number, NODES, SCHEDULERS):
                request = post(f"/v1/nodes/{_node(node)}/capacity", body).replace(b"POST", b"PUT", 1)
                await client.ask(request)

        return NODES / await self.each(record)

    async def steady(self) -> int:
        before, began_s = self.answered.total() - self.answered["accepted"], time.perf_counter()
        count = int(ARRIVALS_A_MINUTE / 60 * STEADY_S)

        async def arrive(client: Client, first: int) -> None:
            for number in range(first, count, SCHEDULERS):
                await asyncio.sleep(began_s + number * 60 / ARRIVALS_A_MINUTE - time.perf_counter())
                while not await self.place(client, _node(self._random.randrange(NODES))):
                    pass

        await self.each(arrive)
        return self.answered.total() - self.answered["accepted"] - before

    async def herd(self) -> tuple[int, int, float]:
        """All want what is left of the same nodes first; who loses looks at the next."""
        rounds, before = [0] * HERD_CAPSULES, self.answered.total() - self.answered["accepted"]

        async def want(client: Client, first: int) -> None:
            for number in range(first, HERD_CAPSULES, SCHEDULERS):
                capsule, at = self.name(), 0
                while True:
                    rounds[number] += 1
                    if await self.place(client, _node(at % NODES), capsule):
                        break
                    at += 1 if at >= HERD_NODES else self._random.randrange(1, 3)

        took_s = await self.each(want)
        return max(rounds), self.answered.total() - self.answered["accepted"] - before, took_s

    async def rollout(self) -> float:
        async def roll(client: Client, first: int) -> None:
            for gang in range(first, GANGS, SCHEDULERS):
                members = [
                    {"capsule": self.name(), "node": _node(1000 + gang * GANG_MEMBERS + n), "reservation": ASKS}
                    for n in range(GANG_MEMBERS)
                ]
                commitment = {"kind": "GangPlacement", "gang": f"gang-{gang}", "members": members}
                await self.propose(client, commitment, {"kind": "GangUnplaced", "gang": f"gang-{gang}"})

        took_s = await self.each(roll)
        adjusted = {"mission": "render", "module": "web", "epoch": 1}
        bet = {"kind": "ModuleAdjustmentVersion", **adjusted, "epoch": 0}
        found = await self.propose(self.clients[0], {"kind": "ModuleAdjustment", **adjusted, "replicas": 2000}, bet)
        expect("verdict" in found, f"the rollout's adjustment lost: {found}")
        return took_s

    async def preemption(self) -> float:
        victims = self._random.sample(self.placed, PREEMPTED)

        async def preempt(client: Client, first: int) -> None:
            for index in victims[first::SCHEDULERS]:
                await self.propose(client, {"kind": "Revocation", "index": index})
                while not await self.place(client, _node(self._random.randrange(NODES))):
                    pass

        return await self.each(preempt)

    async def beyond(self) -> float:
        until_s, before = time.perf_counter() + BEYOND_S, self.answered["accepted"]

        async def arrive(client: Client, _: int) -> None:
            while time.perf_counter() < until_s:
                await self.place(client, _node(self._random.randrange(NODES)))

        took_s = await self.each(arrive)
        return (self.answered["accepted"] - before) * 60 / took_s


def _node(number: int) -> str:
    return f"node-{number:05d}"


async def _race(url: str) -> Herds:
    race = _Race(Target.of(url))
    await race.open()
    capacities = await race.capacities()
    steady_conflicts = await race.steady()
    steady = statistics.quantiles(race.took_ms, n=100)
    rounds, herd_conflicts, herd_s = await race.herd()
    rollout_s, preemption_s = await race.rollout(), await race.preemption()
    race.took_ms.clear()
    beyond = await race.beyond()
    beyond_p99_ms = statistics.quantiles(race.took_ms, n=100)[98]
    await _check(race.clients[0], race.answered)
    return Herds(
        capacities, steady[49], steady[98], steady_conflicts, rounds, herd_conflicts, herd_s, rollout_s, preemption_s,
        beyond, beyond_p99_ms, race.answered,
    )  # fmt: skip


async def _check(client: Client, answered: Counter[str]) -> None:
    """Work out of the log alone that no node was ever given more than it has, and no capsule placed twice."""
    capacity: dict[str, dict[str, int]] = {}
    given: dict[str, Counter[str]] = {}
    holding: dict[int, list[dict[str, Any]]] = {}
    placed: set[str] = set()
    logged: Counter[str] = Counter()
    after = 0
    while items := (await client.get(f"/v1/chain/entries?tenant_id={TENANT}&from_seq={after + 1}&limit=1000"))["items"]:
        after = items[-1]["seq"]
        for entry in items:
            said = json.loads(entry["payload"])
            if entry["action"] == "CAPACITY_SET":
                capacity[said["node"]] = said["capacity"]
                continue
            logged["accepted" if entry["action"] == "PROPOSE_ACCEPTED" else said["rejection"]["reason"]] += 1
            commitment = said["commitment"]
            if entry["action"] == "PROPOSE_REJECTED":
                continue
            if commitment["kind"] == "Revocation":
                for member in holding.pop(commitment["index"]):
                    given[member["node"]].subtract(member["reservation"])
                    placed.remove(member["capsule"])
            members: Sequence[dict[str, Any]] = commitment.get("members") or [commitment] * ("node" in commitment)
            holding[entry["seq"]] = list(members)
            for member in members:
                expect(member["capsule"] not in placed, f"seq {entry['seq']} places {member['capsule']} twice")
                placed.add(member["capsule"])
                total = given.setdefault(member["node"], Counter())
                total.update(member["reservation"])
                has = capacity[member["node"]]
                over = [name for name, amount in total.items() if amount > has.get(name, 0)]
                expect(not over, f"seq {entry['seq']} gives more {over} of {member['node']} than it has")
    expect(logged == answered, f"the log has {logged}, answered were {answered}")


def _run(url: str) -> Herds:
    return uvloop.run(_race(url))


def measure(bench: Bench) -> Outcome:
    """One run of all phases; arrivals a minute beyond, against what was asked for."""
    with (
        bench.fresh_database() as database,
        bench.fresh_folder() as folder,
        tally_serve(database.service_url, folder) as url,
    ):
        found = apart(_run, url)
    for name, value in found._asdict().items():
        bench.say(f"{name}: {value:,.1f}" if isinstance(value, float) else f"{name}: {value}")
    note = (
        f"steady p50 {found.steady_p50_ms:.1f}, p99 {found.steady_p99_ms:.1f} ms, {found.steady_conflicts} conflicts; "
        f"herd {found.herd_rounds} rounds at most, {found.herd_conflicts} conflicts in {found.herd_s:.1f} s; rollout "
        f"{found.rollout_s:.1f} s, preemption {found.preemption_s:.1f} s; no node given twice"
    )
    return Outcome(found.beyond_a_minute, ARRIVALS_A_MINUTE, found.beyond_a_minute / ARRIVALS_A_MINUTE, 1, note)


ROW = Row(
    "herds",
    "arrivals/min",
    1.0,
    "placements that bet on free nodes, 50,000 nodes, 64 schedulers with stale views, as fast as they are answered, "
    "against the 10,000 arrivals a minute that the seed asked for; herds, a rollout and preemption before",
    measure,
)
