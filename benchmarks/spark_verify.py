"""``spark_verify_archive``: ``tally pipeline verify`` of an archive on two cores against one process doing the same.

Ours is the whole command, from the start of Python and Java to its exit. Against is the verification alone, in a fresh
process that has loaded all it needs: links, payloads, snapshots, signatures and roots of the same Parquet files.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

import orjson

from benchmarks.apart import apart
from benchmarks.archived import build_archive
from benchmarks.bench import Bench
from benchmarks.row import Outcome, Row, expect, interleave
from pipeline.archive.chain_reader import verify_tenant
from pipeline.archive.reader import tenants_of
from pipeline.archive.store import ArchiveStore
from signing.keys import Keyring

ENTRIES: Final = 5_000_000
TENANTS: Final = 51
"""One has half of all entries, the others share the rest alike."""
MASTER: Final = "local[2]"
TIMEOUT_S: Final = 1800


def measure(bench: Bench) -> Outcome:
    """Rate of both."""
    with bench.fresh_folder() as folder:
        archive, key = folder / "archive", folder / "key.pem"
        began_s = time.monotonic()
        apart(build_archive, archive, key, TENANTS, ENTRIES)
        bench.say(f"an archive of {ENTRIES:,} entries was made in {time.monotonic() - began_s:.0f} s")
        at_work: list[float] = []

        def ours() -> float:
            took_s, at_work_s = _on_spark(archive, key, folder)
            at_work.append(at_work_s / took_s)
            return ENTRIES / took_s

        rates = interleave(bench, ours, lambda: ENTRIES / apart(_in_one_process, archive, key))
    share = sum(at_work) / len(at_work)
    return rates.outcome(f"{ENTRIES:,} entries of {TENANTS} tenants, one of them half; {share:.0%} of ours is work")


def _on_spark(archive: Path, key: Path, folder: Path) -> tuple[float, float]:
    """Seconds of the whole command, and of the work in it."""
    arguments = ("verify", "--archive", archive, "--keys", key, "--master", MASTER, "--json")
    began_s = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "pipeline", *arguments],
        env={**os.environ, "TALLY_PIPELINE_LOGS": str(folder / "logs")},
        capture_output=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    took_s = time.perf_counter() - began_s
    expect(done.returncode == 0, f"the command ended with {done.returncode}: {done.stderr.decode()[-500:]}")
    told = orjson.loads(done.stdout)
    _expect_whole(told["tenants"])
    return took_s, told["seconds"]


def _in_one_process(archive: Path, key: Path) -> float:
    """Seconds to verify every tenant, one after the other."""
    store, keyring = ArchiveStore(str(archive)), Keyring.load(key)
    began_s = time.perf_counter()
    verdicts = [asyncio.run(verify_tenant(store, tenant, keyring)) for tenant in tenants_of(store)]
    took_s = time.perf_counter() - began_s
    _expect_whole(verdicts)
    return took_s


def _expect_whole(verdicts: list[dict[str, object]]) -> None:
    invalid = [each["tenant_id"] for each in verdicts if not each["valid"]]
    expect(not invalid, f"the archive does not hold: {invalid}")
    entries = sum(int(str(each["entries_checked"])) for each in verdicts)
    expect(entries == ENTRIES, f"{entries} entries were checked")


ROW = Row(
    "spark_verify_archive",
    "rows/s",
    1.5,
    "verification of an archive of 5 M entries on Spark, local[2], the start of Java included; against one process "
    "that verifies the same Parquet files",
    measure,
)
