"""The parts of a comparison that need no Spark: where chains part, ids of events, ranges that cover what is missing."""

from __future__ import annotations

import itertools
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ledger.chain.conflict import Event, conflict_hlc
from pipeline.diff.events import Meeting, chains_of, event_id, meet
from pipeline.diff.repair import SeqRange, cover
from pipeline.places import parse_place
from tests.app.bundles import bundle_of, store
from tests.ledger.ledger_in_memory import Ledger, build

DIGEST = "0a" * 32


# --- where chains part ----------------------------------------------------------------------------


def met(folder: Path, one: Ledger, other: Ledger) -> Meeting:
    places = (parse_place(str(store(folder, bundle_of(each), f"{at}.tar"))) for at, each in enumerate((one, other)))
    with next(places).open() as a, next(places).open() as b:
        return meet(chains_of(a, ["acme"])["acme"], chains_of(b, ["acme"])["acme"])


@pytest.mark.parametrize("links_at_once", [1, 7, 10_000])
@pytest.mark.parametrize("seq", [1, 2, 61, 99])
def test_the_first_entry_in_which_two_chains_differ_is_found_by_halving(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seq: int, links_at_once: int
) -> None:
    monkeypatch.setattr(import_module("pipeline.diff.events"), "LINKS_AT_ONCE", links_at_once)
    rewritten = build(120)
    rewritten.entry(seq)["payload"] = rewritten.entry(seq)["payload"][:-1] + ',"zz":"rewritten"}'
    rewritten.relink()
    rewritten.store_head()
    rewritten.store_tree()
    assert met(tmp_path, build(99), rewritten) == Meeting(seq - 1, False, seq)


def test_chains_of_which_one_goes_on_where_the_other_ends_are_one(tmp_path: Path) -> None:
    assert met(tmp_path, build(99), build(120)) == met(tmp_path, build(120), build(99)) == Meeting(99, True, None)


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
