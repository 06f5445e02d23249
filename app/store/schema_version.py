"""Which schema this version knows, and whether a database has it.

Asked at every start, so without Alembic, which takes a third of a second to load: revisions are numbered, and their
files named after them.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import asyncpg

import app
from app.store.tables import SCHEMA
from ledger.errors import StartRefusedError

if TYPE_CHECKING:
    from app.store import Connection

MIGRATIONS = Path(app.__file__).parent.parent / "migrations"


SERVER_VERSION_MIN = 15
"""Oldest PostgreSQL: NULLS NOT DISTINCT came with it."""


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


def newest_revision() -> str:
    """The revision that ``migrate`` brings a database to."""
    return max(path.name.partition("_")[0] for path in (MIGRATIONS / "versions").glob("[0-9]*_*.py"))


async def check_schema(connection: Connection) -> None:
    """Raises StartRefusedError unless the server is fit and the database has exactly the schema this version knows."""
    settings = connection.get_settings()
    check_server(int(connection.get_server_version().major) * 10_000, settings.server_encoding)
    known = newest_revision()
    try:
        found = await _revision(connection)
    except asyncpg.InsufficientPrivilegeError as error:
        raise StartRefusedError(
            f"the database login may not read schema {SCHEMA}: make it a member of tallystick_service"
        ) from error
    if found == known:
        return
    if found is None:
        raise StartRefusedError(
            "the database has no schema of ours: run `tally migrate` with the owner's URL in "
            f"TALLY_MIGRATE_URL (this version knows revision {known})"
        )
    raise StartRefusedError(
        f"the database has schema revision {found} and this version knows {known}: run `tally migrate` if "
        "the database is older, or a newer Tallystick if it is newer"
    )


async def is_newest(url: str) -> bool:
    """Whether the database that ``url`` names has the schema this version knows; False when it has none.

    Raises:
        StartRefusedError: it cannot be asked.
    """
    try:
        connection = await asyncpg.connect(url)
        try:
            return await _revision(connection) == newest_revision()
        finally:
            await connection.close()
    except (OSError, asyncpg.PostgresError, asyncpg.InterfaceError) as error:
        raise StartRefusedError(f"the database could not be asked for its schema: {error}") from error


async def _revision(connection: Connection) -> str | None:
    try:
        found = await connection.fetchval(f"SELECT version_num FROM {SCHEMA}.alembic_version")
    except (asyncpg.UndefinedTableError, asyncpg.InvalidSchemaNameError):
        return None
    return None if found is None else str(found)
