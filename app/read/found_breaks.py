"""Breaks that verification found, kept beside the WAL until somebody acknowledges them.

``<wal folder>/breaks.json``, replaced by temp file, fsync, rename and directory fsync::

    {"version": 1, "breaks": [{"tenant_id": "acme", "kind": "link", "seq": 17, "detail": "…", "actual": "…",
                               "found_at": "2026-11-22T02:10:00Z", "acknowledged": false}]}

A break that is found again is not another one; an acknowledged one that changes, at the same place, is. One that is
repaired stays until it is acknowledged: it was there.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from threading import Lock
from typing import Final, Literal

import msgspec
import structlog

from app.node.kept_file import KeptFile
from ledger.errors import NotFoundError
from ledger.verification.verdict import Break

BREAKS_MAX: Final = 1000
"""Most that are kept; more are the same fault many times, and all are in the log."""
NAMED_MAX: Final = 3
"""Breaks that a readiness check names."""

log = structlog.get_logger()


class FoundBreak(msgspec.Struct):
    """One break; ``actual`` tells whether what stands there has changed since."""

    tenant_id: str
    kind: str
    seq: int
    detail: str
    actual: str | None
    found_at: str
    acknowledged: bool = False

    @property
    def subject(self) -> str:
        """What the entry of ``_system`` that acknowledges it is about."""
        return f"break:{self.tenant_id}:{self.kind}:{self.seq}"


class _Breaks(msgspec.Struct):
    version: Literal[1]
    breaks: list[FoundBreak]


_FILE: Final = KeptFile[_Breaks](
    "breaks.json",
    _Breaks,
    b'{"version":1,"breaks":[]}',
    "it lists breaks that verification found: restore it, or move it away and run tally verify for every tenant",
)


class FoundBreaks:
    """The breaks of one node, in memory and in its WAL folder. Any thread may find and acknowledge."""

    def __init__(self, wal_folder: Path) -> None:
        self._folder = wal_folder
        self._changing = Lock()
        """Held while breaks are noted and stored: verifications end at the same time, and there is one file."""
        self._by_place = {(each.tenant_id, each.kind, each.seq): each for each in _FILE.load(wal_folder).breaks}

    def open(self, tenant_id: str | None = None) -> list[FoundBreak]:
        """Those that nobody has acknowledged, of one tenant or of all."""
        return [
            each
            for each in tuple(self._by_place.values())
            if not each.acknowledged and (tenant_id is None or each.tenant_id == tenant_id)
        ]

    def fault(self, tenant_id: str | None = None) -> str | None:
        """What ``/readyz`` says, None when there is no open break, of one tenant or of all."""
        waiting = self.open(tenant_id)
        if not waiting:
            return None
        named = ", ".join(f"{each.kind} at seq {each.seq} of {each.tenant_id}" for each in waiting[:NAMED_MAX])
        more = f" and {len(waiting) - NAMED_MAX} more" if len(waiting) > NAMED_MAX else ""
        return f"verification found: {named}{more}; tally verify says more, and --acknowledge that somebody has seen it"

    def is_acknowledged(self, tenant_id: str, found: Break) -> bool:
        """Whether somebody has seen just this break."""
        known = self._by_place.get((tenant_id, found.kind, found.seq))
        return known is not None and known.acknowledged and known.actual == _actual(found)

    def found(self, tenant_id: str, breaks: Iterable[Break]) -> None:
        """Verification found these. Blocks on the disk when there is something new.

        Raises:
            OSError: it cannot be stored; in memory they are kept all the same.
        """
        with self._changing:
            # No break is left out because another one is.
            if [each for each in breaks if self._note(tenant_id, each)]:
                self._store()

    def _note(self, tenant_id: str, found: Break) -> bool:
        """Whether it is a new one, and kept."""
        place, actual = (tenant_id, found.kind, found.seq), _actual(found)
        known = self._by_place.get(place)
        if known is not None and (known.actual == actual or not known.acknowledged):
            return False
        if known is None and len(self._by_place) >= BREAKS_MAX and not self._forget_acknowledged():
            log.error("chain_break_not_kept", tenant_id=tenant_id, kind=found.kind, seq=found.seq)
            return False
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        self._by_place[place] = FoundBreak(tenant_id, found.kind, found.seq, found.detail, actual, now)
        return True

    def _forget_acknowledged(self) -> bool:
        """Make room: whoever has seen a thousand breaks is told once more of one rather than never of the next."""
        place = next((place for place, each in self._by_place.items() if each.acknowledged), None)
        return place is not None and self._by_place.pop(place) is not None

    def wanted(self, tenant_id: str, kind: str | None, seq: int | None) -> list[FoundBreak]:
        """The open breaks of the tenant that are to be acknowledged: those of ``kind`` and ``seq`` where given.

        Raises:
            NotFoundError: there is none.
        """
        wanted = [each for each in self.open(tenant_id) if kind in (None, each.kind) and seq in (None, each.seq)]
        if not wanted:
            raise NotFoundError(f"this node has found no such break of tenant {tenant_id} that is not acknowledged yet")
        return wanted

    def acknowledge(self, found: FoundBreak) -> None:
        """``_system`` says that somebody has seen it. Blocks on the disk.

        Raises:
            OSError: it cannot be stored.
        """
        with self._changing:
            found.acknowledged = True
            self._store()

    def _store(self) -> None:
        _FILE.store(self._folder, _Breaks(1, list(self._by_place.values())))


def _actual(found: Break) -> str | None:
    return None if found.actual is None else str(found.actual)
