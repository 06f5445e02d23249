"""Migrations from nothing, again and at once, on servers that are fit and on servers that are not."""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import asyncpg
import httpx
import pytest
from alembic.script import ScriptDirectory
from structlog.testing import capture_logs

from app.dev.cluster import DATABASE, OWNER, SERVICE, SERVICE_GROUP
from app.dev.embedded import EmbeddedPostgres
from app.edge.listener import listening
from app.node.start.connecting import connected_for_now
from app.node.wiring import running
from app.runtime.settings.config import load_settings
from app.store.migrate import _LOCK, downgrade, migrate
from app.store.schema import MIGRATIONS, check_schema, check_server, is_newest, newest_revision
from ledger.errors import StartRefusedError
from tests.app.postgres_proxy import PostgresProxy
from tests.app.roles import run_roles_sql
from tests.conftest import Database, connected_to
from tests.forked import Forked
from tests.server_copies import scratch_folder, server_with_schema
from tests.tally import IMPORTED, run_tally


@pytest.fixture
async def service(database: Database) -> AsyncIterator[asyncpg.Connection]:
    connection = await asyncpg.connect(database.service_url)
    yield connection
    await connection.close()


async def test_migrating_again_changes_nothing(database: Database, service: asyncpg.Connection) -> None:
    await service.execute("INSERT INTO scheduler.chain_heads (tenant_id, head_seq) VALUES ('acme', 0)")
    await asyncio.to_thread(migrate, database.owner_url)
    assert await service.fetchval("SELECT tenant_id FROM scheduler.chain_heads") == "acme"
    await check_schema(service)


async def test_a_migration_that_ends_says_by_whom_it_was_kept_and_is_logged_once_it_is_done(
    empty_database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    connection = await asyncpg.connect(empty_database.owner_url)
    await connection.execute("CREATE SCHEMA scheduler CREATE TABLE scheduler.heartbeat ()")
    with capture_logs() as logs, pytest.raises(StartRefusedError, match="heartbeat"):
        await asyncio.to_thread(migrate, empty_database.owner_url)
    assert logs == []
    await connection.execute("DROP SCHEMA scheduler CASCADE")
    await connection.close()
    with monkeypatch.context() as patched:
        patched.setattr("app.store.migrate.LOCK_TIMEOUT_S", 1)
        async with connected_to(empty_database.service_url) as stranger:
            await stranger.execute("SELECT pg_advisory_lock($1)", _LOCK)
            with capture_logs() as logs, pytest.raises(StartRefusedError, match="another session keeps what it needs"):
                await asyncio.to_thread(migrate, empty_database.owner_url)
            (waits,) = logs
            (session,) = waits["sessions"]
            assert (waits["event"], session["pid"]) == ("schema_migration_waits", stranger.get_server_pid())
    with capture_logs() as logs:
        await asyncio.to_thread(migrate, empty_database.owner_url)
        await asyncio.to_thread(migrate, empty_database.owner_url)
    done = {"from_revision": None, "to_revision": newest_revision(), "event": "schema_migration", "log_level": "info"}
    assert logs == [done]


async def test_two_migrations_at_once_do_not_meet(empty_database: Database) -> None:
    program = f"from app.store.migrate import migrate; migrate({empty_database.owner_url!r})"
    migrations = [Forked(IMPORTED, "-c", program, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    assert [migration.communicate()[1] for migration in migrations] == ["", ""]
    async with connected_to(empty_database.service_url) as connection:
        await check_schema(connection)


async def test_a_login_that_may_not_migrate_is_told_so_and_leaves_nothing(empty_database: Database) -> None:
    with pytest.raises(StartRefusedError, match="permission denied"):
        await asyncio.to_thread(migrate, empty_database.service_url)


async def test_a_server_that_cannot_be_reached_is_named_as_the_reason() -> None:
    with pytest.raises(StartRefusedError, match="could not be migrated"):
        await asyncio.to_thread(migrate, "postgresql://nobody@127.0.0.1:1/nothing")
    with pytest.raises(StartRefusedError, match="could not be asked for its schema"):
        await is_newest("postgresql://nobody@127.0.0.1:1/nothing")


async def test_a_server_that_hangs_is_named_as_the_reason(
    proxy: PostgresProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.store.migrate.CONNECT_TIMEOUT_S", 0.2)
    proxy.stall()
    with pytest.raises(StartRefusedError, match=r"does not answer within 0\.2 s.*run this again"):
        await asyncio.to_thread(migrate, proxy.url)


def test_the_newest_revision_is_the_head_of_the_migrations() -> None:
    script = ScriptDirectory(str(MIGRATIONS))
    assert script.get_heads() == [newest_revision()]


def test_every_sql_file_has_a_number_that_a_revision_runs() -> None:
    numbers = [path.name.partition("_")[0] for path in sorted((MIGRATIONS / "sql").iterdir())]
    assert len({*numbers}) == len(numbers), "two files of one number have no order"
    assert all(number.isdigit() for number in numbers)
    assert numbers[-1] == newest_revision()


def test_every_revision_says_that_there_is_no_way_back() -> None:
    revisions = list(ScriptDirectory(str(MIGRATIONS)).walk_revisions())
    assert {getattr(revision.module, "downgrade", None) for revision in revisions} == {downgrade}, (
        "see 0010_version_0_1.py"
    )


async def test_a_database_without_the_schema_is_refused(empty_database: Database, database: Database) -> None:
    assert not await is_newest(empty_database.owner_url)
    assert await is_newest(database.owner_url)
    async with connected_to(empty_database.service_url) as connection:
        with pytest.raises(StartRefusedError, match="tally migrate"):
            await check_schema(connection)


async def test_a_schema_of_another_version_is_refused(
    database: Database, superuser: asyncpg.Connection, service: asyncpg.Connection
) -> None:
    await superuser.execute("UPDATE scheduler.alembic_version SET version_num = '9999'")
    with pytest.raises(StartRefusedError, match="9999"):
        await check_schema(service)
    with pytest.raises(StartRefusedError, match=r"9999.* This version knows its schema up to"):
        await asyncio.to_thread(migrate, database.owner_url)


async def test_a_login_outside_the_service_role_is_told_what_it_lacks(
    superuser: asyncpg.Connection,
) -> None:
    await superuser.execute("SET ROLE pg_monitor")
    with pytest.raises(StartRefusedError, match="member of tallystick_service"):
        await check_schema(superuser)


async def test_a_revision_that_row_security_hides_is_not_told_as_missing(
    superuser: asyncpg.Connection, database: Database
) -> None:
    await superuser.execute("ALTER TABLE scheduler.alembic_version ENABLE ROW LEVEL SECURITY")
    with pytest.raises(StartRefusedError, match=r'"alembic_version".*switch off the row security'):
        async with connected_for_now(database.service_url):
            pass


@pytest.mark.parametrize(
    ("version_num", "encoding", "said"),
    [(140013, "UTF8", "PostgreSQL 15 or newer is needed, and this server is 14"), (180004, "LATIN1", "UTF8")],
)
def test_a_server_that_is_too_old_or_not_utf8_is_refused(version_num: int, encoding: str, said: str) -> None:
    check_server(150000, "UTF8")
    with pytest.raises(StartRefusedError, match=said):
        check_server(version_num, encoding)


async def test_neither_a_migration_nor_a_start_accepts_a_server_that_is_too_old(
    empty_database: Database, database: Database, service: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.store.schema.SERVER_VERSION_MIN", 99)
    with pytest.raises(StartRefusedError, match="99 or newer is needed, and this server is 18"):
        await asyncio.to_thread(migrate, empty_database.owner_url)
    with pytest.raises(StartRefusedError, match="99 or newer is needed, and this server is 18"):
        await check_schema(service)


# A server of one's own


@pytest.fixture(scope="module")
def own_server() -> Iterator[EmbeddedPostgres]:
    """A server apart, since roles belong to a whole server."""
    folder = scratch_folder()
    server = server_with_schema(folder / "postgres")
    server.start()
    yield server
    server.remove()
    folder.rmdir()


@pytest.fixture
async def bare(own_server: EmbeddedPostgres) -> AsyncIterator[asyncpg.Connection]:
    """The superuser on a server that has none of our roles, and an empty database."""
    connection = await asyncpg.connect(own_server.superuser_url("postgres"))
    await connection.execute(f"DROP DATABASE {DATABASE} WITH (FORCE)")
    for role in (SERVICE, SERVICE_GROUP, OWNER, "auditor"):
        await connection.execute(f"DROP ROLE IF EXISTS {role}")
    await connection.execute(f"CREATE DATABASE {DATABASE} TEMPLATE template0")
    yield connection
    await connection.close()


async def test_without_the_service_role_the_owner_is_told_where_to_get_it_and_a_superuser_makes_it_by_migrating(
    own_server: EmbeddedPostgres, bare: asyncpg.Connection
) -> None:
    await bare.execute(f"CREATE ROLE {OWNER} LOGIN PASSWORD 'owner'")
    await bare.execute(f"ALTER DATABASE {DATABASE} OWNER TO {OWNER}")
    port = (await bare.fetchval("SHOW port")) or ""
    url = f"postgresql://{OWNER}:owner@127.0.0.1:{port}/{DATABASE}"
    with pytest.raises(StartRefusedError, match=r"deploy/postgres/roles\.sql"):
        await asyncio.to_thread(migrate, url)
    async with connected_to(url) as connection:
        assert await connection.fetchval("SELECT to_regnamespace('scheduler')") is None
    await asyncio.to_thread(migrate, own_server.superuser_url())
    assert await bare.fetchval("SELECT rolcanlogin FROM pg_roles WHERE rolname = $1", SERVICE_GROUP) is False


UNREADABLE = ("bundle_import", "idempotency", "private_fields", "privacy_state", "session_secret", "subject_keys")
"""Secrets, and what verification has no need of."""


@pytest.mark.usefixtures("bare")
async def test_the_roles_file_gives_owner_and_service_what_they_need_and_an_auditor_neither_writes_nor_reads_secrets(
    own_server: EmbeddedPostgres, tmp_path: Path
) -> None:
    # As out of files: with the end of a line, or as a person types them.
    passwords = {"TALLY_OWNER_PASSWORD": "it's", "TALLY_SERVICE_PASSWORD": "service\n"}
    assert "TALLY_OWNER_PASSWORD is not set" in run_roles_sql(own_server.superuser_url())
    assert run_roles_sql(own_server.superuser_url(), **passwords | {"TALLY_SERVICE_PASSWORD": "forgotten"}) == ""
    assert run_roles_sql(own_server.superuser_url(), **passwords) == ""
    address = own_server.superuser_url().split("@")[1]
    await asyncio.to_thread(migrate, f"postgresql://{OWNER}:it%27s@{address}")
    async with connected_to(f"postgresql://{SERVICE}:service@{address}") as service:
        await check_schema(service)
        assert await service.fetchval("SELECT count(*) FROM scheduler.scheduler_log") == 0
    passwords["TALLY_AUDITOR_PASSWORD"] = "auditor\r\n"
    assert run_roles_sql(own_server.superuser_url(), **passwords) == ""
    settings = load_settings(data_dir=tmp_path / "node", port=0)
    async with (
        running(settings, f"postgresql://{SERVICE}:service@{address}") as (_, services),
        listening(services) as (url, _),
        httpx.AsyncClient(base_url=url, timeout=30) as client,
    ):
        (await client.post("/v1/jobs", json={"tenant_id": "acme"})).raise_for_status()
        for tenant in ("acme", "_system"):
            (await client.post("/v1/snapshots", json={"tenant_id": tenant})).raise_for_status()
        keys = tmp_path / "keys.json"
        keys.write_text((await client.get("/v1/keys")).text)

    dsn = f"postgresql://auditor:auditor@{address}"
    verified = await asyncio.to_thread(run_tally, "verify", "-t", "acme", "--dsn", dsn, "--keys", keys, "--json")
    assert verified.returncode == 0, verified.stdout + verified.stderr
    assert json.loads(verified.stdout)["valid"]

    auditor = await asyncpg.connect(dsn)
    await auditor.execute("SET default_transaction_read_only = off")
    try:
        tables = await auditor.fetch("SELECT tablename FROM pg_tables WHERE schemaname = 'scheduler'")
        for (table,) in tables:
            column = await auditor.fetchval(
                "SELECT quote_ident(attname) FROM pg_attribute WHERE attrelid = $1::regclass AND attnum > 0 "
                "AND attidentity = ''",
                f"scheduler.{table}",
            )
            for write in (
                f"INSERT INTO scheduler.{table} DEFAULT VALUES",
                f"UPDATE scheduler.{table} SET {column} = {column}",
                f"DELETE FROM scheduler.{table}",
                f"TRUNCATE scheduler.{table}",
                f"ALTER TABLE scheduler.{table} DISABLE TRIGGER ALL",
            ):
                with pytest.raises(asyncpg.InsufficientPrivilegeError):
                    await auditor.execute(write)
        for table in UNREADABLE:
            with pytest.raises(asyncpg.InsufficientPrivilegeError):
                await auditor.fetch(f"SELECT FROM scheduler.{table}")
    finally:
        await auditor.close()
