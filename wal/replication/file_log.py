"""A copy of a log in files: a WAL folder like that of a node, kept by a member of its quorum, or by the node itself
while it becomes the writer; and reading from a node's files what its members lack.

``FileLog`` collects in memory what is appended and writes it as one batch on ``sync``: so there are never two batches
that are not synced, which is what recovery relies on (``wal.recovery``). Every epoch has segments of its own.

``TailReader`` reads what was written last once for all members that follow closely, while it is in the page cache. For
a member that lags behind it looks up the place in the files once, then keeps it.
"""

from __future__ import annotations

import math
import os
import secrets
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple
from zlib import crc32

from ledger.errors import WalCorruptError, WalError
from ledger.hlc import Hlc
from ledger.positions import BEFORE_FIRST, NO_EPOCH, Epoch, Lsn, after, before
from wal import control as control_file
from wal import history as histories
from wal.control import Control
from wal.folder import FolderLock
from wal.format import (
    BATCH,
    BATCH_RECORD_BYTES,
    HLC_AT,
    WAL_ID_BYTES,
    BatchRecord,
    FormatError,
    batch_of,
    decode_batch,
    encode_batch,
)
from wal.history import History
from wal.log import Log, Room
from wal.reader import batches, records_of
from wal.reader import batches as batches_of
from wal.recovery import TornTail, recover
from wal.replication import configuration as configurations
from wal.replication.configuration import Configuration
from wal.replication.messages import EMPTY, Position
from wal.replication.replica_log import Chunk
from wal.segment import Segment, list_segments, open_regular, opened, read_header
from wal.truncation import CUT_PREFIX, remove_segments, set_aside, truncate

GATHERED_BYTES_MAX = 8 << 20
"""No more comes together in one batch; one that came as a longer one is written as it is."""


class FileLog:
    """The copy in ``folder``, of the log of ``node_id``, which MUST be closed again: it holds the folder's lock, unless
    the caller does.

    Where there is none yet, it is made with ``wal_id``, and with a random id of its keeper.

    Raises:
        WalLockedError: somebody else keeps it.
        WalCorruptError: it is damaged; nothing was changed.
        WalError: it is of another WAL.
    """

    def __init__(
        self,
        folder: Path,
        node_id: str,
        wal_id: str,
        *,
        segment_bytes: int = 64 << 20,
        lock: FolderLock | None = None,
    ) -> None:
        self._history: History = ()
        self._first_lsn, self._last_lsn = Lsn(1), BEFORE_FIRST
        self._log: Log | None = None
        self._written_in = NO_EPOCH
        self.cut: TornTail | None = None
        """What recovery cut, when the files were read the last time."""
        self._gathered: list[tuple[BatchRecord, memoryview]] = []
        """Batches that are appended and not written, each with its BATCH record, from ``_gathered_from`` on."""
        self._gathered_bytes = 0
        self._tail_of: tuple[History, Position] = (), EMPTY
        self._gathered_from = Lsn(1)
        self._lock = None if lock is not None else FolderLock(folder)
        try:
            self._folder, self._segment_bytes = folder, segment_bytes
            control = control_file.load(folder)
            if control is None:
                if list_segments(folder):
                    raise WalCorruptError(control_file.CONTROL_NAME, 0, f"{folder} holds segments and no control file")
                member_id = secrets.token_hex(WAL_ID_BYTES)
                control = Control(wal_id, node_id, NO_EPOCH, Hlc(0, 0, node_id), member_id=member_id)
                control_file.store(folder, control)
            if (control.node_id, control.wal_id) != (node_id, wal_id or control.wal_id):
                raise WalError(f"{folder} holds WAL {control.wal_id} of node {control.node_id}")
            self._control = control
            self._configuration = configurations.load(folder, control.generation)
            self._reopen()
        except BaseException:
            self._unlock()
            raise

    def close(self) -> None:
        """Write and sync what was appended, and unlock the folder.

        Raises:
            OSError, WalError: it may not be durable; the folder is unlocked all the same.
        """
        try:
            self._let_go()
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Unlock the folder as it is, after a failure: what was not synced may be gone."""
        if self._log is not None:
            self._log.abandon()
            self._log = None
        self._unlock()

    @property
    def control(self) -> Control:
        return self._control

    @property
    def configuration(self) -> Configuration:
        return self._configuration

    @property
    def first_lsn(self) -> Lsn:
        return self._first_lsn

    @property
    def durable_lsn(self) -> Lsn:
        """Everything up to here is synced."""
        return before(self._gathered_from)

    @property
    def tail(self) -> Position:
        history, tail = self._tail_of
        if history is not self._history or tail.lsn != self._last_lsn:
            tail = Position(histories.epoch_of(self._history, self._last_lsn) or NO_EPOCH, self._last_lsn)
            self._tail_of = self._history, tail
        return tail

    @property
    def history(self) -> History:
        return self._history

    def store(self, control: Control) -> None:
        durable_lsn = self.durable_lsn if self._gathered_from > self._first_lsn else BEFORE_FIRST
        control = control._replace(
            durable_lsn=durable_lsn,
            committed_lsn=min(control.committed_lsn, durable_lsn),
            chained_lsn=min(control.chained_lsn, control.committed_lsn, durable_lsn),
            signed_lsn=min(control.signed_lsn, control.chained_lsn, control.committed_lsn, durable_lsn),
            generation=self._configuration.generation,
            history=self._history,
        )
        control_file.store(self._folder, control)
        self._control = control

    def configure(self, configuration: Configuration) -> None:
        configurations.store(self._folder, configuration)
        self._configuration = configuration
        self.store(self._control)

    def append(self, written_in: Epoch, batches: bytes | memoryview) -> None:
        if self._log is None or written_in != self._written_in:
            self._begin(written_in)
        for batch, whole in _each(bytes(batches)):
            if self._gathered_bytes + batch.body_bytes > GATHERED_BYTES_MAX:
                self.sync()
            self._gathered.append((batch, whole))
            self._gathered_bytes += batch.body_bytes
            self._last_lsn = batch.last_lsn

    def sync(self) -> None:
        if not self._gathered:
            return
        assert self._log is not None
        if len(self._gathered) == 1:
            batch, whole = self._gathered[0]
            self._log.append(batch, whole[BATCH_RECORD_BYTES:])
        else:
            self._log.append(*self._as_one())
        self._log.sync()
        self._gathered, self._gathered_bytes = [], 0
        self._gathered_from = after(self._last_lsn)

    def room(self) -> Room | None:
        """Where another may go on with the last epoch, by whom ``wrote`` is to be called with what came of it; None
        where something is not written yet, or no segment of that epoch is begun."""
        if self._log is None or self._gathered or self._written_in != self._history[-1].epoch:
            return None
        return self._log.room(0)

    def wrote(self, offset: int, last_lsn: Lsn) -> None:
        """Batches up to this LSN stand in the room that was given, synced; it goes on at ``offset``."""
        assert self._log is not None
        assert not self._gathered
        self._log.wrote(offset, last_lsn)
        self._last_lsn, self._gathered_from = last_lsn, after(last_lsn)

    def _as_one(self) -> tuple[BatchRecord, bytes]:
        """What is gathered, as one batch."""
        body = b"".join(whole[BATCH_RECORD_BYTES:] for _, whole in self._gathered)
        return batch_of(self._gathered_from, self._last_lsn, self._gathered[-1][0].hlc, body), body

    def truncate(self, last_lsn: Lsn) -> None:
        self._let_go()
        self.store(self._control)  # with the whole history: until it is cut, the log is judged by that
        truncate(self._folder, self._control.node_id, last_lsn)
        self._control = self._control._replace(durable_lsn=last_lsn)
        self._reopen()

    def begin_at(self, first_lsn: Lsn, history: History) -> None:
        self._let_go()
        self._history, self._first_lsn, self._last_lsn, self._gathered_from = (), Lsn(1), BEFORE_FIRST, Lsn(1)
        self.store(self._control)
        for segment in reversed(list_segments(self._folder)):
            set_aside(self._folder, segment, CUT_PREFIX)
        self._first_lsn = self._gathered_from = first_lsn
        self._history, self._last_lsn = history, before(first_lsn)

    def remove_upto(self, lsn: Lsn) -> list[str]:
        """Remove segments that end at or below ``lsn``, which MUST be committed, durable, and needed by nobody; their
        names."""
        retire = self._log.retire if self._log is not None else lambda _: None
        removed = remove_segments(self._folder, min(lsn, self.durable_lsn), 0, math.inf, retire)
        if removed:
            self._first_lsn = list_segments(self._folder)[0].base_lsn
            if self._log is not None:
                self._log.check()
        return removed

    def read(self, from_lsn: Lsn, upto_lsn: Lsn, bytes_max: int) -> Chunk:
        self.sync()
        return read_chunk(self._folder, self._control.node_id, self._history, from_lsn, upto_lsn, bytes_max)

    def _unlock(self) -> None:
        if self._lock is not None:
            self._lock.release()

    # --- files ------------------------------------------------------------------------------------

    def _reopen(self) -> None:
        """Take the log as it stands in its files, recovered."""
        control = self._control
        found = recover(self._folder, control.node_id, control.durable_lsn)
        self.cut = found.cut
        known = control.history or found.history
        self._history = histories.up_to(histories.since(known, before(found.first_lsn)), found.last_lsn)
        if found.history and (not self._history or found.history[-1].epoch != self._history[-1].epoch):
            self._history = histories.begin(self._history, *found.history[-1])
        self._first_lsn, self._last_lsn = found.first_lsn, found.last_lsn
        self._gathered_from = after(self._last_lsn)
        if self._history != control.history:
            self.store(control)  # an epoch that was cut away wrote none of what comes next

    def _begin(self, written_in: Epoch) -> None:
        """What comes next was written in this epoch: it gets a segment of its own, known to the control file first."""
        self._let_go()
        if not self._history or self._history[-1].epoch < written_in:
            self._history = histories.begin(self._history, written_in, self._gathered_from)
        if self._history != self._control.history:
            self.store(self._control)
        for segment in list_segments(self._folder):
            if segment.base_lsn >= self._gathered_from:
                segment.path.unlink()  # without a record: whoever began it got no further
        self._written_in = written_in
        self._log = Log(
            self._folder,
            node_id=self._control.node_id,
            wal_id=self._control.wal_id,
            epoch=written_in,
            next_lsn=self._gathered_from,
            segment_bytes=self._segment_bytes,
        )

    def _let_go(self) -> None:
        if self._log is not None:
            self.sync()
            self._log.close()
            self._log = None


def oldest_whole_lsn(folder: Path) -> Lsn:
    """The oldest record of the log in ``folder`` behind which none is missing: those before a gap, where records were
    given up, do not count, nor those of a segment that is removed meanwhile."""
    oldest = Lsn(1)
    for segment in reversed(list_segments(folder)):
        try:
            previous_lsn = read_header(segment).previous_lsn
        except FileNotFoundError:
            break
        oldest = segment.base_lsn
        if previous_lsn != before(oldest):
            break
    return oldest


def read_chunk(folder: Path, node_id: str, history: History, from_lsn: Lsn, upto_lsn: Lsn, bytes_max: int) -> Chunk:
    """Batches of the log in ``folder``, of one epoch, from ``from_lsn`` on: see ``ReplicaLog.read``."""
    previous = Position(histories.epoch_of(history, before(from_lsn)) or NO_EPOCH, before(from_lsn))
    segments = list_segments(folder)
    if from_lsn > upto_lsn or not segments:
        return Chunk(previous, previous.epoch, previous.lsn, b"")
    if from_lsn < segments[0].base_lsn:
        raise WalError(f"LSN {from_lsn} is no longer in {folder}, which begins with {segments[0].base_lsn}")
    begun = max(at for at, segment in enumerate(segments) if segment.base_lsn <= from_lsn)
    parts: list[bytes] = []
    last_lsn = previous.lsn
    try:
        for batch, body in _from(segments[begun], node_id, from_lsn, upto_lsn):
            parts += (encode_batch(batch), body)
            last_lsn = batch.last_lsn
            bytes_max -= len(body)
            if bytes_max <= 0:
                break
    except FileNotFoundError as error:
        raise WalError(f"LSN {from_lsn} is no longer in {folder}: its segment was removed just now") from error
    if not parts:
        raise WalError(f"LSN {from_lsn} is not in {folder}")
    return Chunk(previous, segments[begun].epoch, last_lsn, b"".join(parts))


def _from(segment: Segment, node_id: str, from_lsn: Lsn, upto_lsn: Lsn) -> Iterator[tuple[BatchRecord, bytes]]:
    """The batches of a segment, or what of them is within these LSNs."""
    for batch in batches_of(segment, node_id, from_lsn):
        record = batch.record
        if record.first_lsn > upto_lsn:
            return
        if from_lsn <= record.first_lsn and record.last_lsn <= upto_lsn:
            yield record, batch.body
            continue
        start = end = 0
        last_at = 0
        for each in records_of(batch.body, segment.epoch, node_id):
            if each.lsn < from_lsn:
                start += each.length
                end = start
            elif each.lsn <= upto_lsn:
                last_at = end
                end += each.length
        hlc = batch.body[last_at + HLC_AT.start : last_at + HLC_AT.stop]
        body = batch.body[start:end]
        yield batch_of(max(record.first_lsn, from_lsn), min(record.last_lsn, upto_lsn), hlc, body), body


def _each(data: bytes) -> Iterator[tuple[BatchRecord, memoryview]]:
    """The batches that ``data`` is, which were checked, with their BATCH records."""
    at, view = 0, memoryview(data)
    while at < len(data):
        *_, first_lsn, last_lsn, body_bytes, body_crc32 = BATCH.unpack_from(data, at)
        hlc = data[at + HLC_AT.start : at + HLC_AT.stop]
        end = at + BATCH_RECORD_BYTES + body_bytes
        yield BatchRecord(first_lsn, last_lsn, hlc, body_bytes, body_crc32), view[at:end]
        at = end


CHUNKS_KEPT = 4
"""So many of those that were read last are kept in memory, for the other members."""
PLACES_KEPT = 64


class _Place(NamedTuple):
    """Where in the files a batch begins, or will."""

    segment: Segment
    offset: int


class TailReader:
    """The log in ``folder``, whose history ends with the epoch that is being written. Belongs to one thread."""

    def __init__(self, folder: Path, node_id: str, history: History) -> None:
        self._folder, self._node_id, self._history = folder, node_id, history
        self._chunks: dict[Lsn, Chunk] = {}
        self._places: dict[Lsn, _Place] = {}
        """Both by the first LSN, the oldest first."""
        self._opened: tuple[Segment, int] | None = None
        """The segment that ``place`` gave out last, and its descriptor."""

    def read(self, from_lsn: Lsn, upto_lsn: Lsn, bytes_max: int) -> Chunk:
        """Batches from ``from_lsn`` on up to ``upto_lsn``, which MUST be written, synced or not: at least one record,
        and no more than about ``bytes_max``. ``upto_lsn`` MUST NOT fall from one call to the next.

        Raises:
            WalError: it is older than the log.
            WalCorruptError: the log is damaged there.
        """
        chunk = self._chunks.get(from_lsn)
        if chunk is None:
            chunk = self._chunks[from_lsn] = self._read(from_lsn, upto_lsn, bytes_max)
            _forget(self._chunks, CHUNKS_KEPT)
        return chunk

    def place(self, from_lsn: Lsn) -> tuple[int, int] | None:
        """A descriptor and the offset in it where the batch that begins with ``from_lsn`` stands, or will unless the
        segment is full by then; holds until the next call. None where ``read`` has not come so far."""
        found = self._places.get(from_lsn)
        if found is None:
            return None
        if self._opened is None or self._opened[0] != found.segment:
            self.close()
            try:
                self._opened = found.segment, open_regular(found.segment.path)
            except FileNotFoundError:
                return None
        return self._opened[1], found.offset

    def passed(self, upto_lsn: Lsn, offset: int) -> None:
        """Of that segment another has read up to here, where ``offset`` is."""
        assert self._opened is not None
        self._places[after(upto_lsn)] = _Place(self._opened[0], offset)
        _forget(self._places, PLACES_KEPT)

    def read_again(self) -> None:
        """Give out nothing more from memory: the next ``read`` reads the files, and checks every CRC."""
        self._chunks.clear()

    def close(self) -> None:
        """Let the files go."""
        if self._opened is not None:
            os.close(self._opened[1])
            self._opened = None

    def _read(self, from_lsn: Lsn, upto_lsn: Lsn, bytes_max: int) -> Chunk:
        place = self._places.get(from_lsn)
        chunk = self._behind(place, from_lsn, upto_lsn, bytes_max) if place is not None else None
        if chunk is None:  # the segment is full, or nobody has read up to here
            place = self._look_up(from_lsn)
            chunk = self._behind(place, from_lsn, upto_lsn, bytes_max) if place is not None else None
        if chunk is None:  # it is in the middle of a batch, or damaged
            chunk = read_chunk(self._folder, self._node_id, self._history, from_lsn, upto_lsn, bytes_max)
        return chunk

    def _look_up(self, from_lsn: Lsn) -> _Place | None:
        """Where the batch that holds ``from_lsn`` stands.

        Raises:
            WalCorruptError: the log is damaged there.
        """
        begun = [segment for segment in list_segments(self._folder) if segment.base_lsn <= from_lsn]
        if not begun:
            return None
        batch = next(batches(begun[-1], self._node_id, from_lsn), None)
        return _Place(begun[-1], batch.offset) if batch is not None else None

    def _behind(self, place: _Place, from_lsn: Lsn, upto_lsn: Lsn, bytes_max: int) -> Chunk | None:
        """The batches from there on; None where there is none that is sound and begins so."""
        segment, offset = place
        parts: list[bytes] = []
        last_lsn, end = before(from_lsn), offset + bytes_max
        # The segment may be full or gone, or damaged: whoever looks for what comes next finds out.
        with suppress(FormatError, FileNotFoundError), opened(segment.path) as descriptor:
            while last_lsn < upto_lsn and offset < end:
                opening = os.pread(descriptor, BATCH_RECORD_BYTES, offset)
                batch = decode_batch(opening, 0, len(opening))
                body = os.pread(descriptor, batch.body_bytes, offset + BATCH_RECORD_BYTES)
                if batch.first_lsn != after(last_lsn) or batch.last_lsn > upto_lsn or crc32(body) != batch.body_crc32:
                    break
                parts += (opening, body)
                offset += BATCH_RECORD_BYTES + batch.body_bytes
                last_lsn = batch.last_lsn
        if not parts:
            return None
        self._places[after(last_lsn)] = _Place(segment, offset)
        _forget(self._places, PLACES_KEPT)
        previous = Position(histories.epoch_of(self._history, before(from_lsn)) or NO_EPOCH, before(from_lsn))
        return Chunk(previous, segment.epoch, last_lsn, b"".join(parts))


def _forget(kept: dict[Lsn, Chunk] | dict[Lsn, _Place], most: int) -> None:
    while len(kept) > most:
        del kept[next(iter(kept))]
