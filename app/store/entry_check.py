"""Verifies entries when they are read, before anything of them is shown.

Each entry is checked in four ways, none of which relies on a row that can be edited together with it::

    payload_digest == SHA-256(payload)            the row by itself
    chain_link == link over its columns           the row by itself
    its form is that of an entry of a ledger      the row by itself (``ledger.chain.form``)
    leaf hash of the link == that of the tree     where the checkpoint that this node keeps beside its WAL covers it

The fourth check needs a tile of the tree. A tile is itself a row, so it is used only after a proof from it leads to the
root of the kept checkpoint. Then it is cached: hashes of leaves that a checkpoint covers never change.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from app.runtime.tasks import keep_newest
from app.store import Connection
from app.store.notary import LinkRow, TileCoordinates, read_links, read_tiles, tree_size
from ledger import merkle
from ledger.errors import ChainDamagedError, InvalidInputError, ProofError, SignatureError
from ledger.merkle import HASH_BYTES, tiles
from ledger.merkle.tiles import TILE_WIDTH
from ledger.verification.entry_check import leaves_of
from ledger.verification.verdict import Break
from signing.checkpoint import Checkpoint

TILES_MAX: Final = 4096
"""Tiles that are cached, 8 KiB each: those of a million entries. The oldest is evicted first."""

Report = Callable[[BaseException, str], object]
"""Called with damage that was found, and the part of the node that found it."""
_Leaf = tuple[int, bytes]
"""Index and hash of one leaf."""


class EntryCheck:
    """Compares entries with their digests, their links and the signed tree."""

    def __init__(
        self, kept: Callable[[str], Checkpoint | None], tree_damaged: Callable[[str], object] = lambda tenant_id: None
    ) -> None:
        """``kept`` returns the newest checkpoint of a tenant beside this node's WAL; ``tree_damaged`` is called with
        each tenant whose stored tree does not match that checkpoint."""
        self._kept = kept
        self._tree_damaged = tree_damaged
        self._tiles: OrderedDict[tuple[str, int], bytes] = OrderedDict()
        """By tenant and index, leaf hashes of a tile that are proved by a kept checkpoint."""

    async def require(self, connection: Connection, tenant_id: str, rows: Sequence[tuple[Any, ...]]) -> None:
        """Return if these rows of ``ENTRY_COLUMNS`` are as they were chained, as far as this node can verify.

        Raises:
            ChainDamagedError: names the first that is not.
        """
        if not rows:
            return
        leaves = leaves_of(tenant_id, rows)
        if isinstance(leaves, Break):
            raise not_as_chained(tenant_id, leaves)
        found = await self._differs_from_tree(connection, tenant_id, [row[0] - 1 for row in rows], leaves)
        if found is not None:
            raise not_as_chained(tenant_id, found)

    async def _differs_from_tree(
        self, connection: Connection, tenant_id: str, indexes: Sequence[int], leaves: Sequence[bytes]
    ) -> Break | None:
        unknown: dict[int, list[_Leaf]] = defaultdict(list)
        for index, leaf in zip(indexes, leaves, strict=True):
            number, at = divmod(index, TILE_WIDTH)
            if not (known := self._tiles.get((tenant_id, number), b"")[at * HASH_BYTES : (at + 1) * HASH_BYTES]):
                unknown[number].append((index, leaf))
            elif known != leaf:
                return _not_signed(index, leaf)
        if not unknown:
            return None
        try:
            kept = self._kept(tenant_id)
        except SignatureError as error:
            return Break(1, "rollback", f"the checkpoint that this node keeps cannot be read: {error}")
        if kept is None:
            return None
        wanted = {
            number: covered
            for number, of_tile in unknown.items()
            if (covered := [leaf for leaf in of_tile if leaf[0] < kept.size])
        }
        return await self._differs_from_tiles(connection, tenant_id, kept, wanted) if wanted else None

    async def _differs_from_tiles(
        self, connection: Connection, tenant_id: str, kept: Checkpoint, wanted: Mapping[int, Sequence[_Leaf]]
    ) -> Break | None:
        stored = await read_tiles(
            connection, tenant_id, {at for number in wanted for at in _tiles_for(number, kept.size)}
        )
        for number, of_tile in sorted(wanted.items()):
            if (hashes := _proved(number, kept, stored)) is None:
                if await tree_size(connection, tenant_id) < kept.size:
                    # A replica that lags behind the kept checkpoint.
                    return None
                # The tree may have reached that size since its tiles were read.
                stored |= await read_tiles(connection, tenant_id, _tiles_for(number, kept.size))
                hashes = _proved(number, kept, stored)
            if hashes is None:
                self._tree_damaged(tenant_id)
                # If the tile was edited and the log was not, the links of the log lead to the root.
                links = await read_links(connection, tenant_id, number * TILE_WIDTH + 1, TILE_WIDTH)
                hashes = _proved(number, kept, {**stored, (0, number): _leaves(links)})
            if hashes is None:
                index = of_tile[0][0]
                detail = f"the stored tree does not prove seq {index + 1} in the checkpoint of size {kept.size}"
                return Break(index + 1, "tree", f"{detail} that this node keeps", kept.root.hex())
            keep_newest(self._tiles, (tenant_id, number), hashes, TILES_MAX)
            for index, leaf in of_tile:
                at = index % TILE_WIDTH * HASH_BYTES
                if hashes[at : at + HASH_BYTES] != leaf:
                    return _not_signed(index, leaf)
            await asyncio.sleep(0)
        return None


def not_as_chained(tenant_id: str, found: Break) -> ChainDamagedError:
    """The error about an entry that is not as it was chained."""
    return ChainDamagedError(tenant_id, f"{found.kind} at seq {found.seq}, {found.detail}", found)


def _not_signed(index: int, leaf: bytes) -> Break:
    return Break(index + 1, "tree", f"the link of seq {index + 1} is not the one that was signed", None, leaf.hex())


def _leaves(links: Sequence[LinkRow]) -> bytes:
    """Leaf hashes of stored links; text that is no link gives the hash of nothing."""
    try:
        return b"".join(merkle.leaf_hashes([bytes.fromhex(link.chain_link) for link in links]))
    except (TypeError, ValueError):
        return b""


def _tiles_for(number: int, size: int) -> set[TileCoordinates]:
    """The tiles that prove leaf tile ``number`` in a tree of ``size`` leaves."""
    return tiles.inclusion_tiles(number * TILE_WIDTH, size) | {(0, number)}


def _proved(number: int, kept: Checkpoint, stored: Mapping[TileCoordinates, bytes]) -> bytes | None:
    """The leaf hashes of tile ``number`` that the checkpoint covers; None if they do not lead to its root.

    The path of the first leaf goes through hashes of all others in the tile: if it holds, all of them are right.
    """
    index = number * TILE_WIDTH
    count = min(TILE_WIDTH, kept.size - index)
    hashes = (stored.get((0, number)) or b"")[: count * HASH_BYTES]
    try:
        proof = tiles.inclusion_proof(index, kept.size, lambda level, at: stored.get((level, at)) or b"")
        merkle.verify_inclusion(index, kept.size, hashes[:HASH_BYTES], proof, kept.root)
    except (ProofError, InvalidInputError, TypeError, ValueError):
        return None
    return hashes if len(hashes) == count * HASH_BYTES else None
