"""Workers of pytest-xdist, forked from a process that has collected the tests already.

To import all that tests import takes seconds of the processor, and each worker would do so for itself.
"""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from functools import partial
from typing import Any

from execnet import gateway_io

from tests.forked import Forked


def fork_workers(selected: Sequence[str]) -> None:
    """From now on workers are forked from a process that has collected the tests ``selected``, as pytest was told."""
    gateway_io.Popen2IOMaster = partial(_ForkedIO, collecting(selected))  # type: ignore[misc, assignment]


def collecting(selected: Sequence[str]) -> str:
    """A program to fork from, which collects the tests ``selected`` where all of them can be, and else imports nothing.

    pytest leaves half a module behind where it cannot import one, and would take that for the whole if asked again; so
    each worker is to find for itself, and to tell, what cannot be imported.
    """
    return (
        "import os, sys, pytest\n"
        f"if pytest.main({['--collect-only', '-qq', *selected]!r}) != pytest.ExitCode.OK:\n"
        "    os.execv(sys.executable, [sys.executable, '-m', 'tests.forked', sys.argv[1], 'pass'])"
    )


class _ForkedIO(gateway_io.Popen2IOMaster):
    """As the one above, which starts ``python -u -c ...`` and talks to it by pipes, but for how that is started."""

    def __init__(self, collected: str, args: list[str], execmodel: Any) -> None:
        pipe = subprocess.PIPE
        self.popen = popen = Forked(collected, *args[args.index("-c") :], stdin=pipe, stdout=pipe)
        gateway_io.Popen2IO.__init__(self, popen.stdin, popen.stdout, execmodel=execmodel)
