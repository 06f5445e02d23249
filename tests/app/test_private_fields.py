"""Private fields of a running service: nowhere in clear, shown while their key lives, refused rather than leaked."""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import io
import json
import tarfile
from pathlib import Path
from typing import Any

import asyncpg
import httpx
import pytest

from app.runtime.settings.config import Settings
from app.trust import subject_keys
from tests.app.admitting import start_recorded
from tests.app.chains import Chains, until
from tests.app.client import Client
from tests.app.conftest import MakeSettings, RunServer
from tests.app.postgres_proxy import PostgresProxy
from tests.app.shared import Shared

FIELDS = ["spec.user", "spec.address", "requestor", "reason", "error", "aggregate_metrics.by"]
SUBJECT = "spec.user"
ALICE, BOB = "alice-7c1f@example.org", "bob-99e2@example.org"
SECRETS = (ALICE, BOB, "Elm Street 13", "wants out-5a5a", "stack of alice-88", "metrics-of-bob-3")
NDJSON = {"content-type": "application/x-ndjson"}


@pytest.fixture
def settings(make_settings: MakeSettings) -> Settings:
    return make_settings()


@pytest.fixture
def client(shared_client: Client) -> Client:
    """A client of the node that tests share; a node that is restarted, or harmed, is one of ``run_server``."""
    return shared_client


async def declare(client: Client, fields: list[str] = FIELDS, subject: str | None = SUBJECT) -> Any:
    answer = await client.put(f"/v1/tenants/{client.tenant}/privacy", json={"fields": fields, "subject": subject})
    assert answer.status_code == 200, answer.text
    return answer.json()


async def submit(client: Client, path: str = "/v1/jobs", *, key: str | None = None, **body: Any) -> Any:
    headers = {} if key is None else {"Idempotency-Key": key}
    answer = await client.post(path, json={"tenant_id": client.tenant, **body}, headers=headers)
    assert answer.status_code == 201, answer.text
    return answer.json()


async def erase(client: Client, subject: str) -> httpx.Response:
    body = {"subject": subject, "reason": "request 4711"}
    return await client.post(f"/v1/tenants/{client.tenant}/erasures", json=body)


async def job(client: Client, job_id: str, **params: Any) -> Any:
    answer = await client.get(f"/v1/jobs/{job_id}", params={"tenant_id": client.tenant, **params})
    assert answer.status_code == 200, answer.text
    return answer.json()


async def events(client: Client, job_id: str) -> list[Any]:
    return (await client.get(f"/v1/jobs/{job_id}/events", params={"tenant_id": client.tenant})).json()["items"]


def problem(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["type"].rsplit("/", 1)[-1]


async def two_jobs(client: Client) -> None:
    """A job of alice that fails, and one of bob that completes, by every way in that there is."""
    await submit(
        client, job_id="a", spec={"user": ALICE, "address": {"street": "Elm Street 13"}, "cpu": 4}, key="create-a"
    )
    lines: list[dict[str, Any]] = [
        {"type": "JobCreated", "job_id": "b", "spec": {"user": BOB, "n": [1, {"user": "in clear"}]}},
        {"type": "JobAccepted", "job_id": "b", "dc_id": "use1"},
        {"type": "JobCompleted", "job_id": "b", "aggregate_metrics": {"by": "metrics-of-bob-3"}, "subject": BOB},
        {"type": "JobCancellationRequested", "job_id": "a", "reason": "wants out-5a5a", "subject": ALICE},
    ]
    content = "".join(json.dumps({"tenant_id": client.tenant, **line}) + "\n" for line in lines)
    answer = await client.post(
        "/v1/events?durability=GLOBAL", content=content, headers=NDJSON | {"idempotency-key": "n"}
    )
    assert answer.status_code == 200, answer.text
    await submit(client, "/v1/jobs/a/cancel", requestor=ALICE, subject=ALICE)
    await submit(client, "/v1/jobs/a/events", type="JobFailed", error="stack of alice-88", subject=ALICE)


async def everything_stored(superuser: asyncpg.Connection) -> bytes:
    """Every row of every table as text."""
    tables = await superuser.fetch(
        "SELECT relname FROM pg_class WHERE relnamespace = 'scheduler'::regnamespace AND relkind IN ('r', 'v')"
    )
    out = io.BytesIO()
    for (name,) in tables:
        await superuser.copy_from_query(f"SELECT t::text FROM scheduler.{name} t", output=out)
    return out.getvalue()


def plain_parts(bundle: bytes) -> bytes:
    with tarfile.open(fileobj=io.BytesIO(bundle)) as tar:
        parts = {name: part.read() for name in tar.getnames() if (part := tar.extractfile(name)) is not None}
    return b"".join(gzip.decompress(part) if name.endswith(".gz") else part for name, part in parts.items())


def seen_in(stored: bytes) -> list[str]:
    """Secrets that stand in these bytes, as they are or base64."""
    return [secret for secret in SECRETS if secret.encode() in stored or secret[:9].encode().hex().encode() in stored]


async def test_private_values_are_shown_and_stand_nowhere_in_clear(
    run_server: RunServer, settings: Settings, superuser: asyncpg.Connection, capfd: pytest.CaptureFixture[str]
) -> None:
    async with run_server(settings) as client:
        await declare(client)
        await two_jobs(client)
        a, b = await job(client, "a"), await job(client, "b")
        assert a["spec"] == {"user": ALICE, "address": {"street": "Elm Street 13"}, "cpu": 4}
        assert (a["status"], a["error"]) == ("CANCELLED", "stack of alice-88")
        assert b["spec"] == {"user": BOB, "n": [1, {"user": "in clear"}]}
        assert b["result"] == {"aggregate_metrics": {"by": "metrics-of-bob-3"}}
        as_of = await job(client, "a", as_of=a["created_hlc"])
        assert (as_of["spec"], as_of["error"]) == (a["spec"], None)
        listed = (await client.get("/v1/jobs", params={"tenant_id": "acme"})).json()["items"]
        assert {item["job_id"]: item["spec"] for item in listed} == {"a": a["spec"], "b": b["spec"]}
        shown = [event["payload"] for event in await events(client, "a")]
        assert [payload["type"] for payload in shown] == [
            "JobCreated", "JobCancellationRequested", "JobCancellationRequested", "JobFailed",
        ]  # fmt: skip
        assert (shown[1]["reason"], shown[2]["requestor"]) == ("wants out-5a5a", ALICE)

        stored = await everything_stored(superuser)
        assert b"$private" in stored
        assert b'""cpu"":4' in stored
        assert seen_in(stored) == []
        entries = await client.get("/v1/chain/entries", params={"tenant_id": "acme", "limit": 1000})
        assert "$private" in entries.text
        assert seen_in(entries.content) == []
        bundle = (await client.post("/v1/bundles/export", json={"tenant_id": "acme"})).content
        assert b"$private" in plain_parts(bundle)
        assert seen_in(plain_parts(bundle)) == []
        refused = await client.post("/v1/jobs", json={"tenant_id": "acme", "spec": {"user": 7, "address": ALICE}})
        assert refused.status_code == 422
        assert seen_in(refused.content) == []
    files = [path.read_bytes() for path in settings.data_dir.rglob("*") if path.is_file()]
    assert any(b"$private" in content for content in files)
    assert seen_in(b"".join(files)) == []
    said = capfd.readouterr()
    assert "privacy_declared" in said.out + said.err
    assert seen_in((said.out + said.err).encode()) == []
    async with run_server(settings) as client:
        assert (await job(client, "a"))["spec"] == a["spec"]


async def test_a_declaration_counts_from_then_on_is_on_record_and_outlives_a_restart(
    run_server: RunServer, settings: Settings, chains: Chains
) -> None:
    async with run_server(settings) as client:
        assert problem(await client.get("/v1/tenants/acme/privacy")) == (404, "tenant-not-found")
        await submit(client, job_id="before", spec={"user": ALICE})
        assert (await client.get("/v1/tenants/acme/privacy")).json()["fields"] == []
        first = await declare(client)
        assert await declare(client) == first
        assert (first["seq"], first["fields"], first["subject"]) == (2, FIELDS, SUBJECT)
        assert "before stay as they are" in first["covers"]
    async with run_server(settings) as client:
        assert (await client.get("/v1/tenants/acme/privacy")).json() == first
        await submit(client, job_id="after", spec={"user": ALICE})
        assert (await declare(client, [], None))["seq"] == 4
        await submit(client, job_id="taken-back", spec={"user": ALICE})
        assert (await job(client, "after"))["spec"] == {"user": ALICE}
    entries = await chains.sound("acme")
    assert [entry["action"] for entry in entries] == [
        "ENQUEUE", "PRIVACY_DECLARED", "ENQUEUE", "PRIVACY_DECLARED", "ENQUEUE",
    ]  # fmt: skip
    assert [ALICE in entry["payload"] for entry in entries] == [True, False, False, False, True]
    assert json.loads(entries[1]["payload"])["fields"] == FIELDS


async def test_a_declaration_may_be_the_first_thing_a_tenant_says(client: Client, shared: Shared) -> None:
    assert (await declare(client))["seq"] == 1
    assert len(await shared.chains.sound(client.tenant)) == 1
    assert f"tenant:{client.tenant}" in [entry["job_id"] for entry in await shared.chains.sound("_system")]


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"fields": ["status"]}, "requestor"),
    ({"fields": ["spec.a"], "subject": "spec.b"}, "stored in clear"),
    ({"fields": ["spec", "spec.a"]}, "inside each other"),
    ({"fields": "spec"}, "fields"),
    ({"subject": "spec.b"}, "fields"),
    ({"fields": [], "more": 1}, "no such field"),
]


async def test_a_wrong_declaration_is_refused_and_changes_nothing(client: Client, shared: Shared) -> None:
    declared = "SELECT count(*) FROM scheduler.private_fields WHERE tenant_id = ANY($1)"
    for body, said in WRONG:
        answer = await client.put(f"/v1/tenants/{client.tenant}/privacy", json=body)
        assert problem(answer) == (422, "invalid-request"), body
        assert said in answer.json()["detail"]
        of_system = await client.put("/v1/tenants/_system/privacy", json={"fields": []})
        assert problem(of_system) == (422, "invalid-request")
        assert await shared.superuser.fetchval(declared, [client.tenant, "_system"]) == 0


async def test_an_event_that_does_not_say_whose_it_is_is_refused_whole(client: Client) -> None:
    await declare(client)
    await submit(client, job_id="a", spec={"cpu": 1})
    written = (await client.get("/v1/node")).json()["positions"]["written_lsn"]
    bodies: list[tuple[str, dict[str, Any], str]] = [
        ("/v1/jobs", {"spec": {"address": "x"}}, "subject"),
        ("/v1/jobs", {"spec": {"user": 7}}, "spec.user"),
        ("/v1/jobs", {"spec": {"user": ""}}, "spec.user"),
        ("/v1/jobs", {"spec": {"user": "u" * 257}}, "spec.user"),
        ("/v1/jobs", {"spec": {"user": "u", "address": "\0"}}, "spec.address"),
        ("/v1/jobs", {"spec": {"x": {"$private": 1}}}, "spec.x.$private"),
        ("/v1/jobs", {"spec": {}, "subject": ""}, "subject"),
        ("/v1/jobs/a/cancel", {"requestor": "who"}, "subject"),
        ("/v1/jobs/a/events", {"type": "JobFailed", "error": "e"}, "subject"),
    ]
    for path, body, where in bodies:
        answer = await client.post(path, json={"tenant_id": client.tenant, **body})
        assert problem(answer) == (422, "invalid-request"), answer.text
        assert answer.json()["path"] == where
    lines = [
        {"tenant_id": client.tenant, "type": "JobCreated"},
        {"tenant_id": client.tenant, "type": "JobCreated", "spec": {"address": 1}},
    ]
    answer = await client.post("/v1/events", content="\n".join(map(json.dumps, lines)), headers=NDJSON)
    assert problem(answer) == (422, "invalid-event")
    assert answer.json()["line"] == 2
    assert (await client.get("/v1/node")).json()["positions"]["written_lsn"] == written


async def test_what_stands_in_the_way_of_a_private_field_is_refused(client: Client) -> None:
    await declare(client, ["spec.user.name", "aggregate_metrics.by.whom"], None)
    await submit(client, job_id="a", spec={"cpu": 1}, subject=ALICE)
    written = (await client.get("/v1/node")).json()["positions"]["written_lsn"]
    ends = {"type": "JobCompleted", "aggregate_metrics": {"by": "x"}}
    bodies: list[tuple[str, dict[str, Any], str]] = [
        ("/v1/jobs", {"spec": {"user": ALICE}, "subject": ALICE}, "spec.user"),
        ("/v1/jobs", {"spec": {"user": [{"name": ALICE}]}, "subject": ALICE}, "spec.user"),
        ("/v1/jobs", {"spec": {"user": ALICE}}, "spec.user"),
        ("/v1/jobs/a/events", {**ends, "subject": ALICE}, "aggregate_metrics.by"),
    ]
    for path, body, where in bodies:
        answer = await client.post(path, json={"tenant_id": client.tenant, **body})
        assert (*problem(answer), answer.json()["path"]) == (422, "invalid-request", where), answer.text
    line = {"tenant_id": client.tenant, "type": "JobCreated", "spec": {"user": ALICE}, "subject": ALICE}
    answer = await client.post("/v1/events", content=json.dumps(line), headers=NDJSON)
    assert (*problem(answer), answer.json()["path"]) == (422, "invalid-event", "spec.user")
    assert (await client.get("/v1/node")).json()["positions"]["written_lsn"] == written


async def test_naming_a_subject_means_never_being_stored_in_clear(client: Client) -> None:
    body = {"tenant_id": client.tenant, "spec": {"user": ALICE}, "subject": ALICE}
    written = (await client.get("/v1/node")).json()["positions"]["written_lsn"]
    answer = await client.post("/v1/jobs", json=body)
    assert problem(answer) == (422, "invalid-request")
    assert answer.json()["path"] == "subject"
    answer = await client.post("/v1/events", content=json.dumps({**body, "type": "JobCreated"}), headers=NDJSON)
    assert problem(answer) == (422, "invalid-event")
    assert (await client.get("/v1/node")).json()["positions"]["written_lsn"] == written


async def test_a_keyed_request_is_answered_alike_and_its_digest_tells_nothing(
    run_server: RunServer, settings: Settings, superuser: asyncpg.Connection
) -> None:
    def body(name: str, n: int = 1) -> bytes:
        return json.dumps({"tenant_id": "acme", "spec": {"user": name, "n": n}}).encode()

    async def post(client: httpx.AsyncClient, key: str, content: bytes) -> httpx.Response:
        headers = {"Content-Type": "application/json", "Idempotency-Key": key}
        return await client.post("/v1/jobs", content=content, headers=headers)

    async with run_server(settings) as client:
        earlier = await post(client, "earlier", body(BOB))
        await declare(client)
        first = await post(client, "one", body(ALICE))
        again = await post(client, "one", body(ALICE))
        assert (again.content, again.headers["idempotent-replay"]) == (first.content, "true")
        assert problem(await post(client, "one", body(ALICE, 2))) == (422, "idempotency-key-reused")
        assert (await post(client, "earlier", body(BOB))).content == earlier.content
    digests = {
        row["key"]: bytes(row["body_digest"]) for row in await superuser.fetch("SELECT * FROM scheduler.idempotency")
    }
    assert digests["earlier"] == hashlib.sha256(b"\n" + body(BOB)).digest()
    assert hashlib.sha256(b"\n" + body(ALICE)).digest() not in digests.values()
    async with run_server(settings) as client:
        assert (await post(client, "one", body(ALICE))).content == first.content
        assert problem(await post(client, "one", body(BOB))) == (422, "idempotency-key-reused")
        await declare(client, [], None)
        assert (await post(client, "one", body(ALICE))).content == first.content


async def test_while_the_database_is_away_only_subjects_whose_keys_are_held_are_recorded(
    run_server: RunServer, settings: Settings, proxy: PostgresProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with run_server(settings, url=proxy.url) as client:
        await start_recorded(client)
        await declare(client)
        await submit(client, job_id="a", spec={"user": ALICE})
        await proxy.refuse()
        await submit(client, job_id="a2", spec={"user": ALICE}, durability="LOCAL")
        await submit(client, job_id="plain", spec={}, durability="LOCAL")
        written = (await client.get("/v1/node")).json()["positions"]["written_lsn"]
        body = {"tenant_id": "acme", "spec": {"user": BOB}, "durability": "LOCAL"}
        answer = await client.post("/v1/jobs", json=body)
        assert problem(answer) == (503, "not-ready")
        monkeypatch.setattr(subject_keys, "monotonic", _hours_later)
        answer = await client.post("/v1/jobs", json={**body, "spec": {"user": ALICE}})
        assert problem(answer) == (503, "not-ready"), "a key is not used for ever without asking what was erased"
        monkeypatch.undo()
        assert (await client.get("/v1/node")).json()["positions"]["written_lsn"] == written
        await proxy.accept()
        assert (await submit(client, job_id="b", spec={"user": BOB}))["job_id"] == "b"
        assert (await job(client, "a2"))["spec"] == {"user": ALICE}


def _hours_later(*, real: Any = subject_keys.monotonic) -> float:
    return float(real() + 3600)


async def test_without_the_master_key_nothing_private_is_taken_and_the_rest_goes_on(
    run_server: RunServer, make_settings: MakeSettings, settings: Settings, tmp_path: Path
) -> None:
    master = settings.data_dir / "keys" / "privacy-master.key"
    async with run_server(settings) as client:
        await declare(client)
        await submit(client, job_id="a", spec={"user": ALICE})
    kept = master.read_bytes()
    body = {"tenant_id": "acme", "spec": {"user": ALICE}}
    for content in (None, b"tallystick-master-key-1 " + b"A" * 43 + b"=\n"):
        master.unlink()
        if content is not None:
            master.touch(0o600)
            master.write_bytes(content)
        async with run_server(settings) as client:
            assert problem(await client.post("/v1/jobs", json=body)) == (503, "privacy-unavailable")
            assert problem(await erase(client, ALICE)) == (503, "privacy-unavailable")
            assert problem(
                await client.put("/v1/tenants/other/privacy", json={"fields": ["spec"]})
            ) == (503, "privacy-unavailable")  # fmt: skip
            assert (await job(client, "a"))["spec"]["user"].keys() == {"$private"}
            await submit(client, spec={"cpu": 1})
            if content is None:
                master.touch(0o600)
    master.write_bytes(kept)
    async with run_server(settings) as client:
        assert (await job(client, "a"))["spec"] == {"user": ALICE}


async def test_what_was_sealed_elsewhere_is_shown_as_it_is_stored(client: Client) -> None:
    parts = {"alg": "A256GCM", "ciphertext": "A" * 40, "key": "ab" * 16, "nonce": "A" * 16}
    foreign = {"user": {"$private": parts}, "x": {"$private": 1}}
    await submit(client, job_id="a", spec=foreign)
    await declare(client)
    assert (await job(client, "a"))["spec"] == foreign


async def test_other_nodes_honour_a_declaration(
    run_server: RunServer, make_settings: MakeSettings, settings: Settings
) -> None:
    master = f"file:{settings.data_dir}/keys/privacy-master.key"
    other = make_settings("other", privacy={"master_key_uri": master})
    async with run_server(settings) as here, run_server(other) as there:
        await declare(here)

        async def taken_there() -> bool:
            body = {"tenant_id": "acme", "spec": {"user": BOB}, "subject": BOB}
            return (await there.post("/v1/jobs", json=body)).status_code == 201

        await until(taken_there, "the other node learns of the declaration")
        await submit(there, job_id="a", spec={"user": ALICE})
        await submit(here, job_id="a2", spec={"user": ALICE})
        assert (await job(here, "a"))["spec"] == (await job(there, "a2"))["spec"] == {"user": ALICE}
        stored = (await here.get("/v1/chain/entries", params={"tenant_id": "acme"})).json()["items"]
        payloads = [json.loads(entry["payload"]) for entry in stored[-2:]]
        assert len({payload["spec"]["user"]["$private"]["key"] for payload in payloads}) == 1

        assert (await erase(there, ALICE)).status_code == 200
        assert (await job(there, "a"))["spec"] == {"user": {"$erased": True}}

        async def erased_here() -> bool:
            return bool((await job(here, "a"))["spec"] == {"user": {"$erased": True}})

        await until(erased_here, "this node lets go of the key")
        await asyncio.gather(
            *(submit(node, spec={"user": ALICE}, job_id=f"n{n}") for n, node in enumerate((here, there)))
        )
        assert (await job(here, "n1"))["spec"] == (await job(there, "n0"))["spec"] == {"user": ALICE}


async def test_a_row_copied_under_another_key_answers_for_no_write_of_private_values(
    run_server: RunServer, settings: Settings, superuser: asyncpg.Connection
) -> None:
    async with run_server(settings) as client:
        await declare(client)
        body = {"tenant_id": "acme", "job_id": "a", "spec": {"user": ALICE}}
        await submit(client, key="k", **body)
        await submit(client, "/v1/jobs/a/cancel", key="c", requestor=ALICE, subject=ALICE)
        await superuser.execute(
            "INSERT INTO scheduler.idempotency (tenant_id, route, key, line, body_digest, seq, epoch, lsn) SELECT"
            " tenant_id, route, 'copied', line, body_digest, seq, epoch, lsn FROM scheduler.idempotency WHERE key = 'k'"
        )
        for name, code in (("copied", 409), ("k", 201)):
            answer = await client.post("/v1/jobs", json=body, headers={"Idempotency-Key": name})
            assert answer.status_code == code, answer.text
