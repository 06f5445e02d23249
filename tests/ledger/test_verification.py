"""Verification over plain rows: what it checks in which range, how a break is named, and that memory stays flat.

Each kind of break made in a real database stands in tests/app/test_tamper.py.
"""

from __future__ import annotations

import asyncio
import gc
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from hashlib import sha256
from random import Random
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ledger import job_index
from ledger.chain import Linker
from ledger.job_index import builder
from ledger.verification import ASPECTS, ENTRY_COLUMNS, KINDS, Anchor, Head, StoredTree, TreeHead, Verdict, verify
from ledger.verification.entry_check import EntryChecker
from ledger.verification.verdict import Findings
from signing.keys import Keyring
from signing.snapshot import open_snapshot
from tests.ledger import naive_verification as naive
from tests.ledger.ledger_in_memory import OPEN, STRANGER, Ledger, MemoryReader, build, origin_of, payload_digest
from tests.turns import counted_turns

ZEROS_32 = bytes(32)
WHOLE = build(60, snapshots_to=(20, 21, 50))


def check(ledger: Ledger, *, batch_rows: int = 7, **options: Any) -> Verdict:
    options = {"tenant_id": "acme", "open_snapshot": OPEN, **options}
    return asyncio.run(verify(MemoryReader(ledger, batch_rows), **options))


def not_ok(verdict: Verdict) -> dict[str, str]:
    return {aspect: outcome for aspect, outcome in verdict.verdicts.items() if outcome != "ok"}


def first(verdict: Verdict) -> tuple[str, int] | None:
    return (verdict.first_break.kind, verdict.first_break.seq) if verdict.first_break else None


# --- a ledger that is whole -----------------------------------------------------------------------


@pytest.mark.parametrize("batch_rows", [1, 7, 20, 60, 1000])
def test_a_whole_ledger_is_ok_in_every_aspect(batch_rows: int) -> None:
    verdict = check(WHOLE, batch_rows=batch_rows, checkpoints=[WHOLE.checkpoint()])
    assert verdict.verdicts == dict.fromkeys(ASPECTS, "ok")
    assert verdict.is_valid
    assert (verdict.entries_checked, verdict.from_seq, verdict.to_seq) == (60, 1, 60)
    assert verdict.head == WHOLE.head
    assert verdict.signed_to.seq == 50


def test_the_verdict_has_the_form_of_the_interfaces() -> None:
    said = check(WHOLE, checkpoints=[WHOLE.checkpoint()]).to_json(12.34)
    assert said == {
        "tenant_id": "acme",
        "valid": True,
        "entries_checked": 60,
        "from_seq": 1,
        "to_seq": 60,
        "verified_from_seq": 1,
        "pruned": None,
        "head": {"seq": 60, "chain_link": WHOLE.last().chain_link, "hlc": WHOLE.last().hlc},
        "verdicts": dict.fromkeys(ASPECTS, "ok"),
        "first_break": None,
        "breaks": {},
        "compared_with": "node",
        "anchors": [],
        "signed_to_seq": 50,
        "unsigned_entries": 10,
        "commitments": 0,
        "duration_ms": 12.3,
    }


def test_a_break_says_seq_kind_detail_expected_and_actual() -> None:
    forged = WHOLE.copy()
    forged.entry(9)["payload"] = '{"type":"JobCompleted"}'
    found = check(forged).to_json(0)["first_break"]
    assert found == {
        "seq": 9,
        "kind": "payload-digest",
        "detail": "the payload of seq 9 does not have the digest stored with it",
        "expected": WHOLE.entry(9)["payload_digest"],
        "actual": sha256(b'{"type":"JobCompleted"}').hexdigest(),
    }


def test_a_tenant_without_entries_is_whole() -> None:
    empty = Ledger("acme", head=Head(0, None, None))
    verdict = check(empty)
    assert not_ok(verdict) == {"signatures": "not_checked", "checkpoint": "not_checked"}
    assert (verdict.from_seq, verdict.to_seq, verdict.entries_checked) == (1, 0, 0)


def test_without_checkpoint_it_says_that_it_compared_with_none() -> None:
    verdict = check(WHOLE)
    assert not_ok(verdict) == {"checkpoint": "not_checked"}
    assert verdict.compared_with is None
    assert verdict.is_valid


def test_it_compares_with_every_checkpoint_given_and_names_them() -> None:
    heads = [WHOLE.checkpoint(60, "node"), WHOLE.checkpoint(13, "file"), WHOLE.checkpoint(13, "bundle")]
    verdict = check(WHOLE, checkpoints=heads)
    assert verdict.compared_with == "node, file, bundle"
    assert verdict.verdicts["checkpoint"] == "ok"


def test_a_tree_that_is_behind_the_chain_is_ok_and_one_that_is_missing_is_not_checked() -> None:
    behind, missing = WHOLE.copy(), WHOLE.copy()
    behind.store_tree(37)
    missing.tree, missing.tiles = None, {}
    assert check(behind).verdicts["tree"] == "ok"
    assert check(missing).verdicts["tree"] == "not_checked"


def test_only_one_break_of_each_kind_is_kept_and_the_rest_counted() -> None:
    forged = WHOLE.copy()
    for row in forged.entries[9:]:
        row["payload"] += " "
    verdict = check(forged)
    assert first(verdict) == ("payload-digest", 10)
    assert verdict.breaks == {"payload-digest": 51}


def test_what_an_edited_row_holds_is_shortened_in_the_verdict() -> None:
    forged = WHOLE.copy()
    forged.entry(3)["prev_chain_link"] = "x" * 1_000_000
    found = check(forged).first_break
    assert found is not None
    assert len(str(found.actual)) < 500


# --- ranges ---------------------------------------------------------------------------------------


def test_a_range_is_checked_against_the_entry_before_it_and_leaves_the_rest_unchecked() -> None:
    verdict = check(WHOLE, from_seq=11, to_seq=40, checkpoints=[WHOLE.checkpoint()])
    assert not_ok(verdict) == dict.fromkeys(("head", "tree", "projection", "checkpoint"), "not_checked")
    assert (verdict.entries_checked, verdict.from_seq, verdict.to_seq) == (30, 11, 40)
    forged = WHOLE.copy()
    forged.entry(11)["prev_chain_link"] = "0" * 64
    assert first(check(forged, from_seq=11)) == ("prev-link", 11)
    assert check(forged, from_seq=12).is_valid


def test_a_break_outside_the_range_is_not_found() -> None:
    forged = WHOLE.copy()
    forged.entry(30)["payload"] += " "
    assert check(forged, from_seq=31).is_valid
    assert check(forged, to_seq=29).is_valid
    assert not check(forged, from_seq=30, to_seq=30).is_valid


def test_a_range_checks_the_snapshots_that_lie_wholly_inside() -> None:
    forged = WHOLE.copy()
    forged.snapshots[2]["merkle_root"] = "0" * 64
    assert check(forged, from_seq=22, to_seq=49).is_valid
    assert check(forged, from_seq=23).is_valid
    assert first(check(forged, from_seq=22)) == ("snapshot-root", 50)
    assert check(WHOLE, from_seq=5).signed_to.seq == 50


def test_a_range_from_the_start_compares_the_checkpoints_that_it_reaches() -> None:
    heads = [WHOLE.checkpoint(30, "file")]
    assert check(WHOLE, to_seq=30, checkpoints=heads).compared_with == "file"
    assert check(WHOLE, to_seq=29, checkpoints=heads).verdicts["checkpoint"] == "not_checked"
    partly = check(WHOLE, to_seq=30, checkpoints=[*heads, WHOLE.checkpoint()])
    assert (partly.compared_with, partly.verdicts["checkpoint"]) == ("file", "not_checked")


@pytest.mark.parametrize(
    ("size", "is_other", "options", "outcome", "found"),
    [
        (30, False, {}, "ok", None),
        (60, False, {}, "ok", None),
        (30, True, {}, "broken", ("rollback", 30)),
        (61, False, {}, "broken", ("rollback", 61)),
        (50, False, {"to_seq": 40}, "not_checked", None),
        (61, False, {"to_seq": 40}, "broken", ("rollback", 61)),
        (30, True, {"from_seq": 2}, "not_checked", None),
        (61, True, {"from_seq": 2}, "broken", ("rollback", 61)),
    ],
)
def test_a_checkpoint_and_an_anchor_of_the_same_tree_head_are_judged_alike(
    size: int, is_other: bool, options: dict[str, Any], outcome: str, found: tuple[str, int] | None
) -> None:
    root = ZEROS_32 if is_other else WHOLE.checkpoint(min(size, 60)).root
    kept = check(WHOLE, checkpoints=[TreeHead(size, root, "node")], **options)
    assert (kept.verdicts["checkpoint"], first(kept)) == (outcome, found)
    assert kept.compared_with == (None if outcome == "not_checked" else "node")
    own = check(WHOLE, checkpoints=[TreeHead(size, root, "archive", is_own=True)], **options)
    assert (own.verdicts["checkpoint"], first(own)) == ("broken" if found else "not_checked", found)
    outside = check(WHOLE, anchors=[Anchor("witness", "w", "t", size, root)], **options)
    assert ([each.status for each in outside.anchors], first(outside)) == ([outcome], found)
    assert outside.compared_with is None


def test_a_checkpoint_that_does_not_open_and_an_anchor_that_does_not_hold_are_told_apart() -> None:
    torn = check(WHOLE, checkpoints=[TreeHead(0, b"", "node", fault="torn")])
    assert (torn.verdicts["checkpoint"], first(torn), torn.compared_with) == ("broken", ("rollback", 60), "node")
    anchors = [Anchor("rfc3161", "x", "t", 99, ZEROS_32, "invalid"), Anchor("rfc3161", "b", "t", 0, ZEROS_32)]
    verdict = check(WHOLE, anchors=anchors)
    assert [each.status for each in verdict.anchors] == ["not_checked", "invalid"]
    assert verdict.first_break is None


def test_a_range_that_asks_for_more_than_there_is_ends_at_the_head() -> None:
    verdict = check(WHOLE, from_seq=41, to_seq=1000)
    assert verdict.verdicts["head"] == "ok"
    assert (verdict.to_seq, verdict.entries_checked) == (60, 20)
    assert check(WHOLE, from_seq=100).entries_checked == 0


# --- going on from where it was verified before ---------------------------------------------------


def test_it_goes_on_behind_the_entry_that_was_verified() -> None:
    before = check(WHOLE)
    grown = build(80, snapshots_to=(20, 21, 50, 75))
    verdict = check(grown, from_seq=before.signed_to.seq + 1, expected_prev=before.signed_to.chain_link)
    assert verdict.is_valid
    assert verdict.entries_checked == 30
    assert verdict.signed_to == Head(75, grown.entry(75)["chain_link"], grown.entry(75)["t_hlc"])


def test_a_verified_entry_that_was_rewritten_since_is_found() -> None:
    signed_to = check(WHOLE).signed_to
    forged = WHOLE.copy()
    forged.entry(50)["payload"] = "{}"
    forged.relink(50)
    forged.store_head()
    verdict = check(forged, from_seq=51, expected_prev=signed_to.chain_link)
    assert first(verdict) == ("link", 50)


def test_a_verified_entry_that_is_gone_is_found() -> None:
    signed_to = check(WHOLE).signed_to
    cut, holed = WHOLE.copy(), WHOLE.copy()
    del cut.entries[40:]
    cut.snapshots.pop()
    cut.store_head()
    cut.store_tree()
    assert first(check(cut, from_seq=51, expected_prev=signed_to.chain_link)) == ("tail-truncated", 41)
    del holed.entries[49]
    assert first(check(holed, from_seq=51, expected_prev=signed_to.chain_link)) == ("gap", 50)


# --- version 1 ------------------------------------------------------------------------------------


def test_a_chain_may_begin_with_version_1_links() -> None:
    assert check(build(20, version_1_until=9)).is_valid
    assert check(build(9, version_1_until=9)).is_valid
    assert check(build(20, version_1_until=9), from_seq=5).is_valid


@pytest.mark.parametrize("batch_rows", [1, 3, 1000])
def test_a_version_1_link_after_version_2_began_is_a_break(batch_rows: int) -> None:
    mixed = build(20)
    mixed.entry(8)["link_version"] = 1
    mixed.relink(8)
    mixed.store_head()
    mixed.store_tree()
    assert first(check(mixed, batch_rows=batch_rows, projection=False)) == ("link", 8)
    assert first(check(mixed, batch_rows=batch_rows, from_seq=8)) == ("link", 8)


def test_a_version_1_prefix_is_bound_by_its_links() -> None:
    forged = build(20, version_1_until=9)
    forged.entry(5)["job_id"] = "another"
    assert first(check(forged)) == ("link", 5)


def test_an_unknown_link_version_is_a_break() -> None:
    forged = WHOLE.copy()
    forged.entry(4)["link_version"] = 3
    assert first(check(forged)) == ("link", 4)


def test_an_origin_is_bound_by_the_link() -> None:
    imported = build(12)
    imported.entry(6)["origin"] = origin_of(1)
    imported.relink(6)
    imported.store_head()
    imported.store_tree()
    assert check(imported).is_valid
    imported.entry(6)["origin"] = origin_of(2)
    assert first(check(imported)) == ("link", 6)


# --- signatures -----------------------------------------------------------------------------------


def test_a_snapshot_signed_by_a_stranger_is_of_an_unknown_key() -> None:
    ledger = build(30, snapshots_to=(10,))
    ledger.sign(20, STRANGER)
    ledger.sign(30)
    verdict = check(ledger)
    assert not_ok(verdict) == {"signatures": "unknown_key", "checkpoint": "not_checked"}
    assert first(verdict) == ("snapshot-signature", 20)
    assert not verdict.is_valid


def test_without_keys_signatures_are_not_checked_but_snapshots_are() -> None:
    verdict = check(WHOLE, open_snapshot=None)
    assert not_ok(verdict) == {"signatures": "not_checked", "checkpoint": "not_checked"}
    forged = WHOLE.copy()
    forged.snapshots[1]["merkle_root"] = "0" * 64
    assert first(check(forged, open_snapshot=None)) == ("snapshot-root", 21)


def test_an_empty_ring_knows_no_key_and_no_ring_checks_none() -> None:
    assert check(WHOLE, open_snapshot=partial(open_snapshot, keyring=Keyring.of([]))).verdicts["signatures"] == (
        "unknown_key"
    )
    assert check(WHOLE, open_snapshot=partial(open_snapshot, keyring=None)).verdicts["signatures"] == "not_checked"


def test_a_stranger_does_not_count_as_signing() -> None:
    ledger = build(30, snapshots_to=(10,))
    ledger.sign(20, STRANGER)
    assert check(ledger).signed_to.seq == 10


def test_a_claim_that_is_signed_but_untrue_is_found() -> None:
    for untrue in ({"merkle_root": "0" * 64}, {"tree_root": "0" * 64}, {"snapshot_hlc": "1:0:n"}):
        ledger = build(30, snapshots_to=(10,))
        ledger.sign(20, **untrue)
        assert first(check(ledger)) == ("snapshot-root", 20), untrue


def test_unsigned_snapshots_leave_signatures_unchecked_until_a_signed_one_covers_their_entries() -> None:
    ledger = build(60)
    ledger.cover(20)
    ledger.cover(30)
    verdict = check(ledger)
    assert not_ok(verdict) == {"signatures": "not_checked", "checkpoint": "not_checked"}
    assert (verdict.signed_to.seq, verdict.covered_to.seq, verdict.is_valid) == (0, 30, True)
    ledger.sign(40)
    verdict = check(ledger)
    assert not_ok(verdict) == {"checkpoint": "not_checked"}
    assert (verdict.signed_to.seq, verdict.covered_to.seq) == (40, 40)
    ledger.cover(50)
    verdict = check(ledger)
    assert not_ok(verdict) == {"signatures": "not_checked", "checkpoint": "not_checked"}
    assert (verdict.signed_to.seq, verdict.covered_to.seq) == (40, 50)
    assert verdict.covered_digest == payload_digest(ledger.snapshots[-1])


def test_an_unsigned_snapshot_is_compared_with_its_entries_and_with_the_one_before_it() -> None:
    for column in ("merkle_root", "from_chain_link", "to_chain_link"):
        ledger = build(30, snapshots_to=(10,))
        ledger.cover(20)
        ledger.snapshots[1][column] = "0" * 64
        assert first(check(ledger)) == ("snapshot-root", 20)
        assert first(check(ledger, open_snapshot=None)) == ("snapshot-root", 20)
    ledger = build(30)
    ledger.cover(10)
    ledger.cover(20)
    del ledger.snapshots[0]
    assert first(check(ledger)) == ("snapshot-chain", 1)


def test_an_envelope_that_was_removed_is_found_by_the_snapshot_behind_it() -> None:
    ledger = WHOLE.copy()
    ledger.snapshots[1]["dsse_envelope"] = None
    assert first(check(ledger)) == ("snapshot-chain", 22)
    ledger = build(30)
    ledger.cover(10)
    ledger.sign(20)
    ledger.snapshots[0]["entry_count"] = 9
    assert check(ledger).breaks == {"snapshot-root": 1, "snapshot-chain": 1}


def test_a_value_without_canonical_form_in_an_unsigned_snapshot_is_a_break() -> None:
    ledger = build(30)
    ledger.cover(10)
    ledger.snapshots[0]["entry_count"] = 2**60
    assert "snapshot-signature" in check(ledger).breaks


def test_a_snapshot_of_another_tenant_is_found() -> None:
    ledger, other = build(20), build(20, tenant_id="other", snapshots_to=(10,))
    ledger.snapshots = other.snapshots
    assert first(check(ledger)) == ("snapshot-root", 10)
    ledger.snapshots.clear()
    ledger.sign(10, tenant_id="other")
    assert first(check(ledger)) == ("snapshot-root", 10)


def test_a_missing_snapshot_leaves_the_later_ones_readable() -> None:
    ledger = WHOLE.copy()
    del ledger.snapshots[1]
    verdict = check(ledger)
    assert first(verdict) == ("snapshot-chain", 21)
    assert verdict.breaks == {"snapshot-chain": 1}


def test_a_snapshot_that_names_another_predecessor_is_found() -> None:
    ledger = build(30, snapshots_to=(10,))
    ledger.snapshots.append(ledger.signed(11, 20, payload_digest(WHOLE.snapshots[0])))
    assert first(check(ledger)) == ("snapshot-chain", 11)


def test_snapshots_that_overlap_are_found() -> None:
    ledger = build(30, snapshots_to=(10,))
    ledger.snapshots.append(ledger.signed(8, 20, payload_digest(ledger.snapshots[0])))
    assert first(check(ledger)) == ("snapshot-chain", 8)
    within = WHOLE.copy()
    within.snapshots.append(within.signed(5, 10, payload_digest(within.snapshots[0])))
    assert first(check(within)) == ("snapshot-chain", 5)


# --- what cannot be decided -----------------------------------------------------------------------


def test_what_a_missing_entry_hides_is_left_undecided() -> None:
    ledger = WHOLE.copy()
    del ledger.entries[29]
    verdict = check(ledger, checkpoints=[WHOLE.checkpoint()])
    assert first(verdict) == ("gap", 30)
    assert not_ok(verdict) == {
        "links": "broken",
        **dict.fromkeys(("snapshots", "tree", "projection", "checkpoint"), "not_checked"),
    }


def test_several_missing_entries_are_one_gap() -> None:
    ledger = WHOLE.copy()
    del ledger.entries[:4]
    del ledger.entries[20:23]
    verdict = check(ledger)
    assert verdict.breaks["gap"] == 2
    assert first(verdict) == ("gap", 1)


def test_entries_about_the_ledger_itself_belong_to_no_job() -> None:
    ledger = build(12)
    ledger.entry(5).update(action="TENANT_CREATED", job_id="tenant:acme", payload='{"type":"TENANT_CREATED"}')
    ledger.relink(5)
    ledger.store_head()
    ledger.store_tree()
    ledger.store_jobs()
    assert check(ledger).is_valid


def test_a_payload_that_is_no_object_does_not_stop_the_fold() -> None:
    for payload in ("[1]", "null", "not json", '{"fence_token": "x"}', '{"spec": 1e999}', '{"dc_id": 5}'):
        ledger = WHOLE.copy()
        ledger.entry(1)["payload"] = payload
        ledger.relink()
        ledger.store_head()
        ledger.store_tree()
        ledger.snapshots.clear()
        verdict = check(ledger)
        assert not_ok(verdict) == {
            "payloads": "broken",
            "signatures": "not_checked",
            "projection": "not_checked",
            "checkpoint": "not_checked",
        }, payload
        assert verdict.breaks == {"malformed": 1}


def test_a_job_without_entries_and_one_that_is_not_stored_are_found() -> None:
    extra, missing = WHOLE.copy(), WHOLE.copy()
    extra.jobs.append({**extra.jobs[0], "job_id": "a-job-that-never-was"})
    assert first(check(extra)) == ("projection", extra.jobs[0]["last_seq"])
    gone = missing.jobs.pop()
    assert first(check(missing)) == ("projection", gone["last_seq"])


# --- fast and slow, whole and naive ---------------------------------------------------------------

DAMAGE: Sequence[Callable[[Ledger, int], object]] = (
    lambda ledger, at: ledger.entries.pop(at),
    lambda ledger, at: ledger.entries.insert(at, dict(ledger.entries[at])),
    lambda ledger, at: ledger.entries[at].update(payload='{"type":"JobFailed"}'),
    lambda ledger, at: ledger.entries[at].update(payload_digest="0" * 64),
    lambda ledger, at: ledger.entries[at].update(hlc_logical=99),
    lambda ledger, at: ledger.entries[at].update(t_hlc="1:2:zz"),
    lambda ledger, at: ledger.entries[at].update(job_id="änderung"),
    lambda ledger, at: ledger.entries[at].update(action="REFUSED"),
    lambda ledger, at: ledger.entries[at].update(prev_chain_link=None),
    lambda ledger, at: ledger.entries[at].update(chain_link="f" * 64),
    lambda ledger, at: ledger.entries[at].update(chain_link=ledger.entries[at]["chain_link"].upper()),
    lambda ledger, at: ledger.entries[at].update(chain_link=" " + ledger.entries[at]["chain_link"][:63]),
    lambda ledger, at: ledger.entries[at].update(chain_link="short"),
    lambda ledger, at: ledger.entries[at].update(origin="{}"),
    lambda ledger, at: ledger.entries[at].update(link_version=1),
    lambda ledger, at: ledger.entries[at].update(seq=ledger.entries[at]["seq"] + 1),
    lambda ledger, at: ledger.relink(ledger.entries[at]["seq"]),
)


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(range(len(DAMAGE))), st.integers(0, 19)), max_size=3),
    st.integers(1, 25),
    st.integers(0, 6),
)
def test_entries_are_judged_as_a_naive_reading_of_the_rules_does(
    damages: list[tuple[int, int]], batch_rows: int, version_1_until: int
) -> None:
    ledger = build(20, version_1_until=version_1_until)
    for which, at in damages:
        with suppress(ValueError):  # nothing can be linked to a link that is no hex any more
            DAMAGE[which](ledger, min(at, len(ledger.entries) - 1))
    findings = Findings()
    checker = EntryChecker("acme", findings, first_seq=1, prev_link=None)
    rows = [tuple(row[name] for name in ENTRY_COLUMNS) for row in sorted(ledger.entries, key=lambda row: row["seq"])]
    links = []
    for at in range(0, len(rows), batch_rows):
        for run in checker.check(rows[at : at + batch_rows]):
            assert [*run.hlcs] == [ledger.entry(run.first_seq + at)["t_hlc"] for at in range(len(run.links))]
            links += run.links
    expected = naive.judge_entries("acme", ledger.entries)
    assert findings.counts() == expected.counts
    found = findings.first_break()
    assert ((found.seq, found.kind) if found else None) == expected.first
    assert all(len(link) in (0, 32) for link in links)


_texts = st.text(st.characters(exclude_categories=("Cs",)), max_size=5) | st.text("a", min_size=1020, max_size=1030)


@given(
    st.lists(
        st.tuples(_texts, _texts, _texts, st.just(b"d" * 32), st.binary(max_size=3) | st.just(b"o" * 1030)),
        min_size=1,
        max_size=4,
    ),
    st.integers(0, 2**64 - 5),
    st.sampled_from([b"", b"p" * 32]),
)
def test_links_of_many_entries_are_those_of_each(
    entries: list[tuple[str, str, str, bytes, bytes]], first_seq: int, prev: bytes
) -> None:
    linker = Linker("acme")
    one_by_one, before = [], prev
    for seq, (hlc, job_id, action, digest, origin) in enumerate(entries, first_seq):
        before = linker.link(seq, hlc, job_id, action, before, digest, origin)
        one_by_one.append(before)
    hlcs, job_ids, actions, digests, origins = zip(*entries, strict=True)
    assert linker.links(first_seq, prev, hlcs, job_ids, actions, digests, origins) == one_by_one


@given(
    st.integers(1, 40),
    st.sets(st.integers(1, 40), max_size=4),
    st.integers(1, 12),
    st.integers(1, 40),
    st.integers(1, 41),
)
def test_any_whole_ledger_is_valid_in_any_range_and_batching(
    count: int, signed_to: set[int], batch_rows: int, from_seq: int, to_seq: int
) -> None:
    ledger = build(count, snapshots_to=sorted(seq for seq in signed_to if seq <= count))
    ledger.store_tree(min(to_seq, count))
    assert check(ledger, batch_rows=batch_rows, checkpoints=[ledger.checkpoint(min(from_seq, count))]).is_valid
    assert check(ledger, batch_rows=batch_rows, from_seq=from_seq, to_seq=to_seq).is_valid


# --- cost -----------------------------------------------------------------------------------------


@pytest.fixture
def usual_collector() -> Iterator[None]:
    """Garbage is collected as often as Python does by itself: a service in this process may have made that rarer."""
    before = gc.get_threshold()
    gc.set_threshold(700, 10, 10)
    yield
    gc.set_threshold(*before)


def test_memory_does_not_grow_with_the_chain(usual_collector: None, monkeypatch: pytest.MonkeyPatch) -> None:
    # Of the index of jobs runs below the highest level are kept, until they are merged: here those of 8,192 entries.
    monkeypatch.setattr(job_index, "LEVEL_MAX", 1)
    monkeypatch.setattr(builder, "LEVEL_MAX", 1)

    def peak_bytes(ledger: Ledger) -> int:
        reader = MemoryReader(ledger, 500)
        gc.collect()  # empties the lists of tuples to use again, which are as long afterwards in every run
        tracemalloc.start()
        verdict = asyncio.run(verify(reader, tenant_id="acme", open_snapshot=OPEN))
        used_bytes = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert verdict.is_valid
        return used_bytes

    small, large = build(18_000), build(27_000)
    peak_bytes(small)  # the first run fills caches
    assert peak_bytes(large) - peak_bytes(small) < 9_000 * 8, "not even a reference is kept of each row"


async def test_other_tasks_get_their_turn_while_a_chain_is_verified() -> None:
    with counted_turns() as turns:
        await verify(MemoryReader(build(3_000), 100), tenant_id="acme", projection=True)
    assert turns.count >= 30


# --- the list of kinds ----------------------------------------------------------------------------


def test_the_kinds_are_those_of_the_interfaces_in_their_order() -> None:
    assert ", ".join(KINDS) == (
        "gap, duplicate-seq, payload-digest, hlc-columns, prev-link, link, malformed, head, tail-truncated, "
        "snapshot-root, snapshot-signature, snapshot-chain, caller-signature, tree, projection, rollback"
    )


def test_the_first_break_is_the_lowest_seq_then_the_first_kind() -> None:
    findings = Findings()
    for kind, seq in [("rollback", 5), ("tree", 4), ("link", 4), ("gap", 9)]:
        findings.add(kind, seq, "")
    found = findings.first_break()
    assert found is not None
    assert (found.seq, found.kind) == (4, "link")


def test_a_head_that_was_raised_reads_as_a_tail_that_was_cut() -> None:
    ledger = WHOLE.copy()
    ledger.head = Head(61, "0" * 64, "1:0:n")
    assert first(check(ledger)) == ("tail-truncated", 61)


def test_a_tree_or_snapshot_past_the_end_reads_as_a_tail_that_was_cut() -> None:
    by_tree, by_snapshot = WHOLE.copy(), WHOLE.copy()
    by_tree.tree = StoredTree(61, "0" * 64)
    assert first(check(by_tree)) == ("tail-truncated", 61)
    longer = build(70, snapshots_to=(20, 21, 50, 70))
    by_snapshot.snapshots = longer.snapshots
    verdict = check(by_snapshot)
    assert first(verdict) == ("tail-truncated", 61)
    assert not_ok(verdict) == {"head": "broken", "snapshots": "not_checked", "checkpoint": "not_checked"}


_BREAKS = st.tuples(
    st.sampled_from(KINDS), st.integers(1, 3), st.sampled_from(["a", "b"]), st.sampled_from([None, 1, "1"])
)


@given(st.lists(_BREAKS, max_size=12), st.integers(0, 12), st.randoms())
@example([("gap", 1, "b", "1"), ("gap", 1, "b", 1)], 0, Random(3))
def test_findings_do_not_depend_on_their_order_nor_on_who_made_them(
    breaks: list[tuple[str, int, str, Any]], cut: int, random: Random
) -> None:
    together, one, other = Findings(), Findings(), Findings()
    for kind, seq, detail, actual in breaks:
        together.add(kind, seq, detail, actual=actual)
    random.shuffle(breaks)
    for findings, some in ((one, breaks[:cut]), (other, breaks[cut:])):
        for kind, seq, detail, actual in some:
            findings.add(kind, seq, detail, actual=actual)
    other.merge(one.found)
    assert other.first_break() == together.first_break()
    assert (other.counts(), other.verdicts()) == (together.counts(), together.verdicts())


@pytest.mark.parametrize("batch_rows", [1, 20, 21])
def test_an_entry_that_stands_twice_explains_what_does_not_fit_behind_it_alone(batch_rows: int) -> None:
    ledger = build(40)
    ledger.sign(20, merkle_root="0" * 64)
    ledger.sign(40, merkle_root="0" * 64)
    ledger.entries.insert(20, dict(ledger.entry(20)))
    verdict = check(ledger, batch_rows=batch_rows)
    assert verdict.breaks == {"duplicate-seq": 1, "snapshot-root": 1}
    assert first(verdict) == ("duplicate-seq", 20)
