"""Quotas as callers meet them: 429 with a Retry-After that is true, nothing stored, counted, and on record."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import asyncpg
import httpx
import pytest

from app.edge.accepted import AccessControl, Services
from app.edge.listener import listening
from app.node.wiring import running
from app.runtime.metrics import Metrics
from app.runtime.settings.config import Settings
from app.share.bundle.importer import BundleImporter
from app.trust.quotas import Quotas
from app.write.intake.submit import Submitter
from app.write.intake.system_entries import SystemEntries
from tests.app.chains import until
from tests.app.conftest import MakeSettings, RunServer
from tests.app.served import Serve, Served
from tests.conftest import Database

SECOND_NS = 1_000_000_000
NDJSON = {"Content-Type": "application/x-ndjson"}
LINE = {"type": "JobCreated"}
COUNTED = ("principal_requests", "tenant_bytes", "exports", "verifications")


class Tuned:
    """A served node whose quotas go by a clock that is set by hand."""

    def __init__(self, services: Services, superuser: asyncpg.Connection) -> None:
        self.services = services
        self.superuser = superuser
        self.now_ns = time.monotonic_ns()
        self._refused_before = {quota: self._refused(quota) for quota in COUNTED}

    def bound(self, burst_s: float = 1.0, **counts: int | None) -> None:
        """From now on these quotas hold, and no others but those of what is under way."""
        given = self.services[Settings].quota.model_dump(exclude={"burst"}) | counts
        self.services[AccessControl].quotas = Quotas.of(
            given, burst_s, partial(self.services[Metrics].count, "quota_refusals", 1), lambda: self.now_ns
        )
        self.services[SystemEntries].new_tenants = self.services[AccessControl].quotas.new_tenants

    async def stored(self) -> int:
        """Entries of all tenants but ``_system``, once all that was taken is chained."""
        await until(lambda: not self.services[Submitter].backlog, "nothing waits")
        query = "SELECT count(*) FROM scheduler.scheduler_log WHERE tenant_id <> '_system'"
        return await self.superuser.fetchval(query)

    def refusals(self, quota: str) -> float:
        """Refusals that were counted in this test."""
        return self._refused(quota) - self._refused_before[quota]

    def _refused(self, quota: str) -> float:
        return self.services[Metrics].registry.get_sample_value("quota_refusals_total", {"quota": quota}) or 0.0


class TunedWithTokens(Tuned):
    """One that asks for tokens."""

    def __init__(self, served: Served, superuser: asyncpg.Connection) -> None:
        super().__init__(served.services, superuser)
        self.served = served


@pytest.fixture
async def tuned(
    served: Served, shared_superuser: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> TunedWithTokens:
    """The node that tests share, whose own quotas hold again afterwards."""
    monkeypatch.setattr(served.services[AccessControl], "quotas", served.services[AccessControl].quotas)
    monkeypatch.setattr(served.services[SystemEntries], "new_tenants", served.services[SystemEntries].new_tenants)
    return TunedWithTokens(served, shared_superuser)


@pytest.fixture
async def tuned_alone(serve: Serve, superuser: asyncpg.Connection) -> AsyncIterator[TunedWithTokens]:
    """A node on which no tenant has begun."""
    async with serve() as served:
        yield TunedWithTokens(served, superuser)


def lines(*tenants: str) -> bytes:
    return b"".join(json.dumps({**LINE, "tenant_id": tenant}).encode() + b"\n" for tenant in tenants)


def refused(answer: httpx.Response) -> int:
    """Seconds after which a refused request may come again."""
    assert (answer.status_code, answer.json()["type"].rpartition("/")[2]) == (429, "quota-exceeded"), answer.text
    return int(answer.headers["Retry-After"])


async def post(client: httpx.AsyncClient, tenant: str = "acme", **headers: str) -> httpx.Response:
    return await client.post("/v1/jobs", json={"tenant_id": tenant, "durability": "LOCAL"}, headers=headers)


async def test_requests_of_a_principal_are_bounded_on_every_route_and_both_ways_and_nothing_is_stored(
    tuned: TunedWithTokens,
) -> None:
    made = await tuned.served.issue("write", "read", name="ci")
    other = await tuned.served.issue("write", name="other")
    async with tuned.served.client(made["token"]) as ci, tuned.served.client(other["token"]) as another:
        assert (await post(ci)).status_code == 201
        tuned.bound(principal_requests=3)
        assert [(await post(ci)).status_code for _ in range(3)] == [201] * 3
        stored = await tuned.stored()
        for answer in (
            await post(ci),
            await post(ci, **{"X-Way": "the framework's"}),
            await ci.post("/v1/events", content=lines("acme"), headers=NDJSON),
            await ci.get("/v1/jobs?tenant_id=acme"),
            await ci.get("/v1/whoami"),
        ):
            assert refused(answer) == 1
        assert await tuned.stored() == stored
        assert tuned.refusals("principal_requests") == 5
        assert (await ci.get("/livez")).status_code == 200, "who is not asked for himself is not counted"
        assert (await post(another)).status_code == 201
        tuned.now_ns += SECOND_NS
        assert (await post(ci)).status_code == 201


async def test_bytes_of_a_principal_are_bounded_before_the_body_is_read(tuned: TunedWithTokens) -> None:
    made = await tuned.served.issue("write", name="ci")
    body = json.dumps({"tenant_id": "acme", "durability": "LOCAL", "spec": {"text": "x" * 1000}}).encode()
    headers = {"Content-Type": "application/json"}
    async with tuned.served.client(made["token"]) as ci:
        await post(ci)
        tuned.bound(burst_s=2, principal_bytes=len(body))
        assert [(await ci.post("/v1/jobs", content=body, headers=headers)).status_code for _ in range(2)] == [201] * 2
        for more in ({}, {"X-Way": "the framework's"}):
            assert refused(await ci.post("/v1/jobs", content=body, headers=headers | more)) == 1
        reader, writer = await asyncio.open_connection(ci.base_url.host, ci.base_url.port)
        head = (
            f"POST /v1/jobs HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {made['token']}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        writer.write(head.encode())
        assert b" 429 " in await reader.readline(), "it is refused though nothing of the body was sent"
        writer.close()
        tuned.now_ns += SECOND_NS
        assert (await ci.post("/v1/jobs", content=body, headers=headers)).status_code == 201


async def test_a_body_of_unknown_length_or_longer_than_the_quota_ever_holds_is_read_as_fast_as_the_quota_fills(
    tuned: TunedWithTokens,
) -> None:
    made = await tuned.served.issue("write", name="ci")
    text = json.dumps({"tenant_id": "acme", "durability": "LOCAL", "spec": {"text": "x" * 2000}}).encode()

    async def pieces() -> AsyncIterator[bytes]:
        yield text[:1000]
        yield text[1000:]

    for content in (pieces(), text):
        async with tuned.served.client(made["token"], **{"Content-Type": "application/json"}) as ci:
            tuned.bound(principal_bytes=1024)
            began_s = time.perf_counter()
            assert (await ci.post("/v1/jobs", content=content)).status_code == 201
            assert time.perf_counter() - began_s >= (len(text) - 1024) / 1024 - 0.01
            assert refused(await post(ci)) >= 1, "what was owed is owed still: this clock stands"


async def test_requests_and_lines_of_a_tenant_are_bounded_whoever_sends_or_reads_them(tuned: TunedWithTokens) -> None:
    async with tuned.served.client(tuned.served.root) as root:
        await root.post("/v1/events", content=lines("acme", "beta"), headers=NDJSON)
        tuned.bound(burst_s=10, tenant_requests=10)
        assert (await root.post("/v1/events", content=lines(*["acme"] * 97), headers=NDJSON)).status_code == 200
        assert (await post(root)).status_code == 201
        assert (await root.get("/v1/jobs?tenant_id=acme")).status_code == 200
        stored = await tuned.stored()
        answer = await root.post("/v1/events", content=lines("beta", "acme", "acme"), headers=NDJSON)
        assert refused(answer) == 1
        assert answer.json()["tenant_id"] == "acme"
        assert await tuned.stored() == stored
        too_large = await root.post("/v1/events", content=lines(*["beta"] * 101), headers=NDJSON)
        assert (too_large.status_code, await tuned.stored()) == (413, stored)
        answer = await root.post("/v1/events", content=lines(*["beta"] * 100), headers=NDJSON)
        assert answer.status_code == 200, "nothing of beta was taken for what was refused"
        assert (await post(root)).status_code == 201
        for path in ("/v1/jobs?tenant_id=acme", "/v1/chain/head?tenant_id=acme", "/v1/log/acme/checkpoint"):
            assert refused(await root.get(path)) == 1, path
        assert refused(await root.post("/v1/snapshots", json={"tenant_id": "acme"})) == 1
        assert refused(await post(root)) == 1
        assert refused(await post(root, **{"X-Way": "the framework's"})) == 1
        assert (await root.get("/v1/whoami")).status_code == 200
        tuned.now_ns += SECOND_NS
        assert (await root.post("/v1/events", content=lines(*["acme"] * 10), headers=NDJSON)).status_code == 200


async def test_lines_that_do_not_fit_are_refused_before_all_are_read_and_told_when_they_do(
    tuned: TunedWithTokens, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.runtime.sharing.LINES_PER_TURN", 10)
    async with tuned.served.client(tuned.served.root) as root:
        await post(root)
        tuned.bound(burst_s=10, tenant_requests=10)
        assert (await root.post("/v1/events", content=lines(*["acme"] * 95), headers=NDJSON)).status_code == 200
        wrong_at_the_end = lines(*["acme"] * 50) + b"{}\n"
        after_s = refused(await root.post("/v1/events", content=wrong_at_the_end, headers=NDJSON))
        tuned.now_ns += after_s * SECOND_NS
        assert (await root.post("/v1/events", content=lines(*["acme"] * 51), headers=NDJSON)).status_code == 200


async def test_bytes_of_a_tenant_are_those_of_its_lines(tuned: TunedWithTokens) -> None:
    async with tuned.served.client(tuned.served.root) as root:
        await root.post("/v1/events", content=lines("acme", "beta"), headers=NDJSON)
        size = len(lines("acme")) - 1
        tuned.bound(tenant_bytes=size * 10)
        assert (await root.post("/v1/events", content=lines(*["acme"] * 10), headers=NDJSON)).status_code == 200
        assert refused(await root.post("/v1/events", content=lines("beta", "acme"), headers=NDJSON)) == 1
        assert (await root.post("/v1/events", content=lines(*["beta"] * 10), headers=NDJSON)).status_code == 200
        assert refused(await post(root)) == 1
        assert tuned.refusals("tenant_bytes") == 2


async def test_who_has_not_the_right_takes_nothing_from_a_tenant(tuned: TunedWithTokens) -> None:
    made = await tuned.served.issue("write", "audit", "operate", tenants="mine", name="ci")
    async with tuned.served.client(made["token"]) as ci, tuned.served.client(tuned.served.root) as root:
        await post(root, "yours")
        tuned.bound(tenant_requests=1)
        for answer in (
            await post(ci, "yours"),
            await post(ci, "yours", **{"X-Way": "the framework's"}),
            await ci.get("/v1/chain/head?tenant_id=yours"),
            await ci.post("/v1/snapshots", json={"tenant_id": "yours"}),
            await ci.post("/v1/events", content=lines("yours"), headers=NDJSON),
        ):
            assert answer.status_code == 403, answer.text
        assert (await ci.get("/v1/whoami?tenant_id=yours")).status_code == 422
        assert (await post(root, "yours")).status_code == 201


async def test_a_keyed_request_that_was_refused_is_taken_once_later_and_its_replay_is_a_request_too(
    tuned_alone: TunedWithTokens, superuser: asyncpg.Connection
) -> None:
    async with tuned_alone.served.client(tuned_alone.served.root, **{"Idempotency-Key": "one"}) as root:
        await post(root, "beta")
        tuned_alone.bound(tenant_requests=1)
        body = {"tenant_id": "acme", "durability": "GLOBAL"}
        assert (await root.get("/v1/chain/head?tenant_id=acme")).status_code == 404
        assert refused(await root.post("/v1/jobs", json=body)) == 1
        tuned_alone.now_ns += SECOND_NS
        first = await root.post("/v1/jobs", json=body)
        assert (first.status_code, first.headers.get("Idempotent-Replay")) == (201, None)
        assert refused(await root.post("/v1/jobs", json=body)) == 1
        tuned_alone.now_ns += SECOND_NS
        again = await root.post("/v1/jobs", json=body)
        assert (again.status_code, again.headers["Idempotent-Replay"]) == (201, "true")
        assert again.content == first.content
    assert await superuser.fetchval("SELECT count(*) FROM scheduler.scheduler_log WHERE tenant_id = 'acme'") == 1


async def test_new_tenants_are_charged_to_whoever_lets_them_begin_when_they_do(
    tuned_alone: TunedWithTokens, superuser: asyncpg.Connection
) -> None:
    made, other = [await tuned_alone.served.issue("write", "admin", name=name) for name in ("ci", "other")]
    async with tuned_alone.served.client(made["token"]) as ci, tuned_alone.served.client(other["token"]) as another:
        await post(ci, "old")
        tuned_alone.bound(new_tenants=3)
        progress = {"tenant_id": "none", "type": "JobProgressReported", "dc_id": "a"}
        assert (await ci.post("/v1/jobs/nobody/events", json=progress)).status_code == 404
        assert [(await post(ci, tenant)).status_code for tenant in ("new-1", "new-1", "old")] == [201] * 3
        stored = await tuned_alone.stored()
        events = "/v1/events?durability=LOCAL"
        answer = await ci.post(events, content=lines("new-2", "new-3", "new-4", "old"), headers=NDJSON)
        assert refused(answer) == 1200
        too_many = await ci.post(events, content=lines("new-2", "new-3", "new-4", "new-5"), headers=NDJSON)
        assert too_many.status_code == 413
        assert await tuned_alone.stored() == stored
        assert (await ci.post(events, content=lines("new-2", "new-3", "old"), headers=NDJSON)).status_code == 200
        for way in ({}, {"X-Way": "the framework's"}, {"Idempotency-Key": "one"}):
            assert refused(await post(ci, "new-4", **way)) == 1200
        declared = await ci.put("/v1/tenants/new-5/privacy", json={"fields": ["spec.name"]})
        assert refused(declared) == 1200
        assert (await post(another, "new-4")).status_code == 201
        tuned_alone.now_ns += 1200 * SECOND_NS
        assert (await post(ci, "new-6", **{"Idempotency-Key": "one"})).status_code == 201
        assert refused(await post(ci, "new-7")) == 1200
        await tuned_alone.stored()
    begun = await superuser.fetch("SELECT payload FROM scheduler.scheduler_log WHERE action = 'TENANT_CREATED'")
    tenants = {json.loads(row["payload"])["tenant_id"] for row in begun}
    assert tenants == {"old", "new-1", "new-2", "new-3", "new-4", "new-6"}


async def test_exports_and_verifications_at_once_are_bounded_for_each_principal_and_end_with_their_client(
    tuned: TunedWithTokens,
) -> None:
    made, other = [await tuned.served.issue("audit", name=name) for name in ("ci", "other")]
    async with (
        tuned.served.client(made["token"]) as ci,
        tuned.served.client(other["token"]) as another,
        tuned.served.client(tuned.served.root) as root,
    ):
        await root.post("/v1/jobs", json={"tenant_id": "acme"})
        wanted = {"tenant_id": "acme"}
        assert (await ci.post("/v1/bundles/export", json=wanted)).status_code == 200
        assert (await ci.get("/v1/chain/verify?tenant_id=acme")).status_code == 200
        async with tuned.superuser.transaction():
            await tuned.superuser.execute("LOCK scheduler.chain_heads IN ACCESS EXCLUSIVE MODE")
            for method, path, body in (
                ("POST", "/v1/bundles/export", wanted),
                ("GET", "/v1/chain/verify?tenant_id=acme", None),
            ):
                under_way = asyncio.create_task(ci.request(method, path, json=body))
                bound = (
                    tuned.services[AccessControl].quotas.exports
                    if body
                    else tuned.services[AccessControl].quotas.verifications
                )
                await until(lambda bound=bound: bound._under_way["ci"], "it is under way")
                assert refused(await ci.request(method, path, json=body)) == 1
                waits = asyncio.create_task(another.request(method, path, json=body))
                await until(lambda bound=bound: bound._under_way["other"], "another may")
                under_way.cancel()
                waits.cancel()
                await until(lambda bound=bound: not bound._under_way, "both are gone")
        assert (await ci.post("/v1/bundles/export", json=wanted)).status_code == 200
        assert (await ci.get("/v1/chain/verify?tenant_id=acme")).status_code == 200
    assert (tuned.refusals("exports"), tuned.refusals("verifications")) == (1, 1)


async def test_imports_at_once_are_bounded_for_each_principal(
    tuned: TunedWithTokens, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = await tuned.served.issue("operate", name="ci")
    async with tuned.served.client(made["token"]) as ci:
        sending, may_end = asyncio.Event(), asyncio.Event()

        async def slow() -> AsyncIterator[bytes]:
            yield b'--x\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\n'
            sending.set()
            await may_end.wait()
            yield b"none\r\n--x--\r\n"

        headers = {"Content-Type": "multipart/form-data; boundary=x"}
        key = (await ci.get("/v1/keys")).json()["keys"][0]["public_key_pem"]
        trusted = tuned.services[Settings].data_dir / "trusted.pem"
        trusted.write_text(key)
        monkeypatch.setattr(tuned.services[BundleImporter], "_trusted_keys", trusted)
        first = asyncio.create_task(ci.post("/v1/bundles/import", content=slow(), headers=headers))
        await sending.wait()
        await until(lambda: tuned.services[AccessControl].quotas.imports._under_way["ci"], "it is under way")
        assert refused(await ci.post("/v1/bundles/import", content=b"", headers=headers)) == 1
        may_end.set()
        assert (await first).status_code == 422
        assert (await ci.post("/v1/bundles/import", content=b"", headers=headers)).status_code == 422


async def test_refusals_are_on_record(serve: Serve, superuser: asyncpg.Connection) -> None:
    async with serve(quota={"tenant_requests": 1, "burst": "1s"}) as served:
        made = await served.issue("write", name="ci")
        async with served.client(made["token"]) as ci:

            async def is_refused() -> bool:
                return (await post(ci)).status_code == 429

            await until(is_refused, "the tenant has had its share")

        async def recorded() -> Any:
            query = "SELECT payload FROM scheduler.scheduler_log WHERE action = 'ACCESS_REFUSED'"
            return [json.loads(row["payload"]) for row in await superuser.fetch(query)]

        (entry,) = await until(recorded, "the refusals are chained")
    (refusal,) = entry["refusals"]
    assert refusal.pop("count") >= 1
    assert refusal == {"actor": "ci", "route": "POST /v1/jobs", "problem": "quota-exceeded", "tenant_id": "acme"}


async def test_without_authentication_everybody_is_one_principal_and_tenants_have_bounds_all_the_same(
    database: Database, make_settings: MakeSettings, superuser: asyncpg.Connection
) -> None:
    async with (
        running(make_settings(), database.service_url) as (_service, services),
        listening(services) as (url, _serving),
    ):
        tuned = Tuned(services, superuser)
        async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=30) as client:
            tuned.bound(principal_requests=10, tenant_requests=5)
            assert (await client.post("/v1/events", content=lines(*["acme"] * 5), headers=NDJSON)).status_code == 200
            assert refused(await post(client)) == 1
            assert refused(await client.get("/v1/jobs?tenant_id=acme")) == 1
            assert [(await post(client, "beta")).status_code for _ in range(5)] == [201] * 5
            assert [(await client.get("/metrics")).status_code for _ in range(2)] == [200] * 2
            assert refused(await client.get("/metrics")) == 1
            tuned.now_ns += SECOND_NS
            metrics = (await client.get("/metrics")).text
            assert 'quota_refusals_total{quota="tenant_requests"} 2.0' in metrics
            assert 'quota_refusals_total{quota="principal_requests"} 1.0' in metrics
            assert "acme" not in metrics


@pytest.mark.parametrize("setting", ["principal_requests", "principal_bytes", "tenant_requests", "new_tenants"])
async def test_a_node_keeps_the_quotas_of_its_settings(
    run_server: RunServer, make_settings: MakeSettings, setting: str
) -> None:
    size = 1 << 16 if setting == "principal_bytes" else 1
    async with run_server(make_settings(quota={setting: size, "burst": "1s"})) as client:
        body = {"durability": "LOCAL", "spec": {"text": "x" * 60_000}}

        async def is_refused() -> bool:
            answers = [await client.post("/v1/jobs", json={"tenant_id": tenant, **body}) for tenant in ("acme", "acme")]
            answers.append(await client.post("/v1/jobs", json={"tenant_id": "beta", **body}))
            return 429 in [answer.status_code for answer in answers]

        await until(is_refused, "the quota is used up")
