"""What a row is, and how two sides of one are run in turn.

ratio >= floor     the row holds; more is always better
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from benchmarks.bench import Bench

RUNS = 5
"""Runs of each side."""
RUNS_OF_LIKE = 3
"""The same where runs are alike: of a row on memory they differ by tenths of a MiB, and what takes a quarter of a
minute evens out in itself what the machine does from second to second. Five of each would take all rows more than 20
minutes."""


class BenchmarkError(Exception):
    """A run that did not do what it was to measure: its figure would mean nothing."""


class Outcome(NamedTuple):
    """What a row found. ``note`` says what else was seen, in one line."""

    ours: float
    against: float
    ratio: float
    runs: int
    note: str = ""


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table: its name, unit and floor, what is compared, and how."""

    name: str
    unit: str
    floor: float
    what: str
    measure: Callable[[Bench], Outcome]


def expect(holds: bool, otherwise: str) -> None:
    """Fail the row unless ``holds``.

    Raises:
        BenchmarkError: with the text ``otherwise``.
    """
    if not holds:
        raise BenchmarkError(otherwise)


class Rates(NamedTuple):
    """Rates of the runs of both sides; more is better."""

    ours: Sequence[float]
    against: Sequence[float]

    def outcome(self, note: str = "") -> Outcome:
        """Medians and their ratio, with the spread in the note."""
        ours, against = statistics.median(self.ours), statistics.median(self.against)
        spread = f"ours {_spread(self.ours)}, against {_spread(self.against)}"
        return Outcome(ours, against, ours / against, len(self.ours), f"{note}; {spread}" if note else spread)


def interleave(bench: Bench, ours: Callable[[], float], against: Callable[[], float], runs: int = RUNS) -> Rates:
    """Run both sides in turn, ``runs`` times each; both give a rate."""
    pairs: list[tuple[float, float]] = []
    for run in range(1, runs + 1):
        pair = ours(), against()
        pairs.append(pair)
        bench.say(f"run {run}: ours {pair[0]:,.1f}, against {pair[1]:,.1f}, ratio {pair[0] / pair[1]:.3f}")
    return Rates([rate for rate, _ in pairs], [rate for _, rate in pairs])


def _spread(rates: Sequence[float]) -> str:
    return f"{min(rates):,.0f} to {max(rates):,.0f}"
