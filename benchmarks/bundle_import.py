"""``import_bundle`` and ``import_growth_mib``: a bundle of a long chain, imported into an empty ledger.

The bundle is the one of ``verify_bundle``; the importer is that of the service, in a fresh process that is set as the
service sets its own, and verifies the whole bundle before it stores any of it. Compared is COPY of the very rows that
the import left into ``yardsticks/chained_log.sql``, in transactions of as many rows, with nothing verified, looked up,
linked or merged.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

import asyncpg
import uvloop

from app.runtime.metrics import Metrics
from app.runtime.state.node import Node
from app.share.bundle.importer import BundleImporter
from app.share.bundle.staging import StagedFile
from app.store import chaining
from app.write.chain.view import ReadHeads
from benchmarks.apart import apart
from benchmarks.bench import Bench
from benchmarks.bundle import (
    GROWTH_MIB_MAX,
    GROWTH_MIB_MIN,
    LARGE_ROWS,
    ROWS,
    SMALL_ROWS,
    build,
    export,
    retention_reader,
)
from benchmarks.copied_rows import CHAINED_COLUMNS, copy, read_back
from benchmarks.machine import peak_memory_mib
from benchmarks.row import RUNS_OF_LIKE, Outcome, Row, expect, interleave
from benchmarks.service_process import as_in_the_service
from ledger.hlc import Clock
from ledger.positions import Epoch
from signing.bundle.reader import digest_of
from signing.keys import Keyring

ROWS_A_TRANSACTION = 1000
"""Of COPY, frozen."""
_TENANT = "bench"
_IMPORTED = f"WHERE tenant_id = '{_TENANT}' ORDER BY seq"


class Imported(NamedTuple):
    """One import: how long, and the most memory its process ever had."""

    took_s: float
    peak_mib: float


def measure_rate(bench: Bench) -> Outcome:
    """Import of a bundle against COPY of what it leaves."""
    with bench.fresh_folder() as folder:
        path, keys = _bundle(bench, folder, ROWS)
        lines: list[bytes] = []

        def ours() -> float:
            with bench.fresh_database() as database:
                took_s = apart(_import, path, ROWS, keys, database.service_url).took_s
                lines[:] = uvloop.run(read_back(database.superuser_url, CHAINED_COLUMNS, _IMPORTED))
            return ROWS / took_s

        def theirs() -> float:
            expect(len(lines) == ROWS, f"{len(lines)} rows were read back, not {ROWS}")
            with bench.yardstick_database("chained_log") as url:
                return ROWS / uvloop.run(copy(url, CHAINED_COLUMNS, lines, ROWS_A_TRANSACTION))

        rates = interleave(bench, ours, theirs, RUNS_OF_LIKE)
    return rates.outcome(f"{ROWS:,} rows, COPY of {ROWS_A_TRANSACTION:,} a transaction")


def measure_growth(bench: Bench) -> Outcome:
    """How much more memory an import takes for ten times the rows."""
    growths_mib: list[float] = []
    rates: list[float] = []
    with bench.fresh_folder() as folder:
        bundles = [(rows, *_bundle(bench, folder, rows)) for rows in (SMALL_ROWS, LARGE_ROWS)]
        for run in range(1, RUNS_OF_LIKE + 1):
            peaks = []
            for rows, path, keys in bundles:
                with bench.fresh_database() as database:
                    done = apart(_import, path, rows, keys, database.service_url)
                peaks.append(done.peak_mib)
            growths_mib.append(peaks[1] - peaks[0])
            rates.append(LARGE_ROWS / done.took_s)
            bench.say(f"run {run}: {growths_mib[-1]:.1f} MiB more, {rates[-1]:,.0f} rows/s, peak {peaks[1]:.0f} MiB")
    growth_mib = statistics.median(growths_mib)
    return Outcome(
        growth_mib,
        GROWTH_MIB_MAX,
        GROWTH_MIB_MAX / max(growth_mib, GROWTH_MIB_MIN),
        RUNS_OF_LIKE,
        f"{min(growths_mib):.1f} to {max(growths_mib):.1f} MiB; at 1 M rows {statistics.median(rates):,.0f} rows/s",
    )


def _bundle(bench: Bench, folder: Path, rows: int) -> tuple[Path, Path]:
    """A bundle of a chain that long, and the key that signed it."""
    path = folder / f"{rows}.tar"
    keys = folder / str(rows)
    keys.mkdir()
    with bench.fresh_database() as database:
        chain, key = build(bench, database, keys, _TENANT, rows)
        apart(export, chain, key, path)
    return path, key


def _import(path: Path, rows: int, keys: Path, url: str) -> Imported:
    with as_in_the_service():
        return uvloop.run(_import_all(path, rows, keys, url))


async def _import_all(path: Path, rows: int, keys: Path, url: str) -> Imported:
    async with asyncpg.create_pool(url, min_size=1, max_size=2) as pool:

        async def begin_tenant(tenant_id: str) -> None:
            async with pool.acquire() as connection:
                await chaining.create_heads(connection, [tenant_id])

        async def read_heads(
            connection: asyncpg.Connection, tenant_ids: Collection[str], read: ReadHeads = chaining.read_heads
        ) -> dict[str, chaining.ChainHead]:
            return await read(connection, sorted(tenant_ids))

        importer = BundleImporter(
            pool=pool,
            node=Node("importing", "local", "gate", "0" * 32, Epoch(1), Clock("importing", 5000)),
            folder=path.parent,
            trusted_keys=keys,
            begin_tenant=begin_tenant,
            read_heads=read_heads,
            on_imported=lambda growth: None,
            on_damaged=lambda error: None,
            metrics=Metrics(),
            retention=retention_reader(pool, Keyring.load(keys)),
        )
        digest, _ = await asyncio.to_thread(digest_of, path)
        file = StagedFile.at(path, path.name, digest)
        began_s = time.perf_counter()
        done = await importer.run([file], dry_run=False)
        took_s = time.perf_counter() - began_s
    expect((done.imported, done.duplicates) == (rows, 0), f"{done.imported} of {rows} entries were imported")
    return Imported(took_s, peak_memory_mib())


RATE = Row(
    "import_bundle",
    "rows/s",
    0.48,
    "import of a bundle into an empty ledger: verified wholly, sorted, looked up, linked; against COPY of the rows "
    "that leaves into the same table and indexes, frozen, nothing else done",
    measure_rate,
)
GROWTH = Row(
    "import_growth_mib",
    "MiB",
    1.0,
    "growth of peak resident memory of importing a bundle from 100 k to 1 M rows, against the 100 MiB allowed",
    measure_growth,
)
