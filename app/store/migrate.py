"""Migrates a database to the schema of this version.

A run is one transaction under an advisory lock: concurrent runs wait for each other, and a failed run changes nothing.
A revision runs the files of ``migrations/sql`` that are numbered after the revision before it, up to its own number.
There is no downgrade: an older schema has no place for the data of a newer one.
"""

from __future__ import annotations

import asyncpg
from alembic import command, context, op
from alembic.config import Config
from alembic.util import CommandError
from sqlalchemy import Connection as SyncConnection
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine
from sqlalchemy.pool import NullPool
from sqlalchemy.util import await_only

from app.runtime.logs import log
from app.runtime.postgres import DATABASE_FAULTS
from app.store import sessions
from app.store.schema import MIGRATIONS, SCHEMA, SERVER_VERSION_MIN, check_server, newest_revision
from ledger.errors import StartRefusedError

_LOCK = 0x7A11_5C4E_3A
"""Key of the advisory lock, one for each database."""
_LOCK_NOT_AVAILABLE = "55P03"
CONNECT_TIMEOUT_S = 60
"""Longest that a migration waits for a connection."""
LOCK_TIMEOUT_S = 60
"""Longest that a migration waits for a lock that another session has."""


def migrate(url: str) -> None:
    """Migrate the database to the newest schema of this version. ``url`` is of the login that is to own it.

    Blocks, in an event loop of its own: from a coroutine call it with ``asyncio.to_thread``.

    Raises:
        StartRefusedError: the server cannot be reached or is unfit, or the login may not do this; nothing was
            changed.
    """
    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
    config.attributes["url"] = url
    try:
        command.upgrade(config, "head")
    except (*DATABASE_FAULTS, DBAPIError) as error:
        raise StartRefusedError(f"the database could not be migrated: {_described(error)}") from error
    except CommandError as error:
        raise StartRefusedError(
            f"the database could not be migrated: {error}. This version knows its schema up to revision "
            f"{newest_revision()}; if another one migrated the database further, use that"
        ) from error


def engine(url: str) -> AsyncEngine:
    """A SQLAlchemy engine for ``url``, which is in asyncpg's form; keeps no connections."""

    async def connect() -> asyncpg.Connection[asyncpg.Record]:
        return await sessions.connect_alone(url, timeout_s=CONNECT_TIMEOUT_S)

    return create_async_engine("postgresql+asyncpg://", async_creator=connect, poolclass=NullPool)


async def run_in_transaction(url: str) -> None:
    """Run Alembic's requested migrations; called by ``migrations/env.py``."""
    async with engine(url).begin() as connection:
        found, reached = await connection.run_sync(_migrate)
    if found != reached:
        log.info("schema_migration", from_revision=found, to_revision=reached)


def print_statements() -> None:
    """Print Alembic's requested migrations as SQL for psql; called by ``migrations/env.py``."""
    context.configure(dialect_name="postgresql", version_table_schema=SCHEMA)
    with context.begin_transaction():
        script = context.get_context().impl
        script.static_output(_OFFLINE)
        if context.get_starting_revision_argument() in (None, "base"):
            script.static_output(f"CREATE SCHEMA IF NOT EXISTS {SCHEMA};")
        context.run_migrations()


def downgrade() -> None:
    """The downgrade of each revision.

    Raises:
        CommandError: always.
    """
    raise CommandError(
        "revisions of the ledger's schema have no way back: an older schema has no place for what a newer one "
        "recorded. Restore a backup from before (docs/backup.md), and let the older version serve that"
    )


def run_sql_files(after: str | None, up_to: str) -> None:
    """Run the files of ``migrations/sql`` numbered over ``after`` up to ``up_to``, in order, in the migration's
    transaction; called by revisions."""
    numbered = {path.name.partition("_")[0]: path for path in sorted((MIGRATIONS / "sql").glob("[0-9]*_*.sql"))}
    for statements in (path.read_text("utf-8") for number, path in numbered.items() if (after or "") < number <= up_to):
        if context.is_offline_mode():
            op.get_context().impl.static_output(statements)
            continue
        # The driver's own execute takes many statements at once, SQLAlchemy's prepares and takes one.
        driver = op.get_bind().connection.driver_connection
        assert driver is not None
        await_only(driver.execute(statements))


def _migrate(connection: SyncConnection) -> tuple[str | None, str | None]:
    """Run the migration; returns the revisions before and after, valid once the transaction commits."""
    # 1. The server is fit, and no other run migrates this database.
    version_num, encoding = connection.execute(
        text("SELECT current_setting('server_version_num')::int, current_setting('server_encoding')")
    ).one()
    check_server(version_num, encoding)
    connection.execute(text(f"SET LOCAL lock_timeout = '{LOCK_TIMEOUT_S}s'"))
    _lock(connection)
    # 2. The schema, in which Alembic also keeps its version; not for read-only commands.
    context.configure(connection=connection, version_table_schema=SCHEMA)
    migration = context.get_context()
    is_missing = connection.execute(text("SELECT to_regnamespace(:name) IS NULL"), {"name": SCHEMA}).scalar()
    if is_missing and not migration.opts.get("dont_mutate"):
        connection.execute(text(f"CREATE SCHEMA {SCHEMA}"))
    # 3. The revisions that are missing.
    found = migration.get_current_revision()
    with context.begin_transaction():
        context.run_migrations()
    return found, migration.get_current_revision()


def _lock(connection: SyncConnection) -> None:
    """Take the advisory lock; report its holder during the wait."""
    if not connection.execute(text("SELECT pg_try_advisory_xact_lock(:key)"), {"key": _LOCK}).scalar():
        who = connection.execute(
            text("""
                SELECT a.pid, a.usename AS role, a.application_name AS application
                  FROM pg_locks l JOIN pg_stat_activity a USING (pid)
                 WHERE l.granted AND l.locktype = 'advisory' AND l.objsubid = 1 AND a.datname = current_database()
                   AND (l.classid::bigint << 32 | l.objid::bigint) = :key
            """),
            {"key": _LOCK},
        ).all()
        log.warning("schema_migration_waits", sessions=[row._asdict() for row in who], at_most_s=LOCK_TIMEOUT_S)
        connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _LOCK})


_OFFLINE = f"""DO $$
BEGIN
    IF current_setting('server_version_num')::int < {SERVER_VERSION_MIN}0000
       OR current_setting('server_encoding') <> 'UTF8' THEN
        RAISE 'PostgreSQL {SERVER_VERSION_MIN} or newer and a database of encoding UTF8 are needed';
    END IF;
    PERFORM pg_advisory_xact_lock({_LOCK});
END $$;"""


def _described(error: Exception) -> str:
    # A revision's file goes to the driver itself, whose errors are in none of SQLAlchemy's.
    if getattr(getattr(error, "orig", error), "sqlstate", None) == _LOCK_NOT_AVAILABLE:
        return (
            f"another session keeps what it needs locked for over {LOCK_TIMEOUT_S} s, and nothing was changed; "
            "pg_locks and pg_stat_activity say which. End that session, or wait for it, and run this again"
        )
    if isinstance(error, TimeoutError) and not error.args:
        return (
            f"PostgreSQL does not answer within {CONNECT_TIMEOUT_S} s; nothing was changed. "
            "See whether it hangs, or whether the URL leads elsewhere, and run this again"
        )
    if isinstance(error, DBAPIError):
        return str(error.orig)
    hint = getattr(error, "hint", None)
    return f"{error} ({hint})" if hint else str(error)
