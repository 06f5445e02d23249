"""Merkle trees of any size put into PostgreSQL without the entries below them, which proofs do not read."""

from __future__ import annotations

from hashlib import sha256
from typing import TYPE_CHECKING

from ledger.merkle.tiles import TILE_BYTES, TileTree
from signing.checkpoint import Checkpoint, sign_checkpoint

if TYPE_CHECKING:
    import asyncpg

    from signing.keys import Signer

LEAVES_A_TURN = 1 << 16


def leaf(index: int) -> bytes:
    """Leaf hash number ``index`` of every such tree."""
    return sha256(b"leaf" + index.to_bytes(8, "big")).digest()


async def insert_tree(
    superuser: asyncpg.Connection, tenant_id: str, size: int, signer: Signer, origin: str = "log.example"
) -> Checkpoint:
    """Give a new tenant a tree of ``size`` leaves, ``leaf(0)`` to ``leaf(size - 1)``, and a checkpoint of it."""
    tree = TileTree(0, {})
    partial: dict[tuple[int, int], bytes] = {}
    for first in range(0, size, LEAVES_A_TURN):
        tree.append_leaf_hashes([leaf(index) for index in range(first, min(size, first + LEAVES_A_TURN))])
        partial |= tree.changed
        tree.forget_changed()
        full = {at: hashes for at, hashes in partial.items() if len(hashes) == TILE_BYTES}
        await _copy(superuser, tenant_id, full)
        partial = {at: hashes for at, hashes in partial.items() if at not in full}
    await _copy(superuser, tenant_id, partial)
    checkpoint = Checkpoint(f"{origin}/{tenant_id}", size, tree.root())
    await superuser.execute(
        "INSERT INTO scheduler.chain_heads (tenant_id, head_seq, head_chain_link, head_hlc)"
        " VALUES ($1, $2, repeat('0', 64), '1:0:n')",
        tenant_id,
        size,
    )
    await superuser.execute(
        "INSERT INTO scheduler.merkle_head (tenant_id, tree_size, root_hash, checkpoint) VALUES ($1, $2, $3, $4)",
        tenant_id,
        size,
        checkpoint.root.hex(),
        sign_checkpoint(checkpoint, signer),
    )
    return checkpoint


async def _copy(superuser: asyncpg.Connection, tenant_id: str, tiles: dict[tuple[int, int], bytes]) -> None:
    await superuser.copy_records_to_table(
        "merkle_tile",
        schema_name="scheduler",
        columns=("tenant_id", "level", "tile_index", "hashes"),
        records=[(tenant_id, level, index, hashes) for (level, index), hashes in tiles.items()],
    )
