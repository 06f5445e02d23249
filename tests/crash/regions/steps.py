"""What happens to three ledgers, drawn from a seed: writes, links that break, deaths, returns and clocks that jump.

The steps depend on the seed alone, not on any answer, so that a seed is replayed step by step. A step that needs a
running ledger, or a link between two, is drawn only where the steps before left one.
"""

from __future__ import annotations

import random
from typing import Any, Final, Literal, NamedTuple

from tests.crash.regions.ledgers import REGIONS

STEPS: Final = 30
CHOSEN_JOBS: Final = ("nightly-0", "nightly-1")
"""Ids that callers of every region use."""
MADE_JOBS_MAX: Final = 3
"""Of the jobs whose id a ledger makes, events are about the last ones."""
DCS: Final = ("a", "b")
TYPES: Final = {
    "JobCreated": 6,
    "JobAccepted": 3,
    "JobProgressReported": 3,
    "JobCancellationRequested": 3,
    "JobCancellationAcked": 2,
    "JobCompleted": 2,
    "JobFailed": 1,
}
LEVELS: Final = {"LOCAL": 4, "REGIONAL": 3, "GLOBAL": 4}
"""Ascending."""
KINDS: Final = {"write": 30, "wait": 6, "link": 8, "power": 4, "jump": 3}
HOUR_S: Final = 3600.0
NEAR_S: Final = (-2.0, 0.0, 2.0)
"""Clocks so near to each other that each ledger imports what the others write."""
JUMPS_S: Final = (*NEAR_S, *NEAR_S, -HOUR_S, HOUR_S)

Way = tuple[str, str]
"""The region that asks, and the one that is asked."""


class Write(NamedTuple):
    """An event that a caller sends; ``job`` is an id, or ``made-N``: the job whose id was made for step N."""

    region: str
    type: str
    job: str
    level: str
    fields: dict[str, Any]
    is_keyed: bool


class Wait(NamedTuple):
    """Until the ledger ``to`` has all that the ledger ``of`` has."""

    to: str
    of: str


class SetLinks(NamedTuple):
    """The links of these ways break, or move nothing any more, or are whole again."""

    ways: tuple[Way, ...]
    state: Literal["cut", "stalled", "whole"]


class Kill(NamedTuple):
    """SIGKILL."""

    region: str


class Start(NamedTuple):
    """The ledger returns, with its disk."""

    region: str
    ahead_s: float


class Jump(NamedTuple):
    """The wall clock of a ledger is set."""

    region: str
    ahead_s: float


Step = Write | Wait | SetLinks | Kill | Start | Jump


def drawn_steps(seed: int, count: int = STEPS) -> list[Step]:
    """The steps of a seed."""
    drawing = _Drawing(random.Random(seed))
    return [drawing.step(number) for number in range(1, count + 1)]


class _Drawing:
    """The state of ledgers, links and clocks that the steps so far lead to."""

    def __init__(self, dice: random.Random) -> None:
        self._dice = dice
        self._down: set[str] = set()
        self._broken: set[Way] = set()
        self._ahead_s = dict.fromkeys(REGIONS, 0.0)
        self._made: list[str] = []

    def step(self, number: int) -> Step:
        match self._of(KINDS):
            case "wait":
                return self._wait() or self._write(number)
            case "link":
                return self._link()
            case "power":
                return self._power()
            case "jump":
                region = self._dice.choice(self._up())
                return self._jump(region, self._dice.choice(JUMPS_S))
            case _:
                return self._write(number)

    def _of(self, weights: dict[str, int]) -> str:
        return self._dice.choices([*weights], [*weights.values()])[0]

    def _up(self) -> list[str]:
        return [region for region in REGIONS if region not in self._down]

    def _wait(self) -> Step | None:
        ways = [
            (to, of)
            for to in self._up()
            for of in self._up()
            if to != of and (to, of) not in self._broken and {self._ahead_s[to], self._ahead_s[of]} <= {*NEAR_S}
        ]
        return Wait(*self._dice.choice(ways)) if ways else None

    def _link(self) -> Step:
        one, other = self._dice.sample(REGIONS, 2)
        ways = self._dice.choice((((one, other), (other, one)), ((one, other), (other, one)), ((one, other),)))
        if self._broken & {*ways}:
            self._broken -= {*ways}
            return SetLinks(ways, "whole")
        self._broken |= {*ways}
        return SetLinks(ways, self._dice.choice(("cut", "stalled")))

    def _power(self) -> Step:
        if self._down:
            region = self._down.pop()
            self._ahead_s[region] = self._dice.choice(NEAR_S)
            return Start(region, self._ahead_s[region])
        region = self._dice.choice(REGIONS)
        self._down.add(region)
        return Kill(region)

    def _jump(self, region: str, ahead_s: float) -> Step:
        self._ahead_s[region] = ahead_s
        return Jump(region, ahead_s)

    def _write(self, number: int) -> Write:
        region, name, level = self._dice.choice(self._up()), self._of(TYPES), self._of(LEVELS)
        jobs = [*CHOSEN_JOBS, *self._made[-MADE_JOBS_MAX:]]
        if name == "JobCreated" and self._dice.random() < 0.5:
            self._made.append(job := f"made-{number}")
        else:
            job = self._dice.choice(jobs if name != "JobCreated" else CHOSEN_JOBS)
        fields = _fields(name, number, self._dice.choice(DCS))
        if (fence := self._dice.choice((None, None, 1, 2, 3))) is not None:
            fields["fence_token"] = fence
        return Write(region, name, job, level, fields, self._dice.random() < 0.3)


def _fields(name: str, number: int, dc_id: str) -> dict[str, Any]:
    """The fields of an event, with its number where ``number_of`` finds it."""
    match name:
        case "JobCreated":
            return {"spec": {"n": number}, "assigned_dcs": [*DCS]}
        case "JobAccepted":
            return {"dc_id": dc_id, "worker_count": number}
        case "JobProgressReported":
            return {"dc_id": dc_id, "completed": number, "failed": 0}
        case "JobCancellationRequested":
            return {"reason": str(number), "requestor": "night shift"}
        case "JobCancellationAcked":
            return {"dc_id": dc_id, "workflows_cancelled": number}
        case "JobCompleted":
            return {"final_status": "ok", "aggregate_metrics": {"n": number}}
        case _:
            return {"error": str(number)}
