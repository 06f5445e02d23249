"""Bring a database to the schema this version knows.

One migration run is one transaction under an advisory lock: two at once do not meet, and a run that fails
leaves nothing. The SQL of each revision is a file in ``migrations/sql``.
"""

from __future__ import annotations

import asyncio

import asyncpg
import structlog
from alembic import command, context, op
from alembic.config import Config
from alembic.util import CommandError
from sqlalchemy import Connection as SyncConnection
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine
from sqlalchemy.pool import NullPool
from sqlalchemy.util import await_only

from app.store.schema_version import MIGRATIONS, newest_revision
from app.store.tables import SCHEMA, metadata
from ledger.errors import StartRefusedError

log = structlog.get_logger()

SERVER_VERSION_MIN = 15
_LOCK = 0x7A11_5C4E_3A
"""Key of the advisory lock, one for each database."""


def migrate(url: str) -> None:
    """Bring the database to the newest schema this version knows. ``url`` is of the login that is to own it.

    Blocks, in an event loop of its own: from a coroutine call it with ``asyncio.to_thread``.

    Raises:
        StartRefusedError: the server cannot be reached or is unfit, or the login may not do this; nothing was
            changed.
    """
    config = _config()
    config.attributes["url"] = url
    try:
        command.upgrade(config, "head")
    except (OSError, asyncpg.PostgresError, asyncpg.InterfaceError, DBAPIError) as error:
        raise StartRefusedError(f"the database could not be migrated: {_described(error)}") from error
    except CommandError as error:
        raise StartRefusedError(
            f"the database could not be migrated: {error}. This version knows its schema up to revision "
            f"{newest_revision()}; if another one migrated the database further, use that"
        ) from error


def check_server(version_num: int, encoding: str) -> None:
    """Raises StartRefusedError if the server is too old or the database not UTF8.

    ``version_num`` is as in ``server_version_num``, such as 150004.
    """
    if version_num < SERVER_VERSION_MIN * 10_000:
        raise StartRefusedError(
            f"PostgreSQL {SERVER_VERSION_MIN} or newer is needed, and this server is "
            f"{version_num // 10_000}: upgrade it, or name another with TALLY_MIGRATE_URL"
        )
    if encoding != "UTF8":
        raise StartRefusedError(
            f"the database must have encoding UTF8 and has {encoding}: CREATE DATABASE ... ENCODING 'UTF8' "
            "TEMPLATE template0"
        )


def engine(url: str) -> AsyncEngine:
    """SQLAlchemy's way to the database that ``url`` names in asyncpg's form; keeps no connections."""

    async def connect() -> asyncpg.Connection[asyncpg.Record]:
        return await asyncpg.connect(url)

    return create_async_engine("postgresql+asyncpg://", async_creator=connect, poolclass=NullPool)


def run_in_transaction(url: str) -> None:
    """Run what Alembic was asked for; called by ``migrations/env.py``."""
    asyncio.run(_run(url))


def run_sql_file(name: str) -> None:
    """Run all statements of ``migrations/sql/<name>`` in the migration's transaction; called by revisions."""
    statements = (MIGRATIONS / "sql" / name).read_text(encoding="utf-8")
    # The driver's own execute takes many statements at once, SQLAlchemy's prepares and takes one.
    driver = op.get_bind().connection.driver_connection
    assert driver is not None
    await_only(driver.execute(statements))


def _config() -> Config:
    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
    return config


async def _run(url: str) -> None:
    async with engine(url).begin() as connection:
        await connection.run_sync(_migrate)


def _migrate(connection: SyncConnection) -> None:
    # 1. The server is fit, and nobody else migrates this database.
    version_num, encoding = connection.execute(
        text("SELECT current_setting('server_version_num')::int, current_setting('server_encoding')")
    ).one()
    check_server(version_num, encoding)
    connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _LOCK})
    # 2. The schema, where Alembic keeps its version too.
    if connection.execute(text("SELECT to_regnamespace(:name) IS NULL"), {"name": SCHEMA}).scalar():
        connection.execute(text(f"CREATE SCHEMA {SCHEMA}"))
    # 3. The revisions that are missing.
    context.configure(connection=connection, target_metadata=metadata, version_table_schema=SCHEMA)
    found, newest = context.get_context().get_current_revision(), context.get_head_revision()
    if found != newest:
        log.info("schema_migration", from_revision=found, to_revision=newest)
    with context.begin_transaction():
        context.run_migrations()


def _described(error: Exception) -> str:
    if isinstance(error, DBAPIError):
        return str(error.orig)
    hint = getattr(error, "hint", None)
    return f"{error} ({hint})" if hint else str(error)
