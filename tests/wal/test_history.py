"""The history of a log: what each change leaves of it, against the naive list of who wrote which record."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ledger.errors import WalCorruptError
from ledger.positions import Epoch, Lsn
from tests.wal.logs import NODE, WAL_ID, hlc_of, naive_segment
from wal import control
from wal.control import Control, EpochStart, History, begin_epoch, epoch_of, history_rises, history_since, history_up_to
from wal.recovery import recover

RUNS = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 3)), max_size=8)
"""Of each epoch: how many records it wrote, and how many of the log's last were cut before it began."""


def starts(*pairs: tuple[int, int]) -> History:
    return tuple(EpochStart(Epoch(epoch), Lsn(lsn)) for epoch, lsn in pairs)


def naive(writers: list[int], first_lsn: int = 1) -> History:
    """The history of records whose epochs are given, from the oldest on."""
    found = dict[int, int]()
    for lsn, epoch in enumerate(writers, first_lsn):
        found.setdefault(epoch, lsn)
    return starts(*found.items())


@given(runs=RUNS, oldest=st.integers(1, 10))
def test_a_history_says_of_every_record_which_epoch_wrote_it(runs: list[tuple[int, int]], oldest: int) -> None:
    writers: list[int] = []
    kept: History = ()
    for epoch, (records, cut) in enumerate(runs, 1):
        del writers[max(0, len(writers) - cut) :]
        assert history_up_to(kept, Lsn(len(writers))) == naive(writers)
        kept = begin_epoch(kept, Epoch(epoch), Lsn(len(writers) + 1))
        writers += [epoch] * records
    kept = history_up_to(kept, Lsn(len(writers)))
    assert kept == naive(writers)
    assert history_rises(kept)
    oldest = min(oldest, len(writers))
    shorter = history_since(kept, Lsn(oldest))
    for lsn, epoch in enumerate(writers, 1):
        assert epoch_of(kept, Lsn(lsn)) == epoch
        if lsn >= oldest:
            assert epoch_of(shorter, Lsn(lsn)) == epoch
    assert len(shorter) == len(set(writers[oldest - 1 :] if writers else []))


def test_a_log_tells_its_history_by_its_segments(tmp_path: Path) -> None:
    naive_segment(tmp_path, [[1], [2, 3]], epoch=2)
    naive_segment(tmp_path, [[4]], base_lsn=4, epoch=2)
    naive_segment(tmp_path, [], base_lsn=5, epoch=3)
    naive_segment(tmp_path, [[5, 6]], base_lsn=5, epoch=4)
    naive_segment(tmp_path, [], base_lsn=7, epoch=5)
    assert recover(tmp_path, NODE, Lsn(6)).history == starts((2, 1), (4, 5))


def test_records_that_a_repair_saved_count_as_those_of_their_epoch(tmp_path: Path) -> None:
    naive_segment(tmp_path, [[1], [2, 3]], epoch=2)
    torn = naive_segment(tmp_path, [[4, 5, 6]], base_lsn=4, epoch=3)
    torn.write_bytes(torn.read_bytes()[:-1])
    found = recover(tmp_path, NODE, Lsn(3))
    assert found.last_lsn == 5
    assert found.history == starts((2, 1), (3, 4))


@pytest.mark.parametrize("told", [starts((2, 1), (4, 5)), starts((1, 1), (4, 5)), starts((2, 1)), starts((4, 1))])
def test_segments_that_contradict_the_history_of_the_control_file_are_refused(tmp_path: Path, told: History) -> None:
    naive_segment(tmp_path, [[1], [2, 3, 4]], epoch=2)
    naive_segment(tmp_path, [], base_lsn=5, epoch=3)
    naive_segment(tmp_path, [[5, 6]], base_lsn=5, epoch=4)
    control.store(tmp_path, Control(WAL_ID, NODE, Epoch(5), hlc_of(6), Lsn(6), history=told))
    if told == starts((2, 1), (4, 5)):
        assert recover(tmp_path, NODE).history == told
    else:
        with pytest.raises(WalCorruptError, match="by the control file epoch"):
            recover(tmp_path, NODE)
