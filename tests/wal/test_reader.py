"""Reading back: from any LSN, beside the writer, and never past damage."""

from __future__ import annotations

from pathlib import Path

import pytest

from ledger.errors import WalCorruptError, WalError
from tests.wal.logs import NODE, LogWriter, hlc_of, lsns_in, naive_segment, payload_of
from wal.reader import Record, read


def three_segments(folder: Path) -> None:
    naive_segment(folder, [[1, 2], [3]])
    naive_segment(folder, [[4, 5, 6]], base_lsn=4)
    naive_segment(folder, [[7], [8, 9]], base_lsn=7, epoch=2)


@pytest.mark.parametrize("from_lsn", range(1, 11))
def test_reading_begins_at_any_lsn(tmp_path: Path, from_lsn: int) -> None:
    three_segments(tmp_path)
    assert lsns_in(tmp_path, from_lsn) == list(range(from_lsn, 10))


@pytest.mark.parametrize("upto_lsn", range(10))
def test_reading_ends_at_any_lsn(tmp_path: Path, upto_lsn: int) -> None:
    three_segments(tmp_path)
    assert [record.lsn for record in read(tmp_path, 1, NODE, upto_lsn)] == list(range(1, upto_lsn + 1))


def test_a_record_has_its_epoch_type_hlc_and_payload(tmp_path: Path) -> None:
    three_segments(tmp_path)
    assert next(read(tmp_path, 7, NODE)) == Record(7, 2, hlc_of(7), 1, payload_of(7), 34 + len(payload_of(7)))


def test_an_empty_log_has_no_records(tmp_path: Path) -> None:
    assert lsns_in(tmp_path) == []


def test_an_lsn_that_retention_removed_is_not_skipped_in_silence(tmp_path: Path) -> None:
    naive_segment(tmp_path, [[7, 8]], base_lsn=7)
    with pytest.raises(WalError, match="LSN 6 is no longer in"):
        list(read(tmp_path, 6, NODE))


def test_a_log_that_ends_too_early_is_not_taken_for_whole(tmp_path: Path) -> None:
    three_segments(tmp_path)
    with pytest.raises(WalError, match="LSN 10 is not in"):
        list(read(tmp_path, 1, NODE, 10))


def test_nothing_of_a_damaged_batch_is_given_out(tmp_path: Path) -> None:
    segment = naive_segment(tmp_path, [[1], [2, 3, 4]])
    data = bytearray(segment.read_bytes())
    data[-1] ^= 1
    segment.write_bytes(data)
    reading = read(tmp_path, 1, NODE)
    assert next(reading).lsn == 1
    with pytest.raises(WalCorruptError):
        next(reading)


def test_a_missing_segment_is_not_skipped(tmp_path: Path) -> None:
    three_segments(tmp_path)
    next(tmp_path.glob("*4-1.wal")).unlink()
    with pytest.raises(WalCorruptError, match="follows LSN 6, but 3 is the one before it"):
        list(read(tmp_path, 1, NODE))


def test_a_segment_without_records_behind_records_that_were_given_up_is_read_past(tmp_path: Path) -> None:
    naive_segment(tmp_path, [[1, 2]])
    naive_segment(tmp_path, [], base_lsn=10, epoch=2, previous_lsn=2)
    naive_segment(tmp_path, [[10, 11]], base_lsn=10, epoch=3, previous_lsn=9)
    assert [record.lsn for record in read(tmp_path, 1, NODE)] == [1, 2, 10, 11]


def test_the_log_of_another_node_is_refused(tmp_path: Path) -> None:
    three_segments(tmp_path)
    with pytest.raises(WalCorruptError, match="belongs to node"):
        list(read(tmp_path, 1, "node-b"))


def test_reading_beside_the_writer_sees_all_that_is_durable(tmp_path: Path) -> None:
    with LogWriter(tmp_path, segment_bytes=2000, batch_timeout_us=0) as log:
        for _ in range(30):
            log.append()
            last_lsn = log.append()
            durable_lsn = log.writer.durable_lsn
            assert [record.lsn for record in read(tmp_path, 1, NODE, durable_lsn)] == list(range(1, durable_lsn + 1))
            log.wait_durable(min(durable_lsn + 1, last_lsn))
