"""Verification of 5 M entries of 50 tenants on Spark, one of them half: against one process, and on one core.

``spark_verify_archive``: the whole command on two cores, from the start of Python and Java to its exit, against the
verification alone in a fresh process that has loaded all it needs: links, payloads, snapshots, signatures and roots of
the same Parquet files. ``spark_scaling_...``: the same command on two cores against one, from an archive and from
PostgreSQL, which has the job states besides and runs on the same cores.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from benchmarks.apart import apart
from benchmarks.archived import build_archive, shares
from benchmarks.bench import Bench, execute, wait_for
from benchmarks.chains import build_chain
from benchmarks.row import RUNS_OF_LIKE, Outcome, Row, interleave
from benchmarks.spark_command import SparkRun, expect_whole, verify_on_spark
from objects.store import ArchiveStore
from pipeline.archive.reader import tenants_of, verify_tenant
from signing import private_keys
from signing.keys import Keyring

ENTRIES: Final = 5_000_000
TENANTS: Final = 50
"""One has half of all entries, the others share the rest alike."""
CORES: Final = 2


def against_one_process(bench: Bench) -> Outcome:
    """Rate of the command on an archive, and of one process."""
    with bench.fresh_folder() as folder:
        archive, key = _archive(bench, folder)
        runs: list[SparkRun] = []
        rates = interleave(
            bench,
            _rate(runs, CORES, folder, "--archive", archive, "--keys", key),
            lambda: ENTRIES / apart(_in_one_process, archive, key),
            RUNS_OF_LIKE,
        )
    return rates.outcome(_note(runs))


def scaling_from_archive(bench: Bench) -> Outcome:
    """Rate on two cores and on one."""
    with bench.fresh_folder() as folder:
        archive, key = _archive(bench, folder)
        return _scaling(bench, folder, "--archive", archive, "--keys", key)


def scaling_from_postgres(bench: Bench) -> Outcome:
    """Rate on two cores and on one."""
    with bench.fresh_folder() as folder, bench.fresh_database() as database:
        key = folder / "key.pem"
        signer = private_keys.generate(key)
        began_s = time.monotonic()
        execute(
            database.superuser_url,
            "INSERT INTO scheduler.ledger_identity (log_origin) VALUES ('log.bench') ON CONFLICT DO NOTHING",
        )
        for tenant, entries in shares(TENANTS, ENTRIES):
            wait_for(build_chain(database.superuser_url, tenant, entries, signer))
        bench.say(f"{ENTRIES:,} entries were stored in {time.monotonic() - began_s:.0f} s")
        bench.checkpoint()
        return _scaling(bench, folder, "--dsn", database.service_url, "--keys", key)


def _scaling(bench: Bench, folder: Path, *arguments: str | Path) -> Outcome:
    runs: list[SparkRun] = []
    on_both, on_one = (_rate(runs, cores, folder, *arguments) for cores in (CORES, 1))
    return interleave(bench, on_both, on_one, RUNS_OF_LIKE).outcome(_note(runs))


def _rate(runs: list[SparkRun], cores: int, folder: Path, *arguments: str | Path) -> Callable[[], float]:
    """A run of the command, which gives its rate and is added to ``runs``."""

    def run() -> float:
        runs.append(verify_on_spark(*arguments, cores=cores, entries=ENTRIES, folder=folder))
        return ENTRIES / runs[-1].took_s

    return run


def _archive(bench: Bench, folder: Path) -> tuple[Path, Path]:
    """An archive and the key that signed it."""
    archive, key = folder / "archive", folder / "key.pem"
    began_s = time.monotonic()
    apart(build_archive, archive, key, TENANTS, ENTRIES)
    bench.say(f"an archive of {ENTRIES:,} entries was made in {time.monotonic() - began_s:.0f} s")
    return archive, key


def _in_one_process(archive: Path, key: Path) -> float:
    """Seconds to verify every tenant, one after the other."""
    store, keyring = ArchiveStore(str(archive)), Keyring.load(key)
    began_s = time.perf_counter()
    verdicts = [asyncio.run(verify_tenant(store, tenant, keyring)) for tenant in tenants_of(store)]
    took_s = time.perf_counter() - began_s
    expect_whole(verdicts, ENTRIES)
    return took_s


def _note(runs: list[SparkRun]) -> str:
    share = sum(run.at_work_s for run in runs) / sum(run.took_s for run in runs)
    peaks = (f"{kind} {max(run.peaks_mib[kind] for run in runs)}" for kind in runs[0].peaks_mib)
    return (
        f"{ENTRIES:,} entries of {TENANTS} tenants, one of them half; {share:.0%} of the command is work; "
        f"most MiB of one process: {', '.join(peaks)}"
    )


ARCHIVE: Final = Row(
    "spark_verify_archive",
    "rows/s",
    1.5,
    "verification of an archive of 5 M entries on Spark, local[2], the start of Java included; against one process "
    "that verifies the same Parquet files",
    against_one_process,
)
SCALING_ARCHIVE: Final = Row(
    "spark_scaling_archive",
    "rows/s",
    1.3,
    "the same command on local[2]; against local[1]",
    scaling_from_archive,
)
SCALING_POSTGRES: Final = Row(
    "spark_scaling_postgres",
    "rows/s",
    1.3,
    "verification of 5 M entries in PostgreSQL on Spark, local[2], with their job states; against local[1]",
    scaling_from_postgres,
)
