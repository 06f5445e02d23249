"""Checking the ends of a chain: how far its head, its snapshots and its tree say that it goes, and its last entry."""

from __future__ import annotations

from ledger.verification.tree_check import StoredTree
from ledger.verification.verdict import Findings, Head, is_number


def readable_ends(
    head: Head | None, tree: StoredTree | None, last: Head, findings: Findings
) -> tuple[Head | None, StoredTree | None]:
    """Head and stored tree, None for one whose seq or size is none; that is a break."""
    if head is not None and not is_number(head.seq):
        findings.add("head", last.seq, f"the head stands at seq {head.seq!r}", expected=last.seq, actual=head.seq)
        head = None
    if tree is not None and (not is_number(tree.size) or tree.size < 0):
        findings.add("tree", max(last.seq, 1), f"the stored tree has size {tree.size!r}", actual=tree.size)
        tree = None
    return head, tree


def check_head(findings: Findings, head: Head | None, last: Head, reach: int) -> None:
    """Compare the head with the last entry; ``reach`` is the highest seq that anything but the head says there is."""
    if head is not None:
        reach = max(reach, head.seq)
    if reach > last.seq:
        said_by = "the head says" if head is not None and head.seq == reach else "a snapshot or the tree says"
        detail = f"entries from seq {last.seq + 1} on are missing: {said_by} that there are {reach}"
        findings.add("tail-truncated", last.seq + 1, detail, expected=reach, actual=last.seq)
    if head is None:
        if last.seq > 0:
            findings.add("head", last.seq, "the tenant has no head", expected=last.chain_link)
    elif head.seq < last.seq:
        detail = f"the head stands at seq {head.seq}, the chain goes on to {last.seq}"
        findings.add("head", last.seq, detail, expected=last.seq, actual=head.seq)
    elif head.seq == last.seq and head.chain_link != last.chain_link:
        detail = "the head does not name the link of the last entry"
        findings.add("head", last.seq, detail, expected=last.chain_link, actual=head.chain_link)
    elif head.seq == last.seq and head.hlc != last.hlc:
        detail = "the head does not name the HLC of the last entry"
        findings.add("head", last.seq, detail, expected=last.hlc, actual=head.hlc)
