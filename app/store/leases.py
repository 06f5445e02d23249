"""Leases in PostgreSQL: a row for each node whose WAL safekeepers keep, by the clock of the database."""

from __future__ import annotations

from typing import NamedTuple

import asyncpg

_TAKE = """
WITH taken AS (
    INSERT INTO scheduler.wal_leases AS l (node_id, holder, run, expires_at)
    VALUES ($1, $2, $3, clock_timestamp() + make_interval(secs => $4))
        ON CONFLICT (node_id) DO UPDATE
           SET holder = excluded.holder, run = excluded.run, expires_at = excluded.expires_at
         WHERE $5 OR l.run = excluded.run OR l.holder = excluded.holder OR l.expires_at <= clock_timestamp()
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

    async def take(self, node_id: str, holder: str, run: str, ttl_s: float, *, seize: bool = False) -> Held:
        connection = await self._connect()
        try:
            row = await connection.fetchrow(_TAKE, node_id, holder, run, ttl_s, seize)
        finally:
            await connection.close(timeout=CONNECT_TIMEOUT_S)
        assert row is not None
        return Held(*row)

    async def renew(self, node_id: str, run: str, ttl_s: float) -> bool:
        connection = await self._connect()
        try:
            return bool(await connection.fetchval(_RENEW, node_id, run, ttl_s))
        finally:
            await connection.close(timeout=CONNECT_TIMEOUT_S)

    async def release(self, node_id: str, run: str) -> None:
        connection = await self._connect()
        try:
            await connection.execute(_RELEASE, node_id, run)
        finally:
            await connection.close(timeout=CONNECT_TIMEOUT_S)

    async def _connect(self) -> asyncpg.Connection[asyncpg.Record]:
        return await asyncpg.connect(self._url, timeout=CONNECT_TIMEOUT_S, command_timeout=CONNECT_TIMEOUT_S)
