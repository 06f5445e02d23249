"""The commitment machine against a naive twin that works everything out of the whole log, over drawn histories."""

from __future__ import annotations

import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from ledger import canonical
from ledger.errors import InvalidInputError
from ledger.machines.commitment_state import LiveState, commit, overlaid
from ledger.machines.commitments import Commitments
from ledger.machines.node_table import NodeTable
from ledger.machines.promises import (
    REASONS,
    RULES,
    Capacity,
    Resources,
    proposed_payload,
    read_capacity,
    read_proposal,
    rejected_payload,
)
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
FACTOR = st.sampled_from(["1", "1.5", "2.25", "1.999"])
OVERCOMMIT = st.fixed_dictionaries(
    {}, optional={"cpu_millis": FACTOR, "memory_bytes": FACTOR, "accelerators": st.fixed_dictionaries({"T4": FACTOR})}
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
    st.fixed_dictionaries({"kind": st.just("RulesVersion"), "version": st.integers(1, 2)}),
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

    @initialize(first=st.sampled_from([{}, {RULES: 1}, {RULES: 2}]))
    def begin(self, first: dict[str, int]) -> None:
        self.log: naive.Log = []
        self.first = first
        self.machine = Commitments()
        self.table = NodeTable()

    @rule(commitment=COMMITMENTS, precondition=PRECONDITIONS)
    def propose(self, commitment: dict[str, Any], precondition: dict[str, Any]) -> None:
        proposed = {"commitment": commitment, "precondition": precondition, **self.first}
        expected = naive.verdict(self.log, proposed)
        index, proposal = len(self.log) + 1, read_proposal(canonical.encode(proposed))
        # On a copy that is given up, on one that counts: the same.
        given_up = Commitments(overlaid(self.machine.state)).decide(index, proposal)
        ended = self.machine.state.active.get(commitment.get("index", 0))
        counted = overlaid(self.machine.state)
        rejection = Commitments(counted).decide(index, proposal)
        commit(counted)
        if rejection is None:
            self.table.take_proposal(proposal, ended)
        assert rejection == given_up
        assert (rejection.reason if rejection is not None else None) == expected
        if rejection is not None:
            assert rejection.reason in REASONS
            assert rejection.blocking_index is None or rejection.blocking_index in naive.active(self.log)
            if rejection.free is not None:
                assert precondition["kind"] == "NodeFreeOf" or rejection.reason == "over-capacity"
        self.log.append(("PROPOSE_REJECTED" if rejection else "PROPOSE_ACCEPTED", proposed))

    @rule(
        node=NODES, capacity=RESOURCES, overcommit=st.one_of(st.just({}), OVERCOMMIT.map(lambda of: {"overcommit": of}))
    )
    def set_capacity(self, node: str, capacity: dict[str, Any], overcommit: dict[str, Any]) -> None:
        said = {"node": node, "capacity": capacity, **overcommit, **self.first}
        counted = overlaid(self.machine.state)
        Commitments(counted).set_capacity(read_capacity(canonical.encode(said)))
        commit(counted)
        self.log.append(("CAPACITY_SET", said))
        self.table.take_capacity(len(self.log), read_capacity(canonical.encode(said)))

    @invariant()
    def same(self) -> None:
        live = naive.active(self.log)
        assert sorted(self.machine.state.active) == sorted(live)
        for node in ("n1", "n2"):
            known = self.machine.state.nodes.get(node)
            claimed = {} if known is None else {n: a for n, a in known.reserved.items() if n != "accelerators"}
            assert claimed == naive.reserved(self.log, node)

    @invariant()
    def nodes_are_listed_as_they_are(self) -> None:
        by = self.table.rules if self.log else 2
        table = self.table.copy()
        listed = {node.name: node for node in table.page(0, 10)}
        overbooked = {node.name for node in table.page(0, 10, overbooked=True)}
        assert table.overbooked_count == len(overbooked)
        for name in ("n1", "n2"):
            limits = naive.limits(self.log, name, by)
            assert (name in listed) == (limits is not None)
            if limits is None:
                continue
            node, reserved = listed[name].to_json(), naive.reserved(self.log, name)
            assert naive.flat(node["reserved"]) == reserved
            due = {each: amount - reserved.get(each, 0) for each, amount in limits.items()}
            assert naive.flat(node["free"]) == {each: amount for each, amount in due.items() if amount > 0}
            beyond = {each: amount - limits.get(each, 0) for each, amount in reserved.items()}
            assert naive.flat(node["excess"]) == {each: amount for each, amount in beyond.items() if amount > 0}
            assert node["overbooked"] == any(amount > 0 for amount in beyond.values()) == (name in overbooked)

    @invariant()
    def built_from_what_is_live_alone(self) -> None:
        again = Commitments()
        live = naive.active(self.log)
        newest = {said["node"]: index for index, (action, said) in enumerate(self.log, 1) if action == "CAPACITY_SET"}
        for index, (action, said) in enumerate(self.log, 1):
            if index in live or (action == "CAPACITY_SET" and newest[said["node"]] == index):
                again.fold(index, action, canonical.encode(said))
        # By which rules a tenant began may be known from an entry alone that holds no longer.
        assert again.state._replace(rules={}) == self.machine.state._replace(rules={})


TestJudged = Judged.TestCase
TestJudged.settings = hypothesis_settings(max_examples=EXAMPLES, stateful_step_count=40, deadline=None)


@given(
    st.fixed_dictionaries({"n1": st.tuples(RESOURCES, OVERCOMMIT), "n2": st.tuples(RESOURCES, OVERCOMMIT)}),
    st.lists(st.tuples(COMMITMENTS, PRECONDITIONS), max_size=30),
)
@hypothesis_settings(max_examples=EXAMPLES, deadline=None)
def test_no_more_is_reserved_than_capacity_times_overcommit_whatever_is_proposed(
    capacities: dict[str, tuple[dict[str, Any], dict[str, Any]]],
    proposals: list[tuple[dict[str, Any], dict[str, Any]]],
) -> None:
    machine, log = Commitments(), []
    for node, (capacity, overcommit) in capacities.items():
        log.append(("CAPACITY_SET", {"node": node, "capacity": capacity, "overcommit": overcommit, RULES: 2}))
        machine.set_capacity(read_capacity(canonical.encode(log[-1][1])))
    for index, (commitment, precondition) in enumerate(proposals, 3):
        machine.decide(
            index, read_proposal(canonical.encode({"commitment": commitment, "precondition": precondition, RULES: 2}))
        )
        for node, known in machine.state.nodes.items():
            limit = naive.limits(log, node, 2) or {}
            reserved = {name: amount for name, amount in known.reserved.items() if name != "accelerators"}
            assert all(amount <= limit.get(name, 0) for name, amount in reserved.items())


def placed(capsule: str, node: str = "n1", **amounts: Any) -> dict[str, Any]:
    return {"kind": "Placement", "capsule": capsule, "node": node, "reservation": amounts}


def decide(machine: Commitments, index: int, commitment: dict[str, Any], bet: dict[str, Any] | None = None) -> Any:
    said = {"commitment": commitment, "precondition": bet or {"kind": "None"}, RULES: 2}
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


def test_a_gang_fits_as_a_whole_or_not_at_all() -> None:
    machine = Commitments()
    machine.set_capacity(Capacity("n1", Resources(cpu_millis=5), rules=2))
    gang = {"kind": "GangPlacement", "gang": "g", "members": [
        {"capsule": name, "node": "n1", "reservation": {"cpu_millis": 3}} for name in "ab"]}  # fmt: skip
    rejection = decide(machine, 2, gang)
    assert (rejection.reason, rejection.free) == ("over-capacity", Resources(cpu_millis=5))
    assert rejection.detail == "node n1 has 5 of cpu_millis free, 6 is claimed"
    assert machine.state.active == {}


def test_an_overbooked_node_takes_no_claim_on_that_dimension_until_enough_is_revoked() -> None:
    machine = Commitments()
    machine.set_capacity(Capacity("n1", Resources(cpu_millis=4, memory_bytes=1), rules=2))
    assert decide(machine, 2, placed("a", cpu_millis=2)) is None
    assert decide(machine, 3, placed("b", cpu_millis=2)) is None
    machine.set_capacity(Capacity("n1", Resources(cpu_millis=3, memory_bytes=1), rules=2))
    rejection = decide(machine, 5, placed("c", cpu_millis=1))
    assert (rejection.reason, rejection.free, rejection.blocking_index) == ("over-capacity", Resources(), 3)
    assert decide(machine, 6, placed("c", memory_bytes=1)) is None, "each dimension is judged by itself"
    assert decide(machine, 7, {"kind": "Revocation", "index": 2}) is None
    assert decide(machine, 8, placed("a", cpu_millis=1)) is None


def test_a_limit_beyond_the_largest_integer_is_exact() -> None:
    machine, most = Commitments(), canonical.INTEGER_MAX
    said = {"node": "n1", "capacity": {"cpu_millis": most}, "overcommit": {"cpu_millis": "1.001"}, RULES: 2}
    machine.set_capacity(read_capacity(canonical.encode(said)))
    assert decide(machine, 2, placed("a", cpu_millis=most)) is None
    left = most // 1000
    rejection = decide(machine, 3, placed("b", cpu_millis=left + 1))
    assert rejection.free == Resources(cpu_millis=left)
    assert decide(machine, 4, placed("b", cpu_millis=left)) is None
    said["overcommit"] = {"cpu_millis": "999.999"}
    machine.set_capacity(read_capacity(canonical.encode(said)))
    gang = [{"capsule": f"g{n}", "node": "n1", "reservation": {"cpu_millis": most}} for n in range(999)]
    rejection = decide(machine, 6, {"kind": "GangPlacement", "gang": "g", "members": gang})
    assert rejection.free == Resources(cpu_millis=most), "no ledger writes a larger amount"


@pytest.mark.parametrize(
    "factor", ["0", "0.5", "1.", "1.0001", "1000", "01", "1e3", "-1", "+1", "1\n", " 1", 2, 1.5, None]
)
def test_a_factor_is_a_decimal_number_from_1_on_as_text(factor: object) -> None:
    said = {"node": "n1", "capacity": {}, "overcommit": {"accelerators": {"T4": factor}}}
    with pytest.raises(InvalidInputError, match="not the payload of a capacity"):
        read_capacity(canonical.encode(said))


def test_an_adjustment_of_an_older_epoch_is_rejected_with_the_epoch_in_force() -> None:
    machine = Commitments()
    adjusted = {"kind": "ModuleAdjustment", "mission": "m", "module": "web", "replicas": 1, "epoch": 5}
    assert decide(machine, 1, adjusted) is None
    rejection = decide(machine, 2, {**adjusted, "epoch": 4})
    assert (rejection.reason, rejection.epoch, rejection.blocking_index) == ("older-epoch", 5, 1)
    assert decide(machine, 3, {**adjusted, "replicas": 2}) is None, "that of the same epoch"
    assert decide(machine, 4, {**adjusted, "module": "db", "epoch": 1}) is None, "that of another module"


def test_rules_are_raised_by_an_entry_and_stay() -> None:
    machine = Commitments()
    machine.set_capacity(Capacity("n1", Resources(cpu_millis=1)))
    assert decide(machine, 2, placed("a", cpu_millis=2)) is None, "the tenant began by rules 1"
    assert decide(machine, 3, {"kind": "RulesVersion", "version": 1}).reason == "rules-in-force"
    assert decide(machine, 4, {"kind": "RulesVersion", "version": 2}) is None
    assert decide(machine, 5, placed("b", cpu_millis=1)).reason == "over-capacity"
    assert decide(machine, 6, {"kind": "Revocation", "index": 4}).reason == "not-revocable"


def test_rules_that_this_program_does_not_know_are_not_judged_by_others() -> None:
    machine = Commitments()
    later = {"node": "n1", "capacity": {}, RULES: 3}
    with pytest.raises(InvalidInputError, match="rules 3, and this program knows rules up to 2"):
        machine.fold(1, "CAPACITY_SET", canonical.encode(later))
    assert not any(machine.state)
    machine.set_capacity(Capacity("n1", Resources(), rules=2))
    machine.fold(2, "CAPACITY_SET", canonical.encode(later))
    assert machine.state.rules == {RULES: 2}, "only that of the first entry counts"


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
    machine.set_capacity(Capacity("n1", Resources(cpu_millis=20_000), rules=2))
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
