"""The commitment machine against a naive twin that works everything out of the whole log, over drawn histories."""

from __future__ import annotations

import time
from typing import Any

import pytest
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from ledger import canonical
from ledger.errors import InvalidInputError
from ledger.machines.commitments import Commitments, LiveState, commit, overlaid
from ledger.machines.promises import REASONS, Resources, proposed_payload, read_proposal, rejected_payload
from tests.conftest import EXAMPLES
from tests.ledger import naive_commitments as naive

NODES, CAPSULES = st.sampled_from(["n1", "n2"]), st.sampled_from(["a", "b", "c", "d"])
AMOUNT = st.sampled_from([0, 1, 2, 3])
RESOURCES = st.fixed_dictionaries(
    {},
    optional={
        "cpu_millis": AMOUNT,
        "memory_bytes": AMOUNT,
        "accelerators": st.dictionaries(st.sampled_from(["A100", "T4"]), AMOUNT, max_size=2),
    },
)
MEMBER = st.fixed_dictionaries(
    {"capsule": CAPSULES, "node": NODES, "reservation": RESOURCES}, optional={"limit": RESOURCES}
)
MODULE = {"mission": st.just("m"), "module": st.sampled_from(["web", "db"])}
COMMITMENTS = st.one_of(
    MEMBER.map(lambda member: {"kind": "Placement", **member}),
    MEMBER.map(lambda member: {"kind": "Placement", **member}),
    st.fixed_dictionaries(
        {"kind": st.just("GangPlacement"), "gang": st.sampled_from(["g", "h"]),
         "members": st.lists(MEMBER, min_size=1, max_size=3)}
    ),
    st.fixed_dictionaries({"kind": st.just("IdentityBind"), "capsule": CAPSULES, "identity": st.just("spiffe://x")}),
    st.fixed_dictionaries(
        {"kind": st.just("ModuleAdjustment"), **MODULE, "replicas": st.integers(0, 2), "epoch": st.integers(0, 3)}
    ),
    st.fixed_dictionaries({"kind": st.just("QuotaGrant"), "subject": st.just("team"), "resources": RESOURCES}),
    st.fixed_dictionaries({"kind": st.just("Lease"), "resource": st.just("r"), "holder": st.just("h")}),
    st.fixed_dictionaries({"kind": st.just("Revocation"), "index": st.integers(1, 40)}),
    st.fixed_dictionaries({"kind": st.just("Revocation"), "index": st.integers(1, 8)}),
)  # fmt: skip
PRECONDITIONS = st.one_of(
    st.just({"kind": "None"}),
    st.fixed_dictionaries({"kind": st.just("NodeFreeOf"), "node": NODES, "at_least": RESOURCES}),
    st.fixed_dictionaries({"kind": st.just("GangUnplaced"), "gang": st.sampled_from(["g", "h"])}),
    st.fixed_dictionaries({"kind": st.just("ModuleAdjustmentVersion"), **MODULE, "epoch": st.integers(0, 3)}),
)


class Judged(RuleBasedStateMachine):
    """Each proposal is judged by both; batches that are given up leave nothing."""

    @initialize()
    def begin(self) -> None:
        self.log: naive.Log = []
        self.machine = Commitments()

    @rule(commitment=COMMITMENTS, precondition=PRECONDITIONS)
    def propose(self, commitment: dict[str, Any], precondition: dict[str, Any]) -> None:
        proposed = {"commitment": commitment, "precondition": precondition}
        expected = naive.verdict(self.log, proposed)
        index, proposal = len(self.log) + 1, read_proposal(canonical.encode(proposed))
        # On a copy that is given up, on one that counts: the same.
        given_up = Commitments(overlaid(self.machine.state)).decide(index, proposal)
        counted = overlaid(self.machine.state)
        rejection = Commitments(counted).decide(index, proposal)
        commit(counted)
        assert rejection == given_up
        assert (rejection.reason if rejection is not None else None) == expected
        if rejection is not None:
            assert rejection.reason in REASONS
            assert rejection.blocking_index is None or rejection.blocking_index in naive.active(self.log)
            if rejection.free is not None:
                assert precondition["kind"] == "NodeFreeOf"
        self.log.append(("PROPOSE_REJECTED" if rejection else "PROPOSE_ACCEPTED", proposed))

    @rule(node=NODES, capacity=RESOURCES)
    def set_capacity(self, node: str, capacity: dict[str, Any]) -> None:
        counted = overlaid(self.machine.state)
        Commitments(counted).set_capacity(node, Resources(**capacity))
        commit(counted)
        self.log.append(("CAPACITY_SET", {"node": node, "capacity": capacity}))

    @invariant()
    def same(self) -> None:
        live = naive.active(self.log)
        assert sorted(self.machine.state.active) == sorted(live)
        for node in ("n1", "n2"):
            known = self.machine.state.nodes.get(node)
            claimed = {} if known is None else {n: a for n, a in known.reserved.items() if n != "accelerators"}
            assert claimed == naive.reserved(self.log, node)

    @invariant()
    def built_from_what_is_live_alone(self) -> None:
        again = Commitments()
        live = naive.active(self.log)
        newest = {said["node"]: index for index, (action, said) in enumerate(self.log, 1) if action == "CAPACITY_SET"}
        for index, (action, said) in enumerate(self.log, 1):
            if index in live or (action == "CAPACITY_SET" and newest[said["node"]] == index):
                again.fold(index, action, canonical.encode(said))
        assert again.state == self.machine.state


TestJudged = Judged.TestCase
TestJudged.settings = hypothesis_settings(max_examples=EXAMPLES, stateful_step_count=40, deadline=None)


def placed(capsule: str, node: str = "n1", **amounts: Any) -> dict[str, Any]:
    return {"kind": "Placement", "capsule": capsule, "node": node, "reservation": amounts}


def decide(machine: Commitments, index: int, commitment: dict[str, Any], bet: dict[str, Any] | None = None) -> Any:
    said = {"commitment": commitment, "precondition": bet or {"kind": "None"}}
    return machine.decide(index, read_proposal(canonical.encode(said)))


def test_disjoint_dimensions_of_one_node_are_both_given() -> None:
    machine = Commitments()
    wants_cpu = {"kind": "NodeFreeOf", "node": "n1", "at_least": {"cpu_millis": 1}}
    wants_gpu = {"kind": "NodeFreeOf", "node": "n1", "at_least": {"accelerators": {"A100": 1}}}
    assert decide(machine, 1, placed("a", cpu_millis=1), wants_cpu) is None
    assert decide(machine, 2, placed("b", accelerators={"A100": 1}), wants_gpu) is None
    rejection = decide(
        machine, 3, placed("c", accelerators={"T4": 1}), {**wants_gpu, "at_least": {"accelerators": {"T4": 1}}}
    )
    assert (rejection.reason, rejection.blocking_index) == ("node-not-free", 2)


def test_a_gang_is_placed_whole_or_not_at_all() -> None:
    machine = Commitments()
    assert decide(machine, 1, placed("b")) is None
    gang = {"kind": "GangPlacement", "gang": "g", "members": [
        {"capsule": name, "node": "n1", "reservation": {"cpu_millis": 1}} for name in "ab"]}  # fmt: skip
    assert decide(machine, 2, gang).reason == "capsule-placed"
    assert machine.state.nodes == {}
    assert decide(machine, 3, placed("a", "n2")) is None, "a member of the gang that was not placed is free"
    twice = {**gang, "members": [gang["members"][0] | {"capsule": "z"}] * 2}
    assert decide(machine, 4, twice).reason == "capsule-placed"


def test_what_a_rejection_says_is_taken_out_of_the_payload_again() -> None:
    payload = canonical.encode(
        {"commitment": placed("a"), "precondition": {"kind": "None"}, "type": "CommitmentProposed"}
    )
    machine = Commitments()
    assert decide(machine, 1, placed("a")) is None
    rejection = decide(machine, 2, placed("a"))
    recorded = rejected_payload(payload, rejection)
    assert recorded != payload
    assert proposed_payload(recorded) == payload
    assert read_proposal(recorded).rejection == rejection


@pytest.mark.parametrize(
    "payload", [b"{}", b"[]", b'{"commitment":{"kind":"Placed"},"precondition":{"kind":"None"}}', b"\xff"]
)
def test_what_is_no_proposal_is_told(payload: bytes) -> None:
    with pytest.raises(InvalidInputError, match="not the payload of a proposal"):
        read_proposal(payload)


def test_a_revocation_that_was_accepted_of_nothing_is_told() -> None:
    said = {"commitment": {"kind": "Revocation", "index": 1}, "precondition": {"kind": "None"}}
    with pytest.raises(InvalidInputError, match="revokes 1"):
        Commitments().fold(2, "PROPOSE_ACCEPTED", canonical.encode(said))


def test_judging_costs_the_same_however_much_is_active() -> None:
    """A node with 20,000 claims, a module of 20,000 adjustments: thousands of times as many would show in a scan."""
    machine = Commitments()
    machine.set_capacity("n1", Resources(cpu_millis=20_000))
    for index in range(1, 20_001):
        assert decide(machine, 2 * index, placed(f"c{index}", cpu_millis=1)) is None
        adjusted = {"kind": "ModuleAdjustment", "mission": "m", "module": "web", "replicas": 1, "epoch": index}
        assert decide(machine, 2 * index + 1, adjusted) is None
    bet = {"kind": "NodeFreeOf", "node": "n1", "at_least": {"cpu_millis": 1}}
    began_s = time.thread_time()
    for index in range(1, 201):
        assert decide(machine, 50_000 + index, placed("new", cpu_millis=1), bet).reason == "node-not-free"
        assert decide(machine, 60_000 + index, {"kind": "Revocation", "index": 2 * index}) is None
        assert decide(machine, 70_000 + index, placed(f"c{index}", cpu_millis=1), bet) is None
    assert time.thread_time() - began_s < 1, "600 proposals against 40,000 commitments"
    assert isinstance(machine.state, LiveState)
