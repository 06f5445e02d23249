"""Ends of a log that lost: read back as they were, and named otherwise once they are in the log again."""

from __future__ import annotations

from pathlib import Path

from ledger.facts.events import RETURNED_RECORD_TYPE
from ledger.positions import Epoch, Lsn
from tests.wal.logs import NODE, WAL_ID, hlc_of, naive_segment, payload_of
from wal import control
from wal.control import Control, EpochStart
from wal.format import batch_of, encode_batch, encode_record, encode_returned
from wal.reader import Record, read
from wal.recovery import recover
from wal.replication.file_log import FileLog
from wal.truncation import Gap, highest_hlc, lost_ends, mark_returned, records_below, records_in, truncate


def test_what_was_cut_is_read_back_and_only_until_it_was_returned(tmp_path: Path) -> None:
    naive_segment(tmp_path, [[1, 2], [3, 4, 5]], base_lsn=1)
    naive_segment(tmp_path, [[6], [7, 8]], base_lsn=6)
    control.store(tmp_path, Control(WAL_ID, NODE, 1, hlc_of(8), Lsn(8), history=(EpochStart(1, Lsn(1)),)))
    recover(tmp_path, NODE)
    truncate(tmp_path, NODE, Lsn(4))
    ends = lost_ends(tmp_path)
    records = [record for end in ends for record in records_in(end, NODE) if isinstance(record, Record)]
    assert [record.lsn for record in records] == [3, 4, 5, 6, 7, 8]
    assert [(record.hlc, record.payload) for record in records] == [
        (hlc_of(lsn), payload_of(lsn)) for lsn in range(3, 9)
    ]
    for end in ends:
        mark_returned(end)
    assert lost_ends(tmp_path) == []
    assert len(list(tmp_path.glob("returned-*"))) == 2


def test_a_returned_record_is_read_as_what_it_was(tmp_path: Path) -> None:
    log = FileLog(tmp_path, NODE, WAL_ID)
    first, again = hlc_of(1), hlc_of(9)
    payload = encode_returned(first, 7, b"{}")
    body = encode_record(Lsn(1), again.pack(), RETURNED_RECORD_TYPE, payload)
    log.append(1, encode_batch(batch_of(Lsn(1), Lsn(1), again.pack(), body)) + body)
    log.append(1, _batch_at(2))
    log.close()
    records = list(read(tmp_path, Lsn(1), NODE))
    assert [(each.hlc, each.type, each.payload) for each in records] == [
        (first, 7, b"{}"),
        (hlc_of(10), 1, payload_of(2)),
    ]
    assert recover(tmp_path, NODE).highest_hlc == hlc_of(10)


def flip(path: Path, needle: bytes) -> None:
    data = bytearray(path.read_bytes())
    data[data.index(needle)] ^= 1
    path.write_bytes(data)


def what_is_in(folder: Path) -> tuple[list[int], list[Gap]]:
    """The LSNs of the sound records, and what is missing between them."""
    found = list(records_below(folder, NODE))
    for each in found:
        if isinstance(each, Record):
            assert (each.hlc, each.payload) == (hlc_of(each.lsn), payload_of(each.lsn))
    return [each.lsn for each in found if isinstance(each, Record)], [each for each in found if isinstance(each, Gap)]


def test_a_damaged_record_costs_itself_alone_and_is_named_with_its_bytes(tmp_path: Path) -> None:
    first = naive_segment(tmp_path, [[1, 2, 3], [4]], base_lsn=1)
    naive_segment(tmp_path, [[5], [6, 7]], base_lsn=5, epoch=2)
    assert what_is_in(tmp_path) == ([1, 2, 3, 4, 5, 6, 7], [])
    assert highest_hlc(tmp_path, NODE) == hlc_of(7)
    flip(first, payload_of(2))
    lsns, (gap,) = what_is_in(tmp_path)
    assert lsns == [1, 3, 4, 5, 6, 7]
    assert gap == Gap(Lsn(2), Lsn(2), Epoch(1), ((Lsn(2), b"z" + payload_of(2)[1:]),), is_proved=True)


def test_records_behind_a_damaged_beginning_of_their_batch_or_segment_are_read(tmp_path: Path) -> None:
    before_it = naive_segment(tmp_path, [[1, 2]]).stat().st_size
    first = naive_segment(tmp_path, [[1, 2], [3, 4]], base_lsn=1)
    second = naive_segment(tmp_path, [[5, 6]], base_lsn=5)
    for path, at in ((first, before_it + 20), (second, 30)):
        data = bytearray(path.read_bytes())
        data[at] ^= 1
        path.write_bytes(data)
    assert what_is_in(tmp_path) == ([1, 2, 3, 4, 5, 6], [])


def test_records_that_are_gone_altogether_are_a_gap(tmp_path: Path) -> None:
    naive_segment(tmp_path, [[1], [2]], base_lsn=1)
    naive_segment(tmp_path, [[4]], base_lsn=4, previous_lsn=3)
    middle = naive_segment(tmp_path, [[5]], base_lsn=5)
    naive_segment(tmp_path, [[6], [7]], base_lsn=6)
    middle.unlink()
    lsns, gaps = what_is_in(tmp_path)
    assert lsns == [1, 2, 4, 6, 7]
    assert [(gap.first_lsn, gap.last_lsn, gap.is_proved) for gap in gaps] == [(3, 3, True), (5, 5, True)]


def test_a_torn_last_batch_proves_nothing_unless_a_segment_stands_behind_it(tmp_path: Path) -> None:
    first = naive_segment(tmp_path, [[1], [2, 3]], base_lsn=1)
    first.write_bytes(first.read_bytes()[:-1])
    lsns, (gap,) = what_is_in(tmp_path)
    assert (lsns, gap) == ([1, 2], Gap(Lsn(3), Lsn(3), Epoch(1), (), is_proved=False))
    naive_segment(tmp_path, [[4]], base_lsn=4, epoch=2)
    lsns, (gap,) = what_is_in(tmp_path)
    assert (lsns, gap) == ([1, 2, 4], Gap(Lsn(3), Lsn(3), Epoch(1), (), is_proved=True))


def _batch_at(lsn: int) -> bytes:
    body = encode_record(Lsn(lsn), hlc_of(10).pack(), 1, payload_of(lsn))
    return encode_batch(batch_of(Lsn(lsn), Lsn(lsn), hlc_of(10).pack(), body)) + body
