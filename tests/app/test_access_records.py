"""Who did, was refused or read what: in the chain, in the node's access log, and in what the API tells of it."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import asyncpg
import httpx
import pytest

from app.share.bundle.importer import BundleImporter
from app.write.intake import access_records
from app.write.intake.access_records import AccessLog, AccessRecords
from ledger.errors import ChainDamagedError, NotReadyError
from ledger.facts.events import SystemAction
from tests.app.chains import Chains, until
from tests.app.served import Serve


async def entries(superuser: asyncpg.Connection, action: SystemAction, tenant_id: str = "_system") -> list[Any]:
    """Payloads of the tenant's entries of this action."""
    rows = await superuser.fetch(
        "SELECT payload FROM scheduler.scheduler_log WHERE tenant_id = $1 AND action = $2 ORDER BY seq",
        *(tenant_id, action),
    )
    return [json.loads(row["payload"]) for row in rows]


async def lines(root: httpx.AsyncClient, tenant_id: str) -> list[dict[str, Any]]:
    answer = await root.get("/v1/access-log", params={"tenant_id": tenant_id})
    assert answer.status_code == 200, answer.text
    found: list[dict[str, Any]] = answer.json()["items"]
    return found


async def test_what_an_operator_or_admin_does_is_an_entry_before_it_is_done(
    serve: Serve, superuser: asyncpg.Connection
) -> None:
    async with serve() as served, served.client(served.root) as root:
        await root.post("/v1/jobs", json={"tenant_id": "acme"})
        assert (await root.post("/v1/snapshots", json={"tenant_id": "acme"})).status_code == 201
        body = {"fields": ["spec.user"], "subject": "spec.user"}
        assert (await root.put("/v1/tenants/acme/privacy", json=body)).status_code == 200
        assert (await root.post("/v1/keys/rotate", json={})).status_code == 201
        acts = await entries(superuser, SystemAction.ACT_ALLOWED)
        assert [(act["actor"], act["right"], act["route"], act.get("tenant_id")) for act in acts] == [
            ("root", "operate", "POST /v1/snapshots", "acme"),
            ("root", "admin", "PUT /v1/tenants/{tenant_id}/privacy", "acme"),
            ("root", "admin", "POST /v1/keys/rotate", None),
        ]
        served.services[BundleImporter]._on_damaged(ChainDamagedError("_system", "takes nothing"))
        snapshots = (await root.get("/v1/snapshots?tenant_id=acme")).json()["items"]
        assert (await root.post("/v1/snapshots", json={"tenant_id": "acme"})).status_code == 409
        assert (await root.get("/v1/snapshots?tenant_id=acme")).json()["items"] == snapshots


async def test_bad_input_and_reads_are_no_acts(serve: Serve, superuser: asyncpg.Connection) -> None:
    async with serve() as served, served.client(served.root) as root:
        assert (await root.post("/v1/snapshots", json={"tenant_id": "acme", "more": 1})).status_code == 422
        assert (await root.get("/v1/tokens")).status_code == 200
        assert (await root.get("/metrics")).status_code == 200
        assert await entries(superuser, SystemAction.ACT_ALLOWED) == []


async def test_refusals_are_counted_into_one_entry(serve: Serve, superuser: asyncpg.Connection) -> None:
    async with serve() as served:
        reader = await served.issue("read", tenants="acme", name="reader")
        async with served.client(reader["token"]) as client, served.client("tally_wrong") as thief:
            for _ in range(3):
                assert (await client.post("/v1/jobs", json={"tenant_id": "acme"})).status_code == 403
            assert (await client.get("/v1/jobs?tenant_id=other")).status_code == 403
            assert (await thief.get("/v1/jobs?tenant_id=acme")).status_code == 401

        async def recorded() -> list[Any]:
            return await entries(superuser, SystemAction.ACCESS_REFUSED)

        (entry,) = await until(recorded, "the refusals are chained")
        told = [(each["problem"], each.get("actor"), each["route"], each["count"]) for each in entry["refusals"]]
        assert sorted(told, key=str) == [
            ("forbidden", "reader", "GET /v1/jobs", 1),
            ("forbidden", "reader", "POST /v1/jobs", 3),
            ("unauthenticated", None, "GET /v1/jobs", 1),
        ]
        assert entry["from"] <= entry["to"]
        async with served.client(served.root) as root:
            (line,) = [each for each in await lines(root, "other") if each["kind"] == "refusal"]
            assert (line["actor"], line["what"], line["address"]) == ("reader", {"problem": "forbidden"}, "127.0.0.1")


@pytest.mark.parametrize("name", ["%00", "x" * 60_000])
async def test_what_is_no_tenant_keeps_no_refusal_off_the_record(
    serve: Serve, superuser: asyncpg.Connection, name: str
) -> None:
    """A name that no entry can hold, and names that are too long for one together."""
    async with serve() as served:
        reader = await served.issue("read", tenants="acme", name="reader")
        async with served.client(reader["token"]) as client, served.client(None) as nobody:
            assert (await client.get("/v1/jobs?tenant_id=other")).status_code == 403
            for number in range(20):
                assert (await client.get(f"/v1/jobs?tenant_id={number}{name}")).status_code == 403
                path = f"/v1/log/{number}{'x' * 60_000}/checkpoint"
                assert (await nobody.get(path)).status_code == 401

        async def recorded() -> list[Any]:
            return await entries(superuser, SystemAction.ACCESS_REFUSED)

        (entry,) = await until(recorded, "the refusals are chained")
        told = [(each.get("actor"), each.get("tenant_id")) for each in entry["refusals"]]
        assert told == [("reader", "other"), ("reader", None), (None, None)]
        async with served.client(served.root) as root:
            assert max(len(line["path"]) for line in await lines(root, "_system")) == access_records.PATH_CHARACTERS_MAX


async def test_many_kinds_of_refusal_make_one_entry_of_a_bounded_size(
    serve: Serve, superuser: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(access_records, "REFUSALS_LISTED_MAX", 5)
    async with serve() as served:
        reader = await served.issue("read", tenants="acme", name="reader")
        async with served.client(reader["token"]) as client:
            for number in range(12):
                assert (await client.get(f"/v1/jobs?tenant_id=other-{number}")).status_code == 403

        async def recorded() -> list[Any]:
            return await entries(superuser, SystemAction.ACCESS_REFUSED)

        (entry,) = await until(recorded, "the refusals are chained")
        assert len(entry["refusals"]) == 5
        assert entry["others"] == 7


async def test_reads_of_payloads_are_lines_of_the_access_log(serve: Serve, superuser: asyncpg.Connection) -> None:
    async with serve() as served, served.client(served.root) as root:
        for job in ("one", "two"):
            await root.post("/v1/jobs", json={"tenant_id": "acme", "job_id": job})
        before = await superuser.fetchval("SELECT count(*) FROM scheduler.scheduler_log WHERE tenant_id = 'acme'")
        reader = await served.issue("read", "audit", tenants="acme", name="reader")
        async with served.client(reader["token"]) as client:
            for path in ("/v1/jobs/one", "/v1/jobs/one/events?tenant_id=acme", "/v1/jobs?tenant_id=acme"):
                assert (await client.get(path)).status_code == 200
            assert (await client.get("/v1/chain/entries?tenant_id=acme&limit=1")).status_code == 200
            assert (await client.post("/v1/bundles/export", json={"tenant_id": "acme"})).status_code == 200
            assert (await client.get("/v1/jobs/none?tenant_id=acme")).status_code == 404
            assert (await client.get("/v1/access-log?tenant_id=other")).status_code == 403
            shown = [line for line in await lines(client, "acme") if line["kind"] == "read"]
            told = [(line["kind"], line["actor"], line["route"], line["what"]) for line in shown]
        assert told == [
            ("read", "reader", "POST /v1/bundles/export", {}),
            ("read", "reader", "GET /v1/chain/entries", {"from_seq": 1, "entries": 1}),
            ("read", "reader", "GET /v1/jobs", {"jobs": 2}),
            ("read", "reader", "GET /v1/jobs/{job_id}/events", {"job_id": "one", "events": 1}),
            ("read", "reader", "GET /v1/jobs/{job_id}", {"job_id": "one"}),
        ]
        after = await superuser.fetchval("SELECT count(*) FROM scheduler.scheduler_log WHERE tenant_id = 'acme'")
        assert before == after


async def pages(root: httpx.AsyncClient, limit: int) -> list[str]:
    """All routes in the access log of acme, by pages."""
    found: list[str] = []
    parameters: dict[str, Any] = {"tenant_id": "acme", "limit": limit}
    while True:
        answer = (await root.get("/v1/access-log", params=parameters)).json()
        found += [line["path"] for line in answer["items"]]
        if answer["next_cursor"] is None:
            return found
        parameters["cursor"] = answer["next_cursor"]


async def test_the_access_log_is_told_in_pages_newest_first(serve: Serve) -> None:
    async with serve() as served, served.client(served.root) as root:
        for number in range(7):
            await root.post("/v1/jobs", json={"tenant_id": "acme", "job_id": f"job-{number}"})
            await root.get(f"/v1/jobs/job-{number}?tenant_id=acme")
        expected = [f"/v1/jobs/job-{number}" for number in reversed(range(7))]
        for limit in (1, 3, 7, 100):
            assert await pages(root, limit) == expected


async def test_a_tenant_may_have_its_reads_in_its_own_chain(
    serve: Serve, superuser: asyncpg.Connection, chains: Chains
) -> None:
    async with serve(privacy={"log_reads": ["acme", "team-*"]}) as served, served.client(served.root) as root:
        for tenant in ("acme", "team-a", "other"):
            await root.post("/v1/jobs", json={"tenant_id": tenant, "job_id": f"of-{tenant}"})
            assert (await root.get(f"/v1/jobs/of-{tenant}?tenant_id={tenant}")).status_code == 200
        assert (await root.get("/v1/jobs/none?tenant_id=acme")).status_code == 404

        async def of_both() -> bool:
            return all([await entries(superuser, SystemAction.PAYLOADS_READ, each) for each in ("acme", "team-a")])

        await until(of_both, "the reads are chained")
        (entry,) = await entries(superuser, SystemAction.PAYLOADS_READ, "acme")
        assert entry == {
            "type": "PAYLOADS_READ",
            "actor": "root",
            "route": "GET /v1/jobs/{job_id}",
            "job_id": "of-acme",
        }
        assert await entries(superuser, SystemAction.PAYLOADS_READ, "other") == []
        verdict = (await root.get("/v1/chain/verify?tenant_id=acme")).json()
        assert verdict["valid"], verdict
    await chains.sound("acme")


@pytest.mark.parametrize("name", ["cert:" + "x" * 255, "oidc:" + "\u00e9\U0001f600 '\"" * 50])
async def test_callers_with_the_longest_names_are_on_record_with_all_of_them(
    serve: Serve, superuser: asyncpg.Connection, chains: Chains, name: str
) -> None:
    async with serve(privacy={"log_reads": ["acme"]}) as served, served.client(served.root) as root:
        await root.post("/v1/jobs", json={"tenant_id": "acme"})
        records = served.services[AccessRecords]
        request = access_records.RecordedRequest(name, "GET /v1/jobs", "/v1/jobs", None)
        await records.read(request, "acme", {"jobs": 1})
        await records.act(request, "admin", None)

        async def of_both() -> list[Any]:
            acts = await entries(superuser, SystemAction.ACT_ALLOWED)
            reads = await entries(superuser, SystemAction.PAYLOADS_READ, "acme")
            return [*acts, *reads] if acts and reads else []

        assert [each["actor"] for each in await until(of_both, "both are chained")] == [name, name]
        verdict = (await root.get("/v1/chain/verify?tenant_id=acme")).json()
        assert verdict["valid"], verdict
    await chains.sound("acme")
    await chains.sound("_system")


async def test_what_is_to_be_in_the_chain_is_not_told_when_the_chain_takes_nothing(serve: Serve) -> None:
    async with serve(privacy={"log_reads": ["acme"]}) as served, served.client(served.root) as root:
        await root.post("/v1/jobs", json={"tenant_id": "acme", "job_id": "secret", "spec": {"image": "hush"}})
        served.services[BundleImporter]._on_damaged(ChainDamagedError("acme", "takes nothing"))
        for path in ("/v1/jobs/secret?tenant_id=acme", "/v1/jobs?tenant_id=acme", "/v1/chain/entries?tenant_id=acme"):
            answer = await root.get(path)
            assert answer.status_code == 409
            assert "hush" not in answer.text


async def test_while_nobody_is_asked_who_he_is_nothing_is_recorded_of_him(
    client: httpx.AsyncClient, superuser: asyncpg.Connection
) -> None:
    await client.post("/v1/jobs", json={"tenant_id": "acme", "job_id": "one"})
    await client.get("/v1/jobs/one")
    assert (await client.post("/v1/snapshots", json={"tenant_id": "acme"})).status_code == 201
    assert await lines(client, "acme") == []
    assert await entries(superuser, SystemAction.ACT_ALLOWED) == []


async def test_the_files_of_the_access_log_are_bounded_and_lose_the_oldest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(access_records, "FILE_BYTES", 2000)
    log = AccessLog(tmp_path)
    for number in range(400):
        log.add({"at": "now", "tenant_id": "acme", "number": number})
        await log.flush()
    files = [*tmp_path.iterdir()]
    assert len(files) == access_records.FILES_MAX
    assert {file.stat().st_mode & 0o777 for file in files} == {0o600}
    assert sum(file.stat().st_size for file in files) <= access_records.FILES_MAX * 2000
    newest, _ = await log.newest("acme", 2**63, 1000)
    numbers = [line["number"] for line in newest]
    assert numbers == [*range(399, 399 - len(numbers), -1)]
    assert len(numbers) > 200


async def test_lines_for_which_the_disk_is_too_slow_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(access_records, "QUEUE_MAX", 3)
    dropped: list[int] = []
    log = AccessLog(tmp_path, dropped.append)
    for number in range(5):
        log.add({"at": "now", "tenant_id": "acme", "number": number})
    await log.flush()
    assert [json.loads(line) for line in (tmp_path / access_records.NAME).read_text().splitlines()][-1] == {
        "at": "now",
        "dropped": 2,
    }
    assert sum(dropped) == 2


async def test_a_line_that_was_cut_off_is_passed_over(tmp_path: Path) -> None:
    log, path = AccessLog(tmp_path), tmp_path / access_records.NAME
    for number in range(2):
        log.add({"at": "now", "tenant_id": "acme", "number": number})
        await log.flush()
        with path.open("ab") as file:
            file.write(b'{"at":"20')
    log.add({"at": "now", "tenant_id": "acme", "number": 2})
    newest, _ = await log.newest("acme", 2**63, 10)
    assert [line["number"] for line in newest] == [2, 1, 0]


async def test_lines_that_the_disk_does_not_take_are_counted_until_it_does(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    dropped: list[int] = []
    log, path = AccessLog(tmp_path, dropped.append), tmp_path / access_records.NAME
    path.symlink_to("/dev/full")
    running = asyncio.create_task(log.run())
    for number in range(3):
        log.add({"at": "now", "tenant_id": "acme", "number": number})
        await log.flush()
    path.unlink()
    path.mkdir()
    with pytest.raises(NotReadyError, match="cannot be read"):
        await log.newest("acme", 2**63, 10)
    path.rmdir()
    log.add({"at": "now", "tenant_id": "acme", "number": 3})
    newest, _ = await log.newest("acme", 2**63, 10)
    assert [line["number"] for line in newest] == [3]
    assert json.loads(path.read_text().splitlines()[-1]) == {"at": "now", "dropped": 3}
    assert sum(dropped) == 3
    assert not running.done()
    running.cancel()
    await asyncio.wait([running])
    assert "number" not in capfd.readouterr().err


async def test_what_waits_is_written_when_the_node_stops(tmp_path: Path) -> None:
    log = AccessLog(tmp_path)
    running = asyncio.create_task(log.run())
    await asyncio.sleep(0)
    log.add({"at": "now", "tenant_id": "acme"})
    running.cancel()
    await asyncio.wait([running])
    assert (tmp_path / access_records.NAME).read_text().count("\n") == 1
