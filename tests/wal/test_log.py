"""The log without a queue or a thread: batches of bytes in, sound segments out, and nothing durable before a sync."""

from __future__ import annotations

import os
from pathlib import Path
from zlib import crc32

import pytest

from ledger.errors import WalError
from ledger.positions import Epoch, Lsn
from tests.wal.logs import NODE, WAL_ID, hlc_of, lsns_in, naive_batch, naive_segment, payload_of, snapshot
from wal.format import BATCH_RECORD_BYTES, BatchRecord, encode_record
from wal.log import Log
from wal.recovery import recover
from wal.segment import list_segments


def open_log(folder: Path, *, epoch: int = 1, next_lsn: int = 1, segment_bytes: int = 1 << 20) -> Log:
    return Log(
        folder, node_id=NODE, wal_id=WAL_ID, epoch=Epoch(epoch), next_lsn=Lsn(next_lsn), segment_bytes=segment_bytes
    )


def batch_of(first_lsn: int, last_lsn: int) -> tuple[BatchRecord, bytes]:
    lsns = range(first_lsn, last_lsn + 1)
    body = b"".join(encode_record(Lsn(lsn), hlc_of(lsn).pack(), 1, payload_of(lsn)) for lsn in lsns)
    return BatchRecord(Lsn(first_lsn), Lsn(last_lsn), hlc_of(last_lsn).pack(), len(body), crc32(body)), body


def append(log: Log, first_lsn: int, last_lsn: int) -> None:
    log.append(*batch_of(first_lsn, last_lsn))


def test_a_batch_has_the_bytes_of_the_format() -> None:
    _, body = batch_of(5, 40)
    assert body == naive_batch(list(range(5, 41)))[BATCH_RECORD_BYTES:]


def test_the_segment_of_a_log_is_the_naive_one(tmp_path: Path) -> None:
    for name in ("ours", "naive"):
        (tmp_path / name).mkdir()
    log = open_log(tmp_path / "ours")
    for first, last in ((1, 1), (2, 9), (10, 11)):
        append(log, first, last)
        log.sync()
    log.close()
    naive = naive_segment(tmp_path / "naive", [[1], list(range(2, 10)), [10, 11]])
    (segment,) = list_segments(tmp_path / "ours")
    assert segment.path.read_bytes() == naive.read_bytes()


def test_what_is_written_is_durable_after_the_sync_and_not_before(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    append(log, 1, 3)
    assert (log.written_lsn, log.durable_lsn, log.next_lsn) == (3, 0, 4)
    log.sync()
    assert (log.written_lsn, log.durable_lsn, log.next_lsn) == (3, 3, 4)
    log.close()
    assert lsns_in(tmp_path) == [1, 2, 3]


def test_a_commit_writes_what_append_and_sync_write(tmp_path: Path) -> None:
    for name in ("committed", "naive"):
        (tmp_path / name).mkdir()
    log = open_log(tmp_path / "committed")
    batches = [range(1, 2), range(2, 10), range(10, 12)]
    for lsns in batches:
        log.append(*batch_of(lsns[0], lsns[-1]))
        log.sync()
        assert (log.written_lsn, log.durable_lsn, log.next_lsn) == (lsns[-1], lsns[-1], lsns.stop)
    log.close()
    naive_segment(tmp_path / "naive", batches)
    assert snapshot(tmp_path / "committed") == snapshot(tmp_path / "naive")


def test_no_batch_follows_one_that_is_not_synced(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    append(log, 1, 3)
    with pytest.raises(AssertionError):
        append(log, 4, 4)
    with pytest.raises(AssertionError):
        log.rotate()
    log.abandon()


@pytest.mark.parametrize("first_lsn", [1, 3, 5, 9])
def test_a_batch_that_does_not_follow_is_not_written(tmp_path: Path, first_lsn: int) -> None:
    log = open_log(tmp_path)
    append(log, 1, 3)
    log.sync()
    with pytest.raises(AssertionError):
        append(log, first_lsn, first_lsn)
    log.close()
    assert lsns_in(tmp_path) == [1, 2, 3]


def test_a_segment_is_left_when_it_is_full_or_when_that_is_wanted(tmp_path: Path) -> None:
    log = open_log(tmp_path, segment_bytes=500)
    for first in (1, 6, 11):
        append(log, first, first + 4)
        log.sync()
    log.rotate()
    append(log, 16, 16)
    log.sync()
    log.close()
    assert [segment.base_lsn for segment in list_segments(tmp_path)] == [1, 6, 11, 16]
    assert recover(tmp_path, NODE, Lsn(16)).records == 16


def test_a_log_whose_segment_lost_its_name_is_not_durable(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    append(log, 1, 1)
    os.rename(list_segments(tmp_path)[0].path, tmp_path / "elsewhere")
    with pytest.raises(WalError, match="removed, renamed or replaced"):
        log.sync()
    assert log.durable_lsn == 0
    log.abandon()
