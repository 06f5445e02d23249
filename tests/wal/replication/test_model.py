"""The model of the protocol, searched by Spin: nothing is lost within its bounds, and something without any rule."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.debian_tools
MODEL = Path(__file__).parents[3] / "docs" / "model" / "quorum.pml"
DEPTH_MAX = 10_000
MEMORY_MB_MAX = 12_000

JOINING = "CHANGES MEMBERS=4 VOTERS=7 NODES=1 LEFT_MAX=0 WIPED_MAX=1"
TWO_LISTS = "CHANGES MEMBERS=4 VOTERS=3 RUNS=3 NODES=1 LEFT_MAX=0 ADDRESSES=7 NEW_ADDRESSES=11"
LEFT_BEHIND = f"{TWO_LISTS} RECORDS=1 NEVER_COUNTED=2"
FIVE = "CHANGES MEMBERS=5 RUNS=3 NODES=1 LEFT_MAX=0 ADDRESSES=7 NEW_ADDRESSES=28 NEW_RUNS=12"
BOUNDS = ["RUNS=3 NODES=3 WIPED_MAX=1 RESTARTS RECORDS=1"]
LARGER = [
    *("RUNS=3 RESTARTS", f"{JOINING} RUNS=2"),
    *("RUNS=3 NODES=3", "RUNS=3 WIPED_MAX=1", "RUNS=3 RECORDS=3", LEFT_BEHIND, "RUNS=4"),
    *(f"{JOINING} RUNS=2 LATE", f"{LEFT_BEHIND} LATE", f"{TWO_LISTS} NEW_RUNS=12", FIVE),
]
"""More memory and time than every run of the tests should take: for `make torture`."""
RULES = {
    "HIGHER": "RUNS=2",
    "SAME_RUN": "RUNS=2",
    "FENCE": "RUNS=2",
    "DURABLE": "RUNS=2",
    "SYNC": "RUNS=2",
    "ELECTED": "RUNS=3",
    "TRUNCATE": "RUNS=3",
    "REPEAT": "RUNS=3",
    "PREVIOUS": "RUNS=2",
    "PROMISES": "RUNS=2",
    "BEST": "RUNS=2",
    "LAST_EPOCH": "RUNS=3",
    "MAJORITY": "RUNS=2",
    "OWN_EPOCH": "RUNS=4 NODES=1 LEFT_MAX=0",
    "NEW_ID": "RUNS=2 WIPED_MAX=1",
    "ONE": "CHANGES VOTERS=1 RUNS=2",
    "STORED": "CHANGES VOTERS=1 RUNS=2",
    "STILL_HELD": f"{JOINING} RUNS=2",
    "FIRST_COMMIT": FIVE,
    "FIRST_LIST": LEFT_BEHIND,
}
"""Every rule that can be taken out, and bounds within which that is found soon."""


def search(folder: Path, switches: str, *compiler: str, table_bits: int = 20) -> str:
    """What the model checker says of the model with these switches; ``compiler`` makes a program of it. Its table of
    states begins with 2^``table_bits`` places, and grows.

    To look for orders that need not be told apart is left out: the model has none, its steps are atomic already.
    """
    if not (shutil.which("spin") and shutil.which(compiler[0])):
        pytest.fail(
            f"install spin and {compiler[0]}; on Debian: sudo apt-get install spin gcc libc6-dev tcc", pytrace=False
        )
    for command in (
        ["spin", "-a", *(f"-D{switch}" for switch in switches.split()), str(MODEL)],
        [*compiler, "-w", "-DSAFETY", "-DNOREDUCE", f"-DMEMLIM={MEMORY_MB_MAX}", "-o", "pan", "pan.c"],
    ):
        subprocess.run(command, cwd=folder, check=True, timeout=100, stdout=subprocess.DEVNULL)
    run = subprocess.run(
        ["./pan", f"-m{DEPTH_MAX}", f"-w{table_bits}"], cwd=folder, capture_output=True, text=True, check=False
    )
    return run.stdout + run.stderr


@pytest.mark.torture
@pytest.mark.parametrize("bounds", BOUNDS + (LARGER if os.environ.get("TORTURE_ROUNDS") else []))
def test_nothing_committed_is_lost_within_bounds(tmp_path: Path, bounds: str) -> None:
    # What searches for seconds wants a program that is soon there, and memory enough to keep states as they are.
    options = ["-O1", "-DCOLLAPSE"] if bounds in LARGER else ["-Og", "-DNOCOMP"]
    found = search(tmp_path, bounds, "gcc", *options)
    # No assertion failed, and nothing within the bounds was left out: neither for want of depth nor of memory.
    assert "Full statespace search" in found
    assert re.search(r"depth reached \d+, errors: 0$", found, re.M), found
    assert "error:" not in found
    assert "not completed" not in found
    states = re.search(r"([\d.e+]+) states, stored", found)
    assert states
    assert float(states[1]) > 100_000


@pytest.mark.parametrize(("rule", "bounds"), RULES.items())
def test_without_a_rule_something_is_lost(tmp_path: Path, rule: str, bounds: str) -> None:
    # Most are found before gcc is through with the program, or a table for many states is there; to look for other
    # errors only makes the program longer. From behind, the worst of the runs comes soonest.
    compiler = ("tcc", "-DNOBOUNDCHECK", "-DREVERSE", "-DT_REVERSE")
    failed = re.search(r"assertion violated (.*)", search(tmp_path, f"{bounds} OUT_{rule}", *compiler, table_bits=18))
    assert failed
    assert any(promise in failed[1] for promise in ("committed", "epoch", "length")), failed[1]


def test_every_rule_of_the_model_is_taken_out_and_described() -> None:
    taken_out = set(re.findall(r"\bOUT_(\w+)", MODEL.read_text()))
    assert taken_out == set(RULES)
    assert set(re.findall(r"^\| `(\w+)` \|", MODEL.with_name("README.md").read_text(), re.M)) == taken_out
