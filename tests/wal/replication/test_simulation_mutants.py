"""Each rule of the protocol, taken out: the simulation finds it, or it proves nothing."""

from __future__ import annotations

import pytest

from tests.wal.replication.simulation import mutants
from tests.wal.replication.simulation.mutants import MUTANTS, Mutant
from tests.wal.replication.simulation.scenario import Scenario

OTHER_SEEDS = range(300)
"""Tried where none of the seeds beside a mutant finds it any more: then write one there that does."""


def finds(seed: int, damage: float = 0.0) -> bool:
    try:
        Scenario(seed, damage).run()
    except (AssertionError, KeyError):
        return True
    return False


@pytest.mark.parametrize("name", MUTANTS)
def test_a_rule_that_is_taken_out_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant: Mutant = MUTANTS[name]
    mutants.take_out(monkeypatch, mutant)
    assert any(finds(seed, mutant.damage) for seed in (*mutant.seeds, *OTHER_SEEDS))


def test_a_wiped_member_that_votes_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    mutants.let_the_wiped_vote(monkeypatch)
    assert any(map(finds, (*mutants.WIPED_VOTES_SEEDS, *OTHER_SEEDS)))
