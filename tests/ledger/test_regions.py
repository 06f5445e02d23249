"""Any region takes any fact: whatever happens to three ledgers, they come to one state of every job."""

from __future__ import annotations

import os
import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import reduce
from itertools import pairwise
from typing import Any

import pytest

from ledger.machines import jobs
from ledger.machines.jobs import JobFold, JobParts, JobState, Said
from ledger.verification import ENTRY_COLUMNS
from tests.ledger.job_facts import event_fact, merge
from tests.ledger.regions import REGIONS, Region, World, lived

ROUNDS = 30
"""Histories in ``make test``; ``make torture`` draws more of them, or the one of ``SEED``."""
SEEDS = [int(os.environ["SEED"])] if os.environ.get("SEED") else range(int(os.environ.get("TORTURE_ROUNDS") or ROUNDS))
STEPS = 150

pytestmark = pytest.mark.torture


@pytest.fixture(scope="module", params=SEEDS)
def even(request: pytest.FixtureRequest) -> World:
    """Three ledgers that have imported all of each other's entries, after partitions, deaths and returns."""
    world = lived(request.param, STEPS)
    world.heal()
    world.answer()
    return world


def shown(state: JobState) -> dict[str, Any]:
    """Everything that is shown of a job, without its place in one chain."""
    creations = [(entry["hlc"], entry["counts"]) for each in jobs.conflicts(state) for entry in each["entries"]]
    return {**jobs.view(state), "last_seq": None, "conflicts": creations}


def facts_of(region: Region) -> dict[str, dict[tuple[Any, str], Said]]:
    """By job, each fact of the chain once, by HLC and digest."""
    found: defaultdict[str, dict[tuple[Any, str], Said]] = defaultdict(dict)
    for job_id in region.folds:
        for row in region.rows(job_id):
            if (said := jobs.said_of_row(*row)) is not None:
                found[job_id][said[2], said[3]] = said
    return found


def test_every_ledger_shows_the_same_jobs(even: World) -> None:
    use1, eu1, ap1 = ({job: shown(state) for job, state in each.states().items()} for each in even.regions.values())
    assert use1 == eu1 == ap1


def test_no_fact_that_was_answered_at_global_is_lost(even: World) -> None:
    assert len(even.answered) > 5
    for region in even.regions.values():
        assert [event for event in even.answered if not region.holds(event)] == []


def test_the_facts_in_any_order_and_grouping_give_the_state_of_each_ledger(even: World) -> None:
    dice, (first, *others) = random.Random(1), even.regions.values()
    facts = facts_of(first)
    assert all(facts_of(each).keys() == facts.keys() for each in others)
    for job_id, of_job in facts.items():
        assert all(facts_of(each)[job_id].keys() == of_job.keys() for each in others)
        states = [event_fact(*said, job_id, 0) for said in [*of_job.values(), *of_job.values()]]
        dice.shuffle(states)
        half = len(states) // 3
        merged = merge(reduce(merge, states[half:]), reduce(merge, states[: half + 1]))
        assert shown(merged) == shown(first.states()[job_id])


def test_a_cancellation_anywhere_wins(even: World) -> None:
    for region in even.regions.values():
        for job_id, facts in facts_of(region).items():
            actions = {said[0] for said in facts.values()}
            found = jobs.status(region.states()[job_id])
            if "CANCEL" in actions:
                assert found in ("CANCELLED", "CANCELLING")
                assert found == "CANCELLED" or not actions & {"COMPLETE", "FAIL", "TIMEOUT"}
            else:
                assert found not in ("CANCELLED", "CANCELLING")


def test_the_ledgers_agree_on_every_job_as_of_any_time(even: World) -> None:
    hlcs = sorted({entry.hlc for region in even.regions.values() for entry in region.chain})
    for until in hlcs[:: max(1, len(hlcs) // 4)]:
        use1, eu1, ap1 = (as_of(facts_of(each), until) for each in even.regions.values())
        assert use1 == eu1 == ap1


def as_of(facts: Mapping[str, Mapping[tuple[Any, str], Said]], until: Sequence[Any]) -> dict[str, Any]:
    """What each job was by the facts up to this HLC."""
    found = {}
    for job_id, of_job in facts.items():
        fold = JobFold(job_id)
        for said in of_job.values():
            if tuple(said[2]) <= tuple(until):
                fold.add(*said, 0)
        found[job_id] = None if fold.is_empty else shown(fold.state())
    return found


def test_the_entries_that_the_job_table_keeps_and_parts_of_the_chain_show_the_same(even: World) -> None:
    for region in even.regions.values():
        cuts = [0, len(region.chain) // 3, len(region.chain) // 2, len(region.chain)]
        parts = [parts_of(region, *cut) for cut in pairwise(cuts)]
        for job_id, state in region.states().items():
            kept = set(jobs.seqs_of(state))
            from_table = jobs.folded(job_id, None, [row for row in region.rows(job_id) if row[1] in kept])
            assert from_table is not None
            assert jobs.view(from_table) == jobs.view(state)
            merged = jobs.merge_states([part[job_id] for part in parts if job_id in part])
            assert merged == state


def parts_of(region: Region, begin: int, end: int) -> dict[str, JobState]:
    """By job, the state by a part of the chain, as a task folds it and sends it."""
    names = ("job_id", "seq", "hlc_physical", "hlc_logical", "hlc_node", "action", "payload_digest", "payload")
    rows = sorted((row for job_id in region.folds for row in region.rows(job_id)), key=lambda row: row[1])
    taken = [dict(zip(names, row, strict=True)) for row in rows if begin < row[1] <= end]
    folding = JobParts()
    folding.add([[row.get(name) for row in taken] for name in ENTRY_COLUMNS])
    states = [jobs.decode_state(jobs.encode_state(state)) for state in folding.take()]
    return {state.job_id: state for state in states}


def test_the_histories_meet_what_the_properties_are_about() -> None:
    """Conflicts of one HLC, ends in several regions, cancellations before the creation, ledgers that were lost."""
    conflicts = early = ends = lost = 0
    for seed in range(ROUNDS):
        world = lived(seed, STEPS)
        world.heal()
        region = world.regions["use1"]
        conflicts += sum(entry.action == "CONFLICT" for entry in region.chain)
        lost += world.lives - len(REGIONS)
        for facts in facts_of(region).values():
            actions = [said[0] for said in sorted(facts.values(), key=lambda said: said[2])]
            ends += len({"COMPLETE", "FAIL", "TIMEOUT"} & {*actions}) > 1
            early += "ENQUEUE" in actions and "CANCEL" in actions[: actions.index("ENQUEUE")]
    assert min(conflicts, early, ends, lost) > 2
