"""The tables of private fields follow the chains: after a restore, after a hand in the database, and row by row."""

from __future__ import annotations

import asyncio
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import asyncpg
import httpx
import pytest

from app.node.start.restore import restore_from_wal
from app.runtime.settings.config import Settings
from app.store import privacy as store
from app.store.privacy import DeclaredFields, PrivacyEntry, PrivacyRecord
from app.trust import privacy_knowledge as knowledge_module
from app.trust.privacy_agreement import Unchained
from app.trust.privacy_knowledge import PrivacyKnowledge
from app.trust.subject_keys import SubjectKeys
from app.write.followers.checkpoints import CheckpointJournal
from ledger.errors import PrivacyUnavailableError
from tests.app.chains import Chains, until
from tests.app.conftest import BackUp, MakeSettings, RunServer
from tests.app.starting import wal_folder
from tests.app.test_private_fields import ALICE, BOB, declare, erase, job, problem, submit
from tests.conftest import Database, connected_to

GONE = {"$erased": True}
FIELDS = ["spec.user"]
BODY = {"tenant_id": "acme", "spec": {"user": BOB}, "subject": BOB}


@pytest.fixture
def settings(make_settings: MakeSettings) -> Settings:
    return make_settings(chain={"batch_size": 4, "batch_interval": "100ms"})


@pytest.fixture
async def keys(pool: asyncpg.Pool, tmp_path: Path) -> SubjectKeys:
    keys = SubjectKeys(pool, f"file:{tmp_path}/master.key")
    async with pool.acquire() as connection:
        await keys.begin(connection)
    return keys


async def declare_for(client: httpx.AsyncClient, tenant_id: str, fields: list[str] = FIELDS) -> Any:
    answer = await client.put(f"/v1/tenants/{tenant_id}/privacy", json={"fields": fields, "subject": fields[0]})
    assert answer.status_code == 200, answer.text
    return answer.json()


async def payloads(client: httpx.AsyncClient, tenant_id: str) -> list[str]:
    answer = await client.get("/v1/chain/entries", params={"tenant_id": tenant_id})
    return [entry["payload"] for entry in answer.json()["items"]]


async def test_what_a_restored_backup_does_not_know_of_counts_all_the_same(
    run_server: RunServer, settings: Settings, back_up: BackUp
) -> None:
    async with run_server(settings) as client:
        await declare_for(client, "acme")
        await submit(client, job_id="a", spec={"user": ALICE})
        await client.post("/v1/jobs", json={**BODY, "tenant_id": "beta", "subject": None})
    older = await back_up()
    async with run_server(settings) as client:
        erased = (await erase(client, ALICE)).json()
        await submit(client, job_id="c", spec={"user": "carol"})
        (await client.post("/v1/tenants/acme/erasures", json={"subject": "carol"})).raise_for_status()
        declared = await declare_for(client, "beta")
        (await client.post("/v1/jobs", json={**BODY, "tenant_id": "beta", "job_id": "b"})).raise_for_status()

        def signed() -> bool:
            return CheckpointJournal(wal_folder(settings)).size("beta") > 0

        await until(signed, "the checkpoint is kept")

    assert await restore_from_wal(settings, older.service_url)

    for _ in range(2):
        async with run_server(settings, url=older.service_url) as client:
            assert (await job(client, "a"))["spec"] == {"user": GONE}
            assert (await job(client, "c"))["spec"] == {"user": GONE}, (
                "a key that is not back is destroyed all the same"
            )
            again = (await erase(client, ALICE)).json()
            assert (again["key_ids"], again["seq"]) == (erased["key_ids"], erased["seq"])
            now = (await client.get("/v1/tenants/beta/privacy")).json()
            assert (now["fields"], now["seq"]) == (FIELDS, declared["seq"])
            answer = await client.post("/v1/jobs", json={**BODY, "tenant_id": "beta", "spec": {"user": "dave-11"}})
            assert answer.status_code == 201, answer.text
            assert not any("dave-11" in payload for payload in await payloads(client, "beta"))
            for tenant_id in ("acme", "beta"):
                assert (await client.get("/v1/chain/verify", params={"tenant_id": tenant_id})).json()["valid"]


EDITED_AWAY = {
    "removed": "DELETE FROM scheduler.private_fields WHERE tenant_id = $1",
    "empty": "UPDATE scheduler.private_fields SET fields = '[]', subject = NULL WHERE tenant_id = $1",
    "old": "UPDATE scheduler.private_fields SET revision = -1 WHERE tenant_id = $1",
}
"""Statements by the tenant whose declaration they are about."""


async def test_a_declaration_that_was_edited_away_is_in_force_again(
    run_server: RunServer, settings: Settings, superuser: asyncpg.Connection, chains: Chains
) -> None:
    async with run_server(settings) as client:
        before = {tenant_id: await declare_for(client, tenant_id) for tenant_id in EDITED_AWAY}
        for tenant_id, damage in EDITED_AWAY.items():
            await superuser.execute(damage, tenant_id)
            assert (await client.post("/v1/jobs", json={**BODY, "tenant_id": tenant_id})).status_code == 201
    async with run_server(settings) as client:
        for tenant_id in EDITED_AWAY:
            assert (await client.get(f"/v1/tenants/{tenant_id}/privacy")).json() == before[tenant_id]
            await submit(client, tenant_id=tenant_id, spec={"user": ALICE})
            found = await payloads(client, tenant_id)
            assert not any(name in payload for payload in found for name in (ALICE, BOB)), tenant_id
    for tenant_id in EDITED_AWAY:
        actions = [entry["action"] for entry in await chains.sound(tenant_id)]
        assert actions == ["PRIVACY_DECLARED", "ENQUEUE", "ENQUEUE"], "nothing new was declared"


DAMAGE = {
    "declaration": """
        UPDATE scheduler.private_fields SET fields = '["\\ud800"]', revision = revision + 1;
        UPDATE scheduler.privacy_records SET facts = '1e999';
        UPDATE scheduler.privacy_state SET revision = revision + 1""",
    "note": """
        UPDATE scheduler.privacy_records SET facts = '{"id":"\\ud800"}', seq = NULL, created_at = '0001-01-01 BC'""",
    "tenant of the note": "UPDATE scheduler.privacy_records SET tenant_id = 'nobody'",
    "revision": """
        ALTER TABLE scheduler.privacy_state ALTER revision DROP NOT NULL;
        UPDATE scheduler.privacy_state SET revision = NULL""",
}


@pytest.mark.parametrize("which", DAMAGE)
async def test_a_damaged_row_stops_no_other_tenant_and_no_start(
    run_server: RunServer, settings: Settings, superuser: asyncpg.Connection, which: str
) -> None:
    async def others_go_on(client: httpx.AsyncClient) -> None:
        body = {"tenant_id": "other", "spec": {"user": "in clear"}}
        assert (await client.post("/v1/jobs", json=body)).status_code == 201
        assert (await client.get("/readyz")).status_code == 200

    async with run_server(settings) as client:
        await declare_for(client, "acme")
        await submit(client, spec={"user": ALICE})
        await superuser.execute(DAMAGE[which])
        if which in ("declaration", "revision"):

            async def refused() -> bool:
                answer = await client.post("/v1/jobs", json=BODY)
                return not answer.is_success and problem(answer) == (503, "privacy-unavailable")

            await until(refused, "the node sees the damage")
            checks = (await client.get("/readyz")).json()["checks"]
            assert not checks["privacy"]["ok"]
        if which != "revision":
            answer = await client.get("/v1/tenants/acme/privacy")
            assert problem(answer) == (503, "privacy-unavailable"), answer.text
        await others_go_on(client)
    if which == "revision":
        return  # a start names what the schema lacks
    async with run_server(settings) as client:
        await others_go_on(client)
        answer = await client.post("/v1/jobs", json={**BODY, "spec": {"user": "erin-77"}})
        assert answer.is_success or problem(answer) == (503, "privacy-unavailable"), answer.text
        assert not any("erin-77" in payload for payload in await payloads(client, "acme"))
        assert (await client.get("/v1/tenants/acme/privacy")).status_code in (200, 503)
        await declare(client, ["spec.user", "reason"], None)
        await submit(client, spec={"user": ALICE}, subject=ALICE)


async def test_a_revision_that_goes_back_makes_nothing_public(
    pool: asyncpg.Pool, keys: SubjectKeys, superuser: asyncpg.Connection
) -> None:
    knowledge = PrivacyKnowledge(pool, keys, "node-a")
    await note(pool, 5, ["spec", "reason"], "a" * 32)
    await superuser.execute("UPDATE scheduler.privacy_state SET revision = 9")
    await knowledge.start(Unchained())
    await superuser.execute("UPDATE scheduler.privacy_state SET revision = 2")
    await superuser.execute(
        """UPDATE scheduler.private_fields SET revision = 2, subject = NULL, fields = '["spec.user", "error"]'"""
    )
    await knowledge.refresh()
    assert knowledge.declarations["acme"].fields == (("error",), ("reason",), ("spec",))
    await superuser.execute("DELETE FROM scheduler.private_fields")
    await superuser.execute("UPDATE scheduler.privacy_state SET revision = 1")
    await knowledge.refresh()
    assert len(knowledge.declarations["acme"].fields) == 3


async def test_a_newer_declaration_that_nobody_noted_is_not_believed(
    pool: asyncpg.Pool, keys: SubjectKeys, superuser: asyncpg.Connection
) -> None:
    knowledge = PrivacyKnowledge(pool, keys, "node-a")
    await note(pool, 1, ["spec"], "a" * 32)
    await knowledge.start(Unchained())
    await superuser.execute("UPDATE scheduler.private_fields SET revision = 7, fields = '[]'")
    await superuser.execute("UPDATE scheduler.privacy_state SET revision = 7")
    await knowledge.refresh()
    assert knowledge.declarations["acme"].fields == (("spec",),)
    with pytest.raises(PrivacyUnavailableError, match="not what was noted"):
        knowledge.check_certain("acme")


FORGED = """
UPDATE scheduler.privacy_state SET revision = revision + 1;
UPDATE scheduler.private_fields
   SET fields = '[]', subject = NULL, revision = (SELECT revision FROM scheduler.privacy_state)
 WHERE tenant_id = '{tenant_id}';
INSERT INTO scheduler.privacy_records (tenant_id, revision, action, facts, node_id, seq)
SELECT '{tenant_id}', revision, 'PRIVACY_DECLARED', {facts}, 'nobody', {seq} FROM scheduler.privacy_state
"""
NOTED = {
    "invented": """'{"fields":[],"id":"00000000000000000000000000000000"}'""",
    "edited": """
        (SELECT json_build_object('fields', '[]'::json, 'id', facts->>'id')
           FROM scheduler.privacy_records WHERE tenant_id = '%s' ORDER BY revision DESC LIMIT 1)""",
    # The tenant's first declaration, which its chain has.
    "again": "(SELECT facts FROM scheduler.privacy_records WHERE tenant_id = '%s' ORDER BY revision LIMIT 1)",
}
"""What is noted of a tenant."""


async def test_what_was_private_stays_so_until_the_chain_says_otherwise_whatever_is_noted(
    run_server: RunServer, settings: Settings, pool: asyncpg.Pool, superuser: asyncpg.Connection
) -> None:
    forged = {f"{facts}-{seq.lower()}": (facts, seq) for facts in NOTED for seq in ("1", "NULL")}
    async with run_server(settings) as client:
        for tenant_id in forged:
            nothing = await client.put(f"/v1/tenants/{tenant_id}/privacy", json={"fields": [], "subject": None})
            assert nothing.status_code == 200, nothing.text
            await declare_for(client, tenant_id)
    keys = SubjectKeys(pool, settings.privacy_master_key_uri)

    def not_private(knowledge: PrivacyKnowledge) -> list[str]:
        declared = knowledge.declarations
        return [
            tenant_id
            for tenant_id in forged
            if declared[tenant_id].fields != (("spec", "user"),) and tenant_id not in knowledge.doubts
        ]

    running = PrivacyKnowledge(pool, keys, "node-b")
    await running.start(Unchained())
    for tenant_id, (facts, seq) in forged.items():
        noted = NOTED[facts].replace("%s", tenant_id)
        await superuser.execute(FORGED.format(tenant_id=tenant_id, facts=noted, seq=seq))
        for _ in range(2):
            await running.refresh()
            assert not_private(running) == []
    started = PrivacyKnowledge(pool, keys, "node-c")
    await started.start(Unchained())
    assert not_private(started) == []
    await started.refresh()
    assert not_private(started) == []


async def test_a_declaration_of_another_node_makes_less_private_once_its_chain_says_so(
    run_server: RunServer, settings: Settings, pool: asyncpg.Pool
) -> None:
    async with run_server(settings) as client:
        await declare_for(client, "acme", ["spec.user", "spec.team"])
        other = PrivacyKnowledge(pool, SubjectKeys(pool, settings.privacy_master_key_uri), "node-b")
        await other.start(Unchained())
        await declare_for(client, "acme", ["spec.team"])
        await other.refresh()
        assert other.declarations["acme"].fields == (("spec", "team"),)
        late = PrivacyKnowledge(pool, SubjectKeys(pool, settings.privacy_master_key_uri), "node-c")
        await late.start(Unchained())
        await note(pool, 9, [], "f" * 32)
        await late.refresh()
        assert late.declarations["acme"].fields == (("spec", "team"),)


async def test_what_only_the_wal_has_counts_before_it_is_chained(
    pool: asyncpg.Pool, keys: SubjectKeys, superuser: asyncpg.Connection
) -> None:
    tag = keys.tag("acme", ALICE)
    key_id = (await keys.of_subjects("acme", [tag]))[tag].key_id
    erased = entry("erasure", "e" * 32, key_ids=[key_id])
    knowledge = PrivacyKnowledge(pool, keys, "node-a")
    await knowledge.start(Unchained([entry("privacy", "d" * 32, fields=["spec"])], [erased]))
    assert knowledge.declarations["acme"].fields == (("spec",),)
    assert (await keys.by_id("acme", [key_id]))[key_id] is None
    assert await superuser.fetchval("SELECT count(*) FROM scheduler.privacy_records WHERE node_id = 'node-a'") == 2


async def test_an_entry_that_does_not_say_what_is_private_puts_its_tenant_in_doubt(
    pool: asyncpg.Pool, keys: SubjectKeys
) -> None:
    knowledge = PrivacyKnowledge(pool, keys, "node-a")
    await knowledge.start(Unchained([entry("privacy", "d" * 32, fields=[1])]))
    with pytest.raises(PrivacyUnavailableError, match="not certain"):
        knowledge.check_certain("acme")
    knowledge.check_certain("beta")
    await note(pool, 1, ["spec"], "d" * 32)
    await knowledge.start(Unchained([entry("privacy", "d" * 32, fields=[1])]))
    knowledge.check_certain("acme")


async def test_a_chain_that_ends_with_what_could_not_be_declared_keeps_nobody_from_starting(
    pool: asyncpg.Pool, keys: SubjectKeys
) -> None:
    await note(pool, 1, ["hlc"], "1" * 32)
    await note(pool, 2, ["spec"], "2" * 32)
    chained = [entry("privacy", "2" * 32, fields=["spec"]), entry("privacy", "1" * 32, fields=["hlc"])]
    knowledge = PrivacyKnowledge(pool, keys, "node-a")
    await knowledge.start(Unchained(chained))
    with pytest.raises(PrivacyUnavailableError, match="not certain"):
        knowledge.check_certain("acme")
    knowledge.check_certain("beta")


async def test_what_another_node_declares_counts_while_the_chains_are_read_for_a_tenant_in_doubt(
    pool: asyncpg.Pool,
    keys: SubjectKeys,
    database: Database,
    superuser: asyncpg.Connection,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(knowledge_module, "DOUBTS_S", 0.0)
    knowledge = PrivacyKnowledge(pool, keys, "node-a")
    await knowledge.start(Unchained([entry("privacy", "d" * 32, fields=[1])]))
    async with connected_to(database.superuser_url) as other, other.transaction():
        await other.execute("LOCK TABLE scheduler.scheduler_log")
        following = asyncio.ensure_future(knowledge.run())
        waiting = "SELECT count(*) > 0 FROM pg_locks WHERE NOT granted"
        await until(lambda: superuser.fetchval(waiting), "the chains are to be read")
        await note(pool, 1, ["spec"], "a" * 32)
        await superuser.execute("UPDATE scheduler.privacy_state SET revision = 1")
        await until(lambda: knowledge.revision == 1, "what is new is taken in")
        assert knowledge.declarations["acme"].fields == (("spec",),)
    following.cancel()
    await asyncio.wait((following,))


async def test_of_two_declarations_of_one_moment_the_later_change_counts_and_the_other_stays_private(
    pool: asyncpg.Pool, keys: SubjectKeys
) -> None:
    await note(pool, 1, ["spec"], "1" * 32)
    await note(pool, 2, ["reason"], "2" * 32)
    chained = [entry("privacy", "2" * 32, fields=["reason"]), entry("privacy", "1" * 32, fields=["spec"])]
    knowledge = PrivacyKnowledge(pool, keys, "node-a")
    await knowledge.start(Unchained(chained))
    assert knowledge.declarations["acme"].fields == (("reason",), ("spec",))
    assert not knowledge.doubts
    async with pool.acquire() as connection:
        declared = await store.read_declared(connection, "acme")
        assert declared is not None
        assert declared.fields == ["reason"]


async def note(pool: asyncpg.Pool, revision: int, fields: list[str], facts_id: str) -> None:
    """Have the tenant declare these fields, as far as the tables go."""
    facts = {"fields": fields, "id": facts_id}
    record = PrivacyRecord("acme", revision, "PRIVACY_DECLARED", facts, None, datetime.now(UTC))
    async with pool.acquire() as connection:
        await store.declare(connection, DeclaredFields("acme", fields, None, revision))
        await store.add_record(connection, record, "node-b")


def entry(kind: str, facts_id: str, **facts: Any) -> PrivacyEntry:
    return PrivacyEntry("acme", None, f"{kind}:{facts_id}", json.dumps({"id": facts_id, **facts}), 1_704_931_200_000)
