"""Batches of a log on their way to members, read while it is written."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ledger.errors import WalCorruptError, WalError
from ledger.positions import Epoch, Lsn, after
from tests.wal.logs import NODE, WAL_ID
from tests.wal.replication.quorums import batch
from wal.control import EpochStart
from wal.format import BATCH_RECORD_BYTES, decode_batch
from wal.log import Log
from wal.replication import file_log
from wal.replication.file_log import Chunk, TailReader
from wal.segment import list_segments

HISTORY = (EpochStart(Epoch(1), Lsn(1)), EpochStart(Epoch(2), Lsn(8)))
MUCH = 1 << 20


class Written:
    """A log of two epochs, and all that stands in it by the last LSN of each batch."""

    def __init__(self, folder: Path, segment_bytes: int = 64 << 20) -> None:
        self.folder, self._segment_bytes = folder, segment_bytes
        self.batches: dict[Lsn, bytes] = {}
        self.log = self._begin(1)
        self.write(3)
        self.write(7)
        self.log.close()
        self.log = self._begin(2)
        self.reader = TailReader(folder, NODE, HISTORY)

    def _begin(self, epoch: int) -> Log:
        next_lsn = Lsn(max(self.batches, default=0) + 1)
        segment_bytes = self._segment_bytes
        return Log(
            self.folder, node_id=NODE, wal_id=WAL_ID, epoch=Epoch(epoch), next_lsn=next_lsn, segment_bytes=segment_bytes
        )

    def write(self, last_lsn: int, *, sync: bool = True) -> None:
        data = batch(self.log.next_lsn, last_lsn)
        self.log.append(decode_batch(data, 0, len(data)), data[BATCH_RECORD_BYTES:])
        self.batches[Lsn(last_lsn)] = data
        if sync:
            self.log.sync()

    def read(self, from_lsn: int, upto_lsn: int | None = None, bytes_max: int = MUCH) -> Chunk:
        chunk = self.reader.read(Lsn(from_lsn), Lsn(upto_lsn or self.log.written_lsn), bytes_max)
        assert chunk.previous.lsn == from_lsn - 1
        return chunk

    def data(self, from_lsn: int, upto_lsn: int) -> bytes:
        return b"".join(data for lsn, data in self.batches.items() if from_lsn <= lsn <= upto_lsn)


@contextmanager
def log_in(folder: Path, segment_bytes: int = 64 << 20) -> Iterator[Written]:
    written = Written(folder, segment_bytes)
    try:
        yield written
    finally:
        written.log.abandon()


@pytest.fixture
def written(tmp_path: Path) -> Iterator[Written]:
    with log_in(tmp_path) as log:
        yield log


def test_what_is_written_is_read_before_it_is_synced(written: Written) -> None:
    for last_lsn in (9, 12):
        from_lsn = written.log.next_lsn
        written.write(last_lsn, sync=False)
        assert written.log.durable_lsn < last_lsn
        chunk = written.read(from_lsn)
        assert chunk == (chunk.previous, 2, last_lsn, written.data(from_lsn, last_lsn))
        written.log.sync()


def test_a_chunk_is_of_one_epoch_and_says_which_one_wrote_what_is_before_it(written: Written) -> None:
    written.write(9)
    chunks = [written.read(lsn) for lsn in (1, 8)]
    assert [(chunk.previous.epoch, chunk.written_in, chunk.last_lsn) for chunk in chunks] == [(0, 1, 7), (1, 2, 9)]


def test_no_batch_above_the_last_that_was_written_is_read(written: Written) -> None:
    written.write(9)
    written.write(12)
    assert written.read(8, 9).batches == written.data(8, 9)
    assert written.read(10, 12).batches == written.data(10, 12)
    written.write(15)
    assert written.read(13, 14).last_lsn == 14


def test_the_reader_follows_the_writer_into_the_next_segment(tmp_path: Path) -> None:
    with log_in(tmp_path, segment_bytes=2000) as written:
        at = 8
        for last_lsn in range(9, 200, 3):
            written.write(last_lsn)
            chunk = written.read(at)
            assert chunk.batches == written.data(at, last_lsn)
            at = last_lsn + 1
        assert len(list_segments(tmp_path)) > 5


def test_all_members_at_one_place_are_given_what_was_read_once(written: Written) -> None:
    written.write(9)
    first = written.read(8)
    written.write(12)
    assert written.read(8) is first
    assert written.read(10).last_lsn == 12


def test_a_member_that_holds_a_part_of_a_batch_is_given_the_rest(written: Written) -> None:
    written.write(12)
    written.write(15)
    chunk = written.read(10)
    assert (chunk.previous.epoch, chunk.written_in, chunk.last_lsn) == (2, 2, 15)
    record = decode_batch(chunk.batches, 0, len(chunk.batches))
    assert (record.first_lsn, record.last_lsn) == (10, 12)
    assert chunk.batches.endswith(written.data(15, 15))


def test_a_chunk_ends_once_it_has_as_many_bytes_as_it_may(written: Written) -> None:
    for last_lsn in range(8, 40):
        written.write(last_lsn)
    at = Lsn(8)
    chunks = []
    while at <= written.log.written_lsn:
        chunks.append(written.read(at, bytes_max=500))
        at = after(chunks[-1].last_lsn)
    assert b"".join(chunk.batches for chunk in chunks) == written.data(8, 39)
    assert {500 <= len(chunk.batches) < 700 for chunk in chunks[:-1]} == {True}


def test_damage_is_an_error_and_so_is_what_was_removed(written: Written) -> None:
    written.write(9)
    written.write(12)
    segments = list_segments(written.folder)
    written.read(8, 9)
    data = segments[-1].path.read_bytes()
    at = data.index(written.data(12, 12)) + BATCH_RECORD_BYTES
    with open(segments[-1].path, "r+b") as file:
        file.seek(at + 50)
        file.write(bytes([data[at + 50] ^ 1]))
    with pytest.raises(WalCorruptError):
        written.read(10)
    os.unlink(segments[0].path)
    with pytest.raises(WalError, match="no longer"):
        written.read(1)


def test_what_a_reader_keeps_has_a_bound(written: Written) -> None:
    for last_lsn in range(8, 200):
        written.write(last_lsn, sync=True)
        written.read(last_lsn)
    assert len(written.reader._places) <= file_log.PLACES_KEPT


@given(st.data())
def test_members_that_follow_as_they_can_are_given_the_whole_log(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    with log_in(tmp_path_factory.mktemp("log"), segment_bytes=1500) as written:
        members = [data.draw(st.integers(1, 8), label="holds") for _ in range(3)]
        begun = list(members)
        held = [set[int]() for _ in members]
        for _ in range(data.draw(st.integers(1, 12), label="batches")):
            written.write(written.log.next_lsn + data.draw(st.integers(0, 4)))
            for each in data.draw(st.lists(st.integers(0, 2), max_size=6), label="read by"):
                if members[each] <= written.log.written_lsn:
                    chunk = written.read(members[each], bytes_max=data.draw(st.sampled_from((1, 400, MUCH))))
                    assert chunk.last_lsn <= written.log.written_lsn
                    held[each] |= set(range(members[each], chunk.last_lsn + 1))
                    members[each] = chunk.last_lsn + 1
                    record = decode_batch(chunk.batches, 0, len(chunk.batches))
                    assert record.first_lsn == chunk.previous.lsn + 1
        for begin, now, found in zip(begun, members, held, strict=True):
            assert found == set(range(begin, now))
