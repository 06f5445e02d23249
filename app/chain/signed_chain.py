"""Whether a chain still is the one that a checkpoint signed.

The stored tree, which is made from the chain, is believed only where it proves the entry at the checkpoint's size to be
the one that was signed; else the root is computed from the links of the chain itself.
"""

from __future__ import annotations

from collections.abc import Mapping

from app.store import Connection
from app.store import notary as notary_store
from app.store.notary import TileCoordinates
from ledger import merkle
from ledger.merkle import tiles
from signing.checkpoint import Checkpoint

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
    size = checkpoint.size
    return tiles.has_leaf(size - 1, size, checkpoint.root, link, stored)


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
