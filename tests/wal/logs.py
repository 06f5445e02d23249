"""Logs for tests: the real writer with batches as the test says, and a naive one that only knows the format."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from zlib import crc32

from ledger.errors import WalPoisonedError
from ledger.hlc import Hlc
from wal.format import (
    BatchRecord,
    SegmentHeader,
    encode_batch,
    encode_record,
    encode_segment_header,
)
from wal.group_commit import GroupCommit
from wal.log import Log
from wal.reader import read
from wal.segment import segment_name

NODE = "node-a"
WAL_ID = "0123456789abcdef0123456789abcdef"
WAIT_S = 120.0


def hlc_of(lsn: int) -> Hlc:
    """The HLC that records of these logs have, so that a record read back can be checked by its LSN."""
    return Hlc(1_000_000 + lsn // 3, lsn % 3, NODE)


def payload_of(lsn: int) -> bytes:
    return b'{"n":%d}' % lsn


class LogWriter:
    """A writer that can be waited for. ``told`` are the LSNs that it reported durable, in order."""

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
        self.told: list[int] = []
        self.failures: list[WalPoisonedError] = []
        self._changed = threading.Condition()
        self._gate = threading.Event()
        self._gate.set()
        self.writer = GroupCommit(
            Log(
                folder,
                node_id=NODE,
                wal_id=WAL_ID,
                epoch=epoch,
                next_lsn=next_lsn,
                previous_lsn=previous_lsn,
                segment_bytes=segment_bytes,
            ),
            on_durable=self._durable,
            on_failure=self._failed,
            **settings,  # type: ignore[arg-type]
        )

    def _durable(self, lsn: int) -> None:
        with self._changed:
            self.told.append(lsn)
            gate = self._gate
            self._changed.notify_all()
        gate.wait(WAIT_S)

    def _failed(self, error: WalPoisonedError) -> None:
        with self._changed:
            self.failures.append(error)
            self._changed.notify_all()

    def append(self, payload: bytes | None = None) -> int:
        lsn = self.writer.next_lsn
        return self.writer.append(hlc_of(lsn), 1, payload_of(lsn) if payload is None else payload)

    def becomes_durable(self, lsn: int, within_s: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: bool(self.told) and self.told[-1] >= lsn, within_s)

    def wait_durable(self, lsn: int) -> None:
        assert self.becomes_durable(lsn, WAIT_S)

    def wait_failure(self) -> WalPoisonedError:
        with self._changed:
            assert self._changed.wait_for(lambda: bool(self.failures), WAIT_S)
        return self.failures[0]

    def batches(self, sizes: Sequence[int]) -> None:
        """Write batches of exactly these numbers of records; the first of them must be 1."""
        assert sizes[0] == 1
        self._gate = threading.Event()
        self.wait_durable(self.append())
        for size in sizes[1:]:
            # The writer stands in the report of the batch before: what it takes next is all of this one.
            for _ in range(size):
                last = self.append()
            with self._changed:
                gate, self._gate = self._gate, threading.Event()
            gate.set()
            self.wait_durable(last)
        self._gate.set()

    def hold_reports(self) -> threading.Event:
        """Let the writer thread stand in its next report until the event is set."""
        self._gate = threading.Event()
        return self._gate

    def close(self) -> None:
        self._gate.set()
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
