"""Processor time of processes and of all that they started, ended ones included: what a row compares whose own time
wavers with whatever else the machine does."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

_PROC = Path("/proc")
_TIMES = slice(11, 15)
"""utime, stime, cutime and cstime, counted from the state of the process, in ``/proc/PID/stat``."""


def children_with(word: str) -> list[int]:
    """The processes that this one started whose command line has ``word`` as an argument or as its program's name."""
    return [pid for pid in _children(os.getpid()) if word in _words(pid)]


def taken_s(pids: list[int]) -> float:
    """Seconds that these processes took so far, each with all below it."""
    return sum(_ticks(pid) for pid in pids) / os.sysconf("SC_CLK_TCK")


def _ticks(pid: int) -> int:
    try:
        stat = (_PROC / str(pid) / "stat").read_text()
    except FileNotFoundError:
        return 0  # It ended, and is counted by its parent.
    own = sum(map(int, stat.rpartition(")")[2].split()[_TIMES]))
    return own + sum(_ticks(child) for child in _children(pid))


def _children(pid: int) -> Iterator[int]:
    for thread in (_PROC / str(pid) / "task").glob("*/children"):
        try:
            yield from map(int, thread.read_text().split())
        except FileNotFoundError:
            continue


def _words(pid: int) -> list[str]:
    try:
        words = (_PROC / str(pid) / "cmdline").read_bytes().decode().split("\0")
    except FileNotFoundError:
        return []
    return [Path(words[0]).name, *words[1:]]
