"""Connections that know the arrays of built-in types, ask each database what its own types are, and are given back
without a statement."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import asyncpg

from app.store.sessions import NodeConnection
from tests.conftest import Database, execute

ARRAYS = "SELECT $1::bigint[], $2::smallint[], $3::bytea[], $4::text[], $5::uuid[]"
VALUES: tuple[list[Any], ...] = ([1 << 60, None], [[-1, 2], [3, 4]], [b"", b"\0a"], ["a,b", '"'], [])


@asynccontextmanager
async def connected(url: str, **options: Any) -> AsyncIterator[asyncpg.Connection]:
    """A connection that does not look at the types of a database twice."""
    connection = await asyncpg.connect(url, connection_class=NodeConnection, **options)
    try:
        yield connection
    finally:
        await connection.close()


async def test_only_the_first_connection_asks_what_arrays_are(database: Database) -> None:
    async with connected(database.service_url) as connection:
        assert tuple(await connection.fetchrow(ARRAYS, *VALUES)) == VALUES
    async with connected(database.service_url) as connection:
        assert tuple(await connection.fetchrow(ARRAYS, *VALUES)) == VALUES
        prepared = await connection.fetch("SELECT statement FROM pg_prepared_statements ORDER BY prepare_time")
        assert [row["statement"] for row in prepared][:-1] == [ARRAYS]


async def test_statements_without_a_name_work_with_what_is_known_and_what_is_not(database: Database) -> None:
    for _ in range(2):
        async with connected(database.service_url, statement_cache_size=0) as connection:
            assert tuple(await connection.fetchrow(ARRAYS, *VALUES)) == VALUES
            await connection.reload_schema_state()
            assert tuple(await connection.fetchrow(ARRAYS, *VALUES)) == VALUES


async def test_the_types_that_a_database_made_are_looked_at_by_each_connection(database: Database) -> None:
    of_one_kind = """SELECT ARRAY[json_populate_record(NULL::public.place, '{"x": 1}')]"""
    for change, expected in (
        ("CREATE TYPE public.place AS (x integer, y integer)", (1, None)),
        ("ALTER TYPE public.place ADD ATTRIBUTE z integer", (1, None, None)),
    ):
        await execute(database.superuser_url, change)
        async with connected(database.superuser_url) as connection:
            assert await connection.fetchval(of_one_kind) == [expected]


async def test_nothing_is_asked_when_one_is_given_back(pool: asyncpg.Pool, superuser: asyncpg.Connection) -> None:
    async with pool.acquire() as connection:
        pid = connection.get_server_pid()
        await connection.fetchval("SELECT 1 AS mine")
    async with pool.acquire() as again:
        assert again.get_server_pid() == pid
        asked = await superuser.fetchval("SELECT query FROM pg_stat_activity WHERE pid = $1", pid)
    assert asked == "SELECT 1 AS mine"


async def test_a_transaction_that_was_left_open_ends_when_its_connection_is_given_back(
    pool: asyncpg.Pool, superuser: asyncpg.Connection
) -> None:
    async with pool.acquire() as connection:
        await connection.execute("BEGIN; SET LOCAL lock_timeout = '7s'")
    async with pool.acquire() as again:
        assert await again.fetchval("SHOW lock_timeout") == "0"
    left_open = "SELECT count(*) FROM pg_stat_activity WHERE state ~ '^idle in' AND datname = current_database()"
    assert await superuser.fetchval(left_open) == 0
