"""Two schedulers that race for the nodes of a trace, on the commitment machine itself."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from pathlib import Path

import msgspec
import pytest

from lab.openb_commitments import Step, capacities, steps
from lab.racing import Proposed, Race, RaceSummary, Verdict
from ledger import canonical
from ledger.errors import InvalidInputError
from ledger.machines.commitments import Commitments
from ledger.machines.promises import Capacity, Resources, read_proposal

NODES = {"n1": Resources(cpu_millis=10), "n2": Resources(cpu_millis=10)}
HEADER = (
    "name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec,qos,pod_phase,creation_time,deletion_time,scheduled_time\n"
)


def raced(happened: Sequence[Step]) -> tuple[RaceSummary, Commitments]:
    machine, seqs = Commitments(), count(1)
    for node, has in NODES.items():
        machine.set_capacity(Capacity(node, has))

    def propose(window: Sequence[Proposed]) -> list[Verdict]:
        verdicts = []
        for each in window:
            seq = next(seqs)
            rejection = machine.decide(seq, read_proposal(canonical.encode(each.body)))
            free = None if rejection is None or rejection.free is None else msgspec.to_builtins(rejection.free)
            verdicts.append(Verdict(seq) if rejection is None else Verdict(None, rejection.reason, free))
        return verdicts

    race = Race("acme", NODES, propose)
    race.run(happened, lambda _: None)
    return race.summary, machine


def test_schedulers_that_meet_on_a_node_try_again_until_all_that_fit_are_placed() -> None:
    placed = [Step(0, line, f"p{line}", Resources(cpu_millis=4)) for line in range(2, 7)]
    summary, machine = raced(placed)
    assert (summary.placed, summary.unplaced, len(machine.state.active)) == (4, 1, 4)
    assert summary.conflicts == summary.reasons["node-not-free"] > 0
    assert sum(summary.attempts.values()) == summary.placed
    gone = [Step(1, step.line, step.pod, None) for step in placed]
    summary, machine = raced([*placed, *gone])
    # The one that lost finds room once others are gone.
    assert (summary.placed, summary.revoked, summary.unplaced) == (5, 5, 0)
    assert (len(machine.state.active), summary.live_max) == (0, 4)


def test_a_trace_is_placed_when_it_was_scheduled_and_gone_when_it_was_deleted(tmp_path: Path) -> None:
    pods = tmp_path / "pods.csv"
    pods.write_text(HEADER + "a,6000,2,1,500,,LS,Running,1,9,3\nb,1,1,0,,,LS,Pending,1,5,\n")
    asks = Resources(cpu_millis=6000, memory_bytes=2 << 20, accelerators={"gpu_milli": 500})
    assert steps(pods) == [Step(3, 2, "a", asks), Step(9, 2, "a", None)]
    nodes = tmp_path / "nodes.csv"
    nodes.write_text("sn,cpu_milli,memory_mib,gpu,model\nn1,96000,1,2,V100\nn2,1,1,,\n")
    assert capacities(nodes) == {
        "n1": Resources(cpu_millis=96000, memory_bytes=1 << 20, accelerators={"gpu_milli": 2000}),
        "n2": Resources(cpu_millis=1, memory_bytes=1 << 20),
    }


@pytest.mark.parametrize("row", ["a,x,2,1,500,,LS,Running,1,9,3\n", "a,6000,2,1,x,,LS,Running,1,9,3\n"])
def test_a_number_that_is_none_is_named_with_its_line(tmp_path: Path, row: str) -> None:
    pods = tmp_path / "pods.csv"
    pods.write_text(HEADER + row)
    with pytest.raises(InvalidInputError, match="line 2: 'x'"):
        steps(pods)
