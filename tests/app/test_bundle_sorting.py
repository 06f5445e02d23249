"""The order of a merge: as sorting in memory gives it, whatever the bounds and the order that entries come in."""

from __future__ import annotations

import tempfile
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.share.bundle import merging
from app.share.bundle.merging import Sorter
from app.share.bundle.staging import check_disk_room
from ledger.bundle.merge import Incoming, MergeKey
from ledger.errors import InvalidInputError, NotReadyError


def entry(rank: int, physical: int, node: str, seq: int, payload: str = "{}") -> Incoming:
    key = MergeKey(rank, physical, 0, node, "log/t", seq, "00")
    return Incoming(key, "t", f"{physical}:0:{node}", "j", "ENQUEUE", "00", payload, "{}", 2, 0, "", None)


def add_backwards(sorter: Sorter, count: int) -> None:
    for n in range(count, 0, -1):
        sorter.add([entry(1, n, "a", 1)])


def sorted_backwards(sorter: Sorter, count: int) -> list[Incoming]:
    add_backwards(sorter, count)
    return list(sorter.entries())


ENTRIES = st.builds(
    entry,
    st.integers(0, 1),
    st.integers(0, 50) | st.integers(0, 2**63 - 1),
    st.sampled_from(["a", "b", "b-1"]),
    st.integers(1, 9),
    st.sampled_from(["{}", '{"a":"€"}', '{"a":"' + "x" * 3000 + '"}']),
)


@given(
    st.lists(ENTRIES, max_size=80),
    st.integers(1, 7),
    st.integers(1, 90),
    st.sampled_from([1, 500, 10_000, 1 << 20]),
)
def test_entries_come_out_in_order_each_once(entries: list[Incoming], at_once: int, held: int, held_bytes: int) -> None:
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryFile() as file:
        patch.setattr(merging, "HELD_ENTRIES_MAX", held)
        patch.setattr(merging, "HELD_BYTES_MAX", held_bytes)
        patch.setattr(merging, "BLOCK_BYTES", 2000)
        sorter = Sorter(file)
        for begin in range(0, len(entries), at_once):
            sorter.add(entries[begin : begin + at_once])
        found = list(sorter.entries())
    assert sorted(found) == sorted(entries)
    assert [one.key for one in found] == sorted(one.key for one in entries)


@given(st.lists(ENTRIES, max_size=40), st.randoms())
def test_the_order_that_entries_come_in_makes_no_difference(entries: list[Incoming], random: object) -> None:
    found = []
    for _ in range(2):
        random.shuffle(entries)
        with tempfile.TemporaryFile() as file:
            sorter = Sorter(file)
            for one in entries:
                sorter.add([one])
            found.append(list(sorter.entries()))
    assert found[0] == found[1]


def test_what_is_nearly_in_order_becomes_one_run_and_too_little_order_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(merging, "HELD_ENTRIES_MAX", 20)
    monkeypatch.setattr(merging, "RUNS_MAX", 3)
    with tempfile.TemporaryFile() as file:
        sorter = Sorter(file)
        for n in range(1000):
            sorter.add([entry(1, n ^ 7, "a", 1)])
        assert [one.key.physical_ms for one in sorter.entries()] == list(range(1000))
    with tempfile.TemporaryFile() as file, pytest.raises(InvalidInputError, match="fewer at a time"):
        add_backwards(Sorter(file), 1000)


def test_a_disk_that_is_too_full_to_sort_on_stops_it_and_what_memory_holds_needs_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    too_full = partial(check_disk_room, tmp_path, 1 << 60)
    with tempfile.TemporaryFile(dir=tmp_path) as file:
        sorter = Sorter(file, too_full)
        add_backwards(sorter, 3)
        assert len(list(sorter.entries())) == 3
    monkeypatch.setattr(merging, "HELD_ENTRIES_MAX", 2)
    with tempfile.TemporaryFile(dir=tmp_path) as file, pytest.raises(NotReadyError, match="make room"):
        add_backwards(Sorter(file, too_full), 3)


@pytest.mark.parametrize("buffering", [0, 8192])
def test_a_disk_that_does_not_take_an_entry_stops_it_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, buffering: int
) -> None:
    monkeypatch.setattr(merging, "HELD_ENTRIES_MAX", 2)
    file = open("/dev/full", "r+b", buffering)  # noqa: SIM115 (it cannot be closed well)
    with pytest.raises(NotReadyError, match="beside the WAL: No space left on device; make room there"):
        sorted_backwards(Sorter(file), 3)
    with suppress(OSError):
        file.close()
