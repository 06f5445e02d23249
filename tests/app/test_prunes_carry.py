"""A PRUNED entry carries what later entries need of those that left: commitments, the declaration of private fields,
and which keys were erased."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import asyncpg
import orjson
import pytest
from pyarrow import parquet

from app.dev.embedded import EmbeddedPostgres
from app.runtime.settings.config import Settings
from app.trust.privacy_agreement import bring_back_erasures
from app.trust.retention import FieldsAtFloor
from ledger.errors import InvalidInputError
from ledger.machines.carried import CarriedFields, ErasedKeys
from ledger.private_fields import sealed_values
from tests.app.chains import until
from tests.app.client import Client
from tests.app.conftest import MakeSettings, RunServer
from tests.app.test_commitments import nodes_of, promised, propose, set_capacity
from tests.app.test_private_fields import ALICE, BOB, declare, erase, job, problem, submit
from tests.conftest import Database, connected_to, fresh_database
from tests.tally import run_tally

CPU = {"cpu_millis": 1}
FIRST_SEQ = "SELECT min(seq) FROM scheduler.scheduler_log WHERE tenant_id = 'acme'"


@pytest.fixture
def settings(make_settings: MakeSettings, tmp_path: Path) -> Settings:
    return make_settings(archive={"url": str(tmp_path / "archive"), "interval": "1s"}, chain={"batch_interval": "1h"})


@pytest.fixture
async def client(run_server: RunServer, settings: Settings) -> AsyncIterator[Client]:
    async with run_server(settings) as client:
        yield client


def placement(capsule: str, node: str = "n1") -> dict[str, Any]:
    return {"kind": "Placement", "capsule": capsule, "node": node, "reservation": CPU}


async def snapshot(client: Client) -> int:
    """Sign all that is chained; returns the last seq."""
    answer = await client.post("/v1/snapshots", json={"tenant_id": "acme"})
    answer.raise_for_status()
    head: int = (await verdict(client))["head"]["seq"]
    return head


async def verdict(client: Client) -> dict[str, Any]:
    found: dict[str, Any] = (await client.get("/v1/chain/verify", params={"tenant_id": "acme"})).json()
    return found


async def retention(client: Client) -> dict[str, Any]:
    found: dict[str, Any] = (await client.get("/v1/retention", params={"tenant_id": "acme"})).json()
    return found


async def set_period(client: Client) -> None:
    (await client.put("/v1/retention", params={"tenant_id": "acme"}, json={"period": "1s"})).raise_for_status()


async def prune(client: Client, superuser: asyncpg.Connection, to_seq: int) -> None:
    """Let the entries up to ``to_seq``, where a snapshot ends, leave."""
    # As if the requests were a week old.
    await superuser.execute("DELETE FROM scheduler.idempotency")
    await set_period(client)

    async def is_prunable() -> bool:
        return bool((await retention(client))["prunable_to_seq"] >= to_seq)

    try:
        await until(is_prunable, "the entries are old and archived", timeout_s=15)
    except AssertionError:
        raise AssertionError(to_seq, await retention(client)) from None
    answer = await client.post("/v1/prunes", json={"tenant_id": "acme", "to_seq": to_seq})
    assert (answer.status_code, answer.json().get("to_seq")) == (200, to_seq), answer.text

    async def is_removed() -> bool:
        return bool(await superuser.fetchval(FIRST_SEQ) == to_seq + 1)

    await until(is_removed, "the entries are removed")


async def race(client: Client) -> int:
    """Commitments, some of which have ended; returns the seq up to which they are signed."""
    await set_capacity(client, "n1", capacity={"cpu_millis": 1})
    first = (await propose(client, placement("a"))).json()
    await set_capacity(client, "n1", capacity={"cpu_millis": 2}, overcommit={"cpu_millis": "1.5"})
    for capsule in ("b", "c", "d"):
        await propose(client, placement(capsule))
    await propose(client, {"kind": "Revocation", "index": first["index"]})
    await propose(client, {"kind": "Lease", "resource": "r", "holder": "h"})
    await propose(client, {"kind": "ModuleAdjustment", "mission": "m", "module": "web", "replicas": 1, "epoch": 4})
    await set_capacity(client, "n2", capacity={"cpu_millis": 9})
    return await snapshot(client)


async def test_commitments_in_force_outlive_the_entries_that_made_them(
    run_server: RunServer, settings: Settings, superuser: asyncpg.Connection
) -> None:
    async with run_server(settings) as client:
        floor = await race(client)
        before, nodes = await promised(client), await nodes_of(client)
        assert len(before) == 4
        await prune(client, superuser, floor)
        assert (await promised(client), (await nodes_of(client))["items"]) == (before, nodes["items"])
        assert await promised(client, as_of_seq=floor) == before
        answer = await client.get("/v1/commitments", params={"tenant_id": "acme", "as_of_seq": floor - 1})
        assert problem(answer) == (410, "archived")
        found = await verdict(client)
        assert (found["valid"], found["verdicts"]["projection"], found["verified_from_seq"]) == (True, "ok", floor + 1)
        # The next prune carries what the first one carried.
        lease = (await propose(client, {"kind": "Lease", "resource": "s", "holder": "h"})).json()["index"]
        before |= {lease: {"kind": "Lease", "resource": "s", "holder": "h"}}
        await prune(client, superuser, await snapshot(client))
        assert (await promised(client), (await nodes_of(client))["items"]) == (before, nodes["items"])

    # A node that begins anew judges by what is carried.
    async with run_server(settings) as client:
        assert (await propose(client, placement("b"))).json()["reason"] == "capsule-placed"
        accepted = (await propose(client, placement("e"))).json()
        assert accepted["verdict"] == "accepted", accepted
        full = (await propose(client, placement("f"))).json()
        assert full["reason"] == "over-capacity"
        older = {"kind": "ModuleAdjustment", "mission": "m", "module": "web", "replicas": 1, "epoch": 3}
        assert (await propose(client, older)).json()["reason"] == "older-epoch"
        revoked = next(index for index, each in before.items() if each.get("capsule") == "b")
        await propose(client, {"kind": "Revocation", "index": revoked})
        assert revoked not in await promised(client)
        assert (await verdict(client))["verdicts"]["projection"] == "ok"

        # The table is written again from what is carried.
        await superuser.execute("UPDATE scheduler.commitments SET subject = 'capsule:z' WHERE subject = 'capsule:c'")
        assert (await verdict(client))["verdicts"]["projection"] == "broken"

        async def is_right() -> bool:
            await client.get("/v1/commitments", params={"tenant_id": "acme"})
            return bool((await verdict(client))["verdicts"]["projection"] == "ok")

        now = {**{index: each for index, each in before.items() if index != revoked}, accepted["index"]: placement("e")}
        await until(is_right, "the table is written again")
        assert await promised(client) == now


async def test_commitments_that_do_not_fit_into_an_entry_stop_the_prefix(
    run_server: RunServer, make_settings: MakeSettings, settings: Settings, superuser: asyncpg.Connection
) -> None:
    small = settings.model_copy(update={"wal": settings.wal.model_copy(update={"record_bytes_max": 1 << 12})})
    async with run_server(small) as client:
        await client.post("/v1/jobs", json={"tenant_id": "acme", "job_id": "a"})
        await client.post("/v1/jobs/a/events", json={"tenant_id": "acme", "type": "JobCancelled"})
        for number in range(12):
            await propose(client, placement(f"capsule-{number}-{'x' * 40}"))
        await superuser.execute("DELETE FROM scheduler.idempotency")
        await snapshot(client)
        await set_period(client)

        async def is_stopped() -> bool:
            return ((await retention(client))["stopped_by"] or {}).get("why") == "commitment"

        await until(is_stopped, "it is too much")
        assert "wal.record_bytes_max" in (await retention(client))["stopped_by"]["detail"]


def archived_payloads(folder: Path) -> list[str]:
    files = [parquet.ParquetFile(each) for each in folder.rglob("*.parquet") if "acme" in str(each)]
    entries = [file.read(columns=["payload"]) for file in files if "payload" in file.schema_arrow.names]
    return [text for table in entries for text in table["payload"].to_pylist()]


async def end(client: Client, job_id: str) -> None:
    await client.post(f"/v1/jobs/{job_id}/events", json={"tenant_id": "acme", "type": "JobAccepted", "dc_id": "x"})
    body = {"tenant_id": "acme", "type": "JobCompleted", "final_status": "ok", "durability": "GLOBAL"}
    (await client.post(f"/v1/jobs/{job_id}/events", json=body)).raise_for_status()


async def private_jobs(client: Client) -> int:
    """Two jobs with private values, of which those of one person are erased; returns where the last snapshot ends."""
    await declare(client, ["spec.user"])
    for name, user in (("a", ALICE), ("b", BOB)):
        await submit(client, job_id=name, spec={"user": user})
        await end(client, name)
    (await erase(client, ALICE)).raise_for_status()
    return await snapshot(client)


async def test_private_values_leave_and_what_was_declared_and_erased_still_counts(
    run_server: RunServer, settings: Settings, superuser: asyncpg.Connection, tmp_path: Path
) -> None:
    async with run_server(settings) as client:
        floor = await private_jobs(client)
        declared, erased = (await client.get("/v1/tenants/acme/privacy")).json(), (await erase(client, ALICE)).json()
        assert max(declared["seq"], erased["seq"]) <= floor
        await prune(client, superuser, floor)
        head = (await verdict(client))["head"]["seq"]
        assert (await client.get("/v1/tenants/acme/privacy")).json() == declared
        assert (await erase(client, ALICE)).json() == erased
        assert await declare(client, ["spec.user"]) == declared
        assert (await verdict(client))["head"]["seq"] == head, "nothing is chained again"
        # An erasure after the values left destroys the key of what is in the archive.
        gone = (await erase(client, BOB)).json()
        assert gone["seq"] > floor
        left = archived_payloads(tmp_path / "archive")
        keys = {sealed.key_id for text in left for sealed in sealed_values(orjson.loads(text))}
        assert keys == {*erased["key_ids"], *gone["key_ids"]}
        living = "SELECT count(*) FROM scheduler.subject_keys WHERE wrapped_key IS NOT NULL"
        assert await superuser.fetchval(living) == 0
        assert not any(name in text for text in left for name in (ALICE, BOB))
        # The next prune carries what the first one carried, and the newer erasure.
        await prune(client, superuser, await snapshot(client))
        assert (await client.get("/v1/tenants/acme/privacy")).json() == declared
        assert (await erase(client, BOB)).json() == gone

    # What was edited away is in force again, by the entry PRUNED alone.
    await superuser.execute("UPDATE scheduler.private_fields SET fields = '[]', subject = NULL")
    await superuser.execute("ALTER TABLE scheduler.subject_keys DISABLE TRIGGER erased_for_good")
    revived = "UPDATE scheduler.subject_keys SET wrapped_key = '\\x00', erased_at = NULL, erased_revision = NULL"
    await superuser.execute(f"{revived} WHERE key_id = ANY($1::text[])", erased["key_ids"])
    await superuser.execute("ALTER TABLE scheduler.subject_keys ENABLE TRIGGER erased_for_good")
    async with run_server(settings) as client:
        assert await superuser.fetchval(living) == 0
        assert (await client.get("/v1/tenants/acme/privacy")).json()["fields"] == ["spec.user"]
        await submit(client, job_id="c", spec={"user": "carol-19"})
        assert (await job(client, "c"))["spec"] == {"user": "carol-19"}
        stored = await superuser.fetch("SELECT payload::text FROM scheduler.scheduler_log WHERE tenant_id = 'acme'")
        assert not any("carol-19" in payload for (payload,) in stored)
        assert (await client.get("/v1/tenants/acme/privacy")).json()["seq"] == declared["seq"]
        assert (await verdict(client))["valid"]


FORGOTTEN = {
    "removed": "DELETE FROM scheduler.privacy_records WHERE action = 'SUBJECT_ERASED'",
    "edited": "UPDATE scheduler.privacy_records SET facts = jsonb_set(facts::jsonb, '{key_ids}',"
    " '[\"00000000000000000000000000000000\"]')::json WHERE action = 'SUBJECT_ERASED'",
    "elsewhere": "UPDATE scheduler.privacy_records SET seq = seq + 1000 WHERE action = 'SUBJECT_ERASED'",
}


async def test_erasures_that_nobody_remembers_are_found_and_come_back_by_the_command_that_is_named(
    run_server: RunServer, settings: Settings, superuser: asyncpg.Connection, database: Database
) -> None:
    async with run_server(settings) as client:
        await prune(client, superuser, await private_jobs(client))
        await submit(client, job_id="c", spec={"user": "carol-19"})
    erasures = "SELECT facts::text, seq FROM scheduler.privacy_records WHERE action = 'SUBJECT_ERASED'"
    kept = await superuser.fetch(erasures)
    assert kept
    for name, damage in FORGOTTEN.items():
        await superuser.execute(damage)
        async with run_server(settings) as client:
            body = {"tenant_id": "acme", "job_id": name, "spec": {"user": "dave"}}
            answer = await client.post("/v1/jobs", json=body)
            assert problem(answer) == (503, "privacy-unavailable"), (name, answer.text)
            assert "left with a prune" in answer.json()["detail"]
            assert "$private" in (await job(client, "c"))["spec"]["user"]
            named = re.search(r"tally (privacy restore --tenant \S+)", answer.json()["detail"])
            assert named is not None, answer.text
            where = {"TALLY_DATABASE_URL": database.service_url, "TALLY_URL": str(client.base_url)}
            done = await asyncio.to_thread(run_tally, *named[1].split(), "--json", **where)
            assert (done.returncode, orjson.loads(done.stdout or "{}").get("changed")) == (0, 1), done.stderr
            assert await superuser.fetch(erasures) == kept

            async def is_trusted(client: Client = client) -> bool:
                return (await job(client, "c"))["spec"] == {"user": "carol-19"}

            await until(is_trusted, "the node reads the records again")
            await submit(client, job_id=f"after-{name}", spec={"user": "erin-5"})
    # What the archive does not bear out stays as it is.
    await superuser.execute(
        "INSERT INTO scheduler.privacy_records SELECT tenant_id, 4711, action, json_build_object('id', repeat('0', 32),"
        " 'key_ids', json_build_array(repeat('0', 32))), node_id, seq FROM scheduler.privacy_records"
        " WHERE action = 'SUBJECT_ERASED' LIMIT 1"
    )
    async with run_server(settings) as client:
        where["TALLY_URL"] = str(client.base_url)
        done = await asyncio.to_thread(run_tally, "privacy", "restore", "-t", "acme", **where)
        assert (done.returncode, "also names 1 keys" in done.stderr) == (1, True), done.stderr
    others = FieldsAtFloor(10, CarriedFields(erased=ErasedKeys.of(["0" * 32])))
    with pytest.raises(InvalidInputError, match="name 0 erased keys, and not the 1"):
        await bring_back_erasures(superuser, "acme", others, ())


@pytest.fixture
def new_database(postgres: EmbeddedPostgres) -> Iterator[Database]:
    """Another migrated database, on which no node ever started."""
    with fresh_database(postgres) as database:
        yield database


async def test_erasures_that_left_count_in_a_database_that_an_archive_brought_back(
    run_server: RunServer, settings: Settings, superuser: asyncpg.Connection, new_database: Database
) -> None:
    async with run_server(settings) as client:
        floor = await private_jobs(client)
        await prune(client, superuser, floor)
        (await client.post("/v1/snapshots", json={"tenant_id": "_system"})).raise_for_status()
    where = {"TALLY_DATA_DIR": str(settings.data_dir), "TALLY_DATABASE_URL": new_database.service_url}
    for words in (("--from", "archive", str(settings.archive.url)), ("--from", "wal")):
        done = await asyncio.to_thread(run_tally, "restore", *words, **where)
        assert done.returncode == 0, done.stderr
    async with connected_to(new_database.superuser_url) as restored:
        for number in range(2):
            async with run_server(settings, url=new_database.service_url) as client:
                await submit(client, job_id=f"after-{number}", spec={"user": "carol-19"})
                assert (await job(client, f"after-{number}"))["spec"] == {"user": "carol-19"}

                async def is_removed() -> bool:
                    return bool(await restored.fetchval(FIRST_SEQ) == floor + 1)

                await until(is_removed, "what came back has left again")
                assert (await verdict(client))["valid"]
