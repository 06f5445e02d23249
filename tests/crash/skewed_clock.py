"""``tally`` under a wall clock that a file sets, and may set again while it runs.

    python skewed_clock.py FILE serve

FILE holds two integers of 8 bytes: nanoseconds to add to the wall clock, and the time at which it stands still,
0 when it does not.
"""

from __future__ import annotations

import mmap
import struct
import sys
import time
from pathlib import Path

SETTING = struct.Struct("<qq")


def skew(path: Path) -> None:
    """Put the clock that ``path`` sets in the place of the system's."""
    with path.open("r+b") as file:
        setting = mmap.mmap(file.fileno(), SETTING.size)
    system_ns = time.time_ns

    def time_ns() -> int:
        ahead_ns, frozen_ns = SETTING.unpack(setting[:])
        return int(frozen_ns or system_ns() + ahead_ns)

    time.time_ns = time_ns
    time.time = lambda: time_ns() / 1e9


def set_clock(path: Path, *, ahead_s: float = 0.0, frozen_s: float = 0.0) -> None:
    """Set the clock: ahead of the system's, or standing still."""
    data = SETTING.pack(int(ahead_s * 1e9), int(frozen_s * 1e9))
    if path.exists():
        with path.open("r+b") as file:
            file.write(data)
    else:
        path.write_bytes(data)


if __name__ == "__main__":
    skew(Path(sys.argv.pop(1)))
    from cli import main

    main()
