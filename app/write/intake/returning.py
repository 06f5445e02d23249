"""Records of this node's WAL that were set aside: the end of a log that lost against another writer's, what a start cut
off behind damage, a whole log that a start gave up. They are appended again, each with its own HLC and key, so that
answers at LOCAL from before are not forgotten; what cannot be read of them is reported, to be recorded as lost.

What is in the chain already is looked up by HLC and digest and left out. What was appended twice because this was
interrupted, the appender finds in the chain. Starts of epochs and beginnings of tenants are left out: nobody waits for
them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import structlog

from app.runtime.postgres import DATABASE_FAULTS
from app.runtime.state.losses import CUT, Aside, LsnRange, merged, without
from app.runtime.state.node import Node
from app.write.intake.system_entries import SystemEntries
from app.write.pending.backlog import Pending, pending_of, record_bytes_of
from ledger.chain import record
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
"""How long it waits for room in the backlog, or for a database that does not answer."""
_Name = tuple[str, Hlc, bytes]
_LEFT_OUT = (SystemAction.EPOCH_START, SystemAction.TENANT_CREATED)

log = structlog.get_logger()


@dataclass
class Returned:
    """What became of all that was set aside."""

    ends: list[Path] = field(default_factory=list)
    """Ends that were cut, which are read now."""
    appended: int = 0
    found: list[LsnRange] = field(default_factory=list)
    """What is sound in the log that Postgres knows: it is in the chain, or appended again."""
    gaps: list[Gap] = field(default_factory=list)
    """What is damaged or missing, and neither chained nor in the log that goes on."""
    has_known: bool = False
    """Whether any of it is of the log that Postgres knows."""


@dataclass
class Returning:
    """Appends what was set aside in ``folder``; ``recovered`` is told each event, as those of a start are.

    ``asides`` says what is known of each log set aside; ``kept`` and ``kept_lsn`` are history and end of the log that
    goes on. ``absent(events)`` gives those that the chain does not hold; it raises what a database that is away does.
    ``waiting`` are the events of the WAL that were not chained when the node started.
    """

    node: Node
    system: SystemEntries
    folder: Path
    recovered: Callable[[Pending], None]
    asides: Mapping[str, Aside]
    kept: History
    kept_lsn: Lsn
    absent: Callable[[Sequence[Pending]], Awaitable[list[Pending]]]
    waiting: Sequence[Pending]

    async def run(self) -> Returned:
        """Append all of it, and return once it is chained."""
        returned = Returned(ends=await asyncio.to_thread(lost_ends, self.folder))
        if not (returned.ends or self.asides.keys() - {CUT}):
            return returned
        in_backlog = {(each.tenant_id, each.hlc, each.payload) for each in self.waiting}
        cut = self.asides.get(CUT, Aside(0, is_known=False))
        sources = [(name, self._below(name), aside) for name, aside in self.asides.items() if name != CUT]
        sources += [(path.name, records_in(path, self.node.node_id), cut) for path in returned.ends]
        for source in sources:
            await self._bring_back(*source, in_backlog, returned)
        returned.found = merged(returned.found)
        return returned

    def _below(self, name: str) -> Iterator[Record | Gap]:
        """The records of a log that was set aside; and, behind the last, what its control file knew to be durable."""
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
            wanted = [each for each in records if ACTIONS.get(each.type) not in _LEFT_OUT]
            absent = await self._absent(wanted, in_backlog)
            if absent:
                last_lsn = await self._append(absent)
                appended += len(absent)
        await self.node.chained.reached(last_lsn)
        returned.appended += appended
        log.warning("wal_recovery_returned", file=name, records=read, appended=appended, gaps=len(returned.gaps) - gaps)

    def _lost_of(self, gaps: Iterator[Gap], aside: Aside) -> Iterator[Gap]:
        """What of these gaps is in no chain and not in the log that goes on."""
        for gap in gaps:
            if not gap.is_proved:
                continue
            held = [(0, aside.chained_lsn)]
            for at, start in enumerate(self.kept):
                if start.epoch == gap.epoch:
                    later = self.kept[at + 1 :]
                    held.append((start.first_lsn, min([self.kept_lsn, *(each.first_lsn - 1 for each in later)])))
            for first_lsn, last_lsn in without([(gap.first_lsn, gap.last_lsn)], held):
                payloads = tuple(each for each in gap.payloads if first_lsn <= each[0] <= last_lsn)
                yield gap._replace(first_lsn=Lsn(first_lsn), last_lsn=Lsn(last_lsn), payloads=payloads)

    async def _absent(self, records: Sequence[Record], in_backlog: AbstractSet[_Name]) -> list[Record]:
        """Those that are neither in the chain nor waiting to be chained."""
        events = [
            pending_of(each.lsn, each.epoch, each.hlc, each.type, record.decode(each.payload)) for each in records
        ]
        unknown = [each for each in events if (each.tenant_id, each.hlc, each.payload) not in in_backlog]
        while unknown:
            try:
                absent = {id(each) for each in await self.absent(unknown)}
                return [each for each, event in zip(records, events, strict=True) if id(event) in absent]
            except (DatabaseUnavailableError, *DATABASE_FAULTS):
                await asyncio.sleep(PAUSE_S)
        return []

    async def _append(self, group: Sequence[Record]) -> Lsn:
        """Append these again, once there is room; from there on without an await."""
        events = [(each, record.decode(each.payload)) for each in group]
        tenants = {event.tenant_id for _, event in events}
        size = record_bytes_of(len(group), sum(len(each.payload) for each in group))
        while True:
            try:
                self.system.backlog.check(len(group) + len(tenants), size, tenants)
                break
            except WalFullError:
                await asyncio.sleep(PAUSE_S)
        for tenant_id in tenants:
            self.system.begin_in_queue(tenant_id)
        node, first_lsn = self.node, self.system.wal.next_lsn
        self.system.wal.append_all(
            [
                (
                    node.clock.tick(node.wall.now_ms()),
                    RETURNED_RECORD_TYPE,
                    encode_returned(each.hlc, each.type, each.payload),
                )
                for each in group
            ]
        )
        entered = [
            pending_of(Lsn(first_lsn + at), node.epoch, each.hlc, each.type, event)
            for at, (each, event) in enumerate(events)
        ]
        self.system.backlog.add(entered)
        for pending in entered:
            self.recovered(pending)
        self.node.chained.want(entered[-1].lsn)
        return entered[-1].lsn
