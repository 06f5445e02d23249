"""Who sent an event is a fact of it: put there by the service, hashed and chained, shown, and nobody else's to say."""

from __future__ import annotations

import json
from typing import Any

import asyncpg
import httpx
import pytest

from ledger import canonical
from tests.app.chains import Chains, until
from tests.app.served import Serve, Served

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


async def test_a_replay_keeps_the_first_actor(
    served: Served, tenant: str, shared_superuser: asyncpg.Connection
) -> None:
    one, two = [await served.issue("write", tenants=tenant, name=name) for name in ("first", "second")]
    body = {"tenant_id": tenant, "job_id": "one", "durability": "GLOBAL"}
    async with served.client(one["token"]) as first, served.client(two["token"]) as second:
        answers = [
            await client.post("/v1/jobs", json=body, headers={"Idempotency-Key": "k"}) for client in (first, second)
        ]
    assert answers[0].content == answers[1].content, answers[1].text
    assert answers[1].headers["Idempotent-Replay"] == "true"
    assert [payload["actor"] for payload in await payloads(shared_superuser, tenant)] == ["first"]


@pytest.mark.parametrize("way", ["plain", "lines", "keyed"])
async def test_the_actor_may_be_private(
    served: Served, tenant: str, shared_superuser: asyncpg.Connection, way: str
) -> None:
    async with served.client(served.root) as root:
        declared = await root.put(f"/v1/tenants/{tenant}/privacy", json={"fields": ["actor"], "subject": "actor"})
        assert declared.status_code == 200, declared.text
        job = {"tenant_id": tenant, "job_id": "one", "durability": "GLOBAL"}
        if way == "lines":
            line = json.dumps({"tenant_id": tenant, "job_id": "one", "type": "JobCreated"})
            answer = await root.post("/v1/events?durability=GLOBAL", content=line, headers=NDJSON)
        else:
            headers = {"Idempotency-Key": "k"} if way == "keyed" else {}
            answer = await root.post("/v1/jobs", json=job, headers=headers)
        assert answer.is_success, answer.text
        stored = await shared_superuser.fetchval(
            "SELECT payload::text FROM scheduler.scheduler_log WHERE tenant_id = $1 AND job_id = 'one'",
            tenant,
        )
        assert '"root"' not in stored
        assert (await root.get(f"/v1/jobs/one?tenant_id={tenant}")).json()["actor"] == "root"
        (event,) = (await root.get(f"/v1/jobs/one/events?tenant_id={tenant}")).json()["items"]
        assert event["actor"] == event["payload"]["actor"] == "root"
        assert (await root.post(f"/v1/tenants/{tenant}/erasures", json={"subject": "root"})).status_code == 200
        erased = (await root.get(f"/v1/jobs/one?tenant_id={tenant}")).json()["actor"]
        assert erased != "root"


async def test_who_decided_and_who_read_stays_in_clear_where_the_actor_is_private(
    serve: Serve, superuser: asyncpg.Connection
) -> None:
    bound = {"kind": "IdentityBind", "capsule": "a", "identity": "x"}
    async with serve(privacy={"log_reads": ["acme"]}) as served, served.client(served.root) as root:
        declared = await root.put("/v1/tenants/acme/privacy", json={"fields": ["actor"], "subject": "actor"})
        assert declared.status_code == 200, declared.text
        await root.post("/v1/jobs", json={"tenant_id": "acme", "job_id": "one", "durability": "GLOBAL"})
        for key, status in (("k-1", 201), ("k-2", 409)):
            wanted = {"tenant_id": "acme", "commitment": bound}
            answer = await root.post("/v1/commitments", json=wanted, headers={"Idempotency-Key": key})
            assert answer.status_code == status, answer.text
        capacity = {"tenant_id": "acme", "capacity": {"cpu_millis": 1}}
        assert (await root.put("/v1/nodes/n1/capacity", json=capacity)).is_success
        assert (await root.get("/v1/jobs/one?tenant_id=acme")).status_code == 200
        assert (await root.post("/v1/tenants/acme/erasures", json={"subject": "root"})).status_code == 200
        query = "SELECT action FROM scheduler.scheduler_log WHERE tenant_id = 'acme' AND payload ->> 'actor' = 'root'"

        async def in_clear() -> set[str]:
            found = {row["action"] for row in await superuser.fetch(query)}
            return found if "PAYLOADS_READ" in found else set()

        found = await until(in_clear, "the read is chained")
    assert found == {"PROPOSE_ACCEPTED", "PROPOSE_REJECTED", "CAPACITY_SET", "PAYLOADS_READ"}


async def listed(client: httpx.AsyncClient, tenant_id: str, actor: str, **more: Any) -> tuple[list[str], str | None]:
    """Ids of the jobs of the tenant that ``actor`` created, and the cursor of those behind them."""
    answer = await client.get("/v1/jobs", params={"tenant_id": tenant_id, "actor": actor, **more})
    assert answer.status_code == 200, answer.text
    page = answer.json()
    assert all(job["actor"] == actor for job in page["items"])
    return [job["job_id"] for job in page["items"]], page["next_cursor"]


async def test_jobs_are_found_by_who_created_them(serve: Serve, chains: Chains) -> None:
    async with serve() as served:
        first, second = [await served.issue("write", "read", tenants="acme", name=f"ci-{n}") for n in (1, 2)]
        async with served.client(first["token"]) as one, served.client(second["token"]) as two:
            for number in range(6):
                job = {"tenant_id": "acme", "job_id": f"job-{number}"}
                assert (await (one, two)[number % 2].post("/v1/jobs", json=job)).status_code == 201
            failed = {"tenant_id": "acme", "type": "JobFailed", "error": "e"}
            for number in (2, 3):
                assert (await two.post(f"/v1/jobs/job-{number}/events", json=failed)).status_code == 201
            assert await listed(two, "acme", "ci-1", consistency="strong") == (["job-4", "job-2", "job-0"], None)
            assert await listed(two, "acme", "ci-2") == (["job-5", "job-3", "job-1"], None)
            assert await listed(two, "acme", "ci-1", status="FAILED") == (["job-2"], None)
            assert await listed(two, "acme", "ci") == ([], None)
            page, cursor = await listed(one, "acme", "ci-1", limit=2)
            assert page == ["job-4", "job-2"]
            assert await listed(one, "acme", "ci-1", limit=2, cursor=cursor) == (["job-0"], None)
            for other in ({"actor": "ci-2"}, {}):
                params = {"tenant_id": "acme", "limit": 2, "cursor": cursor, **other}
                assert (await one.get("/v1/jobs", params=params)).json()["path"] == "cursor"
            for odd in ("", "n" * 257, "a\0b"):
                answer = await one.get("/v1/jobs", params={"tenant_id": "acme", "actor": odd})
                assert (answer.status_code, answer.json()["path"]) == (422, "actor")
            assert await listed(one, "acme", "\U0001f6f0" * 256, limit=1) == ([], None)
            assert (await one.get("/v1/jobs", params={"tenant_id": "other", "actor": "ci-1"})).status_code == 403
    await chains.sound("acme")


async def test_a_list_of_a_principal_of_a_long_name_goes_on(served: Served, tenant: str) -> None:
    name = "n" * 128
    async with served.client((await served.issue("write", "read", name=name))["token"]) as client:
        lines = "".join(json.dumps({"tenant_id": tenant, "type": "JobCreated", "job_id": f"j{n}"}) for n in range(3))
        answer = await client.post("/v1/events", content=lines.replace("}{", "}\n{"), headers=NDJSON)
        assert answer.status_code == 200, answer.text
        _, cursor = await listed(client, tenant, name, limit=2, consistency="strong")
        assert await listed(client, tenant, name, limit=2, cursor=cursor) == (["j0"], None)
        assert cursor is not None
        assert len(cursor) < 200


async def test_whose_name_is_private_is_not_found_by_it(
    served: Served, tenant: str, shared_superuser: asyncpg.Connection
) -> None:
    async with served.client(served.root) as root:
        await root.put(f"/v1/tenants/{tenant}/privacy", json={"fields": ["actor"], "subject": "actor"})
        await root.post("/v1/jobs", json={"tenant_id": tenant, "job_id": "one", "durability": "GLOBAL"})
        assert await listed(root, tenant, "root", consistency="strong") == ([], None)
    rows = await shared_superuser.fetch("SELECT created_by FROM scheduler.jobs WHERE tenant_id = $1", tenant)
    assert [row["created_by"] for row in rows] == [None]
