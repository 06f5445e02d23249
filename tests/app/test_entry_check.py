"""What is compared with the stored tree is not called damaged where that is behind, or grows meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

import asyncpg
import pytest

from app.node.start.checks import check_chain
from app.store.chain_reads import entries_at
from app.store.chaining import ChainHead
from app.store.entry_check import EntryCheck
from signing.checkpoint import Checkpoint, sign_checkpoint
from tests.app.chain_builder import insert
from tests.app.chains import until
from tests.conftest import Database, connected_to
from tests.ledger.ledger_in_memory import SIGNER, Ledger, build

T = TypeVar("T")

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


async def until_grown_while(superuser: asyncpg.Connection, database: Database, work: Coroutine[Any, Any, T]) -> T:
    """What ``work`` gives, for which the tree is stored between its look at the tiles and that at the size."""
    async with connected_to(database.superuser_url) as growing, growing.transaction():
        await growing.execute("LOCK TABLE scheduler.merkle_head")
        await grow(growing)
        comparing = asyncio.ensure_future(work)
        waiting = "SELECT count(*) > 0 FROM pg_locks WHERE NOT granted"
        await until(lambda: superuser.fetchval(waiting), "the tiles were read, and the size is to be")
    return await comparing


@pytest.mark.usefixtures("behind")
async def test_a_tree_that_grows_while_an_entry_is_compared_with_it_is_not_damaged(
    pool: asyncpg.Pool, superuser: asyncpg.Connection, database: Database
) -> None:
    kept = Checkpoint("log", SIZE, LEDGER.checkpoint().root)
    damaged: list[str] = []
    check = EntryCheck(lambda _: kept, damaged.append)
    async with pool.acquire() as connection:
        (entry,) = await entries_at(connection, "acme", 1)
        await check.require(connection, "acme", [entry])
        await until_grown_while(superuser, database, check.require(connection, "acme", [entry]))
    assert damaged == []


@pytest.mark.usefixtures("behind")
async def test_a_tree_that_another_node_makes_again_while_a_node_starts_is_whole(
    pool: asyncpg.Pool, superuser: asyncpg.Connection, database: Database
) -> None:
    note = sign_checkpoint(Checkpoint("log/acme", SIZE, LEDGER.checkpoint().root), SIGNER)
    assert LEDGER.head is not None
    async with pool.acquire() as connection:
        asked = ("acme", ChainHead(*LEDGER.head), note, "log/acme", SIGNER)
        assert await check_chain(connection, *asked) == "behind"
        found = await until_grown_while(superuser, database, check_chain(connection, *asked))
    assert found == "whole"
