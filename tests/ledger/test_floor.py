"""A chain whose prefix has left with a prune verifies from its floor on, and every edit of what is left of the prefix
is found."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, Final

import pytest
from msgspec.structs import replace

from ledger import canonical
from ledger.job_index import covering
from ledger.machines.retention import SUBJECT
from ledger.merkle import Frontier
from ledger.verification import ASPECTS, Verdict, verify
from tests.ledger.blocks import short_blocks
from tests.ledger.ledger_in_memory import OPEN, Ledger, MemoryReader, build, payload_digest
from tests.ledger.pruned import index_from, index_without

ENDS: Final = (20, 255, 256, 300, 512, 600)
PRUNED_SEQ: Final = 690


@cache
def whole(to_seq: int) -> Ledger:
    """A ledger of 700 entries, of which the one at ``PRUNED_SEQ`` says that those up to ``to_seq`` leave."""
    ledger = build(700, snapshots_to=ENDS)
    state_floor(ledger, facts_of(ledger, to_seq))
    ledger.keep_index(to_seq)
    return ledger


def facts_of(ledger: Ledger, to_seq: int) -> dict[str, Any]:
    frontier = Frontier()
    frontier.extend(ledger.leaf_hashes(1, to_seq))
    return {
        "type": "PRUNED",
        "after": {"seq": 1, "chain_link": ledger.entry(1)["chain_link"]},
        "period_s": 1,
        "from_seq": 1,
        "to_seq": to_seq,
        "entry_count": to_seq,
        "chain_link": ledger.entry(to_seq)["chain_link"],
        "tree_root": frontier.root().hex(),
        "compact_range": [each.hex() for each in frontier.hashes],
        "snapshot": payload_digest(next(each for each in ledger.snapshots if each["to_seq"] == to_seq)),
        "highest_hlc": ledger.entry(to_seq)["t_hlc"],
        "archive": "file:///archive",
        "manifests": ["a" * 64],
        "decided_ms": 1,
        "never_ended": 0,
        "statement": "ok",
    }


def state_floor(ledger: Ledger, facts: dict[str, Any]) -> None:
    row = next(each for each in ledger.entries if each["seq"] == PRUNED_SEQ)
    row |= {"job_id": SUBJECT, "action": "PRUNED", "payload": canonical.encode(facts).decode()}
    ledger.relink(PRUNED_SEQ)
    ledger.store_head()
    ledger.store_tree()
    ledger.store_jobs()


def pruned(to_seq: int, *, removed_to: int | None = None) -> Ledger:
    """The ledger without its first entries."""
    ledger = whole(to_seq).copy()
    remove(ledger, to_seq if removed_to is None else removed_to)
    return ledger


def remove(ledger: Ledger, to_seq: int) -> None:
    ledger.entries = [row for row in ledger.entries if row["seq"] > to_seq]
    ledger.store_jobs()


def check(ledger: Ledger, **options: Any) -> Verdict:
    options = {"judge_statement": lambda action, facts, hlc: facts["statement"], **options}
    return asyncio.run(verify(MemoryReader(ledger, 100), tenant_id="acme", open_snapshot=OPEN, **options))


@pytest.mark.parametrize("to_seq", ENDS)
def test_a_pruned_chain_is_ok_in_every_aspect_from_its_floor_on(to_seq: int) -> None:
    sizes = [size for size in (7, 256, 299, 620) if size != to_seq]
    verdict = check(pruned(to_seq), checkpoints=[whole(to_seq).checkpoint(size) for size in sizes])
    assert verdict.first_break is None
    assert verdict.verdicts == dict.fromkeys(ASPECTS, "ok")
    assert (verdict.from_seq, verdict.to_seq, verdict.entries_checked) == (to_seq + 1, 700, 700 - to_seq)
    said = verdict.to_json(1.0)
    assert said["verified_from_seq"] == to_seq + 1
    assert said["pruned"] == {
        "to_seq": to_seq,
        "manifest": "a" * 64,
        "at": "2024-01-11T00:00:00.230Z",
        "seq": PRUNED_SEQ,
        "commitments": None,
    }


@pytest.mark.parametrize("removed_to", [0, 1, 100, 299])
def test_entries_below_the_floor_may_be_there_or_not_while_they_are_removed(removed_to: int) -> None:
    verdict = check(pruned(300, removed_to=removed_to))
    assert verdict.first_break is None
    assert verdict.entries_checked == 400


def test_a_tree_that_is_not_made_again_yet_of_entries_that_are_back_is_no_break() -> None:
    ledger = pruned(300, removed_to=0)
    ledger.tree, ledger.tiles = None, {}
    verdict = check(ledger)
    assert (first(verdict), verdict.verdicts["tree"]) == (None, "not_checked")
    remove(ledger, 300)
    assert first(check(ledger)) == ("tree", 1)


def test_a_range_begins_at_the_floor_where_less_is_asked_for() -> None:
    verdict = check(pruned(300), from_seq=5, to_seq=400)
    assert (verdict.is_valid, verdict.from_seq, verdict.to_seq) == (True, 301, 400)
    verdict = check(pruned(300), from_seq=350)
    assert (verdict.is_valid, verdict.from_seq) == (True, 350)


@pytest.fixture
def of_many_runs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Ledgers whose index of jobs has runs of every level over what left and what stays."""
    short_blocks(monkeypatch)
    whole.cache_clear()
    yield
    whole.cache_clear()


@pytest.mark.parametrize("to_seq", [20, 255, 300, 600])
def test_an_index_without_one_kept_entry_in_a_run_over_what_left_is_found(of_many_runs: None, to_seq: int) -> None:
    """The operator prunes, and then signs runs that lack an entry which is still there."""
    ledger = pruned(to_seq)
    assert check(ledger).verdicts["snapshots"] == "ok"
    over_floor = [place.begin < to_seq < place.end for place in covering(700)]
    assert any(over_floor)
    true, false = whole(to_seq).job_index(700), index_without(whole(to_seq), to_seq + 1)
    roots = [bad if is_over else good for good, bad, is_over in zip(true, false, over_floor, strict=True)]
    assert roots != true
    signed = whole(to_seq).copy()
    signed.sign(700, job_index=roots)
    ledger.snapshots = signed.snapshots
    verdict = check(ledger)
    assert first(verdict) == ("snapshot-root", 700)
    assert verdict.first_break is not None
    assert "job_index" in verdict.first_break.detail


@pytest.mark.parametrize("edit", ["none", "run", "key", "hash", "payload"])
def test_what_is_not_known_of_the_index_of_entries_that_left_is_not_called_ok(of_many_runs: None, edit: str) -> None:
    ledger = pruned(255)
    kept = ledger.kept_index[255]
    assert kept.runs
    assert kept.keys
    edited = {
        "none": replace(kept, runs=[], keys=b"", hashes=b""),
        "run": replace(kept, runs=[bytes(len(kept.runs[0])), *kept.runs[1:]]),
        "key": replace(kept, keys=bytes(len(kept.keys))),
        "hash": replace(kept, hashes=bytes(len(kept.hashes))),
        "payload": replace(kept, payload=b"{}"),
    }
    ledger.kept_index[255] = edited[edit]
    verdict = check(ledger)
    assert verdict.first_break is None
    assert [aspect for aspect, said in verdict.verdicts.items() if said != "ok"] == ["snapshots", "checkpoint"]


def test_an_index_that_begins_at_the_floor_is_compared_as_a_whole(of_many_runs: None) -> None:
    """That of a chain that was pruned before it had one."""
    ledger = whole(255).copy()
    claim = index_from(ledger, 255)
    assert claim["job_index_from"] == 257
    ledger.sign(700, **claim)
    remove(ledger, 255)
    ledger.kept_index = {}
    for row in ledger.snapshots[:-1]:
        assert row["to_seq"] <= 600
    ledger.snapshots = [ledger.snapshots[-1]]
    assert first(check(ledger)) == ("snapshot-chain", 256), "what is looked at here is the index alone"
    assert check(ledger).breaks == {"snapshot-chain": 1}
    wrong = whole(255).copy()
    wrong.sign(700, job_index=[*claim["job_index"][:-1], "00" * 32], job_index_from=257)
    ledger.snapshots = [wrong.snapshots[-1]]
    assert check(ledger).breaks == {"snapshot-chain": 1, "snapshot-root": 1}


def first(verdict: Verdict) -> tuple[str, int] | None:
    return (verdict.first_break.kind, verdict.first_break.seq) if verdict.first_break else None


def test_a_prefix_that_is_gone_without_a_prune_is_a_gap() -> None:
    ledger = build(700, snapshots_to=ENDS)
    remove(ledger, 300)
    assert first(check(ledger)) == ("gap", 1)


def test_a_chain_that_lacks_more_than_its_prune_says_is_a_gap() -> None:
    assert first(check(pruned(300, removed_to=310))) == ("gap", 301)


def stated(to_seq: int, **changes: Any) -> Ledger:
    """A pruned ledger whose PRUNED entry has other facts, with all links made to fit."""
    ledger = whole(to_seq).copy()
    state_floor(ledger, facts_of(ledger, to_seq) | changes)
    remove(ledger, to_seq)
    return ledger


def test_a_prune_that_no_admitted_key_signed_is_found_and_prunes_nothing() -> None:
    verdict = check(stated(300, statement="broken"))
    assert first(verdict) == ("gap", 1)
    assert verdict.breaks["malformed"] == 1
    nothing_removed = whole(300).copy()
    state_floor(nothing_removed, facts_of(nothing_removed, 300) | {"statement": "broken"})
    verdict = check(nothing_removed)
    assert (first(verdict), verdict.from_seq) == (("malformed", PRUNED_SEQ), 1)


def test_without_the_key_of_a_prune_the_verdict_on_signatures_says_so() -> None:
    verdict = check(stated(300, statement="unknown_key"))
    assert (verdict.from_seq, verdict.verdicts["signatures"]) == (301, "unknown_key")
    verdict = check(pruned(300), judge_statement=None)
    assert (verdict.is_valid, verdict.from_seq, verdict.verdicts["signatures"]) == (True, 301, "not_checked")


def edited_tile(level: int, index: int, at: int) -> Callable[[Ledger], None]:
    def edit(ledger: Ledger) -> None:
        tile = bytearray(ledger.tiles[level, index])
        tile[at * 32] ^= 1
        ledger.tiles[level, index] = bytes(tile)

    return edit


@pytest.mark.parametrize(
    ("edit", "kind"),
    [
        (edited_tile(0, 0, 5), "tree"),
        (edited_tile(0, 1, 3), "tree"),
        (edited_tile(1, 0, 0), "tree"),
        (edited_tile(0, 1, 200), "tree"),
        (lambda ledger: ledger.tiles.pop((0, 0)), "tree"),
        (lambda ledger: ledger.entries[0].update(prev_chain_link="0" * 64, chain_link="1" * 64), "prev-link"),
        (lambda ledger: ledger.snapshots.pop(4), "snapshot-chain"),
    ],
    ids=["leaf below", "leaf of the shared tile", "upper", "leaf above", "missing", "link", "snapshot"],
)
def test_an_edit_beside_the_floor_is_found(edit: Callable[[Ledger], object], kind: str) -> None:
    ledger = pruned(300)
    edit(ledger)
    assert kind in check(ledger).breaks


def test_a_checkpoint_of_other_entries_below_the_floor_is_a_rollback() -> None:
    kept = whole(300).checkpoint(100)._replace(root=bytes(32))
    verdict = check(pruned(300), checkpoints=[kept])
    assert verdict.breaks == {"rollback": 1}


@pytest.mark.parametrize(
    ("wrong", "kind"),
    [
        ({"chain_link": "0" * 64}, "prev-link"),
        ({"snapshot": "0" * 64}, "snapshot-chain"),
        ({"tree_root": Frontier.restore(300, [bytes(32)] * 4).root().hex(), "compact_range": ["0" * 64] * 4}, "tree"),
        ({"tree_root": "0" * 64}, "gap"),
    ],
)
def test_a_floor_that_is_not_that_of_the_chain_is_found(wrong: dict[str, Any], kind: str) -> None:
    assert kind in check(stated(300, **wrong)).breaks
