"""Reading a ledger for its verification."""

from __future__ import annotations

import tracemalloc
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing
from typing import Any

import asyncpg
import pytest

from app.runtime.sharing import BYTES_PER_TURN
from app.store.chain_reader import ALL_JOBS, FETCH_BYTES, JobRange, PostgresChainReader, consistent_reader
from app.write.pending.requests import Draft, EventLines
from ledger import native
from ledger.facts.events import JOB_EVENTS
from tests.app.chain_builder import insert
from tests.app.chains import Chains, followed, until
from tests.app.conftest import RunNode
from tests.app.drafts import GLOBAL
from tests.ledger.ledger_in_memory import build


async def test_long_rows_are_handed_on_few_at_a_time(
    run_node: RunNode, chains: Chains, superuser: asyncpg.Connection[asyncpg.Record]
) -> None:
    text = "x" * (BYTES_PER_TURN // 3)
    drafts = [Draft("acme", None, JOB_EVENTS["JobCreated"], {"spec": {"t": text}}, None, GLOBAL) for _ in range(8)]
    async with run_node() as service:
        await service.submitter.submit_lines(EventLines.of(drafts), durability=None, key=None)
        await until(lambda: followed(superuser), "the job table has followed")
    async with consistent_reader(superuser, "acme") as reader:
        for rows in (reader.entries(None, None), reader.entries_by_job()):
            assert [len(turn) async for turn in rows] == [2, 2, 2, 2]
    assert len(await chains.sound("acme")) == 8


LONG_ROWS, SHORT_ROWS = 100, 600
LONG_CHARACTERS = 1 << 20
_INSERT_ENTRIES = """
INSERT INTO scheduler.scheduler_log (tenant_id, seq, t_hlc, hlc_physical, hlc_logical, hlc_node, job_id, action,
       link_version, prev_chain_link, chain_link, payload_digest, payload)
SELECT 'acme', n, n || ':0:x', n, 0, 'x', to_char(n, 'FM0000'), 'ENQUEUE', 2, n || 'p', 'l', 'd',
       to_json(repeat('x', CASE WHEN n <= $1 THEN $3::int ELSE 10 END))
  FROM generate_series(1, $1::int + $2::int) AS n
"""

Rows = AsyncIterator[Sequence[Sequence[Any]]]


READS: dict[str, Callable[[PostgresChainReader], Rows]] = {
    "by seq": lambda reader: reader.entries(None, None),
    "by job": lambda reader: reader.entries_by_job(),
}


async def test_what_is_held_of_long_rows_is_bounded_in_bytes_and_short_ones_come_by_the_hundred_again(
    superuser: asyncpg.Connection[asyncpg.Record],
) -> None:
    await superuser.execute(_INSERT_ENTRIES, LONG_ROWS, SHORT_ROWS, LONG_CHARACTERS)
    await superuser.execute(
        "INSERT INTO scheduler.follower_positions VALUES ('jobs', 'acme', $1)", LONG_ROWS + SHORT_ROWS
    )
    for how, read in READS.items():
        async with consistent_reader(superuser, "acme") as reader:
            tracemalloc.start()
            try:
                turns = [len(turn) async for turn in read(reader)]
                peak = tracemalloc.get_traced_memory()[1]
            finally:
                tracemalloc.stop()
        assert sum(turns) == LONG_ROWS + SHORT_ROWS, how
        assert max(turns) == 250, how
        assert peak < 3 * FETCH_BYTES < LONG_ROWS * LONG_CHARACTERS, how


async def test_a_reader_that_is_left_before_its_end_leaves_the_connection_free(
    superuser: asyncpg.Connection[asyncpg.Record],
) -> None:
    await superuser.execute(_INSERT_ENTRIES, 0, SHORT_ROWS, 0)
    async with consistent_reader(superuser, "acme") as reader:
        for rows in (reader.entries(None, None), reader.snapshots(1, None)):
            async with aclosing(rows) as batches:
                await anext(batches, None)
            assert await superuser.fetchval("SELECT 1") == 1


@pytest.mark.parametrize(
    "part", [ALL_JOBS, JobRange(None, "job-0003"), JobRange("job-0001", "job-0003"), JobRange("job-0003", None)]
)
async def test_entries_that_are_copied_by_job_are_those_that_are_read(
    superuser: asyncpg.Connection[asyncpg.Record], part: JobRange
) -> None:
    await superuser.execute("SET session_replication_role = replica")
    ledger = build(60)
    await insert(superuser, ledger)
    await superuser.execute(
        "ALTER TABLE scheduler.scheduler_log ALTER job_id DROP NOT NULL, ALTER action DROP NOT NULL"
    )
    await superuser.execute(
        "UPDATE scheduler.scheduler_log SET job_id = NULL, payload = '\"\\u00e9 $1\"' WHERE seq = 7"
    )
    await superuser.execute("UPDATE scheduler.scheduler_log SET action = NULL, hlc_logical = -1 WHERE seq = 8")
    copied: list[tuple[Any, ...]] = []

    async def take(rows: list[tuple[Any, ...]]) -> None:
        copied.extend(rows)

    async with consistent_reader(superuser, "acme") as reader:
        is_copied = await reader.copied_by_job(part, take)
        read = [tuple(row) async for rows in reader.entries_by_job(part) for row in rows]
    assert read
    assert is_copied == (native.NAME == "c")
    assert copied == (read if is_copied else [])
