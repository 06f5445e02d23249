"""Rows of a ledger as COPY has them: read back, and put into a frozen table with nothing else done."""

from __future__ import annotations

import io
import time
from collections.abc import Sequence
from typing import Final

import asyncpg

SEED_COLUMNS: Final = ("t_hlc", "job_id", "action", "prev_chain_link", "chain_link", "payload", "tenant_id")
"""Of ``yardsticks/seed_log.sql``."""
CHAINED_COLUMNS: Final = (
    *("tenant_id", "seq", "t_hlc", "hlc_physical", "hlc_logical", "hlc_node", "job_id", "action", "link_version"),
    *("prev_chain_link", "chain_link", "payload_digest", "payload", "origin"),
)
"""Of ``yardsticks/chained_log.sql``."""


async def read_back(url: str, columns: Sequence[str], where: str) -> list[bytes]:
    """Lines of COPY's text format, one a row; ``where`` chooses and orders them."""
    connection = await asyncpg.connect(url)
    try:
        read = io.BytesIO()
        query = f"SELECT {', '.join(columns)} FROM scheduler.scheduler_log {where}"
        await connection.copy_from_query(query, output=read)
        return read.getvalue().splitlines(keepends=True)
    finally:
        await connection.close()


async def copy(url: str, columns: Sequence[str], lines: Sequence[bytes], rows_a_batch: int) -> float:
    """Seconds that COPY of these rows takes, in transactions of so many."""
    connection = await asyncpg.connect(url)
    try:
        batches = range(0, len(lines), rows_a_batch)
        sources = [io.BytesIO(b"".join(lines[at : at + rows_a_batch])) for at in batches]
        began_s = time.perf_counter()
        for source in sources:
            async with connection.transaction():
                await connection.copy_to_table("scheduler_log", schema_name="scheduler", columns=columns, source=source)
        return time.perf_counter() - began_s
    finally:
        await connection.close()


async def count_rows(url: str) -> dict[str, int]:
    """Rows that the table holds, by tenant."""
    connection = await asyncpg.connect(url)
    try:
        rows = await connection.fetch("SELECT tenant_id, count(*) FROM scheduler.scheduler_log GROUP BY tenant_id")
        return {row["tenant_id"]: row["count"] for row in rows}
    finally:
        await connection.close()
