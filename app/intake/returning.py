"""Records of this node's WAL that lost against those of another writer: they are appended again, each with its own HLC
and key, so that what was acknowledged at LOCAL before a takeover is not forgotten.

What is in the chain already, or was appended twice because this was interrupted, is found to be there and not chained
again. What nobody can be waiting for is left out: the starts of epochs, and that a tenant began.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import structlog

from app.intake.system_entries import SystemEntries
from app.node.state import Node
from app.pending.backlog import Pending, pending_of, record_bytes_of
from ledger.chain import record
from ledger.errors import WalFullError
from ledger.machines.events import ACTIONS, RETURNED_RECORD_TYPE, SystemAction
from ledger.positions import Lsn
from wal.format import encode_returned
from wal.lost_ends import lost_ends, mark_returned, records_in
from wal.reader import Record

ENTRIES_AT_ONCE = 500
FULL_PAUSE_S = 0.2
"""How long it waits for room in the backlog."""
_LEFT_OUT = (SystemAction.EPOCH_START, SystemAction.TENANT_CREATED)

log = structlog.get_logger()


@dataclass
class Returning:
    """Appends what was set aside in ``folder``; ``recovered`` is told each event, as those of a start are."""

    node: Node
    system: SystemEntries
    folder: Path
    recovered: Callable[[Pending], None]

    async def run(self) -> None:
        """Append all of it, and return once it is chained."""
        for path in await asyncio.to_thread(lost_ends, self.folder):
            records = (each for each in records_in(path, self.node.node_id) if ACTIONS.get(each.type) not in _LEFT_OUT)
            last_lsn, count = Lsn(0), 0
            while group := await asyncio.to_thread(_next, records):
                last_lsn = await self._append(group)
                count += len(group)
            await self.node.chained.reached(last_lsn)
            await asyncio.to_thread(mark_returned, path)
            log.warning("wal_recovery_returned", file=path.name, records=count)

    async def _append(self, group: Sequence[Record]) -> Lsn:
        events = [(each, record.decode(each.payload)) for each in group]
        tenants = {event.tenant_id for _, event in events}
        size = record_bytes_of(len(group), sum(len(each.payload) for each in group))
        while True:
            try:
                self.system.backlog.reserve(len(group) + len(tenants), size, tenants)
                break
            except WalFullError:
                await asyncio.sleep(FULL_PAUSE_S)
        try:
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
        finally:
            self.system.backlog.release(len(group) + len(tenants), size)
        self.node.chained.want(entered[-1].lsn)
        return entered[-1].lsn


def _next(records: Iterator[Record]) -> list[Record]:
    return list(islice(records, ENTRIES_AT_ONCE))
