"""A disk that keeps a copy of a log, and forgets at a crash what was not synced: all of it, or its end.

A change of several steps may be broken off between any two. Steps are those of the files: the control file and the list
of members are replaced as a whole, segments are set aside one by one, the newest first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from random import Random
from typing import NamedTuple

from ledger.errors import WalError
from ledger.hlc import Hlc
from ledger.positions import BEFORE_FIRST, NO_EPOCH, Epoch, Lsn, after, before
from wal.control import Control, History, begin_epoch, epoch_of, history_since, history_up_to
from wal.format import BATCH_RECORD_BYTES, HLC_AT, RECORD, RECORD_HEADER_BYTES, batch_of, decode_batch, encode_batch
from wal.replication.configuration import NO_MEMBERS, Configuration
from wal.replication.file_log import Chunk
from wal.replication.messages import Position

READ_RECORDS_MAX = 4
"""Few, so that who is behind is given the log in many parts."""
NODE = "node-a"
WAL_ID = "0123456789abcdef0123456789abcdef"


class CrashError(Exception):
    """The process ends here, in the middle of what it does."""


class Record(NamedTuple):
    """One record as it stands in a segment."""

    lsn: Lsn
    data: bytes

    @property
    def payload(self) -> bytes:
        return self.data[RECORD_HEADER_BYTES:]


@dataclass
class Segment:
    epoch: Epoch
    records: list[Record] = field(default_factory=list)


class Disk:
    """What is durable. ``on_append(epoch, records, previous)`` is told of all that is written, synced or not."""

    def __init__(self, rng: Random) -> None:
        self.rng = rng
        self.crash_in: int | None = None
        """So many steps are done yet; then the process crashes."""
        self.on_append: Callable[[Epoch, list[Record], tuple[Epoch, Record] | None], None] = lambda *_: None
        self.wipe()

    def wipe(self) -> None:
        """Empty, and so the disk of another member."""
        self.control = Control(WAL_ID, NODE, NO_EPOCH, Hlc(0, 0, NODE), member_id=f"{self.rng.getrandbits(128):032x}")
        self.configuration = NO_MEMBERS
        self.segments: list[Segment] = []
        self.next_lsn = Lsn(1)
        """What comes first, where there is no record."""
        self.unsynced: list[tuple[Epoch, Record]] = []
        self.crash_in = None

    def step(self) -> None:
        """Something is about to become durable."""
        if self.crash_in is not None:
            self.crash_in -= 1
            if self.crash_in < 0:
                raise CrashError

    def write(self, written: list[tuple[Epoch, Record]]) -> None:
        for epoch, record in written:
            if not self.segments or self.segments[-1].epoch != epoch:
                self.segments.append(Segment(epoch))
            self.segments[-1].records.append(record)

    def crash(self) -> None:
        """Of what was not synced, a beginning stays."""
        self.write(self.unsynced[: self.rng.randint(0, len(self.unsynced))])
        self.unsynced = []
        self.crash_in = None

    def records(self) -> Iterator[tuple[Epoch, Record]]:
        """What is durable."""
        for segment in self.segments:
            for record in segment.records:
                yield segment.epoch, record

    @property
    def first_lsn(self) -> Lsn:
        return self.segments[0].records[0].lsn if self.segments else self.next_lsn

    @property
    def last_lsn(self) -> Lsn:
        return self.segments[-1].records[-1].lsn if self.segments else before(self.next_lsn)

    def trim(self, first_lsn: Lsn) -> None:
        """Records below are dropped, except the last one."""
        for segment in self.segments:
            segment.records = [record for record in segment.records if record.lsn >= min(first_lsn, self.last_lsn)]
        self.segments = [segment for segment in self.segments if segment.records]


class SimLog:
    """A copy of a log on such a disk, with the methods of ``FileLog`` that the rules use."""

    def __init__(self, disk: Disk) -> None:
        self.disk = disk
        self._history: History = ()
        self._first_lsn, self._last_lsn = Lsn(1), BEFORE_FIRST
        self._reopen()

    @property
    def control(self) -> Control:
        return self.disk.control

    @property
    def configuration(self) -> Configuration:
        return self.disk.configuration

    @property
    def first_lsn(self) -> Lsn:
        return max(self.disk.first_lsn, self._first_lsn)

    @property
    def tail(self) -> Position:
        return Position(epoch_of(self._history, self._last_lsn) or NO_EPOCH, self._last_lsn)

    @property
    def history(self) -> History:
        return self._history

    def store(self, control: Control) -> None:
        disk = self.disk
        durable_lsn = before(disk.unsynced[0][1].lsn) if disk.unsynced else min(disk.last_lsn, self._last_lsn)
        committed_lsn = min(control.committed_lsn, durable_lsn)
        generation = disk.configuration.generation
        disk.step()
        disk.control = control._replace(
            durable_lsn=durable_lsn, committed_lsn=committed_lsn, generation=generation, history=self._history
        )

    def configure(self, configuration: Configuration) -> None:
        self.disk.step()
        self.disk.configuration = configuration
        self.store(self.control)

    def append(self, written_in: Epoch, batches: bytes | memoryview) -> None:
        if not self._history or self._history[-1].epoch < written_in:
            self.sync()
            self._history = begin_epoch(self._history, written_in, after(self._last_lsn))
        if self._history != self.control.history:
            self.store(self.control)
        records = records_of(bytes(batches))
        self.disk.on_append(written_in, records, self._last())
        self.disk.unsynced += [(written_in, record) for record in records]
        self._last_lsn = records[-1].lsn

    def sync(self) -> None:
        self.disk.step()
        self.disk.write(self.disk.unsynced)
        self.disk.unsynced = []

    def truncate(self, last_lsn: Lsn) -> None:
        disk = self.disk
        self.sync()
        if last_lsn < self.control.committed_lsn:
            raise WalError(f"committed up to LSN {self.control.committed_lsn}, above {last_lsn}")
        if disk.segments and last_lsn + 1 < disk.first_lsn:
            raise WalError(f"the log begins with LSN {disk.first_lsn}; it cannot end with {last_lsn}")
        self.store(self.control)
        disk.step()
        disk.control = disk.control._replace(durable_lsn=last_lsn)
        disk.next_lsn = disk.first_lsn
        while disk.segments and disk.segments[-1].records[0].lsn > last_lsn:
            disk.step()
            disk.segments.pop()
        if disk.last_lsn > last_lsn:
            disk.step()
            records = disk.segments[-1].records
            disk.segments[-1].records = [record for record in records if record.lsn <= last_lsn]
        self._reopen()

    def begin_at(self, first_lsn: Lsn, history: History) -> None:
        self.sync()
        self._history, self._last_lsn = (), BEFORE_FIRST
        self.store(self.control)
        self.disk.next_lsn = Lsn(1)
        while self.disk.segments:
            self.disk.step()
            self.disk.segments.pop()
        self._history, self._first_lsn, self._last_lsn = history, first_lsn, before(first_lsn)

    def read(self, from_lsn: Lsn, upto_lsn: Lsn, bytes_max: int) -> Chunk:
        self.sync()
        return self.read_written(from_lsn, upto_lsn, bytes_max)

    def read_written(self, from_lsn: Lsn, upto_lsn: Lsn, bytes_max: int) -> Chunk:
        """As ``read``, without making it durable: a node sends its members what it has not synced yet."""
        previous = Position(epoch_of(self._history, before(from_lsn)) or NO_EPOCH, before(from_lsn))
        if from_lsn > min(upto_lsn, self._last_lsn):
            return Chunk(previous, previous.epoch, previous.lsn, b"")
        if from_lsn < self.first_lsn:
            raise WalError(f"LSN {from_lsn} is no longer held")
        unsynced = [Segment(epoch, [record]) for epoch, record in self.disk.unsynced]
        segment = next(each for each in (*self.disk.segments, *unsynced) if each.records[-1].lsn >= from_lsn)
        start = from_lsn - segment.records[0].lsn
        count = min(READ_RECORDS_MAX, upto_lsn - from_lsn + 1)
        found = segment.records[start : start + count]
        return Chunk(previous, segment.epoch, found[-1].lsn, batch(found))

    def _last(self) -> tuple[Epoch, Record] | None:
        if self.disk.unsynced:
            return self.disk.unsynced[-1]
        if self.disk.segments:
            return self.disk.segments[-1].epoch, self.disk.segments[-1].records[-1]
        return None

    def _reopen(self) -> None:
        disk, control = self.disk, self.disk.control
        assert disk.last_lsn >= control.durable_lsn, f"{disk.last_lsn} is held, {control.durable_lsn} was durable"
        found: History = ()
        for segment in disk.segments:
            if not found or found[-1].epoch < segment.epoch:
                found = begin_epoch(found, segment.epoch, segment.records[0].lsn)
        self._first_lsn, self._last_lsn = disk.first_lsn, disk.last_lsn
        self._history = history_up_to(history_since(control.history or found, before(self._first_lsn)), self._last_lsn)
        if found and (not self._history or found[-1].epoch != self._history[-1].epoch):
            self._history = begin_epoch(self._history, *found[-1])
        if self._history != control.history:
            self.store(control)


def batch(records: list[Record]) -> bytes:
    """These records as one batch."""
    body = b"".join(record.data for record in records)
    last = records[-1]
    return encode_batch(batch_of(records[0].lsn, last.lsn, last.data[HLC_AT], body)) + body


def records_of(batches: bytes) -> list[Record]:
    """The records of batches that were checked."""
    records: list[Record] = []
    at = 0
    while at < len(batches):
        head = decode_batch(batches, at, len(batches))
        at += BATCH_RECORD_BYTES
        end = at + head.body_bytes
        while at < end:
            _, length, lsn, *_ = RECORD.unpack_from(batches, at)
            records.append(Record(Lsn(lsn), batches[at : at + length]))
            at += length
    return records
