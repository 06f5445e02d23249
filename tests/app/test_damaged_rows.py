"""Rows that somebody damaged are named by whoever meets them: a break, a problem, a refused start, never a 500."""

from __future__ import annotations

import json
import re
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import asyncpg
import httpx
import pytest
import structlog

from app.dev.embedded import EmbeddedPostgres
from app.node.service import Service
from app.node.wiring import running
from app.read.verification import ChainVerifier
from app.store.schema import check_schema
from app.write.followers.checkpoints import CheckpointJournal
from ledger.errors import StartRefusedError
from tests.app.chain_builder import edit
from tests.app.chains import Chains, until
from tests.app.client import Client
from tests.app.conftest import MakeSettings, RunNode, RunServer
from tests.app.drafts import created
from tests.app.shared import Shared, sharing
from tests.app.starting import assert_no_start, checkpoints_blocked, kept_size, wal_folder, write
from tests.app.test_tamper import undone
from tests.conftest import Database, connected_to, fresh_database

PROBLEM = "https://tallystick.dev/problems/chain-damaged"
KEY = {"Idempotency-Key": "one"}
JOB = {"tenant_id": "acme", "spec": {"n": 1}, "job_id": "job-1", "durability": "GLOBAL"}


class Ledger:
    """A running service with a job of a tenant that a checkpoint covers, and the superuser of its database."""

    def __init__(self, client: Client, superuser: asyncpg.Connection) -> None:
        self.client = client
        self.superuser = superuser
        self.tenant_id = client.tenant
        self.job = {**JOB, "tenant_id": client.tenant}

    async def begin(self) -> None:
        """Write the job, and wait for its checkpoint and for the job table, where it is looked for."""
        made = await self.client.post("/v1/jobs", json=self.job, headers=KEY)
        assert made.status_code == 201, made.text

        async def is_covered() -> bool:
            return (await self.client.get(f"/v1/log/{self.tenant_id}/checkpoint")).status_code == 200

        async def is_listed() -> bool:
            there = "SELECT EXISTS (SELECT FROM scheduler.jobs WHERE tenant_id = $1)"
            return bool(await self.superuser.fetchval(there, self.tenant_id))

        await until(is_covered, "a checkpoint covers it")
        await until(is_listed, "the job table has it")

    async def get(self, path: str, **params: Any) -> httpx.Response:
        query = params if path.startswith(("/v1/log/", "/v1/snapshots/")) else {"tenant_id": self.tenant_id, **params}
        return await self.client.get(path, params=query)

    async def damage(self, table: str, change: str) -> None:
        """Change the tenant's rows, after taking from the table what guards single columns; keys stay."""
        guards = await self.superuser.fetch(
            "SELECT 'DROP CONSTRAINT ' || conname FROM pg_constraint WHERE conrelid = to_regclass($1) AND contype = 'c'"
            " UNION ALL SELECT 'ALTER ' || attname || ' DROP NOT NULL' FROM pg_attribute a"
            " WHERE attrelid = to_regclass($1) AND attnum > 0 AND attnotnull AND attidentity = '' AND NOT EXISTS"
            " (SELECT FROM pg_index i WHERE i.indrelid = a.attrelid AND i.indisprimary AND a.attnum = ANY(i.indkey))",
            f"scheduler.{table}",
        )
        for (guard,) in guards:
            await self.superuser.execute(f"ALTER TABLE scheduler.{table} {guard}")
        await edit(self.superuser, f"UPDATE scheduler.{table} SET {change} WHERE tenant_id = '{self.tenant_id}'")

    async def sign(self) -> int:
        """Sign all of the tenant; the id of its newest snapshot."""
        answer = await self.client.post("/v1/snapshots", json={"tenant_id": self.tenant_id})
        assert answer.status_code in (200, 201), answer.text
        snapshot_id: int = answer.json()["id"]
        return snapshot_id

    async def others_go_on(self) -> None:
        """Another tenant is written, read and verified."""
        made = await self.client.post("/v1/jobs", json={"tenant_id": "beta", "spec": {}, "durability": "GLOBAL"})
        assert made.status_code == 201, made.text
        job = made.json()["job_id"]
        assert (await self.client.get(f"/v1/jobs/{job}", params={"tenant_id": "beta"})).status_code == 200
        verdict = (await self.client.get("/v1/chain/verify", params={"tenant_id": "beta"})).json()
        assert verdict["first_break"] is None, verdict


@pytest.fixture
async def ledger_alone(
    run_server: RunServer, superuser: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Ledger]:
    # The watch may be the first to look at what it has not seen yet, and has a damaged tree made again.
    monkeypatch.setattr("app.write.followers.ledger_watch.ROUND_INTERVAL_S", 3600.0)
    async with run_server() as client:
        ledger = Ledger(client, superuser)
        await ledger.begin()
        yield ledger


@pytest.fixture(scope="module")
async def shared(make_shared_settings: MakeSettings, shared_database: Database) -> AsyncIterator[Shared]:
    """A node for those tests that damage one tenant of many."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("app.write.followers.ledger_watch.ROUND_INTERVAL_S", 3600.0)
        async with sharing(make_shared_settings(), shared_database) as shared:
            yield shared


@pytest.fixture
async def ledger(shared: Shared, shared_client: Client) -> Ledger:
    """One whose tenant is beside those that other tests have damaged."""
    ledger = Ledger(shared_client, shared.superuser)
    await ledger.begin()
    return ledger


def assert_damage_told(answer: httpx.Response, tenant_id: str = "acme") -> None:
    assert answer.status_code == 409, answer.text
    assert answer.json()["type"] == PROBLEM
    assert answer.json()["tenant_id"] == tenant_id
    assert f"tally verify --tenant {tenant_id}" in answer.json()["detail"]


UNREADABLE = {
    what: f"""replace('{{"spec": {{"n": 1, "m": ?}}}}', '?', {value})::json"""
    for what, value in (
        ("a number beyond all floats", "'1e999999'"),
        ("a number of too many digits", "repeat('7', 20000)"),
        ("too many levels", "repeat('[', 5000) || repeat(']', 5000)"),
    )
}
"""SQL of JSON that PostgreSQL takes and this program cannot read."""
READS: dict[str, tuple[str, str, list[tuple[str, dict[str, Any]]]]] = {
    **{
        f"a job whose entries are {what}": (
            "jobs",
            f"seqs = {seqs}",
            [("/v1/jobs/job-1", {}), ("/v1/jobs/job-1", {"consistency": "eventual"})],
        )
        for what, seqs in (("not there", "'{1,7}'"), ("none", "'{}'"), ("NULL", "NULL"))
    },
    "a payload that is NULL": (
        "scheduler_log",
        "payload = NULL",
        [
            ("/v1/jobs/job-1/events", {}),
            ("/v1/jobs/job-1", {"as_of": "9000000000000:0:n"}),
            ("/v1/chain/entries", {}),
        ],
    ),
    "a payload that is no object": (
        "scheduler_log",
        "payload = '[7]'",
        [("/v1/jobs/job-1", {"as_of": "9000000000000:0:n"})],
    ),
    **{
        f"a payload that has {what}": (
            "scheduler_log",
            f"payload = {payload}",
            [
                ("/v1/jobs/job-1", {}),
                ("/v1/jobs/job-1/events", {}),
                ("/v1/jobs/job-1", {"as_of": "9000000000000:0:n"}),
            ],
        )
        for what, payload in UNREADABLE.items()
    },
    "a digest that is NULL": (
        "scheduler_log",
        "payload_digest = NULL",
        [("/v1/jobs/job-1/events", {}), ("/v1/chain/entries", {})],
    ),
    "an altered tile": (
        "merkle_tile",
        "hashes = set_byte(hashes, 3, get_byte(hashes, 3) # 1)",
        [("/v1/chain/proof/inclusion", {"seq": 1})],
    ),
    "a tile that is NULL": ("merkle_tile", "hashes = NULL", [("/v1/chain/proof/consistency", {"first": 1})]),
    "a checkpoint of no form": ("merkle_head", "checkpoint = 'none'", [("/v1/chain/head", {})]),
    "a checkpoint with another signature": (
        "merkle_head",
        "checkpoint = regexp_replace(checkpoint, '.{8}\\n$', E'AAAAAAA=\\n')",
        [("/v1/log/{tenant}/checkpoint", {})],
    ),
    "a tree head of another root": (
        "merkle_head",
        "root_hash = repeat('0', 64)",
        [("/v1/log/{tenant}/checkpoint", {})],
    ),
    **{
        f"a {column} that is no time Python knows: {time}": (table, f"{column} = '{time}'", reads)
        for table, column, reads in (
            ("chain_heads", "updated_at", [("/v1/chain/head", {})]),
            ("scheduler_log", "created_at", [("/v1/chain/entries", {})]),
            ("batch_snapshot", "created_at", [("/v1/snapshots", {}), ("/v1/snapshots/{signed}", {})]),
        )
        for time in ("294276-01-01", "0044-03-15 BC", "infinity")
    },
    "a link that is NULL": ("scheduler_log", "chain_link = NULL", [("/v1/log/{tenant}/tile/entries/000.p/1", {})]),
    "an envelope of no form": ("batch_snapshot", "dsse_envelope = '[]'", [("/v1/snapshots/{signed}", {})]),
}


@pytest.mark.parametrize("name", READS)
async def test_a_read_that_meets_a_damaged_row_says_so(ledger: Ledger, name: str) -> None:
    table, change, reads = READS[name]
    signed = await ledger.sign() if table == "batch_snapshot" else 0
    for path, params in reads:

        async def refused(path: str = path, params: dict[str, Any] = params) -> httpx.Response | None:
            # Each read on its own damage: a tree or a row of the job table that was met is made again meanwhile.
            await ledger.damage(table, change)
            read = await ledger.get(path.format(signed=signed, tenant=ledger.tenant_id), **params)
            return None if read.status_code == 200 else read

        assert_damage_told(await until(refused, "what was damaged is met"), ledger.tenant_id)
    await ledger.others_go_on()


LISTS = [name for name, (table, *_) in READS.items() if table == "jobs" or "payload that has" in name]


@pytest.mark.parametrize("name", LISTS)
@pytest.mark.parametrize("private", [[], ["spec.user"]], ids=["none is private", "one is private"])
async def test_a_list_answers_the_others_and_names_the_job_that_is_damaged(
    ledger: Ledger, name: str, private: list[str]
) -> None:
    if private:
        declared = await ledger.client.put(f"/v1/tenants/{ledger.tenant_id}/privacy", json={"fields": private})
        declared.raise_for_status()
    made = await ledger.client.post("/v1/jobs", json={**ledger.job, "job_id": "job-2"})
    assert made.status_code == 201, made.text

    async def has_both() -> bool:
        return len((await ledger.get("/v1/jobs")).json()["items"]) == 2

    await until(has_both, "both are listed")
    table, change, _ = READS[name]
    for params in ({}, {"where": "spec.n:1"}):

        async def listed(params: dict[str, str] = params) -> list[dict[str, Any]]:
            # A row of the job table that was met is written again meanwhile.
            await ledger.damage(table, f"{change} WHERE {IS_FIRST[table]} AND tenant_id = '{ledger.tenant_id}' --")
            read = await ledger.get("/v1/jobs", **params)
            assert read.status_code == 200, read.text
            assert "job-2" in [job["job_id"] for job in read.json()["items"]]
            damaged: list[dict[str, Any]] = read.json()["damaged"]
            assert len(damaged) + len(read.json()["items"]) == 2
            return damaged

        damaged = await until(listed, "the row that was damaged is met")
        assert [job["job_id"] for job in damaged] == ["job-1"]
        assert f"tally verify --tenant {ledger.tenant_id}" in damaged[0]["detail"]


IS_FIRST = {"jobs": "job_id = 'job-1'", "scheduler_log": "seq = 1"}


async def test_a_list_for_other_programs_has_a_row_for_the_job_that_is_damaged(ledger: Ledger) -> None:
    await ledger.damage("scheduler_log", f"payload = {next(iter(UNREADABLE.values()))}")

    async def listed(media_type: str) -> str:
        asked = {"tenant_id": ledger.tenant_id}
        answer = await ledger.client.get("/v1/jobs", params=asked, headers={"Accept": media_type})
        assert answer.status_code == 200, answer.text
        return answer.text

    [line] = (await listed("application/x-ndjson")).splitlines()
    assert "payload-digest at seq 1" in json.loads(line)["damaged"]
    _, row = (await listed("text/csv")).splitlines()
    assert row.startswith('"","job-1","","DAMAGED"')
    assert "payload-digest at seq 1" in row


async def test_a_head_of_a_time_that_python_does_not_know_keeps_no_proof_from_being_served(ledger: Ledger) -> None:
    await ledger.sign()
    await ledger.damage("chain_heads", "updated_at = '294276-01-01'")
    for path, params in (
        ("/v1/chain/proof/inclusion", {"seq": 1}),
        (f"/v1/log/{ledger.tenant_id}/checkpoint", {}),
        (f"/v1/log/{ledger.tenant_id}/tile/entries/000.p/1", {}),
    ):
        answer = await ledger.get(path, **params)
        assert answer.status_code == 200, answer.text
    exported = await ledger.client.post("/v1/bundles/export", json={"tenant_id": ledger.tenant_id})
    assert exported.status_code == 200, exported.text


async def test_an_export_that_meets_a_broken_row_in_its_first_part_is_refused_not_cut_short(
    ledger: Ledger,
) -> None:
    await ledger.sign()
    await ledger.damage("scheduler_log", "payload = '[7]'")
    answer = await ledger.client.post("/v1/bundles/export", json={"tenant_id": ledger.tenant_id})
    assert_damage_told(answer, ledger.tenant_id)
    assert "at seq 1" in answer.json()["detail"]


async def test_a_keyed_replay_that_meets_a_damaged_row_says_so(ledger: Ledger) -> None:
    await ledger.damage("scheduler_log", "payload = NULL")
    assert_damage_told(await ledger.client.post("/v1/jobs", json=ledger.job, headers=KEY), ledger.tenant_id)
    await ledger.others_go_on()


@pytest.mark.parametrize(
    "change",
    [
        "seq = 2",
        "seq = -1",
        "seq = 0",
        "seq = NULL",
        "seq = 9223372036854775807",
        "line = 7",
        "lsn = -1",
        "epoch = NULL",
    ],
)
async def test_a_keyed_replay_is_not_answered_with_another_event_than_its_own(ledger: Ledger, change: str) -> None:
    lines = [{**ledger.job, "type": "JobCreated", "job_id": f"line-{n}"} for n in range(2)]
    for line in lines:
        del line["durability"]

    async def send_lines() -> httpx.Response:
        content = "\n".join(map(json.dumps, lines))
        headers = {**KEY, "Content-Type": "application/x-ndjson"}
        return await ledger.client.post("/v1/events", content=content, headers=headers, params={"durability": "GLOBAL"})

    assert (await send_lines()).status_code in (200, 201, 202)
    for again in (await ledger.client.post("/v1/jobs", json=ledger.job, headers=KEY), await send_lines()):
        assert again.status_code < 300, again.text
    await ledger.damage("idempotency", f"{change} WHERE line = 0 AND tenant_id = '{ledger.tenant_id}' --")
    answer = await ledger.client.post("/v1/jobs", json=ledger.job, headers=KEY)
    assert_damage_told(answer, ledger.tenant_id)
    if change != "seq = 2":
        assert_damage_told(await send_lines(), ledger.tenant_id)
    await ledger.others_go_on()


async def test_a_damaged_tree_is_named_by_verify_served_by_nobody_and_soon_made_again(ledger: Ledger) -> None:
    await ledger.damage("merkle_tile", "hashes = set_byte(hashes, 3, get_byte(hashes, 3) # 1)")
    verdict = (await ledger.get("/v1/chain/verify")).json()
    assert verdict["first_break"]["kind"] == "tree"
    assert_damage_told(await ledger.get("/v1/chain/proof/inclusion", seq=1), ledger.tenant_id)

    async def is_mended() -> bool:
        return (await ledger.get("/v1/chain/proof/inclusion", seq=1)).status_code == 200

    await until(is_mended, "the tree is made again")
    assert (await ledger.get("/v1/chain/verify")).json()["valid"]


async def test_readiness_and_metrics_tell_of_a_tenant_that_is_quarantined_and_take_requests(
    ledger_alone: Ledger,
) -> None:
    await ledger_alone.damage("chain_heads", "head_chain_link = NULL")
    answer = await ledger_alone.client.post("/v1/jobs", json={**JOB, "job_id": "job-2"})
    assert_damage_told(answer)
    assert answer.json()["lsn"] > 0
    ready = await ledger_alone.client.get("/readyz")
    assert ready.status_code == 200
    told = ready.json()["checks"]["tenants"]
    assert told == {"ok": False, "detail": "quarantined, their chains are damaged: acme"}
    metrics = (await ledger_alone.client.get("/metrics")).text
    assert 'scheduler_damaged_tenants{what="chain"} 1.0' in metrics
    await ledger_alone.others_go_on()


# --- what is kept beside the WAL ------------------------------------------------------------------


def altered(note: str) -> str:
    """The note with another size, which its signature does not cover."""
    lines = note.split("\n")
    return "\n".join((lines[0], str(int(lines[1]) + 1), *lines[2:]))


EDITS: dict[str, Callable[[str], str]] = {
    "altered": altered,
    "of another log": lambda note: note.replace("/acme\n", "/beta\n", 1),
    "empty": lambda _note: "",
    "cut": lambda note: note[:-20] + "\n",
}


async def test_a_kept_checkpoint_that_does_not_open_is_broken(make_settings: MakeSettings, database: Database) -> None:
    async with running(make_settings(), database.service_url) as (service, services):
        await write(service, 1)
        kept = service._started.checkpoints
        await until(lambda: kept.size("acme") == 1, "the checkpoint is kept")
        note = kept.load("acme") or ""
        for name, edited in EDITS.items():
            kept.store({"acme": edited(note)})
            verdict = (await services[ChainVerifier].full("acme")).to_json()
            assert verdict["verdicts"]["checkpoint"] == "broken", name
            assert verdict["first_break"]["kind"] == "rollback", name
            assert "does not open" in verdict["first_break"]["detail"], name
            assert not verdict["valid"], name


async def test_checkpoints_that_cannot_be_kept_are_a_failed_check_by_name(
    run_server: RunServer, make_settings: MakeSettings
) -> None:
    settings = make_settings()
    async with run_server(settings) as client:
        folder = wal_folder(settings)
        await until(lambda: CheckpointJournal(folder).size("_system"), "the first is kept")
        with checkpoints_blocked(folder):
            await client.post("/v1/jobs", json=JOB)

            async def is_told() -> bool:
                return not (await client.get("/readyz")).json()["checks"]["checkpoints"]["ok"]

            await until(is_told, "the check fails")
            assert (await client.get("/readyz")).status_code == 503
            refused = await client.post("/v1/snapshots", json={"tenant_id": JOB["tenant_id"]})
            assert (refused.status_code, "cannot be written beside the WAL" in refused.text) == (503, True)
        await until(lambda: kept_size(settings), "it is kept as soon as it can be")


# --- what a start refuses -------------------------------------------------------------------------

GUARDS = {
    "trigger append_only_rows of scheduler_log_p5 is missing or disabled": (
        "ALTER TABLE scheduler.scheduler_log_p5 DISABLE TRIGGER append_only_rows"
    ),
    "trigger append_only_table of batch_snapshot is missing or disabled": (
        "DROP TRIGGER append_only_table ON scheduler.batch_snapshot"
    ),
    "function refuse_change of scheduler is LANGUAGE plpgsql AS BEGIN RETURN NULL; END, not": (
        "CREATE OR REPLACE FUNCTION scheduler.refuse_change() RETURNS trigger LANGUAGE plpgsql AS"
        " 'BEGIN RETURN NULL; END'"
    ),
    "constraint scheduler_log_hlc of scheduler_log is missing": (
        "ALTER TABLE scheduler.scheduler_log DROP CONSTRAINT scheduler_log_hlc"
    ),
    "constraint chain_heads_link of chain_heads is CHECK of head_seq, not CHECK of head_seq, head_chain_link": (
        "ALTER TABLE scheduler.chain_heads DROP CONSTRAINT chain_heads_link,"
        " ADD CONSTRAINT chain_heads_link CHECK (head_seq >= 0)"
    ),
    "trigger append_only_rows of batch_snapshot is BEFORE DELETE OR UPDATE FOR EACH ROW WHEN": (
        "DROP TRIGGER append_only_rows ON scheduler.batch_snapshot;"
        "CREATE TRIGGER append_only_rows BEFORE UPDATE OR DELETE ON scheduler.batch_snapshot"
        " FOR EACH ROW WHEN (OLD.id < 0) EXECUTE FUNCTION scheduler.refuse_change()"
    ),
    "trigger erased_for_good of subject_keys is missing or disabled": (
        "DROP TRIGGER erased_for_good ON scheduler.subject_keys"
    ),
    "unique subject_keys_living of subject_keys is missing": "DROP INDEX scheduler.subject_keys_living",
    "unique scheduler_log_prev_chain_link of scheduler_log is NULLS NOT DISTINCT tenant_id, prev_chain_link, not": (
        "DROP INDEX scheduler.scheduler_log_prev_chain_link; CREATE UNIQUE INDEX scheduler_log_prev_chain_link"
        " ON scheduler.scheduler_log (tenant_id, prev_chain_link) NULLS NOT DISTINCT"
    ),
    "constraint chain_heads_pkey of chain_heads is missing": (
        "ALTER TABLE scheduler.chain_heads DROP CONSTRAINT chain_heads_pkey"
    ),
    'column root_hash of merkle_head is text COLLATE "C", not text COLLATE "C" NOT NULL': (
        "ALTER TABLE scheduler.merkle_head ALTER root_hash DROP NOT NULL"
    ),
    "column hlc_logical of scheduler_log is text NOT NULL, not bigint NOT NULL": (
        "ALTER TABLE scheduler.scheduler_log ALTER hlc_logical TYPE text"
    ),
    "partition scheduler_log_p0 of scheduler_log is missing": (
        "ALTER TABLE scheduler.scheduler_log DETACH PARTITION scheduler.scheduler_log_p0"
    ),
}


STARTED_WITHOUT = next(iter(GUARDS))


@pytest.fixture(scope="module")
def guarded_database(postgres: EmbeddedPostgres) -> Iterator[Database]:
    """A database from which tests take a guard, and put it back."""
    with fresh_database(postgres) as database:
        yield database


@pytest.fixture(scope="module")
async def guarded(guarded_database: Database) -> AsyncIterator[asyncpg.Connection]:
    async with connected_to(guarded_database.superuser_url) as superuser:
        yield superuser


@pytest.mark.parametrize("said", [said for said in GUARDS if said != STARTED_WITHOUT])
async def test_a_database_without_a_guard_of_the_ledger_has_not_the_schema_of_this_version(
    guarded: asyncpg.Connection, said: str
) -> None:
    await check_schema(guarded)
    async with undone(guarded):
        if "hlc_logical" in said:
            await guarded.execute("DROP VIEW scheduler.log_entries")
        await guarded.execute(GUARDS[said])
        with pytest.raises(StartRefusedError, match=said):
            await check_schema(guarded)


async def test_a_database_without_a_guard_of_the_ledger_is_refused(
    run_node: RunNode, superuser: asyncpg.Connection
) -> None:
    await superuser.execute(GUARDS[STARTED_WITHOUT])
    await assert_no_start(run_node(), StartRefusedError, match=STARTED_WITHOUT)


async def chained(service: Service, n: int) -> None:
    assert (await service.submitter.submit(created("acme", n), key=None)).chain is not None


async def test_a_forged_row_of_this_node_from_far_ahead_does_not_move_its_clock(
    run_node: RunNode, make_settings: MakeSettings, superuser: asyncpg.Connection
) -> None:
    settings = make_settings()
    async with run_node(settings) as service:
        await chained(service, 1)
        node_id = service.node.node_id
    ahead_ms = time.time_ns() // 1_000_000 + 3_600_000
    await superuser.execute(
        """
        INSERT INTO scheduler.scheduler_log (tenant_id, seq, t_hlc, hlc_physical, hlc_logical, hlc_node, job_id, action,
               link_version, prev_chain_link, chain_link, payload_digest, payload)
        VALUES ('acme', 900, $1::bigint || ':0:' || $2, $1, 0, $2, 'forged', 'ENQUEUE', 2, 'p', 'l', 'd', '{}')
        """,
        ahead_ms,
        node_id,
    )
    await assert_no_start(
        run_node(settings), StartRefusedError, match="the entry is forged, or this machine's clock is wrong"
    )
    await edit(superuser, "DELETE FROM scheduler.scheduler_log WHERE job_id = 'forged'")
    async with run_node(settings) as service:
        await chained(service, 2)
        assert service.node.clock.last.physical_ms < ahead_ms


async def test_a_row_of_this_nodes_key_that_was_removed_is_published_again_for_all_it_signed(
    run_server: RunServer, make_settings: MakeSettings, chains: Chains, superuser: asyncpg.Connection
) -> None:
    settings = make_settings(chain={"batch_interval": "100ms"})
    async with run_server(settings) as client:
        await client.post("/v1/jobs", json=JOB)
        await client.post("/v1/snapshots", json={"tenant_id": "acme"})
        await until(chains.key_recorded, "the node has recorded its key")
    await superuser.execute("DELETE FROM scheduler.signing_keys")
    async with run_server(settings) as client:
        verdict = (await client.get("/v1/chain/verify", params={"tenant_id": "acme"})).json()
        assert verdict["verdicts"]["signatures"] == "ok", verdict
    row = "SELECT algorithm, public_key_pem FROM scheduler.signing_keys"
    published = await superuser.fetchrow(row)
    await superuser.execute("UPDATE scheduler.signing_keys SET algorithm = 'other', public_key_pem = 'other'")
    with structlog.testing.capture_logs() as lines:
        async with run_server(settings) as client:
            assert await superuser.fetchrow(row) == published
            verdict = (await client.get("/v1/chain/verify", params={"tenant_id": "acme"})).json()
            assert verdict["verdicts"]["signatures"] == "ok", verdict
    assert "own_key_was_removed" in [line["event"] for line in lines]


MANGLE = "CREATE TRIGGER {} BEFORE INSERT ON scheduler.{} FOR EACH ROW EXECUTE FUNCTION scheduler.mangle()"
ADDED = {
    "row security of wal_positions, which hides rows": "ALTER TABLE scheduler.wal_positions ENABLE ROW LEVEL SECURITY",
    "row security of scheduler_log, which hides rows": "ALTER TABLE scheduler.scheduler_log ENABLE ROW LEVEL SECURITY",
    "trigger mangle of idempotency": MANGLE.format("mangle", "idempotency"),
    'trigger "only this" of idempotency': MANGLE.format('"only this"', "idempotency"),
    'trigger " append_only_rows" of batch_snapshot': MANGLE.format('" append_only_rows"', "batch_snapshot"),
    "trigger mangle of scheduler_log": MANGLE.format("mangle", "scheduler_log"),
    "trigger mangle of scheduler_log_p3": MANGLE.format("mangle", "scheduler_log_p3"),
    "rule quiet of jobs": "CREATE RULE quiet AS ON INSERT TO scheduler.jobs DO INSTEAD NOTHING",
    "chain_heads, which is UNLOGGED: a crash of PostgreSQL empties it": (
        "ALTER TABLE scheduler.chain_heads SET UNLOGGED"
    ),
    "scheduler_log_p2, which is UNLOGGED: a crash of PostgreSQL empties it": (
        "ALTER TABLE scheduler.scheduler_log_p2 SET UNLOGGED"
    ),
}
"""By how a start names it, what somebody adds on top of a table."""
BESIDE = """
    CREATE INDEX by_action ON scheduler.scheduler_log (action);
    CREATE STATISTICS scheduler.of_jobs ON tenant_id, status FROM scheduler.jobs;
    ALTER TABLE scheduler.jobs ADD COLUMN note text;
    CREATE TABLE scheduler.reports (
        tenant_id text COLLATE "C", job_id text COLLATE "C", FOREIGN KEY (tenant_id, job_id) REFERENCES scheduler.jobs
    );
    ALTER TABLE scheduler.reports ENABLE ROW LEVEL SECURITY;
    CREATE UNLOGGED TABLE scheduler."a b-c" ("   " int);
    CREATE FUNCTION scheduler.told() RETURNS event_trigger LANGUAGE plpgsql AS 'BEGIN END';
    CREATE EVENT TRIGGER told ON ddl_command_end EXECUTE FUNCTION scheduler.told();
    CREATE POLICY of_nobody ON scheduler.jobs USING (false);
"""


async def make_mangle(superuser: asyncpg.Connection) -> None:
    await superuser.execute(
        "CREATE FUNCTION scheduler.mangle() RETURNS trigger LANGUAGE plpgsql AS"
        " $$ BEGIN NEW.key = NEW.key || 'x'; RETURN NEW; END $$"
    )


@pytest.mark.parametrize("said", ADDED)
async def test_what_was_added_to_a_table_is_told_with_the_statement_that_takes_it_away(
    guarded: asyncpg.Connection, said: str
) -> None:
    async with undone(guarded):
        await make_mangle(guarded)
        await guarded.execute(ADDED[said])
        with pytest.raises(StartRefusedError) as refused:
            await check_schema(guarded)
        ((told, statement),) = re.findall(r"(?:: |; )([^;(]+) \(([A-Z][^)]+)\)", str(refused.value))
        assert told == said
        await guarded.execute(statement)
        await check_schema(guarded)


async def test_what_stands_beside_the_tables_of_the_ledger_is_in_nobodys_way(guarded: asyncpg.Connection) -> None:
    async with undone(guarded):
        await guarded.execute(BESIDE)
        await make_mangle(guarded)
        await guarded.execute(MANGLE.format("mangle", "reports"))
        await guarded.execute(MANGLE.format("mangle", "webhooks"))
        await guarded.execute("ALTER TABLE scheduler.webhooks DISABLE TRIGGER mangle")
        await check_schema(guarded)


async def test_a_start_names_row_security_before_it_takes_hidden_rows_for_lost_ones(
    run_node: RunNode, superuser: asyncpg.Connection
) -> None:
    async with run_node() as service:
        await write(service, 1)
    for table in ("wal_positions", "scheduler_log"):
        await superuser.execute(f"ALTER TABLE scheduler.{table} ENABLE ROW LEVEL SECURITY")
        await assert_no_start(run_node(), StartRefusedError, match=f"{table} DISABLE ROW LEVEL SECURITY")
        await superuser.execute(f"ALTER TABLE scheduler.{table} DISABLE ROW LEVEL SECURITY")
    async with run_node() as service:
        await write(service, 2)
