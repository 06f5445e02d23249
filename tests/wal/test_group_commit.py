"""The writer: what is grouped, what is refused, what is said when, and that order holds."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from itertools import pairwise
from pathlib import Path

import pytest

from ledger.errors import (
    InvalidInputError,
    RecordTooLargeError,
    WalError,
    WalFullError,
    WalPoisonedError,
)
from ledger.facts.events import BATCH_RECORD_TYPE
from ledger.hlc import Clock, Hlc
from tests.wal.logs import FULL, NODE, WAIT_S, WAL_ID, LogWriter, hlc_of, lsns_in, payload_of, snapshot
from wal.format import RECORD_HEADER_BYTES, SEGMENT_HEADER_BYTES
from wal.group_commit import GroupCommit
from wal.inspect import dump
from wal.log import CHECK_INTERVAL_S, Log
from wal.queue import DURABLE_BATCHES_MAX, HALF_MIN
from wal.reader import read
from wal.recovery import recover
from wal.segment import list_segments

pytestmark = pytest.mark.usefixtures("core")


def batch_ranges(folder: Path) -> list[tuple[object, object]]:
    return [(item["first_lsn"], item["last_lsn"]) for item in dump(folder) if item["type"] == BATCH_RECORD_TYPE]


def test_what_was_appended_is_read_back(tmp_path: Path) -> None:
    with LogWriter(tmp_path) as log:
        for _ in range(100):
            last = log.append()
        log.wait_durable(last)
        assert log.writer.durable_lsn == log.writer.written_lsn == last == log.writer.next_lsn - 1
    assert lsns_in(tmp_path) == list(range(1, 101))


def test_whoever_appends_wakes_the_writer(tmp_path: Path) -> None:
    # One that only looked each time that it looks at the folder would take a hundred seconds.
    with LogWriter(tmp_path) as log:
        began_s = time.monotonic()
        for _ in range(200):
            log.wait_durable(log.append())
        assert time.monotonic() - began_s < 200 * CHECK_INTERVAL_S / 4


def test_one_record_alone_is_written_at_once(tmp_path: Path) -> None:
    # A batch that were held open for company would only be written after an hour.
    with LogWriter(tmp_path, batch_timeout_us=3_600_000_000) as log:
        for _ in range(5):
            log.wait_durable(log.append())
        assert log.told == [1, 2, 3, 4, 5]


def test_records_that_come_during_a_sync_share_the_next_one(tmp_path: Path) -> None:
    with LogWriter(tmp_path) as log:
        log.batches([1, 40, 3])
        assert log.told == [1, 41, 44]
    assert batch_ranges(tmp_path) == [(1, 1), (2, 41), (42, 44)]


def test_behind_a_batch_of_several_the_next_is_held_open_until_as_many_are_back(tmp_path: Path) -> None:
    with LogWriter(tmp_path, batch_timeout_us=3_600_000_000) as log:
        log.batches([1, 3])
        log.append()
        log.append()
        assert not log.becomes_durable(5, within_s=0.1)
        log.wait_durable(log.append())
    assert batch_ranges(tmp_path) == [(1, 1), (2, 4), (5, 7)]


def test_half_of_many_are_enough_where_they_come_back_more_slowly_than_a_sync(tmp_path: Path) -> None:
    with LogWriter(tmp_path, batch_timeout_us=3_600_000_000) as log:
        log.batches([1, 2 * HALF_MIN])
        for _ in range(HALF_MIN - 1):
            log.append()
        assert not log.becomes_durable(2 * HALF_MIN + 2, within_s=0.1), "fewer are waited for, however long that takes"
        log.wait_durable(log.append())
        log.writer.expect(2 * HALF_MIN)
        for _ in range(HALF_MIN):
            log.append()
        assert not log.becomes_durable(3 * HALF_MIN + 2, within_s=0.1), "an answer of others takes longer than a sync"
        for _ in range(HALF_MIN):
            last = log.append()
        log.wait_durable(last)
    assert [last - first + 1 for first, last in batch_ranges(tmp_path)] == [1, 32, 16, 32]


def test_what_came_while_a_batch_was_written_does_not_wait_for_its_writers(tmp_path: Path) -> None:
    # Of six, two stay behind while four are written; held open for two more, they would be written after an hour.
    with LogWriter(tmp_path, batch_timeout_us=3_600_000_000, batch_max_entries=4) as log:
        release = log.hold_reports()
        log.wait_durable(log.append())
        for _ in range(6):
            last = log.append()
        release()
        log.wait_durable(last)
    assert batch_ranges(tmp_path) == [(1, 1), (2, 5), (6, 7)]


def test_a_few_that_came_while_a_batch_was_written_wait_for_its_writers(tmp_path: Path) -> None:
    with LogWriter(tmp_path, batch_timeout_us=3_600_000_000, batch_max_entries=4) as log:
        release = log.hold_reports()
        log.wait_durable(log.append())
        for _ in range(5):
            log.append()
        release()
        log.wait_durable(5)
        assert not log.becomes_durable(6, within_s=0.1)
        for _ in range(3):
            last = log.append()
        log.wait_durable(last)
    assert batch_ranges(tmp_path) == [(1, 1), (2, 5), (6, 9)]


def test_a_batch_is_not_held_open_longer_than_its_timeout(tmp_path: Path) -> None:
    with LogWriter(tmp_path, batch_timeout_us=2000) as log:
        log.batches([1, 3])
        log.wait_durable(log.append())
    assert batch_ranges(tmp_path) == [(1, 1), (2, 4), (5, 5)]


def test_writers_who_are_answered_later_are_waited_for_from_then_on(tmp_path: Path) -> None:
    with LogWriter(tmp_path, batch_timeout_us=3_600_000_000) as log:
        log.wait_durable(log.append())
        assert not log.becomes_durable(2, within_s=0.1), "the writer sleeps for the next"
        log.writer.expect(3)
        log.append()
        log.append()
        assert not log.becomes_durable(2, within_s=0.1)
        log.wait_durable(log.append())
        log.append()
        log.writer.expect(1)
        assert not log.becomes_durable(5, within_s=0.1), "it is held open for the writers of the batch before"
    assert batch_ranges(tmp_path) == [(1, 1), (2, 4), (5, 5)]


def test_no_more_writers_are_waited_for_than_a_batch_may_have(tmp_path: Path) -> None:
    with LogWriter(tmp_path, batch_timeout_us=3_600_000_000, batch_max_entries=4) as log:
        log.wait_durable(log.append())
        log.writer.expect(100)
        for _ in range(4):
            last = log.append()
        log.wait_durable(last)
    assert batch_ranges(tmp_path) == [(1, 1), (2, 5)]


def test_who_waits_for_writers_that_are_answered_later_does_not_wait_for_long(tmp_path: Path) -> None:
    with LogWriter(tmp_path, batch_timeout_us=2000) as log:
        log.wait_durable(log.append())
        log.writer.expect(3)
        log.wait_durable(log.append())
    assert batch_ranges(tmp_path) == [(1, 1), (2, 2)]


def test_closing_does_not_wait_for_a_batch_held_open(tmp_path: Path) -> None:
    log = LogWriter(tmp_path, batch_timeout_us=3_600_000_000)
    log.batches([1, 3])
    log.append()
    log.close()
    assert log.told == [1, 4, 5]


def test_no_batch_has_more_than_the_most_entries(tmp_path: Path) -> None:
    with LogWriter(tmp_path, batch_max_entries=4) as log:
        log.batches([1])
        for _ in range(10):
            log.append()
    sizes = [last - first + 1 for first, last in batch_ranges(tmp_path)]  # type: ignore[operator]
    assert sum(sizes) == 11
    assert max(sizes) <= 4


def test_no_batch_of_several_has_more_than_the_most_bytes(tmp_path: Path) -> None:
    most = 4 * (RECORD_HEADER_BYTES + 100)
    with LogWriter(tmp_path, batch_max_bytes=most, batch_timeout_us=0) as log:
        log.wait_durable(log.append(bytes(100)))
        for size in (100, 100, 100, 100, 100, 1000, 100, 399, 1):
            log.append(bytes(size))
    for segment in list_segments(tmp_path):
        for item in dump(tmp_path):
            assert item["segment"] == segment.name
    bodies = {}
    for item in dump(tmp_path):
        if item["type"] == BATCH_RECORD_TYPE:
            opened = item["lsn"]
            bodies[opened] = []
        else:
            bodies[opened].append(item["length"])
    assert sum(map(len, bodies.values())) == 10
    assert all(len(lengths) == 1 or sum(lengths) <= most for lengths in bodies.values())


def test_a_batch_of_one_entry_at_the_most_is_synced_for_each_record(tmp_path: Path) -> None:
    with LogWriter(tmp_path, batch_max_entries=1) as log:
        for _ in range(20):
            log.append()
    assert batch_ranges(tmp_path) == [(lsn, lsn) for lsn in range(1, 21)]
    assert log.told == list(range(1, 21))


def test_a_full_segment_is_followed_by_another_of_the_same_epoch(tmp_path: Path) -> None:
    with LogWriter(tmp_path, segment_bytes=1000, batch_timeout_us=0) as log:
        for _ in range(50):
            log.wait_durable(log.append(bytes(150)))
    segments = list_segments(tmp_path)
    assert len(segments) > 5
    assert {segment.epoch for segment in segments} == {1}
    assert all(SEGMENT_HEADER_BYTES < segment.path.stat().st_size <= 1000 for segment in segments)
    assert [record.lsn for record in read(tmp_path, 1, NODE)] == list(range(1, 51))
    assert recover(tmp_path, NODE, 50).segments == len(segments)


def test_a_record_larger_than_a_segment_has_one_of_its_own(tmp_path: Path) -> None:
    with LogWriter(tmp_path, segment_bytes=1000) as log:
        for size in (10, 5000, 10):
            log.wait_durable(log.append(bytes(size)))
    assert [segment.base_lsn for segment in list_segments(tmp_path)] == [1, 2, 3]
    assert recover(tmp_path, NODE, 3).last_lsn == 3


def test_a_new_epoch_begins_a_new_segment(tmp_path: Path) -> None:
    for epoch, next_lsn in ((1, 1), (2, 3)):
        with LogWriter(tmp_path, epoch=epoch, next_lsn=next_lsn) as log:
            log.batches([1, 1])
    assert [(segment.base_lsn, segment.epoch) for segment in list_segments(tmp_path)] == [(1, 1), (3, 2)]
    assert recover(tmp_path, NODE, 4).epoch_ends == {1: 2, 2: 4}


def test_an_epoch_is_not_opened_twice(tmp_path: Path) -> None:
    LogWriter(tmp_path, epoch=4).close()
    with pytest.raises(WalError, match="must take a higher epoch"):
        LogWriter(tmp_path, epoch=4)


def test_a_segment_that_cannot_be_made_is_said_at_once(tmp_path: Path) -> None:
    with pytest.raises(OSError):
        LogWriter(tmp_path / "missing")


def test_a_full_queue_rejects_and_queues_nothing(tmp_path: Path) -> None:
    with LogWriter(tmp_path, queue_max_entries=10, batch_timeout_us=0) as log:
        log.batches([1])
        release = log.hold_reports()
        log.wait_durable(log.append())
        for _ in range(10):
            log.append()
        with pytest.raises(WalFullError, match="10 records wait"):
            log.append()
        assert log.writer.next_lsn == 13
        release()
        log.wait_durable(12)
        log.wait_durable(log.append())
    assert lsns_in(tmp_path) == list(range(1, 14))


def test_the_queue_is_bounded_in_bytes_too(tmp_path: Path) -> None:
    with LogWriter(tmp_path, queue_max_bytes=1500, record_bytes_max=1000, batch_timeout_us=0) as log:
        release = log.hold_reports()
        log.wait_durable(log.append())
        log.append(bytes(900))
        with pytest.raises(WalFullError, match="bytes wait"):
            log.append(bytes(900))
        release()
        log.wait_durable(2)
        log.wait_durable(log.append(bytes(900)))


def test_a_record_over_the_bound_is_refused(tmp_path: Path) -> None:
    with LogWriter(tmp_path, record_bytes_max=100) as log:
        with pytest.raises(RecordTooLargeError, match="a record of 101 bytes"):
            log.append(bytes(101 - RECORD_HEADER_BYTES))
        log.wait_durable(log.append(bytes(100 - RECORD_HEADER_BYTES)))
        assert log.writer.durable_lsn == 1


@pytest.mark.parametrize("record_type", [0, 256, -1, BATCH_RECORD_TYPE])
def test_a_type_that_no_record_has_is_refused(tmp_path: Path, record_type: int) -> None:
    with LogWriter(tmp_path) as log, pytest.raises(InvalidInputError, match="not the type of a record"):
        log.writer.append(hlc_of(1), record_type, b"")


def test_an_hlc_that_does_not_rise_is_refused(tmp_path: Path) -> None:
    with LogWriter(tmp_path) as log:
        log.writer.append(Hlc(5, 5, NODE), 1, b"")
        for hlc in (Hlc(5, 5, NODE), Hlc(5, 4, NODE), Hlc(4, 9, NODE)):
            with pytest.raises(InvalidInputError, match="not above"):
                log.writer.append(hlc, 1, b"")
        assert log.writer.append(Hlc(5, 6, NODE), 1, b"") == 2


def test_an_hlc_of_another_node_is_refused(tmp_path: Path) -> None:
    with LogWriter(tmp_path) as log, pytest.raises(InvalidInputError, match="not of node"):
        log.writer.append(Hlc(5, 5, "node-b"), 1, b"")


def test_a_closed_writer_takes_nothing_and_closes_twice(tmp_path: Path) -> None:
    log = LogWriter(tmp_path)
    log.append()
    log.close()
    log.close()
    assert log.writer.durable_lsn == 1
    with pytest.raises(WalPoisonedError, match="closed"):
        log.append()


def test_a_writer_that_cannot_report_fails_loudly(tmp_path: Path) -> None:
    failed = threading.Event()
    read_only = os.open(os.devnull, os.O_RDONLY)
    writer = GroupCommit(
        Log(tmp_path, node_id=NODE, wal_id=WAL_ID, epoch=1, next_lsn=1),
        durable_fd=read_only,
        on_failure=lambda error: failed.set(),
    )
    writer.append(hlc_of(1), 1, b"")
    assert failed.wait(WAIT_S)
    with pytest.raises(WalPoisonedError, match="Bad file descriptor"):
        writer.append(hlc_of(2), 1, b"")
    with pytest.raises(WalPoisonedError):
        writer.close(WAIT_S)
    os.close(read_only)


def test_hlc_and_lsn_rise_together_whatever_threads_append(tmp_path: Path) -> None:
    clock = Clock(NODE, 5000)
    step = threading.Lock()
    drawn: dict[int, Hlc] = {}
    with LogWriter(tmp_path, segment_bytes=100_000, queue_max_entries=10**6) as log:

        def append_many(number: int) -> None:
            for n in range(500):
                with step:
                    hlc = clock.tick(1_000_000 + n // 100)
                    lsn = log.writer.append(hlc, 1, b"%d/%d" % (number, n))
                assert lsn not in drawn
                drawn[lsn] = hlc
                if n % 50 == 0:
                    log.wait_durable(lsn)

        threads = [threading.Thread(target=append_many, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        log.wait_durable(4000)
        assert log.told == sorted(log.told)
    records = list(read(tmp_path, 1, NODE))
    assert [record.lsn for record in records] == list(range(1, 4001))
    assert all(before.hlc < after.hlc for before, after in pairwise(records))
    assert all(drawn[record.lsn] == record.hlc for record in records)
    by_thread: dict[bytes, list[int]] = {}
    for record in records:
        thread_number, n = record.payload.split(b"/")
        by_thread.setdefault(thread_number, []).append(int(n))
    assert all(numbers == list(range(500)) for numbers in by_thread.values())


def test_of_every_batch_is_heard_once(tmp_path: Path) -> None:
    with LogWriter(tmp_path) as log:
        log.batches([1, 7, 2])
        assert log.told == [1, 8, 10]
        assert log.writer.take_durable() == []
    assert [batch.entries for batch in log.heard] == [1, 7, 2]
    assert all(batch.sync_s > 0 for batch in log.heard)


def test_of_batches_that_nobody_asks_for_the_last_are_kept(tmp_path: Path) -> None:
    with LogWriter(tmp_path, batch_max_entries=1) as log:
        for _ in range(DURABLE_BATCHES_MAX + 10):
            last = log.append()
        log.wait_durable(last)
        assert log.told == list(range(11, last + 1))


def test_a_bell_that_nobody_hears_holds_nothing_up(tmp_path: Path) -> None:
    fd = os.eventfd(0, os.EFD_NONBLOCK)
    os.eventfd_write(fd, FULL)
    writer = GroupCommit(
        Log(tmp_path, node_id=NODE, wal_id=WAL_ID, epoch=1, next_lsn=1), durable_fd=fd, on_failure=pytest.fail
    )
    for lsn in range(1, 10):
        writer.append(hlc_of(lsn), 1, b"")
    writer.close(WAIT_S)
    assert (writer.durable_lsn, os.eventfd_read(fd), writer.has_ended) == (9, FULL, True)
    os.close(fd)


def test_a_child_of_the_process_writes_nothing(tmp_path: Path) -> None:
    with LogWriter(tmp_path) as log:
        log.batches([1, 3])
        before = snapshot(tmp_path)
        child = os.fork()
        if child == 0:
            with contextlib.suppress(BaseException):
                log.append()
                log.writer.close(0.0)
            os._exit(0 if snapshot(tmp_path) == before else 1)
        assert os.waitpid(child, 0)[1] == 0
        log.wait_durable(log.append())
    assert lsns_in(tmp_path) == [1, 2, 3, 4, 5]


def test_a_writer_never_leaves_descriptors_behind(tmp_path: Path) -> None:
    def open_below(folder: Path) -> list[str]:
        """Others of this process come and go as they like."""
        names = []
        for descriptor in Path("/proc/self/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # that of the listing
                names.append(str(descriptor.readlink()))
        return [name for name in names if name.startswith(str(folder))]

    with LogWriter(tmp_path, segment_bytes=500, batch_timeout_us=0) as log:
        for _ in range(20):
            log.wait_durable(log.append(bytes(200)))
        assert open_below(tmp_path)
    recover(tmp_path, NODE, 20)
    list(read(tmp_path, 1, NODE))
    assert open_below(tmp_path) == []


# --- many at once ---------------------------------------------------------------------------------


def test_records_appended_together_are_those_that_were_appended_one_by_one(tmp_path: Path) -> None:
    for folder, together in ((tmp_path / "one", False), (tmp_path / "many", True)):
        folder.mkdir()
        with LogWriter(folder) as log:
            log.wait_durable(log.append())
            if together:
                assert log.writer.append_all([(hlc_of(lsn), 1, payload_of(lsn)) for lsn in range(2, 51)]) == 2
            else:
                assert [log.append() for _ in range(2, 51)] == list(range(2, 51))
            assert log.writer.next_lsn == 51
            log.wait_durable(50)
    one, many = (list(read(tmp_path / name, 1, NODE, 50)) for name in ("one", "many"))
    assert one == many
    assert len(many) == 50


@pytest.mark.parametrize(
    "bad",
    [
        (hlc_of(4), 0, b"x"),
        (hlc_of(4), BATCH_RECORD_TYPE, b"x"),
        (hlc_of(4), 256, b"x"),
        (hlc_of(2), 1, b"x"),
        (hlc_of(4)._replace(node_id="other"), 1, b"x"),
        (hlc_of(4), 1, b"x" * 1000),
    ],
)
def test_of_records_appended_together_one_that_is_refused_refuses_all(
    tmp_path: Path, bad: tuple[Hlc, int, bytes]
) -> None:
    with LogWriter(tmp_path, record_bytes_max=500) as log:
        log.append()
        with pytest.raises(InvalidInputError):
            log.writer.append_all([(hlc_of(2), 1, b"a"), (hlc_of(3), 1, b"b"), bad, (hlc_of(9), 1, b"c")])
        assert log.writer.next_lsn == 2
        log.wait_durable(log.append())
    assert lsns_in(tmp_path) == [1, 2]


def test_records_that_do_not_all_fit_are_all_refused(tmp_path: Path) -> None:
    with LogWriter(tmp_path, queue_max_entries=10, batch_timeout_us=0) as log:
        with pytest.raises(WalFullError):
            log.writer.append_all([(hlc_of(lsn), 1, b"x") for lsn in range(1, 12)])
        log.wait_durable(log.writer.append_all([(hlc_of(lsn), 1, payload_of(lsn)) for lsn in range(1, 11)]) + 9)
    assert lsns_in(tmp_path) == list(range(1, 11))
