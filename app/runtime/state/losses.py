"""Records that were answered and cannot be brought back: kept beside the WAL until somebody acknowledges them.

``<wal folder>/losses.json``, replaced by temp file, fsync, rename and directory fsync::

    [{"first_lsn": 17, "last_lsn": 17, "seq": 9, "found_at": "2026-11-22T02:10:00Z",
      "jobs": [{"lsn": 17, "tenant_id": "acme", "job_id": "use1-1704931200000-gate42-00001"}]}]

``seq`` is that of the entry WAL_LOST of ``_system``, which says the same. The file has what is not acknowledged yet.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import msgspec

from app.runtime.state.kept_file import KeptFile
from app.runtime.state.lsn_ranges import LsnRange
from ledger.chain import record
from ledger.enumeration import first_of
from ledger.errors import InvalidInputError
from ledger.facts.events import SYSTEM_TENANT

KIND: Final = "wal-lost"
"""What an acknowledgement calls it."""
JOBS_LISTED_MAX: Final = 100
"""Jobs that one entry names; all are counted by their LSNs."""
NAMED_MAX: Final = 3
"""Ranges, and jobs, that a readiness check names."""
_is_name = re.compile(r"[A-Za-z0-9._:-]{1,128}").fullmatch


class LostJob(msgspec.Struct, frozen=True):
    """Whose record it was, by what its damaged bytes say."""

    lsn: int
    tenant_id: str
    job_id: str


class Loss(msgspec.Struct, frozen=True):
    """A range of this node's WAL; ``last_lsn`` is below ``first_lsn`` where nobody knows how much there was."""

    first_lsn: int
    last_lsn: int
    jobs: list[LostJob]
    seq: int = 0
    found_at: str = ""

    @property
    def text(self) -> str:
        """The range, and the jobs as far as they are known."""
        if self.last_lsn < self.first_lsn:
            what = f"from LSN {self.first_lsn} on, nobody knows how many"
        else:
            what = f"LSN {self.first_lsn}" + (f" to {self.last_lsn}" if self.last_lsn > self.first_lsn else "")
        named = first_of([f"{each.tenant_id}/{each.job_id}" for each in self.jobs], NAMED_MAX)
        return what + (f" ({named})" if named else "")


_FILE: Final = KeptFile[list[Loss]](
    "losses.json", list[Loss], b"[]", "restore it, or move it away: the entries WAL_LOST of _system say the same"
)


class Losses:
    """Those of one node that nobody has acknowledged. Belongs to one event loop, but for what blocks."""

    def __init__(self, wal_folder: Path, node_id: str) -> None:
        self._folder, self._node_id = wal_folder, node_id
        self._open = _FILE.load(wal_folder)
        self.unread: str | None = None
        """Why what was set aside cannot be read, None while it can."""

    def fault(self) -> str | None:
        """What ``/readyz`` says, None when all are acknowledged."""
        if self.unread is not None:
            return f"what was set aside of the log of node {self._node_id} cannot be read yet: {self.unread}"
        if not self._open:
            return None
        named = first_of([each.text for each in self._open], NAMED_MAX, "; ")
        return (
            f"records of node {self._node_id} that were answered are lost: {named}. The entries WAL_LOST of "
            f"{SYSTEM_TENANT} name them; tally verify --tenant {SYSTEM_TENANT} --acknowledge REASON records that "
            "somebody has seen it"
        )

    def wanted(self, tenant_id: str, kind: str | None, seq: int | None) -> list[Loss]:
        """Those that a request acknowledges."""
        if tenant_id != SYSTEM_TENANT or kind not in (None, KIND):
            return []
        return [each for each in self._open if seq in (None, each.seq)]

    def note(self, loss: Loss) -> None:
        """It was found, and is to be recorded. Blocks on the disk."""
        if not any(_is_same(each, loss) for each in self._open):
            now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
            self._store([*self._open, msgspec.structs.replace(loss, found_at=now)])

    def recorded_at(self, loss: Loss, seq: int) -> None:
        """``_system`` records it at ``seq``. Blocks on the disk."""
        self._store([msgspec.structs.replace(each, seq=seq) if _is_same(each, loss) else each for each in self._open])

    def acknowledge(self, loss: Loss) -> None:
        """``_system`` says that somebody has seen it. Blocks on the disk."""
        self._store([each for each in self._open if not _is_same(each, loss)])

    def _store(self, losses: list[Loss]) -> None:
        self._open = losses
        _FILE.store(self._folder, losses)


def _is_same(one: Loss, other: Loss) -> bool:
    return (one.first_lsn, one.last_lsn) == (other.first_lsn, other.last_lsn)


def jobs_of(damaged: Iterable[tuple[int, bytes]]) -> list[LostJob]:
    """Whose records these damaged ones were, by LSN, as far as their bytes give a name that can be one."""
    found = []
    for lsn, payload in damaged:
        try:
            event = record.decode(payload)
        except InvalidInputError:
            continue
        if _is_name(event.tenant_id) and _is_name(event.job_id):
            found.append(LostJob(lsn, event.tenant_id, event.job_id))
    return found


def losses_of(ranges: Sequence[LsnRange], jobs: Sequence[LostJob]) -> list[Loss]:
    """One for each range, with its jobs."""
    return [
        Loss(first_lsn, last_lsn, [each for each in jobs if first_lsn <= each.lsn <= last_lsn])
        for first_lsn, last_lsn in ranges
    ]
