"""Puts a ledger made in memory into PostgreSQL, row for row, as the service would have."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from ledger.merkle import HASH_BYTES
from ledger.verification import ENTRY_COLUMNS, JOB_COLUMNS, PROMISED_COLUMNS, SNAPSHOT_COLUMNS

if TYPE_CHECKING:
    import asyncpg

    from tests.ledger.ledger_in_memory import Ledger


CHAIN = ("scheduler_log", "chain_heads", "merkle_head", "merkle_tile")
"""Tables with entries, head and tree of each tenant."""


@asynccontextmanager
async def unguarded(superuser: asyncpg.Connection) -> AsyncIterator[None]:
    """A transaction in which no trigger refuses anything."""
    async with superuser.transaction():
        await superuser.execute("SET LOCAL session_replication_role = replica")
        yield


async def edit(superuser: asyncpg.Connection, statement: str, *values: object) -> None:
    """Execute a statement past every trigger; several, where there are no values."""
    async with unguarded(superuser):
        await superuser.execute(statement, *values)


async def remove(connection: asyncpg.Connection, tenant_id: str, *more: str) -> None:
    """Remove the tenant's rows from these tables and ``more``."""
    for table in (*CHAIN, *more):
        await connection.execute(f"DELETE FROM scheduler.{table} WHERE tenant_id = $1", tenant_id)


async def replace(superuser: asyncpg.Connection, ledger: Ledger, *more: str) -> None:
    """Put ``ledger`` in the place of its tenant's rows in these tables and ``more``, past every trigger."""
    async with unguarded(superuser):
        await remove(superuser, ledger.tenant_id, *more)
        await insert(superuser, ledger)


async def insert(connection: asyncpg.Connection, ledger: Ledger) -> None:
    """Store all of ``ledger``: log, head, snapshots, tree, tiles, jobs and what is promised."""
    tenant = ledger.tenant_id
    tables = (
        ("scheduler_log", ENTRY_COLUMNS, ledger.entries),
        ("batch_snapshot", SNAPSHOT_COLUMNS, ledger.snapshots),
        ("jobs", JOB_COLUMNS, ledger.jobs),
        ("commitments", PROMISED_COLUMNS, ledger.promised),
    )
    for table, columns, rows in tables:
        await connection.copy_records_to_table(
            table,
            schema_name="scheduler",
            columns=("tenant_id", *columns),
            records=[(tenant, *(_given(column, row[column]) for column in columns)) for row in rows],
        )
    if ledger.head is not None:
        await connection.execute(
            "INSERT INTO scheduler.chain_heads (tenant_id, head_seq, head_chain_link, head_hlc)"
            " VALUES ($1, $2, $3, $4)",
            tenant,
            *ledger.head,
        )
        await connection.execute(
            "INSERT INTO scheduler.follower_positions (follower, tenant_id, seq) VALUES ('jobs', $1, $2)"
            " ON CONFLICT (follower, tenant_id) DO UPDATE SET seq = excluded.seq",
            tenant,
            ledger.head[0],
        )
    if ledger.tree is not None:
        await connection.execute(
            "INSERT INTO scheduler.merkle_head (tenant_id, tree_size, root_hash) VALUES ($1, $2, $3)",
            tenant,
            *ledger.tree,
        )
    await connection.executemany(
        "INSERT INTO scheduler.merkle_tile (tenant_id, level, tile_index, hashes) VALUES ($1, $2, $3, $4)",
        [(tenant, level, index, hashes) for (level, index), hashes in ledger.tiles.items()],
    )
    # What is kept of the index of jobs, if entries left.
    before_first = min((row["seq"] for row in ledger.entries if isinstance(row["seq"], int)), default=1) - 1
    left = [(end, kept) for end, kept in sorted(ledger.kept_index.items()) if end >= before_first > 0]
    for end, kept in left[:1]:
        await connection.execute(
            "INSERT INTO scheduler.job_index_left (tenant_id, first_leaf, keys, runs) VALUES ($1, $2, $3, $4)"
            " ON CONFLICT DO NOTHING",
            tenant,
            end - len(kept.keys) // HASH_BYTES,
            kept.keys,
            kept.runs,
        )


def _given(column: str, value: object) -> object:
    """``value`` as it is sent; readers give ``seqs`` as PostgreSQL prints it."""
    return (
        [int(seq) for seq in value.strip("{}").split(",") if seq]
        if column == "seqs" and isinstance(value, str)
        else value
    )
