"""Losses of this node's log: acknowledged records that are gone, and findings that ``_system`` does not record yet.

Files beside the WAL, each replaced by temp file, fsync, rename and directory fsync::

    losses.json [{"first_lsn": 17, "last_lsn": 17, "seq": 9, "found_at": "2026-11-22T02:10:00Z",
                  "jobs": [{"lsn": 17, "tenant_id": "acme", "job_id": "use1-1704931200000-gate42-00001"}]}]
    fork.json   {"from_origin", "to_origin", "reason", "node_id", "differing_count",
                 "differing": [{"tenant_id", "root_hash", "size"}]}
    lost.json   [[first_lsn, last_lsn], ...]
    aside.json  {"lost-1": {"chained_lsn", "is_known"}}

``losses.json`` has the unacknowledged losses; ``seq`` is that of the entry WAL_LOST of ``_system`` that names the same
records. The other three hold findings that a process could not record before it ended; the next start records them.
``lost.json`` has the ranges that a start missed; a record in a log that ``aside.json`` names is not lost. ``differing``
are the checkpoints beside the WAL that the chains no longer reach or match: the first ``DIFFERING_LISTED_MAX`` are
listed, all are counted.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Final

import msgspec

from app.runtime.state.kept_files import KeptFile
from ledger import rfc3339
from ledger.chain import record
from ledger.errors import InvalidInputError
from ledger.facts.events import SYSTEM_TENANT
from ledger.text import first_of
from signing.key_history import FORK_PREFIX

KIND: Final = "wal-lost"
"""The kind that an acknowledgement names."""
JOBS_LISTED_MAX: Final = 100
"""Jobs that one entry names; all are counted by their LSNs."""
NAMED_MAX: Final = 3
"""Ranges, and jobs, that a readiness check names."""
_is_name = re.compile(r"[A-Za-z0-9._:-]{1,128}").fullmatch


LsnRange = tuple[Annotated[int, msgspec.Meta(ge=0)], Annotated[int, msgspec.Meta(ge=0)]]
"""First and last LSN; the last is below the first if the length is unknown."""


def merged(ranges: Iterable[LsnRange]) -> list[LsnRange]:
    """The same LSNs in the fewest ranges, in order."""
    result: list[LsnRange] = []
    for first, last in sorted(ranges):
        if result and first <= result[-1][1] + 1:
            result[-1] = (result[-1][0], max(last, result[-1][1]))
        else:
            result.append((first, last))
    return result


def without(ranges: Iterable[LsnRange], others: Iterable[LsnRange]) -> list[LsnRange]:
    """The LSNs of ``ranges`` that are in none of ``others``, in order."""
    left: list[LsnRange] = []
    taken = [each for each in merged(others) if each[0] <= each[1]]
    for first, last in merged(each for each in ranges if each[0] <= each[1]):
        for taken_first, taken_last in taken:
            if taken_last < first or last < taken_first:
                continue
            if first < taken_first:
                left.append((first, taken_first - 1))
            first = taken_last + 1
        if first <= last:
            left.append((first, last))
    return left


class LostJob(msgspec.Struct, frozen=True):
    """The tenant and job of a lost record, as its damaged bytes name them."""

    lsn: int
    tenant_id: str
    job_id: str


class Loss(msgspec.Struct, frozen=True):
    """A lost range of this node's WAL; ``last_lsn`` is below ``first_lsn`` if its length is unknown."""

    first_lsn: int
    last_lsn: int
    jobs: list[LostJob]
    seq: int = 0
    found_at: str = ""

    @property
    def text(self) -> str:
        """The range, and the jobs as far as they are known."""
        span = f"LSN {self.first_lsn}" + (f" to {self.last_lsn}" if self.last_lsn > self.first_lsn else "")
        what = f"from {span} on, nobody knows how many" if self.last_lsn < self.first_lsn else span
        named = first_of([f"{each.tenant_id}/{each.job_id}" for each in self.jobs], NAMED_MAX)
        return what + (f" ({named})" if named else "")


_FILE: Final = KeptFile[list[Loss]](
    "losses.json", list[Loss], b"[]", "restore it, or move it away: the entries WAL_LOST of _system say the same"
)


class Losses:
    """Unacknowledged losses of one node. Belongs to one event loop, except methods that block."""

    def __init__(self, wal_folder: Path, node_id: str) -> None:
        self._folder, self._node_id = wal_folder, node_id
        self._open = _FILE.load(wal_folder)
        self.unread: str | None = None
        """Why a log that was moved away cannot be read; None while all can."""

    def fault(self) -> str | None:
        """What ``/readyz`` reports; None when all losses are acknowledged."""
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
        """The losses that a request acknowledges."""
        is_wanted = tenant_id == SYSTEM_TENANT and kind in (None, KIND)
        return [each for each in self._open if is_wanted and seq in (None, each.seq)]

    def note(self, loss: Loss) -> None:
        """Keep a loss until ``_system`` records it. Blocks on the disk."""
        if not any(_is_same(each, loss) for each in self._open):
            found_at = rfc3339.written(datetime.now(UTC), "seconds")
            self._store([*self._open, msgspec.structs.replace(loss, found_at=found_at)])

    def recorded_at(self, loss: Loss, seq: int) -> None:
        """``_system`` records it at ``seq``. Blocks on the disk."""
        self._store([msgspec.structs.replace(each, seq=seq) if _is_same(each, loss) else each for each in self._open])

    def acknowledge(self, loss: Loss) -> None:
        """Remove a loss whose acknowledgement ``_system`` records. Blocks on the disk."""
        self._store([each for each in self._open if not _is_same(each, loss)])

    def _store(self, losses: list[Loss]) -> None:
        self._open = losses
        _FILE.store(self._folder, losses)


def _is_same(one: Loss, other: Loss) -> bool:
    return (one.first_lsn, one.last_lsn) == (other.first_lsn, other.last_lsn)


def jobs_of(damaged: Iterable[tuple[int, bytes]]) -> list[LostJob]:
    """The jobs of damaged records, by LSN, as far as their bytes hold plausible names."""
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


DIFFERING_LISTED_MAX: Final = 100


class SignedHead(msgspec.Struct, frozen=True):
    """A tree head that this node signed for one tenant; ``root_hash`` is lowercase hex."""

    tenant_id: str
    size: int
    root_hash: str


class Fork(msgspec.Struct, frozen=True):
    """Where the log went on under a new origin, and why: the fields of the LOG_FORKED entry."""

    from_origin: str
    to_origin: str
    reason: str
    node_id: str
    differing: list[SignedHead]
    differing_count: int


def fork_subject(to_origin: str) -> str:
    """The subject of the LOG_FORKED entry of the fork to ``to_origin``."""
    return f"{FORK_PREFIX}{hashlib.sha256(to_origin.encode()).hexdigest()[:16]}"


class Aside(msgspec.Struct, frozen=True):
    """A log that a start moved away, in a folder of this name; under ``CUT``, the tails that a start cut off."""

    chained_lsn: int
    """All records up to here are chained, except those held back, according to its control file or Postgres."""
    is_known: bool
    """Whether it is the WAL that Postgres knows; if not, it holds no record of ``lost.json``."""


CUT: Final = "cut"
_REMEDY: Final = "restore it, or move it away"
FORK: Final[KeptFile[Fork | None]] = KeptFile("fork.json", Fork | None, b"null", _REMEDY)
LOST: Final[KeptFile[list[LsnRange]]] = KeptFile("lost.json", list[LsnRange], b"[]", _REMEDY)
ASIDE: Final[KeptFile[dict[str, Aside]]] = KeptFile("aside.json", dict[str, Aside], b"{}", _REMEDY)
