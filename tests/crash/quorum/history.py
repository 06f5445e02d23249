"""What clients of a ledger were told, and when: lines of JSON, in the order in which the answers came.

Times are seconds of one monotonic clock. ``process`` names a process of a node, ``disk`` what it writes on. An answer
that was lost has no ``status``.
"""

from __future__ import annotations

import time
from pathlib import Path

import msgspec

from tests.app.chains import until


class Wrote(msgspec.Struct, tag="wrote", kw_only=True, omit_defaults=True):
    """One request for a new job, whose spec carries ``number``; a key is repeated with the same number."""

    number: int
    began_s: float
    ended_s: float
    process: str
    disk: str
    level: str
    key: str | None = None
    status: int | None = None
    achieved: str | None = None
    job_id: str | None = None
    hlc: str | None = None
    session: str | None = None

    @property
    def holds(self) -> str | None:
        """The level that its answer says it is at."""
        return self.achieved if self.status in (200, 201, 503) else None

    @property
    def is_final(self) -> bool:
        """Whether no other request of its key can take its place."""
        return self.key is None or (self.status in (200, 201) and self.achieved != "LOCAL")


class Read(msgspec.Struct, tag="read", kw_only=True, omit_defaults=True):
    """One read of the job that the write ``number`` made; ``has_session``: its token was shown."""

    number: int
    began_s: float
    ended_s: float
    process: str
    consistency: str
    has_session: bool = False
    may_have_lost: bool = False
    """Whether the write was answered LOCAL, so that its job may be refused for another of its key."""
    max_staleness_s: float = 0.0
    status: int | None = None
    problem: str | None = None
    found: int | None = None
    """The number in the job that was found."""


class Fenced(msgspec.Struct, tag="fenced", kw_only=True):
    """A process said that it was fenced, not later than this."""

    at_s: float
    process: str


class Wiped(msgspec.Struct, tag="wiped", kw_only=True):
    """A disk was wiped while nobody wrote on it."""

    at_s: float
    disk: str


class Struck(msgspec.Struct, tag="struck", kw_only=True):
    """A fault began; for those who read the history."""

    at_s: float
    fault: str


Line = Wrote | Read | Fenced | Wiped | Struck
_decoder = msgspec.json.Decoder(Line)


def now_s() -> float:
    """The time of a history."""
    return time.monotonic()


def load(path: Path) -> list[Line]:
    """What a file of a history says."""
    return [_decoder.decode(line) for line in path.read_bytes().splitlines()]


class History:
    """Written while it happens, into ``path``."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lines: list[Line] = []
        self._file = path.open("wb", buffering=0)

    def note(self, line: Line) -> None:
        """One more line."""
        self.lines.append(line)
        self._file.write(msgspec.json.encode(line) + b"\n")

    def answered(self, *levels: str) -> int:
        """How many writes were told that they are at one of these levels."""
        return sum(isinstance(line, Wrote) and line.holds in levels for line in self.lines)

    async def goes_on(self, answers: int, *levels: str) -> None:
        """Return once so many more writes are at one of these levels."""
        enough = self.answered(*levels) + answers

        def holds() -> bool:
            return self.answered(*levels) >= enough

        await until(holds, f"{answers} more answers at {' or '.join(levels)}")

    def close(self) -> None:
        """No more lines."""
        self._file.close()
