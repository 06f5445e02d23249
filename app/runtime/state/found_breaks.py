"""Breaks of stored rows, kept beside the WAL until they are repaired and acknowledged.

Every part of the node that meets a break reports it here: verification, a read, a list, a proof, an export, an import,
a start, the notary, the watch. ``met_by`` names that part; for a request it is the name of the operation.

``<wal folder>/breaks.json``, replaced by temp file, fsync, rename and directory fsync::

    {"version": 1, "breaks": [{"tenant_id": "acme", "kind": "link", "seq": 17, "detail": "…", "actual": "…",
                               "found_at": "2026-11-22T02:10:00Z", "acknowledged": false, "met_by": "verification",
                               "mended_at": null, "acknowledged_by": null}]}

The alarm of a break ends once it is both repaired and acknowledged, in either order. ``mended_at`` is when a whole
verification found the chain valid again. A break that is found again before that is the same break, unless it is
acknowledged and its content has changed; a break that is found again after that is a new one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from threading import Lock
from typing import Final, Literal

import msgspec

from app.runtime.logs import log
from app.runtime.state.kept_files import KeptFile
from ledger.errors import ChainBrokenError, ChainDamagedError, KnownDamageError
from ledger.text import first_of
from ledger.verification.verdict import Break

BREAKS_MAX: Final = 1000
"""Most breaks that are kept; more are usually one fault many times, and all are in the log."""
NAMED_MAX: Final = 3
"""Breaks that a readiness check names."""
DAMAGED: Final = "damaged"
"""Kind of a break whose place is not known, at seq 0: stored rows contradict each other. Verification says where."""
VERIFICATION: Final = "verification"


class FoundBreak(msgspec.Struct):
    """One break; ``actual`` shows whether the row has changed since."""

    tenant_id: str
    kind: str
    seq: int
    detail: str
    actual: str | None
    found_at: str
    acknowledged: bool = False
    met_by: str = VERIFICATION
    mended_at: str | None = None
    acknowledged_by: str | None = None

    @property
    def is_settled(self) -> bool:
        """Whether it is repaired and acknowledged: its alarm has ended."""
        return self.acknowledged and self.mended_at is not None

    @property
    def subject(self) -> str:
        """The subject of its entries of ``_system``."""
        return f"break:{self.tenant_id}:{self.kind}:{self.seq}"


class _Breaks(msgspec.Struct):
    version: Literal[1]
    breaks: list[FoundBreak]


_FILE: Final = KeptFile[_Breaks](
    "breaks.json",
    _Breaks,
    b'{"version":1,"breaks":[]}',
    "it lists breaks that were found: restore it, or move it away and run tally verify for every tenant",
)


class FoundBreaks:
    """The breaks of one node, in memory and in its WAL folder. Any thread may report and acknowledge."""

    def __init__(
        self,
        wal_folder: Path,
        count: Callable[[str], object] = lambda met_by: None,
        on_new: Callable[[FoundBreak], object] = lambda found: None,
    ) -> None:
        """``count`` is called with ``met_by`` at each report of a break, ``on_new`` with each new break, on the
        reporting thread."""
        self._folder = wal_folder
        self._count = count
        self._on_new = on_new
        self._changing = Lock()
        """Held while the breaks in memory change; never during I/O."""
        self._storing = Lock()
        """Held while the file is replaced; taken before ``_changing``."""
        self._writer = ThreadPoolExecutor(1, "found-breaks")
        self._is_closed = False
        self._by_place = {(each.tenant_id, each.kind, each.seq): each for each in _FILE.load(wal_folder).breaks}

    def open(self, tenant_id: str | None = None) -> list[FoundBreak]:
        """Breaks that are not both repaired and acknowledged, of one tenant or of all."""
        return [
            each
            for each in tuple(self._by_place.values())
            if not each.is_settled and (tenant_id is None or each.tenant_id == tenant_id)
        ]

    def unacknowledged(self, tenant_id: str, kind: str | None = None, seq: int | None = None) -> list[FoundBreak]:
        """Unacknowledged breaks of the tenant, filtered by ``kind`` and ``seq`` if given."""
        return [
            each
            for each in self.open(tenant_id)
            if not each.acknowledged and kind in (None, each.kind) and seq in (None, each.seq)
        ]

    def of_tenant(self, tenant_id: str) -> list[Break]:
        """Breaks of the tenant that are not known to be repaired, acknowledged or not."""
        return [
            Break(each.seq, each.kind, each.detail, None, each.actual)
            for each in tuple(self._by_place.values())
            if each.tenant_id == tenant_id and each.mended_at is None
        ]

    def fault(self, tenant_id: str | None = None, *, is_unmended: bool = False) -> str | None:
        """What ``/readyz`` reports; None when there is no open break, of one tenant or of all. With ``is_unmended``
        repaired breaks do not count."""
        waiting = [each for each in self.open(tenant_id) if not is_unmended or each.mended_at is None]
        if not waiting:
            return None
        named = first_of([*map(_named, waiting)], NAMED_MAX, "; ")
        steps = {
            "to mend, restore the rows, then run tally verify --tenant T on the whole chain": any(
                each.mended_at is None for each in waiting
            ),
            "to acknowledge, run tally verify --tenant T --acknowledge REASON": not all(
                each.acknowledged for each in waiting
            ),
        }
        return f"found: {named}. What to do: {'; '.join(step for step, is_due in steps.items() if is_due)}"

    def mended(self, tenant_id: str, *, kinds: Collection[str] | None = None) -> None:
        """Mark the breaks of the tenant, or those of these ``kinds``, as repaired. Does not block on the disk."""
        with self._changing:
            repaired = [
                each
                for each in self._by_place.values()
                if each.tenant_id == tenant_id and each.mended_at is None and (kinds is None or each.kind in kinds)
            ]
            for each in repaired:
                each.mended_at = _now()
            if repaired and not self._is_closed:
                self._writer.submit(self._store_reported)

    def report(self, tenant_id: str, found: Break, met_by: str) -> None:
        """Count, log and keep a break that ``met_by`` met. Does not block on the disk, so the event loop may call it. A
        known break is counted and not logged again."""
        self._count(met_by)
        with self._changing:
            if (noted := self._note(tenant_id, found, met_by)) is None:
                return
            if not self._is_closed:
                self._writer.submit(self._store_reported)
        log.error("chain_break_found", tenant_id=tenant_id, first_break=found._asdict(), found_by=met_by)
        self._on_new(noted)

    def report_error(self, error: BaseException, met_by: str) -> None:
        """Report the break that ``error`` is about; ignores other errors, and known damage."""
        if isinstance(error, ChainDamagedError | ChainBrokenError) and not isinstance(error, KnownDamageError):
            self.report(error.tenant_id, break_of(error), met_by)

    def close(self) -> None:
        """Wait until all reports are stored; later reports are kept in memory only. Blocks on the disk."""
        with self._changing:
            self._is_closed = True
        self._writer.shutdown()

    def is_acknowledged(self, tenant_id: str, found: Break) -> bool:
        """Whether exactly this break is acknowledged and was not repaired since."""
        known = self._by_place.get((tenant_id, found.kind, found.seq))
        return known is not None and not known.is_settled and known.acknowledged and known.actual == _actual(found)

    def found(self, tenant_id: str, breaks: Iterable[Break]) -> None:
        """Keep breaks that verification found, until they are repaired and acknowledged; it logs them itself. Blocks on
        the disk if one is new; if they cannot be stored, they are kept in memory only."""
        with self._changing:
            # No break is left out because another one is.
            noted = [new for each in breaks if (new := self._note(tenant_id, each, VERIFICATION)) is not None]
        for new in noted:
            self._count(VERIFICATION)
            self._on_new(new)
        if noted:
            self._store_reported()

    def _note(self, tenant_id: str, found: Break, met_by: str) -> FoundBreak | None:
        """The break as kept; None unless it is new, or was repaired and is back."""
        place, actual = (tenant_id, found.kind, found.seq), _actual(found)
        known = self._by_place.get(place)
        if known is not None and not known.is_settled and (known.actual == actual or not known.acknowledged):
            is_back, known.mended_at = known.mended_at is not None, None
            return known if is_back else None
        if known is None and len(self._by_place) >= BREAKS_MAX and not self._forget_acknowledged():
            log.error("chain_break_not_kept", tenant_id=tenant_id, kind=found.kind, seq=found.seq)
            return None
        new = FoundBreak(tenant_id, *place[1:], found.detail, actual, _now(), met_by=met_by)
        self._by_place[place] = new
        return new

    def _forget_acknowledged(self) -> bool:
        """Evict a break to make room: first a settled one, then an acknowledged one, which verification finds again."""
        acknowledged = (place for place, each in self._by_place.items() if each.acknowledged)
        place = min(acknowledged, key=lambda place: not self._by_place[place].is_settled, default=None)
        return place is not None and self._by_place.pop(place) is not None

    def acknowledge(self, found: FoundBreak, acknowledged_by: str) -> None:
        """``_system`` records that this caller has acknowledged it. Blocks on the disk.

        Raises:
            OSError: it cannot be stored.
        """
        with self._changing:
            found.acknowledged, found.acknowledged_by = True, acknowledged_by
        self._store()

    def _store_reported(self) -> None:
        try:
            self._store()
        except OSError as error:
            log.error("chain_breaks_not_stored", error=str(error))

    def _store(self) -> None:
        with self._storing:
            with self._changing:
                content = _Breaks(1, [msgspec.structs.replace(each) for each in self._by_place.values()])
            _FILE.store(self._folder, content)


def break_of(error: ChainDamagedError | ChainBrokenError) -> Break:
    """The break that the error names; if it names none, a break of kind ``DAMAGED``."""
    reason = error.reason if isinstance(error, ChainDamagedError) else str(error)
    return error.found or Break(0, DAMAGED, reason, None, reason)


def _named(found: FoundBreak) -> str:
    where = f"rows of {found.tenant_id}" if found.kind == DAMAGED else f"at seq {found.seq} of {found.tenant_id}"
    return f"{found.kind} {where} (met by {found.met_by}): {_missing(found)}"


def _missing(found: FoundBreak) -> str:
    """What is missing to end its alarm: repair or acknowledgement."""
    if found.acknowledged:
        return f"acknowledged by {found.acknowledged_by or 'a caller'}, not mended"
    return "neither mended nor acknowledged" if found.mended_at is None else "mended, not acknowledged"


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _actual(found: Break) -> str | None:
    return None if found.actual is None else str(found.actual)
