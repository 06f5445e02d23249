"""Rows that can be edited are compared with the chain before anything is answered on their word."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

import asyncpg
import httpx
import pytest

from app.read import folded_jobs
from app.store import Connection
from app.store.entry_check import EntryCheck
from app.store.jobs.table import EntryRow, JobFolds
from ledger import merkle
from ledger.chain import Linker
from ledger.merkle import HASH_BYTES
from ledger.verification import ENTRY_COLUMNS
from tests.app.chain_builder import edit
from tests.app.chains import until
from tests.app.client import Client
from tests.app.conftest import MakeSettings, RunServer
from tests.app.shared import Shared, sharing
from tests.app.test_commitments import free, placement, propose
from tests.app.test_damaged_rows import assert_damage_told
from tests.conftest import Database, connected_to

LIMITED = ("app.store.jobs.table",)
"""Modules that know how many entries of a job are read at once."""
FORGED = '{"error":"a forged one","failed_dc":"dc1","fence_token":1,"type":"JobFailed"}'


class Ledger:
    """A tenant of a running node, and the superuser of its database."""

    def __init__(self, client: Client, superuser: asyncpg.Connection) -> None:
        self.client = client
        self.superuser = superuser
        self.tenant_id = client.tenant

    async def get(self, path: str, **params: Any) -> httpx.Response:
        return await self.client.get(path, params={"tenant_id": self.tenant_id, **params})

    async def create(self, job_id: str, key: str | None = None, **fields: Any) -> httpx.Response:
        headers = {} if key is None else {"Idempotency-Key": key}
        body = {"tenant_id": self.tenant_id, "job_id": job_id, "spec": {"of": job_id}, "durability": "GLOBAL"}
        return await self.client.post("/v1/jobs", json=body | fields, headers=headers)

    async def report(self, job_id: str, **event: Any) -> httpx.Response:
        body = {"tenant_id": self.tenant_id, "durability": "GLOBAL", **event}
        return await self.client.post(f"/v1/jobs/{job_id}/events", json=body)

    async def failed_job(self, job_id: str = "job-1") -> None:
        """A job that ran and failed: seqs 1 to 3 of a new tenant."""
        assert (await self.create(job_id)).status_code == 201
        progress = {"type": "JobProgressReported", "dc_id": "dc1", "completed": 1, "failed": 0}
        assert (await self.report(job_id, **progress)).status_code == 201
        assert (await self.report(job_id, type="JobFailed", error="disk", failed_dc="dc1")).status_code == 201

    async def followed(self) -> None:
        """The job table has followed the chain."""
        query = (
            "SELECT p.seq = h.head_seq FROM scheduler.follower_positions p JOIN scheduler.chain_heads h"
            " USING (tenant_id) WHERE tenant_id = $1 AND follower = 'jobs'"
        )
        await until(lambda: self.superuser.fetchval(query, self.tenant_id), "the job table has followed")

    async def covered(self, size: int) -> None:
        """A checkpoint that the node keeps covers so many entries."""

        async def is_covered() -> bool:
            answer = await self.client.get(f"/v1/log/{self.tenant_id}/checkpoint")
            return answer.status_code == 200 and int(answer.text.split("\n")[1]) >= size

        await until(is_covered, "a checkpoint covers it")

    async def edit(self, statement: str, *values: object) -> None:
        await edit(self.superuser, statement, self.tenant_id, *values)

    async def statuses(self, **params: Any) -> dict[str, str]:
        listed = (await self.get("/v1/jobs", **params)).json()
        return {job["job_id"]: job["status"] for job in listed["items"]}


class SharedLedger(Ledger):
    """One of a node that is reached without a socket, too."""

    def __init__(self, client: Client, shared: Shared) -> None:
        super().__init__(client, shared.superuser)
        self._node = shared.service

    def breaks(self, kind: str) -> list[int]:
        """Seqs of the breaks of this kind that the node keeps of the tenant."""
        return [each.seq for each in self._node.breaks.open(self.tenant_id) if each.kind == kind]

    def fault(self) -> str:
        """What the node says of the breaks of the tenant."""
        return str(self._node.breaks.fault(self.tenant_id))


@pytest.fixture(scope="module")
async def shared(make_shared_settings: MakeSettings, shared_database: Database) -> AsyncIterator[Shared]:
    with pytest.MonkeyPatch.context() as patched:
        # A node whose watch meets a signed row that was replaced stops.
        patched.setattr("app.write.followers.ledger_watch.ROUND_INTERVAL_S", 3600.0)
        async with sharing(make_shared_settings(), shared_database) as shared:
            yield shared


@pytest.fixture
async def ledger(shared: Shared, shared_client: Client) -> SharedLedger:
    return SharedLedger(shared_client, shared)


# --- a forged entry -------------------------------------------------------------------------------

READS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/jobs/job-1", {}),
    ("/v1/jobs/job-1", {"consistency": "strong"}),
    ("/v1/jobs/job-1", {"as_of": "9000000000000:0:n"}),
    ("/v1/jobs/job-1/events", {}),
]


async def forge_text(ledger: Ledger) -> None:
    """Edit the payload of seq 3 alone."""
    await ledger.edit("UPDATE scheduler.scheduler_log SET payload = $2 WHERE tenant_id = $1 AND seq = 3", FORGED)


async def forge_with_hashes(ledger: Ledger) -> None:
    """Edit the payload of seq 3, with its digest, its link and its leaf in the tile made to fit."""
    query = f"SELECT {', '.join(ENTRY_COLUMNS)} FROM scheduler.scheduler_log WHERE tenant_id = $1 AND seq = 3"
    row = await ledger.superuser.fetchrow(query, ledger.tenant_id)
    assert row is not None
    digest = hashlib.sha256(FORGED.encode())
    named = (row["t_hlc"], row["job_id"], row["action"], bytes.fromhex(row["prev_chain_link"]), digest.digest(), b"")
    link = Linker(ledger.tenant_id).link(3, *named)
    await ledger.edit(
        "UPDATE scheduler.scheduler_log SET payload = $2, payload_digest = $3, chain_link = $4"
        " WHERE tenant_id = $1 AND seq = 3",
        *(FORGED, digest.hexdigest(), link.hex()),
    )
    await ledger.edit(
        "UPDATE scheduler.merkle_tile SET hashes = overlay(hashes placing $2::bytea from $3::int)"
        " WHERE tenant_id = $1 AND level = 0",
        *(merkle.leaf_hash(link), 2 * HASH_BYTES + 1),
    )


@pytest.mark.parametrize("forge", [forge_text, forge_with_hashes])
async def test_no_read_serves_a_forged_entry_as_true(ledger: SharedLedger, forge: Any) -> None:
    await ledger.failed_job()
    assert (await ledger.create("job-2")).status_code == 201
    await ledger.followed()
    await ledger.covered(4)
    await forge(ledger)
    for path, params in READS:
        assert_damage_told(await ledger.get(path, **params), ledger.tenant_id)
    for params in ({}, {"status": "FAILED"}, {"error": "a forged one"}):
        listed = (await ledger.get("/v1/jobs", **params)).json()
        assert "job-1" not in [job["job_id"] for job in listed["items"]]
        assert "job-1" in [job["job_id"] for job in listed["damaged"]]
    assert ledger.breaks("payload-digest" if forge is forge_text else "tree")


async def test_a_list_of_rows_as_they_are_stored_reports_a_forged_one(ledger: SharedLedger) -> None:
    await ledger.failed_job()
    await forge_text(ledger)
    assert (await ledger.get("/v1/chain/entries", from_seq=3)).json()["items"][0]["payload"] == FORGED
    assert ledger.breaks("payload-digest") == [3]


@pytest.mark.parametrize("head", ["head_seq = 7", "head_chain_link = repeat('0', 64)"])
async def test_no_head_is_shown_that_is_not_the_entry_there(ledger: SharedLedger, head: str) -> None:
    await ledger.failed_job()
    await ledger.followed()
    await ledger.edit(f"UPDATE scheduler.chain_heads SET {head} WHERE tenant_id = $1")
    answer = await ledger.get("/v1/chain/head")
    assert_damage_told(answer, ledger.tenant_id)
    assert ledger.breaks("head")


async def test_a_list_of_cancellations_names_a_forged_job(ledger: SharedLedger) -> None:
    for job_id in ("job-1", "job-2"):
        assert (await ledger.create(job_id, assigned_dcs=["dc1"])).status_code == 201
        body = {"tenant_id": ledger.tenant_id, "reason": "not needed", "requestor": "me", "durability": "GLOBAL"}
        assert (await ledger.client.post(f"/v1/jobs/{job_id}/cancel", json=body)).status_code == 201
    await ledger.followed()
    forged = '{"assigned_dcs":["dc2"],"fence_token":1,"spec":{},"type":"JobCreated"}'
    await ledger.edit("UPDATE scheduler.scheduler_log SET payload = $2 WHERE tenant_id = $1 AND seq = 1", forged)
    listed = (await ledger.get("/v1/cancellations", dc="dc1")).json()
    assert [job["job_id"] for job in listed["items"]] == ["job-2"]
    assert [job["job_id"] for job in listed["damaged"]] == ["job-1"]


async def test_a_watch_ends_where_a_forged_entry_begins(ledger: SharedLedger, shared: Shared) -> None:
    await ledger.failed_job()
    await forge_text(ledger)
    told = ""
    asked = {"tenant_id": ledger.tenant_id, "from_seq": 1}
    async with ledger.client.stream("GET", "/v1/watch", params=asked) as stream:
        async for piece in stream.aiter_text():
            told += piece
    assert "forged" not in told
    assert ledger.breaks("payload-digest")


# --- rows of the job table ------------------------------------------------------------------------


async def test_a_row_that_leaves_the_end_of_its_job_out_is_believed_by_nobody_and_written_again(
    ledger: SharedLedger,
) -> None:
    await ledger.failed_job()
    await ledger.followed()
    await ledger.edit("UPDATE scheduler.jobs SET seqs = '{1,2}', status = 'RUNNING', last_seq = 2 WHERE tenant_id = $1")
    assert_damage_told(await ledger.get("/v1/jobs/job-1", consistency="strong"), ledger.tenant_id)
    assert ledger.breaks("projection")

    async def is_failed() -> bool:
        answer = await ledger.get("/v1/jobs/job-1", consistency="strong")
        return answer.status_code == 200 and answer.json()["status"] == "FAILED"

    await until(is_failed, "the row is written again")
    assert await ledger.statuses(status="FAILED") == {"job-1": "FAILED"}
    assert await ledger.statuses(status="RUNNING") == {}


async def test_a_list_meets_a_row_that_claims_another_status(ledger: SharedLedger) -> None:
    await ledger.failed_job()
    await ledger.followed()
    await ledger.edit("UPDATE scheduler.jobs SET seqs = '{1,2}', status = 'RUNNING' WHERE tenant_id = $1")
    listed = (await ledger.get("/v1/jobs", status="RUNNING")).json()
    assert (listed["items"], [job["job_id"] for job in listed["damaged"]]) == ([], ["job-1"])

    async def is_listed() -> bool:
        return await ledger.statuses(status="FAILED") == {"job-1": "FAILED"}

    await until(is_listed, "the row is written again")


async def test_a_job_whose_row_was_removed_is_read_and_listed_again(ledger: SharedLedger) -> None:
    await ledger.failed_job()
    await ledger.followed()
    await ledger.edit("DELETE FROM scheduler.jobs WHERE tenant_id = $1")
    assert (await ledger.get("/v1/jobs/job-1")).json()["status"] == "FAILED"
    assert ledger.breaks("projection")

    async def is_listed() -> bool:
        return await ledger.statuses() == {"job-1": "FAILED"}

    await until(is_listed, "the row is written again")


async def test_rows_that_nobody_reads_are_compared_and_written_again(
    run_server: RunServer, superuser: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with run_server() as client:
        ledger = Ledger(client, superuser)
        await ledger.failed_job()
        await ledger.failed_job("job-2")
        await ledger.followed()
    await ledger.edit(
        "UPDATE scheduler.jobs SET seqs = '{1,2}', status = 'RUNNING' WHERE tenant_id = $1 AND last_seq = 3"
    )
    await ledger.edit("DELETE FROM scheduler.jobs WHERE tenant_id = $1 AND last_seq = 6")
    monkeypatch.setattr(folded_jobs, "WALK_RANGE_ENTRIES", 2)
    async with run_server() as client:
        ledger = Ledger(client, superuser)

        async def are_listed() -> bool:
            return await ledger.statuses(status="FAILED") == {"job-1": "FAILED", "job-2": "FAILED"}

        await until(are_listed, "the rows are written again")


async def test_a_job_that_failed_takes_no_event_whatever_its_row_says(
    run_server: RunServer, superuser: asyncpg.Connection
) -> None:
    async with run_server() as client:
        ledger = Ledger(client, superuser)
        await ledger.failed_job()
        await ledger.followed()
    await ledger.edit("UPDATE scheduler.jobs SET seqs = '{1,2}', status = 'RUNNING', last_seq = 2 WHERE tenant_id = $1")
    async with run_server() as client:
        ledger = Ledger(client, superuser)
        late = await ledger.report("job-1", type="JobProgressReported", dc_id="dc1", completed=9, failed=0)
        assert (late.status_code, late.json()["type"].rpartition("/")[2]) == (409, "job-ended")


async def test_a_job_of_many_entries_is_folded_once_and_its_row_compared(
    ledger: SharedLedger, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in LIMITED:
        monkeypatch.setattr(f"{module}.ENTRIES_MAX", 3)
    assert (await ledger.create("job-1")).status_code == 201
    for done in range(1, 9):
        event = {"type": "JobProgressReported", "dc_id": "dc1", "completed": done, "failed": 0}
        assert (await ledger.report("job-1", **event)).status_code == 201
    await ledger.followed()
    for _ in range(2):
        answer = (await ledger.get("/v1/jobs/job-1")).json()
        assert (answer["completed"], answer["last_seq"]) == (8, 9)
        assert await ledger.statuses(status="RUNNING") == {"job-1": "RUNNING"}
    await ledger.edit("UPDATE scheduler.jobs SET seqs = '{1,2}' WHERE tenant_id = $1")
    assert_damage_told(await ledger.get("/v1/jobs/job-1"), ledger.tenant_id)


async def test_jobs_of_many_entries_are_whole_while_others_take_their_place_in_memory(
    ledger: SharedLedger, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in LIMITED:
        monkeypatch.setattr(f"{module}.ENTRIES_MAX", 3)
    monkeypatch.setattr("app.store.jobs.table.LARGE_JOBS_MAX", 1)
    jobs = ("job-1", "job-2")
    for job_id in jobs:
        assert (await ledger.create(job_id)).status_code == 201
        for done in range(1, 6):
            event = {"type": "JobProgressReported", "dc_id": "dc1", "completed": done, "failed": 0}
            assert (await ledger.report(job_id, **event)).status_code == 201
    await ledger.followed()
    answers = await asyncio.gather(*(ledger.get(f"/v1/jobs/{job_id}") for job_id in jobs * 20))
    assert {(answer.status_code, answer.json().get("completed")) for answer in answers} == {(200, 5)}


async def test_a_fold_that_is_ended_goes_on_where_it_was(ledger: SharedLedger, shared_database: Database) -> None:
    assert (await ledger.create("job-1")).status_code == 201
    event = {"tenant_id": ledger.tenant_id, "type": "JobProgressReported", "job_id": "job-1", "dc_id": "dc1"}
    lines = "\n".join(json.dumps(event | {"completed": done, "failed": 0}) for done in range(1199))
    headers = {"Content-Type": "application/x-ndjson"}
    answer = await ledger.client.post("/v1/events?durability=GLOBAL", content=lines, headers=headers)
    assert answer.status_code == 200, answer.text
    job, read = (ledger.tenant_id, "job-1"), []

    class Ended(EntryCheck):
        async def require(self, connection: Connection, tenant_id: str, entries: Sequence[EntryRow]) -> None:
            read.append(len(entries))
            if len(read) == 3:
                raise TimeoutError

    folds = JobFolds(Ended(lambda _: None, lambda _: None))
    async with connected_to(shared_database.service_url) as connection:
        with pytest.raises(TimeoutError):
            await folds.fold(connection, *await folds.read(connection, [job]))
        assert folds.remembered(*job).seq == sum(read[:2])
        folded = await folds.fold(connection, *await folds.read(connection, [job]))
    assert (sum(read) - read[2], folded.seq) == (1200, 1200)


# --- how far the job table has come ---------------------------------------------------------------


async def test_a_raised_position_hides_no_job_from_lists(ledger: SharedLedger, shared_database: Database) -> None:
    assert (await ledger.create("job-1")).status_code == 201
    await ledger.followed()
    async with connected_to(shared_database.superuser_url) as other, other.transaction():
        raise_it = "UPDATE scheduler.follower_positions SET seq = {} WHERE tenant_id = $1"
        await other.execute(raise_it.format("seq"), ledger.tenant_id)
        assert (await ledger.create("job-2")).status_code == 201
        await other.execute("SET LOCAL tallystick.follows_run_times = 'yes'")
        await other.execute(raise_it.format("2"), ledger.tenant_id)

    async def are_listed() -> bool:
        return await ledger.statuses() == {"job-1": "SUBMITTED", "job-2": "SUBMITTED"}

    await until(are_listed, "the chain is followed again")
    assert ledger.breaks("projection")


async def test_a_position_that_was_raised_while_no_node_ran_hides_no_job(
    run_server: RunServer, superuser: asyncpg.Connection
) -> None:
    async with run_server() as client:
        ledger = Ledger(client, superuser)
        assert (await ledger.create("job-1")).status_code == 201
        await ledger.followed()
    await ledger.edit("DELETE FROM scheduler.jobs WHERE tenant_id = $1")
    async with run_server() as client:
        ledger = Ledger(client, superuser)

        async def is_listed() -> bool:
            return await ledger.statuses() == {"job-1": "SUBMITTED"}

        await until(is_listed, "the chain is followed again")


async def test_a_lowered_position_is_followed_from_the_first_entry_again(ledger: SharedLedger) -> None:
    await ledger.failed_job()
    await ledger.followed()
    await ledger.edit("UPDATE scheduler.follower_positions SET seq = 1 WHERE tenant_id = $1")

    await until(lambda: ledger.breaks("projection"), "the position is compared")
    await ledger.followed()
    assert await ledger.statuses() == {"job-1": "FAILED"}


# --- the table of commitments ---------------------------------------------------------------------

FALSE_ROWS = [
    "DELETE FROM scheduler.commitments WHERE tenant_id = $1 AND seq = 2",
    "UPDATE scheduler.commitments SET ended_seq = 3 WHERE tenant_id = $1 AND seq = 2",
    "UPDATE scheduler.commitments SET ended_seq = NULL WHERE tenant_id = $1 AND seq = 3",
    "UPDATE scheduler.commitments SET subject = 'node:n1' WHERE tenant_id = $1 AND seq = 2",
    "INSERT INTO scheduler.commitments VALUES ($1, 4, NULL, 'capsule:c')",
    "DELETE FROM scheduler.commitments WHERE tenant_id = $1 AND seq = 1",
    "UPDATE scheduler.commitments SET ended_seq = 2 WHERE tenant_id = $1 AND seq = 1",
]


async def promise(ledger: Ledger) -> None:
    """What node ``n1`` has, capsule ``a`` on it, and ``b``, which is revoked: seqs 1 to 4 of a new tenant."""
    has = {"tenant_id": ledger.tenant_id, "capacity": {"cpu_millis": 6000}}
    (await ledger.client.put("/v1/nodes/n1/capacity", json=has)).raise_for_status()
    for proposed in (placement("a", "n1"), placement("b", "n2"), {"kind": "Revocation", "index": 3}):
        (await propose(ledger.client, proposed)).raise_for_status()
    await ledger.followed()


@pytest.mark.parametrize("edit", FALSE_ROWS[:2])
async def test_no_capsule_is_placed_twice_whatever_the_table_says(
    run_server: RunServer, superuser: asyncpg.Connection, edit: str
) -> None:
    async with run_server() as client:
        await promise(ledger := Ledger(client, superuser))
    await ledger.edit(edit)
    async with run_server() as client:
        again = (await propose(client, placement("a", "n3"))).json()
        assert (again["reason"], again["blocking_index"]) == ("capsule-placed", 2)
        full = (await propose(client, placement("d", "n1"), free("n1"))).json()
        assert (full["reason"], full["free"]) == ("node-not-free", {"cpu_millis": 2000})


async def test_a_forged_promise_keeps_its_tenant_from_being_judged(
    run_server: RunServer, superuser: asyncpg.Connection
) -> None:
    async with run_server() as client:
        await promise(ledger := Ledger(client, superuser))
    await ledger.edit(
        "UPDATE scheduler.scheduler_log SET payload = replace(payload::text, '4000', '4')::json"
        " WHERE tenant_id = $1 AND seq = 2"
    )
    async with run_server() as client:
        assert_damage_told(await propose(client, placement("d", "n1"), free("n1")))
        assert "payload-digest at seq 2" in (await client.get("/readyz")).json()["checks"]["breaks"]["detail"]


@pytest.mark.parametrize("edit", FALSE_ROWS)
async def test_no_list_of_promises_believes_a_false_row(ledger: SharedLedger, edit: str) -> None:
    await promise(ledger)
    await ledger.edit(edit)
    assert_damage_told(await ledger.get("/v1/commitments"), ledger.tenant_id)
    assert ledger.breaks("projection")

    async def is_listed() -> bool:
        listed = [
            (await ledger.get(path, **at)) for path in ("/v1/commitments", "/v1/nodes") for at in ({}, {"as_of_seq": 3})
        ]
        found = [[item["index"] for item in answer.json().get("items", ())] for answer in listed]
        return found == [[2], [2, 3], [1], [1]]

    await until(is_listed, "the table is written again")


async def test_no_list_of_promises_serves_a_forged_entry(ledger: SharedLedger) -> None:
    await promise(ledger)
    await ledger.edit(
        "UPDATE scheduler.scheduler_log SET payload = replace(payload::text, '000', '001')::json"
        " WHERE tenant_id = $1 AND seq <= 2"
    )
    for path in ("/v1/commitments", "/v1/nodes"):
        assert_damage_told(await ledger.get(path), ledger.tenant_id)
    assert ledger.breaks("payload-digest") == [2, 1]


# --- rows of Idempotency-Keys ---------------------------------------------------------------------


async def test_a_request_whose_row_was_removed_is_recorded_no_second_time(ledger: SharedLedger) -> None:
    made = await ledger.create("job-1", key="k")
    assert made.status_code == 201
    await ledger.followed()
    await ledger.edit("DELETE FROM scheduler.idempotency WHERE tenant_id = $1")
    again = await ledger.create("job-1", key="k")
    assert_damage_told(again, ledger.tenant_id)
    assert "nothing was stored now" in again.json()["detail"]
    assert (await ledger.get("/v1/chain/head")).json()["seq"] == 1
    assert ledger.breaks("idempotency") == [1]
    assert (await ledger.create("job-2", key="other")).status_code == 201


async def test_a_chain_that_is_valid_mends_no_row_of_keys(ledger: SharedLedger) -> None:
    first = await ledger.create("job-1", key="k")
    await ledger.followed()
    of_tenant = "FROM scheduler.idempotency WHERE tenant_id = $1"
    row = await ledger.superuser.fetchval(f"SELECT to_json(idempotency)::text {of_tenant}", ledger.tenant_id)

    async def verified(*not_mended: str) -> str:
        verdict = (await ledger.get("/v1/chain/verify")).json()
        assert verdict["valid"]
        assert [each["kind"] for each in verdict["not_mended"]] == [*not_mended]
        seen = await ledger.client.post(
            "/v1/chain/acknowledge", json={"tenant_id": ledger.tenant_id, "reason": "ticket 7"}
        )
        assert seen.status_code in (200, 404)
        return ledger.fault()

    for damage in (f"DELETE {of_tenant}", "UPDATE scheduler.idempotency SET seq = 7 WHERE tenant_id = $1"):
        await ledger.edit(damage)
        told = await ledger.create("job-1", key="k")
        assert_damage_told(told, ledger.tenant_id)
        assert "Restore the row" in told.json()["detail"]
        assert "idempotency at seq" in await verified("idempotency")
        assert "not mended" in await verified("idempotency")
        await ledger.edit(f"DELETE {of_tenant}")
        await ledger.superuser.execute(
            "INSERT INTO scheduler.idempotency SELECT * FROM json_populate_record(NULL::scheduler.idempotency, $1)", row
        )
        assert await verified() == "None"
    assert (await ledger.create("job-1", key="k")).content == first.content


async def test_lines_whose_rows_were_removed_are_recorded_no_second_time(ledger: SharedLedger) -> None:
    lines = [{"tenant_id": ledger.tenant_id, "type": "JobCreated", "job_id": f"line-{n}", "spec": {}} for n in range(3)]

    async def send() -> httpx.Response:
        return await ledger.client.post(
            "/v1/events",
            content="\n".join(map(json.dumps, lines)),
            headers={"Idempotency-Key": "lines", "Content-Type": "application/x-ndjson"},
            params={"durability": "GLOBAL"},
        )

    assert (await send()).status_code == 200
    await ledger.followed()
    for removed in ("line = 1", "true"):
        await ledger.edit(f"DELETE FROM scheduler.idempotency WHERE tenant_id = $1 AND {removed}")
        assert_damage_told(await send(), ledger.tenant_id)
    assert (await ledger.get("/v1/chain/head")).json()["seq"] == 3


async def test_a_row_that_was_removed_while_no_node_ran_doubles_nothing(
    run_server: RunServer, superuser: asyncpg.Connection
) -> None:
    async with run_server() as client:
        assert (await Ledger(client, superuser).create("job-1", key="k")).status_code == 201
    await superuser.execute("DELETE FROM scheduler.idempotency")
    async with run_server() as client:
        assert_damage_told(await Ledger(client, superuser).create("job-1", key="k"))


async def test_a_row_with_another_body_does_not_refuse_the_request_that_it_is_about(ledger: SharedLedger) -> None:
    made = await ledger.create("job-1", key="k")
    assert made.status_code == 201
    await ledger.edit("UPDATE scheduler.idempotency SET body_digest = sha256('x') WHERE tenant_id = $1")
    again = await ledger.create("job-1", key="k")
    assert (again.status_code, again.headers["Idempotent-Replay"]) == (201, "true")
    assert again.json()["chain"] == made.json()["chain"]
    assert ledger.breaks("idempotency") == [1]
    other = await ledger.create("job-2", key="k")
    assert_damage_told(other, ledger.tenant_id)
