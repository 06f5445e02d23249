"""Rows of a ledger as COPY has them: read back, and put into a table with nothing else done."""

from __future__ import annotations

import io
import time
from collections.abc import Sequence
from typing import Final

import asyncpg

from app.store.chaining import LOG_COLUMNS

_COLUMNS: Final = ", ".join(LOG_COLUMNS)


async def read_back(url: str, where: str) -> list[bytes]:
    """Lines of COPY's text format, one a row; ``where`` chooses and orders them."""
    connection = await asyncpg.connect(url)
    try:
        read = io.BytesIO()
        await connection.copy_from_query(f"SELECT {_COLUMNS} FROM scheduler.scheduler_log {where}", output=read)
        return read.getvalue().splitlines(keepends=True)
    finally:
        await connection.close()


async def copy(url: str, lines: Sequence[bytes], rows_a_batch: int) -> float:
    """Seconds that COPY of these rows takes, in transactions of so many."""
    connection = await asyncpg.connect(url)
    try:
        batches = range(0, len(lines), rows_a_batch)
        sources = [io.BytesIO(b"".join(lines[at : at + rows_a_batch])) for at in batches]
        began_s = time.perf_counter()
        for source in sources:
            async with connection.transaction():
                await connection.copy_to_table(
                    "scheduler_log", schema_name="scheduler", columns=LOG_COLUMNS, source=source
                )
        return time.perf_counter() - began_s
    finally:
        await connection.close()
