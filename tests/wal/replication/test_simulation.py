"""The protocol under everything that may go wrong at once: ``simulation`` has the world, the seeds are here."""

from __future__ import annotations

import os

import pytest

from tests.wal.replication.simulation.mutants import DAMAGE
from tests.wal.replication.simulation.scenario import Scenario

SEEDS = (*range(12), 18, 28, 35, 62, 118, 156, 222)
"""Of `make test`, among them some that find a rule taken out; `make torture` runs ``SEEDS_A_ROUND`` more for each of
its rounds."""
FIRST_MORE = 12
SEEDS_A_ROUND = 50
DAMAGED_SEEDS = range(3)
"""The same of worlds in which frames arrive damaged."""
ROUNDS = int(os.environ.get("TORTURE_ROUNDS") or 0)


def run(seed: int, damage: float = 0.0) -> None:
    scenario = Scenario(seed, damage)
    try:
        scenario.run()
    except BaseException:
        print(f"SEED={seed}", *scenario.world.trace, sep="\n")
        raise


@pytest.mark.torture
def test_nothing_that_was_committed_is_lost() -> None:
    if given := os.environ.get("SEED"):
        run(int(given))
        return
    for seed in (*SEEDS, *range(FIRST_MORE, FIRST_MORE + SEEDS_A_ROUND * ROUNDS)):
        run(seed)


@pytest.mark.torture
def test_frames_that_arrive_damaged_lose_nothing_and_are_sent_again() -> None:
    for seed in (*DAMAGED_SEEDS, *range(len(DAMAGED_SEEDS), len(DAMAGED_SEEDS) + ROUNDS)):
        run(seed, DAMAGE)
