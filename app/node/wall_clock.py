"""Comparing the wall clock with that of PostgreSQL, at the start and from then on."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import structlog

from app.runtime.state.wall_clock import WallClock, read_clocks
from app.store import node as node_store
from app.store.reading import reading
from ledger.errors import DatabaseUnavailableError, StartRefusedError

if TYPE_CHECKING:
    from app.store import Connection
    from app.store.reading import Pool

COMPARE_INTERVAL_S = 5.0

log = structlog.get_logger()


async def watch(wall: WallClock, pool: Pool) -> None:
    """Compare, for ever; ends by cancellation. While Postgres is away no leap is adopted."""
    while True:
        try:
            async with reading(pool) as connection:
                before = read_clocks()
                wall.compare(before, await node_store.database_ms(connection))
        except DatabaseUnavailableError as error:
            log.debug("wall_clock_not_compared", error=str(error))
        wall.now_ms()
        await asyncio.sleep(COMPARE_INTERVAL_S)


async def refuse_ahead(connection: Connection, max_skew_ms: int) -> None:
    """Return unless the wall clock is ahead of that of Postgres by more than ``max_skew_ms``.

    Raises:
        StartRefusedError: it is; times that were issued could never be taken back.
    """
    before = read_clocks()
    ahead_ms = before.wall_ms - await node_store.database_ms(connection)
    if ahead_ms > max_skew_ms:
        raise StartRefusedError(
            f"this machine's clock is {ahead_ms} ms ahead of that of Postgres, more than the {max_skew_ms} ms of "
            "hlc.max_clock_skew. Set the wrong one right: times from the future cannot be taken back once chained"
        )
