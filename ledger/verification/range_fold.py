"""Verification of a chain in ranges: the summaries of its ranges, checked independently, are folded into the verdict.

The verdict is the one that :func:`ledger.verification.verify` gives for the same rows, whatever is wrong with them,
which a property test says. Steps::

    1. the entries' breaks, and the borders between ranges
    2. snapshots, roots of the tree and checkpoints, by the same walk, over hashes that the ranges gave
    3. stored tiles that lie across borders
    4. the head, the job states

A range that was checked on an assumption which turns out wrong, or that did not know what a signed claim covers, is
named in ``CheckAgain`` instead. That happens only to ledgers which were tampered with, and to chains whose version 1
beginning goes on behind a later version.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ledger import merkle
from ledger.merkle import HASH_BYTES, Frontier
from ledger.merkle.subtrees import append_part
from ledger.merkle.tiles import TILE_HEIGHT, TILE_WIDTH
from ledger.verification.entry_check import report_duplicate, report_gap, report_prev_link
from ledger.verification.head_check import check_head, readable_ends
from ledger.verification.projection_check import conclude
from ledger.verification.range_summary import Interval, IntervalPart, Mark, RangeSummary, RangeTask
from ledger.verification.snapshot_check import OpenedRow, SnapshotChecker
from ledger.verification.tile_check import tile_break
from ledger.verification.tree_check import Anchor, StoredTree, TreeChecker, TreeHead
from ledger.verification.verdict import Break, Findings, Found, Head, Verdict, begin_aspects
from ledger.verification.walk import Walk


class Ends(NamedTuple):
    """What is known of one tenant's ledger beside its entries and snapshots."""

    tenant_id: str
    head: Head | None
    tree: StoredTree | None
    checkpoints: Sequence[TreeHead] = ()
    anchors: Sequence[Anchor] = ()
    first_seq: int = 1
    """The first entry that is verified."""
    are_signatures_judged: bool = True
    is_left_over: bool = False
    """Whether the ledger names the tenant, and has neither a head nor an entry of it."""


class JobsFound(NamedTuple):
    """What comparing all jobs came to: breaks, and breaks if the chain itself is whole."""

    found: Found
    candidates: Found


class CheckAgain(NamedTuple):
    """Ranges to be checked again, each as its new task says; then the fold is made again."""

    tasks: list[RangeTask]


def tasks(ends: Ends, borders: Sequence[int]) -> list[RangeTask]:
    """The ranges of a chain, the first of which ends before ``borders[0]``, the next before ``borders[1]`` and so on.

    ``borders`` ascend and are above ``ends.first_seq``.
    """
    tree_size = ends.tree.size if ends.tree is not None and isinstance(ends.tree.size, int) else 0
    kept = [head.size for head in ends.checkpoints] + [anchor.size for anchor in ends.anchors]
    sizes = tuple(sorted({size for size in (tree_size, *kept) if size > 0}))
    begins, ends_at = [None, *borders], [*(border - 1 for border in borders), None]
    return [
        RangeTask(ends.tenant_id, index, begin, end, ends.first_seq, max(tree_size, 0), sizes)
        for index, (begin, end) in enumerate(zip(begins, ends_at, strict=True))
    ]


def fold(
    ends: Ends,
    ranges: Sequence[tuple[RangeTask, RangeSummary]],
    jobs: JobsFound | None = None,
    on_break: Callable[[Break], object] | None = None,
) -> Verdict | CheckAgain:
    """The verdict on a chain, from the summaries of all its ranges in order.

    Args:
        ends: what is known besides.
        ranges: every range of the chain, and what checking it gave.
        jobs: what comparing the jobs gave; None when they were not compared.
        on_break: is called with every break that no range has listed.
    """
    findings = Findings(on_break)
    summaries = [summary for _, summary in ranges]
    is_from_start = ends.first_seq == 1
    last = next((each.last_row for each in reversed(summaries) if each.last_row is not None), Head(0, None, None))
    head, tree = readable_ends(ends.head, ends.tree, last, findings)
    begin_aspects(findings, are_signatures_judged=ends.are_signatures_judged, is_from_start=is_from_start)
    # 1. The entries.
    for summary in summaries:
        findings.merge(summary.found)
    again = _Again([task for task, _ in ranges])
    next_seq = _check_borders(ends.first_seq, summaries, findings, again)
    # 2. What hangs on them.
    tree_checker = TreeChecker(findings, tree, ends.checkpoints, ends.anchors, is_from_start=is_from_start)
    snapshots = SnapshotChecker(ends.tenant_id, findings, lambda row: row, is_from_start=is_from_start)
    opened: list[OpenedRow] = [row for summary in summaries for row in summary.snapshots]
    opened.sort(key=lambda row: (row.stored_from, row.stored_to))
    snapshots.add(opened)
    runs = _joined(summaries)
    walk = Walk(snapshots, tree_checker, _KnownLeaves(summaries, again), ends.first_seq)
    for first_seq, last_seq in runs:
        for _ in walk.take(first_seq, last_seq):
            pass
    snapshots.finish()
    # 3. The tiles.
    if tree is not None and is_from_start and runs and runs[0][0] == 1:
        _compare_tiles(tree.size, runs[0][1], summaries, tree_checker)
    tree_checker.finish(last_seq=last.seq)
    # 4. The rest.
    findings.begin("head")
    check_head(findings, head, last, max(snapshots.highest_seq, tree.size if tree is not None else 0))
    if ends.is_left_over and "tail-truncated" not in findings.counts():
        findings.add("tail-truncated", 1, "other tables name the tenant; neither head nor entries of it are left")
    if jobs is not None:
        conclude(*jobs, findings)
    if again.changed:
        return CheckAgain([*again.changed.values()])
    return Verdict(
        tenant_id=ends.tenant_id,
        entries_checked=sum(each.rows for each in summaries),
        from_seq=ends.first_seq,
        to_seq=next_seq - 1,
        head=last,
        verdicts=findings.verdicts(),
        first_break=findings.first_break(),
        breaks=findings.counts(),
        compared_with=", ".join(tree_checker.compared_sources()) or None,
        signed_to=snapshots.signed_to or Head(ends.first_seq - 1, None, None),
        signed_digest=snapshots.signed_digest,
        anchors=tree_checker.anchored(),
    )


class _Again:
    """Collects what must be checked again."""

    def __init__(self, tasks: Sequence[RangeTask]) -> None:
        self._tasks = tasks
        self.changed: dict[int, RangeTask] = {}

    def without_v1(self, number: int) -> None:
        """All that was before has not version 1."""
        self._change(number, may_be_v1=False)

    def with_interval(self, interval: Interval) -> None:
        """What a signed claim covers was not known to all ranges that it goes through."""
        for task in self._tasks:
            known = self.changed.get(task.number, task).intervals
            if task.overlaps(*interval) and interval not in known:
                self._change(task.number, intervals=(*known, interval))

    def _change(self, number: int, **changes: Any) -> None:
        self.changed[number] = self.changed.get(number, self._tasks[number])._replace(**changes)


# --- entries --------------------------------------------------------------------------------------


def _check_borders(first_seq: int, summaries: Sequence[RangeSummary], findings: Findings, again: _Again) -> int:
    """Compare the first entry of each range with the last one before it; returns the seq that must come next."""
    next_seq, last_link, is_link_known, may_be_v1 = first_seq, None, first_seq == 1, True
    for summary in summaries:
        border = summary.border
        if border is not None and border.seq > next_seq:
            report_gap(findings, next_seq, border.seq)
        elif border is not None and border.seq < next_seq:
            report_duplicate(findings, next_seq, border.seq)
        elif border is not None and is_link_known and not border.is_malformed and border.prev_link != last_link:
            report_prev_link(findings, border.seq, last_link, border.prev_link)
        if summary.has_entries:
            next_seq, last_link, is_link_known = summary.next_seq, summary.last_link, True
        if summary.relied_on_v1 and not may_be_v1:
            again.without_v1(summary.number)
        may_be_v1 = may_be_v1 and summary.may_be_v1
    return next_seq


def _joined(summaries: Sequence[RangeSummary]) -> list[Interval]:
    """Entries that follow one another, across borders too."""
    joined: list[Interval] = []
    for first_seq, last_seq in (run for summary in summaries for run in summary.runs):
        if joined and joined[-1][1] == first_seq - 1:
            joined[-1] = (joined[-1][0], last_seq)
        else:
            joined.append((first_seq, last_seq))
    return joined


class _KnownLeaves:
    """The hashes that the ranges gave; what none gave is asked for by checking again."""

    def __init__(self, summaries: Sequence[RangeSummary], again: _Again) -> None:
        self._again = again
        self._marks: dict[int, Mark] = {}
        self._parts: dict[Interval, list[IntervalPart]] = {}
        for summary in summaries:
            self._marks.update(summary.marks)
            for part in summary.parts:
                self._parts.setdefault(part.interval, []).append(part)
        self._segments = deque(segment for summary in summaries for segment in summary.segments)
        self._tree = Frontier()

    def begin_tree(self, seq: int) -> None:
        """Nothing: what lies behind a gap is asked for by the range that a snapshot covers."""

    def begin_range(self, seq: int) -> None:
        """Nothing: the ranges were asked for it."""

    def pass_to(self, seq: int) -> None:
        """Nothing: the ranges passed them."""

    def link(self, seq: int) -> bytes:
        return self._marks[seq].link if seq in self._marks else b""

    def hlc(self, seq: int) -> Any:
        return self._marks[seq].hlc if seq in self._marks else None

    def range_root(self, from_seq: int, to_seq: int) -> bytes:
        tree = Frontier()
        for part in self._parts.get((from_seq, to_seq), ()):
            if part.begin != from_seq + tree.size:
                break
            append_part(tree, part.end - from_seq + 1, part.hashes)
        if from_seq + tree.size <= to_seq:
            self._again.with_interval((from_seq, to_seq))
        return tree.root()

    def tree_root(self, size: int) -> bytes:
        while self._segments and self._segments[0][0] <= size:
            append_part(self._tree, *self._segments.popleft())
        # Where a signed claim ends that no range knew of, there is none yet.
        return self._tree.root()


# --- tiles ----------------------------------------------------------------------------------------


def _compare_tiles(size: int, last_seq: int, summaries: Sequence[RangeSummary], tree: TreeChecker) -> None:
    """Compare the stored tiles of a tree of ``size`` leaves, of which the first ``last_seq`` are there."""
    reach = min(size, last_seq)
    for end, found in (each for summary in summaries for each in summary.tile_breaks):
        if end <= reach:
            tree.report_tile(found)
    nodes = _shared_nodes(summaries, reach)
    for level, index, stored in (tile for summary in summaries for tile in summary.tiles):
        is_full = index < size >> (level + 1) * TILE_HEIGHT
        end = index + 1 << (level + 1) * TILE_HEIGHT if is_full else size
        if end > reach:
            continue
        width = TILE_WIDTH if is_full else size >> level * TILE_HEIGHT & TILE_WIDTH - 1
        computed = b"".join(nodes[level][index * TILE_WIDTH + at] for at in range(width))
        found_here = tile_break(level, index, computed, stored)
        if found_here is not None:
            tree.report_tile(found_here)


def _shared_nodes(summaries: Sequence[RangeSummary], reach: int) -> dict[int, dict[int, bytes]]:
    """By level, the nodes by index of all tiles that are not in one range, as far as the first ``reach`` leaves."""
    nodes: dict[int, dict[int, bytes]] = {}
    for level, first, hashes in (each for summary in summaries for each in summary.tile_nodes):
        of_level = nodes.setdefault(level, {})
        for index in range(first, min(first + len(hashes) // HASH_BYTES, reach >> level * TILE_HEIGHT)):
            at = (index - first) * HASH_BYTES
            of_level[index] = hashes[at : at + HASH_BYTES]
    for level in range(max(nodes, default=0) + 1):
        tiles: dict[int, list[bytes]] = {}
        for index, each in sorted(nodes.get(level, {}).items()):
            tiles.setdefault(index // TILE_WIDTH, []).append(each)
        for index, hashes_of_tile in tiles.items():
            if len(hashes_of_tile) == TILE_WIDTH:
                nodes.setdefault(level + 1, {})[index] = merkle.root(hashes_of_tile)
    return nodes
