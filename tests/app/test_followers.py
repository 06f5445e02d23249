"""The job table follows behind the commit: behind or emptied, it is never a wrong answer, and it catches up."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import asyncpg
import httpx
import pytest

from app.store import following
from app.store.chain_reader import consistent_reader
from app.store.jobs import table as job_table
from app.store.migrate import migrate
from app.write.followers import followers
from app.write.followers.followers import TableFollower
from app.write.followers.job_table import JobTable, Turn
from app.write.pending.requests import EventLines
from ledger.errors import ChainDamagedError, JobEndedError, JobExistsError
from ledger.positions import BEFORE_FIRST
from ledger.verification import verify
from ledger.verification.projection_check import seqs_text
from tests.app.chains import Chains, followed, numbers, places, until
from tests.app.client import Client
from tests.app.conftest import MakeSettings, RunNode, RunServer
from tests.app.drafts import GLOBAL, accepted, completed, created, progressed
from tests.app.followed_chain import FollowedChain
from tests.app.old_schemas import ran, stamped
from tests.app.shared import Shared
from tests.app.test_rows_counted import MENDED, dropping
from tests.conftest import Database, connected_to

HALT = "LOCK TABLE scheduler.follower_positions IN EXCLUSIVE MODE"
"""No follower moves while this is held; readers do not notice."""


@asynccontextmanager
async def halted(database: Database, how: str = HALT) -> AsyncIterator[None]:
    """Another session holds a lock: by default one that keeps the followers where they are."""
    async with connected_to(database.superuser_url) as connection, connection.transaction():
        await connection.execute(how)
        yield


async def table(superuser: asyncpg.Connection, tenants: str = "%") -> list[tuple[object, ...]]:
    """All that the job table holds, of tenants of such a name, but for when it was written."""
    rows = await superuser.fetch(
        "SELECT tenant_id, job_id, status, created_physical, created_logical, created_node, created_by,"
        " last_seq, ended_ms, run_ms, figure, seqs::text FROM scheduler.jobs"
        " WHERE tenant_id LIKE $1 ORDER BY tenant_id, job_id",
        tenants,
    )
    return [tuple(row) for row in rows]


async def create(client: Client, job_id: str = "job-1", **more: object) -> httpx.Response:
    """Ask for a job of the client's tenant."""
    body = {"tenant_id": client.tenant, "job_id": job_id, "spec": {"n": 1}, "durability": "GLOBAL", **more}
    return await client.post("/v1/jobs", json=body)


async def report(client: Client, **fields: object) -> httpx.Response:
    event = {"tenant_id": client.tenant, "durability": "GLOBAL", **fields}
    return await client.post("/v1/jobs/job-1/events", json=event)


async def read(client: Client, path: str, **params: str) -> httpx.Response:
    return await client.get(path, params={"tenant_id": client.tenant, **params})


async def tenant_is_followed(superuser: asyncpg.Connection, tenant_id: str, size: int = 1) -> bool:
    """Whether the job table is at the end of this chain, of so many entries at the least."""
    seq, head_seq = (await places(superuser))[tenant_id]
    return seq == head_seq >= size


async def test_reads_and_checks_are_never_behind_while_the_table_is(
    run_server: RunServer,
    make_settings: MakeSettings,
    database: Database,
    superuser: asyncpg.Connection,
    chains: Chains,
) -> None:
    async with run_server(make_settings(read={"wait": "300ms"})) as client:
        assert (await create(client)).status_code == 201
        await until(chains.key_recorded, "nothing else is chained that a strong read would wait for")
        await until(lambda: followed(superuser), "the table has followed")
        async with halted(database):
            assert (await report(client, type="JobAccepted", dc_id="dc1", worker_count=1)).status_code == 201
            assert (await report(client, type="JobCompleted", final_status="ok")).status_code == 201
            assert (await create(client, "job-2")).status_code == 201
            for level in ("eventual", "session", "strong"):
                answer = (await read(client, "/v1/jobs/job-1", consistency=level)).json()
                assert (answer["status"], answer["last_seq"]) == ("COMPLETED", 3)
                answer = (await read(client, "/v1/jobs/job-2", consistency=level)).json()
                assert (answer["status"], answer["spec"]) == ("SUBMITTED", {"n": 1})
            assert (await client.get("/v1/jobs/job-2")).json()["tenant_id"] == "acme"
            assert len((await read(client, "/v1/jobs/job-2/events")).json()["items"]) == 1

            stale = (await read(client, "/v1/jobs", consistency="eventual")).json()
            assert [(job["job_id"], job["status"]) for job in stale["items"]] == [("job-1", "SUBMITTED")]
            assert (stale["consistency"]["as_of_seq"], stale["consistency"]["head_seq"]) == (1, 4)
            lacking_s = "SELECT extract(epoch FROM clock_timestamp() - created_at) FROM scheduler.scheduler_log"
            of_first = f"{lacking_s} WHERE tenant_id = 'acme' AND seq = 2"
            before_s = await superuser.fetchval(of_first)
            stale = (await read(client, "/v1/jobs", consistency="eventual")).json()
            after_s = await superuser.fetchval(of_first)
            assert before_s * 1000 - 1 <= stale["consistency"]["staleness_ms"] <= after_s * 1000
            for level in ("session", "strong"):
                waited = await read(client, "/v1/jobs", consistency=level)
                assert (waited.status_code, waited.json()["type"].rpartition("/")[2]) == (503, "session-not-caught-up")

        async def is_listed() -> bool:
            answer = await read(client, "/v1/jobs", status="COMPLETED")
            return answer.status_code == 200 and [job["job_id"] for job in answer.json()["items"]] == ["job-1"]

        await until(is_listed, "the list has caught up")
        current = (await read(client, "/v1/jobs", consistency="eventual")).json()["consistency"]
        assert (current["as_of_seq"], current["staleness_ms"]) == (4, 0)


async def test_an_event_says_how_far_it_has_come(
    run_server: RunServer, make_settings: MakeSettings, database: Database
) -> None:
    async def states() -> list[str]:
        items = (await read(client, "/v1/jobs/job-1/events")).json()["items"]
        return [item["state"] for item in items]

    async with run_server(make_settings(chain={"batch_interval": "1h"})) as client:
        async with halted(database):
            assert (await create(client)).status_code == 201
            assert await states() == ["GLOBAL"]

        async def are_applied() -> bool:
            return await states() == ["APPLIED"]

        await until(are_applied, "the table has followed")
        assert (await client.post("/v1/snapshots", json={"tenant_id": "acme"})).status_code in (200, 201)
        assert (await report(client, type="JobAccepted", dc_id="dc1", worker_count=1)).status_code == 201
        first, second = await states()
        assert (first, second != "COMPACTED") == ("COMPACTED", True)


async def test_a_list_knows_what_was_chained_before_it_was_asked_for(shared_client: Client) -> None:
    for number in range(10):
        assert (await create(shared_client, f"job-{number}")).status_code == 201
        assert len((await read(shared_client, "/v1/jobs")).json()["items"]) == number + 1


async def test_another_node_refuses_at_the_edge_what_the_table_does_not_know_yet(
    run_node: RunNode, make_settings: MakeSettings, database: Database, superuser: asyncpg.Connection
) -> None:
    async with run_node(make_settings("one")) as one, run_node(make_settings("two")) as two:
        await one.submitter.submit(created("acme", 1, job_id="old"), key=None)
        await until(lambda: followed(superuser), "the table has followed")
        async with halted(database):
            await one.submitter.submit(created("acme", 2, job_id="new"), key=None)
            await one.submitter.submit(completed("acme", "old"), key=None)
            with pytest.raises(JobEndedError):
                await two.submitter.submit(progressed("acme", "old", 1), key=None)
            with pytest.raises(JobExistsError):
                await two.submitter.submit(created("acme", 3, job_id="new"), key=None)
            assert (await two.submitter.submit(accepted("acme", "new", "dc1"), key=None)).chain is not None


async def test_a_job_with_many_entries_beyond_the_table_is_read_whole(
    shared_client: Client, shared_database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.store.jobs.table.ENTRIES_MAX", 3)
    assert (await create(shared_client)).status_code == 201
    async with halted(shared_database):
        for done in range(1, 6):
            event = {"type": "JobProgressReported", "dc_id": "dc1", "completed": done, "failed": 0}
            assert (await report(shared_client, **event)).status_code == 201
        answer = (await read(shared_client, "/v1/jobs/job-1")).json()
        assert (answer["completed"], answer["spec"], answer["last_seq"]) == (5, {"n": 1}, 6)


async def test_a_table_that_was_emptied_is_right_at_once_and_fills_again(
    shared_client: Client, shared_database: Database, shared_superuser: asyncpg.Connection
) -> None:
    for number in range(3):
        await create(shared_client, f"job-{number}")
    await report(shared_client, type="JobCompleted", final_status="ok")
    await until(lambda: followed(shared_superuser), "the table has followed")
    before = await table(shared_superuser)
    async with halted(shared_database, f"TRUNCATE scheduler.jobs; {HALT}"):
        pass
    assert (await read(shared_client, "/v1/jobs/job-1")).json()["status"] == "COMPLETED"
    assert len((await read(shared_client, "/v1/jobs")).json()["items"]) == 3
    await until(lambda: followed(shared_superuser), "the table has followed again")
    assert await table(shared_superuser) == before


async def test_without_a_place_the_rows_of_a_tenant_do_not_count_and_are_made_again(
    shared_client: Client, shared_superuser: asyncpg.Connection, tenant: str
) -> None:
    await create(shared_client)
    await until(lambda: followed(shared_superuser), "the table has followed")
    before = await table(shared_superuser, tenant)
    await shared_superuser.execute(
        f"UPDATE scheduler.jobs SET status = 'FAILED', seqs = '{{}}' WHERE tenant_id = '{tenant}';"
        " INSERT INTO scheduler.jobs (tenant_id, job_id, status, last_seq, seqs)"
        f" VALUES ('{tenant}', 'x', 'FAILED', 1, '{{}}');"
        f" DELETE FROM scheduler.follower_positions WHERE tenant_id = '{tenant}'"
    )
    assert (await read(shared_client, "/v1/jobs/job-1")).json()["status"] == "SUBMITTED"
    await until(lambda: followed(shared_superuser), "the table has followed again")
    assert await table(shared_superuser, tenant) == before


async def test_a_row_that_is_stored_again_is_all_that_was_stored_last(superuser: asyncpg.Connection) -> None:
    rows = [
        ("acme", "job-1", "SUBMITTED", 9, 0, "node-a", None, 1, None, None, "[0,0,[]]", [1]),
        ("acme", "job-1", "FAILED", 7, 1, "node-b", "ci", 3, 90, 7, '[0,0,[],"OOM"]', [1, 3]),
    ]
    for row in rows:
        async with superuser.transaction():
            await job_table.store(superuser, [row])
        assert await table(superuser) == [(*row[:-1], seqs_text(row[-1]))]


async def in_pieces(*pieces: list[tuple[Any, ...]]) -> AsyncIterator[list[tuple[Any, ...]]]:
    """Rows of new jobs as the follower makes them."""
    for piece in pieces:
        yield piece


async def test_rows_of_new_jobs_are_added_together_or_not_at_all(superuser: asyncpg.Connection) -> None:
    first, second = (
        ("acme", f"job-{n}", "SUBMITTED", n, 0, "node-a", None, n, None, None, "[0,0,[]]", [n]) for n in (1, 2)
    )
    assert await job_table.add(superuser, in_pieces([first]))
    async with superuser.transaction():
        assert not await job_table.add(superuser, in_pieces([second], [first]))
        assert [row[1] for row in await table(superuser)] == ["job-1"]


async def test_texts_of_new_jobs_are_stored_as_they_are(superuser: asyncpg.Connection) -> None:
    texts = ("job-\t1", "SUBMITTED", 9, 0, "node\\N\r", "c:\\i", 1, 7, 5, '[0,0,["\\"\n"]]', [1, 3])
    rows: list[tuple[Any, ...]] = [
        ("acme", *texts),
        ("acme", "job-2", "SUBMITTED", 9, 0, "n", None, 2, None, None, "[0,0,[]]", [2]),
    ]
    assert await job_table.add(superuser, in_pieces(rows))
    assert await table(superuser) == [(*row[:-1], seqs_text(row[-1])) for row in rows]


async def test_a_job_that_is_created_again_among_new_ones_is_what_all_its_entries_give(
    database: Database, superuser: asyncpg.Connection, chains: Chains
) -> None:
    chain = FollowedChain(database, superuser)
    await chain.append([("job-1", "JobCreated", 9, {}), ("job-1", "JobAccepted", 10, {"dc_id": "use1"})])
    await chain.follow()
    chain.restart()
    # Another region, or a request that raced with another, created it too.
    await chain.append([(job_id, "JobCreated", 1, {"spec": job_id}) for job_id in ("job-2", "job-1", "job-3")])
    await chain.follow()
    chain.end()
    await chains.sound("acme")
    statuses = [(row[1], row[2]) for row in await table(superuser)]
    assert statuses == [("job-1", "ACCEPTED"), ("job-2", "SUBMITTED"), ("job-3", "SUBMITTED")]


async def test_a_place_beyond_the_end_of_the_chain_counts_as_none(
    shared_client: Client, shared_superuser: asyncpg.Connection, tenant: str
) -> None:
    await create(shared_client)
    await until(lambda: followed(shared_superuser), "the table has followed")
    beyond = "UPDATE scheduler.follower_positions SET seq = 100 WHERE tenant_id = $1"
    await shared_superuser.execute(beyond, tenant)
    await report(shared_client, type="JobCompleted", final_status="ok")
    assert (await read(shared_client, "/v1/jobs/job-1")).json()["status"] == "COMPLETED"
    await until(lambda: followed(shared_superuser), "the table has followed from the beginning")
    assert [row[2] for row in await table(shared_superuser, tenant)] == ["COMPLETED"]


async def test_a_table_that_is_behind_is_no_break_and_one_that_was_edited_is(
    shared: Shared, shared_database: Database, tenant: str
) -> None:
    superuser, submit = shared.superuser, shared.service.submitter.submit

    async def verdict() -> str:
        async with consistent_reader(superuser, tenant) as reader:
            return (await verify(reader, tenant_id=tenant)).verdicts["projection"]

    job = await submit(created(tenant, 1), key=None)
    await until(lambda: followed(superuser), "the table has followed")
    async with halted(shared_database):
        await submit(completed(tenant, job.job_id), key=None)
        await submit(created(tenant, 2), key=None)
        assert await verdict() == "ok"
        await superuser.execute("UPDATE scheduler.jobs SET status = 'FAILED' WHERE tenant_id = $1", tenant)
        assert await verdict() == "broken"
    await until(lambda: followed(superuser), "the table has followed")
    # Somebody claims that the table has followed what it has not.
    assert await verdict() == "ok"
    await superuser.execute("DELETE FROM scheduler.jobs WHERE last_seq = 3 AND tenant_id = $1", tenant)
    assert await verdict() == "broken"


async def test_two_nodes_follow_one_ledger_and_neither_lose_nor_double_anything(
    run_node: RunNode, make_settings: MakeSettings, superuser: asyncpg.Connection, chains: Chains
) -> None:
    jobs_made = [f"job-{number}" for number in range(8)]
    async with run_node(make_settings("one")) as one, run_node(make_settings("two")) as two:
        await one.submitter.submit_lines(
            EventLines.of([created("acme", n, job_id=job) for n, job in enumerate(jobs_made)]),
            durability=GLOBAL,
            key=None,
        )

        async def events(number: int) -> None:
            node, job = (one, two)[number % 2], jobs_made[number % len(jobs_made)]
            await node.submitter.submit(progressed("acme", job, number, durability=GLOBAL), key=None)
            await node.submitter.submit(created(f"tenant-{number % 5}", number), key=None)

        await asyncio.gather(*(events(number) for number in range(60)))
        await until(lambda: followed(superuser), "the table has followed")
        assert len(await chains.sound("acme")) == 68
        for tenant_id in range(5):
            assert len(await chains.sound(f"tenant-{tenant_id}")) == 12


async def test_a_job_whose_row_somebody_removed_is_there_all_the_same(
    run_server: RunServer, make_settings: MakeSettings, superuser: asyncpg.Connection
) -> None:
    settings = make_settings()
    async with run_server(settings) as client:
        assert (await create(client)).status_code == 201
        await until(lambda: followed(superuser), "the table has followed")
    await superuser.execute("DELETE FROM scheduler.jobs WHERE job_id = 'job-1'")
    async with run_server(settings) as client:
        assert (await read(client, "/v1/jobs/job-1")).json()["spec"] == {"n": 1}
        assert (await create(client, spec={"n": 2})).status_code == 409
        assert (await report(client, type="JobAccepted", dc_id="use1", worker_count=1)).status_code == 201
        assert (await read(client, "/v1/jobs/nobody-s")).status_code == 404


async def test_states_from_before_another_node_followed_are_not_believed(
    run_node: RunNode, database: Database, superuser: asyncpg.Connection
) -> None:
    async with run_node() as service:
        for draft in (created("acme", 1, job_id="job"), accepted("acme", "job", "dc1"), completed("acme", "job")):
            await service.submitter.submit(draft, key=None)
        await service.submitter.submit_lines(
            EventLines.of([created("beta", n) for n in range(500)]), durability=GLOBAL, key=None
        )
    expected = await table(superuser)
    assert await followed(superuser), "a clean stop leaves nothing to follow"
    await superuser.execute("DELETE FROM scheduler.follower_positions; SET session_replication_role = replica")

    def follower() -> TableFollower:
        return TableFollower(
            JobTable(lambda *_: None), lambda: following.connect(database.service_url, 5), lambda _: BEFORE_FIRST
        )

    one, two = follower(), follower()
    for each, head_seq in ((one, 1), (two, 2), (one, 2), (one, 3)):
        await superuser.execute("UPDATE scheduler.chain_heads SET head_seq = $1 WHERE tenant_id = 'acme'", head_seq)
        assert await each._follow(["acme"])
    assert await table(superuser) == expected


async def test_states_from_before_another_node_wrote_a_tenant_with_other_exclusions_are_not_believed(
    run_node: RunNode, database: Database, superuser: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with run_node() as service:
        events = (accepted("acme", "job", "dc1"), accepted("acme", "other", "dc1"), progressed("acme", "job", 1))
        for draft in (created("acme", 1, job_id="job"), created("acme", 2, job_id="other"), *events):
            await service.submitter.submit(draft, key=None)
    await superuser.execute(
        """
        SET session_replication_role = replica;
        DELETE FROM scheduler.follower_positions;
        UPDATE scheduler.scheduler_log SET origin = '{"log":"bad/acme"}', action = 'FAIL',
               payload = '{"error":"e","fence_token":1,"type":"JobFailed"}' WHERE tenant_id = 'acme' AND seq = 3;
        UPDATE scheduler.scheduler_log SET job_id = 'excluded logs', action = 'LOG_EXCLUDED',
               payload = '{"log":"bad/acme","reason":"r","type":"LogExcluded"}' WHERE tenant_id = 'acme' AND seq = 4
        """
    )

    async def follow(follower: TableFollower, head_seq: int) -> None:
        await superuser.execute("UPDATE scheduler.chain_heads SET head_seq = $1 WHERE tenant_id = 'acme'", head_seq)
        assert await follower._follow(["acme"])

    def follower() -> TableFollower:
        return TableFollower(
            JobTable(lambda *_: None), lambda: following.connect(database.service_url, 5), lambda _: BEFORE_FIRST
        )

    one, two = follower(), follower()
    await follow(two, 3)
    monkeypatch.setattr(followers, "ENTRIES_A_TURN", 3)
    await follow(one, 4)
    assert (await places(superuser))["acme"] == (3, 4), "the position is again where the other node left it"
    await follow(two, 5)
    assert [row[1:3] for row in await table(superuser)] == [("job", "RUNNING"), ("other", "SUBMITTED")]


async def test_the_rows_of_a_tenant_are_removed_however_long_that_takes(
    run_node: RunNode, database: Database, superuser: asyncpg.Connection
) -> None:
    async with run_node() as service:
        await service.submitter.submit(created("acme", 1), key=None)
    await superuser.execute(
        """
        CREATE FUNCTION scheduler.delayed() RETURNS trigger LANGUAGE plpgsql AS
            'BEGIN PERFORM pg_catalog.pg_sleep(0.7); RETURN NULL; END';
        CREATE TRIGGER delayed BEFORE DELETE ON scheduler.jobs EXECUTE FUNCTION scheduler.delayed();
        CREATE TRIGGER delayed BEFORE DELETE ON scheduler.job_terms EXECUTE FUNCTION scheduler.delayed();
        CREATE TRIGGER delayed BEFORE DELETE ON scheduler.commitments EXECUTE FUNCTION scheduler.delayed();
        UPDATE scheduler.follower_positions SET seq = 0 WHERE tenant_id = 'acme'
        """
    )
    follower = TableFollower(
        JobTable(lambda *_: None), lambda: following.connect(database.service_url, 0.5), lambda _: BEFORE_FIRST
    )
    assert await follower._follow(["acme"]), follower.last_error
    assert (await places(superuser))["acme"] == (1, 1)


async def test_rows_that_are_dropped_keep_neither_the_chain_nor_other_tenants_waiting(
    shared: Shared, tenant: str
) -> None:
    superuser, service, beta = shared.superuser, shared.service, f"{tenant}-beta"
    await service.submitter.submit(created(tenant, 1), key=None)
    await superuser.execute(dropping("INSERT", "jobs").replace("acme", tenant))
    await service.submitter.submit(created(tenant, 2), key=None)
    await service.submitter.submit(created(beta, 3), key=None)
    await until(lambda: tenant_is_followed(superuser, beta), "the other tenant is followed")
    await until(lambda: "stored 0 of" in str(service.job_table.last_error), "it is said")
    await superuser.execute(MENDED.format("jobs"))
    await until(lambda: followed(superuser), "what was dropped is followed")
    assert numbers(await shared.chains.sound(tenant)) == [1, 2]


@pytest.mark.parametrize(
    ("edit", "mend", "said"),
    [
        (
            "INSERT INTO scheduler.search_fields (tenant_id, fields) VALUES ($, '{NULL}')",
            "DELETE FROM scheduler.search_fields WHERE tenant_id = $",
            "search_fields",
        ),
        (
            "ALTER TABLE scheduler.follower_positions ALTER seq DROP NOT NULL;"
            "UPDATE scheduler.follower_positions SET seq = NULL WHERE tenant_id = $",
            "DELETE FROM scheduler.follower_positions WHERE seq IS NULL",
            "NoneType",
        ),
    ],
)
async def test_a_row_that_is_none_keeps_its_tenant_waiting_and_no_other(
    shared: Shared, tenant: str, edit: str, mend: str, said: str
) -> None:
    superuser, service, beta = shared.superuser, shared.service, f"{tenant}-beta"
    for tenant_id in (tenant, beta):
        await service.submitter.submit(created(tenant_id, 1), key=None)
    await until(lambda: followed(superuser), "both are followed")
    await superuser.execute(edit.replace("$", f"'{tenant}'"))
    for tenant_id in (tenant, beta):
        await service.submitter.submit(created(tenant_id, 2), key=None)
    await until(lambda: tenant_is_followed(superuser, beta, 2), "the other tenant is followed", 20)
    await until(lambda: said in str(service.job_table.last_error), "it is said")
    await superuser.execute(mend.replace("$", f"'{tenant}'"))
    await until(lambda: followed(superuser), "what waited is followed", 20)


async def test_once_the_connection_is_lost_no_tenant_is_tried_any_more(
    run_node: RunNode, database: Database, superuser: asyncpg.Connection
) -> None:
    tenants = ["acme", "beta", "gamma"]
    async with run_node() as service:
        for tenant_id in tenants:
            await service.submitter.submit(created(tenant_id, 1), key=None)
    await superuser.execute("DELETE FROM scheduler.follower_positions")
    connections: list[asyncpg.Connection] = []

    async def connect() -> asyncpg.Connection:
        connections.append(await following.connect(database.service_url, 5))
        return connections[-1]

    class LostByOne(JobTable):
        """Takes nothing of many; of one, its connection is lost."""

        async def take(self, connection: Any, turn: Turn) -> None:
            if len(turn.entries) == 1:
                connection.terminate()
            raise ChainDamagedError("acme", "nothing can be taken")

    follower = TableFollower(LostByOne(lambda *_: None), connect, lambda _: BEFORE_FIRST)
    follower._behind = dict.fromkeys(tenants)
    await follower._follow_all()
    assert len(connections) == 1
    assert follower._failed == set(tenants)


@pytest.mark.parametrize("passes", range(4))
async def test_a_stop_right_behind_a_wake_ends_the_follower(passes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    async def find_nobody(_: TableFollower) -> bool:
        return False

    async def never() -> asyncpg.Connection:
        raise AssertionError("nobody is to be followed")

    monkeypatch.setattr(TableFollower, "_find_behind", find_nobody)
    follower = TableFollower(JobTable(lambda *_: None), never, lambda _: BEFORE_FIRST)
    running = asyncio.create_task(follower.run())
    await until(lambda: follower._wake._waiters, "it waits for a wake")
    follower._wake.set()
    for _ in range(passes):
        await asyncio.sleep(0)
    running.cancel()
    await asyncio.wait((running,), timeout=5)
    assert running.cancelled()


async def test_a_locked_job_row_keeps_nothing_from_being_chained(
    run_node: RunNode, database: Database, superuser: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.store.following.LOCK_TIMEOUT_S", 0.2)
    monkeypatch.setattr("app.write.followers.followers.SEARCH_INTERVAL_S", 0.2)
    said: list[tuple[TableFollower, str | None]] = []
    """What each follower tells of the table, each time behind a look who is behind."""
    find_behind = TableFollower._find_behind

    async def look(follower: TableFollower) -> bool:
        is_found = await find_behind(follower)
        said.append((follower, follower.last_error))
        return is_found

    monkeypatch.setattr(TableFollower, "_find_behind", look)
    async with run_node() as service:

        def own_said() -> list[str | None]:
            return [error for follower, error in said if follower is service.job_table]

        job = await service.submitter.submit(created("acme", 1), key=None)
        await until(lambda: followed(superuser), "the table has followed")
        async with halted(database, "SELECT FROM scheduler.jobs WHERE tenant_id = 'acme' FOR UPDATE"):
            assert (await service.submitter.submit(completed("acme", job.job_id), key=None)).chain is not None
            await until(lambda: service.job_table.last_error, "the lock is met")
            await service.submitter.submit(created("beta", 2), key=None)

            async def beta_is_followed() -> bool:
                seq, head_seq = (await places(superuser))["beta"]
                return seq == head_seq

            await until(beta_is_followed, "the other tenant is followed")
            said.clear()
            await until(lambda: len(own_said()) > 2, "it is looked again")
            assert None not in own_said()
        await until(lambda: followed(superuser), "the lock is gone")
        await until(lambda: service.job_table.last_error is None, "nothing is wrong any more")


BEFORE_FOLLOWERS = """
DROP INDEX scheduler.scheduler_log_prev_chain_link;
CREATE INDEX jobs_newest ON scheduler.jobs (tenant_id, created_physical DESC);
DROP TRIGGER followed_again ON scheduler.jobs;
DROP TABLE scheduler.commitments, scheduler.job_terms, scheduler.search_fields, scheduler.job_figures;
DROP INDEX scheduler.scheduler_log_commitments;
DROP FUNCTION scheduler.follow_again();
DROP TABLE scheduler.follower_positions;
DROP FUNCTION scheduler.keep_behind_commitments(), scheduler.keep_behind_terms(), scheduler.keep_behind_run_times();
REVOKE DELETE ON scheduler.jobs FROM tallystick_service;
ALTER TABLE scheduler.scheduler_log
    DROP CONSTRAINT scheduler_log_hlc,
    ADD CONSTRAINT scheduler_log_prev_chain_link UNIQUE NULLS NOT DISTINCT (tenant_id, prev_chain_link),
    ADD CONSTRAINT scheduler_log_t_hlc UNIQUE NULLS NOT DISTINCT (tenant_id, t_hlc);
CREATE INDEX scheduler_log_hlc ON scheduler.scheduler_log (tenant_id, hlc_physical, hlc_logical, hlc_node);
DROP TABLE scheduler.webhook_dead_letters, scheduler.webhooks;
DROP TABLE scheduler.exchange_positions;
DROP FUNCTION scheduler.supersede_cosignature, scheduler.refuse_kept_cosignature CASCADE;
DROP TABLE scheduler.departed_jobs, scheduler.job_index_piece, scheduler.job_index_left;
DROP FUNCTION scheduler.refuse_uncovered() CASCADE;
DROP FUNCTION scheduler.remove_covered, scheduler.covered_to;
DROP FUNCTION scheduler.link_of, scheduler.link_prefix, scheduler.entry_fault, scheduler.tree_append,
    scheduler.tree_root, scheduler.first_break, scheduler.chain_floor, scheduler.opened_snapshots,
    scheduler.snapshot_ranges, scheduler.verify_chain, scheduler.verify_entry, scheduler.job_history CASCADE;
DROP TABLE scheduler.wal_leases;
ALTER TABLE scheduler.jobs DROP COLUMN created_by, DROP COLUMN figure, DROP COLUMN ended_ms, DROP COLUMN run_ms;
ALTER TABLE scheduler.jobs RENAME COLUMN seqs TO state;
ALTER TABLE scheduler.jobs ALTER COLUMN state TYPE json USING '{}'
"""


async def test_the_job_table_of_a_ledger_of_before_is_made_again(
    run_node: RunNode, database: Database, superuser: asyncpg.Connection, chains: Chains
) -> None:
    async with run_node() as service:
        job = await service.submitter.submit(created("acme", 1), key=None)
        await service.submitter.submit(created("beta", 2), key=None)
    before = await table(superuser)
    await superuser.execute(BEFORE_FOLLOWERS)
    await ran(database, 8, 10)
    await stamped(superuser, "0010")
    await asyncio.to_thread(migrate, database.owner_url)
    assert await table(superuser) == []
    async with run_node() as service:
        await until(lambda: followed(superuser), "the table has followed")
        assert await table(superuser) == before
        await service.submitter.submit(completed("acme", job.job_id), key=None)
        await until(lambda: followed(superuser), "the table has followed")
    assert numbers(await chains.sound("beta")) == [2]
    assert len(await chains.sound("acme")) == 2
