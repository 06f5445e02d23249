"""Somebody with every right, and a key of his own, edits verdicts and the table of what is promised: both are named."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable

import asyncpg
import httpx
import pytest

from app.edge.listener import listening
from app.node.wiring import running
from app.read import checking, full_walk
from app.read.full_walk import FullWalk
from app.runtime.state.found_breaks import FoundBreaks
from app.store.chain_reader import consistent_reader
from ledger.verification import ASPECTS, PROMISED_COLUMNS, Break, Verdict, verify
from tests.app import test_tamper as tamper
from tests.app.chain_builder import edit as edit_rows
from tests.app.chain_builder import insert, unguarded
from tests.app.chain_builder import replace as put
from tests.app.chains import followed, until
from tests.app.client import Client
from tests.app.conftest import MakeSettings, RunServer
from tests.app.test_commitments import free, placement, propose
from tests.conftest import Database
from tests.ledger.committed import RACE, committed, flipped, with_history
from tests.ledger.ledger_in_memory import OPEN

LEDGER = committed(RACE)
Edit = Callable[[asyncpg.Connection], Awaitable[object]]


def forged(seq: int) -> Edit:
    """Put the other verdict there, with every link, head, tile and signature made to fit."""

    async def edit(connection: asyncpg.Connection) -> None:
        await put(connection, flipped(LEDGER, seq), "batch_snapshot", "jobs", "commitments")

    return edit


def promised(change: str) -> Edit:
    return tamper.sql(change.format(table="scheduler.commitments"))


CASES: list[tuple[int, Edit]] = [
    (6, forged(6)),
    (8, forged(8)),
    (9, forged(9)),
    (11, forged(11)),
    (7, promised("DELETE FROM {table} WHERE seq = 7")),
    (8, promised("INSERT INTO {table} VALUES ('acme', 8, NULL, 'capsule:c')")),
    (3, promised("INSERT INTO {table} VALUES ('acme', 3, 4, 'capsule:c')")),
    (6, promised("UPDATE {table} SET ended_seq = NULL WHERE seq = 6")),
    (6, promised("UPDATE {table} SET ended_seq = 8 WHERE seq = 6")),
    (10, promised("UPDATE {table} SET ended_seq = 11 WHERE seq = 10")),
    (5, promised("UPDATE {table} SET ended_seq = NULL WHERE seq = 5")),
    (10, promised("UPDATE {table} SET subject = 'capsule:z' WHERE seq = 10")),
    (5, promised("DELETE FROM {table}")),
]


@pytest.fixture
async def connection(superuser: asyncpg.Connection) -> asyncpg.Connection:
    """A superuser's connection to a database that holds ``LEDGER``, triggers switched off."""
    await superuser.execute("SET session_replication_role = replica")
    await insert(superuser, LEDGER)
    return superuser


@pytest.fixture(scope="module")
async def whole(shared_database: Database) -> AsyncIterator[asyncpg.Connection]:
    """The same to a database that the tests of this file share; it keeps no plans, which other types would spoil."""
    superuser = await asyncpg.connect(shared_database.superuser_url, statement_cache_size=0)
    await superuser.execute("SET session_replication_role = replica")
    await insert(superuser, LEDGER)
    yield superuser
    await superuser.close()


async def judged(connection: asyncpg.Connection) -> Verdict:
    """The verdict of one process."""
    async with consistent_reader(connection, "acme") as reader:
        return await verify(reader, tenant_id="acme", open_snapshot=OPEN)


@pytest.fixture(scope="module")
async def kept() -> AsyncIterator[checking.KeptProcesses]:
    """Processes for one chain after the other."""
    kept = checking.KeptProcesses()
    yield kept
    await kept.close()


async def checked(connection: asyncpg.Connection, database: Database, kept: checking.KeptProcesses) -> Verdict:
    """The verdict of one process, which is that of several; those take five times as long."""
    told: dict[str, list[Break]] = {"one": [], "several": []}
    async with consistent_reader(connection, "acme") as reader:
        one = await verify(reader, tenant_id="acme", open_snapshot=OPEN, on_break=told["one"].append)
        async with checking.checking(database.service_url, reader, kept) as elsewhere:
            several = await verify(
                reader, tenant_id="acme", open_snapshot=OPEN, on_break=told["several"].append, elsewhere=elsewhere
            )
    assert several == one
    assert sorted(told["several"], key=repr) == sorted(told["one"], key=repr)
    return one


async def test_what_nobody_edited_is_ok(
    connection: asyncpg.Connection, database: Database, kept: checking.KeptProcesses
) -> None:
    verdict = await checked(connection, database, kept)
    assert verdict.verdicts == dict.fromkeys(ASPECTS, "ok") | {"checkpoint": "not_checked"}
    assert verdict.commitments == len(RACE)


def assert_named(verdict: Verdict, seq: int) -> None:
    assert verdict.first_break is not None
    assert (verdict.first_break.kind, verdict.first_break.seq) == ("projection", seq)
    assert tamper.not_ok(verdict) == {"projection": "broken", "checkpoint": "not_checked"}


@pytest.mark.parametrize(("seq", "edit"), CASES)
async def test_an_edit_is_named_by_its_seq(whole: asyncpg.Connection, seq: int, edit: Edit) -> None:
    async with tamper.undone(whole):
        await edit(whole)
        assert_named(await judged(whole), seq)


async def test_an_edited_verdict_and_an_edited_table_are_named_by_several_processes_too(
    connection: asyncpg.Connection, database: Database, kept: checking.KeptProcesses
) -> None:
    for seq, edit in (CASES[6], CASES[0]):  # what is put in place of all undoes the first
        await edit(connection)
        assert_named(await checked(connection, database, kept), seq)


@pytest.mark.parametrize("column", PROMISED_COLUMNS)
@pytest.mark.parametrize("is_null", [True, False])
async def test_a_null_or_another_type_in_any_column_of_the_table_is_a_break(
    whole: asyncpg.Connection, column: str, is_null: bool
) -> None:
    async with tamper.undone(whole):
        await tamper.drop_guards(whole, "commitments")
        if is_null:
            await tamper.update("commitments", f"{column} = NULL", "ended_seq = 9")(whole)
        else:
            of_table = "indrelid = 'scheduler.commitments'::regclass"
            for (index,) in await whole.fetch(f"SELECT indexrelid::regclass::text FROM pg_index WHERE {of_table}"):
                await whole.execute(f"DROP INDEX {index}")
            change = f"ALTER {column} TYPE text[] USING ARRAY[{column}::text]"
            await whole.execute(f"ALTER TABLE scheduler.commitments {change}")
        assert (await judged(whole)).breaks.keys() == {"projection"}


async def test_actions_of_another_type_leave_nothing_unsaid(
    connection: asyncpg.Connection, database: Database, kept: checking.KeptProcesses
) -> None:
    await tamper.drop_guards(connection, "scheduler_log")
    await connection.execute("DROP VIEW scheduler.log_entries; DROP INDEX scheduler.scheduler_log_commitments")
    await connection.execute("ALTER TABLE scheduler.scheduler_log ALTER action TYPE json USING to_json(action)")
    verdict = await checked(connection, database, kept)
    assert (verdict.verdicts["links"], verdict.verdicts["projection"]) == ("broken", "not_checked")


async def test_what_was_imported_is_history(
    superuser: asyncpg.Connection, database: Database, kept: checking.KeptProcesses
) -> None:
    await superuser.execute("SET session_replication_role = replica")
    await insert(superuser, with_history())
    assert (await checked(superuser, database, kept)).verdicts["projection"] == "ok"


async def test_the_service_judges_its_own_chain_and_names_an_edited_table(
    client: httpx.AsyncClient, superuser: asyncpg.Connection
) -> None:
    async def verified() -> dict[str, object]:
        answer = await client.get("/v1/chain/verify", params={"tenant_id": "acme"})
        answer.raise_for_status()
        found: dict[str, object] = answer.json()
        return found

    first = (await propose(client, placement("a", "n1"), free("n1"))).json()["index"]
    assert (await propose(client, placement("b", "n1"), free("n1"))).status_code == 409
    assert (await propose(client, placement("c", "n2", {}))).status_code == 201, "what claims nothing holds as well"
    assert (await propose(client, {"kind": "Revocation", "index": first})).status_code == 201
    await until(lambda: followed(superuser), "the table follows")
    whole = await verified()
    assert (whole["valid"], whole["first_break"], whole["verdicts"]["projection"]) == (True, None, "ok")  # type: ignore[index]
    async with unguarded(superuser):
        await superuser.execute("UPDATE scheduler.commitments SET ended_seq = NULL WHERE seq = $1", first)
    found = await verified()
    assert (found["valid"], found["breaks"]) == (False, {"projection": 1})
    assert found["first_break"]["seq"] == first  # type: ignore[index]


async def test_a_node_that_knows_better_names_what_another_accepts_by_an_edited_log(
    run_server: RunServer, make_settings: MakeSettings, superuser: asyncpg.Connection
) -> None:
    async with run_server(make_settings("one")) as one:
        has = {"tenant_id": "acme", "capacity": {"cpu_millis": 20_000}}
        (await one.put("/v1/nodes/n1/capacity", json=has)).raise_for_status()
        first, *_ = [(await propose(one, placement(name, "n1"), free("n1"))).json()["index"] for name in "abd"]
        (await one.put("/v1/nodes/n1/capacity", json=has)).raise_for_status()
        await until(lambda: followed(superuser), "the table follows")
        called = "UPDATE scheduler.scheduler_log SET action = $2 WHERE tenant_id = 'acme' AND seq = $1"
        async with run_server(make_settings("two")) as two:
            await edit_rows(superuser, called, first, "JOB_PROGRESS")
            assert (await propose(two, placement("c", "n2"))).status_code == 201
            again = (await propose(two, placement("a", "n2"))).json()
            await edit_rows(superuser, called, first, "PROPOSE_ACCEPTED")
            assert (await two.get("/readyz")).json()["checks"]["breaks"]["ok"]
        assert again["verdict"] == "accepted"

        lost = (await propose(one, placement("a", "n3"))).json()
        assert (lost["reason"], lost["blocking_index"]) == ("capsule-placed", again["index"])

        async def named() -> str:
            said: str = (await one.get("/readyz")).json()["checks"]["breaks"]["detail"]
            return said

        said = await until(named, "the break is kept for people to look at")
        assert f"projection at seq {again['index']} of acme" in said
        assert "more" not in said.partition(";")[0], "what is right is not named"


async def test_the_walk_names_an_edited_table_of_a_chain_that_it_reads_in_ranges(
    make_settings: MakeSettings, database: Database, superuser: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(full_walk, "RANGE_ENTRIES", 3)
    settings = make_settings(verify={"on_start": False, "full_interval": "1s"})
    async with (
        running(settings, database.service_url) as (service, services),
        listening(services) as (url, _serving),
        Client(base_url=url) as client,
    ):
        index = 0
        for name in "abcde":
            index = (await propose(client, placement(name, "n1", {}))).json()["index"]
            await service.notary.sign_now("acme")
        await until(lambda: followed(superuser), "the table follows")
        done = services[FullWalk].walks_done
        await until(lambda: services[FullWalk].walks_done >= done + 2, "the chain is walked whole")
        assert not services[FoundBreaks].open()
        async with unguarded(superuser):
            await superuser.execute("DELETE FROM scheduler.commitments WHERE seq = $1", index)
        (found,) = await until(services[FoundBreaks].open, "the walk finds it")
    assert (found.tenant_id, found.kind, found.seq) == ("acme", "projection", index)


@pytest.mark.parametrize("amount", [2**60, -(2**40)])
async def test_an_amount_that_no_client_can_give_keeps_up_its_tenant_alone(
    run_server: RunServer, superuser: asyncpg.Connection, amount: int
) -> None:
    async with run_server() as client:
        body = {"tenant_id": "acme", "capacity": {"cpu_millis": 4000}}
        (await client.put("/v1/nodes/n1/capacity", json=body)).raise_for_status()
    async with unguarded(superuser):
        await superuser.execute(
            "UPDATE scheduler.scheduler_log SET payload = replace(payload::text, '4000', $1)::json"
            " WHERE action = 'CAPACITY_SET'",
            str(amount),
        )
    async with run_server() as client:
        held = await propose(client, placement("a", "n1", {}), free("n1", {"cpu_millis": 1, "memory_bytes": 1}))
        assert (held.status_code, held.json()["type"].rpartition("/")[2]) == (409, "chain-damaged")
        assert (await propose(client, placement("a", "n1"), free("n1"), tenant="other")).status_code == 201


async def test_an_answer_that_another_s_row_would_give_keeps_up_its_tenant_alone(
    run_server: RunServer, superuser: asyncpg.Connection
) -> None:
    async with run_server() as client:
        await propose(client, placement("a", "n1"), free("n1"), "mine")
        await propose(client, placement("b", "n1"), free("n1"), "yours")
        await superuser.execute("UPDATE scheduler.idempotency SET seq = 1 WHERE key = 'yours'")
        held = await propose(client, placement("b", "n1"), free("n1"), "yours")
        assert (held.status_code, held.json()["type"].rpartition("/")[2]) == (409, "chain-damaged")
        assert (await propose(client, placement("b", "n1"), free("n1"), tenant="other")).status_code == 201
