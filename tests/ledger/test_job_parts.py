"""Partial states of jobs: merged in chain order they are the fold, and they can be sent whatever is in them."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ledger.machines import jobs
from ledger.machines.job_fold import creation_of
from ledger.machines.jobs import JobParts
from ledger.verification import ENTRY_COLUMNS
from ledger.verification.projection_check import stored_form
from tests.ledger.ledger_in_memory import build

LEDGER = build(40)
COLUMNS = [[row[name] for row in LEDGER.entries] for name in ENTRY_COLUMNS]


@given(st.lists(st.integers(1, 40), max_size=4))
def test_parts_of_any_size_merge_to_the_stored_states(cuts: list[int]) -> None:
    parts: dict[str, list[jobs.JobState]] = {}
    cuts = sorted({0, 40, *cuts})
    for begin, end in pairwise(cuts):
        folding = JobParts()
        folding.add([column[begin:end] for column in COLUMNS])
        for state in folding.take():
            parts.setdefault(state.job_id, []).append(jobs.decode_state(jobs.encode_state(state)))
        assert len(folding) == 0
    merged = [jobs.merge_states(parts[job_id]) for job_id in sorted(parts)]
    assert [stored_form(state)._asdict() for state in merged if state] == LEDGER.jobs


def test_of_no_parts_there_is_no_state() -> None:
    assert jobs.merge_states([]) is None


@pytest.mark.parametrize("depth", [70, 900])
def test_a_creation_nested_too_deep_to_be_compared_is_so_after_it_was_sent(depth: int) -> None:
    payload = f'{{"spec":{"[" * depth}{"]" * depth}}}'
    folding = JobParts()
    entry = {**LEDGER.entry(1), "payload": payload}
    folding.add([[entry[name]] for name in ENTRY_COLUMNS])
    (state,) = folding.take()
    for each in (state, jobs.decode_state(jobs.encode_state(state))):
        assert each.created is not None
        assert creation_of(each.created.spec, each.created.assigned_dcs) is None
        assert jobs.seqs_of(each) == [1]
