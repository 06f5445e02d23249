"""What PostgreSQL refuses is a 503 that says what it said, and served again once it is mended."""

from __future__ import annotations

from typing import NamedTuple

import asyncpg
import httpx
import pytest

from app.dev.cluster import SERVICE, SERVICE_GROUP
from ledger.errors import DatabaseUnavailableError
from tests.app.chains import Chains, numbers, until
from tests.app.client import Client
from tests.app.conftest import RunNode, RunServer
from tests.app.drafts import LOCAL, created

READS = ("/v1/jobs?tenant_id=acme", "/v1/jobs/one?tenant_id=acme", "/v1/snapshots?tenant_id=acme")
SIGNING = ("/v1/snapshots", "/v1/bundles/export")
_TERMINATE = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = $1 AND pid <> pg_backend_pid()"


class Refusal(NamedTuple):
    """How PostgreSQL comes to refuse something, how that is mended, and what it says."""

    cause: str
    mended: str
    said: str


_SEQUENCE = "ALTER SEQUENCE scheduler.batch_snapshot_id_seq"
REFUSALS = {
    "a right that was taken away": Refusal(
        f"REVOKE ALL ON scheduler.batch_snapshot, scheduler.jobs FROM {SERVICE_GROUP}",
        f"GRANT SELECT, INSERT, UPDATE ON scheduler.batch_snapshot, scheduler.jobs TO {SERVICE_GROUP}",
        "permission denied for table ",
    ),
    "tables of other names": Refusal(
        "ALTER TABLE scheduler.batch_snapshot RENAME TO hidden; ALTER TABLE scheduler.jobs RENAME TO also_hidden",
        "ALTER TABLE scheduler.hidden RENAME TO batch_snapshot; ALTER TABLE scheduler.also_hidden RENAME TO jobs",
        "does not exist",
    ),
    "columns of other names": Refusal(
        "ALTER TABLE scheduler.batch_snapshot RENAME to_seq TO t; ALTER TABLE scheduler.jobs RENAME seqs TO s",
        "ALTER TABLE scheduler.batch_snapshot RENAME t TO to_seq; ALTER TABLE scheduler.jobs RENAME s TO seqs",
        "does not exist",
    ),
}
REFUSALS_TO_WRITE = {
    "a sequence at its end": Refusal(
        f"{_SEQUENCE} MAXVALUE 5; SELECT setval('scheduler.batch_snapshot_id_seq', 5)",
        f"{_SEQUENCE} NO MAXVALUE",
        "reached maximum value of sequence",
    ),
    "a right to write that was taken away": Refusal(
        f"REVOKE INSERT ON scheduler.batch_snapshot FROM {SERVICE_GROUP}",
        f"GRANT INSERT ON scheduler.batch_snapshot TO {SERVICE_GROUP}",
        "permission denied for table batch_snapshot",
    ),
    "transactions that may only read": Refusal(
        "ALTER DATABASE {database} SET default_transaction_read_only = on",
        "ALTER DATABASE {database} RESET default_transaction_read_only",
        "in a read-only transaction",
    ),
}


async def make_so(superuser: asyncpg.Connection, statements: str) -> None:
    """Execute statements, which connections that are open meet as well."""
    name = await superuser.fetchval("SELECT current_database()")
    await superuser.execute(statements.format(database=name))
    await superuser.fetch(_TERMINATE, name)


async def until_told(client: Client, path: str, said: str) -> None:
    """Wait until the answer is that of a refusal, not of a connection that was closed."""
    answers = []

    async def is_told() -> bool:
        answers.append(await ask(client, path))
        return "does not answer" not in answers[-1].text

    await until(is_told, f"{path} is answered on a new connection")
    answer = answers[-1]
    assert (answer.status_code, answer.json()["type"].rpartition("/")[2]) == (503, "not-ready"), answer.text
    assert answer.headers["retry-after"]
    assert answer.json()["detail"].startswith("the database refuses: ")
    assert said in answer.json()["detail"]


async def ask(client: Client, path: str) -> httpx.Response:
    return await (client.post(path, json={"tenant_id": "acme"}) if path in SIGNING else client.get(path))


@pytest.mark.parametrize("name", [*REFUSALS, *REFUSALS_TO_WRITE])
async def test_what_postgresql_refuses_is_told_and_served_once_it_is_mended(
    run_server: RunServer, superuser: asyncpg.Connection, name: str
) -> None:
    refusal = (REFUSALS | REFUSALS_TO_WRITE)[name]
    async with run_server() as client:
        job = {"tenant_id": "acme", "job_id": "one", "durability": "GLOBAL"}
        (await client.post("/v1/jobs", json=job)).raise_for_status()
        assert len((await client.get(READS[0])).json()["items"]) == 1, "the job table has followed"
        await make_so(superuser, refusal.cause)
        for path in (*READS, *SIGNING) if name in REFUSALS else SIGNING:
            await until_told(client, path, refusal.said)
        await make_so(superuser, refusal.mended)
        for path in (*READS, *SIGNING):

            async def is_served(path: str = path) -> bool:
                return (await ask(client, path)).is_success

            await until(is_served, f"{path} is served again")


async def test_sessions_that_may_only_read_do_not_outlive_the_setting(
    run_node: RunNode, superuser: asyncpg.Connection
) -> None:
    async with run_node() as service:
        await service.submitter.submit(created("acme", 1), key=None)
        role = f"ALTER ROLE {SERVICE} IN DATABASE {{database}}"
        await make_so(superuser, f"{role} SET default_transaction_read_only = on")
        service.job_table.follow_now("acme")
        await until(lambda: service.job_table.last_error, "the job table cannot be followed")

        async def refusal() -> str | None:
            try:
                await service.notary.sign_now("acme")
            except DatabaseUnavailableError as error:
                return str(error)
            return None

        await until(refusal, "nothing can be signed")
        database = await superuser.fetchval("SELECT current_database()")
        await superuser.execute(f"{role.format(database=database)} RESET default_transaction_read_only")
        await until(lambda: service.job_table.last_error is None, "the job table follows again")

        async def is_signed() -> bool:
            return await refusal() is None

        await until(is_signed, "it is signed again")


async def test_where_a_sequence_is_at_its_end_events_wait_and_no_tenant_is_called_damaged(
    run_node: RunNode, superuser: asyncpg.Connection, chains: Chains
) -> None:
    last = "SELECT last_value FROM scheduler.scheduler_log_id_seq"
    async with run_node() as service:
        await service.submitter.submit(created("acme", 1), key=None)
        ids = await superuser.fetchval(last)
        await make_so(superuser, f"ALTER SEQUENCE scheduler.scheduler_log_id_seq MAXVALUE {ids}")
        await service.submitter.submit(created("acme", 2, durability=LOCAL), key=None)
        await until(
            lambda: "scheduler_log_id_seq" in (service.appender.database_error or ""), "it is told why they wait"
        )
        assert service.node.damaged == {}
        await superuser.execute("ALTER SEQUENCE scheduler.scheduler_log_id_seq NO MAXVALUE")
        await service.submitter.submit(created("acme", 3), key=None)
    assert numbers(await chains.sound("acme")) == [1, 2, 3]
