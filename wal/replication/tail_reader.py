"""Batches of a node's log on their way to its members, read from its files while the node writes them.

What was written last is still in the memory of the operating system, and is read once for all members that follow
closely. One that lags behind is given what it lacks from wherever it stands: that place is looked for once, then kept.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple
from zlib import crc32

from ledger.positions import NO_EPOCH, Lsn, after, before
from wal import history as histories
from wal.format import BATCH_RECORD_BYTES, FormatError, decode_batch
from wal.history import History
from wal.reader import batches
from wal.replication.file_log import read_chunk
from wal.replication.messages import Position
from wal.replication.replica_log import Chunk
from wal.segment import Segment, list_segments, open_regular, opened

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
