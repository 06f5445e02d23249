"""Whether a chain still is the one that a checkpoint signed.

The stored tree, which is made from the chain, is believed only where it proves the entry at the checkpoint's size to be
the one that was signed; else the root is computed from the links of the chain itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from app.store import notary as notary_store
from ledger import merkle
from ledger.errors import LedgerError
from ledger.merkle import tiles
from ledger.verification.entry_check import ENTRY_COLUMNS, EntryChecker
from ledger.verification.verdict import Findings

if TYPE_CHECKING:
    from app.store import Connection
    from app.store.notary import TileCoordinates
    from ledger.verification.entry_check import EntryRow
    from signing.checkpoint import Checkpoint

_SEQ, _PREV = map(ENTRY_COLUMNS.index, ("seq", "prev_chain_link"))

LINKS_A_READ = 10_000
"""Links read at once when a root is computed from the chain."""


async def tree_agrees(connection: Connection, tenant_id: str, checkpoint: Checkpoint) -> bool:
    """Whether the stored tree proves that the entry at the checkpoint's size is the one that was signed there."""
    if checkpoint.size == 0:
        return True
    wanted = tiles.root_tiles(checkpoint.size) | tiles.inclusion_tiles(checkpoint.size - 1, checkpoint.size)
    stored = await notary_store.read_tiles(connection, tenant_id, wanted)
    link = await notary_store.read_link(connection, tenant_id, checkpoint.size)
    return is_in_tree(link, checkpoint, stored)


def is_in_tree(link: str | None, checkpoint: Checkpoint, stored: Mapping[TileCoordinates, bytes]) -> bool:
    """Whether these tiles prove ``link`` to be the last leaf of the tree that ``checkpoint`` signed."""
    leaf_index = checkpoint.size - 1
    try:
        proof = tiles.inclusion_proof(leaf_index, checkpoint.size, lambda level, index: stored[level, index])
        leaf_hash = merkle.leaf_hash(bytes.fromhex(link or ""))
        merkle.verify_inclusion(leaf_index, checkpoint.size, leaf_hash, proof, checkpoint.root)
    except (LedgerError, KeyError, ValueError, TypeError):
        return False
    return True


async def root_of_chain(connection: Connection, tenant_id: str, size: int) -> bytes | None:
    """Root over the links of the first ``size`` entries, None when one is missing or is no link."""
    frontier = merkle.Frontier()
    while frontier.size < size:
        wanted = min(LINKS_A_READ, size - frontier.size)
        rows = await notary_store.read_links(connection, tenant_id, frontier.size + 1, wanted)
        if [row.seq for row in rows] != list(range(frontier.size + 1, frontier.size + wanted + 1)):
            return None
        try:
            frontier.grow([merkle.leaf_hash(bytes.fromhex(row.chain_link)) for row in rows])
        except (ValueError, TypeError):
            return None
    return frontier.root()


def holds_together(tenant_id: str, row: EntryRow) -> bool:
    """Whether the link of a row is that of its columns."""
    findings = Findings()
    EntryChecker(tenant_id, findings, first_seq=row[_SEQ], prev_link=row[_PREV]).check([row])
    return findings.first_break() is None
