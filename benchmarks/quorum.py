"""``quorum_*``: appends committed by a quorum of three safekeepers on this machine, against durable in one log alone.

Both sides: each writer is an asyncio task that appends a record and awaits it before the next. Ours waits until a
majority of three ``tally safekeeper serve``, each a process, has synced it, and the own log; the other until one log
has, as it was when the floor was set (decision 0051). What a writer waits in the median is printed for both, and what
today's own log does alone.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import statistics
import time
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import NamedTuple

import uvloop

from app.runtime.state.node import Watermark
from benchmarks.bench import Bench
from benchmarks.processes import safekeepers
from benchmarks.row import Outcome, Row, expect, interleave
from benchmarks.service_process import as_in_the_service
from benchmarks.wal_append import CLOSE_TIMEOUT_S, NODE_ID, PAYLOAD, PHYSICAL_MS, RECORD_BYTES, RECORD_TYPE, WAL_ID
from benchmarks.yardsticks import local_log
from ledger.errors import LedgerError
from ledger.hlc import Hlc
from ledger.positions import BEFORE_FIRST, Epoch, Lsn
from wal import reader
from wal.control import EpochStart
from wal.group_commit import GroupCommit
from wal.log import Log
from wal.queue import NO_FD
from wal.replication.configuration import NO_MEMBERS, AckMode
from wal.replication.file_log import TailReader
from wal.replication.leading import Members, Shipper
from wal.replication.proposer import Proposer

WAIT_TIMEOUT_S = 30.0
RUN = "ab" * 16


class Ran(NamedTuple):
    """One run: records a second, and the median of what a writer waited for one."""

    rate: float
    p50_s: float


def measure(bench: Bench, writers: int, records: int) -> Outcome:
    """``writers`` concurrent writers with ``records`` records between them."""
    waited: dict[str, list[float]] = {"ours": [], "against": []}

    def replicated() -> float:
        ran = _own(bench, writers, records, is_replicated=True)
        waited["ours"].append(ran.p50_s)
        return ran.rate

    def frozen() -> float:
        with bench.fresh_folder() as folder:
            ran = uvloop.run(_append_frozen(folder, writers, records))
        waited["against"].append(ran.p50_s)
        return ran.rate

    with as_in_the_service():
        rates = interleave(bench, replicated, frozen)
        today = _own(bench, writers, records, is_replicated=False)
    ours, against = (statistics.median(waited[side]) for side in ("ours", "against"))
    return rates.outcome(
        f"median wait {ours * 1e6:.0f} us against {against * 1e6:.0f} us, {ours / against:.2f} times; today's own log "
        f"alone {today.rate:,.0f}/s, {today.p50_s * 1e6:.0f} us"
    )


def _own(bench: Bench, writers: int, records: int, *, is_replicated: bool) -> Ran:
    """One run of the node's own log, with safekeepers or without."""
    with bench.fresh_folder() as folder, ExitStack() as stack:
        addresses = stack.enter_context(safekeepers(folder)) if is_replicated else []
        ran = uvloop.run(_append(folder / "own", writers, records, addresses))
        expect(sum(1 for _ in reader.read(folder / "own", Lsn(1), NODE_ID)) >= records, "a record cannot be read")
    return ran


async def _append_frozen(folder: Path, writers: int, records: int) -> Ran:
    """One run of the log as it was."""
    loop, durable = asyncio.get_running_loop(), local_log.Watermark()
    log = local_log.LocalLog(folder, NODE_ID, lambda lsn: loop.call_soon_threadsafe(durable.advance, lsn))
    logical, waits = itertools.count(1), list[float]()

    async def write(count: int) -> None:
        for _ in range(count):
            began_s = time.perf_counter()
            await durable.reached(log.append(PHYSICAL_MS, next(logical), RECORD_TYPE, PAYLOAD))
            waits.append(time.perf_counter() - began_s)

    began_s = time.perf_counter()
    await asyncio.gather(*(write(records // writers) for _ in range(writers)))
    took_s = time.perf_counter() - began_s
    await asyncio.to_thread(log.close)
    size = sum(path.stat().st_size for path in folder.iterdir())
    expect(size >= records * RECORD_BYTES, f"the frozen log holds {size} bytes of {records} records")
    return Ran(records / took_s, statistics.median(waits))


async def _append(folder: Path, writers: int, records: int, addresses: list[str]) -> Ran:
    loop = asyncio.get_running_loop()
    folder.mkdir()
    durable, committed = Watermark("durable"), Watermark("committed")
    failures: list[LedgerError] = []
    shipper = _shipper(folder, addresses, loop, committed, failures) if addresses else None

    def woken() -> None:
        os.eventfd_read(fd)
        hear()

    def hear() -> None:
        for _ in writer.take_durable():
            pass
        durable.advance(writer.durable_lsn)

    fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
    log = Log(folder, node_id=NODE_ID, wal_id=WAL_ID, epoch=Epoch(1), next_lsn=Lsn(1))
    shipper_fd = shipper.wake_fd if shipper else NO_FD
    writer = GroupCommit(log, durable_fd=fd, shipper_fd=shipper_fd, on_failure=failures.append)
    loop.add_reader(fd, woken)
    reached = durable if shipper is None else committed
    hlcs = iter([Hlc(PHYSICAL_MS, lsn, NODE_ID) for lsn in range(records + 1)])
    if shipper is not None:
        shipper.start(writer)
        await reached.reached(writer.append(next(hlcs), RECORD_TYPE, PAYLOAD), WAIT_TIMEOUT_S)
    waits: list[float] = []

    async def write(count: int) -> None:
        for _ in range(count):
            began_s = time.perf_counter()
            await reached.reached(writer.append(next(hlcs), RECORD_TYPE, PAYLOAD), WAIT_TIMEOUT_S)
            waits.append(time.perf_counter() - began_s)

    began_s = time.perf_counter()
    await asyncio.gather(*(write(records // writers) for _ in range(writers)))
    took_s = time.perf_counter() - began_s
    await asyncio.to_thread(writer.close, CLOSE_TIMEOUT_S)
    hear()
    loop.remove_reader(fd)
    if shipper is not None:
        await asyncio.to_thread(shipper.close, CLOSE_TIMEOUT_S)
    os.close(fd)
    expect(not failures, f"it failed: {failures}")
    return Ran(records / took_s, statistics.median(waits))


def _shipper(
    folder: Path,
    addresses: list[str],
    loop: asyncio.AbstractEventLoop,
    committed: Watermark,
    failures: list[LedgerError],
) -> Shipper:
    members = Members(dict.fromkeys(addresses, "local"), RUN)

    def told(committed_lsn: Lsn, _: Mapping[str, Lsn]) -> None:
        loop.call_soon_threadsafe(committed.advance, committed_lsn)

    history = (EpochStart(Epoch(1), Lsn(1)),)

    def make(shipper: Shipper) -> Proposer:
        return Proposer(
            node_id=NODE_ID,
            run=RUN,
            wal_id=WAL_ID,
            epoch=Epoch(1),
            history=history,
            configuration=NO_MEMBERS,
            home="local",
            ack_mode=AckMode.REPLICATED_QUORUM,
            addresses=members.addresses,
            committed_lsn=BEFORE_FIRST,
            read=shipper.tail.read,
            oldest_lsn=lambda: Lsn(1),
            send=shipper.send,
            drop=shipper.drop,
            on_configured=lambda _: None,
        )

    return Shipper(
        members,
        make,
        on_reached=told,
        on_acknowledged=lambda _: None,
        on_over=failures.append,
        tail=TailReader(folder, NODE_ID, history),
        report=lambda *_: None,
        lag_threshold=1 << 60,
        keeps_damaged=False,
    )


def _row(writers: int, records: int, floor: float) -> Row:
    return Row(
        f"quorum_{writers}",
        "records/s",
        floor,
        f"appends of {RECORD_BYTES}-byte records by {writers} concurrent writers, committed by a majority of three "
        "safekeepers on this machine, against durable in one log alone as it was when the floor was set",
        partial(measure, writers=writers, records=records),
    )


WITH_64 = _row(64, 64_000, 0.6)
WITH_1000 = _row(1000, 150_000, 0.8)
