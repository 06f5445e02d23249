"""Reads the segments of logs again, slowly, so that damage at rest is found while other copies are whole.

A round reads each segment once, up to its last durable record, and checks the CRC of every batch. It is spread evenly
over ``interval_s``::

    elapsed part of a round = (time / interval_s + place / places) mod 1

``place`` is the number of this copy among the ``places`` copies of one log. Two copies read the same records
``interval_s / places`` apart, so damage to two of them is not found on the same day. Opening a log reads all of it, so
the first round of a process ends when the log is opened. Every record is read again within two rounds.

Invariants::

    bytes read a second <= BYTES_A_SECOND_MAX      a log too long for this rate has longer rounds
    memory              <= WINDOW_BYTES, and one batch that is longer
    no lock is held while a file is read

Each window is dropped from the page cache before the read, so that the disk is read, and after it, so that the scrub
displaces no other pages.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import NamedTuple

from ledger.errors import WalCorruptError
from ledger.positions import BEFORE_FIRST, Lsn, before
from wal.format import SEGMENT_HEADER_BYTES, FormatError
from wal.reader import Damage, sound_runs
from wal.segment import Segment, list_segments, opened, read_header

INTERVAL_DEFAULT_S = 7 * 86400.0
BYTES_A_SECOND_MAX = 8 << 20
WINDOW_BYTES = 1 << 20
CHECK_INTERVAL_MAX_S = 60.0
"""A scrubber checks for due segments at least this often; more often if a round is short."""
CHECKS_A_ROUND = 100


Report = Callable[[str, Mapping[str, object]], None]
"""Reports an event: its name and its facts."""


class LogCopy(NamedTuple):
    """One copy of a log, in a folder, synced up to ``durable_lsn``; it is number ``place`` of ``places`` copies."""

    node_id: str
    folder: Path
    durable_lsn: Lsn
    place: int = 0
    places: int = 1


@dataclass(slots=True)
class _Round:
    """Progress of one log's round: ``part`` of its time has elapsed, and segments up to ``checked`` are read."""

    part: float
    checked: Lsn
    damaged: int = 0


class Scrubber:
    """Scrubs ``copies()`` in ``run``, on a thread of its own.

    ``on_read(copy, segment, error)`` is called for each segment that was read, with its damage, if any; the segment may
    have been removed or cut meanwhile. ``report(event, facts)`` is called when a round ends.
    """

    def __init__(
        self,
        copies: Callable[[], Iterable[LogCopy]],
        interval_s: float,
        on_read: Callable[[LogCopy, Segment, WalCorruptError | None], None],
        report: Report,
    ) -> None:
        self._copies = copies
        self._interval_s = interval_s
        self._on_read = on_read
        self._report = report
        self._rounds: dict[str, _Round] = {}
        self.ended_s: dict[str, float] = {}
        """By node, when the last round of its log ended, in seconds since 1970."""
        self._closing = threading.Event()

    def run(self) -> None:
        """Read due segments until ``close`` is called."""
        check_interval_s = min(CHECK_INTERVAL_MAX_S, self._interval_s / CHECKS_A_ROUND)
        while not self._closing.is_set():
            self.step(time.time())
            self._closing.wait(check_interval_s)

    def close(self) -> None:
        """End ``run``."""
        self._closing.set()

    def step(self, now_s: float) -> None:
        """Read the segments that are due at ``now_s``."""
        for copy in self._copies():
            part = (now_s / self._interval_s + copy.place / copy.places) % 1
            try:
                segments = list_segments(copy.folder)
            except OSError:
                continue  # the writer of the log notices, and reports it
            if (reading := self._rounds.get(copy.node_id)) is None:
                behind = _due(segments, BEFORE_FIRST, part)
                self._rounds[copy.node_id] = _Round(part, behind[-1].base_lsn if behind else BEFORE_FIRST)
                self.ended_s[copy.node_id] = now_s
                continue
            is_over = part < reading.part
            self._check(copy, segments, reading, 1.0 if is_over else part)
            if self._closing.is_set():
                return
            reading.part = part
            if is_over:
                facts = {"node_id": copy.node_id, "segments": len(segments), "damaged": reading.damaged}
                reading.checked, reading.damaged = BEFORE_FIRST, 0
                self.ended_s[copy.node_id] = now_s
                self._report("wal_scrub_round_done", facts)

    def _check(self, copy: LogCopy, segments: Sequence[Segment], reading: _Round, part: float) -> None:
        """Read the segments that are due."""
        followers = dict(pairwise(segments))
        for segment in _due(segments, reading.checked, part):
            error = check_segment(copy, segment, followers.get(segment), self._pause)
            if self._closing.is_set():
                return
            reading.damaged += error is not None
            self._on_read(copy, segment, error)
            reading.checked = segment.base_lsn

    def _pause(self, read_bytes: int) -> bool:
        """Keep to ``BYTES_A_SECOND_MAX``; False once the scrubber is closing."""
        return not self._closing.wait(read_bytes / BYTES_A_SECOND_MAX)


def _due(segments: Sequence[Segment], checked: Lsn, part: float) -> list[Segment]:
    """The segments after ``checked`` that end within this part of all bytes."""
    sizes = [0] * len(segments)
    for at, segment in enumerate(segments):
        with suppress(FileNotFoundError):
            sizes[at] = segment.path.stat().st_size
    total = sum(sizes) or 1
    return [
        segment
        for segment, end in zip(segments, accumulate(sizes), strict=True)
        if segment.base_lsn > checked and end / total <= part
    ]


def check_segment(
    copy: LogCopy, segment: Segment, follower: Segment | None, pause: Callable[[int], bool] = lambda _: True
) -> WalCorruptError | None:
    """The damage in the durable part of a segment; None if there is none or the segment was removed.

    ``follower`` is the segment after it. ``pause(read_bytes)`` is called after each window; False ends the reading.
    """
    try:
        last_lsn = copy.durable_lsn if follower is None else read_header(follower).previous_lsn
    except (FormatError, OSError):
        last_lsn = before(segment.base_lsn)  # removed, and this one before it; or its own check finds the damage
    try:
        read_header(segment)
        with opened(segment.path) as descriptor:
            damage = _damage_in(descriptor, segment, min(last_lsn, copy.durable_lsn), copy.node_id, pause)
    except FileNotFoundError:
        return None
    except (FormatError, OSError) as error:
        return WalCorruptError(segment.name, 0, str(error))
    return None if damage is None else WalCorruptError(segment.name, damage.offset, damage.reason)


def _damage_in(
    descriptor: int, segment: Segment, upto_lsn: Lsn, node_id: str, pause: Callable[[int], bool]
) -> Damage | None:
    offset, next_lsn = SEGMENT_HEADER_BYTES, segment.base_lsn
    os.posix_fadvise(descriptor, 0, WINDOW_BYTES, os.POSIX_FADV_DONTNEED)
    for found in sound_runs(descriptor, next_lsn, node_id, WINDOW_BYTES):
        if next_lsn > upto_lsn:
            return None
        if isinstance(found, Damage):
            return found
        read_bytes = found.end - offset
        os.posix_fadvise(descriptor, offset, read_bytes + WINDOW_BYTES, os.POSIX_FADV_DONTNEED)
        offset, next_lsn = found.end, found.next_lsn
        if not pause(read_bytes):
            return None
    return Damage(offset, next_lsn, f"it ends before LSN {upto_lsn}", offset) if next_lsn <= upto_lsn else None
