"""Creating a job a second time: harmless as it was, refused otherwise where that is known, shown where it was not."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import asyncpg
import httpx
import pytest

from app.node.service import Service
from app.store import edge
from app.store.edge import ChainedJob, EdgeLookups
from app.store.entry_check import EntryCheck
from app.store.jobs import table as job_table
from app.store.jobs.table import JobFolds
from app.write.intake.job_checks import HomeRegions, JobChecks, JobIndex
from app.write.pending.requests import Draft, EventLines
from ledger.errors import (
    DatabaseUnavailableError,
    DurabilityTimeoutError,
    InvalidEventError,
    JobEndedError,
    JobExistsError,
)
from tests.app.chains import Chains, followed, until
from tests.app.conftest import MakeSettings, RunNode, RunServer
from tests.app.drafts import LOCAL, completed, created, key
from tests.app.hurry import hurried
from tests.app.postgres_proxy import PostgresProxy
from tests.app.shared import Shared
from tests.conftest import Database, connected_to
from tests.turns import counted_turns

JOB = "brought-by-the-caller"


def creation(n: int, **how: Any) -> Draft:
    return created("acme", n, job_id=JOB, **how)


async def refused(service: Service, draft: Draft) -> None:
    await service.key_changes.recorded.wait()
    next_lsn = service.writer.next_lsn
    with pytest.raises(JobExistsError, match=JOB):
        await service.submitter.submit(draft, key=None)
    assert service.writer.next_lsn == next_lsn


async def test_another_spec_is_refused_where_the_first_is_known_and_the_same_again_changes_nothing(
    run_node: RunNode, chains: Chains
) -> None:
    async with run_node() as service:
        submit = service.submitter.submit
        await submit(creation(1), key=key("first"))
        again = await submit(creation(1), key=None)
        assert again.chain is not None
        await refused(service, creation(2))
        await refused(service, creation(2, durability=LOCAL))
        await refused(service, creation(1)._replace(fields={"spec": {"n": 1}, "assigned_dcs": ["elsewhere"]}))
        assert (await submit(creation(1), key=key("first"))).replayed
        for lines in ([created("acme", 9), creation(2)], [creation(1), creation(3)]):
            with pytest.raises(InvalidEventError) as refusal:
                await service.submitter.submit_lines(EventLines.of(lines), durability=None, key=None)
            assert (refusal.value.line, refusal.value.path) == (2, ("job_id",))
        fresh = [created("acme", n, job_id="of-one-request") for n in (1, 2)]
        with pytest.raises(InvalidEventError):
            await service.submitter.submit_lines(EventLines.of(fresh), durability=LOCAL, key=None)
    async with run_node() as service:
        await refused(service, creation(2))
        await service.submitter.submit(creation(1), key=None)
        await service.submitter.submit(completed("acme", JOB), key=None)
    async with run_node() as service:
        with pytest.raises(JobEndedError):
            await service.submitter.submit(creation(1), key=None)
    assert len(await chains.sound("acme")) == 4


async def test_of_two_that_come_together_one_is_refused(shared: Shared, tenant: str) -> None:
    both = [shared.service.submitter.submit(created(tenant, n, job_id=JOB), key=None) for n in (1, 2)]
    outcomes = await asyncio.gather(*both, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes].count(JobExistsError) == 1


async def test_without_postgres_a_creation_is_taken_and_is_known_while_it_waits_in_the_wal_also_after_a_restart(
    run_node: RunNode, make_settings: MakeSettings, proxy: PostgresProxy
) -> None:
    settings = make_settings(shutdown_grace="1s")
    async with run_node(settings, url=proxy.url) as service:
        await service.submitter.submit(created("acme", 0), key=None)
        await service.key_changes.recorded.wait()
        await until(lambda: not service.backlog, "nothing waits")
        await proxy.refuse()
        early = created("acme", 0, job_id="early", durability=LOCAL)
        assert (await service.submitter.submit(early, key=None)).achieved is LOCAL
        with hurried(service), pytest.raises(DurabilityTimeoutError):
            await service.submitter.submit(creation(1), key=None)
        await refused(service, creation(2, durability=LOCAL))
    async with run_node(settings) as service:
        await refused(service, creation(2, durability=LOCAL))


async def test_what_was_not_known_is_shown_to_the_jobs_reader(
    run_server: RunServer, make_settings: MakeSettings, chains: Chains, superuser: asyncpg.Connection
) -> None:
    async def create(client: httpx.AsyncClient, spec: object, level: str, **given: object) -> httpx.Response:
        body = {"tenant_id": "acme", "job_id": JOB, "spec": spec, "durability": level, **given}
        return await client.post("/v1/jobs", json=body)

    async with run_server() as here, run_server(make_settings("other")) as there:
        assert (await create(here, {"n": 1}, "GLOBAL")).status_code == 201
        problem = await create(there, {"n": 2}, "GLOBAL")
        assert (problem.status_code, problem.json()["type"].rpartition("/")[2]) == (409, "job-exists")
    async with run_server(make_settings("third")) as third:
        job = (await third.get(f"/v1/jobs/{JOB}")).json()
        assert job["other_creations"] == []
        other = await create(third, {"n": 2}, "LOCAL")
        assert other.status_code == 201
        session = {"Tally-Session": other.json()["session"]}
        await create(third, {"n": 2}, "LOCAL")
    async with run_server(make_settings("fourth")) as fourth:
        session = {"Tally-Session": (await create(fourth, {"n": 3}, "LOCAL", assigned_dcs=["x"])).json()["session"]}
        job = (await fourth.get(f"/v1/jobs/{JOB}", headers=session)).json()
        assert job["spec"] == {"n": 1}
        assert [(one["spec"], one["assigned_dcs"]) for one in job["other_creations"]] == [
            ({"n": 2}, []),
            ({"n": 3}, ["x"]),
        ]
        assert job["other_creations"][0]["hlc"] == other.json()["hlc"]
        assert job["other_creations"][0]["at"] == other.json()["at"]
        then = {"as_of": other.json()["hlc"]}
        before = (await fourth.get(f"/v1/jobs/{JOB}", params=then)).json()
        assert [one["spec"] for one in before["other_creations"]] == [{"n": 2}]
        verdict = (await fourth.get("/v1/chain/verify", params={"tenant_id": "acme"})).json()
        assert (verdict["valid"], verdict["verdicts"]["projection"]) == (True, "ok")
        seqs = [one["seq"] for one in job["other_creations"]]
        entries = (await fourth.get("/v1/chain/entries", params={"tenant_id": "acme"})).json()["items"]
        assert ['"n":2' in entries[seqs[0] - 1]["payload"], '"n":3' in entries[seqs[1] - 1]["payload"]] == [True, True]
    await chains.sound("acme")


async def test_others_get_their_turn_while_large_creations_are_compared(
    shared: Shared, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.runtime.sharing.TURN_S", -1.0)

    async def find_none(_wanted: object) -> dict[tuple[str, str], ChainedJob]:
        return {}

    checks = JobChecks(shared.service.node, JobIndex(), find_none, HomeRegions("local"))
    with counted_turns() as turns:
        lines = EventLines.of([created("acme", n, job_id=f"j{n}") for n in range(20)])
        await checks.check(lines, LOCAL, in_lines=True)
    assert turns.count >= 19


async def test_the_store_is_asked_for_any_number_of_jobs_in_as_many_statements(database: Database) -> None:
    asked: list[str] = []
    async with (
        asyncpg.create_pool(database.service_url, min_size=1, max_size=1) as pool,
        pool.acquire() as connection,
    ):
        await logged(connection, asked)
        await pool.release(connection)
        lookups = EdgeLookups(pool, JobFolds(EntryCheck(lambda _: None)), lambda *_: None)
        counts = []
        for jobs in (1, 100):
            asked.clear()
            assert await lookups.find_jobs([("acme", f"job-{n}") for n in range(jobs)]) == {}
            counts.append(len(asked))
    assert counts[0] == counts[1] > 0


async def test_requests_that_come_together_ask_the_store_together(
    shared: Shared, tenant: str, shared_database: Database
) -> None:
    for n in range(3):
        await shared.service.submitter.submit(created(tenant, n, job_id=f"job-{n}"), key=None)
    await until(lambda: followed(shared.superuser), "the table has followed")
    asked: list[str] = []
    beta = (f"{tenant}-beta", "job-0")
    async with asyncpg.create_pool(
        shared_database.service_url, min_size=0, init=lambda each: logged(each, asked)
    ) as pool:
        lookups = EdgeLookups(pool, JobFolds(EntryCheck(lambda _: None)), lambda *_: None)
        wanted = [[(tenant, "job-0")], [(tenant, "job-1"), (tenant, "job-0")], [beta], [(tenant, "job-2")]]
        one = await lookups.find_jobs(wanted[0])
        alone = len(asked)
        gone, *looking = [asyncio.ensure_future(lookups.find_jobs(each)) for each in (wanted[0], *wanted)]
        await asyncio.sleep(0)
        gone.cancel()
        found = await asyncio.gather(*looking)
        assert [sorted(each) for each in found] == [sorted(set(each) - {beta}) for each in wanted]
        assert found[0] == one
        assert len(asked) == 2 * alone
        pool.terminate()
        refused = await asyncio.gather(*map(lookups.find_jobs, wanted), return_exceptions=True)
        assert [type(each) for each in refused] == [DatabaseUnavailableError] * len(wanted)


async def test_who_asks_in_the_turn_in_which_a_lookup_ends_is_answered(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(edge, "LOOKUPS_AT_ONCE", 1)
    async with asyncpg.create_pool(database.service_url, min_size=0) as pool:
        lookups = EdgeLookups(pool, JobFolds(EntryCheck(lambda _: None)), lambda *_: None)
        before = asyncio.all_tasks()
        asking = asyncio.ensure_future(lookups.find_jobs([("acme", "job-0")]))
        await asyncio.sleep(0)
        (looking_up,) = asyncio.all_tasks() - before - {asking}
        while not looking_up.done():
            await asyncio.sleep(0)
        async with asyncio.timeout(edge.LOOKUP_TIMEOUT_S):
            assert await lookups.find_jobs([("acme", "job-0")]) == await asking == {}


async def logged(connection: asyncpg.Connection[asyncpg.Record], asked: list[str], what: str = "scheduler.") -> None:
    connection.add_query_logger(lambda query: asked.append(query.query) if what in query.query else None)


async def test_an_answer_does_not_wait_until_its_connection_is_given_back(database: Database) -> None:
    given_back: list[str] = []
    async with asyncpg.create_pool(
        database.service_url, min_size=0, init=lambda each: logged(each, given_back, "RESET ALL")
    ) as pool:
        lookups = EdgeLookups(pool, JobFolds(EntryCheck(lambda _: None)), lambda *_: None)
        looking = asyncio.ensure_future(lookups.find_jobs([("acme", "job-0")]))
        before_it: list[int] = []
        looking.add_done_callback(lambda _: before_it.append(len(given_back)))
        await looking
        await until(lambda: bool(given_back), "it is given back")
    assert before_it == [0]


async def test_no_more_than_two_lookups_are_under_way(database: Database, superuser: asyncpg.Connection) -> None:
    waiting = "SELECT count(*) = $1 FROM pg_locks WHERE NOT granted"
    async with asyncpg.create_pool(database.service_url, min_size=0, max_size=9) as pool:
        lookups = EdgeLookups(pool, JobFolds(EntryCheck(lambda _: None)), lambda *_: None)
        async with superuser.transaction():
            await superuser.execute("LOCK TABLE scheduler.jobs")
            looking = []
            for n in range(4):
                looking.append(asyncio.ensure_future(lookups.find_jobs([("acme", f"job-{n}")])))
                await until(lambda n=n: pool.get_size() == min(n + 1, 2), "it asks, or waits")
                await until(lambda n=n: superuser.fetchval(waiting, min(n + 1, 2)), "it meets the lock")
        assert await asyncio.gather(*looking) == [{}] * 4
        assert pool.get_size() == 2


@pytest.mark.parametrize(
    "query",
    [job_table._ENTRIES, job_table._MENTIONED],
    ids=["parts", "mentioned"],
)
async def test_a_ledger_that_was_never_analyzed_finds_jobs_by_their_index(database: Database, query: str) -> None:
    parameters = ", ".join(["NULL"] * max(map(int, re.findall(r"\$(\d)", query))))
    async with connected_to(database.service_url) as connection:
        await connection.execute("SET plan_cache_mode = force_generic_plan")
        await connection.execute(f"PREPARE asked AS {query}")
        plan = [row[0] for row in await connection.fetch(f"EXPLAIN EXECUTE asked({parameters})")]
    assert sum("Index Cond" in line and "job_id = " in line for line in plan) >= 8, plan
    assert not [line for line in plan if "Filter: (job_id" in line or "hashed" in line or "Seq Scan on jobs" in line]
