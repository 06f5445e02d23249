"""Checks the stored Merkle tree, given checkpoints and the head against the entries.

The tree is computed from the chain links, and compared with the stored root and, if tiles are stored, with every tile.
The stored tree may lag behind the chain; an empty one is not checked. It is never ahead, and its size is never below 0.
A break is reported at the first seq under the first hash that differs (``tree``), for a checkpoint at its size
(``rollback``). A difference is left undecided if the chain breaks at a lower seq.

A tree of ``size`` leaves has the full tiles that fit into it and one partial tile a level, none where the width is 0::

    leaves under a full tile    256 ** (level + 1)
    width of the partial tile   (size >> 8 * level) mod 256
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from ledger.merkle import EMPTY_ROOT, HASH_BYTES
from ledger.merkle.tiles import TILE_BYTES, TILE_HEIGHT, TILE_WIDTH
from ledger.verification.verdict import ASPECT_OF_KIND, Anchor, Break, Findings, Head, is_number

TILES_AT_ONCE = 32
"""Tiles read at a time: a quarter of a megabyte."""


def tile_break(level: int, index: int, computed: bytes, stored: Any) -> Break | None:
    """The break of a stored tile, at the first seq under the first hash that differs; None if the tile is right."""
    stored = stored if isinstance(stored, bytes) else b""
    if stored == computed:
        return None
    at = next(
        offset
        for offset in range(0, TILE_BYTES + HASH_BYTES, HASH_BYTES)
        if stored[offset : offset + HASH_BYTES] != computed[offset : offset + HASH_BYTES]
    )
    leaves_before = (index * TILE_WIDTH + at // HASH_BYTES) << (level * TILE_HEIGHT)
    detail = f"tile {index} of level {level} of the stored tree is missing or is not that of the entries"
    expected, actual = computed[at : at + HASH_BYTES], stored[at : at + HASH_BYTES]
    return Break(leaves_before + 1, "tree", detail, expected.hex() or None, actual.hex() or None)


_EMPTY: Final = EMPTY_ROOT.hex()


class TreeHead(NamedTuple):
    """A kept tree head: ``root`` is 32 raw bytes, ``source`` names the keeper, such as ``node``.

    Only one from outside makes the verdict on checkpoints ``ok``. One that ``is_own``, kept with the entries, counts
    against them when they differ, and says nothing for them: whoever changed those could change it as well.
    """

    size: int
    root: bytes
    source: str
    fault: str | None = None
    """The reason if it cannot be opened; size and root are then meaningless."""
    is_own: bool = False

    @property
    def holder(self) -> str:
        """The keeper, in words."""
        return self.source or "the ledger itself"


class StoredTree(NamedTuple):
    """The tenant's row of the stored tree; ``root`` is hex."""

    size: int
    root: str


def compare_heads(
    findings: Findings,
    stored: StoredTree | None,
    checkpoints: Sequence[TreeHead],
    anchors: Sequence[Anchor],
    roots: Mapping[int, bytes],
    last_seq: int,
) -> tuple[list[str], tuple[Anchor, ...]]:
    """Compare the given tree heads with ``roots``: by size, the roots of the entries up to the first missing one.

    ``last_seq`` is the seq of the last entry. Returns the named sources of the checkpoints that were compared, in the
    order they were given, and every anchor with its outcome.
    """
    _compare_stored(findings, stored, roots, last_seq)
    compared = {head.source for head in checkpoints if _is_compared(findings, head, roots, last_seq)}
    sources = [source for source in dict.fromkeys(head.source for head in checkpoints) if source and source in compared]
    anchored = [_compared(findings, each, roots, last_seq) for each in anchors]
    return sources, tuple(sorted(anchored, key=lambda each: (each.kind, each.by, each.size)))


def _compare_stored(findings: Findings, stored: StoredTree | None, roots: Mapping[int, bytes], last_seq: int) -> None:
    root = None if stored is None else roots.get(stored.size)
    if stored is not None and stored.size == 0 and stored.root != _EMPTY:
        findings.add(
            "tree", 1, "the stored root is not that of a tree without entries", expected=_EMPTY, actual=stored.root
        )
    if root is None:
        if last_seq > 0:
            findings.leave_undecided("tree")
    elif stored is not None and stored.root != root.hex():
        detail = "the stored root is not that of the entries"
        report(findings, Break(stored.size, "tree", detail, root.hex(), stored.root))


def _is_compared(findings: Findings, head: TreeHead, roots: Mapping[int, bytes], last_seq: int) -> bool:
    """Compare a checkpoint; returns whether it could be compared."""
    root = roots.get(head.size)
    is_compared = head.fault is not None or root is not None or head.size > last_seq
    if is_compared and not head.is_own:
        findings.begin("checkpoint")
    if head.fault is not None:
        findings.add("rollback", max(last_seq, 1), f"the checkpoint held by {head.holder} does not open: {head.fault}")
    if root is not None:
        if head.root != root:
            detail = f"the first {head.size} entries are not those of the checkpoint held by {head.holder}"
            report(findings, Break(head.size, "rollback", detail, head.root.hex() or None, root.hex()))
    elif head.size > last_seq:
        findings.add(
            "rollback",
            last_seq + 1,
            f"the checkpoint held by {head.holder} covers {head.size} entries, there are {last_seq}",
            expected=head.size,
            actual=last_seq,
        )
    elif head.size > 0 and not head.is_own:
        findings.leave_undecided("checkpoint")
    return is_compared


def _compared(findings: Findings, anchor: Anchor, roots: Mapping[int, bytes], last_seq: int) -> Anchor:
    """``anchor`` with the outcome of its comparison with the entries."""
    root, name = roots.get(anchor.size), f"the {anchor.kind} anchor by {anchor.by}"
    if anchor.status != "ok" or root == anchor.root:
        return anchor
    if root is None and anchor.size <= last_seq:
        return anchor._replace(status="not_checked", detail="the entries up to there were not all read")
    if root is not None and findings.chain_broken_by(anchor.size):
        return anchor._replace(status="not_checked", detail="the chain breaks before")
    if root is None:
        detail = f"{name} covers {anchor.size} entries, there are {last_seq}"
        findings.add("rollback", last_seq + 1, detail, expected=anchor.size, actual=last_seq)
    else:
        detail = f"the first {anchor.size} entries are not those of {name}"
        findings.add("rollback", anchor.size, detail, expected=anchor.root.hex(), actual=root.hex())
    return anchor._replace(status="broken", detail=detail)


def report(findings: Findings, found: Break) -> None:
    """Report a break, or leave it undecided if the chain breaks at a lower seq."""
    if findings.chain_broken_by(found.seq):
        findings.leave_undecided(ASPECT_OF_KIND[found.kind])
    else:
        findings.add(found.kind, found.seq, *found[2:])


def readable_ends(
    head: Head | None, tree: StoredTree | None, last: Head, findings: Findings
) -> tuple[Head | None, StoredTree | None]:
    """Head and stored tree; None, and a break, for one whose seq or size is invalid."""
    if head is not None and not is_number(head.seq):
        findings.add("head", last.seq, f"the head stands at seq {head.seq!r}", expected=last.seq, actual=head.seq)
        head = None
    if tree is not None and (not is_number(tree.size) or tree.size < 0):
        findings.add("tree", max(last.seq, 1), f"the stored tree has size {tree.size!r}", actual=tree.size)
        tree = None
    return head, tree


def check_head(findings: Findings, head: Head | None, last: Head, reach: int) -> None:
    """Compare the head with the last entry; ``reach`` is the highest seq by any evidence other than the head."""
    if head is not None:
        reach = max(reach, head.seq)
    if reach > last.seq:
        said_by = "the head says" if head is not None and head.seq == reach else "a snapshot or the tree says"
        findings.add(
            "tail-truncated",
            last.seq + 1,
            f"entries from seq {last.seq + 1} on are missing: {said_by} that there are {reach}",
            expected=reach,
            actual=last.seq,
        )
    if head is None:
        if last.seq > 0:
            findings.add("head", last.seq, "the tenant has no head", expected=last.chain_link)
    elif head.seq < last.seq:
        findings.add(
            "head",
            last.seq,
            f"the head stands at seq {head.seq}, the chain goes on to {last.seq}",
            expected=last.seq,
            actual=head.seq,
        )
    elif head.seq == last.seq and head.chain_link != last.chain_link:
        findings.add(
            "head",
            last.seq,
            "the head does not name the link of the last entry",
            expected=last.chain_link,
            actual=head.chain_link,
        )
    elif head.seq == last.seq and head.hlc != last.hlc:
        findings.add(
            "head", last.seq, "the head does not name the HLC of the last entry", expected=last.hlc, actual=head.hlc
        )
