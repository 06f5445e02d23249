"""Authorities outside stamp checkpoints; nothing waits for them, and what they said is judged before it counts."""

from __future__ import annotations

import asyncio
import base64
import json
import tarfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import asyncpg
import httpx
import pytest

from ledger.errors import ConfigurationError
from ledger.hlc import Hlc
from signing import key_statement, private_keys
from signing.checkpoint import open_checkpoint
from signing.key_history import revoked_facts
from signing.keys import Keyring
from tests.app.chains import until
from tests.app.conftest import MakeSettings, RunServer
from tests.app.starting import assert_no_start
from tests.app.timestamp_authority import Authority, serving_stamps
from tests.app.witness import Witness
from tests.conftest import Database
from tests.tally import run_tally

WITNESS = Witness()


@pytest.fixture(scope="module")
def shared_authority(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Authority]:
    with serving_stamps(tmp_path_factory.mktemp("authority") / "one", with_chain=True) as authority:
        yield authority


@pytest.fixture
def authority(shared_authority: Authority) -> Authority:
    """One that answers, and stamps."""
    shared_authority.status, shared_authority.answer = 200, None
    return shared_authority


@pytest.fixture
def stamped(make_settings: MakeSettings, authority: Authority) -> Any:
    """Settings of a node whose checkpoints ``authority`` stamps every second."""
    log = {
        "timestamp_authorities": [{"url": authority.url, "ca_file": str(authority.ca_file)}],
        "timestamp_interval": "1s",
        "witnesses": [WITNESS.verifier_key],
    }
    return make_settings(log=log, chain={"checkpoint_interval": "20ms"})


@pytest.fixture
async def client(run_server: RunServer, stamped: Any) -> AsyncIterator[httpx.AsyncClient]:
    async with run_server(stamped) as client:
        yield client


async def write(client: httpx.AsyncClient, count: int = 1, tenant_id: str = "acme") -> None:
    for _ in range(count):
        (await client.post("/v1/jobs", json={"tenant_id": tenant_id})).raise_for_status()


async def anchors_of(client: httpx.AsyncClient, tenant_id: str = "acme") -> list[dict[str, Any]]:
    answer = await client.get(f"/v1/log/{tenant_id}/anchors")
    return answer.json()["items"] if answer.status_code == 200 else []


async def stamped_to(client: httpx.AsyncClient, size: int, tenant_id: str = "acme") -> list[dict[str, Any]] | None:
    """The stamps, once the newest covers ``size`` entries."""
    items = await anchors_of(client, tenant_id)
    return items if items and items[0]["tree_size"] >= size else None


async def recorded_key(client: httpx.AsyncClient) -> dict[str, Any] | None:
    """The key of the node, once an entry introduces it."""
    (listed,) = (await client.get("/v1/keys")).json()["keys"]
    return listed if listed["introduced_by"] is not None else None


async def verdict_of(client: httpx.AsyncClient) -> dict[str, Any]:
    return (await client.get("/v1/chain/verify", params={"tenant_id": "acme"})).raise_for_status().json()


async def metric(client: httpx.AsyncClient, name: str) -> float:
    lines = (await client.get("/metrics")).text.splitlines()
    return next(float(line.split(" ")[1]) for line in lines if line.startswith(f"{name} "))


async def test_a_checkpoint_is_stamped_when_the_log_has_grown_and_the_stamp_is_served(
    client: httpx.AsyncClient, authority: Authority
) -> None:
    await write(client, 3)
    (stamp, *_) = await until(lambda: stamped_to(client, 3), "the checkpoint is stamped")
    note, response = stamp["checkpoint"].encode(), base64.b64decode(stamp["response"])
    assert authority.vouches_for(note, response), "openssl finds what is served to hold"
    assert not authority.vouches_for(note + b"x", response)
    keys = Keyring.from_json((await client.get("/v1/keys")).json())
    assert open_checkpoint(note, keys).size == 3
    verdict = await verdict_of(client)
    assert [(each["kind"], each["by"], each["to_seq"], each["status"]) for each in verdict["anchors"]] == [
        ("rfc3161", authority.url, 3, "ok")
    ]
    await write(client, 1)
    await until(lambda: stamped_to(client, 4), "the grown log is stamped again")
    # What has not grown is not stamped again: one more tenant is, the sizes of this one stay.
    sizes = [each["tree_size"] for each in await anchors_of(client)]
    assert sizes == sorted(set(sizes), reverse=True)
    stamps = await metric(client, "log_timestamps_total")
    (await client.post("/v1/jobs", json={"tenant_id": "other"})).raise_for_status()

    async def stamped_more() -> bool:
        return await metric(client, "log_timestamps_total") > stamps

    await until(stamped_more, "the other tenant is stamped")
    assert [each["tree_size"] for each in await anchors_of(client)] == sizes


async def test_an_authority_that_is_down_keeps_nothing_waiting_and_is_asked_again(
    client: httpx.AsyncClient, authority: Authority
) -> None:
    authority.status = 503
    await write(client, 2)

    async def failures() -> float:
        return await metric(client, "log_timestamp_failures_total")

    await until(failures, "the failure is counted")
    ready = await client.get("/readyz")
    assert ready.status_code == 200
    answer = await client.post("/v1/jobs", json={"tenant_id": "acme", "durability": "GLOBAL"})
    assert answer.json()["chain"]["seq"] == 3

    async def covered() -> bool:
        head = (await client.get("/v1/chain/head", params={"tenant_id": "acme"})).json()
        return head["tree"]["checkpoint_size"] == 3

    await until(covered, "checkpoints go on")
    assert await anchors_of(client) == []
    authority.status = 200
    await until(lambda: stamped_to(client, 3), "it is asked again")


async def test_an_answer_that_is_no_stamp_of_this_checkpoint_is_not_kept(
    client: httpx.AsyncClient, authority: Authority, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    old: list[bytes] = []

    def kept(query: bytes) -> bytes:
        old.append(authority.stamp(query))
        return old[-1]

    answers: dict[str, Callable[[bytes], bytes]] = {
        "garbage": lambda _: b"garbage",
        "too-long": lambda _: bytes(70_000),
        "of-another-authority": Authority(tmp_path / "two").reply,
        "replayed": lambda _: old[0],
    }
    with monkeypatch.context() as honest:
        honest.setattr(authority, "reply", kept)
        await write(client, tenant_id="first")
        await until(lambda: stamped_to(client, 1, "first"), "the first is stamped")
    for tenant_id, reply in answers.items():
        with monkeypatch.context() as dishonest:
            dishonest.setattr(authority, "reply", reply)
            failures = await metric(client, "log_timestamp_failures_total")
            await write(client, 2, tenant_id)

            async def failed(failures: float = failures) -> bool:
                return await metric(client, "log_timestamp_failures_total") > failures

            await until(failed, "the answer is refused")
            assert await anchors_of(client, tenant_id) == []
        await until(lambda name=tenant_id: stamped_to(client, 2, name), "an honest answer is kept")  # type: ignore[misc]


async def test_what_does_not_hold_is_reported_and_never_trusted(
    client: httpx.AsyncClient, superuser: asyncpg.Connection
) -> None:
    await write(client, 3)
    (stamp, *_) = await until(lambda: stamped_to(client, 3), "the checkpoint is stamped")
    note = (await client.get("/v1/log/acme/checkpoint")).text
    cosigned = WITNESS.cosign(note, int(time.time()))
    headers = {"content-type": "text/plain"}
    (await client.post("/v1/log/acme/cosignatures", content=cosigned, headers=headers)).raise_for_status()
    await superuser.execute("SET session_replication_role = replica")
    # A larger log is claimed to be anchored than there is; the statements are of other notes.
    forged = note.replace("\n3\n", "\n9\n", 1)
    response = base64.b64decode(stamp["response"])
    await superuser.execute(
        "UPDATE scheduler.checkpoint_timestamp SET tree_size = 9, note = $1 WHERE tenant_id = 'acme' AND tree_size = 3",
        forged,
    )
    await superuser.execute(
        "INSERT INTO scheduler.checkpoint_timestamp (tenant_id, authority, tree_size, generated_at, note, response)"
        " VALUES ('acme', 'http://nobody.example/', 9, now(), $1, $2)",
        forged,
        response,
    )
    await superuser.execute(
        "UPDATE scheduler.checkpoint_cosignature SET tree_size = 9, note = replace(note, E'\\n3\\n', E'\\n9\\n')"
    )
    verdict = await verdict_of(client)
    assert verdict["valid"]
    assert [(each["kind"], each["status"], each["to_seq"]) for each in verdict["anchors"]] == [
        ("rfc3161", "invalid", 9),
        ("rfc3161", "not_checked", 9),
        ("witness", "invalid", 9),
    ]


@pytest.mark.parametrize(("later_ms", "status"), [(1, "ok"), (0, "not_checked")])
async def test_what_was_stamped_before_a_key_was_revoked_still_counts(
    client: httpx.AsyncClient, stamped: Any, later_ms: int, status: str
) -> None:
    await write(client, 3)
    (stamp, *_) = await until(lambda: stamped_to(client, 3), "the checkpoint is stamped")
    seen_ms = int(datetime.fromisoformat(stamp["time"]).timestamp() * 1000)
    # The key in use revokes itself, as whoever holds it may.
    signer, from_hlc = private_keys.load(stamped.signing_key_uri), Hlc(seen_ms + later_ms, 0, "node")
    listed = await until(lambda: recorded_key(client), "the chain names the key")
    facts = revoked_facts(signer.key_id, (await client.get("/v1/node")).json()["node_id"], from_hlc, None)
    after = key_statement.Anchor(**listed["introduced_by"])
    said = key_statement.sign("KEY_REVOKED", facts, signer.key_id, after, signer)["statement"]
    body = {"from_hlc": from_hlc.text(), "statement": said}
    (await client.post(f"/v1/keys/{signer.key_id}/revoke", json=body)).raise_for_status()
    assert [each["status"] for each in (await verdict_of(client))["anchors"]] == [status]


async def test_what_outsiders_said_travels_in_bundles_and_is_judged_there(
    client: httpx.AsyncClient, authority: Authority, tmp_path: Path
) -> None:
    await write(client, 3)
    await until(lambda: stamped_to(client, 3), "the checkpoint is stamped")
    note = (await client.get("/v1/log/acme/checkpoint")).text
    cosigned = WITNESS.cosign(note.partition("\n\n")[0] + "\n\n" + note.partition("\n\n")[2], int(time.time()))
    headers = {"content-type": "text/plain"}
    (await client.post("/v1/log/acme/cosignatures", content=cosigned, headers=headers)).raise_for_status()
    await write(client, 5)
    bundle = (await client.post("/v1/bundles/export", json={"tenant_id": "acme"})).raise_for_status().content
    (tmp_path / "acme.tar").write_bytes(bundle)
    (tmp_path / "keys.json").write_text((await client.get("/v1/keys")).text)
    (tmp_path / "witness.vkey").write_text(f"{WITNESS.verifier_key}\n")

    async def verify(*options: str) -> dict[tuple[str, int], str]:
        command = ("verify-bundle", tmp_path / "acme.tar", "--json", "--keys", tmp_path / "keys.json", *options)
        done = await asyncio.to_thread(run_tally, *command)
        assert done.returncode == 0, done.stdout + done.stderr
        return {(each["kind"], each["to_seq"]): each["status"] for each in json.loads(done.stdout)["anchors"]}

    given = ("--tsa-ca", str(authority.ca_file), "--witness-key", str(tmp_path / "witness.vkey"))
    unjudged, judged = await verify(), await verify(*given)
    assert {kind for kind, _ in judged} == {"rfc3161", "witness"}
    assert {*judged.values()} == {"ok"}
    assert unjudged == dict.fromkeys(judged, "not_checked")
    with tarfile.open(tmp_path / "acme.tar") as tar:
        member = tar.extractfile("anchors.json")
        assert member is not None
        (stamp,) = [each for each in json.load(member)["anchors"] if each["kind"] == "rfc3161"]
    response, stamped = base64.b64decode(stamp["response"]), stamp["checkpoint"].encode()
    assert authority.vouches_for(stamped, response), "as it was received"
    other = Authority(tmp_path / "other")
    assert (await verify("--tsa-ca", str(other.ca_file)))["rfc3161", max(size for _, size in judged)] in ("invalid",)


async def test_the_anchors_of_another_tenant_anchor_nothing(
    client: httpx.AsyncClient, superuser: asyncpg.Connection
) -> None:
    await write(client, 3)
    await until(lambda: stamped_to(client, 3), "the checkpoint is stamped")
    (await client.post("/v1/jobs", json={"tenant_id": "other"})).raise_for_status()
    await superuser.execute(
        "INSERT INTO scheduler.checkpoint_timestamp (tenant_id, authority, tree_size, generated_at, note, response)"
        " SELECT 'other', authority, 1000, generated_at, note, response FROM scheduler.checkpoint_timestamp"
        " WHERE tenant_id = 'acme' ORDER BY tree_size DESC LIMIT 1"
    )
    verdict = (await client.get("/v1/chain/verify", params={"tenant_id": "other"})).json()
    assert [each["status"] for each in verdict["anchors"]] == ["invalid"]
    assert "log" in verdict["anchors"][0]["detail"]


async def test_tally_verify_judges_outsiders_by_what_the_caller_brings(
    client: httpx.AsyncClient, authority: Authority, tmp_path: Path, database: Database
) -> None:
    await write(client, 3)
    await until(lambda: stamped_to(client, 3), "the checkpoint is stamped")
    note = WITNESS.cosign((await client.get("/v1/log/acme/checkpoint")).text, int(time.time()))
    headers = {"content-type": "text/plain"}
    (await client.post("/v1/log/acme/cosignatures", content=note, headers=headers)).raise_for_status()
    await write(client, 2)
    (await client.post("/v1/snapshots", json={"tenant_id": "acme"})).raise_for_status()
    kept, keys, other = tmp_path / "kept", tmp_path / "keys.json", Authority(tmp_path / "two")
    kept.write_text(note)
    keys.write_text((await client.get("/v1/keys")).text)
    ours = ["--tsa-ca", str(authority.ca_file), "--witness-key", WITNESS.verifier_key]
    direct = ["--dsn", database.service_url, "--keys", str(keys)]
    for source in (["--url", str(client.base_url)], direct):
        verdict = await tally(0, "verify", "-t", "acme", *source, *ours, "--checkpoint", str(kept))
        found = {(each["kind"], each["to_seq"], each["status"]) for each in verdict["anchors"]}
        assert ("witness", 3, "ok") in found
        assert ("rfc3161", "ok") in {(kind, status) for kind, _, status in found}
        strange = await tally(0, "verify", "-t", "acme", *source, "--tsa-ca", str(other.ca_file))
        assert "invalid" in {each["status"] for each in strange["anchors"] if each["kind"] == "rfc3161"}
    kept.write_text(note.replace(WITNESS.name, Witness(seed=7).name)[:-8] + "AAAAAAA=\n")
    await tally(2, "verify", "-t", "acme", "--url", str(client.base_url), *ours, "--checkpoint", str(kept))


async def tally(code: int, *arguments: str) -> dict[str, Any]:
    done = await asyncio.to_thread(run_tally, *arguments, "--json")
    assert done.returncode == code, done.stderr + done.stdout
    return json.loads(done.stdout) if done.stdout.startswith("{") else {}


async def test_a_ca_file_that_holds_no_certificate_stops_the_start(
    run_server: RunServer, make_settings: MakeSettings, tmp_path: Path
) -> None:
    (tmp_path / "empty.pem").write_text("")
    authorities = [{"url": "http://127.0.0.1:1/", "ca_file": str(tmp_path / "empty.pem")}]
    await assert_no_start(
        run_server(make_settings(log={"timestamp_authorities": authorities})), ConfigurationError, match=r"empty\.pem"
    )
