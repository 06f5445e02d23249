"""Alembic's own commands on a clean checkout, as contributors and database administrators run them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import asyncpg

from app.dev.account import find_package
from app.store.schema import MIGRATIONS, check_schema, newest_revision
from tests.conftest import Database, connected_to
from tests.forked import run_forked
from tests.tally import IMPORTED

ROOT = MIGRATIONS.parent
PSQL = find_package() / "pginstall18" / "bin" / "psql"


def alembic(folder: Path, *arguments: str, url: str | None = None) -> subprocess.CompletedProcess[str]:
    """The command in ``folder``; what it imports of the service is that of this checkout."""
    return run_forked(IMPORTED, "-m", "alembic", *arguments, env=environment(url), cwd=folder)


def environment(url: str | None = None) -> dict[str, str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("TALLY_", "PYTHON"))}
    return clean if url is None else {**clean, "TALLY_MIGRATE_URL": url}


async def test_in_a_clean_checkout_the_documented_revision_is_a_file_and_its_sql(
    tmp_path: Path, database: Database, superuser: asyncpg.Connection
) -> None:
    # And what Python has made of it, which takes a second to be made again.
    for folder in ("app", "cli", "ledger", "migrations", "signing", "terminal", "wal"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    shutil.copy(ROOT / "alembic.ini", tmp_path)

    def there(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [str(Path(sys.executable).with_name("alembic")), *arguments]
        given: dict[str, Any] = {"env": environment(database.owner_url), "capture_output": True, "text": True}
        return subprocess.run(command, cwd=tmp_path, timeout=120, **given)

    following = f"{int(newest_revision()) + 1:04}"
    made = alembic(tmp_path, "revision", "--rev-id", following, "-m", "what changes")
    assert made.returncode == 0, made.stderr
    assert (tmp_path / "migrations" / "versions" / f"{following}_what_changes.py").exists()
    statement = "ALTER TABLE scheduler.jobs ADD COLUMN what_changes text; COMMENT ON TABLE scheduler.jobs IS '50%:x';"
    (tmp_path / "migrations" / "sql" / f"{following}_what_changes.sql").write_text(statement)
    offline = there("upgrade", f"{newest_revision()}:head", "--sql")
    assert statement in offline.stdout
    assert "CREATE SCHEMA" not in offline.stdout
    upgraded = there("upgrade", "head")
    assert upgraded.returncode == 0, upgraded.stderr
    assert await superuser.fetchval("SELECT version_num FROM scheduler.alembic_version") == following
    assert await superuser.fetchval("SELECT count(what_changes) FROM scheduler.jobs") == 0
    refused = alembic(tmp_path, "downgrade", "-1", url=database.owner_url)
    assert "no way back" in refused.stdout + refused.stderr


def test_current_tells_the_revision_nothing_goes_back_and_a_database_must_be_named(database: Database) -> None:
    for target in ("-1", "base"):
        refused = alembic(ROOT, "downgrade", target, url=database.owner_url)
        assert refused.returncode != 0
        assert "Traceback" not in refused.stderr
        assert "no way back" in refused.stdout + refused.stderr
    assert alembic(ROOT, "current", url=database.owner_url).stdout.split() == [newest_revision(), "(head)"]
    nameless = alembic(ROOT, "upgrade", "head")
    assert (nameless.returncode, nameless.stderr.count("\n")) == (1, 1)


async def test_psql_tells_how_a_database_differs_from_the_schema(
    database: Database, superuser: asyncpg.Connection
) -> None:
    schema = (MIGRATIONS / "schema.txt").read_text()
    assert catalog_by_psql(database) == schema
    await superuser.execute("ALTER TABLE scheduler.jobs DROP COLUMN updated_at CASCADE")
    (missing,) = {*schema.splitlines()} - {*catalog_by_psql(database).splitlines()}
    assert missing.split()[:3] == ["jobs", "column", "updated_at"]


def catalog_by_psql(database: Database) -> str:
    asked = [str(PSQL), database.owner_url, "-XAtf", str(MIGRATIONS / "catalog.sql")]
    done = subprocess.run(asked, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


async def test_looking_changes_nothing_and_the_migrations_as_sql_do_what_migrating_does(
    empty_database: Database,
) -> None:
    alembic(ROOT, "current", url=empty_database.owner_url)
    async with connected_to(empty_database.owner_url) as connection:
        assert await connection.fetchval("SELECT to_regnamespace('scheduler') IS NULL")
    written = alembic(ROOT, "upgrade", "head", "--sql")
    assert written.returncode == 0, written.stderr
    command = [str(PSQL), "-X", "-q", "-v", "ON_ERROR_STOP=1", empty_database.owner_url]
    done = subprocess.run(command, input=written.stdout, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    async with connected_to(empty_database.service_url) as connection:
        await check_schema(connection)
