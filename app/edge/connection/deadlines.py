"""Deadlines of clients that stall. Every connection is checked once a tick; requests have no timers.

A connection waits for its client in one of three ways, and each ends::

    for a head             http.header_timeout after the connection, or the answer before, was there
    for a body             when no PROGRESS_BYTES more of it came, nor its end, for http.body_timeout; http.body_timeout
                           after the answer, where that was given before its end
    for an answer's reader likewise, when no PROGRESS_BYTES more of it were taken

The clock stops while the service works on a whole request, or pauses reading because no handler takes the data.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ledger.errors import StartRefusedError

PROGRESS_BYTES = 64 * 1024
"""Bytes that a client must send, or take, in ``http.body_timeout``, unless it finishes before."""
DESCRIPTORS_RESERVED = 128
"""Descriptors reserved for files other than connections: WAL, PostgreSQL, stats, uploads, files of the system."""
CONNECTIONS_LEAST = 8
"""With room for fewer connections the service does not start."""


@dataclass(frozen=True, slots=True)
class ConnectionBounds:
    """Bounds of all connections of one listener."""

    connections_max: int
    header_timeout_s: float
    body_timeout_s: float


@dataclass(slots=True, eq=False)
class Progress:
    """How long one stage of a connection has made no progress."""

    _stage: object = None
    _since_s: float = 0.0
    _moved_bytes: int = 0

    def stalled_s(self, stage: object, moved_bytes: int, now_s: float) -> float:
        """Seconds since ``stage`` was first seen, or since it moved ``PROGRESS_BYTES``.

        MUST be called at each check with the current stage: a stage that is entered again is timed from its new start.
        """
        if stage != self._stage or moved_bytes - self._moved_bytes >= PROGRESS_BYTES:
            self._stage, self._since_s, self._moved_bytes = stage, now_s, moved_bytes
        return now_s - self._since_s


def end_longest_waiting(connections: Iterable[Any], newest: object) -> bool:
    """End the connection, other than ``newest``, that has waited longest for its client, by its ``waiting_since_s``;
    false if none ``is_waiting``."""
    waiting = [each for each in connections if each is not newest and each.is_waiting()]
    if not waiting:
        return False
    min(waiting, key=lambda each: each.waiting_since_s).abort()
    return True


def connections_allowed(connections_max: int, descriptors_max: int, reserved: int = DESCRIPTORS_RESERVED) -> int:
    """How many connections may be open at once in a process that may open ``descriptors_max`` files.

    Raises:
        StartRefusedError: too few.
    """
    allowed = min(connections_max, descriptors_max - reserved)
    if allowed < min(CONNECTIONS_LEAST, connections_max):
        raise StartRefusedError(
            f"this process may open {descriptors_max} files, and {reserved} of them are kept for the write-ahead log, "
            f"PostgreSQL and files: raise the limit (ulimit -n) to {reserved + connections_max}"
        )
    return allowed
