"""Workers of pytest-xdist, forked from a process that has collected the tests already.

To import all that tests import takes seconds of the processor, and each worker would do so for itself. What a module
makes when it is imported is the same in all of them: random values, folders and ports belong into fixtures. What it
writes to the environment is not: a worker has that of pytest. Warnings of imports are not told at the end.
"""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from execnet import gateway_io

from tests.forked import Forked


def fork_workers(arguments: tuple[str, ...], folder: Path) -> None:
    """From now on workers are forked from a process that has collected what pytest is told by ``arguments`` there."""
    gateway_io.Popen2IOMaster = partial(_ForkedIO, collecting(arguments, folder))  # type: ignore[misc, assignment]


def collecting(arguments: tuple[str, ...], folder: Path) -> str:
    """A program to fork from, which collects tests, or imports nothing where one of their files is not wholly there."""
    return f"from tests.workers import collect; collect({list(arguments)!r}, {str(folder)!r})"


class _Told:
    """Whether each file and folder could be collected."""

    whole = True

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self.whole &= report.passed


def collect(arguments: list[str], folder: str) -> None:
    """Import what pytest imports when it collects, or begin anew without.

    pytest leaves half a module behind where it cannot import one, or is to skip it, and takes that for the whole when
    it is asked again. So each worker is to find for itself what is wrong, and to tell.
    """
    root = Path.cwd()
    os.chdir(folder)
    told = _Told()
    ended = pytest.main([*arguments, "--collect-only", "-qq"], plugins=[told])
    os.chdir(root)
    if ended == pytest.ExitCode.INTERRUPTED and told.whole:
        sys.exit(ended)
    if ended != pytest.ExitCode.OK or not told.whole:
        os.execv(sys.executable, [sys.executable, "-m", "tests.forked", sys.argv[1], "pass"])


class _ForkedIO(gateway_io.Popen2IOMaster):
    """What starts ``python -u -c ...`` and talks to it by pipes; this Python is forked, where it is to be this one."""

    def __init__(self, collected: str, args: list[str], execmodel: Any) -> None:
        if args[0] != sys.executable:
            super().__init__(args, execmodel)
            return
        self.popen = Forked(collected, *args[args.index("-c") :], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        gateway_io.Popen2IO.__init__(self, self.popen.stdin, self.popen.stdout, execmodel=execmodel)
