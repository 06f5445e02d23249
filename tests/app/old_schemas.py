"""Databases as revisions before the first release left them: the SQL files one by one, as ``migrate`` runs them."""

from __future__ import annotations

import asyncpg

from app.store.schema import MIGRATIONS, SCHEMA
from tests.conftest import Database, connected_to


async def began(database: Database) -> None:
    """Make the schema, with the table in which Alembic keeps its version."""
    async with connected_to(database.owner_url) as owner:
        await owner.execute(f"CREATE SCHEMA {SCHEMA}")
        await owner.execute(f"CREATE TABLE {SCHEMA}.alembic_version (version_num varchar(32) PRIMARY KEY)")


async def ran(database: Database, first: int, last: int) -> None:
    """Run the SQL files of these numbers."""
    async with connected_to(database.owner_url) as owner, owner.transaction():
        for number in range(first, last + 1):
            for path in (MIGRATIONS / "sql").glob(f"{number:04}_*.sql"):
                await owner.execute(path.read_text())


async def stamped(connection: asyncpg.Connection, revision: str) -> None:
    """Write down which revision a database has."""
    await connection.execute(f"DELETE FROM {SCHEMA}.alembic_version")
    await connection.execute(f"INSERT INTO {SCHEMA}.alembic_version VALUES ($1)", revision)
