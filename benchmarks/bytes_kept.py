"""``bytes_kept``: what one entry takes on disk, everything that is kept because of it counted.

Jobs of one event each, whose payload is ``PAYLOAD_BYTES`` long, go through the service. Counted are all tables and
indexes of the ledger, beyond what they take when empty, and all files of the node; of a WAL segment what is written.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import asyncpg

from benchmarks.bench import Bench, wait_for
from benchmarks.events import created
from benchmarks.http_client import Client, Target, post
from benchmarks.ledger_checks import check_service, wait_until_chained
from benchmarks.processes import tally_serve
from benchmarks.row import Outcome, Row, expect

PAYLOAD_BYTES = 330
TIMES_MAX = 5
ENTRIES = 100_000
TENANT = "bench"
LINES_A_REQUEST = 2000
SETTLED_TIMEOUT_S = 60.0
POLL_S = 0.2
_SIZE = """
SELECT sum(pg_total_relation_size(c.oid))::bigint
  FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
 WHERE n.nspname = 'scheduler' AND c.relkind IN ('r', 'm', 'p')
"""
_IS_SETTLED = """
SELECT (SELECT count(*) FROM scheduler.jobs WHERE tenant_id = $1) = $2
   AND (SELECT tree_size FROM scheduler.merkle_head WHERE tenant_id = $1) = $2
   AND (SELECT max(to_seq) FROM scheduler.batch_snapshot WHERE tenant_id = $1) = $2
"""


def measure(bench: Bench) -> Outcome:
    """Bytes an entry, against ``TIMES_MAX`` times its payload."""
    with bench.fresh_database() as database, bench.fresh_folder() as folder:
        before = wait_for(_table_bytes(database.superuser_url))
        with tally_serve(database.service_url, folder) as url:
            wait_for(_send(url))
            wait_for(_wait_until_settled(database.superuser_url))
            wait_for(check_service(url, {TENANT: ENTRIES}))
        tables = wait_for(_table_bytes(database.superuser_url)) - before
        sizes = {path: _file_bytes(path) for path in folder.rglob("*") if path.is_file()}
        wal = sum(size for path, size in sizes.items() if path.suffix == ".wal")
        files = sum(sizes.values()) - wal
    kept = (tables + wal + files) / ENTRIES
    allowed = TIMES_MAX * PAYLOAD_BYTES
    parts = ", ".join(
        f"{name} {size / ENTRIES:,.0f}" for name, size in (("tables", tables), ("WAL", wal), ("rest", files))
    )
    return Outcome(kept, allowed, allowed / kept, 1, f"{ENTRIES:,} entries; bytes an entry: {parts}")


async def _send(url: str) -> None:
    client = await Client.connect(Target.of(url))
    lines = list(created(TENANT, ENTRIES, PAYLOAD_BYTES))
    for begin in range(0, ENTRIES, LINES_A_REQUEST):
        await client.ask(post("/v1/events", b"\n".join(lines[begin : begin + LINES_A_REQUEST]), "ndjson"))
    await wait_until_chained(client)
    client.close()


async def _wait_until_settled(url: str) -> None:
    """Followers have followed all of it."""
    connection = await asyncpg.connect(url)
    deadline_s = time.monotonic() + SETTLED_TIMEOUT_S
    try:
        while not await connection.fetchval(_IS_SETTLED, TENANT, ENTRIES):
            expect(time.monotonic() < deadline_s, "jobs, tree or snapshots do not reach the end of the chain")
            await asyncio.sleep(POLL_S)
    finally:
        await connection.close()


async def _table_bytes(url: str) -> int:
    connection = await asyncpg.connect(url)
    try:
        return int(await connection.fetchval(_SIZE))
    finally:
        await connection.close()


def _file_bytes(path: Path) -> int:
    """Of a segment, whose space is taken ahead, what is behind its last written byte does not count."""
    return len(path.read_bytes().rstrip(b"\0")) if path.suffix == ".wal" else path.stat().st_size


ROW = Row(
    "bytes_kept",
    "bytes an entry",
    0.9,
    f"tables, indexes, tiles, snapshots and WAL of one entry, a JobCreated with a payload of {PAYLOAD_BYTES} bytes, "
    f"one job each; against {TIMES_MAX} times the payload",
    measure,
)
