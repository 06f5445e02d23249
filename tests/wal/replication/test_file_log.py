"""A copy of a log in files, and what a kill in the middle of changing it leaves."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from ledger.positions import Epoch, Lsn
from tests.wal.logs import NODE, WAL_ID
from tests.wal.replication.quorums import batch, lsns_of
from wal import history as histories
from wal.replication.file_log import FileLog

ROOT = Path(__file__).parents[3]
WRITTEN = [(1, 1), (1, 2), (1, 3), (2, 4), (2, 5), (3, 6), (3, 7)]
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
    assert [(histories.epoch_of(log.history, Lsn(lsn)), lsn) for _, lsn in expected] == expected
    assert {start.epoch for start in log.history} == {epoch for epoch, _ in expected}


@pytest.mark.parametrize("keep_lsn", [2, 3, 4, 5, 6])
def test_a_cut_that_is_killed_leaves_a_log_that_opens_and_is_cut_again(
    tmp_path: Path, strace: str, keep_lsn: int
) -> None:
    killed = 0
    for number in range(1, 30):
        folder = tmp_path / str(number)
        of_three_epochs(folder)
        done = subprocess.run(
            [strace, "-f", "-qq", "-o", os.devnull, "-e", "trace=rename",
             "-e", f"inject=rename:signal=KILL:when={number}", sys.executable,
             "-c", PROGRAM, str(folder), str(keep_lsn)],
            env=os.environ | {"PYTHONPATH": str(ROOT)}, stderr=subprocess.DEVNULL, timeout=100,
        )  # fmt: skip
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
