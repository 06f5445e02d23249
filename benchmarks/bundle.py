"""``verify_bundle`` and ``bundle_growth_mib``: a bundle of a long chain, exported and verified in fresh processes.

The chain is that of ``verify_chain``, in PostgreSQL as the service leaves it; its bundle is made by the exporter of the
service. Compared is verifying the file, manifest, digests and checkpoint included, with verifying the same chain
straight from PostgreSQL, both without the job projection, which bundles do not hold.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from contextlib import aclosing
from pathlib import Path
from typing import NamedTuple

import asyncpg
import uvloop

from app.runtime.state.node import Node
from app.share.bundle.export import BundleExporter
from app.store.entry_check import EntryCheck
from app.store.reading import Pool
from app.trust.retention import RetentionReader
from benchmarks.apart import apart
from benchmarks.bench import Bench, Database, wait_for
from benchmarks.chains import build_chain
from benchmarks.machine import peak_memory_mib
from benchmarks.row import RUNS_OF_LIKE, Outcome, Row, expect, interleave
from benchmarks.verify import Chain, Verified, verify_chain
from ledger.hlc import Clock
from ledger.positions import Epoch
from signing import private_keys
from signing.checkpoint import Checkpoint, sign_checkpoint
from signing.judging import verify_file
from signing.keys import Keyring
from signing.private_keys import FileSigner

ROWS = 200_000
SMALL_ROWS = 100_000
LARGE_ROWS = 1_000_000
GROWTH_MIB_MAX = 100.0
GROWTH_MIB_MIN = 1.0
"""A growth below this counts as this: less is not told from noise."""
_TENANT = "bench"
_LOG_ORIGIN = "bench.example"


class Exported(NamedTuple):
    """One export: how long, the most memory its process ever had, and the size of the file."""

    took_s: float
    peak_mib: float
    bytes: int


def measure_rate(bench: Bench) -> Outcome:
    """Verification of a bundle against that of its chain in PostgreSQL."""
    with bench.fresh_database() as database, bench.fresh_folder() as folder:
        chain, key = build(bench, database, folder, _TENANT, ROWS)
        path = folder / "bundle.tar"
        exported = apart(export, chain, key, path)

        def ours() -> float:
            return ROWS / apart(_verify, path, ROWS, chain.public_key_pem).took_s

        rates = interleave(bench, ours, lambda: ROWS / apart(verify_chain, chain, projection=False).took_s)
    return rates.outcome(
        f"{ROWS:,} rows in {exported.bytes / 1e6:.1f} MB; exported at {ROWS / exported.took_s:,.0f} rows/s"
    )


def measure_growth(bench: Bench) -> Outcome:
    """How much more memory exporting and verifying take for ten times the rows; the larger of the two."""
    with bench.fresh_database() as database, bench.fresh_folder() as folder:
        small, small_key = build(bench, database, folder, "small", SMALL_ROWS)
        large, large_key = build(bench, database, folder, "large", LARGE_ROWS)
        paths = folder / "small.tar", folder / "large.tar"
        growths_mib: list[float] = []
        rates: list[tuple[float, float]] = []
        for run in range(1, RUNS_OF_LIKE + 1):
            first, then = apart(export, small, small_key, paths[0]), apart(export, large, large_key, paths[1])
            before = apart(_verify, paths[0], SMALL_ROWS, small.public_key_pem)
            after = apart(_verify, paths[1], LARGE_ROWS, large.public_key_pem)
            grown_mib = then.peak_mib - first.peak_mib, after.peak_mib - before.peak_mib
            growths_mib.append(max(grown_mib))
            rates.append((LARGE_ROWS / then.took_s, LARGE_ROWS / after.took_s))
            bench.say(
                f"run {run}: export {grown_mib[0]:.1f} MiB more, {rates[-1][0]:,.0f} rows/s; "
                f"verify {grown_mib[1]:.1f} MiB more, {rates[-1][1]:,.0f} rows/s"
            )
    growth_mib = statistics.median(growths_mib)
    exported, verified = (statistics.median(each) for each in zip(*rates, strict=True))
    return Outcome(
        growth_mib,
        GROWTH_MIB_MAX,
        GROWTH_MIB_MAX / max(growth_mib, GROWTH_MIB_MIN),
        RUNS_OF_LIKE,
        f"{min(growths_mib):.1f} to {max(growths_mib):.1f} MiB; at 1 M rows, {then.bytes / 1e6:.0f} MB: "
        f"export {exported:,.0f} rows/s, peak {then.peak_mib:.0f} MiB; verify {verified:,.0f} rows/s, "
        f"peak {after.peak_mib:.0f} MiB",
    )


def build(bench: Bench, database: Database, folder: Path, tenant_id: str, entries: int) -> tuple[Chain, Path]:
    """A chain with its checkpoint, and the file of the key that signed both."""
    began_s = time.monotonic()
    path = folder / f"{tenant_id}.pem"
    signer = private_keys.generate(path)
    wait_for(build_chain(database.superuser_url, tenant_id, entries, signer))
    wait_for(_sign_checkpoint(database.superuser_url, tenant_id, signer))
    bench.say(f"a chain of {entries:,} rows was made in {time.monotonic() - began_s:.0f} s")
    return Chain(database.service_url, tenant_id, entries, signer.public_key_pem), path


async def _sign_checkpoint(url: str, tenant_id: str, signer: FileSigner) -> None:
    connection = await asyncpg.connect(url)
    try:
        where = "WHERE tenant_id = $1"
        row = await connection.fetchrow(f"SELECT tree_size, root_hash FROM scheduler.merkle_head {where}", tenant_id)
        assert row is not None
        checkpoint = Checkpoint(f"{_LOG_ORIGIN}/{tenant_id}", row["tree_size"], bytes.fromhex(row["root_hash"]))
        note = sign_checkpoint(checkpoint, signer)
        await connection.execute(f"UPDATE scheduler.merkle_head SET checkpoint = $2 {where}", tenant_id, note)
    finally:
        await connection.close()


def export(chain: Chain, key: Path, path: Path) -> Exported:
    """Write the bundle of a chain; to be run apart."""
    return uvloop.run(_export_all(chain, key, path))


def retention_reader(pool: Pool, ring: Keyring) -> RetentionReader:
    """Reads what left the chains, which is nothing."""

    async def keyring() -> Keyring:
        return ring

    check = EntryCheck(lambda _: None)
    return RetentionReader(pool=pool, check=check, keyring=keyring, origin=lambda tenant: f"{_LOG_ORIGIN}/{tenant}")


async def _export_all(chain: Chain, key: Path, path: Path) -> Exported:
    signer = private_keys.load(str(key))

    async def keyring(_: str) -> Keyring:
        return Keyring([signer.public_key])

    async def signed_already(_: str) -> None:
        return None

    async with asyncpg.create_pool(chain.url, min_size=1, max_size=2) as pool:
        exporter = BundleExporter(
            pool=pool,
            node=Node("bench", "local", "gate", "0" * 32, Epoch(1), Clock("bench", 5000)),
            log_origin=_LOG_ORIGIN,
            signer=lambda: signer,
            keyring=keyring,
            retention=retention_reader(pool, Keyring([signer.public_key])),
            sign_now=signed_already,
        )
        began_s = time.perf_counter()
        with path.open("wb") as file:
            async with aclosing(exporter.export(chain.tenant_id)) as pieces:
                async for piece in pieces:
                    file.write(piece)
        took_s = time.perf_counter() - began_s
    return Exported(took_s, peak_memory_mib(), path.stat().st_size)


def _verify(path: Path, entries: int, public_key_pem: str) -> Verified:
    began_s = time.perf_counter()
    found = asyncio.run(verify_file(path, Keyring.of([public_key_pem])))
    took_s = time.perf_counter() - began_s
    verdict = found.verdict
    skipped = {"checkpoint", "projection"}
    wrong = [aspect for aspect, result in verdict["verdicts"].items() if result != "ok" and aspect not in skipped]
    expect(not wrong, f"the bundle does not hold: {wrong}, {verdict['first_break']}")
    # No checkpoint from outside is known here; the bundle's own was compared with its entries.
    expect(verdict["compared_with"] == "bundle", f"it was compared with {verdict['compared_with']}")
    expect(verdict["entries_checked"] == entries, f"{verdict['entries_checked']} entries were checked")
    expect(verdict["signed_to_seq"] == entries, f"it is signed to seq {verdict['signed_to_seq']}")
    return Verified(took_s, peak_memory_mib())


RATE = Row(
    "verify_bundle",
    "rows/s",
    0.85,
    "verification of a bundle from its file: container, digests, manifest, links, payloads, snapshots, tree, "
    "checkpoint; against verifying the same chain straight from PostgreSQL",
    measure_rate,
)
GROWTH = Row(
    "bundle_growth_mib",
    "MiB",
    1.0,
    "growth of peak resident memory, of exporting and of verifying a bundle, whichever is larger, from 100 k to 1 M "
    "rows, against the 100 MiB allowed",
    measure_growth,
)
