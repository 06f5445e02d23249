"""The protocol under everything that may go wrong at once: ``simulation`` has the world, the seeds are here."""

from __future__ import annotations

import os

import pytest

from tests.wal.replication.simulation.scenario import Scenario

SEEDS = 200
"""Of `make test`; `make torture` runs ``SEEDS_A_ROUND`` for each round that it asks for."""
SEEDS_A_ROUND = 50


def run(seed: int) -> None:
    scenario = Scenario(seed)
    try:
        scenario.run()
    except BaseException:
        print(f"SEED={seed}", *scenario.world.trace, sep="\n")
        raise


@pytest.mark.parametrize("first", range(0, SEEDS, 50))
def test_nothing_that_was_committed_is_lost(first: int) -> None:
    for seed in range(first, first + 50):
        run(seed)


@pytest.mark.torture
def test_nothing_that_was_committed_is_lost_in_many_worlds() -> None:
    if given := os.environ.get("SEED"):
        run(int(given))
        return
    for seed in range(SEEDS, SEEDS + SEEDS_A_ROUND * int(os.environ.get("TORTURE_ROUNDS") or 1)):
        run(seed)
