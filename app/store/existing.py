"""Reading what a chain holds of some events: as themselves, or in a CONFLICT entry because another has their HLC.

Asked under the head's lock before events are chained that may have come into the chain by another way: imported
entries, and records of a node whose log was imported before it came back. A row beyond the head is not in the chain.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from ledger.chain.conflict import Event, conflict_hlc
from ledger.hlc import Hlc

if TYPE_CHECKING:
    from asyncpg import Record

    from app.store import Connection


class ChainedEntry(NamedTuple):
    """Place of one chained row, and what makes it this event and no other."""

    seq: int
    chain_link: str
    prev_chain_link: str | None
    event: Event


Chained = Mapping[str, ChainedEntry]
"""What stands in one chain, by HLC."""


async def find_existing(connection: Connection, tenant_id: str, events: Sequence[Event]) -> dict[str, ChainedEntry]:
    """The entries that have the HLC of one of ``events``, and the CONFLICT entries that hold one."""
    existing = await _by_hlc(connection, tenant_id, [event.t_hlc for event in events])
    clashing = [event for event in events if event.t_hlc in existing and existing[event.t_hlc].event != event]
    if clashing:
        existing |= await _by_hlc(connection, tenant_id, [conflict_hlc(event).text() for event in clashing])
    return existing


async def find_by_seq(connection: Connection, tenant_id: str, seqs: Sequence[int]) -> dict[int, ChainedEntry]:
    """Entries of the tenant by seq, those of ``seqs`` that its chain has."""
    found = map(
        _chained,
        await connection.fetch(
            """
            SELECT seq, chain_link, prev_chain_link, t_hlc, job_id, action, payload_digest
              FROM scheduler.scheduler_log
             WHERE tenant_id = $1 AND seq = ANY($2::bigint[])
               AND seq <= (SELECT head_seq FROM scheduler.chain_heads WHERE tenant_id = $1)
            """,
            tenant_id,
            seqs,
        ),
    )
    return {entry.seq: entry for entry in found}


async def highest_hlc(connection: Connection, tenant_id: str) -> tuple[int, int, str] | None:
    """The highest HLC that an entry of the chain has, None when it has none."""
    row = await connection.fetchrow(
        """
        SELECT hlc_physical, hlc_logical, hlc_node FROM scheduler.scheduler_log WHERE tenant_id = $1
         ORDER BY hlc_physical DESC, hlc_logical DESC, hlc_node DESC LIMIT 1
        """,
        tenant_id,
    )
    return None if row is None else (row["hlc_physical"], row["hlc_logical"], row["hlc_node"])


async def _by_hlc(connection: Connection, tenant_id: str, t_hlcs: Sequence[str]) -> dict[str, ChainedEntry]:
    parts = zip(*map(Hlc.parse, t_hlcs), strict=True) if t_hlcs else ((), (), ())
    found = map(
        _chained,
        await connection.fetch(
            """
            SELECT seq, chain_link, prev_chain_link, t_hlc, job_id, action, payload_digest
              FROM unnest($2::bigint[], $3::bigint[], $4::text[]) AS hlc(physical, logical, node)
              JOIN scheduler.scheduler_log l ON l.tenant_id = $1
                   AND l.hlc_physical = hlc.physical AND l.hlc_logical = hlc.logical AND l.hlc_node = hlc.node
             WHERE seq <= (SELECT head_seq FROM scheduler.chain_heads WHERE tenant_id = $1)
            """,
            tenant_id,
            *map(list, parts),
        ),
    )
    return {entry.event.t_hlc: entry for entry in found}


def _chained(row: Record) -> ChainedEntry:
    seq, chain_link, prev_chain_link, *event = row
    return ChainedEntry(seq, chain_link, prev_chain_link, Event(*event))
