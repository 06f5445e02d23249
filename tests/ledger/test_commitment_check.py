"""Every verdict of a chain is judged again, and the table of what is promised compared; a forgery is named once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import orjson
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ledger.verification import Break, Verdict, verify
from tests.ledger import naive_commitments as naive
from tests.ledger.committed import (
    FORGED,
    RACE,
    RULES_RAISED,
    Said,
    capacity,
    committed,
    flipped,
    mend,
    placement,
    promised,
    proposal,
    revocation,
    with_history,
)
from tests.ledger.ledger_in_memory import OPEN, Ledger, MemoryReader
from tests.ledger.ranges import Beside

BEFORE = 4
"""Entries of jobs before the first proposal."""
CAPSULES = [f"c{n}" for n in range(4)]
NODES = ["n1", "n2"]
SEQS = st.integers(1, 30)

_amounts = st.fixed_dictionaries(
    {},
    optional={
        "cpu_millis": st.integers(0, 4),
        "memory_bytes": st.integers(0, 4),
        "accelerators": st.dictionaries(st.sampled_from(["A", "B"]), st.integers(0, 2), max_size=2),
    },
)
_members = st.fixed_dictionaries(
    {"capsule": st.sampled_from(CAPSULES), "node": st.sampled_from(NODES), "reservation": _amounts},
    optional={"limit": _amounts},
)
_module = {"mission": st.just("m"), "module": st.sampled_from(["a", "b"]), "epoch": st.integers(0, 2)}
_commitments = st.one_of(
    _members.map(lambda member: {"kind": "Placement", **member}),
    st.fixed_dictionaries(
        {
            "kind": st.just("GangPlacement"),
            "gang": st.sampled_from(["g", "h"]),
            "members": st.lists(_members, min_size=1, max_size=3),
        }
    ),
    st.fixed_dictionaries(
        {"kind": st.just("IdentityBind"), "capsule": st.sampled_from(CAPSULES), "identity": st.just("i")}
    ),
    st.fixed_dictionaries({"kind": st.just("ModuleAdjustment"), "replicas": st.integers(0, 2), **_module}),
    st.just({"kind": "QuotaGrant", "subject": "s", "resources": {"cpu_millis": 3}}),
    st.just({"kind": "Lease", "resource": "r", "holder": "h"}),
    st.just({"kind": "RulesVersion", "version": 2}),
    st.fixed_dictionaries({"kind": st.just("Revocation"), "index": SEQS}),
)
_preconditions = st.one_of(
    st.just({"kind": "None"}),
    st.fixed_dictionaries({"kind": st.just("NodeFreeOf"), "node": st.sampled_from(NODES), "at_least": _amounts}),
    st.fixed_dictionaries({"kind": st.just("GangUnplaced"), "gang": st.sampled_from(["g", "h"])}),
    st.fixed_dictionaries({"kind": st.just("ModuleAdjustmentVersion"), **_module}),
)
_rules = st.sampled_from([1, 2])
_factors = st.fixed_dictionaries(
    {}, optional={"cpu_millis": st.sampled_from(["1.5", "2"]), "accelerators": st.just({"A": "1.999"})}
)
_payloads = st.one_of(
    st.builds(proposal, _commitments, _preconditions, _rules),
    st.builds(proposal, _commitments, rules=_rules),
    st.builds(
        lambda node, amounts, overcommit, rules: capacity(node, overcommit=overcommit, rules=rules, **amounts),
        st.sampled_from(NODES),
        _amounts,
        st.one_of(st.none(), _factors),
        _rules,
    ),
)
PAYLOADS = st.lists(_payloads, min_size=1, max_size=25)


def checked(ledger: Ledger, beside: int = 0) -> tuple[Verdict, list[Break]]:
    """The verdict on all of the ledger, and every break."""
    breaks: list[Break] = []
    verdict = asyncio.run(
        verify(
            MemoryReader(ledger),
            tenant_id=ledger.tenant_id,
            open_snapshot=OPEN,
            on_break=breaks.append,
            elsewhere=Beside(ledger, beside) if beside else None,
        )
    )
    return verdict, breaks


def seqs_broken(ledger: Ledger) -> list[int]:
    """The seqs of all breaks, which are all of the projection."""
    verdict, breaks = checked(ledger)
    assert {each.kind for each in breaks} <= {"projection"}
    assert verdict.breaks.get("projection", 0) == len(breaks)
    return sorted(each.seq for each in breaks)


@given(PAYLOADS)
def test_what_an_appender_chains_holds_and_is_what_the_naive_twin_decides(payloads: list[dict[str, Any]]) -> None:
    ledger = committed(payloads)
    log: naive.Log = [("", {})] * BEFORE
    for row in ledger.entries[BEFORE:]:
        payload = orjson.loads(row["payload"])
        if "commitment" in payload:
            due = naive.verdict(log, payload)
            assert payload.get("rejection", {}).get("reason") == due
            assert row["action"] == ("PROPOSE_ACCEPTED" if due is None else "PROPOSE_REJECTED")
        log.append((row["action"], payload))
    assert seqs_broken(ledger) == []
    verdict, breaks = checked(ledger, beside=2)
    assert (verdict.verdicts["projection"], verdict.commitments, breaks) == ("ok", len(payloads), [])


@given(PAYLOADS, st.data())
@example(RACE, None)
def test_a_verdict_forged_in_the_past_is_named_once(payloads: list[dict[str, Any]], data: Any) -> None:
    ledger = committed(payloads)
    judged = [row["seq"] for row in ledger.entries if row["action"].startswith("PROPOSE_")]
    for seq in judged if data is None else judged and [data.draw(st.sampled_from(judged))]:
        assert seqs_broken(flipped(ledger, seq)) == [seq]


@given(PAYLOADS, st.data())
@example(RACE, None)
def test_a_verdict_forged_when_it_was_given_and_believed_is_named_once(
    payloads: list[dict[str, Any]], data: Any
) -> None:
    judged = [seq for seq, each in enumerate(payloads, BEFORE + 1) if "commitment" in each]
    for seq in judged if data is None else judged and [data.draw(st.sampled_from(judged))]:
        assert seqs_broken(committed(payloads, forged=[seq])) == [seq]


def test_a_proposal_that_was_left_out_changes_what_is_due_behind_it() -> None:
    ledger = committed(RACE)
    del ledger.entries[6]  # That of seq 7, which left too little for seq 8.
    for seq, row in enumerate(ledger.entries, 1):
        row["seq"] = seq
    mend(ledger)
    ledger.promised = promised(_said(ledger))
    assert seqs_broken(ledger)[0] == 7


def test_each_entry_is_judged_by_the_rules_in_force_before_it() -> None:
    ledger = committed(RULES_RAISED)
    rejected = {
        row["seq"]: orjson.loads(row["payload"])["rejection"]["reason"]
        for row in ledger.entries[BEFORE:]
        if row["action"] == "PROPOSE_REJECTED"
    }
    assert rejected == {
        6: "node-not-free",
        10: "rules-in-force",
        13: "over-capacity",
        14: "older-epoch",
        15: "not-revocable",
        18: "over-capacity",
        20: "over-capacity",
        21: "over-capacity",
    }
    assert seqs_broken(ledger) == []
    for seq in (7, 9, 11, 13, 14, 18, 20, 21):
        assert seqs_broken(flipped(ledger, seq)) == [seq]


def test_rules_that_the_verifier_does_not_know_are_named() -> None:
    ledger = committed([placement("a"), placement("b")])
    payload = orjson.loads(ledger.entry(5)["payload"])
    ledger.entry(5)["payload"] = orjson.dumps({**payload, "rules": 3}, option=orjson.OPT_SORT_KEYS).decode()
    mend(ledger)
    verdict, breaks = checked(ledger)
    assert verdict.first_break is not None
    assert (verdict.first_break.seq, breaks[0].kind) == (5, "projection")
    assert "rules 3, and this program knows rules up to 2" in verdict.first_break.detail


def test_two_that_are_forged_are_both_named() -> None:
    assert seqs_broken(flipped(flipped(committed(RACE), 8), 13)) == [8, 13]


@pytest.mark.parametrize(
    "change",
    [
        {"reason": "capsule-placed"},
        {"detail": "no room"},
        {"free": {"cpu_millis": 1}},
        {"blocking_index": 6},
        {"epoch": 0},
        {"more": 1},
    ],
    ids=str,
)
def test_every_word_of_a_rejection_is_judged(change: dict[str, Any]) -> None:
    ledger = committed(RACE)
    row = ledger.entry(8)
    payload = orjson.loads(row["payload"])
    payload["rejection"] |= change
    row["payload"] = orjson.dumps(payload, option=orjson.OPT_SORT_KEYS).decode()
    mend(ledger)
    assert seqs_broken(ledger) == [8]


@pytest.mark.parametrize(
    ("seq", "change"),
    [
        (7, {"payload": '{"type":"CommitmentProposed"}'}),
        (7, {"payload": '{"commitment":[],"type":"CommitmentProposed"}'}),
        (
            7,
            {"payload": '{"commitment":{"kind":"Lease"},"precondition":{"kind":"None"},"type":"CommitmentProposed"}'},
        ),
        (5, {"payload": '{"capacity":{"cpu_millis":"9"},"node":"n1","type":"CapacitySet"}'}),
        (7, {"job_id": "capsule:z"}),
        (8, {"job_id": "gang:c"}),
        (5, {"job_id": "node:n2"}),
    ],
    ids=str,
)
def test_what_is_no_proposal_or_about_something_else_is_named(seq: int, change: dict[str, Any]) -> None:
    ledger = committed(RACE)
    ledger.entry(seq).update(change)
    mend(ledger)
    assert seqs_broken(ledger)[0] == seq


def _drop(ledger: Ledger) -> None:
    ledger.promised = [row for row in ledger.promised if row["seq"] != 7]


def _add(seq: int) -> Callable[[Ledger], None]:
    def edit(ledger: Ledger) -> None:
        ledger.promised = sorted(
            [*ledger.promised, {"seq": seq, "ended_seq": None, "subject": "capsule:b"}], key=lambda row: row["seq"]
        )

    return edit


def _change(index: int, **values: Any) -> Callable[[Ledger], None]:
    def edit(ledger: Ledger) -> None:
        next(row for row in ledger.promised if row["seq"] == index).update(values)

    return edit


@pytest.mark.parametrize(
    ("seq", "edit"),
    [
        (7, _drop),
        (8, _add(8)),  # that of a rejected proposal
        (9, _add(9)),  # that of a revocation
        (2, _add(2)),  # that of a job
        (7, _add(7)),  # twice
        (99, _add(99)),  # behind the end
        (6, _change(6, ended_seq=None)),
        (6, _change(6, ended_seq=11)),
        (7, _change(7, ended_seq=9)),
        (5, _change(5, ended_seq=13)),
        (7, _change(7, subject="capsule:z")),
        (7, _change(7, subject=None)),
        (1, _change(7, seq=None)),
    ],
)
def test_a_row_that_does_not_fit_the_chain_is_named(seq: int, edit: Callable[[Ledger], None]) -> None:
    ledger = committed(RACE)
    edit(ledger)
    assert seqs_broken(ledger)[0] == seq
    assert checked(ledger, beside=1)[0].first_break == checked(ledger)[0].first_break


def test_the_table_is_compared_as_far_as_it_followed() -> None:
    ledger = committed(RACE)

    class Behind(MemoryReader):
        async def followed_seq(self) -> int:
            return 8

    def judged() -> dict[str, int]:
        verdict = asyncio.run(verify(Behind(ledger), tenant_id="acme", open_snapshot=OPEN))
        return dict(verdict.breaks)

    ledger.promised = promised([each for each in _said(ledger) if each.seq <= 8])
    assert judged() == {}
    _change(6, ended_seq=9)(ledger)
    assert judged() == {"projection": 1}
    ledger.promised = []
    assert judged() == {"projection": 3}


def _said(ledger: Ledger) -> list[Said]:
    rows = ledger.entries[BEFORE:]
    return [Said(row["seq"], row["action"], orjson.loads(row["payload"])) for row in rows]


def test_what_was_imported_is_history() -> None:
    ledger = with_history()
    assert [row["seq"] for row in ledger.promised] == [5]
    assert (orjson.loads(ledger.entry(9)["payload"])["rejection"]["reason"], seqs_broken(ledger)) == (
        "node-not-free",
        [],
    )
    ledger.entry(6)["origin"] = None
    mend(ledger)
    assert seqs_broken(ledger) == [6]


def test_a_chain_that_is_broken_itself_leaves_verdicts_undecided() -> None:
    ledger = flipped(committed(RACE), 8)
    ledger.entry(2)["chain_link"] = "0" * 64
    verdict, breaks = checked(ledger)
    assert verdict.verdicts["projection"] == "not_checked"
    assert "projection" not in {each.kind for each in breaks}


@pytest.mark.parametrize(("from_seq", "to_seq"), [(2, None), (None, 12), (1, 12), (9, 10)])
def test_a_range_is_not_judged_as_verdicts_hang_on_all_before(from_seq: int | None, to_seq: int | None) -> None:
    ledger = flipped(committed(RACE), 8)
    verdict = asyncio.run(
        verify(MemoryReader(ledger), tenant_id="acme", from_seq=from_seq, to_seq=to_seq, open_snapshot=OPEN)
    )
    assert (verdict.verdicts["projection"], dict(verdict.breaks)) == ("not_checked", {})


def test_what_a_forged_acceptance_promises_can_be_revoked_in_any_order() -> None:
    twice = [placement("a", bet=False), placement("a", bet=False), revocation(5), revocation(6), placement("a")]
    ledger = committed(twice, forged=[6])
    assert [row["action"] for row in ledger.entries[BEFORE:]] == ["PROPOSE_ACCEPTED"] * 5
    assert seqs_broken(ledger) == [6]


def test_the_break_says_what_was_due() -> None:
    verdict, _ = checked(flipped(committed(RACE), 6))
    found = verdict.first_break
    assert found is not None
    assert (found.seq, found.expected) == (6, "accepted")
    assert orjson.loads(str(found.actual)) == FORGED
