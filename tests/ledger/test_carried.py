"""What a PRUNED entry carries of commitments is their state at its floor, and later verdicts are judged from there."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ledger.errors import InvalidInputError
from ledger.machines.carried import ErasedKeys, carry_commitments, read_commitments, read_private_fields
from ledger.machines.commitments import Commitments
from ledger.verification import Break, verify
from tests.ledger.committed import RULES_RAISED, capacity, committed, placement, proposal, revocation
from tests.ledger.ledger_in_memory import OPEN, Ledger, MemoryReader
from tests.ledger.pruned import judged_entries, pruned_race, removed
from tests.ledger.ranges import Beside
from tests.ledger.test_commitment_check import PAYLOADS

RACE = [
    capacity("n1", cpu_millis=3),  # seq 5
    placement("a"),
    placement("b"),
    revocation(6),
    capacity("n2", cpu_millis=1),  # seq 9
    capacity("n1", cpu_millis=2, overcommit={"cpu_millis": "1.5"}),
    proposal({"kind": "Lease", "resource": "r", "holder": "h"}),  # seq 11
    placement("c"),
    placement("d"),
    placement("e"),  # seq 14, rejected: the node is full
    revocation(7),
    placement("e"),
]
FLOOR = 11


def state_at(ledger: Ledger, to_seq: int) -> Commitments:
    machine = Commitments()
    for seq, action, payload in judged_entries(ledger, to_seq):
        machine.fold(seq, action, payload)
    return machine


@given(PAYLOADS, st.data())
def test_the_machine_of_what_is_carried_is_that_of_all_entries_that_left(payloads: list[Any], data: Any) -> None:
    ledger = committed(payloads)
    first = data.draw(st.integers(5, len(ledger.entries)))
    second = data.draw(st.integers(first, len(ledger.entries)))
    entries = judged_entries(ledger, second)
    at_once = carry_commitments(None, entries)
    before = carry_commitments(None, [each for each in entries if each[0] <= first])
    assert carry_commitments(before, [each for each in entries if each[0] > first]) == at_once
    if (carried := read_commitments(at_once, second)) is not None:
        assert carried.machine().state == state_at(ledger, second).state
        # Entries made of it say the same.
        said = [(index, *facts) for index, facts in carried.payloads().items()]
        assert carry_commitments({"rules": carried.rules, "active": [], "nodes": []}, said) == at_once


def breaks_of(ledger: Ledger, beside: int = 0) -> list[tuple[str, int]]:
    breaks: list[Break] = []
    elsewhere = Beside(ledger, beside) if beside else None
    reader = MemoryReader(ledger)
    verifying = verify(reader, tenant_id="acme", open_snapshot=OPEN, on_break=breaks.append, elsewhere=elsewhere)
    verdict = asyncio.run(verifying)
    assert verdict.from_seq == FLOOR + 1
    assert (verdict.verdicts["projection"] == "ok") == (not breaks)
    return [(each.kind, each.seq) for each in breaks]


@pytest.mark.parametrize("removed_to", [0, 7, FLOOR])
@pytest.mark.parametrize("beside", [0, 4])
def test_verdicts_behind_a_floor_are_judged_from_what_it_carries(removed_to: int, beside: int) -> None:
    ledger = pruned_race(RACE, FLOOR)
    assert [row["action"] for row in ledger.entries[13:16]] == [
        "PROPOSE_REJECTED",
        "PROPOSE_ACCEPTED",
        "PROPOSE_ACCEPTED",
    ]
    assert breaks_of(removed(ledger, removed_to), beside) == []


def test_rules_that_were_raised_before_the_floor_are_carried() -> None:
    ledger = pruned_race([*RULES_RAISED[:7], placement("x"), *RULES_RAISED[7:]], FLOOR)
    assert breaks_of(removed(ledger, FLOOR)) == []


def changed(**said: Any) -> dict[str, Any]:
    state = carry_commitments(None, judged_entries(committed(RACE), FLOOR))
    assert state is not None
    return {**state, **said}


FULL = {"index": 10, "node": "n1", "capacity": {"cpu_millis": 9}}


@pytest.mark.parametrize(
    ("state", "first"),
    [
        (None, 7),
        (changed(active=[]), 7),
        (changed(nodes=[FULL]), 9),
        (changed(nodes=[]), 9),
        (changed(rules=1), 13),
        (changed(active=[{"index": 8, "commitment": {"kind": "Revocation", "index": 7}}]), 17),
        (changed(rules=3), 17),
        ({}, 17),
    ],
)
def test_a_wrong_state_is_found_by_the_table_and_by_the_verdicts_behind_it(state: Any, first: int) -> None:
    found = breaks_of(removed(pruned_race(RACE, FLOOR, commitments=state), FLOOR))
    assert {kind for kind, _ in found} == {"projection"}
    assert first in {seq for _, seq in found}
    without_table = removed(pruned_race(RACE, FLOOR, commitments=state), FLOOR)
    without_table.promised.clear()
    assert any(seq > FLOOR for _, seq in breaks_of(without_table))


@pytest.mark.parametrize("seq", [5, 6, 7, 9, 10, 11])
def test_an_edit_of_the_table_below_the_floor_is_found(seq: int) -> None:
    ledger = removed(pruned_race(RACE, FLOOR), FLOOR)
    row = next(each for each in ledger.promised if each["seq"] == seq)
    for ended_seq in (None, 12, 3):
        was, row["ended_seq"] = row["ended_seq"], ended_seq
        # What ended below the floor is read by nobody: when it did does not count.
        is_seen = ended_seq != was and not (was is not None and was <= FLOOR and ended_seq == 3)
        assert breaks_of(ledger) == ([("projection", seq)] if is_seen else [])
        row["ended_seq"] = was
    is_carried = row["ended_seq"] is None or row["ended_seq"] > FLOOR
    row["subject"] += "x"
    assert breaks_of(ledger) == ([("projection", seq)] if is_carried else [])
    ledger.promised.remove(row)
    assert breaks_of(ledger) == ([("projection", seq)] if is_carried else [])


@pytest.mark.parametrize(
    "said",
    [
        {"rules": 0, "active": [], "nodes": []},
        {"rules": 2, "active": []},
        {
            "rules": 2,
            "active": [{"index": 12, "commitment": {"kind": "Lease", "resource": "r", "holder": "h"}}],
            "nodes": [],
        },
        {"rules": 2, "active": [], "nodes": [FULL, FULL]},
        {"rules": 2, "active": [], "nodes": [{**FULL, "index": 3}, FULL]},
        {"rules": 2, "active": [{"index": 10, "commitment": {"kind": "RulesVersion", "version": 2}}], "nodes": [FULL]},
    ],
)
def test_what_is_no_state_is_refused(said: dict[str, Any]) -> None:
    with pytest.raises(InvalidInputError, match="carries no state"):
        read_commitments(said, FLOOR)


def test_what_is_carried_of_private_fields_is_read_as_it_was_written() -> None:
    declared = {"seq": 3, "at_ms": 4, "id": "0" * 32, "fields": ["spec.user"], "subject": "spec.user"}
    erased = ErasedKeys.of(["b" * 32, "a" * 32, "b" * 32])
    assert (erased.count, erased) == (2, ErasedKeys.of(["a" * 32, "b" * 32]))
    said = {"declared": declared, "erased": {"count": 2, "sha256": erased.sha256}}
    found = read_private_fields(orjson.loads(orjson.dumps(said)))
    assert found.to_json() == said
    assert found.declared is not None
    assert found.declared.facts == {"id": "0" * 32, "fields": ["spec.user"], "subject": "spec.user"}
    assert read_private_fields(None).to_json() is None
    with pytest.raises(InvalidInputError):
        read_private_fields({"declared": {**declared, "id": "no id"}})
