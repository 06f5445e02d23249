"""The checker of linearizability, shown histories that an order explains, and one of each kind that none does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.crash.linearizability import violations
from tests.crash.operations import Operation, Recorder, load

Times = tuple[float, float]


def wrote(at: Times, hlc: str | None = "h1", *, replayed: bool = False, level: str = "GLOBAL") -> Operation:
    output = None if hlc is None else {"hlc": hlc, "job_id": f"job of {hlc}", "replayed": replayed}
    return _operation("write", "key:acme/k", at, {"durability": level}, output)


def adjusted(at: Times, expected: int, epoch: int, output: dict[str, Any] | None) -> Operation:
    return _operation("adjust", "module:acme/m", at, {"expected": expected, "epoch": epoch}, output)


def _operation(op: Any, about: str, at: Times, given: dict[str, Any], output: dict[str, Any] | None) -> Operation:
    return Operation(op=op, object=about, client="c", invoked_s=at[0], completed_s=at[1], input=given, output=output)


TAKEN = {"accepted": True}


def rejected(epoch: int) -> dict[str, Any]:
    return {"accepted": False, "epoch": epoch}


SOUND = [
    [wrote((1, 2)), wrote((3, 4), replayed=True), wrote((3, 4), replayed=True)],
    [wrote((1, 4), replayed=True), wrote((2, 3))],
    [wrote((1, 2), None), wrote((3, 4), "h1", replayed=True)],
    [wrote((1, 2), None), wrote((3, 4), "h1")],
    [wrote((1, 2), level="LOCAL"), wrote((3, 4), "h2", level="LOCAL")],
    [adjusted((1, 2), 0, 1, TAKEN), adjusted((3, 4), 0, 2, rejected(1)), adjusted((5, 6), 1, 3, TAKEN)],
    [adjusted((1, 4), 0, 1, rejected(2)), adjusted((2, 3), 0, 2, TAKEN)],
    [adjusted((1, 2), 0, 1, None), adjusted((3, 4), 1, 2, TAKEN)],
    [adjusted((1, 2), 0, 1, None), adjusted((3, 4), 0, 2, TAKEN), adjusted((5, 6), 2, 3, TAKEN)],
    [adjusted((1, 2), 0, 1, None), adjusted((3, 4), 0, 2, rejected(1))],
]
BROKEN = [
    [wrote((1, 2)), wrote((3, 4))],
    [wrote((1, 2)), wrote((3, 4), "h2", replayed=True)],
    [wrote((1, 2), replayed=True), wrote((3, 4))],
    [adjusted((1, 2), 0, 1, TAKEN), adjusted((3, 4), 0, 2, TAKEN)],
    [adjusted((1, 4), 0, 1, TAKEN), adjusted((2, 3), 0, 2, TAKEN)],
    [adjusted((1, 2), 0, 1, TAKEN), adjusted((3, 4), 0, 2, rejected(0))],
    [adjusted((1, 2), 0, 1, rejected(2)), adjusted((3, 4), 0, 2, TAKEN)],
    [adjusted((1, 2), 0, 1, TAKEN), adjusted((3, 4), 1, 2, None), adjusted((5, 6), 1, 3, rejected(9))],
]


@pytest.mark.parametrize("operations", SOUND)
def test_what_an_order_explains_is_linearizable(operations: list[Operation]) -> None:
    assert violations(operations) == []


@pytest.mark.parametrize("operations", BROKEN)
def test_each_history_that_no_order_explains_is_found(operations: list[Operation]) -> None:
    assert violations(operations) == [operations[0].object]


@st.composite
def histories(draw: st.DrawFn) -> list[Operation]:
    """Adjustments that took effect one after the other, each within its own times; some lost their answers."""
    epoch, operations = 0, []
    for number in range(1, draw(st.integers(2, 12)) + 1):
        before_s, after_s = draw(st.floats(0, 3)), draw(st.floats(0, 3))
        expected = draw(st.sampled_from((epoch, epoch, number - 1)))
        output = TAKEN if expected == epoch else rejected(epoch)
        epoch = number if expected == epoch else epoch
        is_lost = draw(st.integers(0, 4)) == 0
        times = number - before_s, number + after_s
        operations.append(adjusted(times, expected, number, None if is_lost else output))
    return operations


@given(histories())
def test_whatever_happened_in_an_order_is_linearizable(operations: list[Operation]) -> None:
    assert violations(operations) == []


@given(histories(), st.data())
def test_an_update_that_is_lost_is_found(operations: list[Operation], data: st.DataObject) -> None:
    """Two adjustments that expect the same are both accepted."""
    accepted = [each for each in operations if each.output == TAKEN]
    if accepted:
        again = data.draw(st.sampled_from(accepted))
        twin = adjusted((99.0, 100.0), again.input["expected"], 99, TAKEN)
        assert violations([*operations, twin]) == ["module:acme/m"]


def test_a_recorded_history_is_read_as_it_was_written(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "operations.jsonl")
    for operation in (*SOUND[0], *SOUND[5]):
        recorder.note(operation)
    recorder.close()
    assert load(recorder.path) == [*SOUND[0], *SOUND[5]]
