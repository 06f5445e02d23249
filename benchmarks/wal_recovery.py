"""``wal_recovery``: recovering a log of 256 MiB, against reading its bytes and their CRC alone.

The log is written by the WAL itself, in batches of 64 as 64 concurrent writers form them: the smaller the batches,
the more there is to do beside the CRC. Both sides find it in the page cache.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from zlib import crc32

from benchmarks.apart import apart
from benchmarks.bench import Bench
from benchmarks.machine import peak_memory_mib
from benchmarks.row import Outcome, Row, expect, interleave
from benchmarks.wal_append import CLOSE_TIMEOUT_S, NODE_ID, PAYLOAD, PHYSICAL_MS, RECORD_BYTES, RECORD_TYPE, WAL_ID
from ledger.errors import WalPoisonedError
from ledger.hlc import Hlc
from ledger.positions import Epoch, Lsn
from wal import recovery
from wal.group_commit import GroupCommit
from wal.log import Log
from wal.segment import list_segments

LOG_BYTES = 256 << 20
SMALL_LOG_BYTES = 16 << 20
BATCH_ENTRIES = 64
CHUNK_BYTES = 1 << 20
MEMORY_GROWTH_MIB_MAX = 4.0
"""A recovery that holds more than this of a log 16 times as long is not flat."""


def measure(bench: Bench) -> Outcome:
    """Recover in a fresh process, read and sum in another, in turn."""
    with bench.fresh_folder() as folder, bench.fresh_folder() as small:
        records = _write_log(folder, LOG_BYTES)
        _write_log(small, SMALL_LOG_BYTES)
        log_bytes = sum(segment.path.stat().st_size for segment in list_segments(folder))
        peaks: list[float] = []

        def ours() -> float:
            took_s, recovered, peak_mib = apart(_recover, folder)
            expect(recovered == records, f"recovery found {recovered} records, {records} were written")
            peaks.append(peak_mib)
            return log_bytes / took_s / (1 << 20)

        def against() -> float:
            took_s, read_bytes = apart(_read_and_sum, folder)
            expect(read_bytes == log_bytes, f"read {read_bytes} bytes of {log_bytes}")
            return log_bytes / took_s / (1 << 20)

        apart(_read_and_sum, folder)
        rates = interleave(bench, ours, against)
        growth_mib = max(peaks) - apart(_recover, small)[2]
    expect(growth_mib <= MEMORY_GROWTH_MIB_MAX, f"recovery took {growth_mib:.1f} MiB more for a log 16 times as long")
    return rates.outcome(
        f"{records:,} records in {log_bytes >> 20} MiB; peak memory {max(peaks):.0f} MiB, {growth_mib:+.1f} MiB "
        f"against a log of {SMALL_LOG_BYTES >> 20} MiB"
    )


def _write_log(folder: Path, log_bytes: int) -> int:
    """A log of about so many bytes; the number of its records."""
    records = log_bytes // RECORD_BYTES
    fd = os.eventfd(0, os.EFD_CLOEXEC)
    failed: list[WalPoisonedError] = []

    def on_failure(error: WalPoisonedError) -> None:
        failed.append(error)
        os.eventfd_write(fd, 1)

    writer = GroupCommit(
        Log(folder, node_id=NODE_ID, wal_id=WAL_ID, epoch=Epoch(1), next_lsn=Lsn(1)),
        batch_max_entries=BATCH_ENTRIES,
        durable_fd=fd,
        on_failure=on_failure,
    )
    for lsn in range(1, records + 1):
        while lsn - writer.durable_lsn > BATCH_ENTRIES * 16 and not failed:
            os.eventfd_read(fd)
        writer.append(Hlc(PHYSICAL_MS, lsn, NODE_ID), RECORD_TYPE, PAYLOAD)
    writer.close(CLOSE_TIMEOUT_S)
    os.close(fd)
    return records


def _recover(folder: Path) -> tuple[float, int, float]:
    """(seconds, records found, peak memory in MiB)."""
    began_s = time.perf_counter()
    recovered = recovery.recover(folder, NODE_ID)
    return time.perf_counter() - began_s, recovered.records, peak_memory_mib()


def _read_and_sum(folder: Path) -> tuple[float, int]:
    """(seconds, bytes read)."""
    paths: Sequence[Path] = [segment.path for segment in list_segments(folder)]
    buffer = bytearray(CHUNK_BYTES)
    view = memoryview(buffer)
    total = 0
    began_s = time.perf_counter()
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        crc = 0
        while read := os.readv(descriptor, (view,)):
            crc = crc32(view[:read], crc)
            total += read
        os.close(descriptor)
    return time.perf_counter() - began_s, total


ROW = Row(
    "wal_recovery",
    "MiB/s",
    0.8,
    "recovery of a log of 256 MiB in batches of 64 records, against reading the bytes and their CRC32 only",
    measure,
)
