"""Where a chain begins: what left it with a prune, as its newest PRUNED entry that counts says.

The floor is found before the ranges are planned, and compared with it are the stored tree of what left
(:mod:`ledger.verification.left_tree`), and what is kept of the index of jobs (:mod:`ledger.verification.left_index`).
"""

from __future__ import annotations

from collections.abc import Sequence

from ledger.machines.retention import Floor, Judge, can_loosen, retention_of
from ledger.verification.entry_check import EntryRow
from ledger.verification.left_tree import ReadTiles, left_edge, left_tree
from ledger.verification.range_fold import ChainBounds
from ledger.verification.verdict import Findings


def floor_of(rows: Sequence[EntryRow], judge: Judge | None, findings: Findings) -> Floor | None:
    """What left the chain, by the newest PRUNED entry that counts of ``rows``, its entries about retention in seq
    order; reports statements that no admitted key made."""
    found = retention_of(rows, judge or (lambda *_: "not_checked"), is_strict=False)
    if any(map(can_loosen, rows)):
        findings.begin("signatures")
    for seq, action, verdict in found.doubted:
        if verdict == "not_checked":
            findings.leave_undecided("signatures")
        elif verdict == "unknown_key":
            detail = f"{action} is signed by a key that is not known, or was not valid then"
            findings.add("snapshot-signature", seq, detail, is_key_unknown=True)
        else:
            findings.add("malformed", seq, f"{action} has no statement of an admitted key about what it says")
    return found.floor


async def from_floor(
    ends: ChainBounds, read: ReadTiles | None, floor: Floor, findings: Findings, *, with_left: bool = True
) -> ChainBounds:
    """``ends`` of a chain that is verified from ``floor`` on, with the stored tree of what left, or its edge alone;
    without it if there is nothing that reads it."""
    ends = ends._replace(
        first_seq=floor.to_seq + 1,
        floor=floor,
        expected_prev=floor.chain_link,
        expected_snapshot=floor.snapshot,
        expected_frontier=[bytes.fromhex(each) for each in floor.compact_range],
    )
    if read is None:
        return ends
    left = left_tree(read, floor, ends.sizes, findings) if with_left else left_edge(read, floor, findings)
    return ends._replace(left=await left)
