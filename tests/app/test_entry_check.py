"""Entries that are read are compared with the signed tree, also where that is behind, or grows meanwhile."""

from __future__ import annotations

import asyncio

import asyncpg
import pytest

from app.store.entry_check import EntryCheck
from app.store.notary import read_entry
from signing.checkpoint import Checkpoint
from tests.app.chain_builder import insert
from tests.app.chains import until
from tests.conftest import Database, connected_to
from tests.ledger.ledger_in_memory import Ledger, build

OLDER, SIZE = 300, 700
LEDGER = build(SIZE)


@pytest.fixture
async def behind(superuser: asyncpg.Connection) -> Ledger:
    """A chain whose stored tree is older than the checkpoint that is kept of it, as one on a replica can be."""
    await superuser.execute("SET session_replication_role = replica")
    ledger = build(SIZE)
    ledger.store_tree(OLDER)
    await insert(superuser, ledger)
    return ledger


async def grow(connection: asyncpg.Connection) -> None:
    """Store the tree of the whole chain."""
    await connection.execute("DELETE FROM scheduler.merkle_tile")
    tiles = [("acme", level, index, hashes) for (level, index), hashes in LEDGER.tiles.items()]
    await connection.executemany("INSERT INTO scheduler.merkle_tile VALUES ($1, $2, $3, $4)", tiles)
    assert LEDGER.tree is not None
    await connection.execute("UPDATE scheduler.merkle_head SET tree_size = $1, root_hash = $2", *LEDGER.tree)


@pytest.mark.usefixtures("behind")
async def test_a_tree_that_grows_while_an_entry_is_compared_with_it_is_not_damaged(
    pool: asyncpg.Pool, superuser: asyncpg.Connection, database: Database
) -> None:
    kept = Checkpoint("log", SIZE, LEDGER.checkpoint().root)
    damaged: list[str] = []
    check = EntryCheck(lambda _: kept, damaged.append)
    async with pool.acquire() as connection, connected_to(database.superuser_url) as growing:
        entry = await read_entry(connection, "acme", 1)
        assert entry is not None
        await check.require(connection, "acme", [entry])
        async with growing.transaction():
            await growing.execute("LOCK TABLE scheduler.merkle_head")
            await grow(growing)
            comparing = asyncio.ensure_future(check.require(connection, "acme", [entry]))
            waiting = "SELECT count(*) > 0 FROM pg_locks WHERE NOT granted"
            await until(lambda: superuser.fetchval(waiting), "the tiles were read, and the size is to be")
        await comparing
    assert damaged == []
