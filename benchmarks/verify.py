"""``verify_chain``, ``verify_service`` and ``verify_growth_mib``: verification as the service does it.

Verified is a chain with snapshots every 1000 entries, its tree and its jobs, as the service leaves it. Compared is
the rate with fetching the same columns through the same kind of cursor and driver, doing nothing with them. The
processes that check ranges are at work before the clock of ``verify_chain`` starts, as its connection is;
``verify_service`` counts all of it, from request to answer; the service keeps its processes from one run to the next,
and the first starts them. Memory is measured in one process that does everything.
"""

from __future__ import annotations

import statistics
import time
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import NamedTuple

import asyncpg
import uvloop

from app.read.checking import checking
from app.store.chain_reader import consistent_reader
from benchmarks.apart import apart
from benchmarks.bench import Bench, Database, wait_for
from benchmarks.chains import BEGIN_MS, build_chain
from benchmarks.http_client import Client, Target
from benchmarks.machine import peak_memory_mib
from benchmarks.processes import tally_serve
from benchmarks.row import RUNS_OF_LIKE, Outcome, Row, expect, interleave
from ledger.verification import ASPECTS, ENTRY_COLUMNS, verify
from signing import private_keys
from signing.keys import Keyring
from signing.snapshot import open_snapshot

ROWS = 200_000
FETCHED_AT_ONCE = 1000
"""Rows a round trip of the bare fetch, which waits for each; verification asks for the next while it checks."""
AFTER_START_S = 3600.0
SMALL_ROWS = 100_000
LARGE_ROWS = 1_000_000
GROWTH_MIB_MAX = 64.0
GROWTH_MIB_MIN = 1.0
"""A growth below this counts as this: less is not told from noise."""
_TENANT = "bench"

_FETCH = f"SELECT {', '.join(ENTRY_COLUMNS)} FROM scheduler.scheduler_log WHERE tenant_id = $1 ORDER BY seq"


class Verified(NamedTuple):
    """One verification: how long, and the most memory its process ever had."""

    took_s: float
    peak_mib: float


class Chain(NamedTuple):
    """A chain in a database, and the key that signed it."""

    url: str
    tenant_id: str
    entries: int
    public_key_pem: str


def measure_rate(bench: Bench) -> Outcome:
    """Verification without projection against a bare fetch, with projection beside them."""
    with bench.fresh_database() as database, bench.fresh_folder() as folder:
        chain = build(bench, database, folder, _TENANT, ROWS)
        with_projection: list[float] = []

        def ours() -> float:
            with_projection.append(ROWS / apart(verify_chain, chain, projection=True, beside=True).took_s)
            return ROWS / apart(verify_chain, chain, projection=False, beside=True).took_s

        rates = interleave(bench, ours, lambda: ROWS / apart(_fetch, chain))
    folded = statistics.median(with_projection)
    return rates.outcome(
        f"{ROWS:,} rows; with the job projection folded once more {folded:,.0f} rows/s, "
        f"ratio {folded / statistics.median(rates.against):.2f}"
    )


def measure_service(bench: Bench) -> Outcome:
    """``/chain/verify`` of the running service, job states included, against a bare fetch."""
    with bench.fresh_database() as database, bench.fresh_folder() as folder:
        # The service has the key that signed the chain, from its start on: entries come after that.
        begin_ms = int((time.time() + AFTER_START_S) * 1000)
        chain = build(bench, database, folder, _TENANT, ROWS, begin_ms)
        signing = {"TALLY_SIGNING__KEY_URI": f"file:{folder / _TENANT}.pem"}
        with tally_serve(database.service_url, folder / "data", signing) as url:

            def ours() -> float:
                return ROWS / apart(_ask_service, url, chain)

            rates = interleave(bench, ours, lambda: ROWS / apart(_fetch, chain))
    return rates.outcome(f"{ROWS:,} rows, from request to answer")


def _ask_service(url: str, chain: Chain) -> float:
    """Seconds until the service has verified the chain."""
    return wait_for(_ask(url, chain))


async def _ask(url: str, chain: Chain) -> float:
    client = await Client.connect(Target.of(url))
    try:
        began_s = time.perf_counter()
        found = await client.get(f"/v1/chain/verify?tenant_id={chain.tenant_id}")
        took_s = time.perf_counter() - began_s
    finally:
        client.close()
    skipped = {"checkpoint"}
    wrong = [aspect for aspect in ASPECTS if aspect not in skipped and found["verdicts"][aspect] != "ok"]
    expect(not wrong, f"the chain does not hold: {wrong}, {found['first_break']}")
    expect(found["entries_checked"] == chain.entries, f"{found['entries_checked']} entries were checked")
    return took_s


def measure_growth(bench: Bench) -> Outcome:
    """How much more memory a whole verification takes for ten times the rows."""
    with bench.fresh_database() as database, bench.fresh_folder() as folder:
        small = build(bench, database, folder, "small", SMALL_ROWS)
        large = build(bench, database, folder, "large", LARGE_ROWS)
        growths_mib: list[float] = []
        rates: list[float] = []
        for run in range(1, RUNS_OF_LIKE + 1):
            before, after = apart(verify_chain, small, projection=True), apart(verify_chain, large, projection=True)
            growths_mib.append(after.peak_mib - before.peak_mib)
            rates.append(LARGE_ROWS / after.took_s)
            bench.say(
                f"run {run}: {before.peak_mib:.1f} MiB at {SMALL_ROWS:,} rows, {after.peak_mib:.1f} MiB at "
                f"{LARGE_ROWS:,}, {rates[-1]:,.0f} rows/s"
            )
    growth_mib = statistics.median(growths_mib)
    return Outcome(
        growth_mib,
        GROWTH_MIB_MAX,
        GROWTH_MIB_MAX / max(growth_mib, GROWTH_MIB_MIN),
        RUNS_OF_LIKE,
        f"{min(growths_mib):.1f} to {max(growths_mib):.1f} MiB, peak at 1 M rows {after.peak_mib:.0f} MiB, "
        f"{statistics.median(rates):,.0f} rows/s with projection",
    )


def build(
    bench: Bench, database: Database, folder: Path, tenant_id: str, entries: int, begin_ms: int = BEGIN_MS
) -> Chain:
    """A chain in this database, signed by a key in the folder."""
    began_s = time.monotonic()
    signer = private_keys.generate(folder / f"{tenant_id}.pem")
    wait_for(build_chain(database.superuser_url, tenant_id, entries, signer, begin_ms))
    bench.say(f"a chain of {entries:,} rows was made in {time.monotonic() - began_s:.0f} s")
    return Chain(database.service_url, tenant_id, entries, signer.public_key_pem)


def verify_chain(chain: Chain, *, projection: bool, beside: bool = False) -> Verified:
    """Verify the chain; fails the row when it does not hold.

    ``beside`` has ranges checked in processes of their own, as the service and ``tally verify`` do with long chains.
    """
    return uvloop.run(_verify_all(chain, projection, beside))


async def _verify_all(chain: Chain, projection: bool, beside: bool) -> Verified:
    opener = partial(open_snapshot, keyring=Keyring.of([chain.public_key_pem]))
    connection = await asyncpg.connect(chain.url)
    try:
        async with AsyncExitStack() as held:
            reader = await held.enter_async_context(consistent_reader(connection, chain.tenant_id))
            verify_rows = partial(
                verify, reader, tenant_id=chain.tenant_id, open_snapshot=opener, projection=projection
            )
            if beside:
                elsewhere = await held.enter_async_context(checking(chain.url, reader))
                await elsewhere.begun
                verify_rows = partial(verify_rows, elsewhere=elsewhere)
            began_s = time.perf_counter()
            verdict = await verify_rows()
            took_s = time.perf_counter() - began_s
    finally:
        await connection.close()
    # Nothing outside the database is compared with; all else is, and holds.
    skipped = {"checkpoint"} if projection else {"checkpoint", "projection"}
    wrong = [aspect for aspect in ASPECTS if aspect not in skipped and verdict.verdicts[aspect] != "ok"]
    expect(not wrong, f"the chain does not hold: {wrong}, {verdict.first_break}")
    expect(verdict.entries_checked == chain.entries, f"{verdict.entries_checked} entries were checked")
    return Verified(took_s, peak_memory_mib())


def _fetch(chain: Chain) -> float:
    """Seconds to fetch all rows."""
    return uvloop.run(_fetch_all(chain))


async def _fetch_all(chain: Chain) -> float:
    connection = await asyncpg.connect(chain.url)
    try:
        fetched = 0
        began_s = time.perf_counter()
        async with connection.transaction(isolation="repeatable_read", readonly=True):
            cursor = await connection.cursor(_FETCH, chain.tenant_id)
            while rows := await cursor.fetch(FETCHED_AT_ONCE):
                fetched += len(rows)
        took_s = time.perf_counter() - began_s
    finally:
        await connection.close()
    expect(fetched == chain.entries, f"{fetched} rows were fetched, not {chain.entries}")
    return took_s


RATE = Row(
    "verify_chain",
    "rows/s",
    0.85,
    "verification of a chain: links, payloads re-hashed, snapshots and their signatures, head, tree; against fetching "
    "the same columns with the same driver and kind of cursor, doing nothing",
    measure_rate,
)
SERVICE = Row(
    "verify_service",
    "rows/s",
    0.28,
    "GET /v1/chain/verify of a running service, job states included, its processes kept from run to run; "
    "against fetching the same columns with the same driver and kind of cursor, doing nothing",
    measure_service,
)
GROWTH = Row(
    "verify_growth_mib",
    "MiB",
    1.0,
    "growth of the verifying process's peak resident memory from a chain of 100 k to one of 1 M rows, against the 64 "
    "MiB allowed",
    measure_growth,
)
