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
from app.store.schema_version import MIGRATIONS, check_schema, newest_revision
from tests.conftest import Database

ROOT = MIGRATIONS.parent


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """What migrating needs of the repository, and nothing that was made in it."""
    made = shutil.ignore_patterns("__pycache__")
    for folder in ("app", "console", "ledger", "migrations", "signing", "wal"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=made)
    shutil.copy(ROOT / "alembic.ini", tmp_path)
    return tmp_path


def alembic(checkout: Path, *arguments: str, url: str | None = None) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("TALLY_", "PYTHON"))}
    command = [str(Path(sys.executable).with_name("alembic")), *arguments]
    environment = clean if url is None else {**clean, "TALLY_MIGRATE_URL": url}
    return subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True, timeout=120)


def test_check_finds_the_declared_tables_and_nothing_goes_back(checkout: Path, database: Database) -> None:
    checked = alembic(checkout, "check", url=database.owner_url)
    assert (checked.returncode, "No new upgrade operations" in checked.stdout) == (0, True), checked.stderr
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


async def test_check_tells_what_differs_and_looking_changes_nothing(
    checkout: Path, database: Database, empty_database: Database, superuser: asyncpg.Connection
) -> None:
    await superuser.execute("ALTER TABLE scheduler.jobs DROP COLUMN updated_at CASCADE")
    checked = await asyncio.to_thread(alembic, checkout, "check", url=database.owner_url)
    assert checked.returncode != 0
    assert "updated_at" in checked.stdout + checked.stderr
    for look in ("current", "check"):
        await asyncio.to_thread(alembic, checkout, look, url=empty_database.owner_url)
    connection = await asyncpg.connect(empty_database.owner_url)
    assert await connection.fetchval("SELECT to_regnamespace('scheduler') IS NULL")
    await connection.close()


async def test_the_migrations_as_sql_do_what_migrating_does(checkout: Path, empty_database: Database) -> None:
    written = await asyncio.to_thread(alembic, checkout, "upgrade", "head", "--sql")
    assert written.returncode == 0, written.stderr
    psql = find_package() / "pginstall18" / "bin" / "psql"
    command = [str(psql), "-X", "-q", "-v", "ON_ERROR_STOP=1", empty_database.owner_url]
    done = subprocess.run(command, input=written.stdout, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    connection = await asyncpg.connect(empty_database.service_url)
    await check_schema(connection)
    await connection.close()
    checked = await asyncio.to_thread(alembic, checkout, "check", url=empty_database.owner_url)
    assert checked.returncode == 0, checked.stdout + checked.stderr


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
