"""What anybody can edit of private fields is compared with the chains, and honest rows are not called damaged."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import asyncpg
import httpx
import pytest

from app.runtime.settings.config import Settings
from app.trust.privacy_agreement import Unchained
from app.trust.privacy_knowledge import PrivacyKnowledge
from app.trust.subject_keys import SubjectKeys
from tests.app.chain_builder import edit, unguarded
from tests.app.chains import until
from tests.app.conftest import MakeSettings, RunServer
from tests.app.test_private_fields import ALICE, declare, erase, job, problem, submit, two_jobs
from tests.conftest import Database, connected_to

GONE = {"$erased": True}


@pytest.fixture
def settings(make_settings: MakeSettings) -> Settings:
    return make_settings(chain={"batch_size": 4, "batch_interval": "100ms"})


async def breaks_fault(client: httpx.AsyncClient) -> str:
    """What ``/readyz`` says of breaks."""
    return str((await client.get("/readyz")).json()["checks"]["breaks"]["detail"])


async def wrapped_keys(superuser: asyncpg.Connection) -> dict[str, bytes]:
    rows = await superuser.fetch("SELECT key_id, wrapped_key FROM scheduler.subject_keys WHERE wrapped_key IS NOT NULL")
    return {row["key_id"]: row["wrapped_key"] for row in rows}


async def bring_back(superuser: asyncpg.Connection, keys: dict[str, bytes]) -> None:
    """Have these rows as a backup has them."""
    query = "UPDATE scheduler.subject_keys SET wrapped_key = $2, erased_at = NULL, erased_revision = NULL"
    async with unguarded(superuser):
        await superuser.executemany(f"{query} WHERE key_id = $1", [*keys.items()])


async def test_no_field_becomes_public_by_an_entry_that_was_edited(
    run_server: RunServer, settings: Settings, superuser: asyncpg.Connection
) -> None:
    async with run_server(settings) as client:
        await declare(client, ["spec.user"])

        async def write() -> str:
            """Write a private value; what is stored of it."""
            await client.post("/v1/jobs", json={"tenant_id": "acme", "spec": {"user": ALICE}, "subject": ALICE})
            stored = await superuser.fetchval("SELECT string_agg(payload::text, '') FROM scheduler.scheduler_log")
            return str(stored)

        await edit(
            superuser,
            "UPDATE scheduler.scheduler_log SET payload = jsonb_set(payload::jsonb - 'subject', '{fields}', '[]')::json"
            " WHERE tenant_id = 'acme' AND action = 'PRIVACY_DECLARED'",
        )
        await superuser.execute(
            """UPDATE scheduler.privacy_state SET revision = revision + 1;
            INSERT INTO scheduler.privacy_records (tenant_id, revision, action, facts, node_id, created_at, seq)
            SELECT tenant_id, revision + 1, action, jsonb_set(facts::jsonb - 'subject', '{fields}', '[]')::json,
                   node_id, created_at, seq FROM scheduler.privacy_records;
            UPDATE scheduler.private_fields SET fields = '[]', subject = NULL, revision = revision + 1"""
        )

        async def is_told() -> bool:
            return "payload-digest at seq 1 of acme (met by privacy)" in await breaks_fault(client)

        await until(is_told, "the node meets the edited entry")
        assert ALICE not in await write()
        assert (await client.get("/v1/tenants/acme/privacy")).status_code == 409
    async with run_server(settings) as client:
        assert ALICE not in await write()
        assert await is_told()


async def test_an_erasure_that_was_edited_shows_and_destroys_nothing(
    run_server: RunServer, settings: Settings, superuser: asyncpg.Connection
) -> None:
    async with run_server(settings) as client:
        await declare(client)
        await two_jobs(client)
        before = await wrapped_keys(superuser)
        erased = (await erase(client, ALICE)).json()
        (of_bob,) = before.keys() - set(erased["key_ids"])
    await bring_back(superuser, before)
    await edit(
        superuser,
        "UPDATE scheduler.scheduler_log SET payload = jsonb_set(payload::jsonb, '{key_ids}', $1::jsonb)::json"
        " WHERE action = 'SUBJECT_ERASED'",
        json.dumps([of_bob]),
    )
    async with run_server(settings) as client:
        assert (await job(client, "a"))["spec"]["user"].keys() == {"$private"}, "nobody knows whether she was erased"
        assert of_bob in await wrapped_keys(superuser), "what is destroyed does not come back"
        assert f"payload-digest at seq {erased['seq']} of acme (met by privacy)" in await breaks_fault(client)


async def test_a_key_that_was_destroyed_opens_nothing_once_a_backup_brought_it_back(
    run_server: RunServer, settings: Settings, superuser: asyncpg.Connection
) -> None:
    async with run_server(settings) as client:
        await declare(client)
        await two_jobs(client)
        before = await wrapped_keys(superuser)
        (await erase(client, ALICE)).raise_for_status()
        await bring_back(superuser, before)
        assert (await job(client, "a"))["spec"]["user"] == GONE
        body = {"tenant_id": "acme", "spec": {"user": ALICE}}
        assert problem(await client.post("/v1/jobs", json=body)) == (503, "privacy-unavailable")
        assert (await job(client, "b"))["spec"]["user"] != GONE


@pytest.mark.parametrize(
    ("forged", "told"),
    [
        ("seq = 1", None),
        ("seq = 1, facts = jsonb_set(facts::jsonb, '{key_ids}', '[]')::json", (503, "privacy-unavailable")),
    ],
    ids=["where", "what"],
)
async def test_an_erasure_is_answered_by_the_entry_that_says_so(
    run_server: RunServer, settings: Settings, superuser: asyncpg.Connection, forged: str, told: Any
) -> None:
    async with run_server(settings) as client:
        await declare(client)
        await submit(client, job_id="a", spec={"user": ALICE})
        erased = (await erase(client, ALICE)).json()
        await superuser.execute(f"UPDATE scheduler.privacy_records SET {forged} WHERE action = 'SUBJECT_ERASED'")
        again = await erase(client, ALICE)
        assert problem(again) == told if told else again.json() == erased


async def test_a_declaration_that_is_chained_while_the_tables_are_compared_puts_no_tenant_in_doubt(
    run_server: RunServer, settings: Settings, pool: asyncpg.Pool, superuser: asyncpg.Connection, database: Database
) -> None:
    other = PrivacyKnowledge(pool, SubjectKeys(pool, settings.privacy_master_key_uri), "node-b")
    async with run_server(settings) as client:
        await declare(client, ["spec.user"])
        async with connected_to(database.superuser_url) as noting, connected_to(database.superuser_url) as chaining:
            async with noting.transaction():
                async with chaining.transaction():
                    await chaining.execute("SELECT FROM scheduler.chain_heads WHERE tenant_id = 'acme' FOR UPDATE")
                    declaring = asyncio.ensure_future(declare(client, ["spec.user", "spec.team"]))
                    noted = "SELECT count(*) = 2 FROM scheduler.privacy_records"
                    await until(lambda: superuser.fetchval(noted), "it is noted, and waits to be chained")
                    await noting.execute("LOCK TABLE scheduler.privacy_records")
                    starting = asyncio.ensure_future(other.start(Unchained()))
                    waiting = (
                        "SELECT count(*) > 0 FROM pg_locks"
                        " WHERE NOT granted AND relation = 'scheduler.privacy_records'::regclass"
                    )
                    await until(lambda: superuser.fetchval(waiting), "the notes are to be compared with the chains")
                chained = "SELECT max(seq) = 2 FROM scheduler.scheduler_log WHERE tenant_id = 'acme'"
                await until(lambda: superuser.fetchval(chained), "it is chained")
                await noting.execute("UPDATE scheduler.privacy_records SET seq = 2 WHERE seq IS NULL")
            await starting
        assert not other.doubts
        await declaring
