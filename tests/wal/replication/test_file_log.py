"""A copy of a log in files, and what a kill in the middle of changing it leaves."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from ledger.errors import WalError
from ledger.facts.events import BATCH_RECORD_TYPE
from ledger.positions import Epoch, Lsn
from tests.forked import run_forked
from tests.wal.logs import NODE, WAL_ID, traced
from tests.wal.replication.quorums import batch, lsns_of
from wal import native
from wal.control import EpochStart, epoch_of
from wal.format import SegmentHeader
from wal.inspect import dump
from wal.replication import file_log
from wal.replication.configuration import Configuration, Member
from wal.replication.file_log import FileLog, oldest_whole_lsn
from wal.segment import Segment, list_segments, read_header

WRITTEN = [(1, 1), (1, 2), (1, 3), (2, 4), (2, 5), (3, 6), (3, 7)]
IMPORTED = "import tests.wal.logs, wal.replication.file_log"
PROGRAM = """
import sys
from pathlib import Path
from tests.wal.logs import NODE, WAL_ID
from wal.replication.file_log import FileLog
FileLog(Path(sys.argv[1]), NODE, WAL_ID).truncate(int(sys.argv[2]))
"""


@contextmanager
def opened(folder: Path) -> Iterator[FileLog]:
    with closing(FileLog(folder, NODE, WAL_ID)) as log:
        yield log


def write(log: FileLog, epoch: int, first_lsn: int, last_lsn: int) -> None:
    log.append(Epoch(epoch), batch(first_lsn, last_lsn))
    log.sync()


def of_three_epochs(folder: Path) -> None:
    with opened(folder) as log:
        write(log, 1, 1, 3)
        write(log, 2, 4, 5)
        write(log, 3, 6, 7)


def check(log: FileLog, expected: list[tuple[int, int]]) -> None:
    """It holds just these (epoch, LSN), and its history says so, too."""
    assert lsns_of(log) == expected
    assert [(epoch_of(log.history, Lsn(lsn)), lsn) for _, lsn in expected] == expected
    assert {start.epoch for start in log.history} == {epoch for epoch, _ in expected}


@pytest.mark.parametrize("keep_lsn", [2, 3, 4, 5, 6])
def test_a_cut_that_is_killed_leaves_a_log_that_opens_and_is_cut_again(
    tmp_path: Path, strace: str, keep_lsn: int
) -> None:
    killed = 0
    for number in range(1, 30):
        folder = tmp_path / str(number)
        of_three_epochs(folder)
        tracer = traced(strace, os.devnull, "trace=rename", f"inject=rename:signal=KILL:when={number}")
        done = run_forked(IMPORTED, "-c", PROGRAM, folder, str(keep_lsn), tracer=tracer)
        with opened(folder) as log:
            assert log.tail.lsn >= keep_lsn
            check(log, WRITTEN[: log.tail.lsn])
            log.truncate(Lsn(keep_lsn))
            check(log, WRITTEN[:keep_lsn])
        if done.returncode == 0:
            break
        killed += 1
    assert 2 <= killed < 29


def test_what_was_cut_away_is_not_in_the_history_of_what_comes_next(tmp_path: Path) -> None:
    of_three_epochs(tmp_path)
    with opened(tmp_path) as log:
        log.truncate(Lsn(4))
    with opened(tmp_path) as log:
        write(log, 2, 5, 8)
    with opened(tmp_path) as log:
        check(log, [*WRITTEN[:4], (2, 5), (2, 6), (2, 7), (2, 8)])


def test_what_comes_together_is_one_batch_and_what_comes_alone_stays_as_it_is(tmp_path: Path) -> None:
    with opened(tmp_path) as log:
        write(log, 1, 1, 3)
        log.append(Epoch(1), batch(4, 5))
        log.append(Epoch(1), batch(6, 6))
        log.sync()
        check(log, [(1, lsn) for lsn in range(1, 7)])
    found = [(item["first_lsn"], item["last_lsn"]) for item in dump(tmp_path) if item["type"] == BATCH_RECORD_TYPE]
    assert found == [(1, 3), (4, 6)]


def test_what_comes_together_is_never_more_than_a_batch_may_hold(tmp_path: Path) -> None:
    with opened(tmp_path) as log:
        log.append(Epoch(1), batch(1, 1, payload_bytes=7 << 20))
        log.append(Epoch(1), batch(2, 5, payload_bytes=15 << 20))
    with opened(tmp_path) as log:
        check(log, [(1, lsn) for lsn in range(1, 6)])


def test_a_segment_that_is_removed_while_the_oldest_is_looked_for_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_three_epochs(tmp_path)
    assert oldest_whole_lsn(tmp_path) == 1
    first = list_segments(tmp_path)[0]

    def just_removed(segment: Segment) -> SegmentHeader:
        first.path.unlink(missing_ok=True)
        return read_header(segment)

    monkeypatch.setattr(file_log, "read_header", just_removed)
    assert oldest_whole_lsn(tmp_path) == 4


def test_a_segment_that_is_removed_while_it_is_to_be_read_is_no_longer_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_three_epochs(tmp_path)
    listed = list_segments(tmp_path)
    with opened(tmp_path) as log:
        assert log.remove_upto(Lsn(3))
        monkeypatch.setattr(file_log, "list_segments", lambda _: listed)
        with pytest.raises(WalError, match="no longer in"):
            log.read(Lsn(2), Lsn(7), 100)
        assert log.read(Lsn(4), Lsn(7), 100).last_lsn == 5


class Killed(BaseException):
    """The process is killed, in a test: nothing catches it but the test."""


CHANGING = ("rename", "unlink", "fsync", "fdatasync", "pwrite", "pwritev", "ftruncate", "mkdir")
"""System calls that change files, by which a process that is killed has come so far and no further."""


@contextmanager
def killed_before(number: int) -> Iterator[list[int]]:
    """Nothing is changed from the call of this number on; how many calls there were is in the list."""
    made = [0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "_module", None)  # which makes several of these calls at once
        for name in CHANGING:
            patch.setattr(os, name, _counted(getattr(os, name), made, number))
        yield made


def _counted(call: Callable[..., Any], made: list[int], number: int) -> Callable[..., Any]:
    def counted(*arguments: Any, **named: Any) -> Any:
        made[0] += 1
        if made[0] >= number:
            raise Killed
        return call(*arguments, **named)

    return counted


Held = list[tuple[int, int]]
MEMBERS = Configuration(1, Epoch(1), "use1", False, (Member("a" * 32, "use1"),))


def held_in(log: FileLog) -> Held:
    return lsns_of(log) if log.tail.lsn >= log.first_lsn else []


def write_upto(log: FileLog, epoch: int, last_lsn: int) -> None:
    if log.tail.lsn < last_lsn:
        write(log, epoch, log.tail.lsn + 1, last_lsn)


STEPS: list[tuple[Callable[[FileLog], object], Held]] = [
    (lambda log: write_upto(log, 1, 2), [(1, 1), (1, 2)]),
    (lambda log: log.configure(MEMBERS), [(1, 1), (1, 2)]),
    (lambda log: write_upto(log, 2, 4), [(1, 1), (1, 2), (2, 3), (2, 4)]),
    (lambda log: log.truncate(Lsn(3)), [(1, 1), (1, 2), (2, 3)]),
    # What was cut is written again in an earlier epoch than that of the segment which is left there, empty.
    (lambda log: log.truncate(Lsn(2)), [(1, 1), (1, 2)]),
    (lambda log: write_upto(log, 1, 4), [(1, 1), (1, 2), (1, 3), (1, 4)]),
    (lambda log: write_upto(log, 3, 6), [(1, 1), (1, 2), (1, 3), (1, 4), (3, 5), (3, 6)]),
    (lambda log: log.begin_at(Lsn(9), (EpochStart(Epoch(3), Lsn(5)),)), []),
    (lambda log: write_upto(log, 4, 10), [(4, 9), (4, 10)]),
    (lambda log: write_upto(log, 5, 12), [(4, 9), (4, 10), (5, 11), (5, 12)]),
    (lambda log: log.remove_upto(Lsn(11)), [(5, 11), (5, 12)]),
]
"""What is done to a copy, and what it holds then: ``(epoch, LSN)`` of each record. Doing it again changes nothing."""
BEGIN_AT = 7
"""The step that a log which was opened anew has forgotten as long as nothing is written: it is told of it again."""


@pytest.mark.parametrize("index", range(len(STEPS)))
def test_a_kill_before_any_call_leaves_a_sound_log_and_doing_it_again_goes_on(tmp_path: Path, index: int) -> None:
    was = STEPS[index - 1][1] if index else []
    act, to_be = STEPS[index]
    was_killed, number = True, 0
    while was_killed:
        number += 1
        log = FileLog(tmp_path / str(number), NODE, WAL_ID)
        for earlier, _ in STEPS[:index]:
            earlier(log)
        member_id = log.control.member_id
        try:
            with killed_before(number):
                act(log)
            was_killed = False
        except Killed:
            assert log._lock is not None
            log._lock.release()
        else:
            log.close()
        with opened(tmp_path / str(number)) as log:
            found = held_in(log)
            assert any(found == whole[: len(found)] or found == whole[-len(found) :] for whole in (was, to_be))
            assert [lsn for lsn in was if lsn in to_be] == [lsn for lsn in was if lsn in to_be and lsn in found]
            assert log.control.member_id == member_id
            again = BEGIN_AT if index >= BEGIN_AT and not found else index
            for step, held in STEPS[again:]:
                step(log)
                assert held_in(log) == held
            assert log.configuration == (MEMBERS if again else log.configuration)
        with opened(tmp_path / str(number)) as log:
            held = held_in(log)
            assert held == STEPS[-1][1]
            assert [(epoch_of(log.history, Lsn(lsn)), lsn) for _, lsn in held] == held
    assert number > 1
