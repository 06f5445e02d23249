"""Output under ``spark-submit``, whose Java prints all that this process writes as output: errors too, from one pipe.

So errors, and what a terminal shows, are written past it. The rest it prints itself, since what it was given may be a
file that others write to behind it; but it ends as soon as this process has, whether it has printed all or not.
"""

from __future__ import annotations

import fcntl
import os
import select
import stat
import struct
import sys
import termios
import time
from contextlib import suppress
from typing import Final

from pipeline.gateway import is_submitted

PRINTED_TIMEOUT_S: Final = 30.0
"""How long Java may take to print: whoever reads its output may be slow."""
LOOK_INTERVAL_S: Final = 0.01


def write_past_java() -> None:
    """From now on errors go where those of ``spark-submit`` go, if it runs this process; to a terminal, output too."""
    if not is_submitted():
        return
    with suppress(OSError):  # No /proc, or a socket: Java goes on printing all.
        output, errors = (f"/proc/{os.getppid()}/fd/{number}" for number in (1, 2))
        if not os.path.samefile(output, errors) or _is_terminal(errors):
            _reopen(2, errors)
        if _is_terminal(output):
            _reopen(1, output)


def wait_until_printed() -> None:
    """Wait until nothing that was written is left for Java to read."""
    if not is_submitted() or not stat.S_ISFIFO(os.fstat(1).st_mode):
        return
    with suppress(OSError):
        sys.stdout.flush()
    abandoned = select.poll()
    abandoned.register(1, 0)  # What is told of a pipe unasked: that nobody reads it any more.
    deadline_s = time.monotonic() + PRINTED_TIMEOUT_S
    while time.monotonic() < deadline_s and not abandoned.poll(0):
        (unread,) = struct.unpack("i", fcntl.ioctl(1, termios.FIONREAD, b"\0\0\0\0"))
        if not unread:
            return
        time.sleep(LOOK_INTERVAL_S)


def _is_terminal(path: str) -> bool:
    descriptor = os.open(path, os.O_WRONLY | os.O_NOCTTY | os.O_NONBLOCK)
    try:
        return os.isatty(descriptor)
    finally:
        os.close(descriptor)


def _reopen(number: int, path: str) -> None:
    stream = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_NOCTTY)
    os.dup2(stream, number)
    os.close(stream)
