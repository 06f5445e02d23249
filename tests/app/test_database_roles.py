"""The role of the service's login: one that could take the ledger's guards away is refused, or told of."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from urllib.parse import urlsplit

import asyncpg
import pytest

from app.dev.cluster import OWNER, SERVICE_GROUP
from ledger.errors import StartRefusedError
from tests.app.conftest import MakeSettings, RunNode, RunServer
from tests.app.starting import assert_no_start
from tests.conftest import Database

ROLE = "somebody"
OTHER = "somebody_else"
LoginAs = Callable[..., AbstractAsyncContextManager[str]]


@pytest.fixture
def login_as(database: Database, superuser: asyncpg.Connection) -> LoginAs:
    """Makes a login that does what the service does, and more: ``async with login_as("statement", ...) as url``."""

    @asynccontextmanager
    async def make(*statements: str) -> AsyncIterator[str]:
        address = urlsplit(database.service_url)
        await superuser.execute(f"CREATE ROLE {OTHER}")
        await superuser.execute(f"CREATE ROLE {ROLE} LOGIN PASSWORD 'somebody' IN ROLE {SERVICE_GROUP}")
        try:
            for statement in statements:
                await superuser.execute(statement)
            yield address._replace(netloc=f"{ROLE}:somebody@{address.hostname}:{address.port}").geturl()
        finally:
            await superuser.execute(f"REASSIGN OWNED BY {ROLE}, {OTHER} TO {OWNER}")
            await superuser.execute(f"DROP OWNED BY {ROLE}, {OTHER}")
            await superuser.execute(f"DROP ROLE {ROLE}, {OTHER}")

    return make


async def test_a_login_that_does_what_the_service_does_is_taken(login_as: LoginAs, run_server: RunServer) -> None:
    async with login_as() as url, run_server(url=url) as client:
        assert (await client.get("/readyz")).json()["checks"]["database_role"] == {"ok": True, "detail": None}


@pytest.mark.parametrize(
    ("statement", "said"),
    [
        (f"ALTER ROLE {ROLE} SUPERUSER", "is a superuser: "),
        (f"ALTER ROLE {ROLE} CREATEROLE", "has CREATEROLE: "),
        (f"ALTER ROLE {ROLE} BYPASSRLS", "has BYPASSRLS: "),
        (f"GRANT {OWNER} TO {ROLE}", "owns database .*, owns schema scheduler, owns .* tables, views or functions"),
        (f"ALTER ROLE {OTHER} SUPERUSER; GRANT {OTHER} TO {ROLE}", f"may become {OTHER}, which is a superuser"),
        (
            f"GRANT pg_write_all_data TO {OTHER}; GRANT {OTHER} TO {ROLE}",
            "pg_write_all_data, which can write everywhere",
        ),
        (
            f"ALTER TABLE scheduler.scheduler_log OWNER TO {ROLE}",
            "owns 1 tables, .*, such as scheduler_log: ",
        ),
        (f"ALTER SCHEMA scheduler OWNER TO {OTHER}; GRANT {OTHER} TO {ROLE}", "owns schema scheduler: "),
    ],
)
async def test_a_login_that_could_take_the_guards_away_is_refused(
    login_as: LoginAs, run_node: RunNode, superuser: asyncpg.Connection, statement: str, said: str
) -> None:
    async with login_as(statement) as url:
        await assert_no_start(
            run_node(url=url), StartRefusedError, match=rf"role {ROLE} of database_url .*{said}.*roles\.sql"
        )
        assert await superuser.fetchval("SELECT count(*) FROM scheduler.wal_positions") == 0


async def test_who_owns_the_schema_or_all_is_refused_and_told_of_where_that_is_accepted(
    database: Database, run_node: RunNode, run_server: RunServer, make_settings: MakeSettings
) -> None:
    for url in (database.owner_url, database.superuser_url):
        await assert_no_start(run_node(url=url), StartRefusedError, match="database_allow_any_role")
    for url in (database.owner_url, database.superuser_url):
        async with run_server(make_settings(database_allow_any_role=True), url=url) as client:
            ready = await client.get("/readyz")
            assert ready.status_code == 200
            check = ready.json()["checks"]["database_role"]
            assert not check["ok"]
            assert "can rewrite the ledger" in check["detail"]
            assert (await client.post("/v1/jobs", json={"tenant_id": "acme"})).status_code == 201
