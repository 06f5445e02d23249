"""``wal_append_*``: durable appends by many concurrent writers, against RocksDB replaying the batches they formed.

Ours: each writer is an asyncio task that appends a record and awaits its durability, with a deadline, before the
next, as a request of the service does; the WAL's thread rings a descriptor of the event loop, which wakes the tasks.
The interpreter is set as the service sets it.

Against: RocksDB gets the same records, keyed by LSN, in the same batches, each a synced WriteBatch, from one thread
that has nothing else to do. It is spared the event loop, the tasks, framing and forming the batches; on neither side
does the clock run while HLCs, or the keys made of LSNs, are made.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import uvloop
from rocksdict import Options, Rdict, WriteBatch, WriteOptions

from app.runtime.state.node import Watermark
from benchmarks.bench import Bench
from benchmarks.row import Outcome, Row, expect, interleave
from benchmarks.service_process import as_in_the_service
from ledger.errors import WalPoisonedError
from ledger.facts.events import JOB_EVENTS
from ledger.hlc import Hlc
from ledger.positions import Epoch, Lsn
from wal import reader, recovery
from wal.format import RECORD_HEADER_BYTES, encode_record
from wal.group_commit import GroupCommit
from wal.log import Log

RECORD_BYTES = 254
NODE_ID = "bench"
WAL_ID = "0" * 32
RECORD_TYPE = JOB_EVENTS["JobCreated"].record_type
PAYLOAD = bytes(range(256))[: RECORD_BYTES - RECORD_HEADER_BYTES]
PHYSICAL_MS = 1_704_931_200_000
CLOSE_TIMEOUT_S = 60.0
WAIT_TIMEOUT_S = 10.0
_SYNCED = "rocksdb.wal.synced COUNT : "


class Appended(NamedTuple):
    """What one run of the WAL did: its rate, and the records in each batch that it synced."""

    rate: float
    batches: Sequence[int]


def measure(bench: Bench, writers: int, records: int) -> Outcome:
    """``writers`` concurrent writers with ``records`` records between them."""
    assert records % writers == 0
    formed: list[Sequence[int]] = []

    def ours() -> float:
        with bench.fresh_folder() as folder:
            appended = uvloop.run(_append(folder, writers, records))
            recovered = recovery.recover(folder, NODE_ID)
            expect(recovered.records == records, f"the WAL holds {recovered.records} records, not {records}")
            expect(recovered.cut is None, "the WAL had a torn tail")
            expect(sum(1 for _ in reader.read(folder, Lsn(1), NODE_ID)) == records, "a record cannot be read back")
        expect(sum(appended.batches) == records, f"batches of {sum(appended.batches)} records were synced")
        formed.append(appended.batches)
        return appended.rate

    def against() -> float:
        with bench.fresh_folder() as folder:
            return _replay(folder, formed[-1])

    with as_in_the_service():
        rates = interleave(bench, ours, against)
    batches = formed[-1]
    return rates.outcome(f"last run: {len(batches)} batches of {records / len(batches):.0f} records, one fsync each")


async def _append(folder: Path, writers: int, records: int) -> Appended:
    loop = asyncio.get_running_loop()
    durable = Watermark("durable")
    failures: list[WalPoisonedError] = []
    batches: list[int] = []

    def woken() -> None:
        os.eventfd_read(fd)
        hear()

    def hear() -> None:
        batches.extend(batch.entries for batch in writer.take_durable())
        durable.advance(writer.durable_lsn)

    fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
    writer = GroupCommit(
        Log(folder, node_id=NODE_ID, wal_id=WAL_ID, epoch=Epoch(1), next_lsn=Lsn(1)),
        durable_fd=fd,
        on_failure=failures.append,
    )
    loop.add_reader(fd, woken)

    async def write(count: int) -> None:
        for _ in range(count):
            await durable.reached(writer.append(next(hlcs), RECORD_TYPE, PAYLOAD), WAIT_TIMEOUT_S)

    hlcs = iter([Hlc(PHYSICAL_MS, lsn, NODE_ID) for lsn in range(1, records + 1)])
    began_s = time.perf_counter()
    await asyncio.gather(*(write(records // writers) for _ in range(writers)))
    took_s = time.perf_counter() - began_s
    await asyncio.to_thread(writer.close, CLOSE_TIMEOUT_S)
    hear()
    loop.remove_reader(fd)
    os.close(fd)
    expect(not failures, f"the WAL failed: {failures}")
    return Appended(records / took_s, batches)


def _replay(folder: Path, batches: Sequence[int]) -> float:
    """Rate of RocksDB over the same records in the same batches."""
    records = sum(batches)
    # Made before the clock starts: the key, and the value as it stands in the WAL.
    rows = [
        (lsn.to_bytes(8, "big"), encode_record(Lsn(lsn), Hlc(PHYSICAL_MS, lsn, NODE_ID).pack(), RECORD_TYPE, PAYLOAD))
        for lsn in range(1, records + 1)
    ]
    options = Options(raw_mode=True)
    options.create_if_missing(True)
    options.enable_statistics()
    synced = WriteOptions()
    synced.sync = True
    database = Rdict(str(folder / "rocksdb"), options)
    try:
        at = 0
        began_s = time.perf_counter()
        for entries in batches:
            batch = WriteBatch(raw_mode=True)
            put = batch.put
            for key, value in rows[at : at + entries]:
                put(key, value)
            database.write(batch, synced)
            at += entries
        took_s = time.perf_counter() - began_s
        syncs = _syncs(options.get_statistics() or "")
        expect(syncs >= len(batches), f"RocksDB synced its log {syncs} times for {len(batches)} batches")
        expect(sum(1 for _ in database.items()) == records, f"RocksDB does not hold {records} records")
    finally:
        database.close()
    return records / took_s


def _syncs(statistics: str) -> int:
    line = next((line for line in statistics.splitlines() if line.startswith(_SYNCED)), _SYNCED + "0")
    return int(line.removeprefix(_SYNCED))


def _row(writers: int, records: int, floor: float) -> Row:
    return Row(
        f"wal_append_{writers}",
        "records/s",
        floor,
        f"durable appends of {RECORD_BYTES}-byte records by {writers} concurrent writers, against RocksDB synced "
        "WriteBatches replaying the batches that the WAL formed",
        partial(measure, writers=writers, records=records),
    )


WITH_64 = _row(64, 128_000, 0.95)
WITH_1000 = _row(1000, 300_000, 1.5)
