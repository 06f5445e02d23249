"""Logs for tests: the real writer with batches as the test says, and a naive one that only knows the format."""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from zlib import crc32

from ledger.errors import WalPoisonedError
from ledger.hlc import Hlc
from ledger.positions import Epoch, Lsn
from wal.format import (
    BatchRecord,
    SegmentHeader,
    encode_batch,
    encode_record,
    encode_segment_header,
)
from wal.group_commit import GroupCommit
from wal.log import Log
from wal.queue import DurableBatch
from wal.reader import read
from wal.segment import segment_name

NODE = "node-a"
WAL_ID = "0123456789abcdef0123456789abcdef"
WAIT_S = 120.0
FULL = 2**64 - 2
"""The most that an eventfd holds: a writer of more waits until it is read."""


def hlc_of(lsn: int) -> Hlc:
    """The HLC that records of these logs have, so that a record read back can be checked by its LSN."""
    return Hlc(1_000_000 + lsn // 3, lsn % 3, NODE)


def payload_of(lsn: int) -> bytes:
    return b'{"n":%d}' % lsn


class Failure:
    """What a writer reports when it fails; apart from the writer, so that nothing but its test keeps that alive."""

    def __init__(self) -> None:
        self.errors: list[WalPoisonedError] = []
        self.came = threading.Event()

    def take(self, error: WalPoisonedError) -> None:
        self.errors.append(error)
        self.came.set()


class LogWriter:
    """A writer that can be waited for, and held in its reports: while its descriptor is a full one, it waits in the
    next until somebody makes room for that."""

    def __init__(
        self,
        folder: Path,
        *,
        epoch: int = 1,
        next_lsn: int = 1,
        previous_lsn: int | None = None,
        segment_bytes: int = 64 << 20,
        **settings: object,
    ) -> None:
        self.heard: list[DurableBatch] = []
        self._failure = Failure()
        self._hearing = threading.Lock()
        self._free = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._full: list[int] = []
        self._wake_fd = os.dup(self._free)
        log = Log(
            folder,
            node_id=NODE,
            wal_id=WAL_ID,
            epoch=Epoch(epoch),
            next_lsn=Lsn(next_lsn),
            previous_lsn=None if previous_lsn is None else Lsn(previous_lsn),
            segment_bytes=segment_bytes,
        )
        self.writer = GroupCommit(
            log,
            durable_fd=self._wake_fd,
            on_failure=self._failure.take,
            **settings,  # type: ignore[arg-type]
        )

    def __del__(self) -> None:
        if not hasattr(self, "writer") or self.writer.has_ended:
            for descriptor in (self._free, self._wake_fd, *self._full):
                os.close(descriptor)

    @property
    def failures(self) -> list[WalPoisonedError]:
        return self._failure.errors

    @property
    def told(self) -> list[int]:
        """The LSNs up to which it reported the log durable, in order."""
        with self._hearing:
            self.heard += self.writer.take_durable()
        return [batch.lsn for batch in self.heard]

    def append(self, payload: bytes | None = None) -> int:
        lsn = self.writer.next_lsn
        return self.writer.append(hlc_of(lsn), 1, payload_of(lsn) if payload is None else payload)

    def becomes_durable(self, lsn: int, within_s: float) -> bool:
        until_s = time.monotonic() + within_s
        fd = select.poll()  # also where a process has more than a thousand files open
        fd.register(self._free, select.POLLIN)
        while (is_missing := self.writer.durable_lsn < lsn) and time.monotonic() < until_s:
            # Of a report in which it is held, nobody is told: looked for each millisecond.
            if fd.poll(1):
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._free)
        return not is_missing

    def wait_durable(self, lsn: int) -> None:
        assert self.becomes_durable(lsn, WAIT_S)

    def wait_failure(self) -> WalPoisonedError:
        assert self._failure.came.wait(WAIT_S)
        return self.failures[0]

    def batches(self, sizes: Sequence[int]) -> None:
        """Write batches of exactly these numbers of records; the first of them must be 1."""
        assert sizes[0] == 1
        release = self.hold_reports()
        self.wait_durable(self.append())
        for size in sizes[1:]:
            # The writer stands in the report of the batch before: what it takes next is all of this one.
            for _ in range(size):
                last = self.append()
            os.eventfd_read(self._full[-1])
            self.wait_durable(last)
        release()

    def hold_reports(self) -> Callable[[], None]:
        """Let the writer thread stand in its next report until what is returned is called."""
        full = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_SEMAPHORE)
        os.eventfd_write(full, FULL)
        self._full.append(full)
        os.dup2(full, self._wake_fd, inheritable=False)
        return self._release

    def _release(self) -> None:
        os.dup2(self._free, self._wake_fd, inheritable=False)
        os.eventfd_read(self._full[-1])

    def close(self) -> None:
        self.writer.close(WAIT_S)

    def __enter__(self) -> LogWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()


def naive_segment(
    folder: Path,
    batches: Sequence[Sequence[int]],
    *,
    base_lsn: int = 1,
    epoch: int = 1,
    previous_lsn: int | None = None,
    node_id: str = NODE,
    wal_id: str = WAL_ID,
) -> Path:
    """A segment with these LSNs in these batches, written from the format alone."""
    before = base_lsn - 1 if previous_lsn is None else previous_lsn
    data = encode_segment_header(SegmentHeader(node_id, wal_id, epoch, base_lsn, before))
    for lsns in batches:
        data += naive_batch(lsns)
    path = folder / segment_name(base_lsn, epoch)
    path.write_bytes(data)
    return path


def naive_batch(lsns: Sequence[int]) -> bytes:
    body = b"".join(encode_record(lsn, hlc_of(lsn).pack(), 1, payload_of(lsn)) for lsn in lsns)
    return encode_batch(BatchRecord(lsns[0], lsns[-1], hlc_of(lsns[-1]).pack(), len(body), crc32(body))) + body


def lsns_in(folder: Path, from_lsn: int = 1) -> list[int]:
    """LSNs in the log, each record checked to be the one that was written."""
    lsns: list[int] = []
    for record in read(folder, from_lsn, NODE):
        assert record.hlc == hlc_of(record.lsn)
        assert record.payload == payload_of(record.lsn)
        lsns.append(record.lsn)
    return lsns


def snapshot(folder: Path) -> dict[str, bytes]:
    """Every file of a folder, to prove that nothing was changed."""
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def traced(strace: str, trace: str | Path, *what: str) -> list[str]:
    """strace of a process and its threads, which writes the calls that it is told of to ``trace``."""
    asked = [text for each in what for text in ("-e", each)]
    return [strace, "-f", "--quiet=exit", "--signal=none", "-o", str(trace), *asked]
