"""What is stored, held against what was signed: whether a chain still is the one that a checkpoint signed; and what
must hold before the notary signs more of it: what it signs extends what it signed, and is what it followed.

The rows and the tiles come from a database that others may have changed or turned back. Trusted are the checkpoint
beside the WAL, the tree in memory, and the links this node chained itself. The stored tree, which is made from the
chain, is believed only where it proves the entry at the checkpoint's size to be the one that was signed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import structlog

from app.store import Connection
from app.store import notary as store
from app.store.notary import GrownTree, LinkRow, LockedTree, TileCoordinates
from ledger import merkle
from ledger.errors import ChainBrokenError, LedgerError, ProofError, StoredTreeBehindError, StoredTreeError
from ledger.merkle import tiles
from ledger.merkle.tiles import TileTree
from ledger.verification.entry_check import ENTRY_COLUMNS, EntryRow, first_break_in
from ledger.verification.verdict import Break
from signing.checkpoint import Checkpoint
from signing.checkpoint import read as read_checkpoint

LINKS_A_READ = 10_000
"""Links read at once when a root is computed from the chain."""
ENTRIES_A_READ = 1000
"""Entries read back at once when a tree is made again."""

log = structlog.get_logger()

_SEQ, _T_HLC, _CHAIN_LINK = map(ENTRY_COLUMNS.index, ("seq", "t_hlc", "chain_link"))


async def tree_agrees(connection: Connection, tenant_id: str, checkpoint: Checkpoint) -> bool:
    """Whether the stored tree proves that the entry at the checkpoint's size is the one that was signed there."""
    if checkpoint.size == 0:
        return True
    wanted = tiles.root_tiles(checkpoint.size) | tiles.inclusion_tiles(checkpoint.size - 1, checkpoint.size)
    stored = await store.read_tiles(connection, tenant_id, wanted)
    link = await store.read_link(connection, tenant_id, checkpoint.size)
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
        rows = await store.read_links(connection, tenant_id, frontier.size + 1, wanted)
        if [row.seq for row in rows] != list(range(frontier.size + 1, frontier.size + wanted + 1)):
            return None
        try:
            frontier.grow(merkle.leaf_hashes([bytes.fromhex(row.chain_link) for row in rows]))
        except (ValueError, TypeError):
            return None
    return frontier.root()


async def extended_tree(connection: Connection, stored: LockedTree, kept: str | None) -> TileTree:
    """The stored tree, proved to extend that of ``kept``, the newest checkpoint this node signed.

    Raises:
        StoredTreeBehindError: it is shorter.
        StoredTreeError: it does not, or cannot be read.
    """
    size, anchor = stored.tree_size, _anchor(kept)
    if not isinstance(size, int):  # whoever administers the database can drop the NOT NULL
        raise StoredTreeError(f"the stored tree of tenant {stored.tenant_id} has no size")
    if anchor is not None and size < anchor.size:
        raise StoredTreeBehindError(
            f"the stored tree of tenant {stored.tenant_id} has size {size}, this node signed one of size {anchor.size}"
        )
    try:
        wanted = {*tiles.right_edge(size), *tiles.root_tiles(size), *tiles.root_tiles(anchor.size if anchor else 0)}
        found = await store.read_tiles(connection, stored.tenant_id, wanted)
        if anchor is not None and tiles.root_at(anchor.size, _getter(found)) != anchor.root:
            raise ProofError(f"its first {anchor.size} leaves are not those that this node signed")
        tree = TileTree(size, found)
        if tree.root().hex() != stored.root_hash:
            raise ProofError(f"its root is {stored.root_hash}, that of its tiles {tree.root().hex()}")
    except (LedgerError, TypeError, ValueError) as error:
        raise StoredTreeError(f"the stored tree of tenant {stored.tenant_id} is damaged: {error}") from error
    return tree


async def tree_of_chain(connection: Connection, tenant_id: str, kept: str | None) -> TileTree:
    """The tree of the entries that ``kept`` covers, none without one, made again from the chain: every row checked,
    every tile stored. It holds nothing that the chain does not say.

    Raises:
        ChainBrokenError: the chain does not make the tree that was signed; the transaction MUST be rolled back.
    """
    tree, prev_link, anchor = TileTree(0, {}), None, _anchor(kept)
    while anchor is not None and tree.size < anchor.size:
        wanted = min(ENTRIES_A_READ, anchor.size - tree.size)
        rows = await store.read_entries(connection, tenant_id, tree.size + 1, wanted)
        if not rows:
            why = f"its chain ends at seq {tree.size}, but this node signed it up to {anchor.size}"
            raise not_signed(tenant_id, why)
        links = checked_links(tenant_id, tree.size, prev_link, rows, ())
        tree.append_leaf_hashes(merkle.leaf_hashes([bytes.fromhex(link.chain_link) for link in links]))
        prev_link = links[-1].chain_link
        await _store(connection, GrownTree(tenant_id, tree, kept))
        tree.forget_changed()
    if anchor is None:
        await _store(connection, GrownTree(tenant_id, tree, None))
    elif tree.root() != anchor.root:
        raise not_signed(tenant_id, f"its first {anchor.size} entries are not those that this node signed")
    return tree


async def _store(connection: Connection, tree: GrownTree) -> None:
    for tenant_id in await store.store_trees(connection, [tree]):
        raise not_stored(tenant_id, "its Merkle tree")


def not_signed(
    tenant_id: str, why: str, what_to_do: str = "; run tally verify", found: Break | None = None
) -> ChainBrokenError:
    """The error when a tenant is signed no further, because of ``found`` where the place is known."""
    return ChainBrokenError(tenant_id, f"tenant {tenant_id} is signed no further: {why}{what_to_do}", found)


def not_stored(tenant_id: str, what: str) -> ChainBrokenError:
    """The error when PostgreSQL did not store ``what`` of a tenant, and said nothing."""
    why = f"PostgreSQL did not store {what}, without an error: a trigger or a rule drops rows"
    return not_signed(tenant_id, why, ". Remove what migrations/sql does not have")


def _anchor(kept: str | None) -> Checkpoint | None:
    return None if kept is None else read_checkpoint(kept)


def checked_links(
    tenant_id: str, tree_size: int, prev_link: str | None, rows: Sequence[EntryRow], ours: Sequence[LinkRow]
) -> list[LinkRow]:
    """The links of ``rows``, by which a tree of ``tree_size`` is to grow, once every row holds together and follows
    the one before it, the first one ``prev_link``, and those that this node chained, ``ours``, are as it chained them.

    Raises:
        ChainBrokenError: names the first row that does not.
    """
    if not rows:
        return []
    found = first_break_in(tenant_id, rows, first_seq=tree_size + 1, prev_link=prev_link)
    if found is not None:
        raise not_signed(tenant_id, f"{found.kind} at seq {found.seq}, {found.detail}", found=found)
    links = [LinkRow(row[_SEQ], row[_T_HLC], row[_CHAIN_LINK]) for row in rows]
    known = {link.seq: link for link in ours}
    for link in links:
        if known.get(link.seq, link) != link:
            raise not_signed(tenant_id, f"seq {link.seq} is not the entry that this node chained")
    return links


def unforeseen(tenant_id: str, error: Exception) -> ChainBrokenError:
    """The fault of a tenant whose stored rows broke what was to follow or sign them in a way that nobody thought of;
    said in the log, with the trace."""
    log.error("task_failed", tenant_id=tenant_id, exc_info=error)
    return not_signed(tenant_id, f"what is stored of it cannot be followed, {error!r}")


def leaf_hashes_of(tenant_id: str, links: Sequence[LinkRow], entry_count: int) -> list[bytes]:
    """Leaf hashes of ``links``, of which there must be ``entry_count``.

    Raises:
        ChainBrokenError: there are fewer, or one is no link.
    """
    try:
        leaf_hashes = merkle.leaf_hashes([bytes.fromhex(row.chain_link) for row in links])
    except (ValueError, TypeError):
        leaf_hashes = []
    if len(leaf_hashes) != entry_count:
        raise not_signed(tenant_id, "entries are missing or have no link")
    return leaf_hashes


async def proved_root(
    connection: Connection, tenant_id: str, tree: TileTree, from_seq: int, leaf_hashes: list[bytes]
) -> bytes:
    """Root of the tree up to the end of these leaves, once they are proved to be those that ``tree`` holds.

    Raises:
        ChainBrokenError: they are not; rows or tiles were changed after they were followed.
    """
    to_seq = from_seq + len(leaf_hashes) - 1
    wanted = {*tiles.right_edge(from_seq - 1), *tiles.consistency_tiles(to_seq, tree.size)}
    stored = await store.read_tiles(connection, tenant_id, wanted)
    try:
        prefix = TileTree(from_seq - 1, stored)
        prefix.append_leaf_hashes(leaf_hashes)
        root = prefix.root()
        proof = tiles.consistency_proof(to_seq, tree.size, _getter(stored))
        merkle.verify_consistency(to_seq, tree.size, root, tree.root(), proof)
    except ProofError as error:
        why = f"entries {from_seq} to {to_seq} are not those that this node followed, rows or tiles were changed"
        raise not_signed(tenant_id, why) from error
    return root


def _getter(stored: dict[tiles.TileCoordinates, bytes]) -> tiles.GetTile:
    return lambda level, index: stored.get((level, index), b"")
