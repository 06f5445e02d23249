"""The schema of this version, and the check that a database has it.

``migrations/sql`` makes the schema and is the only part written by hand. ``migrations/catalog.sql`` queries the objects
of a database; ``migrations/schema.txt`` is its result for a database that was just migrated. The revision shows which
migrations ran. The comparison shows whether an administrator has since changed the objects, or added some that change,
hide or lose rows. Other indexes, columns, constraints and tables are allowed.

``powers_of_login`` lists other powers of a login that could change guarded data.

The check runs at every start, so without Alembic, which takes a third of a second to load: revisions are numbered, and
their files are named after them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

import asyncpg

import app
from app.runtime.postgres import DATABASE_FAULTS
from app.store import Connection, sessions
from app.store.reading import fetch_column
from ledger.errors import StartRefusedError, reported_as

Fact = tuple[str, str, str]
"""Relation, kind and name."""
SCHEMA = "scheduler"
MIGRATIONS = Path(app.__file__).parent.parent / "migrations"
SERVER_VERSION_MIN = 15
"""Oldest PostgreSQL: NULLS NOT DISTINCT came with it."""
FAULTS_NAMED_MAX = 5
_IN_THE_WAY: Final = {
    "trigger": ("trigger {name} of {relation}", "DROP TRIGGER {name} ON scheduler.{relation}"),
    "rule": ("rule {name} of {relation}", "DROP RULE {name} ON scheduler.{relation}"),
    "security": (
        "row security of {relation}, which hides rows",
        "ALTER TABLE scheduler.{relation} DISABLE ROW LEVEL SECURITY",
    ),
    "storage": (
        "{relation}, which is UNLOGGED: a crash of PostgreSQL empties it",
        "ALTER TABLE scheduler.{relation} SET LOGGED",
    ),
}
"""By kind of fact: objects that a table of ours must not have, and the statement that removes them."""
_NAME = r'("(?:[^"]|"")*"|\S+)'
_FACT: Final = re.compile(rf"{_NAME}\s+(\w+)\s+{_NAME}\s*(.*)", re.DOTALL)
"""A line of the catalog: the name of a relation, a trigger or a rule is quoted where PostgreSQL needs that."""


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
    """The revision after ``migrate``."""
    return max(path.name.partition("_")[0] for path in (MIGRATIONS / "versions").glob("[0-9]*_*.py"))


async def check_schema(connection: Connection) -> None:
    """Raises StartRefusedError unless the server is fit and the database has exactly the schema of this version."""
    check_server(int(connection.get_server_version().major) * 10_000, connection.get_settings().server_encoding)
    await _check_revision(connection)
    await _check_guards(connection)


async def is_newest(url: str) -> bool:
    """Whether the database at ``url`` has the schema of this version; False when it has none.

    Raises:
        StartRefusedError: the database cannot be reached.
    """
    with reported_as(StartRefusedError, "the database could not be asked for its schema", *DATABASE_FAULTS):
        connection = await sessions.connect(url)
        try:
            return await _revision(connection) == newest_revision()
        finally:
            await connection.close()


async def catalog(connection: Connection) -> list[str]:
    """The objects of the database, in the lines of ``migrations/schema.txt``."""
    return await fetch_column(connection, (MIGRATIONS / "catalog.sql").read_text(encoding="utf-8"))


async def _check_revision(connection: Connection) -> None:
    known = newest_revision()
    try:
        found = await _revision(connection)
    except asyncpg.InsufficientPrivilegeError as error:
        raise StartRefusedError(
            f"the database login may not read schema {SCHEMA} ({error}): make it a member of tallystick_service, or "
            "switch off the row security of a table that is named"
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


async def _revision(connection: Connection) -> str | None:
    try:
        found = await connection.fetchval(f"SELECT version_num FROM {SCHEMA}.alembic_version")
    except (asyncpg.UndefinedTableError, asyncpg.InvalidSchemaNameError):
        return None
    return None if found is None else str(found)


async def _check_guards(connection: Connection) -> None:
    known = _facts((MIGRATIONS / "schema.txt").read_text(encoding="utf-8").splitlines())
    found = _facts(await catalog(connection))
    faults = [
        f"{kind} {name} of {relation} is {found.get((relation, kind, name), 'missing or disabled')}, not {definition}"
        for (relation, kind, name), definition in known.items()
        if kind != "index" and found.get((relation, kind, name)) != definition
    ]
    if faults:
        raise StartRefusedError(
            f"the database lacks what guards the ledger: {_first(faults)}. Somebody changed it after it was migrated: "
            "run tally verify for every tenant, then put back what migrations/schema.txt has"
        )
    if added := _in_the_way(known, found):
        raise StartRefusedError(
            f"the database has what changes, hides or loses rows of the ledger: {_first(added)}. Somebody added it "
            "after it was migrated: take it away as the owner of the table, then run tally verify for every tenant"
        )


def _in_the_way(known: Iterable[Fact], found: Iterable[Fact]) -> list[str]:
    """The facts of ``found`` that a table of ``known`` must not have, with the statement that removes each. Triggers
    that partitions inherit from their table are removed with it."""
    tables = {relation for relation, _, _ in known}
    added = {fact for fact in {*found}.difference(known) if fact[1] in _IN_THE_WAY and fact[0] in tables}
    table_of = {name: relation for relation, kind, name in found if kind == "partition"}
    told = []
    for relation, kind, name in sorted(added):
        if (table_of.get(relation), kind, name) not in added or kind != "trigger":
            what, away = (text.format(relation=relation, name=name) for text in _IN_THE_WAY[kind])
            told.append(f"{what} ({away})")
    return told


def _first(faults: Sequence[str]) -> str:
    more = f" and {len(faults) - FAULTS_NAMED_MAX} more" if len(faults) > FAULTS_NAMED_MAX else ""
    return "; ".join(faults[:FAULTS_NAMED_MAX]) + more


def _facts(lines: Iterable[str]) -> dict[Fact, str]:
    """Definitions by relation, kind and name."""
    facts = {}
    for line in lines:
        fact = _FACT.fullmatch(line)
        assert fact is not None, line
        relation, kind, name, definition = fact.groups()
        facts[relation, kind, name] = definition
    return facts


EVERYTHING: Final = ("pg_write_all_data", "pg_execute_server_program", "pg_write_server_files")
"""Predefined roles whose members can change any row, or the files below it."""
# A member of a role can become it (SET ROLE), whether or not it inherits its rights. A superuser is a member of all
# roles, so nothing else is reported of him.
_POWERS = f"""
SELECT power FROM (
    SELECT 1 AS position, 'is a superuser' AS power
     WHERE (SELECT rolsuper FROM pg_roles WHERE rolname = current_user)
    UNION ALL
    SELECT 2, CASE WHEN rolname = current_user THEN '' ELSE format('may become %I, which ', rolname) END || CASE
               WHEN rolsuper THEN 'is a superuser' WHEN rolcreaterole THEN 'has CREATEROLE'
               WHEN rolbypassrls THEN 'has BYPASSRLS' ELSE 'can write everywhere' END
      FROM pg_roles
     WHERE pg_has_role(oid, 'MEMBER')
       AND (rolsuper OR rolcreaterole OR rolbypassrls OR rolname = ANY ($1::text[]))
    UNION ALL
    SELECT 3, format('owns database %I', datname) FROM pg_database
     WHERE datname = current_database() AND pg_has_role(datdba, 'MEMBER')
    UNION ALL
    SELECT 4, format('owns schema %I', nspname) FROM pg_namespace
     WHERE nspname = '{SCHEMA}' AND pg_has_role(nspowner, 'MEMBER')
    UNION ALL
    SELECT 5, format('owns %s tables, views or functions, such as %s', count(*), min(name COLLATE "C")) FROM (
            SELECT relname, relowner FROM pg_class
             WHERE relnamespace = to_regnamespace('{SCHEMA}') AND relkind IN ('r', 'p', 'v', 'm')
            UNION ALL
            SELECT proname, proowner FROM pg_proc WHERE pronamespace = to_regnamespace('{SCHEMA}')
        ) AS owned (name, owner)
     WHERE pg_has_role(owner, 'MEMBER') HAVING count(*) > 0
) AS found
WHERE position = 1 OR NOT (SELECT rolsuper FROM pg_roles WHERE rolname = current_user)
ORDER BY position, power"""


async def powers_of_login(connection: Connection) -> tuple[str, list[str]]:
    """The role of a connection, and each way in which it could change guarded data."""
    role = await connection.fetchval("SELECT current_user::text")
    return str(role), await fetch_column(connection, _POWERS, list(EVERYTHING))
