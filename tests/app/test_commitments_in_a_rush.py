"""Proposals between many events of the same tenant, on one node and on two: each is judged on the chain before
it, whatever was linked and stored ahead."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Sequence

import asyncpg
import httpx
import pytest

from tests.app.chains import Chains, followed, until
from tests.app.conftest import MakeSettings, RunServer
from tests.app.test_commitments import free, placement
from tests.conftest import EXAMPLES, EXAMPLES_USUAL
from tests.ledger import naive_commitments as naive

REQUESTS, LINES = 3, 500 if EXAMPLES > EXAMPLES_USUAL else 200
SCHEDULERS, PROPOSALS = 6, 15 if EXAMPLES > EXAMPLES_USUAL else 10
NODES = 3


async def rush(client: httpx.AsyncClient, who: int) -> None:
    """Lines of one tenant, all at once."""
    for number in range(REQUESTS):
        lines = [
            {"tenant_id": "acme", "type": "JobCreated", "job_id": f"job-{who}-{number}-{line}", "spec": {}}
            for line in range(LINES)
        ]
        content = "\n".join(map(json.dumps, lines))
        answer = await client.post(
            "/v1/events",
            params={"durability": "LOCAL" if number % 2 else "GLOBAL"},
            content=content,
            headers={"Content-Type": "application/x-ndjson"},
        )
        assert answer.status_code == 200, answer.text


async def schedule(clients: Sequence[httpx.AsyncClient], who: int, seed: int) -> list[tuple[int, int]]:
    """Status and index of each proposal, one after the other."""
    drawn, answers = random.Random(f"{seed}/{who}"), []
    for number in range(PROPOSALS):
        node, amount = f"n{drawn.randrange(NODES)}", {"cpu_millis": drawn.randrange(1, 4)}
        body = {"tenant_id": "acme", "commitment": placement(f"c{drawn.randrange(40)}", node, amount)}
        body["precondition"] = free(node, amount)
        if answers and drawn.random() < 0.4:
            body = {"tenant_id": "acme", "commitment": {"kind": "Revocation", "index": drawn.choice(answers)[1]}}
        client = drawn.choice(clients)
        answer = await client.post("/v1/commitments", json=body, headers={"Idempotency-Key": f"{who}-{number}"})
        assert answer.status_code in (201, 409), answer.text
        answers.append((answer.status_code, answer.json()["index"]))
        if number % 8 == who:
            path, capacity = f"/v1/nodes/{node}/capacity", {"cpu_millis": drawn.randrange(4, 12)}
            (await client.put(path, json={"tenant_id": "acme", "capacity": capacity})).raise_for_status()
    return answers


@pytest.mark.exhaustive
@pytest.mark.parametrize("nodes", [1, 2])
async def test_each_is_judged_on_the_chain_before_it(
    run_server: RunServer, make_settings: MakeSettings, superuser: asyncpg.Connection, nodes: int
) -> None:
    async with run_server(make_settings("one")) as one, run_server(make_settings("two")) as two:
        clients = [one, two][:nodes]
        schedulers = [asyncio.create_task(schedule(clients, who, nodes)) for who in range(SCHEDULERS)]
        await asyncio.gather(*(rush(client, who) for who, client in enumerate(clients)))
        answers = [answer for task in schedulers for answer in await task]
        await until(lambda: followed(superuser), "the tables follow")
        promised = await two.get("/v1/commitments", params={"tenant_id": "acme", "limit": 1000})
        verdict = (await one.get("/v1/chain/verify", params={"tenant_id": "acme"})).json()
    log: naive.Log = []
    for entry in await Chains(superuser).sound("acme"):
        said = json.loads(entry["payload"])
        if entry["action"] in ("PROPOSE_ACCEPTED", "PROPOSE_REJECTED"):
            expected = naive.verdict(log, said)
            assert (said.get("rejection") or {}).get("reason") == expected, entry["seq"]
            assert (entry["action"] == "PROPOSE_ACCEPTED") == (expected is None), entry["seq"]
        log.append((entry["action"], said))
    assert [item["index"] for item in promised.json()["items"]] == sorted(naive.active(log))
    for status, index in answers:
        assert log[index - 1][0] == ("PROPOSE_ACCEPTED" if status == 201 else "PROPOSE_REJECTED")
    actions = [action for action, _ in log]
    assert actions.count("ENQUEUE") == nodes * REQUESTS * LINES
    assert (verdict["valid"], verdict["verdicts"]["projection"]) == (True, "ok")
