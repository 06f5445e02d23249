"""SQL about nodes: epochs, leases, job id claims, the identity of the ledger, its session secret, the database's clock
and the heartbeat, the one row that shows the lag of a copy of the database, and of which ledger it is a copy.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import datetime
from typing import Any, NamedTuple, cast

import asyncpg

from app.store import Connection, sessions
from app.store.chaining import WalPosition
from app.store.reading import fetch_as, fetch_value, json_in
from ledger.errors import StartRefusedError
from ledger.facts.events import SYSTEM_TENANT, SystemAction
from ledger.hlc import LOGICAL_MAX, Hlc
from ledger.positions import Epoch, Lsn


async def take_epoch(
    connection: Connection,
    *,
    node_id: str,
    wal_id: str,
    epoch: Epoch,
    chained_lsn: Lsn,
    ends: dict[Epoch, Lsn],
    expected: WalPosition | None,
) -> bool:
    """Make ``epoch`` the node's present one and record where past epochs ended. Returns False, and changes nothing, if
    the node's row is no longer ``expected``.

    ``ends`` is the last LSN of each past epoch that is still in the WAL.
    """
    if not await connection.fetchval(
        """
        INSERT INTO scheduler.wal_positions AS p (node_id, wal_id, epoch, chained_lsn, seen_durable_lsn)
        VALUES ($1, $2, $3, $4, $4)
            ON CONFLICT (node_id) DO UPDATE
               SET wal_id = excluded.wal_id, epoch = excluded.epoch, chained_lsn = excluded.chained_lsn,
                   seen_durable_lsn = greatest(p.seen_durable_lsn, excluded.seen_durable_lsn), updated_at = now()
             WHERE p.epoch < excluded.epoch AND p.epoch = $5 AND p.chained_lsn = $6
        RETURNING true
        """,
        node_id,
        wal_id,
        epoch,
        chained_lsn,
        *((expected.epoch, expected.chained_lsn) if expected else (None, None)),
    ):
        return False
    await connection.executemany(
        """
        INSERT INTO scheduler.wal_epochs (node_id, epoch, end_lsn) VALUES ($1, $2, $3)
            ON CONFLICT (node_id, epoch) DO NOTHING
        """,
        [(node_id, past, end_lsn) for past, end_lsn in ends.items()],
    )
    return True


async def claim_job_ids(connection: Connection, region: str, gate: str, node_id: str) -> bool:
    """Claim (region, gate) for this node's job ids; False when another node has it."""
    return bool(
        await connection.fetchval(
            """
            WITH claimed AS (
                INSERT INTO scheduler.job_id_claims (region, gate, node_id) VALUES ($1, $2, $3)
                    ON CONFLICT (region, gate) DO NOTHING
                RETURNING node_id
            )
            SELECT node_id FROM claimed
            UNION ALL
            SELECT node_id FROM scheduler.job_id_claims WHERE region = $1 AND gate = $2
            """,
            region,
            gate,
            node_id,
        )
        == node_id
    )


async def log_origin(connection: Connection) -> str | None:
    """The origin of this ledger's logs; None when no node has started on it yet."""
    return await fetch_value(connection, str, "SELECT log_origin FROM scheduler.ledger_identity")


async def database_ms(connection: Connection) -> int:
    """The clock of Postgres, in milliseconds since 1970."""
    return int(await connection.fetchval("SELECT (extract(epoch FROM clock_timestamp()) * 1000)::bigint"))


async def beat(connection: Connection) -> datetime:
    """Set the heartbeat to the primary's present time; returns that time."""
    return cast(
        "datetime",
        await connection.fetchval("""
            INSERT INTO scheduler.heartbeat (beat_at) VALUES (clock_timestamp())
                ON CONFLICT ("only") DO UPDATE SET beat_at = clock_timestamp()
            RETURNING beat_at
        """),
    )


async def settle_session_secret(connection: Connection, proposed: bytes) -> bytes | None:
    """The secret of this ledger's session tokens: the stored one, else ``proposed``, which is then stored. The row may
    hold any value if its constraints were dropped."""
    await connection.execute(
        "INSERT INTO scheduler.session_secret (secret) VALUES ($1) ON CONFLICT DO NOTHING", proposed
    )
    return await fetch_value(connection, bytes, "SELECT secret FROM scheduler.session_secret")


async def settle_log_origin(connection: Connection, proposed: str) -> str:
    """The origin of this ledger's logs; ``proposed`` becomes it when there is none yet."""
    await connection.execute(
        "INSERT INTO scheduler.ledger_identity (log_origin) VALUES ($1) ON CONFLICT DO NOTHING", proposed
    )
    return await read_log_origin(connection)


async def read_log_origin(connection: Connection) -> str:
    """The origin of this ledger's logs.

    Raises:
        StartRefusedError: there is none, so no node ever started on this database.
    """
    if (origin := await log_origin(connection)) is None:
        raise StartRefusedError(
            "no node ever started on this database, so there is no log in it to restore; what is archived comes back "
            "without one (tally restore --from archive). Or somebody removed the row of scheduler.ledger_identity; a "
            "start names what has to be in it"
        )
    return origin


async def fork_log(connection: Connection, from_origin: str, to_origin: str) -> None:
    """Continue the logs as ``to_origin``, without checkpoints until they are signed again. A repeated call has no
    effect."""
    async with connection.transaction():
        if await connection.fetchval(
            """
            UPDATE scheduler.ledger_identity SET log_origin = $2 WHERE log_origin = $1 AND $1 <> $2 RETURNING true
            """,
            from_origin,
            to_origin,
        ):
            await connection.execute("UPDATE scheduler.merkle_head SET checkpoint = NULL, signed_at = NULL")


async def highest_hlc(connection: Connection, node_id: str, above: Hlc) -> Hlc | None:
    """Highest HLC that this node chained in any tenant, if it is above ``above``: only later entries are read. Entries
    imported under its name, with an origin or a link of version 1, are ignored."""
    row = await connection.fetchrow(
        """
        SELECT newest.hlc_physical, newest.hlc_logical
          FROM scheduler.chain_heads h
         CROSS JOIN LATERAL (
               SELECT l.hlc_physical, l.hlc_logical FROM scheduler.scheduler_log l
                WHERE l.tenant_id = h.tenant_id AND l.hlc_node = $1 AND l.hlc_logical BETWEEN 0 AND $4
                  AND (l.hlc_physical, l.hlc_logical) > ($2, $3) AND l.origin IS NULL AND l.link_version > 1
                ORDER BY l.hlc_physical DESC, l.hlc_logical DESC LIMIT 1) newest
         ORDER BY newest.hlc_physical DESC, newest.hlc_logical DESC LIMIT 1
        """,
        node_id,
        above.physical_ms,
        above.logical,
        LOGICAL_MAX,
    )
    return Hlc(row["hlc_physical"], row["hlc_logical"], node_id) if row else None


async def is_recorded(connection: Connection, action: SystemAction, subject: str) -> bool:
    """Whether the chain of ``_system`` has such an entry about ``subject``."""
    return bool(
        await connection.fetchval(
            """
            SELECT EXISTS (SELECT FROM scheduler.scheduler_log WHERE tenant_id = $1 AND job_id = $2 AND action = $3)
            """,
            SYSTEM_TENANT,
            subject,
            action,
        )
    )


async def positions(connection: Connection) -> dict[str, WalPosition]:
    """By node, the position of every node that ever wrote to this ledger."""
    return {
        node_id: WalPosition(*position)
        for node_id, *position in await connection.fetch(
            "SELECT node_id, wal_id, epoch, chained_lsn, seen_durable_lsn FROM scheduler.wal_positions"
        )
    }


async def recorded_losses(connection: Connection, node_id: str) -> set[tuple[Lsn, Lsn]]:
    """First and last LSN of each range of the node's WAL that ``_system`` records as lost."""
    rows = await connection.fetch(
        """
        SELECT payload::text FROM scheduler.scheduler_log WHERE tenant_id = $1 AND job_id = 'wal:' || $2 AND action = $3
        """,
        SYSTEM_TENANT,
        node_id,
        SystemAction.WAL_LOST,
    )
    losses = set()
    for row in rows:
        match json_in(row["payload"]):
            case {"first_lsn": int(first_lsn), "last_lsn": int(last_lsn)}:
                losses.add((Lsn(first_lsn), Lsn(last_lsn)))
    return losses


LEASE_TIMEOUT_S = 5.0


class HeldLease(NamedTuple):
    """The holder of a lease, its run, and for how many more seconds."""

    holder: str
    run: str
    left_s: float


class PostgresLeases:
    """Leases in the ledger at ``url``: a row for each node whose WAL safekeepers keep, by the clock of the database.
    Each request opens a connection, as there is one every few seconds.
    """

    def __init__(self, url: str) -> None:
        self._url = url

    async def take(
        self, node_id: str, holder: str, run: str, ttl_s: float, *, seize: bool = False, ran_out: bool = True
    ) -> HeldLease:
        async with self._connected() as connection:
            (lease,) = await fetch_as(
                connection,
                HeldLease,
                """
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
                """,
                node_id,
                holder,
                run,
                ttl_s,
                seize,
                ran_out,
            )
        return lease

    async def renew(self, node_id: str, run: str, ttl_s: float) -> bool:
        async with self._connected(ttl_s) as connection:
            return bool(
                await connection.fetchval(
                    """
                    UPDATE scheduler.wal_leases SET expires_at = clock_timestamp() + make_interval(secs => $3)
                     WHERE node_id = $1 AND run = $2
                    RETURNING true
                    """,
                    node_id,
                    run,
                    ttl_s,
                )
            )

    async def release(self, node_id: str, run: str) -> None:
        async with self._connected() as connection:
            await connection.execute("DELETE FROM scheduler.wal_leases WHERE node_id = $1 AND run = $2", node_id, run)

    @asynccontextmanager
    async def _connected(self, within_s: float = LEASE_TIMEOUT_S) -> AsyncIterator[asyncpg.Connection[Any]]:
        """A connection. A renewal takes at most the lease's ttl, because the node renews before it runs out."""
        timeout_s = min(LEASE_TIMEOUT_S, within_s)
        async with asyncio.timeout(timeout_s):
            connection = await sessions.connect(self._url, timeout_s=timeout_s, command_timeout_s=timeout_s)
        try:
            yield connection
            await connection.close(timeout=timeout_s)
        except BaseException:
            connection.terminate()  # a caller that was cancelled does not wait for a server that hangs
            raise
