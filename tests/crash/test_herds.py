"""Herds of schedulers on two nodes of one ledger, of which one is killed again and again: one order, one verdict each,
nothing half placed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import asyncpg
import httpx

from tests.app.chains import Chains, until
from tests.conftest import Database
from tests.crash.conftest import Launch
from tests.crash.serve_process import ServeProcess
from tests.ledger import naive_commitments as naive

SCHEDULERS, PROPOSALS, KILLS = 8, 25, 2
NODES = 4
Answers = dict[str, tuple[int, dict[str, Any]]]
"""By key, status and body of what was answered."""


def proposal(drawn: random.Random, who: int, number: int) -> dict[str, Any]:
    """Placements, gangs and revocations that get into each other's way."""
    node, amount = f"n{drawn.randrange(NODES)}", {"cpu_millis": drawn.randrange(1, 4)}
    bet: dict[str, Any] = {"kind": "NodeFreeOf", "node": node, "at_least": amount}
    commitment: dict[str, Any] = {
        "kind": "Placement", "capsule": f"c{drawn.randrange(60)}", "node": node, "reservation": amount
    }  # fmt: skip
    draw = drawn.random()
    if draw < 0.3:
        commitment, bet = {"kind": "Revocation", "index": drawn.randrange(1, 60)}, {"kind": "None"}
    elif draw < 0.45:
        members = [
            {"capsule": f"g{who}-{number}-{n}", "node": f"n{n}", "reservation": {"cpu_millis": 1}} for n in range(NODES)
        ]
        commitment = {"kind": "GangPlacement", "gang": f"gang{drawn.randrange(4)}", "members": members}
        bet = {"kind": "GangUnplaced", "gang": commitment["gang"]}
    return {"tenant_id": "acme", "commitment": commitment, "precondition": bet}


async def schedule(who: int, seed: int, urls: Sequence[asyncio.Future[str]], answers: Answers) -> None:
    """Propose one after the other, now here, now there, each under its key until it is answered."""
    drawn = random.Random(f"{seed}/{who}")
    async with httpx.AsyncClient(trust_env=False, timeout=30) as client:
        for number in range(PROPOSALS):
            body, key = proposal(drawn, who, number), f"{who}-{number}"

            if number % 3 == 0:
                # A batch without proposals, perhaps behind those of the other node.
                job = {"tenant_id": "acme", "durability": "GLOBAL"}
                with contextlib.suppress(httpx.TransportError):
                    await client.post(f"{await asyncio.shield(urls[who % len(urls)])}/v1/jobs", json=job)

            async def answered(body: dict[str, Any] = body, key: str = key) -> httpx.Response | None:
                url = await asyncio.shield(urls[drawn.randrange(len(urls))])
                with contextlib.suppress(httpx.TransportError):  # the node is gone, and another comes
                    answer = await client.post(f"{url}/v1/commitments", json=body, headers={"Idempotency-Key": key})
                    assert answer.status_code in (201, 409, 503), answer.text
                    return None if answer.status_code == 503 else answer
                return None

            answer = await until(answered, "a node answers")
            answers[key] = answer.status_code, answer.json()


async def test_no_verdict_changes_and_nothing_is_half_placed_whoever_dies(
    launch: Launch, database: Database, tmp_path: Path, superuser: asyncpg.Connection, seed: int
) -> None:
    loop = asyncio.get_running_loop()

    async def start(name: str) -> ServeProcess:
        return await launch(tmp_path / name, database.service_url)

    children = [await start("one"), await start("two")]
    urls: list[asyncio.Future[str]] = [loop.create_future() for _ in children]
    for url, child in zip(urls, children, strict=True):
        url.set_result(await child.ready())
    async with httpx.AsyncClient(trust_env=False, timeout=60) as client:
        for node in range(NODES):
            path = f"{urls[0].result()}/v1/nodes/n{node}/capacity"
            (await client.put(path, json={"tenant_id": "acme", "capacity": {"cpu_millis": 12}})).raise_for_status()

    answers: Answers = {}
    herd = [loop.create_task(schedule(who, seed, urls, answers)) for who in range(SCHEDULERS)]
    for kill in range(1, KILLS + 1):
        while len(answers) < kill * SCHEDULERS * PROPOSALS // (KILLS + 2):
            done, _ = await asyncio.wait(herd, timeout=0.02, return_when=asyncio.FIRST_EXCEPTION)
            assert not any(task.exception() for task in done)
        urls[1] = loop.create_future()
        await children[1].kill()
        children[1] = await start("two")
        urls[1].set_result(await children[1].ready())
    await asyncio.gather(*herd)

    entries = await Chains(superuser).sound("acme")
    log: naive.Log = []
    verdicts: dict[str, tuple[int, str]] = {}
    for entry in entries:
        said = json.loads(entry["payload"])
        if entry["action"] in ("PROPOSE_ACCEPTED", "PROPOSE_REJECTED"):
            expected = naive.verdict(log, said)
            assert (entry["action"] == "PROPOSE_ACCEPTED") == (expected is None), entry["seq"]
            assert (said.get("rejection") or {}).get("reason") == expected
            verdicts[said["idempotency"]] = entry["seq"], entry["action"]
        log.append((entry["action"], said))
    assert len(verdicts) == SCHEDULERS * PROPOSALS == len(answers), "one entry each"
    by_seq = dict(verdicts.values())
    for key, (status, body) in answers.items():
        assert by_seq[body["index"]] == ("PROPOSE_ACCEPTED" if status == 201 else "PROPOSE_REJECTED"), key
    async with httpx.AsyncClient(trust_env=False, timeout=60) as client:
        for url in urls:
            found = await client.get(f"{url.result()}/v1/commitments", params={"tenant_id": "acme", "limit": 1000})
            assert [item["index"] for item in found.json()["items"]] == sorted(naive.active(log))
            verdict = await client.get(f"{url.result()}/v1/chain/verify", params={"tenant_id": "acme"})
            assert verdict.json()["valid"], verdict.text
