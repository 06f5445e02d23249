"""Recovery: break a log, see the exact verdict, repair it, count what survived, append again."""

from __future__ import annotations

import shutil
import tracemalloc
from pathlib import Path
from zlib import crc32

import pytest

from ledger.errors import WalCorruptError
from ledger.hlc import Hlc
from ledger.positions import Epoch, Lsn
from tests.conftest import spread
from tests.wal.logs import NODE, WAL_ID, LogWriter, hlc_of, lsns_in, naive_batch, naive_segment, payload_of, snapshot
from wal import control
from wal.control import EpochStart
from wal.format import BATCH_RECORD_BYTES, SEGMENT_HEADER_BYTES, BatchRecord, encode_batch, encode_record
from wal.reader import WINDOW_BYTES, Record
from wal.recovery import Survey, recover
from wal.truncation import lost_ends, records_in

# 14 records: 8 in a first segment, 6 in a second; the last batch holds 12 to 14.
FIRST = [[1], [2, 3, 4], [5, 6, 7, 8]]
SECOND = [[9], [10, 11], [12, 13, 14]]
RECORD_BYTES = [len(encode_record(lsn, hlc_of(lsn).pack(), 1, payload_of(lsn))) for lsn in range(15)]


def small_log(folder: Path) -> tuple[Path, Path]:
    folder.mkdir(exist_ok=True)
    return (
        naive_segment(folder, FIRST),
        naive_segment(folder, SECOND, base_lsn=9, epoch=1),
    )


def sound_lsns(batches: list[list[int]], size: int) -> int:
    """The last LSN whose record, and BATCH record, end within the first ``size`` bytes of a segment; naively."""
    end = SEGMENT_HEADER_BYTES
    last = batches[0][0] - 1
    for batch in batches:
        end += BATCH_RECORD_BYTES
        for lsn in batch:
            end += RECORD_BYTES[lsn]
            if end > size:
                return last
            last = lsn
    return last


def batch_boundaries(batches: list[list[int]]) -> list[int]:
    ends = [SEGMENT_HEADER_BYTES]
    for batch in batches:
        ends.append(ends[-1] + BATCH_RECORD_BYTES + sum(RECORD_BYTES[lsn] for lsn in batch))
    return ends


def append_again(folder: Path, recovered: Survey) -> None:
    """A repaired log takes new records, and the next recovery finds all of them and nothing wrong."""
    with LogWriter(folder, epoch=recovered.last_epoch + 1, next_lsn=recovered.last_lsn + 1) as log:
        log.batches([1, 2])
    last = recovered.last_lsn + 3
    again = recover(folder, NODE, last)
    assert (again.last_lsn, again.cut) == (last, None)
    assert lsns_in(folder, again.first_lsn) == list(range(again.first_lsn, last + 1))


def test_an_empty_folder_is_an_empty_log(tmp_path: Path) -> None:
    found = recover(tmp_path, NODE)
    assert (found.last_lsn, found.last_epoch, found.highest_hlc, found.cut, found.wal_id) == (0, 0, None, None, None)
    assert found.first_lsn == 1


def test_a_sound_log_is_recovered_whole(tmp_path: Path) -> None:
    small_log(tmp_path)
    before = snapshot(tmp_path)
    found = recover(tmp_path, NODE, 14)
    assert (found.first_lsn, found.last_lsn, found.last_epoch, found.segments, found.records) == (1, 14, 1, 2, 14)
    assert (found.highest_hlc, found.wal_id, found.cut) == (hlc_of(14), WAL_ID, None)
    assert (found.epoch_ends, found.history) == ({1: 14}, (EpochStart(Epoch(1), Lsn(1)),))
    assert snapshot(tmp_path) == before
    assert lsns_in(tmp_path) == list(range(1, 15))


def test_each_epoch_ends_where_its_last_record_is(tmp_path: Path) -> None:
    naive_segment(tmp_path, FIRST, epoch=2)
    naive_segment(tmp_path, [], base_lsn=9, epoch=4)
    naive_segment(tmp_path, SECOND, base_lsn=9, epoch=5)
    assert recover(tmp_path, NODE).epoch_ends == {2: 8, 4: 8, 5: 14}


SECOND_BYTES = batch_boundaries(SECOND)[-1]


@pytest.mark.exhaustive
def test_a_log_cut_at_any_byte_of_its_last_segment_is_repaired(tmp_path: Path) -> None:
    for size in {*spread(range(SECOND_BYTES + 1), 100), *batch_boundaries(SECOND)}:
        check_repair(tmp_path / str(size), size)


def check_repair(folder: Path, size: int) -> None:
    """A log whose last segment was cut to ``size`` bytes keeps what is whole of it, and goes on."""
    _, second = small_log(folder)
    whole = second.read_bytes()
    second.write_bytes(whole[:size])

    found = recover(folder, NODE)

    survivors = sound_lsns(SECOND, size)
    assert found.last_lsn == survivors
    assert lsns_in(folder) == list(range(1, survivors + 1))
    whole_batches = max((end for end in batch_boundaries(SECOND) if end <= size), default=0)
    if whole_batches and not whole[whole_batches:size].strip(b"\0"):
        assert found.cut is None
    else:
        assert found.cut is not None
        assert found.cut["first_lsn"] == survivors + 1
        kept_aside = (folder / found.cut["copies"][0]).read_bytes()
        assert kept_aside.rstrip(b"\0") == whole[whole_batches:size].rstrip(b"\0")
        assert len(kept_aside) >= found.cut["cut_bytes"]
    append_again(folder, found)


@pytest.mark.exhaustive
def test_a_log_cut_below_a_known_durable_position_is_refused_and_left_alone(tmp_path: Path) -> None:
    _, second = small_log(tmp_path)
    whole = second.read_bytes()
    for size in {*spread(range(SECOND_BYTES), 100), *batch_boundaries(SECOND)[:-1]}:
        second.write_bytes(whole[:size])
        before = snapshot(tmp_path)
        with pytest.raises(WalCorruptError, match="LSN 14 is known to be durable"):
            recover(tmp_path, NODE, 14)
        assert snapshot(tmp_path) == before


def test_the_durable_position_of_the_control_file_counts(tmp_path: Path) -> None:
    _, second = small_log(tmp_path)
    second.write_bytes(second.read_bytes()[:-1])
    control.store(tmp_path, control.Control(WAL_ID, NODE, 1, hlc_of(13), durable_lsn=14))
    with pytest.raises(WalCorruptError, match="LSN 14 is known to be durable"):
        recover(tmp_path, NODE)
    control.store(tmp_path, control.Control(WAL_ID, NODE, 1, hlc_of(13), durable_lsn=13))
    assert recover(tmp_path, NODE).last_lsn == 13


@pytest.mark.exhaustive
def test_a_cut_before_the_last_segment_is_refused(tmp_path: Path) -> None:
    first, _ = small_log(tmp_path)
    whole = first.read_bytes()
    for size in {*spread(range(batch_boundaries(FIRST)[-1]), 100), *batch_boundaries(FIRST)[:-1]}:
        first.write_bytes(whole[:size])
        before = snapshot(tmp_path)
        with pytest.raises(WalCorruptError):
            recover(tmp_path, NODE)
        assert snapshot(tmp_path) == before


@pytest.mark.exhaustive
@pytest.mark.parametrize("bit", [0x01, 0x80])
def test_any_flipped_byte_of_a_synced_region_is_refused_with_place_and_reason(tmp_path: Path, bit: int) -> None:
    # Synced for certain: all but the last batch, which no later BATCH record covers.
    source = tmp_path / "source"
    segments = small_log(source)
    last_batch = batch_boundaries(SECOND)[-2]
    regions = [(segments[0], range(segments[0].stat().st_size)), (segments[1], range(last_batch))]
    for segment, region in regions:
        whole = segment.read_bytes()
        for at in spread(region, 300):
            segment.write_bytes(whole[:at] + bytes((whole[at] ^ bit,)) + whole[at + 1 :])
            with pytest.raises(WalCorruptError) as caught:
                recover(source, NODE)
            assert caught.value.segment == segment.name
            assert caught.value.offset <= at < caught.value.offset + BATCH_RECORD_BYTES + SEGMENT_HEADER_BYTES
            assert caught.value.reason
        segment.write_bytes(whole)
    assert recover(source, NODE).last_lsn == 14


def test_any_flipped_byte_of_an_unproven_last_batch_is_a_torn_tail(tmp_path: Path) -> None:
    last_batch = batch_boundaries(SECOND)[-2]
    for at in range(last_batch, SECOND_BYTES):
        folder = tmp_path / str(at)
        _, second = small_log(folder)
        whole = second.read_bytes()
        damaged = whole[:at] + bytes((whole[at] ^ 0x10,)) + whole[at + 1 :]
        second.write_bytes(damaged)
        in_records = at - last_batch - BATCH_RECORD_BYTES
        survivors = 11 if in_records < 0 else 12 + in_records // RECORD_BYTES[12] - 1

        found = recover(folder, NODE, 11)

        assert found.cut is not None
        assert found.cut["first_lsn"] == survivors + 1
        assert found.last_lsn == survivors
        # The whole damaged batch was kept, whatever was cut of it.
        assert (folder / found.cut["copies"][0]).read_bytes() == damaged[last_batch:]
        assert lsns_in(folder) == list(range(1, survivors + 1))


def test_what_parses_behind_the_first_bad_record_is_cut_too(tmp_path: Path) -> None:
    _, second = small_log(tmp_path)
    whole = bytearray(second.read_bytes())
    whole[batch_boundaries(SECOND)[-2] + BATCH_RECORD_BYTES] ^= 1  # record 12; 13 and 14 stay sound
    second.write_bytes(whole)
    found = recover(tmp_path, NODE)
    assert found.cut is not None
    assert (found.last_lsn, found.cut["first_lsn"], found.cut["last_lsn"]) == (11, 12, 14)


def test_a_crash_anywhere_inside_the_repair_ends_in_the_same_log(tmp_path: Path) -> None:
    _, second = small_log(tmp_path / "torn")
    second.write_bytes(second.read_bytes()[:-3])
    shutil.copytree(tmp_path / "torn", tmp_path / "repaired")
    recover(tmp_path / "repaired", NODE)
    whole = (tmp_path / "repaired" / second.name).read_bytes()
    # After the cut, with the BATCH record still announcing three records.
    second.write_bytes(second.read_bytes()[: len(whole)])
    found = recover(tmp_path / "torn", NODE)
    assert found.last_lsn == 13
    assert second.read_bytes() == whole


def test_zeros_behind_the_last_batch_are_space_written_ahead(tmp_path: Path) -> None:
    _, second = small_log(tmp_path)
    whole = second.read_bytes()
    for zeros in (1, BATCH_RECORD_BYTES - 1, BATCH_RECORD_BYTES, 3 << 20):
        second.write_bytes(whole + bytes(zeros))
        found = recover(tmp_path, NODE, 14)
        assert (found.last_lsn, found.cut) == (14, None)
        assert second.read_bytes() == whole


def test_garbage_in_space_written_ahead_is_a_torn_tail(tmp_path: Path) -> None:
    _, second = small_log(tmp_path)
    whole = second.read_bytes()
    second.write_bytes(whole + bytes(2 << 20) + b"\x01" + bytes(1 << 20))
    found = recover(tmp_path, NODE, 14)
    assert found.last_lsn == 14
    assert found.cut is not None
    assert found.cut["cut_bytes"] == (2 << 20) + 1
    assert second.read_bytes() == whole


def test_a_hole_in_the_last_batch_is_a_torn_tail(tmp_path: Path) -> None:
    # The file has its full length, but one part of the last batch never reached the disk.
    _, second = small_log(tmp_path)
    whole = bytearray(second.read_bytes())
    start = batch_boundaries(SECOND)[-2]
    whole[start : start + BATCH_RECORD_BYTES] = bytes(BATCH_RECORD_BYTES)
    second.write_bytes(whole)
    found = recover(tmp_path, NODE, 11)
    assert found.last_lsn == 11
    assert found.cut is not None
    assert found.cut["last_lsn"] is None


def test_a_batch_that_announces_another_range_than_it_holds_is_cut_whole(tmp_path: Path) -> None:
    body = b"".join(encode_record(lsn, hlc_of(lsn).pack(), 1, payload_of(lsn)) for lsn in (9, 10))
    for first, last in ((9, 9), (9, 11)):
        naive_segment(tmp_path, FIRST)
        second = naive_segment(tmp_path, [], base_lsn=9)
        opening = encode_batch(BatchRecord(first, last, hlc_of(10).pack(), len(body) + 40, crc32(body + bytes(40))))
        second.write_bytes(second.read_bytes() + opening + body + bytes(40))
        found = recover(tmp_path, NODE, 8)
        assert found.cut is not None
        assert found.last_lsn <= 10
        append_again(tmp_path, found)
        for path in tmp_path.iterdir():
            path.unlink()


def test_a_batch_whose_records_are_all_there_but_not_what_it_announces_proves_nothing(tmp_path: Path) -> None:
    naive_segment(tmp_path, FIRST)
    second = naive_segment(tmp_path, [[9]], base_lsn=9)
    body = naive_batch([10, 11])[BATCH_RECORD_BYTES:]
    opening = encode_batch(BatchRecord(10, 10, hlc_of(10).pack(), len(body), crc32(body)))
    second.write_bytes(second.read_bytes() + opening + body)
    found = recover(tmp_path, NODE)
    assert found.cut is not None
    assert "disagrees" in found.cut["reason"]
    assert found.last_lsn == 9
    append_again(tmp_path, found)


def test_a_gap_between_batches_is_refused_when_more_follows(tmp_path: Path) -> None:
    naive_segment(tmp_path, [[1], [2], [4], [5]])
    with pytest.raises(WalCorruptError, match="LSN 4 where 3 should"):
        recover(tmp_path, NODE)


def test_a_missing_segment_is_refused(tmp_path: Path) -> None:
    naive_segment(tmp_path, [[1, 2]])
    naive_segment(tmp_path, [[3, 4]], base_lsn=3).unlink()
    naive_segment(tmp_path, [[5, 6]], base_lsn=5)
    with pytest.raises(WalCorruptError, match="follows LSN 4, but 2 is the one before it"):
        recover(tmp_path, NODE)


def test_a_missing_segment_is_refused_even_across_epochs_that_leave_lsns_out(tmp_path: Path) -> None:
    naive_segment(tmp_path, [[1, 2]], epoch=1)
    kept = naive_segment(tmp_path, [[10, 11]], base_lsn=10, epoch=2, previous_lsn=2)
    naive_segment(tmp_path, [[20, 21]], base_lsn=20, epoch=3, previous_lsn=11)
    assert recover(tmp_path, NODE).last_lsn == 21
    kept.unlink()
    with pytest.raises(WalCorruptError, match="follows LSN 11, but 2 is the one before it"):
        recover(tmp_path, NODE)


def test_an_epoch_that_goes_down_is_refused(tmp_path: Path) -> None:
    naive_segment(tmp_path, [[1, 2]], epoch=3)
    naive_segment(tmp_path, [[3, 4]], base_lsn=3, epoch=2)
    with pytest.raises(WalCorruptError, match="epoch goes down from 3 to 2"):
        recover(tmp_path, NODE)


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [("node_id", "node-b", "belongs to node node-b"), ("wal_id", "f" * 32, "belongs to WAL ffff")],
)
def test_a_segment_of_another_log_is_refused(tmp_path: Path, field: str, value: str, reason: str) -> None:
    naive_segment(tmp_path, FIRST)
    naive_segment(tmp_path, SECOND, base_lsn=9, **{field: value})  # type: ignore[arg-type]
    with pytest.raises(WalCorruptError, match=reason):
        recover(tmp_path, NODE)


def test_a_log_of_another_wal_than_the_control_file_names_is_refused(tmp_path: Path) -> None:
    small_log(tmp_path)
    control.store(tmp_path, control.Control("e" * 32, NODE, 1, hlc_of(1)))
    with pytest.raises(WalCorruptError, match=f"belongs to WAL {WAL_ID}"):
        recover(tmp_path, NODE)


def test_a_renamed_segment_is_refused(tmp_path: Path) -> None:
    _, second = small_log(tmp_path)
    second.rename(tmp_path / second.name.replace("-1.wal", "-7.wal"))
    naive_segment(tmp_path, [], base_lsn=15, epoch=9)
    with pytest.raises(WalCorruptError, match="not of this name"):
        recover(tmp_path, NODE)


def test_a_damaged_control_file_stops_recovery(tmp_path: Path) -> None:
    small_log(tmp_path)
    control.store(tmp_path, control.Control(WAL_ID, NODE, 1, hlc_of(1)))
    data = bytearray((tmp_path / "control").read_bytes())
    data[50] ^= 1
    (tmp_path / "control").write_bytes(data)
    with pytest.raises(WalCorruptError, match="control file cannot be trusted"):
        recover(tmp_path, NODE)


def test_the_epoch_of_a_segment_without_a_sound_header_is_not_given_again(tmp_path: Path) -> None:
    naive_segment(tmp_path, FIRST, epoch=1)
    naive_segment(tmp_path, [], base_lsn=9, epoch=6).write_bytes(b"TALLY")
    found = recover(tmp_path, NODE, 8)
    assert (found.last_lsn, found.last_epoch) == (8, 6)
    assert found.cut is not None
    assert [path.name for path in tmp_path.glob("*.wal")] == ["00000000000000000001-1.wal"]


def test_times_of_cut_records_are_not_given_again(tmp_path: Path) -> None:
    _, second = small_log(tmp_path)
    second.write_bytes(second.read_bytes()[:-1])
    found = recover(tmp_path, NODE)
    assert found.last_lsn == 13
    assert found.highest_hlc == hlc_of(14) > hlc_of(13)


def test_a_log_that_ends_below_what_is_known_durable_is_refused(tmp_path: Path) -> None:
    small_log(tmp_path)
    with pytest.raises(WalCorruptError, match="ends with LSN 14, but LSN 15 is known to be durable"):
        recover(tmp_path, NODE, 15)
    assert recover(tmp_path, NODE, 15, accept_lost=True).last_lsn == 14


def test_corruption_that_was_accepted_as_lost_is_cut_with_all_behind_it_to_be_appended_again(tmp_path: Path) -> None:
    first, second = small_log(tmp_path)
    naive_segment(tmp_path, [[15]], base_lsn=15, epoch=2)
    whole = bytearray(first.read_bytes())
    whole[batch_boundaries(FIRST)[1] + BATCH_RECORD_BYTES + RECORD_BYTES[2]] ^= 1  # record 3
    first.write_bytes(whole)
    later = second.read_bytes()
    with pytest.raises(WalCorruptError):
        recover(tmp_path, NODE, 15)

    found = recover(tmp_path, NODE, 15, accept_lost=True)

    assert found.last_lsn == 2
    assert found.cut is not None
    assert len(found.cut["copies"]) == 3
    assert (tmp_path / f"cut-{second.stem}-0").read_bytes() == later
    sound = [each.lsn for end in lost_ends(tmp_path) for each in records_in(end, NODE) if isinstance(each, Record)]
    assert sorted(set(sound)) == [2, *range(4, 16)]
    with LogWriter(tmp_path, epoch=3, next_lsn=16, previous_lsn=2) as log:
        log.batches([1, 2])
    assert recover(tmp_path, NODE, 18).last_lsn == 18
    assert lsns_in(tmp_path) == [1, 2, 16, 17, 18]


def test_a_payload_that_looks_like_a_batch_of_an_older_log_proves_nothing(tmp_path: Path) -> None:
    second = naive_segment(tmp_path, [[1], [2]])
    look_alike = naive_batch([1])
    body = encode_record(3, hlc_of(3).pack(), 1, look_alike)
    whole = second.read_bytes()
    batch = encode_batch(BatchRecord(3, 3, hlc_of(3).pack(), len(body), crc32(body))) + body
    second.write_bytes(whole + batch[:-1])
    found = recover(tmp_path, NODE, 2)
    assert found.last_lsn == 2
    assert found.cut is not None


@pytest.mark.parametrize("before_the_edge", [1, 29, BATCH_RECORD_BYTES - 1])
def test_a_later_batch_is_found_across_the_edge_of_what_is_read_at_once(tmp_path: Path, before_the_edge: int) -> None:
    segment = naive_segment(tmp_path, [[1]])
    damaged_at = segment.stat().st_size
    garbage = b"\xaa" * (1 + WINDOW_BYTES - before_the_edge)
    segment.write_bytes(segment.read_bytes() + garbage + naive_batch([9]))
    with pytest.raises(WalCorruptError, match=f"batch at byte {damaged_at + len(garbage)} was written later"):
        recover(tmp_path, NODE)


def test_recovery_of_a_long_log_takes_flat_memory(tmp_path: Path) -> None:
    with LogWriter(tmp_path, batch_max_entries=64, segment_bytes=8 << 20, queue_max_entries=10**6) as log:
        for lsn in range(1, 120_001):
            last = log.writer.append(Hlc(lsn, 0, NODE), 1, bytes(220))
        log.wait_durable(last)
    assert sum(path.stat().st_size for path in tmp_path.glob("*.wal")) >= 29 << 20
    tracemalloc.start()
    found = recover(tmp_path, NODE, last)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert found.last_lsn == last
    assert peak_bytes < 8 << 20
