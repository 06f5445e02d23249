"""Leases in PostgreSQL: a row for each node whose WAL safekeepers keep, by the clock of the database."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import asyncpg

from app.store import sessions

_TAKE = """
WITH taken AS (
    INSERT INTO scheduler.wal_leases AS l (node_id, holder, run, expires_at)
    VALUES ($1, $2, $3, clock_timestamp() + make_interval(secs => $4))
        ON CONFLICT (node_id) DO UPDATE
           SET holder = excluded.holder, run = excluded.run, expires_at = excluded.expires_at
         WHERE $5 OR l.run = excluded.run OR l.holder = excluded.holder
            OR ($6 AND l.expires_at <= clock_timestamp())
    RETURNING holder, run, expires_at
)
SELECT holder, run, extract(epoch FROM expires_at - clock_timestamp())::float8 FROM taken
UNION ALL
SELECT holder, run, extract(epoch FROM expires_at - clock_timestamp())::float8 FROM scheduler.wal_leases
 WHERE node_id = $1
 LIMIT 1
"""
_RENEW = """
UPDATE scheduler.wal_leases SET expires_at = clock_timestamp() + make_interval(secs => $3)
 WHERE node_id = $1 AND run = $2
RETURNING true
"""
_RELEASE = "DELETE FROM scheduler.wal_leases WHERE node_id = $1 AND run = $2"
CONNECT_TIMEOUT_S = 5.0


class Held(NamedTuple):
    """Who holds a lease, which run of his, and for how many seconds more."""

    holder: str
    run: str
    left_s: float


class PostgresLeases:
    """The leases of the ledger at ``url``; a connection for each question, since it is asked every few seconds."""

    def __init__(self, url: str) -> None:
        self._url = url

    async def take(
        self, node_id: str, holder: str, run: str, ttl_s: float, *, seize: bool = False, ran_out: bool = True
    ) -> Held:
        async with self._connected() as connection:
            row = await connection.fetchrow(_TAKE, node_id, holder, run, ttl_s, seize, ran_out)
        assert row is not None
        return Held(*row)

    async def renew(self, node_id: str, run: str, ttl_s: float) -> bool:
        async with self._connected(ttl_s) as connection:
            return bool(await connection.fetchval(_RENEW, node_id, run, ttl_s))

    async def release(self, node_id: str, run: str) -> None:
        async with self._connected() as connection:
            await connection.execute(_RELEASE, node_id, run)

    @asynccontextmanager
    async def _connected(self, within_s: float = CONNECT_TIMEOUT_S) -> AsyncIterator[asyncpg.Connection[Any]]:
        """A connection. Who is to renew a lease asks again before it can have run out: in less than its ttl."""
        timeout_s = min(CONNECT_TIMEOUT_S, within_s)
        async with asyncio.timeout(timeout_s):
            connection = await sessions.connect(self._url, timeout_s=timeout_s, command_timeout_s=timeout_s)
        try:
            yield connection
            await connection.close(timeout=timeout_s)
        except BaseException:
            connection.terminate()  # who is cancelled, or asked a server that hangs, does not wait for it once more
            raise
