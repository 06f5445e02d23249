"""``python -m benchmarks [ROW...]``: run the rows named, or in ``ROWS``, or all but the long ones; write and show the
results.

The exit code is 0 when every row was measured, floors missed or not, and 1 when one failed.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from pathlib import Path

from rich.console import Console

from benchmarks import (
    bundle,
    bundle_import,
    bytes_kept,
    exchange,
    flood,
    herds,
    ingest,
    ingest_created,
    job_index,
    job_proof,
    machine,
    proof,
    propose,
    prune,
    quorum,
    read_jobs,
    report,
    signed,
    spark_verify,
    submit,
    summary,
    verify,
    wal_append,
    wal_recovery,
    watch,
)
from benchmarks.bench import Bench
from benchmarks.row import BenchmarkError, Outcome, Row

ROWS: tuple[Row, ...] = (
    wal_append.WITH_64,
    wal_append.WITH_1000,
    wal_recovery.ROW,
    quorum.WITH_64,
    quorum.WITH_1000,
    ingest.ROW,
    ingest_created.ROW,
    submit.LOCAL,
    submit.LOCAL_TOKENS,
    submit.LOCAL_ETCD,
    submit.QUORUM_ETCD,
    submit.GLOBAL,
    signed.CHECK,
    signed.LINES,
    propose.ETCD,
    read_jobs.READ,
    read_jobs.LIST,
    summary.ROW,
    verify.RATE,
    verify.SERVICE,
    verify.GROWTH,
    bundle.RATE,
    bundle_import.RATE,
    bytes_kept.ROW,
    job_index.ROW,
    proof.ROW,
    watch.ROW,
    prune.ROW,
    exchange.GLOBAL_P50,
    exchange.GLOBAL_P99,
    spark_verify.ARCHIVE,
)
BY_NAME: tuple[Row, ...] = (
    bundle.GROWTH,
    bundle_import.GROWTH,
    exchange.LAG,
    flood.ROW,
    herds.ROW,
    job_proof.ROW,
    spark_verify.SCALING_ARCHIVE,
    spark_verify.SCALING_POSTGRES,
)
"""Long ones, which are run when they are named."""
HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results" / "latest.json"
FOLDER = HERE.parent / "var"


def main() -> int:
    """Run, store, show; the exit code."""
    console = Console(stderr=True)
    chosen = _chosen(sys.argv[1:] or os.environ.get("ROWS", "").split())
    found: list[tuple[Row, Outcome]] = []
    failed: dict[str, str] = {}
    began_s = time.monotonic()
    bench = Bench(Path(os.environ.get("BENCH_DIR") or FOLDER), console)
    try:
        fsync_p50_us = machine.fsync_p50_us(bench.folder)
        described = machine.describe(bench.folder, None)
        bench.say(f"fsync p50 {fsync_p50_us:,.0f} us in {bench.folder}")
        for row in chosen:
            _run(row, bench, console, found, failed)
        described["postgresql"] = bench.postgres_version()
    finally:
        bench.close()
    report.store(RESULTS, report.document(machine.commit(), described, fsync_p50_us, found))
    out = Console()
    report.notes(out, found, failed)
    out.print(report.table(found, failed))
    out.print(
        f"fsync p50 {fsync_p50_us:,.0f} us; {time.monotonic() - began_s:.0f} s in all; {RESULTS}", highlight=False
    )
    return 1 if failed else 0


def _chosen(names: list[str]) -> list[Row]:
    known = {row.name: row for row in (*ROWS, *BY_NAME)}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise SystemExit(f"there is no row {', '.join(unknown)}; there are {', '.join(known)}")
    return [known[name] for name in names] or list(ROWS)


def _run(row: Row, bench: Bench, console: Console, found: list[tuple[Row, Outcome]], failed: dict[str, str]) -> None:
    """Measure one row; whatever goes wrong fails this row alone."""
    console.print(f"[bold]{row.name}[/]")
    began_s = time.monotonic()
    try:
        found.append((row, row.measure(bench)))
    except Exception as error:
        if not isinstance(error, BenchmarkError):
            traceback.print_exc()
        failed[row.name] = f"{type(error).__name__}: {error}"
    bench.say(f"took {time.monotonic() - began_s:.0f} s")


if __name__ == "__main__":
    sys.exit(main())
