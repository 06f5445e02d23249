"""``python -m tests.fuzz [--seconds S] [--inputs N] [--seed K] [TARGET...]``: damaged input for each parser.

Each input follows from target, seed and number, so one run repeats another. The current input stands in ``--keep``
before it is parsed: a process that ends in the middle leaves it there, and ``--replay FILE TARGET`` feeds it again.
"""

from __future__ import annotations

import argparse
import mmap
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random

from tests.fuzz import instrumented  # isort: skip - it must come before what loads the modules in C
from tests.fuzz.mutation import INPUT_BYTES_MAX, mutate
from tests.fuzz.targets import TARGETS, Target, close


def inputs(name: str, target: Target, seed: int) -> Iterator[bytes]:
    """The whole inputs of the target, then damaged ones without end."""
    yield from target.seeds
    random = Random(f"{name} {seed}")
    while True:
        data = mutate(random.choice(target.seeds), target.seeds, random)
        yield data if target.reseal is None or random.random() < 0.3 else target.reseal(data)


def fuzz(name: str, seed: int, seconds: float, count_max: int, kept: mmap.mmap | None = None) -> int:
    """Check inputs of the target for so long, or so many; how many there were.

    Raises:
        AssertionError, or what the parser raises and should not: the input is in ``kept``, and noted on the error.
    """
    until_s = time.monotonic() + seconds
    target = TARGETS[name]
    count = 0
    for data in inputs(name, target, seed):
        if kept is not None:
            kept[: 4 + len(data)] = len(data).to_bytes(4, "big") + data
        try:
            target.check(data)
        except BaseException as error:
            error.add_note(f"target {name}, seed {seed}, input {count}: {data[:2000]!r}")
            raise
        count += 1
        if count >= count_max or time.monotonic() > until_s:
            break
    return count


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("targets", nargs="*", choices=[[], *TARGETS], metavar="TARGET", help=", ".join(TARGETS))
    parser.add_argument("--seconds", type=float, default=10.0, help="for each target")
    parser.add_argument("--inputs", type=int, default=sys.maxsize, help="for each target, at most")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", type=Path, help="a file for the current input")
    parser.add_argument("--replay", type=Path, help="a file that --keep left")
    given = parser.parse_args()
    names = given.targets or [*TARGETS]
    if given.replay is not None:
        kept = given.replay.read_bytes()
        TARGETS[names[0]].check(kept[4 : 4 + int.from_bytes(kept[:4], "big")])
        return 0
    place = None
    if given.keep is not None:
        with given.keep.open("w+b") as file:
            file.truncate(4 + 2 * INPUT_BYTES_MAX)
            place = mmap.mmap(file.fileno(), 0)
    if instrumented.IS_USED:
        instrumented.check_used()
    try:
        for name in names:
            print(f"{name}: {fuzz(name, given.seed, given.seconds, given.inputs, place):,} inputs", flush=True)
    finally:
        close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
