"""Files that are removed, renamed or replaced under the writer: noticed, busy or idle, and nothing is taken after."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from ledger.errors import WalPoisonedError
from tests.wal.logs import LogWriter
from wal.control import CONTROL_NAME
from wal.log import CHECK_INTERVAL_S
from wal.segment import LOCK_NAME, FolderLock, list_segments
from wal.truncation import remove_segments

pytestmark = pytest.mark.usefixtures("core")

assert CHECK_INTERVAL_S <= 0.5, "noticed within a second, the time of one check included"


def oldest(folder: Path) -> Path:
    return list_segments(folder)[0].path


def newest(folder: Path) -> Path:
    return list_segments(folder)[-1].path


def unlink(path: Path) -> None:
    path.unlink()


def rename(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))


def replace(path: Path) -> None:
    """By a copy, byte for byte."""
    copy = path.with_name("copy")
    shutil.copy2(path, copy)
    copy.rename(path)


@pytest.mark.parametrize("fault", [unlink, rename, replace])
@pytest.mark.parametrize("which", [newest, oldest, lambda folder: folder / LOCK_NAME])
def test_an_idle_writer_misses_a_file(
    tmp_path: Path, which: Callable[[Path], Path], fault: Callable[[Path], None]
) -> None:
    with ExitStack() as stack:
        stack.callback(FolderLock(tmp_path).release)
        log = LogWriter(tmp_path, segment_bytes=400)
        log.batches([1, 2, 3, 4])
        assert len(list_segments(tmp_path)) > 2
        path = which(tmp_path)
        fault(path)
        assert path.name in str(log.wait_failure())
        with pytest.raises(WalPoisonedError, match="removed, renamed or replaced"):
            log.append()


def test_nothing_that_was_synced_into_a_removed_file_is_reported_durable(tmp_path: Path) -> None:
    log = LogWriter(tmp_path)
    release = log.hold_reports()
    log.wait_durable(log.append())
    newest(tmp_path).unlink()
    lsn = log.append()
    release()
    log.wait_failure()
    assert log.writer.durable_lsn < lsn
    assert log.told == [1]


def test_a_writer_misses_its_folder(tmp_path: Path) -> None:
    folder = tmp_path / "log"
    folder.mkdir()
    log = LogWriter(folder)
    # It looks when the other one is there, not when there is none.
    release = log.hold_reports()
    log.wait_durable(log.append())
    shutil.copytree(folder, tmp_path / "copy")
    folder.rename(tmp_path / "away")
    (tmp_path / "copy").rename(folder)
    release()
    assert "in the place of the WAL folder" in str(log.wait_failure())


def test_a_writer_misses_its_control_file_but_not_when_it_is_replaced(tmp_path: Path) -> None:
    (tmp_path / CONTROL_NAME).write_bytes(b"")
    log = LogWriter(tmp_path)
    replace(tmp_path / CONTROL_NAME)
    log.writer._log.guard.check()
    (tmp_path / CONTROL_NAME).unlink()
    assert CONTROL_NAME in str(log.wait_failure())


def test_segments_that_retention_removes_are_not_missed(tmp_path: Path) -> None:
    with LogWriter(tmp_path, segment_bytes=400) as log:
        log.batches([1, 2, 3, 4])
        removed = remove_segments(tmp_path, log.writer.durable_lsn, 0, 2e9, log.writer.retire)
        assert len(removed) > 1
        while removed[0] in log.writer._log.guard.watched:
            log.wait_durable(log.append())
        assert not log.failures
