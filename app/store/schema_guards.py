"""What in the database guards the ledger, and must be there and switched on before a node writes.

The revision says which schema the migrations made; somebody with the right to may have taken a part of it away
since. Asked of the catalogue: the tables with their columns and constraints, as ``app.store.tables`` declares them, the
triggers that refuse changes on the log, each of its partitions, the snapshots and what outsiders said, and that a
commit waits for the disk.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from sqlalchemy import CheckConstraint, PrimaryKeyConstraint, Table, UniqueConstraint
from sqlalchemy.dialects import postgresql

from app.store.tables import (
    LOG_PARTITIONS,
    SCHEMA,
    batch_snapshot,
    checkpoint_cosignature,
    checkpoint_timestamp,
    metadata,
    scheduler_log,
)
from ledger.errors import StartRefusedError

if TYPE_CHECKING:
    from app.store import Connection

_COLUMNS = """
SELECT c.relname, a.attname, format_type(a.atttypid, a.atttypmod), a.attnotnull
  FROM pg_attribute a JOIN pg_class c ON c.oid = a.attrelid
 WHERE c.relnamespace = to_regnamespace($1) AND c.relkind IN ('r', 'p') AND a.attnum > 0 AND NOT a.attisdropped
"""
_CONSTRAINTS = """
SELECT c.relname, k.conname
  FROM pg_constraint k JOIN pg_class c ON c.oid = k.conrelid LEFT JOIN pg_index i ON i.indexrelid = k.conindid
 WHERE c.relnamespace = to_regnamespace($1) AND k.convalidated AND coalesce(i.indisvalid, true)
"""
_PARTITIONS = """
SELECT c.relname FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid
 WHERE i.inhparent = to_regclass($1)
"""
_TRIGGERS = """
SELECT c.relname, t.tgname
  FROM pg_trigger t JOIN pg_class c ON c.oid = t.tgrelid JOIN pg_proc p ON p.oid = t.tgfoid
 WHERE c.relnamespace = to_regnamespace($1) AND t.tgenabled IN ('O', 'A')
   AND p.proname = 'refuse_change' AND p.prosrc LIKE '%RAISE EXCEPTION%restrict_violation%'
"""
_GUARDS = ("append_only_rows", "append_only_table")
"""Triggers of an append-only table: against UPDATE and DELETE, against TRUNCATE."""
FAULTS_NAMED_MAX = 5


async def check(connection: Connection) -> None:
    """Raises StartRefusedError unless all that guards the ledger is there and works."""
    faults = [
        *_column_faults([tuple(row) for row in await connection.fetch(_COLUMNS, SCHEMA)]),
        *_constraint_faults({tuple(row) for row in await connection.fetch(_CONSTRAINTS, SCHEMA)}),
        *await _trigger_faults(connection),
    ]
    if faults:
        more = f" and {len(faults) - FAULTS_NAMED_MAX} more" if len(faults) > FAULTS_NAMED_MAX else ""
        raise StartRefusedError(
            f"the database lacks what guards the ledger: {'; '.join(faults[:FAULTS_NAMED_MAX])}{more}. Somebody "
            "changed it after it was migrated: run tally verify for every tenant, then put back what migrations/sql has"
        )
    commit = await connection.fetchval("SELECT current_setting('synchronous_commit')")
    if commit == "off":
        raise StartRefusedError(
            "synchronous_commit is off for this login or database: a commit would be answered before it is on the "
            "disk. Set it to on (ALTER ROLE or ALTER DATABASE ... RESET synchronous_commit, or postgresql.conf)"
        )


def _column_faults(rows: list[tuple[Any, ...]]) -> Iterator[str]:
    found = {(table, column): (kind, not_null) for table, column, kind, not_null in rows}
    dialect = postgresql.dialect()  # type: ignore[no-untyped-call]
    for table in metadata.sorted_tables:
        for column in table.columns:
            declared = column.type.compile(dialect).partition(" COLLATE")[0].lower()
            kind, not_null = found.get((table.name, column.name), (None, False))
            if kind is None:
                yield f"column {table.name}.{column.name} is missing"
            elif kind != declared:
                yield f"column {table.name}.{column.name} is of type {kind}, not {declared}"
            elif not not_null and not column.nullable:
                yield f"column {table.name}.{column.name} is not NOT NULL"


def _constraint_faults(found: set[tuple[object, ...]]) -> Iterator[str]:
    for table in metadata.sorted_tables:
        for name in _constraints(table):
            if (table.name, name) not in found:
                yield f"constraint {name} of {table.name} is missing"


def _constraints(table: Table) -> Iterator[str]:
    for constraint in table.constraints:
        if isinstance(constraint, PrimaryKeyConstraint):
            yield str(constraint.name or f"{table.name}_pkey")
        elif isinstance(constraint, CheckConstraint | UniqueConstraint):
            yield str(constraint.name)


async def _trigger_faults(connection: Connection) -> list[str]:
    log = scheduler_log.name
    partitions = [row[0] for row in await connection.fetch(_PARTITIONS, f"{SCHEMA}.{log}")]
    faults = []
    if len(partitions) != LOG_PARTITIONS:
        faults.append(f"{log} has {len(partitions)} partitions, not {LOG_PARTITIONS}")
    found = {tuple(row) for row in await connection.fetch(_TRIGGERS, SCHEMA)}
    others = (batch_snapshot.name, checkpoint_cosignature.name, checkpoint_timestamp.name)
    for table in (log, *sorted(partitions), *others):
        missing = [name for name in _GUARDS if (table, name) not in found]
        faults += [f"trigger {name} of {table} is missing or disabled" for name in missing]
    return faults
