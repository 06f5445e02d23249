"""The pool of a node: which connection a task gets, and how long it waits for one."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager

import asyncpg
import pytest

from app.store import sessions
from app.store.reading import reading
from app.store.sessions import NodeConnection, NodePool
from ledger.errors import DatabaseUnavailableError
from tests.conftest import Database

Pooled = Callable[..., AbstractAsyncContextManager[NodePool]]


@pytest.fixture
async def first(database: Database) -> AsyncIterator[NodeConnection]:
    """A connection that is open already."""
    connection = await asyncpg.connect(database.service_url, connection_class=NodeConnection)
    yield connection
    connection.terminate()


@pytest.fixture
def pooled(database: Database, first: NodeConnection) -> Pooled:
    """A pool that begins with ``first``."""

    @asynccontextmanager
    async def pooled(connections_max: int = 3, command_timeout_s: float = 60) -> AsyncIterator[NodePool]:
        pool = NodePool(
            database.service_url, connections_max=connections_max, command_timeout_s=command_timeout_s, first=first
        )
        async with pool:
            yield pool

    return pooled


async def test_the_first_who_asks_gets_the_connection_that_was_open_already(
    pooled: Pooled, first: NodeConnection
) -> None:
    pid = first.get_server_pid()
    async with pooled() as pool:
        assert await pool.fetchval("SELECT pg_backend_pid()") == pid


async def test_another_is_opened_where_that_one_has_ended(pooled: Pooled, first: NodeConnection) -> None:
    pid = first.get_server_pid()
    first.terminate()
    async with pooled() as pool:
        assert await pool.fetchval("SELECT pg_backend_pid()") != pid


async def test_statements_on_it_take_no_longer_than_on_any_other(pooled: Pooled) -> None:
    async with pooled(command_timeout_s=0.05) as pool:
        with pytest.raises(TimeoutError):
            await pool.fetchval("SELECT pg_sleep(20)")


@pytest.mark.parametrize(
    ("setting", "statement", "error"),
    [
        ("statement_timeout = 1", "SELECT pg_sleep(20)", asyncpg.QueryCanceledError),
        ("default_transaction_read_only = on", "CREATE TEMP TABLE t (n int)", asyncpg.ReadOnlySQLTransactionError),
    ],
)
@pytest.mark.parametrize("way", ["execute", "fetch"])
async def test_a_session_that_was_refused_for_its_settings_is_not_lent_again(
    pooled: Pooled, first: NodeConnection, setting: str, statement: str, error: type[Exception], way: str
) -> None:
    pid = first.get_server_pid()
    await first.execute(f"SET {setting}")
    async with pooled() as pool:
        async with pool.acquire() as connection:
            assert connection.get_server_pid() == pid
            with pytest.raises(error):
                await getattr(connection, way)(statement)
        assert await pool.fetchval("SELECT pg_backend_pid()") != pid


async def test_a_connection_that_comes_free_is_taken_before_another_is_opened(
    pooled: Pooled, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions, "WAIT_S", 30)
    async with pooled() as pool:
        pids = await asyncio.gather(*(pool.fetchval("SELECT pg_backend_pid()") for _ in range(20)))
        assert (len(set(pids)), pool.get_size()) == (1, 1)


async def test_one_that_stays_in_use_is_not_waited_for(pooled: Pooled) -> None:
    async with pooled() as pool, AsyncExitStack() as held:
        taken = await asyncio.gather(*(held.enter_async_context(pool.acquire()) for _ in range(3)))
        assert len({connection.get_server_pid() for connection in taken}) == 3


async def test_one_that_cannot_be_opened_keeps_nobody_else_from_the_next(pooled: Pooled, database: Database) -> None:
    async with pooled() as pool, pool.acquire():
        wrong = re.sub(":[^:@/]+@", ":wrong@", database.service_url)
        pool.set_connect_args(wrong, command_timeout=60)
        refused = await asyncio.gather(*(pool.fetchval("SELECT 1") for _ in range(2)), return_exceptions=True)
        assert [type(each) for each in refused] == [asyncpg.InvalidPasswordError] * 2
        pool.set_connect_args(database.service_url, command_timeout=60)
        assert await pool.fetchval("SELECT 1") == 1


async def test_all_of_a_full_pool_are_waited_for(pooled: Pooled) -> None:
    async with pooled(connections_max=1) as pool:
        held = await pool.acquire()
        waiting = asyncio.create_task(pool.fetchval("SELECT 1"))
        await asyncio.wait((waiting,), timeout=2 * sessions.OPENING_WAIT_S)
        assert not waiting.done()
        await pool.release(held)
        assert await waiting == 1


async def test_a_session_that_was_left_in_a_statement_is_not_lent_again(pooled: Pooled) -> None:
    async def read_while_the_loop_stands_still(pool: NodePool) -> None:
        """As in a process that is stopped: the statement is parsed and the time is over in one turn."""
        async with reading(pool, timeout_s=0.1) as connection:
            asyncio.get_running_loop().call_soon(time.sleep, 0.4)
            await connection.fetch("SELECT count(*) FROM scheduler.jobs WHERE tenant_id = $1", "acme")

    async with pooled(connections_max=1) as pool:
        pid = await pool.fetchval("SELECT pg_backend_pid()")
        with pytest.raises(DatabaseUnavailableError):
            await read_while_the_loop_stands_still(pool)
        async with reading(pool, snapshot=True) as connection:
            assert await connection.fetchval("SELECT pg_backend_pid()") != pid
