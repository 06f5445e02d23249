"""Appends quarantined records of this node's WAL again.

Quarantined are the end of a log that lost against another writer's, records after damage that a start cut off, and a
whole log that a start discarded. Each record is appended with its own HLC and key, so that no event acknowledged at
LOCAL is lost. Records that cannot be read are reported, to be recorded as lost.

Records already in the chain are found by HLC and digest and left out. If an interruption makes this append a record
twice, the appender finds it in the chain. Epoch starts and new-tenant records are left out: no caller waits for them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import msgspec

from app.runtime.logs import log
from app.runtime.postgres import DATABASE_FAULTS
from app.runtime.state.losses import CUT, Aside, LsnRange, merged, without
from app.runtime.state.node import Node
from app.store.reading import Pool, reading, run_in
from app.write.chain.view import unchained
from app.write.intake.system_entries import SystemEntries, record_of
from app.write.pending.backlog import Pending, pending_of, record_bytes_of
from ledger.errors import DatabaseUnavailableError, WalError, WalFullError
from ledger.facts.events import ACTIONS, RETURNED_RECORD_TYPE, SystemAction
from ledger.hlc import Hlc
from ledger.positions import Lsn
from wal import control as wal_control
from wal.control import History
from wal.format import encode_returned
from wal.reader import Record
from wal.truncation import Gap, lost_ends, records_below, records_in

ENTRIES_AT_ONCE = 500
PAUSE_S = 0.2
"""Pause before it tries again, while the backlog is full or the database does not answer."""
_Name = tuple[str, Hlc, bytes]
_LEFT_OUT = (SystemAction.EPOCH_START, SystemAction.TENANT_CREATED)


@dataclass
class Returned:
    """The result for all quarantined records."""

    ends: list[Path] = field(default_factory=list)
    """Quarantined ends of logs, which are read now."""
    appended: int = 0
    found: list[LsnRange] = field(default_factory=list)
    """Sound records of the log that Postgres knows: they are in the chain, or appended again."""
    gaps: list[Gap] = field(default_factory=list)
    """Damaged or missing records that are neither chained nor in the current log."""
    has_known: bool = False
    """Whether any quarantined record is of the log that Postgres knows."""


@dataclass
class Returning:
    """Appends the quarantined records of ``folder``; ``recovered`` gets each event, as it gets those of a start.

    ``asides`` holds the known facts of each quarantined log. ``kept`` and ``kept_lsn`` are history and end of the
    current log. ``waiting`` are the events of the WAL that were not chained when the node started.
    """

    node: Node
    system: SystemEntries
    folder: Path
    recovered: Callable[[Pending], None]
    asides: Mapping[str, Aside]
    kept: History
    kept_lsn: Lsn
    pool: Pool
    waiting: Sequence[Pending]

    async def run(self) -> Returned:
        """Append all of it, and return once it is chained."""
        returned = Returned(ends=await asyncio.to_thread(lost_ends, self.folder))
        if not (returned.ends or self.asides.keys() - {CUT}):
            return returned
        in_backlog = {(each.tenant_id, each.hlc, each.payload) for each in self.waiting}
        cut = self.asides.get(CUT, Aside(0, is_known=False))
        for source in (
            *((name, self._below(name), aside) for name, aside in self.asides.items() if name != CUT),
            *((path.name, records_in(path, self.node.node_id), cut) for path in returned.ends),
        ):
            await self._bring_back(*source, in_backlog, returned)
        returned.found = merged(returned.found)
        return returned

    def _below(self, name: str) -> Iterator[Record | Gap]:
        """The records and gaps of a quarantined log; the last gap reaches to the durable LSN of its control file."""
        last_lsn = Lsn(0)
        for each in records_below(self.folder / name, self.node.node_id):
            if isinstance(each, Gap) and not each.is_proved:
                continue
            last_lsn = each.lsn if isinstance(each, Record) else each.last_lsn
            yield each
        try:
            control = wal_control.load(self.folder / name)
        except WalError:
            return
        if control is not None and control.durable_lsn > last_lsn:
            yield Gap(Lsn(last_lsn + 1), control.durable_lsn, control.epoch, (), is_proved=True)

    async def _bring_back(
        self,
        name: str,
        found: Iterator[Record | Gap],
        aside: Aside,
        in_backlog: AbstractSet[_Name],
        returned: Returned,
    ) -> None:
        last_lsn, appended, read, gaps = Lsn(0), 0, 0, len(returned.gaps)
        while group := await asyncio.to_thread(list, islice(found, ENTRIES_AT_ONCE)):
            records = [each for each in group if isinstance(each, Record)]
            read += len(records)
            if aside.is_known:
                returned.has_known = True
                returned.found += merged((each.lsn, each.lsn) for each in records)
            returned.gaps += self._lost_of((each for each in group if isinstance(each, Gap)), aside)
            wanted = [pending_of(each) for each in records if ACTIONS.get(each.type) not in _LEFT_OUT]
            unknown = [each for each in wanted if (each.tenant_id, each.hlc, each.payload) not in in_backlog]
            if absent := await self._absent(unknown):
                last_lsn = await self._append(absent)
                appended += len(absent)
        await self.node.chained.reached(last_lsn)
        returned.appended += appended
        log.warning("wal_recovery_returned", file=name, records=read, appended=appended, gaps=len(returned.gaps) - gaps)

    def _lost_of(self, gaps: Iterator[Gap], aside: Aside) -> Iterator[Gap]:
        """The parts of these gaps that are neither chained nor in the current log."""
        for gap in gaps:
            if not gap.is_proved:
                continue
            held = [(0, aside.chained_lsn)]
            for at, start in enumerate(self.kept):
                if start.epoch == gap.epoch:
                    ends_lsn = min([self.kept_lsn, *(each.first_lsn - 1 for each in self.kept[at + 1 :])])
                    held.append((start.first_lsn, ends_lsn))
            for first_lsn, last_lsn in without([(gap.first_lsn, gap.last_lsn)], held):
                yield gap._replace(
                    first_lsn=Lsn(first_lsn),
                    last_lsn=Lsn(last_lsn),
                    payloads=tuple(each for each in gap.payloads if first_lsn <= each[0] <= last_lsn),
                )

    async def _absent(self, events: Sequence[Pending]) -> list[Pending]:
        """The events that are not in the chain."""
        while events:
            try:
                return await run_in(reading(self.pool), unchained, events)
            except (DatabaseUnavailableError, *DATABASE_FAULTS):
                await asyncio.sleep(PAUSE_S)
        return []

    async def _append(self, events: Sequence[Pending]) -> Lsn:
        """Append these again once there is room; after the wait, without an await."""
        tenants = {each.tenant_id for each in events}
        size = record_bytes_of(len(events), sum(len(each.payload) for each in events))
        while True:
            try:
                self.system.backlog.check(len(events) + len(tenants), size, tenants)
                break
            except WalFullError:
                await asyncio.sleep(PAUSE_S)
        for tenant_id in tenants:
            self.system.begin_in_queue(tenant_id)
        node, first_lsn = self.node, self.system.wal.next_lsn
        self.system.wal.append_all(
            [
                (node.clock.tick(node.wall.now_ms()), RETURNED_RECORD_TYPE, encode_returned(*record_of(each)))
                for each in events
            ]
        )
        entered = [
            msgspec.structs.replace(each, lsn=Lsn(first_lsn + at), epoch=node.epoch) for at, each in enumerate(events)
        ]
        self.system.backlog.add(entered)
        for pending in entered:
            self.recovered(pending)
        self.node.chained.want(entered[-1].lsn)
        return entered[-1].lsn
