"""What must hold before the notary signs: what it signs extends what it signed, and is what it followed.

The rows and the tiles come from a database that others may have changed or turned back. Trusted are the checkpoint
beside the WAL, the tree in memory, and the links this node chained itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from app.store import notary as store
from app.store.notary import LinkRow
from ledger import merkle, tiles
from ledger.entry_check import ENTRY_COLUMNS, EntryChecker
from ledger.errors import ChainBrokenError, DatabaseWentBackError, ProofError
from ledger.verdict import Findings
from signing import checkpoint, note

if TYPE_CHECKING:
    from app.store import Connection
    from ledger.entry_check import EntryRow

_SEQ, _T_HLC, _CHAIN_LINK = map(ENTRY_COLUMNS.index, ("seq", "t_hlc", "chain_link"))


async def extended_tree(connection: Connection, tenant_id: str, size: int, kept: str | None) -> tiles.TileTree:
    """The stored tree of ``size``, proved to extend that of ``kept``, the newest checkpoint this node signed.

    Raises:
        DatabaseWentBackError: it does not.
        ProofError: a tile is missing.
    """
    anchor = None if kept is None else checkpoint.parse(note.parse(kept).text)
    wanted = {*tiles.right_edge(size), *tiles.root_tiles(anchor.size if anchor else 0)}
    stored = await store.read_tiles(connection, tenant_id, wanted)
    if anchor is not None and (size < anchor.size or tiles.root_at(anchor.size, _getter(stored)) != anchor.root):
        raise DatabaseWentBackError(
            f"the stored tree of tenant {tenant_id}, of size {size}, does not extend the one that this node "
            f"signed at size {anchor.size}: the database went back, or its tree was rewritten; run tally verify"
        )
    return tiles.TileTree(size, stored)


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
    findings = Findings()
    EntryChecker(tenant_id, findings, first_seq=tree_size + 1, prev_link=prev_link).check(rows)
    found = findings.first_break()
    if found is not None:
        raise ChainBrokenError(
            f"tenant {tenant_id} is signed no further: {found.kind} at seq {found.seq}, {found.detail}; "
            "run tally verify"
        )
    links = [LinkRow(row[_SEQ], row[_T_HLC], row[_CHAIN_LINK]) for row in rows]
    known = {link.seq: link for link in ours}
    for link in links:
        if known.get(link.seq, link) != link:
            raise ChainBrokenError(
                f"tenant {tenant_id} is signed no further: seq {link.seq} is not the entry that this node chained; "
                "run tally verify"
            )
    return links


async def proved_root(
    connection: Connection, tenant_id: str, tree: tiles.TileTree, from_seq: int, leaf_hashes: list[bytes]
) -> bytes:
    """Root of the tree up to the end of these leaves, once they are proved to be those that ``tree`` holds.

    Raises:
        ChainBrokenError: they are not; rows or tiles were changed after they were followed.
    """
    to_seq = from_seq + len(leaf_hashes) - 1
    wanted = {*tiles.right_edge(from_seq - 1), *tiles.consistency_tiles(to_seq, tree.size)}
    stored = await store.read_tiles(connection, tenant_id, wanted)
    try:
        prefix = tiles.TileTree(from_seq - 1, stored)
        prefix.append_leaf_hashes(leaf_hashes)
        root = prefix.root()
        proof = tiles.consistency_proof(to_seq, tree.size, _getter(stored))
        merkle.verify_consistency(to_seq, tree.size, root, tree.root(), proof)
    except ProofError as error:
        raise ChainBrokenError(
            f"tenant {tenant_id} is signed no further: entries {from_seq} to {to_seq} are not those that this node "
            "followed, rows or tiles were changed; run tally verify"
        ) from error
    return root


def _getter(stored: dict[tiles.TileCoordinates, bytes]) -> tiles.GetTile:
    return lambda level, index: stored.get((level, index), b"")
