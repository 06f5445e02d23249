"""What a row of single requests is told by: its runs, in each of which both sides had the same seconds."""

from __future__ import annotations

from benchmarks.in_turn import InTurn
from benchmarks.load import Load


def load(rate: float) -> Load:
    return Load(answered=1, rate=rate, p50_ms=1, p99_ms=2, answer_bytes=100, client_cpu=0.1)


def test_a_machine_that_becomes_slower_from_run_to_run_does_not_change_the_ratio() -> None:
    # As seen: a run that was slow for both is compared with itself, not with one that was fast.
    rates = [(4381, 5173), (4252, 4551), (4672, 4879), (3658, 3447), (3081, 3032)]
    found = InTurn([(load(ours), load(against)) for ours, against in rates]).outcome()
    assert (found.ours, found.against, round(found.ratio, 3), found.runs) == (4252, 4551, 0.958, 5)
