"""The index of jobs: what the naive twin makes, in whatever parts it grows; and proofs that cannot be bent."""

from __future__ import annotations

import random
from collections.abc import Iterator
from hashlib import sha256
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ledger import job_index, native
from ledger.errors import ProofError
from ledger.job_index import (
    begin_behind,
    block_leaves,
    covering,
    key_of,
    keys_of,
    merged_leaves,
    piece_roots,
    proof,
    root_of,
)
from ledger.job_index.builder import IndexBuilder, PartIndex, in_order
from ledger.job_index.proof import Directory, Neighbour, RunProof, pieces_of, prove, verify_job
from tests.ledger import naive_job_index as naive
from tests.ledger.blocks import BLOCK_ENTRIES as BLOCK
from tests.ledger.blocks import short_blocks


@pytest.fixture(scope="module", autouse=True)
def _short_blocks() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patched:
        short_blocks(patched)
        yield


@pytest.fixture(params=["as built", "python"])
def built(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "python":
        for name in ("block_leaves", "merged_leaves", "piece_roots"):
            monkeypatch.setattr(native, name, lambda *_: None)


def entries_of(size: int, jobs: int, seed: int = 1) -> list[naive.Entry]:
    drawn = random.Random(seed)
    return [(f"job-{drawn.randrange(jobs)}", sha256(b"%d" % each).digest()) for each in range(size)]


def grown(entries: list[naive.Entry], borders: list[int], cuts: list[int]) -> dict[int, list[bytes | None]]:
    """Roots at the cuts, of a log that is taken in parts which end at the borders."""
    index, found = IndexBuilder(), {}
    for begin, end in zip([0, *borders], [*borders, len(entries)], strict=True):
        part = PartIndex(begin, [cut for cut in cuts if begin < cut <= end])
        for job_id, leaf in entries[begin:end]:
            part.append(key_of(job_id), leaf)
        found |= {size: in_order(roots, size) for size, roots in index.add(part.finish()).items()}
    return found


@pytest.mark.parametrize("size", [1, 2, 3, 15, 16, 17, 127, 128, 129, 1023, 1024, 1025, 1300])
def test_the_index_is_the_one_of_the_naive_twin(size: int, built: None) -> None:
    entries = entries_of(size, 40)
    assert grown(entries, [], [size]) == {size: naive.roots(entries, BLOCK)}


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_parts_of_any_length_give_the_same_index(data: st.DataObject) -> None:
    size = data.draw(st.integers(1, 300))
    entries = entries_of(size, data.draw(st.integers(1, 60)), data.draw(st.integers(0, 99)))
    borders = sorted(data.draw(st.sets(st.integers(1, size), max_size=6)) - {size})
    cuts = sorted(data.draw(st.sets(st.integers(1, size), max_size=6)))
    assert grown(entries, borders, cuts) == {cut: naive.roots(entries[:cut], BLOCK) for cut in cuts}


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 200), st.integers(1, 120), st.integers(0, 99))
def test_an_index_that_begins_late_knows_the_runs_that_begin_behind_and_no_others(
    first: int, count: int, seed: int
) -> None:
    entries, size = entries_of(first + count, 20, seed), first + count
    index, part = IndexBuilder(first), PartIndex(first, [size])
    for job_id, leaf in entries[first:]:
        part.append(key_of(job_id), leaf)
    found = in_order(index.add(part.finish())[size], size)
    whole = naive.roots(entries, BLOCK)
    assert found == [root if place.begin >= first else None for place, root in zip(covering(size), whole, strict=True)]


@settings(deadline=None, max_examples=100)
@given(st.data())
def test_an_index_of_which_entries_left_is_made_again_by_what_was_kept_of_them(data: st.DataObject) -> None:
    left_to = data.draw(st.integers(1, 1100))
    size = left_to + data.draw(st.integers(1, 1100))
    entries = entries_of(size, 30, data.draw(st.integers(0, 99)))
    before, behind = PartIndex(0, []), PartIndex(left_to, [size])
    for part, some in ((before, entries[:left_to]), (behind, entries[left_to:])):
        for job_id, leaf in some:
            part.append(key_of(job_id), leaf)
    index = IndexBuilder()
    index.add(before.finish())
    left = index.left()
    assert left is not None
    roots = {place: index.roots()[place] for place in covering(left_to)}
    assert left.fits(left_to, roots)
    found = IndexBuilder.behind(left, roots).add(behind.finish())[size]
    assert in_order(found, size) == naive.roots(entries, BLOCK)


@settings(deadline=None, max_examples=100)
@given(st.integers(0, 1100), st.integers(1, 1100), st.booleans())
def test_an_index_that_begins_behind_what_left_is_known_to_whoever_has_more(left_to: int, more: int, has: bool) -> None:
    """By one that has all entries, and by one that has those behind alone."""
    size, begin = left_to + more, begin_behind(left_to)
    entries = entries_of(size, 30)
    first = 0 if has else left_to
    index, part = IndexBuilder(first), PartIndex(first, [size])
    for job_id, leaf in entries[first:]:
        part.append(key_of(job_id), leaf)
    found = in_order(index.add(part.finish())[size], size, begin)
    assert found == [
        root_of(b"".join(naive.leaves(entries, place.level, place.begin, place.end, BLOCK)))
        for place in covering(size, begin)
    ]


@settings(deadline=None)
@given(st.lists(st.integers(0, 30), max_size=40), st.integers(0, 2**40))
def test_the_functions_in_c_and_their_twins_agree(jobs: list[int], first: int) -> None:
    keys = keys_of([f"job-{each}" for each in jobs])
    hashes = b"".join(sha256(b"%d" % at).digest() for at in range(len(jobs)))

    def made() -> list[Any]:
        halves = [
            block_leaves(first, keys[: 32 * 20], hashes[: 32 * 20]),
            block_leaves(first + 20, keys[32 * 20 :], hashes[32 * 20 :]),
        ]
        return [*halves, merged := merged_leaves(halves), piece_roots(merged), merged_leaves([merged])]

    in_c = made()
    with pytest.MonkeyPatch.context() as patched:
        for name in ("block_leaves", "merged_leaves", "piece_roots"):
            patched.setattr(native, name, lambda *_: None)
        assert made() == in_c


@pytest.mark.parametrize("jobs", [1, 300, 3000])
def test_the_root_of_merged_runs_is_that_of_their_merged_leaves(jobs: int) -> None:
    runs = [
        block_leaves(first, keys_of([job for job, _ in entries_of(500, jobs, first)]), bytes(32 * 500))
        for first in range(0, 4000, 500)
    ]
    assert job_index.merged_root(runs) == root_of(merged_leaves(runs))


# --- proofs ---------------------------------------------------------------------------------------


class Proved:
    """A log with its index, and the proofs about one job."""

    def __init__(self, size: int, jobs: int, seed: int = 1) -> None:
        self.log, self.size = entries_of(size, jobs, seed), size
        self.roots = naive.roots(self.log, BLOCK)
        self.runs = [
            b"".join(naive.leaves(self.log, place.level, place.begin, place.end, BLOCK)) for place in covering(size)
        ]

    def entries(self, job_id: str) -> list[tuple[int, bytes]]:
        return [(at, leaf) for at, (job, leaf) in enumerate(self.log) if job == job_id]

    def proofs(self, job_id: str) -> list[RunProof]:
        return [prove(key_of(job_id), Directory.of(run), pieces_of(run)) for run in self.runs]

    def verify(self, job_id: str, entries: list[tuple[int, bytes]], proofs: list[RunProof]) -> None:
        verify_job(job_id, self.size, self.roots, entries, proofs)


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 200), st.integers(1, 60), st.integers(0, 99))
def test_every_job_is_proved_to_be_whole_and_any_other_to_be_absent(size: int, jobs: int, seed: int) -> None:
    log = Proved(size, jobs, seed)
    for number in range(jobs + 3):
        job_id = f"job-{number}"
        log.verify(job_id, log.entries(job_id), log.proofs(job_id))


def test_a_run_of_many_pieces_proves_what_one_piece_proves(monkeypatch: pytest.MonkeyPatch) -> None:
    run = block_leaves(0, keys_of([f"job-{each}" for each in range(1000)]), bytes(32 * 1000))
    for number in range(990, 1010):
        key = key_of(f"job-{number}")
        assert len(Directory.of(run).keys) == 4
        found = prove(key, Directory.of(run), pieces_of(run))
        monkeypatch.setattr(proof, "PIECE_LEAVES", 1024)
        assert prove(key, Directory(1000, [run[:32]], [root_of(run)]), {0: run}) == found
        monkeypatch.undo()


@pytest.fixture(scope="module")
def log(_short_blocks: None) -> Proved:
    return Proved(300, 40)


WITH_ENTRIES, WITHOUT = "job-7", "job-99"


@pytest.mark.parametrize("at", range(3))
def test_an_entry_that_is_left_out_is_found(log: Proved, at: int) -> None:
    entries = log.entries(WITH_ENTRIES)
    with pytest.raises(ProofError):
        log.verify(WITH_ENTRIES, [*entries[:at], *entries[at + 1 :]], log.proofs(WITH_ENTRIES))


def test_an_entry_that_is_added_or_changed_is_found(log: Proved) -> None:
    entries, proofs = log.entries(WITH_ENTRIES), log.proofs(WITH_ENTRIES)
    free = next(at for at, (job, _) in enumerate(log.log) if job != WITH_ENTRIES)
    for wrong in (
        sorted([*entries, (free, bytes(32))]),
        [(entries[0][0], bytes(32)), *entries[1:]],
        [entries[0], *entries],
        [*entries, (300, bytes(32))],
    ):
        with pytest.raises(ProofError):
            log.verify(WITH_ENTRIES, wrong, proofs)


def test_a_job_with_entries_cannot_be_shown_to_have_none(log: Proved) -> None:
    """Whichever neighbours are named, in any place."""
    for run, root, place in zip(log.runs, log.roots, covering(300), strict=True):
        key, directory, pieces = key_of(WITH_ENTRIES), Directory.of(run), pieces_of(run)
        if prove(key, directory, pieces).hashes is None:
            continue
        others = [each for each in range(directory.jobs) if run[72 * each : 72 * each + 32] != key]
        for at in range(directory.jobs + 1):
            for left in (None, *others):
                for right in (None, *others):
                    shown = RunProof(
                        at,
                        None,
                        directory.jobs,
                        None if left is None else neighbour(left, directory, pieces),
                        None if right is None else neighbour(right, directory, pieces, at),
                    )
                    with pytest.raises(ProofError):
                        proof._verify_absence(key, shown, root)
        assert place.level == 2
        return


def neighbour(of: int, directory: Directory, pieces: dict[int, bytes], at: int = 0) -> Neighbour:
    hashes = 64 if not at else (min(at & -at, max(1, directory.jobs - at)) - 1).bit_length()
    return proof._Run(directory, pieces).neighbour(of, hashes)


def test_a_proof_of_another_run_or_of_an_older_index_is_found(log: Proved) -> None:
    older = Proved(290, 40)
    for job_id in (WITH_ENTRIES, WITHOUT):
        entries, proofs = log.entries(job_id), log.proofs(job_id)
        for wrong in (older.proofs(job_id), proofs[:-1], [*proofs[1:], proofs[0]], [*proofs, proofs[0]]):
            with pytest.raises(ProofError):
                log.verify(job_id, entries, wrong)
        with pytest.raises(ProofError):
            verify_job(job_id, 300, older.roots, entries, proofs)


@pytest.mark.parametrize("job_id", [WITH_ENTRIES, WITHOUT])
def test_no_member_of_a_proof_can_be_changed(log: Proved, job_id: str) -> None:
    entries, proofs = log.entries(job_id), log.proofs(job_id)
    for number, shown in enumerate(proofs):
        for wrong in changed(msgspec.to_builtins(shown)):
            bent = msgspec.convert(wrong, RunProof)
            with pytest.raises(ProofError):
                log.verify(job_id, entries, [*proofs[:number], bent, *proofs[number + 1 :]])


def changed(shown: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for side in ("left", "right"):
        if (held := shown[side]) is not None:
            yield shown | {side: None}
            yield shown | {side: held | {"count": held["count"] + 1}}
            yield shown | {side: held | {"digest": "00" * 32}}
            yield shown | {side: held | {"key": f"{held['key'][:-1]}{int(held['key'][-1], 16) ^ 1:x}"}}
            yield shown | {side: held | {"hashes": ["00" * 32, *held["hashes"]]}}
            if held["hashes"]:
                yield shown | {side: held | {"hashes": held["hashes"][1:]}}
                yield shown | {side: held | {"hashes": ["00" * 32, *held["hashes"][1:]]}}
    if shown["hashes"] is not None:
        yield shown | {"hashes": None}
        yield shown | {"hashes": [*shown["hashes"], "00" * 32]}
        yield shown | {"at": shown["jobs"]}
    else:
        yield shown | {"hashes": []}
        yield shown | {"at": shown["jobs"] + 1}
