"""Two services compared under load: both are up, and loaded in turn (``benchmarks.load``), in some such runs.

What the machine gives from second to second so meets both; runs of four seconds each, one behind the other, differed by
a third (decision 0066).
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

from benchmarks.apart import apart
from benchmarks.bench import Bench
from benchmarks.load import Load, Side, drive_in_turn
from benchmarks.row import RUNS_OF_LIKE, Outcome, Rates


class Compared(NamedTuple):
    """One side of a comparison, which is up."""

    name: str
    side: Side
    check: Callable[[Load], str] = lambda _: ""
    """Whether all that was answered is there; says what else it found.

    Raises:
        BenchmarkError: it is not.
    """
    taken_s: Callable[[], float] = lambda: 0.0
    """Processor time that its processes took so far."""


@dataclass(slots=True)
class InTurn:
    """What the runs saw, ours and what it was compared with."""

    loads: list[tuple[Load, Load]] = field(default_factory=list)
    taken_s: list[tuple[float, float]] = field(default_factory=list)
    """Processor time of both sides' processes meanwhile."""

    def outcome(self) -> Outcome:
        """Medians of the rates, and that of the ratios of the runs: both sides of a run had the same seconds."""
        rates = Rates([ours.rate for ours, _ in self.loads], [against.rate for _, against in self.loads])
        ratio = statistics.median(ours.rate / against.rate for ours, against in self.loads)
        ours, against = self.loads[-1]
        outcome = rates.outcome(
            f"last run: p50 {ours.p50_ms:.1f} ms against {against.p50_ms:.1f} ms, p99 {ours.p99_ms:.1f} against "
            f"{against.p99_ms:.1f} ms, client at {ours.client_cpu:.0%} and {against.client_cpu:.0%} of a core"
        )
        return outcome._replace(ratio=ratio)

    def outcome_by_processor_time(self) -> Outcome:
        """As ``outcome``, of requests for each second of processor time that the side's processes took."""
        rates = [
            (ours.answered / ours_s, against.answered / against_s)
            for (ours, against), (ours_s, against_s) in zip(self.loads, self.taken_s, strict=True)
        ]
        by_clock = statistics.median(ours.rate / against.rate for ours, against in self.loads)
        outcome = Rates([ours for ours, _ in rates], [against for _, against in rates]).outcome(
            f"requests for each second of processor time; ratio by the clock {by_clock:.2f}"
        )
        return outcome._replace(ratio=statistics.median(ours / against for ours, against in rates))


Starting = Callable[[], AbstractContextManager[Compared]]


@contextmanager
def both_up(bench: Bench, *starting: Starting) -> Iterator[list[Compared]]:
    """All sides, started side by side, each on a core of its own where there are two."""
    bench.start_postgres()  # before two would at once
    with ExitStack() as stack:
        with ThreadPoolExecutor(len(starting)) as pool:
            up = list(pool.map(lambda start: stack.enter_context(start()), starting))
        yield up


def compare(bench: Bench, ours: Starting, against: Starting, runs: int = RUNS_OF_LIKE) -> InTurn:
    """Run both sides ``runs`` times, each run with fresh ones."""
    found = InTurn()
    for run in range(1, runs + 1):
        with both_up(bench, ours, against) as (mine, other):
            before_s = mine.taken_s(), other.taken_s()
            mine_load, other_load = apart(drive_in_turn, (mine.side, other.side))
            found.taken_s.append((mine.taken_s() - before_s[0], other.taken_s() - before_s[1]))
            for compared, load in ((mine, mine_load), (other, other_load)):
                says = compared.check(load)
                bench.say(f"{compared.name}: {load}{says and '; '}{says}")
        found.loads.append((mine_load, other_load))
        bench.say(f"run {run}: ratio {mine_load.rate / other_load.rate:.3f}")
    return found
