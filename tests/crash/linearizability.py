"""Whether recorded operations can be put in an order that their times allow and their answers show.

Each object is judged alone: a history is linearizable if it is for each object. The search is that of Wing and Gong
with the memory of Lowe ("Testing for linearizability", 2017), as in Porcupine: an operation may come next if it was
invoked before any other that is left was completed; no set of operations is looked at twice in one state.

* ``key``: a request with an Idempotency-Key. The first that takes effect sets what it is answered with, and is no
  replay; every later one is a replay of that.
* ``module``: adjustments with the precondition that the newest is of one epoch: compare and set.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

from tests.crash.operations import Operation

State = Any
Step = Callable[[State, Operation], State | None]
"""The state after an operation; None where it could not be answered so in the state before."""
UNSET: Final = ("unset",)
SOMETHING: Final = ("something",)
"""A key was used by an operation that was not answered."""


def key_register(state: State, operation: Operation) -> State | None:
    """A request under one key."""
    output = operation.output
    if output is None:
        return SOMETHING if state is UNSET else state
    answer = ("set", output["hlc"], output["job_id"])
    if not output["replayed"]:
        return answer if state is UNSET else None
    return answer if state in (SOMETHING, answer) else None


def compare_and_set(state: State, operation: Operation) -> State | None:
    """An adjustment to ``epoch`` if the newest is of epoch ``expected``; the state is the newest epoch, 0 at first."""
    epoch = 0 if state is UNSET else state
    expected, new, output = operation.input["expected"], operation.input["epoch"], operation.output
    if output is None:
        return new if epoch == expected else state
    if output["accepted"]:
        return new if epoch == expected else None
    return state if output["epoch"] == epoch != expected else None


MODELS: Final[dict[str, Step]] = {"key": key_register, "module": compare_and_set}
"""By what stands before the first colon of an object."""


def violations(operations: Iterable[Operation]) -> list[str]:
    """The objects whose operations no order explains."""
    by_object: defaultdict[str, list[Operation]] = defaultdict(list)
    for operation in operations:
        if operation.input.get("durability") != "LOCAL":
            # Two nodes may answer one key at LOCAL; the later one is REFUSED in the chain.
            by_object[operation.object].append(operation)
    return sorted(
        name for name, of_object in by_object.items() if not is_linearizable(of_object, MODELS[name.split(":")[0]])
    )


def is_linearizable(operations: Sequence[Operation], step: Step) -> bool:
    """Whether there is an order in which each operation has its answer."""
    ordered = sorted(operations, key=lambda operation: operation.invoked_s)
    ends = [math.inf if each.output is None else each.completed_s for each in ordered]
    answered = sum(1 << at for at, each in enumerate(ordered) if each.output is not None)
    seen: set[tuple[int, State]] = set()
    left: list[tuple[int, State]] = [(0, UNSET)]
    while left:
        done, state = left.pop()
        if done & answered == answered:
            return True
        if (done, state) in seen:
            continue
        seen.add((done, state))
        first_end_s = min(ends[at] for at in range(len(ordered)) if not done >> at & 1)
        for at, operation in enumerate(ordered):
            if done >> at & 1:
                continue
            if operation.invoked_s > first_end_s:
                break
            following = step(state, operation)
            if following is None or (operation.output is None and following == state):
                continue
            left.append((done | 1 << at, following))
    return False
