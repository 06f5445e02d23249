"""What a program sees to before it opens or makes anything, whatever started it."""

from __future__ import annotations

import os
import sys
from typing import Final

OTHERS_WRITE: Final = 0o022
"""Rights that group and others never get of what a program of ours makes: who can write beside a key can swap it."""

_given_umask: list[int] = []


def settle() -> None:
    """Open what is closed of the descriptors 0, 1 and 2, and let nobody else write to what is made from now on.

    A daemon is at times started without the three. The next file or socket would take the number, and be written to as
    the log, or end the process when it is closed as libuv has it. Python's own streams stay None where they were.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest number that is free
            os.set_inheritable(number, True)
    given = os.umask(0o077)
    os.umask(given | OTHERS_WRITE)
    _given_umask.append(given)


def restore_umask() -> None:
    """The umask that this process was started with, for a command that runs in its place."""
    if _given_umask:
        os.umask(_given_umask[0])


def locale_fault() -> str | None:
    """What keeps this process from names that are not ASCII; None where it takes them for UTF-8."""
    encoding = sys.getfilesystemencoding()
    if encoding == "utf-8":
        return None
    return (
        f"a name or a text is not {encoding}, the encoding that LC_ALL, LANG or PYTHONUTF8 give this process: unset "
        "PYTHONUTF8, or set LC_ALL=C.UTF-8"
    )
