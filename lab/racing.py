"""Two schedulers that place the pods of a trace, each by its own view of the cluster, which is an old one.

They take turns with the pods, choose the fullest node that has room as far as they know, and propose in windows, all
proposals of a window at once. Each sees its own verdicts behind every window, those of the other only now and then; so
they meet on nodes, one wins, and the other tries again with what the conflict told it. What they decide follows from
the trace and the verdicts alone: who runs it again gets the first verdicts again, and adds nothing.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from lab.openb_commitments import Step
from ledger.decoding import convert
from ledger.machines.promises import NO_BET, Resources

WINDOW = 64
"""Proposals that are under way at once."""
STALE_WINDOWS = 4
"""After so many windows each scheduler learns what the other did."""
ATTEMPTS_MAX = 12
SCHEDULERS = 2


class Proposed(NamedTuple):
    """One proposal of a window."""

    step: Step
    attempt: int
    node: str
    body: dict[str, Any]


class Verdict(NamedTuple):
    """What came of it: the index of what was accepted, else why it was not and what the node has free."""

    seq: int | None
    reason: str | None = None
    free: Mapping[str, Any] | None = None


Propose = Callable[[Sequence[Proposed]], Sequence[Verdict]]


class RaceSummary(msgspec.Struct):
    """What the schedulers did."""

    placed: int = 0
    revoked: int = 0
    conflicts: int = 0
    unplaced: int = 0
    """Pods that no node had room for, or that lost too often."""
    attempts: Counter[str] = msgspec.field(default_factory=Counter)
    """Placed pods, by how often they were proposed."""
    reasons: Counter[str] = msgspec.field(default_factory=Counter)
    live_max: int = 0
    """Most placements at one time."""


class _View:
    """What a scheduler believes each node has free."""

    def __init__(self, capacities: Mapping[str, Resources]) -> None:
        self.free = {node: dict(has.amounts()) for node, has in capacities.items()}

    def copy_of(self, other: _View) -> None:
        self.free = {node: dict(free) for node, free in other.free.items()}

    def change(self, node: str, asks: Resources, sign: int) -> None:
        free = self.free[node]
        for name, amount in asks.amounts():
            free[name] = free.get(name, 0) + sign * amount

    def fullest(self, asks: Resources) -> str | None:
        """The node with the least left of the dimension that is asked for last, of those with room for all."""
        wanted = list(asks.amounts())
        if not wanted:
            return next(iter(self.free), None)
        scarce = wanted[-1][0]
        fitting = (
            (free.get(scarce, 0), node)
            for node, free in self.free.items()
            if all(free.get(name, 0) >= amount for name, amount in wanted)
        )
        return min(fitting, default=(0, None))[1]


class Race:
    """The run of one trace."""

    def __init__(self, tenant_id: str, capacities: Mapping[str, Resources], propose: Propose) -> None:
        self._tenant_id = tenant_id
        self._propose = propose
        self._truth = _View(capacities)
        self._views = [_View(capacities) for _ in range(SCHEDULERS)]
        self._placed: dict[str, tuple[int, str, Resources]] = {}
        """By pod, its index, node and what it has."""
        self._again: deque[tuple[Step, int]] = deque()
        """Pods that lost, and how often."""
        self.summary = RaceSummary()

    def run(self, steps: Sequence[Step], advance: Callable[[int], object]) -> None:
        """Take all steps, in order; what a pod waits for comes first."""
        at = windows = 0
        while at < len(steps) or self._again:
            window: list[Proposed] = []
            for _ in range(min(WINDOW, len(self._again))):
                self._place(window, *self._again.popleft())
            waiting = {step.pod for step, _ in self._again} | {each.step.pod for each in window}
            begin = at
            while at < len(steps) and len(window) < WINDOW and steps[at].pod not in waiting:
                step, at = steps[at], at + 1
                waiting.add(step.pod)
                if step.asks is not None:
                    self._place(window, step, 0)
                elif step.pod in self._placed:
                    index, node, _ = self._placed[step.pod]
                    body = self._body({"kind": "Revocation", "index": index}, NO_BET)
                    window.append(Proposed(step, 0, node, body))
            for proposed, verdict in zip(window, self._propose(window), strict=True):
                self._learn(proposed, verdict)
            advance(at - begin)
            windows += 1
            if windows % STALE_WINDOWS == 0:
                for view in self._views:
                    view.copy_of(self._truth)

    def _body(self, commitment: dict[str, Any], precondition: Mapping[str, Any]) -> dict[str, Any]:
        return {"tenant_id": self._tenant_id, "commitment": commitment, "precondition": precondition}

    def _view_of(self, step: Step) -> _View:
        return self._views[step.line % SCHEDULERS]

    def _place(self, window: list[Proposed], step: Step, attempt: int) -> None:
        assert step.asks is not None
        view = self._view_of(step)
        node = view.fullest(step.asks) if attempt < ATTEMPTS_MAX else None
        if node is None:
            self.summary.unplaced += 1
            return
        view.change(node, step.asks, -1)
        asks = msgspec.to_builtins(step.asks)
        commitment = {"kind": "Placement", "capsule": step.pod, "node": node, "reservation": asks, "limit": asks}
        bet = {"kind": "NodeFreeOf", "node": node, "at_least": asks}
        window.append(Proposed(step, attempt, node, self._body(commitment, bet)))

    def _learn(self, proposed: Proposed, verdict: Verdict) -> None:
        step, summary = proposed.step, self.summary
        if verdict.seq is None:
            summary.conflicts += 1
            summary.reasons[verdict.reason or ""] += 1
            if step.asks is not None:
                self._lost(proposed, verdict)
        elif step.asks is not None:
            summary.placed += 1
            summary.attempts[str(proposed.attempt + 1)] += 1
            self._placed[step.pod] = verdict.seq, proposed.node, step.asks
            self._truth.change(proposed.node, step.asks, -1)
            summary.live_max = max(summary.live_max, len(self._placed))
        else:
            summary.revoked += 1
            _, node, had = self._placed.pop(step.pod)
            for view in (self._truth, self._view_of(step)):
                view.change(node, had, 1)

    def _lost(self, proposed: Proposed, verdict: Verdict) -> None:
        step, view = proposed.step, self._view_of(proposed.step)
        assert step.asks is not None
        view.change(proposed.node, step.asks, 1)
        if verdict.free is not None:
            # The old photo, corrected where it was seen to be wrong.
            has = convert(verdict.free, Resources)
            view.free[proposed.node] |= {name: has.of(name) for name, _ in step.asks.amounts()}
        self._again.append((step, proposed.attempt + 1))
