"""Cutting a log back: exactly to the position, whatever stands where, and again after a kill at any step."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ledger.errors import WalCorruptError, WalError
from ledger.positions import Epoch, Lsn
from tests.conftest import spread
from tests.forked import run_forked
from tests.wal.logs import NODE, WAL_ID, LogWriter, hlc_of, lsns_in, naive_segment, snapshot, traced
from wal import control
from wal.control import Control, EpochStart, begin_epoch, history_up_to
from wal.recovery import recover
from wal.segment import list_segments
from wal.truncation import CUT_PREFIX, truncate

COMMITTED_LSN = 4
LAST_LSN = 20
IMPORTED = "import wal.truncation"
PROGRAM = """
import sys
from pathlib import Path
from wal.truncation import truncate
truncate(Path(sys.argv[1]), "node-a", int(sys.argv[2]))
"""


def forked_log(folder: Path) -> None:
    """LSNs 3 to 20 in batches, segments and epochs of all kinds; 4 is committed, all of it durable."""
    naive_segment(folder, [[3], [4, 5, 6]], base_lsn=3)
    naive_segment(folder, [[7], [8, 9, 10, 11]], base_lsn=7)
    naive_segment(folder, [], base_lsn=12, epoch=2)
    naive_segment(folder, [[12, 13, 14]], base_lsn=12, epoch=3)
    naive_segment(folder, [[15, 16], [17], [18, 19, 20]], base_lsn=15, epoch=3)
    told = (EpochStart(Epoch(1), Lsn(1)), EpochStart(Epoch(3), Lsn(12)))
    control.store(
        folder,
        Control(
            WAL_ID,
            NODE,
            Epoch(3),
            hlc_of(LAST_LSN),
            Lsn(LAST_LSN),
            chained_lsn=Lsn(2),
            committed_lsn=Lsn(COMMITTED_LSN),
            history=told,
        ),
    )


def check_cut(folder: Path, last_lsn: int) -> None:
    """The log ends there, is sound, and a new epoch goes on in it."""
    assert lsns_in(folder, 3) == list(range(3, last_lsn + 1))
    found = recover(folder, NODE)
    assert (found.last_lsn, found.cut) == (last_lsn, None)
    known = control.load(folder)
    assert known is not None
    assert known.durable_lsn == last_lsn
    begun = begin_epoch(history_up_to(known.history, found.last_lsn), Epoch(9), Lsn(last_lsn + 1))
    control.store(folder, known._replace(epoch=Epoch(9), history=begun))
    with LogWriter(folder, epoch=9, next_lsn=last_lsn + 1) as log:
        log.batches([1, 2])
    again = recover(folder, NODE, Lsn(last_lsn + 3))
    assert (again.last_lsn, again.history[-1]) == (last_lsn + 3, (9, last_lsn + 1))
    assert lsns_in(folder, 3) == list(range(3, last_lsn + 4))


@pytest.mark.parametrize("last_lsn", range(COMMITTED_LSN, LAST_LSN + 1))
def test_a_log_is_cut_exactly_at_the_position(tmp_path: Path, last_lsn: int) -> None:
    forked_log(tmp_path)
    whole = {path.name: path.read_bytes() for path in tmp_path.glob("*.wal")}
    kept = truncate(tmp_path, NODE, Lsn(last_lsn))
    assert (kept == ()) == (last_lsn == LAST_LSN)
    # Every byte that stood above the position is still there, under another name.
    for name in kept:
        assert name.startswith(CUT_PREFIX)
        assert any(data.endswith((tmp_path / name).read_bytes()) for data in whole.values())
    before = snapshot(tmp_path)
    assert truncate(tmp_path, NODE, Lsn(last_lsn)) == ()
    assert snapshot(tmp_path) == before
    check_cut(tmp_path, last_lsn)


def test_a_log_that_ends_below_is_left_as_it_is(tmp_path: Path) -> None:
    forked_log(tmp_path)
    before = snapshot(tmp_path)
    assert truncate(tmp_path, NODE, Lsn(99)) == ()
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize(("last_lsn", "why"), [(3, "committed up to LSN 4"), (0, "committed up to LSN 4")])
def test_what_is_committed_is_never_cut(tmp_path: Path, last_lsn: int, why: str) -> None:
    forked_log(tmp_path)
    before = snapshot(tmp_path)
    with pytest.raises(WalError, match=why):
        truncate(tmp_path, NODE, Lsn(last_lsn))
    assert snapshot(tmp_path) == before


def test_a_log_that_begins_above_or_has_no_control_file_is_refused(tmp_path: Path) -> None:
    forked_log(tmp_path)
    known = control.load(tmp_path)
    assert known is not None
    control.store(tmp_path, known._replace(committed_lsn=Lsn(0), chained_lsn=Lsn(0)))
    with pytest.raises(WalError, match="begins with LSN 3; it cannot end with 1"):
        truncate(tmp_path, NODE, Lsn(1))
    assert truncate(tmp_path, NODE, Lsn(2))
    assert recover(tmp_path, NODE).last_lsn == 2
    (tmp_path / "control").unlink()
    with pytest.raises(WalError, match="no control file"):
        truncate(tmp_path, NODE, Lsn(2))


def test_a_batch_that_is_damaged_at_the_position_is_not_announced_again(tmp_path: Path) -> None:
    forked_log(tmp_path)
    last = list_segments(tmp_path)[-1].path
    data = bytearray(last.read_bytes())
    data[-1] ^= 1
    last.write_bytes(data)
    with pytest.raises(WalCorruptError):
        truncate(tmp_path, NODE, Lsn(18))


@pytest.mark.exhaustive
@pytest.mark.parametrize("fault", ["error=EIO", "signal=KILL"])
@pytest.mark.parametrize("call", ["pwritev,pwritev2", "fsync", "rename"])
@pytest.mark.parametrize("last_lsn", spread([5, 9, 14], 2))
def test_a_cut_may_stop_at_any_system_call_and_is_then_made_again(
    tmp_path: Path, strace: str, call: str, fault: str, last_lsn: int
) -> None:
    stopped = 0
    for number in range(1, 30):
        folder = tmp_path / str(number)
        folder.mkdir()
        forked_log(folder)
        tracer = traced(strace, os.devnull, f"trace={call}", f"inject={call}:{fault}:when={number}")
        done = run_forked(IMPORTED, "-c", PROGRAM, folder, str(last_lsn), tracer=tracer)
        # Wherever it stopped, the log is sound, and has what it shall keep.
        found = recover(folder, NODE, Lsn(last_lsn))
        assert found.cut is None
        assert found.last_lsn >= last_lsn
        if done.returncode == 0:
            break
        stopped += 1
        truncate(folder, NODE, Lsn(last_lsn))
        check_cut(folder, last_lsn)
    assert 3 <= stopped < 29


def test_each_step_of_a_cut_is_durable_before_the_next(tmp_path: Path, strace: str) -> None:
    folder = tmp_path / "log"
    folder.mkdir()
    trace = tmp_path / "trace"
    forked_log(folder)
    tracer = traced(strace, trace, "trace=fsync,rename")
    run_forked(IMPORTED, "-c", PROGRAM, folder, "5", tracer=tracer, check=True)
    calls = "".join("s" if "fsync(" in line else "r" for line in trace.read_text().splitlines())
    # The control file; four segments that begin above; the copy of what is cut, and the segment in its place.
    assert calls == "srs" + "rs" * 4 + "srs" + "srs"
