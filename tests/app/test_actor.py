"""Who sent an event is a fact of it: put there by the service, hashed and chained, shown, and nobody else's to say."""

from __future__ import annotations

import json
from typing import Any

import asyncpg
import httpx
import pytest

from ledger import canonical
from tests.app.chains import Chains
from tests.app.served import Serve

NDJSON = {"Content-Type": "application/x-ndjson"}


async def payloads(superuser: asyncpg.Connection, tenant_id: str) -> list[dict[str, Any]]:
    """Payloads of the tenant's entries, in seq order; each is in canonical form."""
    rows = await superuser.fetch(
        "SELECT payload::text FROM scheduler.scheduler_log WHERE tenant_id = $1 ORDER BY seq", tenant_id
    )
    for row in rows:
        assert canonical.encode(json.loads(row["payload"])) == row["payload"].encode()
    return [json.loads(row["payload"]) for row in rows]


async def test_every_way_to_write_says_who_wrote(serve: Serve, superuser: asyncpg.Connection, chains: Chains) -> None:
    async with serve() as served:
        ci = await served.issue("write", "read", "audit", tenants="acme", name="ci@build.example")
        async with served.client(ci["token"]) as client:
            made = await client.post("/v1/jobs", json={"tenant_id": "acme", "job_id": "one"})
            assert made.status_code == 201
            report = {"tenant_id": "acme", "type": "JobAccepted", "dc_id": "use1"}
            assert (await client.post("/v1/jobs/one/events", json=report)).status_code == 201
            keyed = {"Idempotency-Key": "k-1"}
            body = {"tenant_id": "acme", "reason": "done"}
            assert (await client.post("/v1/jobs/one/cancel", json=body, headers=keyed)).status_code == 201
            created = {"tenant_id": "acme", "type": "JobCreated"}
            odd = {**created, "spec": {"\u00e9": [{"deep": 1.5e300}]}, "fence_token": 12}
            lines = "".join(json.dumps(line) + "\n" for line in (created, odd, {**created, "job_id": "two"}))
            answer = await client.post("/v1/events?durability=GLOBAL", content=lines, headers=NDJSON)
            assert answer.status_code == 200, answer.text
            again = await client.post(
                "/v1/events?durability=GLOBAL", content=lines, headers=NDJSON | {"Idempotency-Key": "k-2"}
            )
            assert again.status_code == 200, again.text
            job = (await client.get("/v1/jobs/one?tenant_id=acme")).json()
            assert job["actor"] == "ci@build.example"
            listed = (await client.get("/v1/jobs?tenant_id=acme&consistency=strong")).json()["items"]
            assert {item["actor"] for item in listed} == {"ci@build.example"}
            events = (await client.get("/v1/jobs/one/events?tenant_id=acme")).json()["items"]
            assert [event["actor"] for event in events] == ["ci@build.example"] * 3
            assert (await client.get("/v1/chain/verify?tenant_id=acme")).json()["valid"]
    found = await payloads(superuser, "acme")
    assert len(found) == 9
    assert {payload["actor"] for payload in found} == {"ci@build.example"}
    await chains.sound("acme")


async def test_no_client_says_who_wrote(serve: Serve) -> None:
    async with serve() as served, served.client(served.root) as root:
        job = {"tenant_id": "acme", "job_id": "one", "actor": "somebody-else"}
        answer = await root.post("/v1/jobs", json=job)
        assert (answer.status_code, answer.json()["path"]) == (422, "actor")
        lines = json.dumps({**job, "type": "JobCreated"})
        answer = await root.post("/v1/events", content=lines, headers=NDJSON)
        assert (answer.status_code, answer.json()["line"]) == (422, 1)


async def test_while_nobody_is_known_no_event_says_who_wrote_it(
    client: httpx.AsyncClient, superuser: asyncpg.Connection
) -> None:
    await client.post("/v1/jobs", json={"tenant_id": "acme", "job_id": "one", "durability": "GLOBAL"})
    assert [payload.get("actor") for payload in await payloads(superuser, "acme")] == [None]
    assert (await client.get("/v1/jobs/one")).json()["actor"] is None


async def test_a_replay_keeps_the_first_actor(serve: Serve, superuser: asyncpg.Connection) -> None:
    async with serve() as served:
        one, two = [await served.issue("write", tenants="acme", name=name) for name in ("first", "second")]
        body = {"tenant_id": "acme", "job_id": "one", "durability": "GLOBAL"}
        async with served.client(one["token"]) as first, served.client(two["token"]) as second:
            answers = [
                await client.post("/v1/jobs", json=body, headers={"Idempotency-Key": "k"}) for client in (first, second)
            ]
    assert answers[0].content == answers[1].content, answers[1].text
    assert answers[1].headers["Idempotent-Replay"] == "true"
    assert [payload["actor"] for payload in await payloads(superuser, "acme")] == ["first"]


@pytest.mark.parametrize("way", ["plain", "lines", "keyed"])
async def test_the_actor_may_be_private(serve: Serve, superuser: asyncpg.Connection, way: str) -> None:
    async with serve() as served, served.client(served.root) as root:
        declared = await root.put("/v1/tenants/acme/privacy", json={"fields": ["actor"], "subject": "actor"})
        assert declared.status_code == 200, declared.text
        job = {"tenant_id": "acme", "job_id": "one", "durability": "GLOBAL"}
        if way == "lines":
            line = json.dumps({"tenant_id": "acme", "job_id": "one", "type": "JobCreated"})
            answer = await root.post("/v1/events?durability=GLOBAL", content=line, headers=NDJSON)
        else:
            headers = {"Idempotency-Key": "k"} if way == "keyed" else {}
            answer = await root.post("/v1/jobs", json=job, headers=headers)
        assert answer.is_success, answer.text
        stored = await superuser.fetchval(
            "SELECT payload::text FROM scheduler.scheduler_log WHERE tenant_id = 'acme' AND job_id = 'one'"
        )
        assert '"root"' not in stored
        assert (await root.get("/v1/jobs/one?tenant_id=acme")).json()["actor"] == "root"
        (event,) = (await root.get("/v1/jobs/one/events?tenant_id=acme")).json()["items"]
        assert event["actor"] == event["payload"]["actor"] == "root"
        assert (await root.post("/v1/tenants/acme/erasures", json={"subject": "root"})).status_code == 200
        erased = (await root.get("/v1/jobs/one?tenant_id=acme")).json()["actor"]
        assert erased != "root"
