"""Folds the results of a chain's ranges, in order, into the verdict; memory does not grow with their number.

Steps 1 to 3 for each range, step 4 at the end::

    1. the entries' breaks, and the border with the range before
    2. snapshots, roots of the tree and checkpoints, as the entries pass them
    3. stored tiles
    4. the rest of these, and the head

Whether entries of version 1 at the start of a range are valid depends on the ranges before it, so it is judged here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from ledger import merkle
from ledger.job_index.builder import IndexBuilder, Roots
from ledger.machines.retention import Floor
from ledger.merkle import HASH_BYTES, Frontier, append_part
from ledger.merkle.tiles import TILE_HEIGHT, TILE_WIDTH, TileCoordinates
from ledger.verification.caller_check import Repetitions
from ledger.verification.entry_check import EntryRow, report_duplicate, report_form, report_gap, report_prev_link
from ledger.verification.floor_check import LeftTree
from ledger.verification.projection_check import conclude
from ledger.verification.range_check import Interval, IntervalPart, Mark, RangeSummary, RangeTask
from ledger.verification.snapshot_check import OpenedRow, Recomputed, SnapshotJudge
from ledger.verification.tree_check import (
    StoredTree,
    TreeHead,
    check_head,
    compare_heads,
    readable_ends,
    report,
    tile_break,
)
from ledger.verification.verdict import Anchor, Break, Findings, Found, Head, Verdict, begin_aspects

_NOTHING: Final = Found()


class ChainBounds(NamedTuple):
    """The known facts of one tenant's ledger besides its entries and snapshots, and the part that is verified."""

    tenant_id: str
    head: Head | None
    tree: StoredTree | None
    checkpoints: Sequence[TreeHead] = ()
    anchors: Sequence[Anchor] = ()
    first_seq: int = 1
    """The first entry that is verified."""
    is_left_over: bool = False
    """Whether the ledger names the tenant, but has neither a head nor an entry of it."""
    last: Head | None = None
    """The last entry of the chain, None if that is the last entry of the ranges."""
    is_to_end: bool = True
    """Whether the ranges reach the last entry."""
    expected_prev: str | None = None
    """Link of the entry before ``first_seq`` at its last verification."""
    expected_snapshot: str | None = None
    """Payload digest, at that time, of the snapshot that ends there."""
    expected_frontier: Sequence[bytes] = ()
    """Right edge of the tree over the entries before ``first_seq``, empty when it is not known."""
    floor: Floor | None = None
    """What left before the first entry of the chain."""
    left: LeftTree | None = None
    """The stored tree of what left, None where it is not known."""
    job_index: IndexBuilder | None = None
    """The index of jobs of the entries before the first one, or of more; None where nothing of it is known."""
    found: Found = _NOTHING
    """What was found before the ranges are checked."""
    breaks: Sequence[Break] = ()
    """The breaks among it."""

    @property
    def is_from_start(self) -> bool:
        """Whether the ranges begin with the first entry that is there."""
        return self.first_seq == (1 if self.floor is None else self.floor.to_seq + 1)

    @property
    def is_tree_known(self) -> bool:
        """Whether the tree over the entries before the ranges is known by its tiles."""
        return self.is_from_start and (self.floor is None or self.left is not None)

    @property
    def tree_size(self) -> int:
        """Size of the stored tree, 0 when there is none."""
        return max(self.tree.size, 0) if self.tree is not None and isinstance(self.tree.size, int) else 0

    @property
    def sizes(self) -> tuple[int, ...]:
        """Sizes at which a root of the tree must be known."""
        kept = [head.size for head in self.checkpoints] + [anchor.size for anchor in self.anchors]
        return tuple(sorted({size for size in (self.tree_size, *kept) if size > 0}))

    def task(self, number: int, from_seq: int | None, to_seq: int | None) -> RangeTask:
        """One range of the chain."""
        return RangeTask(
            self.tenant_id,
            number,
            from_seq,
            to_seq,
            self.first_seq,
            self.tree_size,
            self.sizes,
            is_tree_known=self.is_tree_known,
            indexed=0 if self.job_index is None else self.job_index.size,
        )


def tasks(ends: ChainBounds, borders: Sequence[int]) -> list[RangeTask]:
    """The ranges of a chain, the first of which ends before ``borders[0]``, the next before ``borders[1]`` and so on.

    ``borders`` ascend and are above ``ends.first_seq``.
    """
    begins, ends_at = [None, *borders], [*(border - 1 for border in borders), None]
    return [ends.task(index, *bounds) for index, bounds in enumerate(zip(begins, ends_at, strict=True))]


def fold(
    ends: ChainBounds,
    ranges: Iterable[RangeSummary],
    jobs: Iterable[Found] | None = None,
    on_break: Callable[[Break], object] | None = None,
) -> Verdict:
    """The verdict on a chain, from all its ranges in order.

    ``jobs`` has the results of comparing jobs and commitments, None if they were not compared. ``on_break`` is called
    with each break that the fold finds.
    """
    findings = Findings(on_break)
    findings.merge(ends.found)
    if on_break is not None:
        for each in ends.breaks:
            on_break(each)
    chain = Fold(ends, findings)
    for summary in ranges:
        chain.add(summary)
    chain.close()
    if jobs is not None:
        conclude(jobs, chain.findings)
    return chain.verdict()


class Fold:
    """Takes the ranges of a chain in order: ``add`` each, ``close``, then ask for the ``verdict``."""

    def __init__(self, ends: ChainBounds, findings: Findings) -> None:
        self.findings = findings
        self.ends = ends
        is_from_start = ends.is_from_start
        begin_aspects(findings, is_from_start=is_from_start)
        self._sources: list[str] = []
        self._anchors: tuple[Anchor, ...] = ()
        self._snapshots = SnapshotJudge(
            ends.tenant_id,
            findings,
            first_seq=ends.first_seq,
            expected_snapshot=ends.expected_snapshot,
            is_index_whole=is_from_start or ends.job_index is not None,
        )
        self._waiting: deque[OpenedRow] = deque()
        """Snapshots whose entries were not all added yet."""
        self._highest_seq = 0
        """Highest stored ``to_seq`` of any snapshot so far."""
        self._next_seq = ends.first_seq
        self._last_link: Any = ends.expected_prev
        self._is_link_known = is_from_start or ends.expected_prev is not None
        self._may_be_v1 = True
        self._entries_checked = 0
        self.commitments = 0
        """Entries whose verdicts are to be judged, of those added."""
        self._last_row: Head | None = None
        self._passed_seq = ends.first_seq - 1
        self._marks: dict[int, Mark] = {}
        self._parts: dict[Interval, list[IntervalPart]] = {}
        self._tree = Frontier.restore(ends.first_seq - 1 if ends.expected_frontier else 0, ends.expected_frontier)
        """Tree over the entries from seq 1 on, up to the first missing one."""
        self._trees = {size: Frontier.restore(size, self._tree.hashes) for size in (self._tree.size,) if size}
        """The tree by size: at the sizes of other tree heads, and within the last added range."""
        self._repetitions = Repetitions()
        self._tiles = _SharedTiles({} if ends.left is None else ends.left.edge)
        known = ends.job_index
        self.job_index = IndexBuilder(ends.first_seq - 1) if known is None else known.copy()
        """The index of jobs of the entries so far."""
        self._job_roots: dict[int, Roots] = {}
        """Roots of the index of jobs by size, at the ends of snapshots within the last added range."""

    def begin_behind(self, before: EntryRow | None) -> None:
        """The first range begins after this entry, None if it is missing; it must be as it was last verified."""
        seq, expected = self.ends.first_seq - 1, self.ends.expected_prev
        if before is not None:
            version, link = before[7], before[9]
            if expected not in (None, link):
                self.findings.add(
                    "link", seq, f"seq {seq} is not the entry that was verified before", expected=expected, actual=link
                )
            self._last_link, self._is_link_known, self._may_be_v1 = link, True, version == 1
        elif expected is not None and self._last().seq > seq:
            self.findings.add("gap", seq, f"seq {seq}, verified before, is missing", expected=seq)

    def add(self, summary: RangeSummary) -> None:
        """Add the next range, with its breaks and the snapshots that begin in it."""
        # 1. The entries.
        self.findings.merge(summary.found)
        self._check_border(summary)
        self._entries_checked += summary.rows
        self.commitments += summary.commitments
        self._repetitions.add(summary.signed)
        self._last_row = summary.last_row or self._last_row
        # 2. Facts that depend on entries: the tree up to the first missing entry, and snapshots.
        self._take(summary.snapshots)
        self._marks.update(summary.marks)
        for part in summary.parts:
            self._parts.setdefault(part.interval, []).append(part)
        if summary.runs and summary.runs[0][0] == self._tree.size + 1:
            for size, hashes in summary.segments:
                append_part(self._tree, size, hashes)
                self._trees[size] = Frontier.restore(size, self._tree.hashes)
        self._grow_job_index(summary)
        if summary.runs:
            self._passed_seq = summary.runs[-1][1]
        self._judge_snapshots(self._passed_seq)
        # 3. The tiles.
        if self._tree.size:
            self._tiles.compare(summary, self.ends.tree_size, self._tree.size, self.findings)
        self._forget()

    def _grow_job_index(self, summary: RangeSummary) -> None:
        part, end = summary.job_index, summary.runs[-1][1] if summary.runs else self._passed_seq
        is_next = part is not None and part.head.begin == self.job_index.size
        self._job_roots = self.job_index.add(part) if part is not None and is_next else {}
        if self.job_index.size < end:
            # An entry is missing.
            self.job_index = IndexBuilder(end)

    def add_unreached(self, snapshots: Sequence[OpenedRow]) -> None:
        """Add snapshots that begin after the last range."""
        self._take(snapshots)
        self._judge_snapshots()

    def close(self) -> None:
        """No range follows."""
        ends, findings = self.ends, self.findings
        last = self._last()
        head, tree = readable_ends(ends.head, ends.tree, last, findings)
        self._judge_snapshots()
        self._repetitions.report(findings)
        roots = {size: tree.root() for size, tree in self._trees.items()}
        roots |= {} if ends.left is None else ends.left.roots
        self._sources, self._anchors = compare_heads(findings, tree, ends.checkpoints, ends.anchors, roots, last.seq)
        if ends.is_to_end:
            findings.begin("head")
            reach = max(
                self._highest_seq,
                tree.size if tree is not None else 0,
                ends.first_seq - 1 if ends.expected_prev is not None else 0,
            )
            check_head(findings, head, last, reach)
        if ends.is_left_over and "tail-truncated" not in findings.counts():
            findings.add("tail-truncated", 1, "other tables name the tenant; neither head nor entries of it are left")

    @property
    def frontier(self) -> Frontier | None:
        """Right edge of the tree over all entries so far, None if one is missing."""
        return self._tree if self._tree.size == self._passed_seq else None

    def verdict(self) -> Verdict:
        """The verdict, once closed and once the jobs were compared."""
        ends, findings = self.ends, self.findings
        verdicts = findings.verdicts()
        if self._snapshots.ends_unsigned and verdicts["signatures"] == "ok":
            verdicts["signatures"] = "not_checked"
        return Verdict(
            tenant_id=ends.tenant_id,
            entries_checked=self._entries_checked,
            from_seq=ends.first_seq,
            to_seq=self._next_seq - 1,
            head=self._last(),
            verdicts=verdicts,
            first_break=findings.first_break(),
            breaks=findings.counts(),
            compared_with=", ".join(self._sources) or None,
            signed_to=self._snapshots.signed_to or self._start,
            covered_to=self._covered_to,
            anchors=self._anchors,
            covered_digest=self._snapshots.covered_digest,
            commitments=self.commitments,
            to_link=self._last_link,
            frontiers={size: tree.hashes for size, tree in self._trees.items()},
            floor=ends.floor,
        )

    @property
    def _start(self) -> Head:
        """The entry before the first."""
        return Head(self.ends.first_seq - 1, self.ends.expected_prev, None)

    @property
    def _covered_to(self) -> Head:
        return self._snapshots.covered_to or self._start

    def _last(self) -> Head:
        return self.ends.last or self._last_row or Head(0, None, None)

    def _check_border(self, summary: RangeSummary) -> None:
        """Compare the first entry of a range with the last one before it."""
        border, next_seq = summary.border, self._next_seq
        if border is None:
            pass  # There are no entries, or the range check compared them.
        elif border.seq > next_seq:
            report_gap(self.findings, next_seq, border.seq)
        elif border.seq < next_seq:
            report_duplicate(self.findings, next_seq, border.seq)
        elif self._is_link_known and not border.has_wrong_type and border.prev_link != self._last_link:
            report_prev_link(self.findings, border.seq, self._last_link, border.prev_link)
        if summary.runs:
            self._next_seq, self._last_link, self._is_link_known = summary.next_seq, summary.last_link, True
        for row in summary.deferred:
            report_form(self.findings, row, is_version_right=self._may_be_v1)
        self._may_be_v1 = self._may_be_v1 and summary.may_be_v1

    # --- what hangs on the entries ----------------------------------------------------------------

    def _take(self, snapshots: Sequence[OpenedRow]) -> None:
        self._waiting.extend(snapshots)
        self._highest_seq = max([self._highest_seq, *(each.stored_to for each in snapshots)])

    def _judge_snapshots(self, passed_seq: int | None = None) -> None:
        """Judge the snapshots up to ``passed_seq``, or all after the last range."""
        while self._waiting:
            snapshot = self._waiting[0]
            if passed_seq is not None and snapshot.to_seq > passed_seq and self._snapshots.is_next(snapshot):
                return
            self._snapshots.judge(self._waiting.popleft(), self._recomputed)

    def _recomputed(self, from_seq: int, to_seq: int) -> Recomputed | None:
        """The values recomputed from these entries, None if one is missing."""
        tree = Frontier()
        for part in self._parts.get((from_seq, to_seq), ()):
            if part.begin == from_seq + tree.size:
                append_part(tree, part.end - from_seq + 1, part.hashes)
        if tree.size != to_seq - from_seq + 1:
            return None
        (first_link, _), (last_link, last_hlc) = self._marks[from_seq], self._marks[to_seq]
        whole = self._trees.get(to_seq)
        return {
            "from_chain_link": first_link.hex(),
            "to_chain_link": last_link.hex(),
            "snapshot_hlc": last_hlc,
            "entry_count": tree.size,
            "merkle_root": tree.root().hex(),
            "tree_root": None if whole is None else whole.root().hex(),
            "job_index": self._job_roots.get(to_seq, {}),
        }

    def _forget(self) -> None:
        """Drop state about entries that later ranges do not need."""
        passed = self._passed_seq
        sizes = {*self.ends.sizes, passed, self._covered_to.seq}
        self._trees = {size: tree for size, tree in self._trees.items() if size in sizes}
        self._parts = {interval: parts for interval, parts in self._parts.items() if interval[1] > passed}
        begins = {from_seq for from_seq, _ in self._parts}
        self._marks = {seq: mark for seq, mark in self._marks.items() if seq in begins}


class _SharedTiles:
    """Assembles tiles that cross borders of ranges, and compares them with the stored ones."""

    def __init__(self, edge: Mapping[TileCoordinates, bytes]) -> None:
        """``edge`` has the partial tiles of the tree over the entries before the first one."""
        self._nodes: dict[tuple[int, int], dict[int, bytes]] = {
            place: {at // HASH_BYTES: tile[at : at + HASH_BYTES] for at in range(0, len(tile), HASH_BYTES)}
            for place, tile in edge.items()
        }
        """By level and index of each incomplete tile: its nodes, by their places in it."""

    def compare(self, summary: RangeSummary, size: int, last_seq: int, findings: Findings) -> None:
        """Add the next range, in a stored tree of ``size`` leaves, of which ``last_seq`` were read so far."""
        reach = min(size, last_seq)
        for end, found in summary.tile_breaks:
            if end <= reach:
                report(findings, found)
        for level, first, hashes in summary.tile_nodes:
            for index in range(first, min(first + len(hashes) // HASH_BYTES, reach >> (level * TILE_HEIGHT))):
                at = (index - first) * HASH_BYTES
                self._put(level, index, hashes[at : at + HASH_BYTES])
        for level, index, stored in summary.tiles:
            if (end := min((index + 1) << ((level + 1) * TILE_HEIGHT), size)) > reach:
                continue
            width = (end >> (level * TILE_HEIGHT)) - index * TILE_WIDTH
            nodes = self._nodes[level, index]
            differs = tile_break(level, index, b"".join(nodes[each] for each in range(width)), stored)
            if differs is not None:
                report(findings, differs)
        self._nodes = {place: nodes for place, nodes in self._nodes.items() if len(nodes) < TILE_WIDTH}

    def _put(self, level: int, index: int, node: bytes) -> None:
        """Add a node and, if it completes the tile, the tile's parent node."""
        tile, at = divmod(index, TILE_WIDTH)
        nodes = self._nodes.setdefault((level, tile), {})
        nodes[at] = node
        if len(nodes) == TILE_WIDTH:
            self._put(level + 1, tile, merkle.root(nodes[each] for each in range(TILE_WIDTH)))
