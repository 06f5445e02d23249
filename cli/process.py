"""A command run in our place: it has our standard streams and working folder, and gets our signals.

While it runs, every signal in ``PASSED_ON`` is held back from us and sent on to it, except what the terminal
already gave to both of us. So we outlive it and can record how it ended.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from typing import NamedTuple

from terminal import program

PASSED_ON = frozenset(
    {
        signal.SIGINT,
        signal.SIGTERM,
        signal.SIGHUP,
        signal.SIGQUIT,
        signal.SIGUSR1,
        signal.SIGUSR2,
    }
)
_IGNORED_BY_PYTHON = (signal.SIGPIPE, signal.SIGXFSZ)
_SENT_BY_KERNEL = 0x80
"""``si_code`` SI_KERNEL: the terminal sent it, and to the whole foreground process group."""


class Ended(NamedTuple):
    """How the command ended: its exit code, or 128 + the signal that killed it, and how long it ran."""

    exit_code: int
    killed_by: str | None
    duration_s: float


def run(command: Sequence[str]) -> Ended:
    """Run ``command`` to its end.

    Afterwards the signals in ``PASSED_ON`` stay blocked in this process, so that one that comes too late for
    the command does not interrupt what is still to be recorded.

    Raises:
        OSError: it cannot be started.
    """
    waited_for = PASSED_ON | {signal.SIGCHLD}
    signal.pthread_sigmask(signal.SIG_BLOCK, waited_for)
    program.restore_umask()
    started = time.monotonic()
    pid = os.posix_spawnp(command[0], list(command), os.environ, setsigmask=(), setsigdef=_IGNORED_BY_PYTHON)
    status = _status_at_end(pid, waited_for)
    duration_s = time.monotonic() - started
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        return Ended(code, None, duration_s)
    return Ended(128 - code, signal.Signals(-code).name, duration_s)


def _status_at_end(pid: int, waited_for: frozenset[signal.Signals]) -> int:
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return status
        got = signal.sigwaitinfo(waited_for)
        if got.si_signo != signal.SIGCHLD and got.si_code != _SENT_BY_KERNEL:
            os.kill(pid, got.si_signo)
