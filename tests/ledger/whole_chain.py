"""Verification of a whole chain held in memory, entry by entry and every root from the leaves up: the naive twin.

What is wrong with one entry, one snapshot or one tree head is said by the checks of the ledger, each of which has tests
of its own; what is compared with what, and with which hashes, is worked out here once more, without ranges.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from ledger import merkle
from ledger.job_index import BLOCK_ENTRIES, covering
from ledger.job_index.builder import Roots
from ledger.merkle.tiles import TileTree
from ledger.verification import ENTRY_COLUMNS, SNAPSHOT_COLUMNS, Anchor, Head, OpenSnapshot, TreeHead, Verdict
from ledger.verification.entry_check import EntryChecker
from ledger.verification.projection_check import compare_jobs, conclude
from ledger.verification.snapshot_check import OpenedRow, Recomputed, SnapshotJudge, has_place, open_row
from ledger.verification.tree_check import check_head, compare_heads, readable_ends, report, tile_break
from ledger.verification.verdict import Findings, begin_aspects
from tests.ledger import naive_job_index as naive
from tests.ledger.ledger_in_memory import Ledger, MemoryReader, Row, in_stored_order


def verdict_of_the_whole(
    ledger: Ledger,
    *,
    open_snapshot: OpenSnapshot | None,
    checkpoints: Sequence[TreeHead] = (),
    anchors: Sequence[Anchor] = (),
    first_seq: int = 1,
    projection: bool = True,
) -> Verdict:
    """The verdict on all entries from ``first_seq`` on, before which there are none."""
    findings = Findings()
    is_from_start = first_seq == 1
    rows = sorted(ledger.entries, key=lambda row: row["seq"])
    last = Head(rows[-1]["seq"], rows[-1]["chain_link"], rows[-1]["t_hlc"]) if rows else Head(0, None, None)
    head, tree = readable_ends(ledger.head, ledger.tree, last, findings)
    begin_aspects(findings, is_from_start=is_from_start)
    stored = [[row[name] for name in SNAPSHOT_COLUMNS] for row in in_stored_order(_wholly(ledger, first_seq))]
    opened = [open_row(row, open_snapshot, findings) for row in stored if has_place(row, findings)]
    snapshots = SnapshotJudge(ledger.tenant_id, findings, first_seq=first_seq, is_index_whole=is_from_start)
    entries = EntryChecker(ledger.tenant_id, findings, first_seq=first_seq, prev_link=None, is_prev_known=is_from_start)
    links: dict[int, bytes] = {}
    hlcs: dict[int, object] = {}
    jobs: dict[int, str] = {}
    runs: list[tuple[int, int]] = []
    # 1. All entries, one at a time.
    for row in rows:
        for run in entries.check([[row[name] for name in ENTRY_COLUMNS]]):
            seq = run.first_seq
            links[seq], hlcs[seq], jobs[seq] = run.links[0], run.hlcs[0], str(run.jobs[0])
            runs.append((runs.pop()[0] if runs and runs[-1][1] == seq - 1 else seq, seq))
    leaves = {seq: merkle.leaf_hash(link) for seq, link in links.items()}

    def root(from_seq: int, to_seq: int) -> bytes:
        return merkle.root([leaves[seq] for seq in range(from_seq, to_seq + 1)])

    # 2. Every snapshot, and every tree head as far as no entry is missing.
    reach = runs[0][1] if is_from_start and runs and runs[0][0] == 1 else 0

    def recomputed(from_seq: int, to_seq: int) -> Recomputed | None:
        if not any(first <= from_seq and to_seq <= last for first, last in runs):
            return None
        return {
            "from_chain_link": links[from_seq].hex(),
            "to_chain_link": links[to_seq].hex(),
            "snapshot_hlc": hlcs[to_seq],
            "entry_count": to_seq - from_seq + 1,
            "merkle_root": root(from_seq, to_seq).hex(),
            "tree_root": root(1, to_seq).hex() if to_seq <= reach else None,
            "job_index": job_index(to_seq) if to_seq <= reach else {},
        }

    def job_index(size: int) -> Roots:
        log = [(jobs[seq], leaves[seq]) for seq in range(1, size + 1)]
        return dict(zip(covering(size), naive.roots(log, BLOCK_ENTRIES), strict=True))

    for snapshot in opened:
        snapshots.judge(snapshot, recomputed)
    sizes = {each.size for each in (*checkpoints, *anchors, *([tree] if tree is not None else []))}
    roots = {size: root(1, size) for size in sizes if 0 < size <= reach}
    sources, anchored = compare_heads(findings, tree, checkpoints, anchors, roots, last.seq)
    # 3. Every tile of the stored tree that the entries reach.
    if tree is not None:
        for (level, index), computed in _tiles([leaves[seq] for seq in range(1, reach + 1)], tree.size):
            found = tile_break(level, index, computed, ledger.tiles.get((level, index), b""))
            if found is not None:
                report(findings, found)
    # 4. The head, and the job states.
    findings.begin("head")
    said_to = [tree.size] if tree is not None else []
    check_head(findings, head, last, max([0, *said_to, *(snapshot.stored_to for snapshot in opened)]))
    if projection and is_from_start:
        reader = MemoryReader(ledger)
        conclude([asyncio.run(compare_jobs(reader.entries_by_job(), reader.jobs()))], findings)
    return Verdict(
        tenant_id=ledger.tenant_id,
        entries_checked=len(rows),
        from_seq=first_seq,
        to_seq=entries.last_seq,
        head=last,
        verdicts=_with_unsigned_end(findings.verdicts(), opened, snapshots.signed_to),
        first_break=findings.first_break(),
        breaks=findings.counts(),
        compared_with=", ".join(sources) or None,
        signed_to=snapshots.signed_to or Head(first_seq - 1, None, None),
        covered_to=snapshots.covered_to or Head(first_seq - 1, None, None),
        anchors=anchored,
        covered_digest=snapshots.covered_digest,
    )


def _with_unsigned_end(verdicts: dict[str, str], opened: Sequence[OpenedRow], signed_to: Head | None) -> dict[str, str]:
    """The verdicts, with signatures that are not checked where an unsigned snapshot ends behind the last signed one."""
    is_open = any(each.is_unsigned and each.to_seq > (signed_to.seq if signed_to else 0) for each in opened)
    return {**verdicts, "signatures": "not_checked"} if is_open and verdicts["signatures"] == "ok" else verdicts


def _wholly(ledger: Ledger, first_seq: int) -> list[Row]:
    """The snapshots that do not begin before ``first_seq``."""
    return [row for row in ledger.snapshots if None in (row["from_seq"], row["to_seq"]) or row["from_seq"] >= first_seq]


def _tiles(leaves: Sequence[bytes], size: int) -> list[tuple[tuple[int, int], bytes]]:
    """The tiles of a tree of ``size`` leaves that end within ``leaves``, which may be fewer."""
    tree = TileTree(0, {})
    tree.append_leaf_hashes(leaves[:size])
    is_whole = size <= len(leaves)
    return [(at, tile) for at, tile in tree.changed.items() if is_whole or len(tile) == 256 * merkle.HASH_BYTES]
