"""The openb cluster trace as commitments: ``tally replay FILE --map openb --as commitments``.

Nodes come from the trace's list of nodes, CSV with the columns ``sn,cpu_milli,memory_mib,gpu,model``; each capacity is
recorded first. A pod that was scheduled is placed at its scheduled_time, and revoked at its deletion_time. GPUs are
counted in thousandths, ``gpu_milli``, as pods share them.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from lab import openb
from lab.openb import Row
from ledger.errors import InvalidInputError
from ledger.machines.promises import Resources

NODE_COLUMNS = ("sn", "cpu_milli", "memory_mib", "gpu")
NODES_FILE = "openb_node_list_all_node.csv"
"""The list of nodes, where it stands beside that of pods."""
_ACCELERATOR = "gpu_milli"
_MIB = 1 << 20


class Step(NamedTuple):
    """A pod is placed, with what it asks for, or gone."""

    trace_time: int
    line: int
    pod: str
    asks: Resources | None


def capacities(path: Path) -> dict[str, Resources]:
    """By node, what it has.

    Raises:
        InvalidInputError: the file is no list of nodes.
    """
    with path.open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        if not set(NODE_COLUMNS) <= set(reader.fieldnames or ()):
            raise InvalidInputError(f"{path}: a list of nodes has the columns {', '.join(NODE_COLUMNS)}")
        return {row["sn"]: _resources(line, row, row["gpu"] or "0", "1000", path) for line, row in enumerate(reader, 2)}


def steps(path: Path) -> list[Step]:
    """What happens to the pods of the trace, in its order of time.

    Raises:
        InvalidInputError: the file is no list of pods.
    """
    return sorted(_steps(path))


def _steps(path: Path) -> Iterator[Step]:
    with path.open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        if not set(openb.COLUMNS) <= set(reader.fieldnames or ()):
            raise InvalidInputError(f"{path}: a list of pods has the columns {', '.join(openb.COLUMNS)}")
        for line, row in enumerate(reader, 2):
            if not row["scheduled_time"]:
                continue
            asks = _resources(line, row, row["num_gpu"] or "0", row["gpu_milli"] or "0", path)
            begins = _number(line, row["scheduled_time"], path)
            yield Step(begins, line, row["name"], asks)
            if row["deletion_time"]:
                yield Step(max(begins, _number(line, row["deletion_time"], path)), line, row["name"], None)


def _resources(line: int, row: Row, gpus: str, milli: str, path: Path) -> Resources:
    amount = _number(line, gpus, path) * _number(line, milli, path)
    return Resources(
        cpu_millis=_number(line, row["cpu_milli"], path),
        memory_bytes=_number(line, row["memory_mib"], path) * _MIB,
        accelerators={_ACCELERATOR: amount} if amount else {},
    )


def _number(line: int, text: str, path: Path) -> int:
    if not (text.isascii() and text.isdigit()):
        raise InvalidInputError(f"{path.name}, line {line}: {text!r} is not a whole number")
    return int(text)
