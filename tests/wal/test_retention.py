"""Retention: only whole, old, no longer needed segments go, and the log stays one piece."""

from __future__ import annotations

import os
from pathlib import Path

from tests.wal.logs import NODE, LogWriter, lsns_in, naive_segment
from wal.recovery import recover
from wal.segment import list_segments
from wal.truncation import remove_segments

NOW_S = 1_800_000_000.0
DAY_S = 86_400.0


def four_segments(folder: Path) -> None:
    for base, age_days in ((1, 9), (4, 8), (7, 3), (10, 9)):
        path = naive_segment(folder, [[base], [base + 1, base + 2]], base_lsn=base)
        os.utime(path, (NOW_S, NOW_S - age_days * DAY_S))


def bases(folder: Path) -> list[int]:
    return [segment.base_lsn for segment in list_segments(folder)]


def test_old_segments_that_are_chained_and_signed_go(tmp_path: Path) -> None:
    four_segments(tmp_path)
    removed = remove_segments(tmp_path, 12, 7 * DAY_S, NOW_S)
    assert removed == ["00000000000000000001-1.wal", "00000000000000000004-1.wal"]
    assert bases(tmp_path) == [7, 10]


def test_a_segment_with_one_record_above_the_position_stays(tmp_path: Path) -> None:
    four_segments(tmp_path)
    remove_segments(tmp_path, 5, 0, NOW_S)
    assert bases(tmp_path) == [4, 7, 10]


def test_the_last_segment_always_stays(tmp_path: Path) -> None:
    four_segments(tmp_path)
    remove_segments(tmp_path, 10**9, 0, NOW_S)
    assert bases(tmp_path) == [10]
    assert remove_segments(tmp_path, 10**9, 0, NOW_S) == []


def test_what_is_left_is_recovered_and_read(tmp_path: Path) -> None:
    four_segments(tmp_path)
    remove_segments(tmp_path, 8, 0, NOW_S)
    found = recover(tmp_path, NODE, 12)
    assert (found.first_lsn, found.last_lsn) == (7, 12)
    assert lsns_in(tmp_path, 7) == list(range(7, 13))


def test_segments_go_beside_a_running_writer(tmp_path: Path) -> None:
    with LogWriter(tmp_path, segment_bytes=600, batch_timeout_us=0) as log:
        for _ in range(60):
            log.wait_durable(log.append())
        written_s = max(segment.path.stat().st_mtime for segment in list_segments(tmp_path))
        assert remove_segments(tmp_path, log.writer.durable_lsn, 0, written_s + 1, log.writer.retire)
        assert len(list_segments(tmp_path)) == 1
        log.wait_durable(log.append())
    first = list_segments(tmp_path)[0].base_lsn
    assert lsns_in(tmp_path, first) == list(range(first, 62))
