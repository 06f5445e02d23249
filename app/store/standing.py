"""Reading what a chain holds of some events: as themselves, or in a CONFLICT entry because another has their HLC.

Asked under the head's lock before events are chained that may have come into the chain by another way: imported
entries, and records of a node whose log was imported before it came back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from app.store.chaining import ChainedEntry, find_entries
from ledger.chain.conflict import Event, conflict_hlc

if TYPE_CHECKING:
    from app.store import Connection

Chained = Mapping[str, ChainedEntry]
"""What stands in one chain, by HLC."""


async def find_standing(connection: Connection, tenant_id: str, events: Sequence[Event]) -> dict[str, ChainedEntry]:
    """The entries that have the HLC of one of ``events``, and the CONFLICT entries that hold one."""
    standing = await find_entries(connection, tenant_id, [event.t_hlc for event in events])
    clashing = [event for event in events if event.t_hlc in standing and standing[event.t_hlc].event != event]
    if clashing:
        hlcs = [conflict_hlc(event).text() for event in clashing]
        standing |= await find_entries(connection, tenant_id, hlcs)
    return standing


async def highest_hlc(connection: Connection, tenant_id: str) -> tuple[int, int, str] | None:
    """The highest HLC that an entry of the chain has, None when it has none."""
    row = await connection.fetchrow(
        "SELECT hlc_physical, hlc_logical, hlc_node FROM scheduler.scheduler_log WHERE tenant_id = $1"
        " ORDER BY hlc_physical DESC, hlc_logical DESC, hlc_node DESC LIMIT 1",
        tenant_id,
    )
    return None if row is None else (row[0], row[1], row[2])
