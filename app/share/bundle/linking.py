"""Batches of a merge, decided and linked in memory before they are stored: onto the heads that are expected.

ready.heads == the locked heads    then ``ready`` is what is to be stored: an append to a chain moves its head
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from app.store.appended import AppendedEntries, ChainAppender, ChainPosition, head_of
from app.store.chain_reads import find_existing, highest_hlc
from app.store.chaining import ChainHead
from ledger.bundle.merge import Decided, Incoming, chained_as, check_beginnings, decide, events_to_find
from ledger.chain import Linker
from ledger.chain.conflict import Event
from ledger.facts.events import SystemAction
from ledger.hlc import Hlc

if TYPE_CHECKING:
    from app.store import Connection


@dataclass(frozen=True, slots=True)
class ReadyBatch:
    """A batch that was decided and linked onto ``heads``, which are those of all tenants of the import."""

    entries: Sequence[Incoming]
    heads: Mapping[str, ChainHead]
    existing: Mapping[str, dict[str, Event]]
    """By tenant of the batch what stands at the HLCs of its entries, those that it places included."""
    decided: Decided
    appended: AppendedEntries

    @property
    def heads_after(self) -> dict[str, ChainHead]:
        """The heads that the batch leaves."""
        return {**self.heads, **{tenant: head_of(links) for tenant, links in self.appended.links.items()}}


async def decide_and_link(
    connection: Connection,
    entries: Sequence[Incoming],
    heads: Mapping[str, ChainHead],
    linkers: dict[str, Linker],
    before: ReadyBatch | None = None,
) -> ReadyBatch:
    """What becomes of ``entries`` on chains that end with ``heads``. What ``before`` places need not be stored yet.

    Raises:
        InvalidInputError: the beginning of a chain of an older link version cannot be kept as it is.
    """
    existing = await read_existing(connection, entries)
    # Entries decide about one another only where they are of one time.
    if before is not None and before.entries[-1].key[:3] == entries[0].key[:3]:
        for tenant_id, here in existing.items():
            earlier = before.existing.get(tenant_id, {})
            here |= {hlc: event for hlc, event in earlier.items() if hlc not in here}
    decided, appended = decide(entries, existing), AppendedEntries()
    ends = {tenant_id: (heads[tenant_id].seq, heads[tenant_id].chain_link) for tenant_id in existing}
    check_beginnings(decided.placed, ends)
    batch_heads = {tenant_id: heads[tenant_id] for tenant_id in existing}
    await asyncio.to_thread(_chain, decided, ChainAppender(appended, batch_heads, linkers))
    return ReadyBatch(entries, heads, existing, decided, appended)


async def read_existing(connection: Connection, batch: Sequence[Incoming]) -> dict[str, dict[str, Event]]:
    """By tenant what stands in its chain at the HLCs that decide about ``batch``: nothing, where all are behind the
    highest that it has."""
    lowest: dict[str, tuple[int, int, str]] = {}
    for entry in batch:
        lowest.setdefault(entry.tenant_id, entry.key[1:4])
    existing: dict[str, dict[str, Event]] = {}
    if batch[0].key.rank and SystemAction.CONFLICT.value not in {entry.action for entry in batch}:
        for tenant in lowest:
            highest = await highest_hlc(connection, tenant)
            if highest is None or highest < lowest[tenant]:
                existing[tenant] = {}
    among = [entry for entry in batch if entry.tenant_id not in existing]
    for tenant, events in events_to_find(among).items():
        found = await find_existing(connection, tenant, events)
        existing[tenant] = {t_hlc: entry.event for t_hlc, entry in found.items()}
    return existing


def _chain(decided: Decided, appender: ChainAppender) -> None:
    """Chain what was decided to be placed."""
    for entry, kept_digest in decided.placed:
        if entry.key.rank == 0:
            place, hlc = ChainPosition(entry.seq, entry.chain_link, entry.prev_chain_link), Hlc.parse(entry.t_hlc)
            payload = entry.payload.encode()
            appender.keep(entry.tenant_id, hlc, entry.job_id, entry.action, entry.link_version, place, payload)
        else:
            hlc, action, payload = chained_as(entry, kept_digest)
            appender.append(entry.tenant_id, hlc, entry.job_id, action, payload, entry.origin)
    appender.finish()
