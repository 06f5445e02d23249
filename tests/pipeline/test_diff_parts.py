"""The pure parts of a comparison: trees made of rows, ids of events, and ranges that cover what is missing."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ledger.chain.conflict import Event, conflict_hlc
from ledger.merkle import leaf_hash
from ledger.merkle.tiles import TILE_WIDTH, TileTree
from pipeline.diff.blocks import Leaf, RowTiles, blocks_of, joined
from pipeline.diff.events import event_id, range_ms
from pipeline.diff.repair import SeqRange, cover

DIGEST = "0a" * 32
LEAVES: list[Leaf] = [(seq, leaf_hash(seq.to_bytes(4, "big"))) for seq in range(1, 1301)]


# --- trees of rows --------------------------------------------------------------------------------


def tiles_of(leaves: list[Leaf], cuts: list[int], size: int) -> RowTiles:
    """The tiles that tasks make which read ``leaves`` in pieces that end at ``cuts``."""
    borders = [0, *sorted(cuts), len(leaves)]
    rows = [
        row
        for start, end in itertools.pairwise(borders)
        for batch in blocks_of(leaves[start:end])
        for row in zip(*batch.to_pydict().values(), strict=True)
        if row[0] < size // TILE_WIDTH
    ]
    return RowTiles(size, joined(size // TILE_WIDTH, rows), lambda low, high: leaves[low - 1 : high])


@given(st.integers(1, 1300), st.lists(st.integers(0, 1300), max_size=5))
def test_tiles_made_of_rows_in_any_pieces_are_those_of_the_tree(size: int, cuts: list[int]) -> None:
    tree = TileTree(0, {})
    tree.append_leaf_hashes([leaf for _, leaf in LEAVES[:size]])
    made = tiles_of(LEAVES[:size], [cut for cut in cuts if cut <= size], size)

    assert {(level, index): made.tile(level, index) for level, index in tree.changed} == tree.changed


def test_a_missing_row_changes_its_block_alone_and_the_first_of_two_rows_counts() -> None:
    whole = tiles_of(LEAVES, [], 1300)
    lacking = tiles_of([leaf for leaf in LEAVES if leaf[0] != 300], [100, 290], 1300)
    doubled = tiles_of(sorted([*LEAVES, (300, bytes(31) + b"x")], key=lambda leaf: leaf[0]), [300], 1300)

    blocks = [(each.tile(1, 0)[at : at + 32]) for each in (whole, lacking) for at in range(0, 160, 32)]
    assert [at for at in range(5) if blocks[at] != blocks[at + 5]] == [1]
    assert doubled.tile(1, 0) == whole.tile(1, 0)


# --- ids of events --------------------------------------------------------------------------------


def row(hlc: str, job_id: Any, action: Any, digest: Any = DIGEST) -> tuple[Any, ...]:
    physical, logical, node = hlc.split(":")
    return 9, hlc, int(physical), int(logical), node, job_id, action, digest


def test_a_conflict_entry_has_the_id_of_the_event_it_holds() -> None:
    event = Event("1704931200000:3:node-1", "job-1", "COMPLETE", DIGEST)
    held = conflict_hlc(event).text()

    assert event_id(row(held, "job-1", "CONFLICT", "0b" * 32)) == event_id(row(*event))


@pytest.mark.parametrize(
    "other",
    [
        row("1704931200000:3:node-2", "job-1", "COMPLETE"),
        row("1704931200000:4:node-1", "job-1", "COMPLETE"),
        row("1704931200000:3:node-1", "job-2", "COMPLETE"),
        row("1704931200000:3:node-1", "job-1", "FAIL"),
        row("1704931200000:3:node-1", "job-1", "COMPLETE", "0b" * 32),
        row("1704931200000:3:node-1", None, "COMPLETE"),
        row(conflict_hlc(Event("1704931200000:3:node-1", "job-1", "COMPLETE", DIGEST)).text(), "job-1", "COMPLETE"),
    ],
)
def test_events_that_differ_in_anything_have_other_ids(other: tuple[Any, ...]) -> None:
    assert event_id(other) != event_id(row("1704931200000:3:node-1", "job-1", "COMPLETE"))


def test_a_row_that_no_event_can_be_made_of_has_an_id_all_the_same() -> None:
    assert len({event_id((1, None, None, -1, None, None, None, None)), event_id((1, "x", 5, 2**70, b"", 1, 2, 3))}) == 2


@given(st.integers(0, 2**42), st.integers(0, 2**40), st.integers(0, 10**9))
def test_the_time_of_a_range_is_at_least_a_millisecond(first_ms: int, lasted_ms: int, entries: int) -> None:
    assert range_ms(first_ms, first_ms + lasted_ms, entries) >= 1


# --- ranges that cover ----------------------------------------------------------------------------


@given(
    st.lists(st.tuples(st.integers(1, 3000), st.integers(0, 40)), max_size=60),
    st.integers(0, 200),
    st.integers(1, 8),
)
def test_ranges_hold_all_that_is_wanted_and_are_few(
    wanted: list[tuple[int, int]], gap_max: int, ranges_max: int
) -> None:
    asked = [SeqRange(first, first + length) for first, length in wanted]
    found = cover(asked, gap_max=gap_max, ranges_max=ranges_max)

    assert all(any(each.from_seq <= one.from_seq and one.to_seq <= each.to_seq for each in found) for one in asked)
    assert len(found) <= ranges_max
    assert all(before.to_seq + gap_max + 1 < after.from_seq for before, after in itertools.pairwise(found))
    ends = {one.from_seq for one in asked}, {one.to_seq for one in asked}
    assert all(each.from_seq in ends[0] and each.to_seq in ends[1] for each in found)


def test_of_too_many_ranges_the_nearest_are_joined() -> None:
    wanted = [SeqRange(1, 2), SeqRange(100, 101), SeqRange(105, 106), SeqRange(300, 301), SeqRange(330, 330)]

    assert cover(wanted, gap_max=0, ranges_max=3) == [SeqRange(1, 2), SeqRange(100, 106), SeqRange(300, 330)]
