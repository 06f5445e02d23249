"""Alembic's own commands on a clean checkout, as contributors and database administrators run them."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
from pathlib import Path

import asyncpg
import pytest

from app.dev.account import find_package
from app.store.schema import MIGRATIONS, check_schema, newest_revision
from tests.conftest import Database

ROOT = MIGRATIONS.parent
PSQL = find_package() / "pginstall18" / "bin" / "psql"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """What migrating needs of the repository, and what Python has made of it, which takes a second to be made again."""
    for folder in ("app", "ledger", "migrations", "signing", "terminal", "wal"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    shutil.copy(ROOT / "alembic.ini", tmp_path)
    return tmp_path


def alembic(checkout: Path, *arguments: str, url: str | None = None) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("TALLY_", "PYTHON"))}
    command = [str(Path(sys.executable).with_name("alembic")), *arguments]
    environment = clean if url is None else {**clean, "TALLY_MIGRATE_URL": url}
    return subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True, timeout=120)


def test_current_tells_the_revision_and_nothing_goes_back(checkout: Path, database: Database) -> None:
    current = alembic(checkout, "current", url=database.owner_url)
    assert current.stdout.split() == [newest_revision(), "(head)"]
    for target in ("-1", "base"):
        refused = alembic(checkout, "downgrade", target, url=database.owner_url)
        assert refused.returncode != 0
        assert "Traceback" not in refused.stderr
        assert "no way back" in refused.stdout + refused.stderr
    assert alembic(checkout, "current", url=database.owner_url).stdout == current.stdout
    nameless = alembic(checkout, "upgrade", "head")
    assert (nameless.returncode, nameless.stderr.count("\n")) == (1, 1)


async def test_looking_changes_nothing(checkout: Path, empty_database: Database) -> None:
    await asyncio.to_thread(alembic, checkout, "current", url=empty_database.owner_url)
    connection = await asyncpg.connect(empty_database.owner_url)
    assert await connection.fetchval("SELECT to_regnamespace('scheduler') IS NULL")
    await connection.close()


async def test_psql_tells_how_a_database_differs_from_the_schema(
    checkout: Path, database: Database, superuser: asyncpg.Connection
) -> None:
    schema = (checkout / "migrations" / "schema.txt").read_text()
    assert catalog_by_psql(checkout, database) == schema
    await superuser.execute("ALTER TABLE scheduler.jobs DROP COLUMN updated_at CASCADE")
    (missing,) = {*schema.splitlines()} - {*catalog_by_psql(checkout, database).splitlines()}
    assert missing.split()[:3] == ["jobs", "column", "updated_at"]


def catalog_by_psql(checkout: Path, database: Database) -> str:
    asked = [str(PSQL), database.owner_url, "-XAtf", str(checkout / "migrations" / "catalog.sql")]
    done = subprocess.run(asked, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


async def test_the_migrations_as_sql_do_what_migrating_does(checkout: Path, empty_database: Database) -> None:
    written = await asyncio.to_thread(alembic, checkout, "upgrade", "head", "--sql")
    assert written.returncode == 0, written.stderr
    command = [str(PSQL), "-X", "-q", "-v", "ON_ERROR_STOP=1", empty_database.owner_url]
    done = subprocess.run(command, input=written.stdout, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    connection = await asyncpg.connect(empty_database.service_url)
    await check_schema(connection)
    await connection.close()


async def test_the_documented_revision_is_a_file_and_its_sql(
    checkout: Path, database: Database, superuser: asyncpg.Connection
) -> None:
    following = f"{int(newest_revision()) + 1:04}"
    made = await asyncio.to_thread(alembic, checkout, "revision", "--rev-id", following, "-m", "what changes")
    assert made.returncode == 0, made.stderr
    assert (checkout / "migrations" / "versions" / f"{following}_what_changes.py").exists()
    statement = "ALTER TABLE scheduler.jobs ADD COLUMN what_changes text; COMMENT ON TABLE scheduler.jobs IS '50%:x';"
    (checkout / "migrations" / "sql" / f"{following}_what_changes.sql").write_text(statement)
    offline = await asyncio.to_thread(alembic, checkout, "upgrade", f"{newest_revision()}:head", "--sql")
    assert statement in offline.stdout
    assert "CREATE SCHEMA" not in offline.stdout
    upgraded = await asyncio.to_thread(alembic, checkout, "upgrade", "head", url=database.owner_url)
    assert upgraded.returncode == 0, upgraded.stderr
    assert await superuser.fetchval("SELECT version_num FROM scheduler.alembic_version") == following
    assert await superuser.fetchval("SELECT count(what_changes) FROM scheduler.jobs") == 0
    refused = await asyncio.to_thread(alembic, checkout, "downgrade", "-1", url=database.owner_url)
    assert "no way back" in refused.stdout + refused.stderr
