"""A thread that reads the log of a node at work again, slowly: damage at rest is found while other copies are whole."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import structlog

from ledger.errors import WalCorruptError
from ledger.positions import Lsn
from wal.scrub import LogCopy, Scrubber
from wal.segment import Segment

CLOSE_TIMEOUT_S = 0.5
"""A stop waits no longer for a disk that does not answer."""
NAMED_MAX = 3
"""Damaged segments that ``/readyz`` names."""

log = structlog.get_logger()


class LogScrub:
    """Scrubs the log in ``folder``, the first of ``copies`` copies, in rounds of ``interval_s``.

    ``fault`` and ``ended_s`` may be asked from any thread.
    """

    def __init__(
        self, node_id: str, folder: Path, durable_lsn: Callable[[], Lsn], copies: int, interval_s: float
    ) -> None:
        self._node_id = node_id
        self._folder = folder
        self._durable_lsn = durable_lsn
        self._copies = copies
        self._damaged: dict[str, str] = {}
        """What is wrong, by the name of the segment."""
        self._scrubber = Scrubber(self._own_copy, interval_s, self._read, self._tell)
        self._thread = threading.Thread(target=self._scrubber.run, name="wal-scrub", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Read no further."""
        self._scrubber.close()
        if self._thread.ident is not None:
            self._thread.join(CLOSE_TIMEOUT_S)

    def damaged_segments(self) -> int:
        """How many segments were found damaged, and are there still."""
        return len(self._found())

    def ended_s(self) -> float:
        """When all of the log had been read for the last time, in seconds since 1970; 0 before the first."""
        return self._scrubber.ended_s.get(self._node_id, 0.0)

    def fault(self) -> str | None:
        """What is damaged, None where nothing is."""
        found = self._found()
        more = f" and {len(found) - NAMED_MAX} segments more" if len(found) > NAMED_MAX else ""
        return f"damaged at rest in {self._folder}: {'; '.join(found[:NAMED_MAX])}{more}" if found else None

    def _found(self) -> list[str]:
        damaged = sorted(self._damaged.copy().items())
        return [f"{name} {detail}" for name, detail in damaged if (self._folder / name).exists()]

    def _own_copy(self) -> Iterator[LogCopy]:
        yield LogCopy(self._node_id, self._folder, self._durable_lsn(), 0, self._copies)

    def _read(self, copy: LogCopy, segment: Segment, error: WalCorruptError | None) -> None:
        if error is None:
            self._damaged.pop(segment.name, None)
        elif segment.path.exists():
            self._damaged[segment.name] = f"at byte {error.offset}: {error.reason}"
            log.error("wal_scrub_damage", segment=segment.name, offset=error.offset, reason=error.reason)

    def _tell(self, event: str, facts: Mapping[str, object]) -> None:
        log.info(event, **facts)
