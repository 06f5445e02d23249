"""Ends of a log that lost: read back as they were, and named otherwise once they are in the log again."""

from __future__ import annotations

from pathlib import Path

from ledger.machines.events import RETURNED_RECORD_TYPE
from ledger.positions import Lsn
from tests.wal.logs import NODE, WAL_ID, hlc_of, naive_segment, payload_of
from wal import control
from wal.control import Control
from wal.format import batch_of, encode_batch, encode_record, encode_returned
from wal.history import EpochStart
from wal.lost_ends import lost_ends, mark_returned, records_in
from wal.reader import read
from wal.recovery import recover
from wal.replication.file_log import FileLog
from wal.truncation import truncate


def test_what_was_cut_is_read_back_and_only_until_it_was_returned(tmp_path: Path) -> None:
    naive_segment(tmp_path, [[1, 2], [3, 4, 5]], base_lsn=1)
    naive_segment(tmp_path, [[6], [7, 8]], base_lsn=6)
    control.store(tmp_path, Control(WAL_ID, NODE, 1, hlc_of(8), Lsn(8), history=(EpochStart(1, Lsn(1)),)))
    recover(tmp_path, NODE)
    truncate(tmp_path, NODE, Lsn(4))
    ends = lost_ends(tmp_path)
    records = [record for end in ends for record in records_in(end, NODE)]
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


def _batch_at(lsn: int) -> bytes:
    body = encode_record(Lsn(lsn), hlc_of(10).pack(), 1, payload_of(lsn))
    return encode_batch(batch_of(Lsn(lsn), Lsn(lsn), hlc_of(10).pack(), body)) + body
