"""Connections that are given back without a statement."""

from __future__ import annotations

import asyncpg


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
