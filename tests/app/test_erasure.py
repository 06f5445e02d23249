"""Erasing a person: the key is gone everywhere, the chain says so once, and everything still verifies."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import asyncpg
import httpx
import pytest

from app.dev.embedded import EmbeddedPostgres
from app.runtime.settings.config import Settings
from app.share.bundle.report import counts_of
from app.store import privacy as store
from app.trust import subject_keys as keys
from app.trust.subject_keys import SubjectKeys
from ledger.errors import PrivacyUnavailableError
from signing.bundle.reader import BundleReader
from signing.judging import verify_file
from signing.keys import Keyring
from signing.private_keys import MasterKey
from tests.app.bundles import exit_code
from tests.app.chains import Chains, until
from tests.app.client import Client
from tests.app.conftest import MakeSettings, RunServer
from tests.app.service_thread import serving
from tests.app.test_private_fields import (
    ALICE,
    BOB,
    declare,
    erase,
    events,
    everything_stored,
    job,
    plain_parts,
    problem,
    seen_in,
    submit,
    two_jobs,
)
from tests.ledger.ledger_in_memory import SIGNER

VERIFY_PY = Path(__file__).resolve().parents[2] / "docs" / "formats" / "verify.py"
GONE = {"$erased": True}


@pytest.fixture
def settings(make_settings: MakeSettings) -> Settings:
    return make_settings()


@pytest.fixture
def elsewhere(postgres: EmbeddedPostgres, tmp_path: Path) -> Iterator[str]:
    """URL of another ledger, which imports what the keys in the folder ``trusted`` sign."""
    (tmp_path / "trusted").mkdir()
    (tmp_path / "trusted" / "another.pem").write_text(SIGNER.public_key_pem)
    trusted = {"trusted_keys": tmp_path / "trusted"}
    with serving(postgres, tmp_path / "elsewhere", "erasure_elsewhere", bundle=trusted) as url:
        yield url


async def test_after_an_erasure_the_person_is_gone_and_the_ledger_is_whole(
    run_server: RunServer, settings: Settings, chains: Chains, superuser: asyncpg.Connection, tmp_path: Path
) -> None:
    async with run_server(settings) as client:
        await declare(client)
        await two_jobs(client)
        before = await chains.sound("acme")
        bob = await job(client, "b")
        answer = await erase(client, ALICE)
        assert answer.status_code == 200, answer.text
        erased = answer.json()

        assert (await erase(client, ALICE)).json() == erased, "saying it again changes nothing"
        a = await job(client, "a")
        assert a["spec"] == {"user": GONE, "address": GONE, "cpu": 4}
        assert (a["status"], a["error"]) == ("CANCELLED", GONE)
        shown = [event["payload"] for event in await events(client, "a")]
        assert (shown[1]["reason"], shown[2]["requestor"], shown[3]["error"]) == (GONE, GONE, GONE)
        assert await job(client, "b") == bob

        after = await chains.sound("acme")
        assert after[:-1] == before, "nothing was rewritten"
        record = json.loads(after[-1]["payload"])
        assert (after[-1]["action"], after[-1]["seq"]) == ("SUBJECT_ERASED", erased["seq"])
        assert record["key_ids"] == erased["key_ids"]
        assert record["reason"] == "request 4711"
        assert len(erased["key_ids"]) == 1
        assert seen_in(await everything_stored(superuser)) == []

        (await client.post("/v1/snapshots", json={"tenant_id": "acme"})).raise_for_status()
        await until(lambda: verdicts_on_acme(client), "all is signed, and verifies")
        await _verify_bundle(client, tmp_path)
    async with run_server(settings) as client:
        assert (await job(client, "a"))["spec"]["user"] == GONE
        assert (await job(client, "b"))["spec"] == bob["spec"]


async def verdicts_on_acme(client: Client) -> bool:
    """Whether every aspect of the chain is ok; false while its newest entries wait for signature and checkpoint."""
    verdict = (await client.get("/v1/chain/verify", params={"tenant_id": "acme"})).json()
    assert verdict["valid"]
    return set(verdict["verdicts"].values()) == {"ok"}


async def _verify_bundle(client: Client, folder: Path) -> None:
    """The bundle of the chain verifies, by the product and by the script that shares no code with it."""
    bundle = await client.post("/v1/bundles/export", json={"tenant_id": "acme"})
    assert seen_in(plain_parts(bundle.content)) == []
    (folder / "acme.tar").write_bytes(bundle.content)
    keys = (await client.get("/v1/keys")).json()
    (folder / "keys.json").write_text(json.dumps(keys))
    verdict = await verify_file(folder / "acme.tar", Keyring.from_json(keys))
    assert exit_code(verdict) == 0
    with BundleReader.open(folder / "acme.tar") as reader:
        counts = counts_of(reader)
    assert (counts.erasures, counts.erased_keys, sum((counts.jobs or {}).values())) == (1, 1, 2)
    script = [sys.executable, str(VERIFY_PY), str(folder / "acme.tar"), "--keys", str(folder / "keys.json")]
    done = subprocess.run(script, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


async def test_a_ledger_that_imports_the_bundle_has_ciphertext_and_no_keys(
    run_server: RunServer, settings: Settings, elsewhere: str, tmp_path: Path
) -> None:
    async with run_server(settings) as client:
        await declare(client)
        await two_jobs(client)
        (await erase(client, ALICE)).raise_for_status()
        stored = (await client.get("/v1/chain/entries", params={"tenant_id": "acme"})).json()["items"]
        bundle = (await client.post("/v1/bundles/export", json={"tenant_id": "acme"})).content
        (tmp_path / "trusted" / "keys.json").write_bytes((await client.get("/v1/keys")).content)
    async with Client(base_url=elsewhere, timeout=30, trust_env=False) as client:
        answer = await client.post("/v1/bundles/import", files=[("file", ("acme.tar", bundle))])
        assert answer.json()["imported"] == len(stored), answer.text
        assert (await declare(client))["seq"] == len(stored) + 1
        for name in ("a", "b"):
            assert (await job(client, name))["spec"]["user"].keys() == {"$private"}
        entries = (await client.get("/v1/chain/entries", params={"tenant_id": "acme"})).json()["items"]
        assert [entry["payload"] for entry in entries[:-1]] == [entry["payload"] for entry in stored]
        assert problem(await erase(client, BOB)) == (404, "subject-not-found")
        await submit(client, job_id="own", spec={"user": BOB})
        assert (await erase(client, BOB)).json()["seq"] == len(stored) + 3
        assert (await client.get("/v1/chain/verify", params={"tenant_id": "acme"})).json()["valid"]


async def test_what_comes_after_an_erasure_gets_a_key_of_its_own(
    shared_client: Client, shared_superuser: asyncpg.Connection
) -> None:
    client = shared_client
    await declare(client)
    await submit(client, job_id="old", spec={"user": ALICE})
    first = (await erase(client, ALICE)).json()
    await submit(client, job_id="new", spec={"user": ALICE})
    assert (await job(client, "new"))["spec"] == {"user": ALICE}
    assert (await job(client, "old"))["spec"] == {"user": GONE}
    second = (await erase(client, ALICE)).json()
    assert second["key_ids"] != first["key_ids"]
    assert (await job(client, "new"))["spec"] == {"user": GONE}
    assert problem(await erase(client, BOB)) == (404, "subject-not-found")
    with pytest.raises(asyncpg.RestrictViolationError, match="stays erased"):
        await shared_superuser.execute(
            "UPDATE scheduler.subject_keys SET wrapped_key = '\\x00', erased_at = NULL, erased_revision = NULL"
        )


async def test_nobody_can_be_erased_where_nothing_is_private(shared_client: Client, tenant: str) -> None:
    client = shared_client
    assert problem(await erase(client, ALICE)) == (404, "subject-not-found")
    await declare(client)
    answer = await client.post("/v1/tenants/other/erasures", json={"subject": ALICE})
    assert problem(answer) == (404, "subject-not-found")
    for body in ({}, {"subject": ""}, {"subject": 1}, {"subject": "a", "more": 1}):
        answer = await client.post(f"/v1/tenants/{tenant}/erasures", json=body)
        assert problem(answer) == (422, "invalid-request")


async def test_an_erasure_that_a_crash_cut_off_is_put_on_record_once_by_the_next_start_or_the_same_call(
    run_server: RunServer, settings: Settings, pool: asyncpg.Pool, chains: Chains
) -> None:
    tenants = ("by-start", "by-call")
    async with run_server(settings) as client:
        for client.tenant in tenants:
            await declare(client)
            await submit(client, job_id="a", spec={"user": ALICE})
        node_id = (await client.get("/v1/node")).json()["node_id"]
    # What another node left, no start of this one puts on record.
    key_ids = {
        tenant_id: await _erase_and_die(pool, settings, who, tenant_id)
        for tenant_id, who in zip(tenants, (node_id, "another"), strict=True)
    }

    async def recorded() -> bool:
        return bool((await chains.entries("by-start"))[-1]["action"] == "SUBJECT_ERASED")

    for _ in range(2):
        async with run_server(settings) as client:
            await until(recorded, "the chain says so")
            for client.tenant in tenants:
                if client.tenant == "by-call":
                    assert (await erase(client, ALICE)).json()["seq"] == 3
                assert (await job(client, "a"))["spec"] == {"user": GONE}
                assert (await erase(client, ALICE)).json()["seq"] == 3
    for tenant_id, key_id in key_ids.items():
        entries = await chains.sound(tenant_id)
        assert [entry["action"] for entry in entries] == ["PRIVACY_DECLARED", "ENQUEUE", "SUBJECT_ERASED"]
        assert json.loads(entries[-1]["payload"])["key_ids"] == [key_id]


async def test_a_damaged_chain_keeps_no_other_from_saying_what_was_erased(
    run_server: RunServer, settings: Settings, pool: asyncpg.Pool, superuser: asyncpg.Connection, chains: Chains
) -> None:
    async with run_server(settings) as client:
        for tenant in ("acme", "beta"):
            await client.put(f"/v1/tenants/{tenant}/privacy", json={"fields": ["spec"]})
            body = {"tenant_id": tenant, "spec": {"a": 1}, "subject": ALICE, "durability": "GLOBAL"}
            assert (await client.post("/v1/jobs", json=body)).status_code == 201
        node_id = (await client.get("/v1/node")).json()["node_id"]
    for tenant in ("acme", "beta"):
        await _erase_and_die(pool, settings, node_id, tenant)
    await superuser.execute(
        "INSERT INTO scheduler.scheduler_log (tenant_id, seq, t_hlc, hlc_physical, hlc_logical, hlc_node, job_id,"
        " action, link_version, prev_chain_link, chain_link, payload_digest, payload)"
        " SELECT tenant_id, seq + 1, '1:0:x', 1, 0, 'x', job_id, action, 2, chain_link, 'x', 'x', '{}'"
        " FROM scheduler.scheduler_log WHERE tenant_id = 'acme' ORDER BY seq DESC LIMIT 1"
    )
    async with run_server(settings) as client:

        async def recorded() -> bool:
            return bool((await chains.entries("beta"))[-1]["action"] == "SUBJECT_ERASED")

        await until(recorded, "the sound chain says so")
        assert problem(await erase(client, ALICE)) == (409, "chain-damaged")
        assert (await client.get("/readyz")).json()["checks"]["writer"]["ok"] is True
    assert "SUBJECT_ERASED" not in [entry["action"] for entry in await chains.entries("acme")]


async def _erase_and_die(pool: asyncpg.Pool, settings: Settings, node_id: str, tenant_id: str = "acme") -> str:
    """What a process leaves that ends right after it has destroyed alice's key; returns the key's id."""
    keys = SubjectKeys(pool, settings.privacy_master_key_uri)
    async with pool.acquire() as connection, connection.transaction():
        state = await store.read_state(connection)
        assert state is not None
        keys.use(state)
        revision = await store.next_revision(connection)
        (key_id,) = await store.destroy_keys(connection, tenant_id, keys.tag(tenant_id, ALICE), revision)
        now = await connection.fetchval("SELECT now()")
        facts: dict[str, object] = {"key_ids": [key_id], "id": "ab" * 16}
        record = store.PrivacyRecord(tenant_id, revision, "SUBJECT_ERASED", facts, None, now)
        await store.add_record(connection, record, node_id)
    return key_id


async def test_another_master_key_takes_over_and_the_old_one_can_go(
    run_server: RunServer, settings: Settings, superuser: asyncpg.Connection, tmp_path: Path
) -> None:
    old_file = settings.data_dir / "keys" / "privacy-master.key"
    async with run_server(settings) as client:
        await declare(client)
        await two_jobs(client)
        (await erase(client, ALICE)).raise_for_status()
        wrapped = await superuser.fetchval(
            "SELECT wrapped_key FROM scheduler.subject_keys WHERE wrapped_key IS NOT NULL"
        )
        old, new = MasterKey.load(str(old_file)), MasterKey.generate(str(tmp_path / "new.key"))
        with pytest.raises(PrivacyUnavailableError, match="wrapped by master key"):
            await keys.rotate_master(superuser, new, old)
        assert await keys.rotate_master(superuser, old, new) == 1
        body = {"tenant_id": "acme", "spec": {"user": BOB}}

        async def refused() -> bool:
            return problem_of(await client.post("/v1/jobs", json=body)) == (503, "privacy-unavailable")

        await until(refused, "the node sees that its master key is not the ledger's")
        (tmp_path / "new.key").replace(old_file)

        async def taken() -> bool:
            return (await client.post("/v1/jobs", json=body)).status_code == 201

        await until(taken, "the node has the new master key")
        assert (await job(client, "b"))["spec"]["user"] == BOB
        assert (await job(client, "a"))["spec"]["user"] == GONE
    now = await superuser.fetchval("SELECT wrapped_key FROM scheduler.subject_keys WHERE wrapped_key IS NOT NULL")
    assert now != wrapped


def problem_of(answer: httpx.Response) -> tuple[int, str] | None:
    return None if answer.is_success else problem(answer)
