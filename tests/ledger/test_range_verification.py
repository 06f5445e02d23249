"""Verification in ranges, one behind the other or each by itself, gives the verdict of a naive reading of the whole.

That is the whole verdict object, whatever is wrong.
"""

from __future__ import annotations

import asyncio
from functools import cache, partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ledger import merkle
from ledger.job_index import covering
from ledger.merkle import PartOfTree, append_part, subtrees
from ledger.verification import Anchor, TreeHead, driver, verify
from ledger.verification.verdict import Break, Verdict
from signing.snapshot import open_snapshot
from tests.ledger.blocks import short_blocks
from tests.ledger.damage import DAMAGE, damage
from tests.ledger.ledger_in_memory import OPEN, Ledger, MemoryReader, Row, build, payload_digest
from tests.ledger.ranges import Beside, verdict_in_ranges
from tests.ledger.whole_chain import verdict_of_the_whole


@cache
def _built(count: int, version_1_until: int, snapshots_to: tuple[int, ...]) -> Ledger:
    return build(count, version_1_until=version_1_until, snapshots_to=snapshots_to)


def _copy(ledger: Ledger) -> Ledger:
    def rows(of: list[Row]) -> list[Row]:
        return [dict(row) for row in of]

    return Ledger(
        ledger.tenant_id,
        rows(ledger.entries),
        rows(ledger.snapshots),
        rows(ledger.jobs),
        ledger.head,
        ledger.tree,
        dict(ledger.tiles),
    )


def one_behind_the_other(ledger: Ledger, *, first_seq: int = 1, batch_rows: int = 7, **options: Any) -> Verdict:
    """The verdict of verification as the service runs it."""
    options = {"tenant_id": "acme", "open_snapshot": OPEN, **options}
    from_seq = first_seq if first_seq > 1 else None
    return asyncio.run(verify(MemoryReader(ledger, batch_rows), from_seq=from_seq, **options))


_COUNTS = st.sampled_from([0, 1, 2, 5, 9, 16, 17, 31, 40, 40, 40, 64, 260, 520])
_NUMBER = st.integers(0, 2000)


@st.composite
def _ledgers(draw: st.DrawFn) -> Ledger:
    count = draw(_COUNTS)
    to_seqs = draw(st.sets(st.integers(1, 40), max_size=5)) if count <= 64 else {100, 250, 256, 300, 511, 513}
    version_1_until = draw(st.sampled_from([0, 0, 0, 3, 20, 1000]))
    ledger = _copy(_built(count, version_1_until, tuple(sorted(seq for seq in to_seqs if seq <= count))))
    for which, at, how in draw(st.lists(st.tuples(st.integers(0, len(DAMAGE) - 1), _NUMBER, _NUMBER), max_size=4)):
        damage(ledger, which, at, how)
    return ledger


@st.composite
def _options(draw: st.DrawFn, count: int) -> dict[str, Any]:
    honest = _built(max(count, 1), 0, ())
    roots = st.sampled_from([bytes(32), honest.checkpoint(1).root, honest.checkpoint(max(count, 1)).root])
    sizes = st.integers(0, count + 2)
    checkpoints = draw(
        st.lists(
            st.builds(TreeHead, sizes, roots, st.sampled_from(["node", "file"]), st.sampled_from([None, None, "torn"])),
            max_size=2,
        )
    )
    statuses = st.sampled_from(["ok", "ok", "invalid", "not_checked"])
    about = (st.just("witness"), st.just("w"), st.just("t"))
    anchors = draw(st.lists(st.builds(Anchor, *about, sizes, roots, statuses), max_size=2))
    if count and draw(st.booleans()):
        checkpoints.append(honest.checkpoint(draw(st.integers(1, count)), "bundle"))
    openers = [OPEN, OPEN, None, partial(open_snapshot, keyring=None)]
    return {"checkpoints": checkpoints, "anchors": anchors, "open_snapshot": draw(st.sampled_from(openers))}


@given(st.data())
def test_ranges_checked_by_themselves_give_the_verdict_of_the_whole(data: st.DataObject) -> None:
    ledger = data.draw(_ledgers())
    count = len(ledger.entries)
    options = data.draw(_options(count))
    first_seq = data.draw(st.sampled_from([1, 1, 1, 1, 6]))
    ledger.entries = [row for row in ledger.entries if first_seq == 1 or row["seq"] >= first_seq]
    borders = data.draw(st.sets(st.integers(first_seq + 1, max(count, 8) + 3), max_size=6))
    projection = data.draw(st.booleans())
    whole = verdict_of_the_whole(ledger, first_seq=first_seq, projection=projection, **options)
    in_ranges = verdict_in_ranges(
        ledger, sorted(borders), first_seq=first_seq, projection=projection, seed=data.draw(_NUMBER), **options
    )
    assert in_ranges == whole
    batch_rows = data.draw(st.sampled_from([1, 7, 1000]))
    options |= {"first_seq": first_seq, "projection": projection}
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(driver, "RANGE_ENTRIES", data.draw(st.sampled_from([1, 5, 16, 256, 8192])))
        assert one_behind_the_other(ledger, batch_rows=batch_rows, **options) == whole
        told: list[Break] = []
        beside = Beside(ledger, data.draw(st.sampled_from([1, 2, 5])))
        assert one_behind_the_other(ledger, **options, elsewhere=beside, on_break=told.append) == whole
        assert len(told) == sum(whole.breaks.values())


@given(st.data())
def test_an_index_of_jobs_is_compared_wherever_ranges_end(data: st.DataObject) -> None:
    with pytest.MonkeyPatch.context() as patched:
        short_blocks(patched)
        ledger = build(70, snapshots_to=(1, 3, 20, 32, 33, 48, 70))
        first_seq = data.draw(st.sampled_from([1, 1, 4, 21]))
        borders = sorted(data.draw(st.sets(st.integers(first_seq + 1, 75), max_size=6)))

        def verdict() -> Verdict:
            behind = ledger.copy()
            behind.entries = behind.entries[first_seq - 1 :]
            return verdict_in_ranges(behind, borders, first_seq=first_seq, projection=False)

        assert verdict().is_valid
        at = data.draw(st.sampled_from([at for at, row in enumerate(ledger.snapshots) if row["from_seq"] >= first_seq]))
        to_seq = ledger.snapshots[at]["to_seq"]
        number = data.draw(st.integers(0, len(ledger.job_index(to_seq)) - 1))
        forge_index(ledger, at, number)
        place = [*covering(to_seq)][number]
        found = verdict()
        assert found.breaks == ({"snapshot-root": 1} if place.begin >= first_seq - 1 else {})
        if found.first_break is not None:
            assert f"job_index of entries {place.begin + 1} to {place.end}" in found.first_break.detail


def forge_index(ledger: Ledger, at: int, number: int) -> None:
    """Sign snapshot ``at`` with another root of this run of its index, and those behind it again."""
    rows = ledger.snapshots[at:]
    del ledger.snapshots[at:]
    for row in rows:
        roots = ledger.job_index(row["to_seq"])
        if row is rows[0]:
            roots[number] = "00" * 32
        ledger.sign(row["to_seq"], job_index=roots)


def test_a_claim_of_another_range_than_its_row_is_one_break_wherever_ranges_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ledger = build(60, snapshots_to=(20,))
    for untrue in ({}, {"merkle_root": "0" * 64}, {"tree_root": "0" * 64}):
        forged = ledger.copy()
        row = forged.signed(21, 60, payload_digest(forged.snapshots[0]), **untrue)
        forged.snapshots.append({**row, "to_seq": 25})
        whole = verdict_of_the_whole(forged, open_snapshot=OPEN)
        assert whole.breaks == {"snapshot-root": 1}
        assert verdict_in_ranges(forged, [11, 31, 45]) == whole
        monkeypatch.setattr(driver, "RANGE_ENTRIES", 16)
        assert one_behind_the_other(forged) == whole
        assert one_behind_the_other(forged, elsewhere=Beside(forged, 2)) == whole


@pytest.mark.parametrize("range_entries", [4, 16, 64])
def test_a_snapshot_inside_another_is_no_next_one_wherever_ranges_end(
    monkeypatch: pytest.MonkeyPatch, range_entries: int
) -> None:
    ledger = build(60, snapshots_to=(40,))
    ledger.snapshots.append(ledger.signed(10, 20, payload_digest(ledger.snapshots[0]), merkle_root="0" * 64))
    whole = verdict_of_the_whole(ledger, open_snapshot=OPEN)
    assert (whole.breaks, whole.signed_to.seq) == ({"snapshot-chain": 1}, 40)
    monkeypatch.setattr(driver, "RANGE_ENTRIES", range_entries)
    assert one_behind_the_other(ledger) == whole


def test_tiles_of_every_level_are_compared_across_borders() -> None:
    large = build(66_000)
    options: dict[str, Any] = {"projection": False, "checkpoints": [large.checkpoint()]}
    for coordinates in [(0, 3), (1, 0), (1, 1), (2, 0), (0, 257)]:
        large.tiles[coordinates] = bytes(32) + large.tiles[coordinates][32:]
    told: list[Break] = []
    whole = one_behind_the_other(large, batch_rows=1000, on_break=told.append, **options)
    assert whole.breaks == {"tree": 5}
    assert sorted((each.kind, each.seq) for each in told) == [("tree", seq) for seq in (1, 1, 769, 65_537, 65_793)]
    assert verdict_in_ranges(large, [900, 30_001, 65_537, 65_600], **options) == whole


# --- parts of a tree ------------------------------------------------------------------------------


@given(st.integers(0, 70), st.lists(st.integers(1, 40), min_size=1, max_size=4))
def test_parts_of_a_tree_make_the_whole(before: int, sizes: list[int]) -> None:
    count = before + sum(sizes)
    leaves = [merkle.leaf_hash(bytes([index])) for index in range(count)]
    shared, alone = merkle.Frontier(), merkle.Frontier()
    shared.extend(leaves[:before])
    begin = before
    for size in sizes:
        part = PartOfTree(begin)
        part.append(leaves[begin : begin + size])
        append_part(shared, begin + size, part.part(begin, begin + size))
        append_part(alone, begin + size - before, part.part(begin, begin + size, origin=before))
        begin += size
    assert shared.root() == merkle.root(leaves)
    assert alone.root() == merkle.root(leaves[before:])


@given(st.integers(0, 10_000), st.integers(0, 10_000))
def test_subtrees_cover_their_leaves_one_after_the_other(begin: int, count: int) -> None:
    at = begin
    nodes = [*subtrees(begin, begin + count)]
    for level, index in nodes:
        assert index << level == at
        at += 1 << level
    assert at == begin + count
    assert len(nodes) <= 2 * max(count, 1).bit_length()


def test_a_subtree_is_refused_where_none_begins() -> None:
    frontier = merkle.Frontier()
    frontier.extend([bytes(32)])
    with pytest.raises(merkle.InvalidInputError, match="does not begin at leaf 1"):
        frontier.append_subtree(1, bytes(32))
