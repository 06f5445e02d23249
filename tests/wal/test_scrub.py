"""Reading old segments again: all of them in a round, each copy at its own time, and no damage is passed over."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from ledger.errors import WalCorruptError
from ledger.positions import Lsn
from tests.wal.logs import NODE, LogWriter, naive_segment
from wal.reader import WINDOW_BYTES as SCAN_BYTES
from wal.scrub import WINDOW_BYTES, LogCopy, Scrubber, check_segment
from wal.segment import Segment, list_segments, read_header

INTERVAL_S = 100.0
ROUND_S = 1_800_000_000.0
"""When a round of the first copy begins."""


def four_segments(folder: Path) -> None:
    for base in (1, 4, 7, 10):
        naive_segment(folder, [[base], [base + 1, base + 2]], base_lsn=base)


class Scrubbed:
    """A scrubber that is told the time, and what it read."""

    def __init__(self, folder: Path, durable_lsn: int = 12, place: int = 0, places: int = 1) -> None:
        self.copy = LogCopy(NODE, folder, Lsn(durable_lsn), place, places)
        self.read: list[tuple[float, int]] = []
        """When a segment was read, in parts of a round, and its first LSN."""
        self.damaged: list[tuple[str, int]] = []
        self.rounds: list[object] = []
        self.scrubber = Scrubber(
            lambda: [self.copy], INTERVAL_S, self._read, lambda event, facts: self.rounds.append(facts)
        )

    def go_on_to(self, end_s: float, step_s: float = 1.0) -> None:
        """Step from the beginning of the round on."""
        self.now_s = getattr(self, "now_s", 0.0)
        while self.now_s <= end_s:
            self.scrubber.step(ROUND_S + self.now_s)
            self.now_s += step_s

    def _read(self, copy: LogCopy, segment: Segment, error: WalCorruptError | None) -> None:
        self.read.append((self.now_s / INTERVAL_S, segment.base_lsn))
        if error is not None:
            self.damaged.append((error.segment, error.offset))


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def test_a_round_reads_each_segment_once_spread_over_its_time(tmp_path: Path) -> None:
    four_segments(tmp_path)
    scrubbed = Scrubbed(tmp_path)
    scrubbed.go_on_to(320.0)
    assert [base for _, base in scrubbed.read] == [1, 4, 7, 10] * 3
    assert scrubbed.read[:4] == [(0.25, 1), (0.5, 4), (0.75, 7), (1.0, 10)]
    assert scrubbed.rounds == [{"node_id": NODE, "segments": 4, "damaged": 0}] * 3
    assert scrubbed.scrubber.ended_s == {NODE: ROUND_S + 300.0}


def test_a_scrubber_begins_where_the_round_is_as_the_log_was_read_when_it_was_opened(tmp_path: Path) -> None:
    four_segments(tmp_path)
    scrubbed = Scrubbed(tmp_path)
    scrubbed.now_s = 60.0
    scrubbed.go_on_to(130.0)
    assert scrubbed.read == [(0.75, 7), (1.0, 10), (1.25, 1)]


def test_copies_of_one_log_read_the_same_segment_at_different_times(tmp_path: Path) -> None:
    four_segments(tmp_path)
    times = []
    for place in range(4):
        scrubbed = Scrubbed(tmp_path, place=place, places=4)
        scrubbed.go_on_to(199.0)
        times.append(sorted(when % 1 for when, base in scrubbed.read if base == 4))
    assert {time for each in times for time in each} == {0.0, 0.25, 0.5, 0.75}
    assert all(len(set(each)) == 1 for each in times)


def test_segments_that_come_and_go_in_a_round_are_neither_passed_over_nor_read_twice(tmp_path: Path) -> None:
    four_segments(tmp_path)
    scrubbed = Scrubbed(tmp_path, durable_lsn=99)
    scrubbed.go_on_to(60.0)
    list_segments(tmp_path)[0].path.unlink()
    naive_segment(tmp_path, [[13], [14, 15]], base_lsn=13)
    scrubbed.copy = scrubbed.copy._replace(durable_lsn=Lsn(15))
    scrubbed.go_on_to(100.0)
    assert [base for _, base in scrubbed.read] == [1, 4, 7, 10, 13]
    assert scrubbed.damaged == []


def test_damage_is_found_in_every_round_while_it_is_there_and_all_else_is_read(tmp_path: Path) -> None:
    four_segments(tmp_path)
    second = list_segments(tmp_path)[1].path
    flip(second, second.stat().st_size - 3)
    scrubbed = Scrubbed(tmp_path)
    scrubbed.go_on_to(200.0)
    assert [name for name, _ in scrubbed.damaged] == [second.name] * 2
    assert [base for _, base in scrubbed.read] == [1, 4, 7, 10] * 2
    assert scrubbed.rounds[-1] == {"node_id": NODE, "segments": 4, "damaged": 1}


def error_of(folder: Path, at: int, durable_lsn: int) -> WalCorruptError | None:
    segments = [*list_segments(folder), None]
    segment = segments[at]
    assert segment is not None
    return check_segment(LogCopy(NODE, folder, Lsn(durable_lsn)), segment, segments[at + 1])


@pytest.mark.parametrize("at", [0, 3], ids=["an old segment", "the one that is written"])
def test_each_flipped_bit_is_found(tmp_path: Path, at: int) -> None:
    four_segments(tmp_path)
    path = list_segments(tmp_path)[at].path
    whole = path.read_bytes()
    for offset in random.Random(1).sample(range(len(whole)), 60):
        flip(path, offset)
        assert error_of(tmp_path, at, 12) is not None, offset
        path.write_bytes(whole)
    path.write_bytes(whole[:-1])
    assert error_of(tmp_path, at, 12) is not None
    path.write_bytes(whole)
    assert error_of(tmp_path, at, 12) is None


def test_what_is_not_durable_yet_is_not_judged(tmp_path: Path) -> None:
    four_segments(tmp_path)
    path = list_segments(tmp_path)[3].path
    flip(path, path.stat().st_size - 3)
    assert error_of(tmp_path, 3, 10) is None
    assert error_of(tmp_path, 3, 12) is not None


def test_a_segment_that_is_removed_meanwhile_is_not_damaged(tmp_path: Path) -> None:
    four_segments(tmp_path)
    segments = list_segments(tmp_path)
    copy = LogCopy(NODE, tmp_path, Lsn(12))
    segments[1].path.unlink()
    assert check_segment(copy, segments[0], segments[1]) is None
    assert check_segment(copy, segments[1], segments[2]) is None


def test_batches_that_are_longer_than_what_is_read_at_once(tmp_path: Path) -> None:
    payload = b'{"x":"%s"}' % (b"x" * (WINDOW_BYTES // 2))
    with LogWriter(tmp_path, batch_max_bytes=SCAN_BYTES, record_bytes_max=SCAN_BYTES) as log:
        for _ in range(3):
            last_lsn = max(log.append(payload) for _ in range(4))
            log.wait_durable(last_lsn)
        assert error_of(tmp_path, 0, last_lsn) is None
    path = list_segments(tmp_path)[0].path
    flip(path, path.read_bytes().rindex(b"xx"))
    assert error_of(tmp_path, 0, last_lsn) is not None


def test_a_log_that_is_written_meanwhile_is_sound(tmp_path: Path) -> None:
    with LogWriter(tmp_path, segment_bytes=20_000, batch_timeout_us=0) as log:
        for _ in range(20):
            log.wait_durable(max(log.append() for _ in range(40)))
            log.append()
            for at in range(len(list_segments(tmp_path))):
                assert error_of(tmp_path, at, log.writer.durable_lsn) is None
    assert len(list_segments(tmp_path)) > 1
    assert read_header(list_segments(tmp_path)[-1]).previous_lsn > 0
