"""What a database login may do beyond what the service needs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from app.store.schema import SCHEMA

if TYPE_CHECKING:
    from app.store import Connection

EVERYTHING: Final = ("pg_write_all_data", "pg_execute_server_program", "pg_write_server_files")
"""Predefined roles whose members can change any row, or the files below it."""
# A member of a role can become it (SET ROLE), whether or not it inherits what that may do. A superuser is a member of
# all, so that of him nothing else is told.
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
    """The role of a connection, and each way in which it could change what the ledger guards."""
    role = await connection.fetchval("SELECT current_user::text")
    return str(role), [row["power"] for row in await connection.fetch(_POWERS, list(EVERYTHING))]
