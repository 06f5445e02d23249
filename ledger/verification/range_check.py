"""Checking one range of a chain by itself, in one pass; :mod:`ledger.verification.range_fold` makes the whole of them.

What needs the ranges before or behind is left open: whether the first entry follows the last of the range before, what
a snapshot covers beyond the border, the tree's own root. Memory grows with the rows of the range, about 200 bytes each.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from hashlib import sha256
from itertools import pairwise

from ledger.merkle.subtrees import PartOfTree
from ledger.merkle.tiles import TILE_HEIGHT, TILE_WIDTH
from ledger.verification.entry_check import EntryChecker, EntryColumns, EntryRow, EntryRun, is_malformed
from ledger.verification.range_summary import Border, IntervalPart, Mark, RangeSummary, RangeTask, Tile, TileNodes
from ledger.verification.snapshot_check import OpenSnapshot, SnapshotRow, has_place, open_row
from ledger.verification.tile_check import TILES_AT_ONCE, TileBreak, tile_break
from ledger.verification.verdict import Break, Findings, Head

ReadTilesNow = Callable[[int, int, int], Mapping[int, bytes] | None]
"""Stored tiles of one level, from the first to the last index given, by index; None where no tiles are stored."""


class RangeChecker:
    """Takes the rows of one range in order; ``finish`` gives what the whole needs of it."""

    def __init__(
        self,
        task: RangeTask,
        snapshots: Sequence[SnapshotRow],
        open_snapshot: OpenSnapshot | None,
        on_break: Callable[[Break], object] | None = None,
    ) -> None:
        """
        Args:
            task: the range.
            snapshots: all snapshot rows that overlap it, ordered by ``from_seq`` and ``to_seq``, and in the first
                range also those that lack one of these.
            open_snapshot: as for a whole verification.
            on_break: is called with every break of the range.
        """
        self.task = task
        self._findings = Findings(on_break)
        self._entries: EntryChecker | None = None
        if task.from_seq is None:
            # The first range: what comes first must be the first entry.
            self._entries = EntryChecker(
                task.tenant_id,
                self._findings,
                first_seq=task.first_seq,
                prev_link=None,
                is_prev_known=task.first_seq == 1,
                may_be_v1=task.may_be_v1,
            )
        self._border: Border | None = None
        self._last_row: Head | None = None
        self._runs: list[PartOfTree] = []
        placed = [row for row in snapshots if has_place(row, self._findings) and row[0] >= task.first_seq]
        self._snapshots = [open_row(row, open_snapshot, self._findings) for row in placed if task.holds(row[1])]
        covered = {(row[0], row[1]) for row in placed} | {(each.from_seq, each.to_seq) for each in self._snapshots}
        covered |= {*task.intervals}
        self._intervals = sorted(each for each in covered if each[0] <= each[1] and task.overlaps(*each))
        self._to_mark = sorted({seq for each in self._intervals for seq in each})
        self._marks: dict[int, Mark] = {}

    def check(self, rows: Sequence[EntryRow]) -> None:
        """The next rows, at least one."""
        self.check_columns([*zip(*rows, strict=True)])

    def check_columns(self, columns: EntryColumns) -> None:
        """As ``check``, of rows that are given by their columns."""
        checker = self.entries([column[0] for column in columns])
        self.take(checker.check_columns(columns), Head(columns[0][-1], columns[9][-1], columns[1][-1]))

    def entries(self, first_row: EntryRow) -> EntryChecker:
        """The checker of this range's entries, given the first of the rows that come next."""
        if self._entries is None:
            # What the first row names as the one before it is believed here and compared by the fold.
            self._border = Border(first_row[0], first_row[8], is_malformed(first_row))
            self._entries = EntryChecker(
                self.task.tenant_id,
                self._findings,
                first_seq=first_row[0],
                prev_link=first_row[8],
                may_be_v1=self.task.may_be_v1,
            )
        return self._entries

    def take(self, runs: Sequence[EntryRun], last_row: Head) -> None:
        """What the checker of ``entries`` gave for the next rows, and the last of them."""
        for run in runs:
            if not self._runs or self._runs[-1].end != run.first_seq - 1:
                self._runs.append(PartOfTree(run.first_seq - 1))
            self._runs[-1].append([sha256(b"\x00" + link).digest() for link in run.links])
            self._mark(run)
        self._last_row = last_row

    def _mark(self, run: EntryRun) -> None:
        end = run.first_seq + len(run.links)
        for seq in self._to_mark[bisect_left(self._to_mark, run.first_seq) : bisect_left(self._to_mark, end)]:
            at = seq - run.first_seq
            self._marks[seq] = Mark(run.links[at], run.hlcs[at])

    def finish(self, read_tiles: ReadTilesNow) -> RangeSummary:
        """No row follows; ``read_tiles`` reads stored tiles."""
        task, entries = self.task, self._entries
        # Only what follows the range before without gap can be part of the tree.
        is_tree_known = task.first_seq == 1 and bool(self._runs) and self._runs[0].begin == task.begin - 1
        tree = self._runs[0] if is_tree_known else None
        tile_breaks, tiles = _Tiles(task, tree, read_tiles).compare()
        return RangeSummary(
            number=task.number,
            rows=0 if entries is None else entries.entries_checked,
            border=self._border,
            has_entries=bool(self._runs),
            next_seq=task.begin if entries is None else entries.next_seq,
            last_link=None if entries is None else entries.last_link,
            last_row=self._last_row,
            relied_on_v1=entries is not None and entries.relied_on_v1,
            may_be_v1=task.may_be_v1 if entries is None else entries.may_be_v1,
            runs=[(run.begin + 1, run.end) for run in self._runs],
            marks=self._marks,
            parts=[*self._parts()],
            segments=[] if tree is None else [*self._segments(tree)],
            tile_nodes=[] if tree is None else [*_tile_nodes(tree, task.tree_size)],
            tile_breaks=tile_breaks,
            tiles=tiles,
            snapshots=self._snapshots,
            found=self._findings.found(),
        )

    def _parts(self) -> Iterator[IntervalPart]:
        """For each interval its part in this range, where no entry of that is missing."""
        task = self.task
        for from_seq, to_seq in self._intervals:
            begin = from_seq if task.from_seq is None else max(from_seq, task.from_seq)
            end = to_seq if task.to_seq is None else min(to_seq, task.to_seq)
            for run in self._runs:
                if run.begin < begin and end <= run.end:
                    hashes = run.part(begin - 1, end, origin=from_seq - 1)
                    yield IntervalPart((from_seq, to_seq), begin, end, hashes)

    def _segments(self, tree: PartOfTree) -> Iterator[tuple[int, list[bytes]]]:
        cuts = {tree.begin, tree.end, *self.task.sizes, *(to_seq for _, to_seq in self._intervals)}
        for begin, end in pairwise(sorted(cut for cut in cuts if tree.begin <= cut <= tree.end)):
            yield end, tree.part(begin, end)


# --- tiles ----------------------------------------------------------------------------------------


def _tile_nodes(tree: PartOfTree, tree_size: int) -> Iterator[TileNodes]:
    """The nodes of those tiles of a tree of ``tree_size`` leaves that are not full or not all in this part."""
    level = 0
    while True:
        first, nodes = _nodes(tree, tree_size, level)
        if not nodes:
            return
        end = first + len(nodes)
        full = _full_tiles(first, end)
        parts = [(first, full.start * TILE_WIDTH), (full.stop * TILE_WIDTH, end)] if full else [(first, end)]
        for begin, stop in parts:
            if begin < stop:
                yield TileNodes(level, begin, b"".join(nodes[begin - first : stop - first]))
        level += 1


def _nodes(tree: PartOfTree, tree_size: int, level: int) -> tuple[int, list[bytes]]:
    """Index of the first, and the hashes of all nodes of a tile level that lie in this part of a tree of that size."""
    first, nodes = tree.nodes(level * TILE_HEIGHT)
    return first, nodes[: max(0, (tree_size >> level * TILE_HEIGHT) - first)]


def _full_tiles(first: int, end: int) -> range:
    """Indexes of the tiles whose nodes all lie in ``first..end - 1`` of a level."""
    return range(-(-first // TILE_WIDTH), end // TILE_WIDTH)


class _Tiles:
    """Compares the tiles that are full and all here, and reads the others that end here."""

    def __init__(self, task: RangeTask, tree: PartOfTree | None, read_tiles: ReadTilesNow) -> None:
        self._task = task
        self._tree = tree
        self._read_tiles = read_tiles

    def compare(self) -> tuple[list[tuple[int, TileBreak]], list[Tile]]:
        """The tiles that differ, with their ends, and those for the whole to compare."""
        found: list[tuple[int, TileBreak]] = []
        tiles: list[Tile] = []
        for level in range(-(-self._task.tree_size.bit_length() // TILE_HEIGHT)):
            if self._tree is None:
                break
            found += self._compare_level(self._tree, level)
            for index in self._shared(level):
                stored = self._read_tiles(level, index, index)
                if stored is not None:
                    tiles.append((level, index, stored.get(index, b"")))
        return found, tiles

    def _compare_level(self, tree: PartOfTree, level: int) -> Iterator[tuple[int, TileBreak]]:
        first, nodes = _nodes(tree, self._task.tree_size, level)
        full = _full_tiles(first, first + len(nodes))
        for begin in full[::TILES_AT_ONCE]:
            stored = self._read_tiles(level, begin, min(begin + TILES_AT_ONCE, full.stop) - 1)
            if stored is None:
                return
            for index in range(begin, min(begin + TILES_AT_ONCE, full.stop)):
                at = index * TILE_WIDTH - first
                computed = b"".join(nodes[at : at + TILE_WIDTH])
                differs = tile_break(level, index, computed, stored.get(index, b""))
                if differs is not None:
                    yield index + 1 << (level + 1) * TILE_HEIGHT, differs

    def _shared(self, level: int) -> Iterator[int]:
        """Tiles of a level that end in this range and begin before it, or are partial."""
        task, leaves = self._task, 1 << (level + 1) * TILE_HEIGHT
        begin, size = task.begin - 1, task.tree_size
        index, inside = divmod(begin, leaves)
        end = (index + 1) * leaves
        if inside and end <= size and task.holds(end):
            yield index
        if task.holds(size) and size >> level * TILE_HEIGHT & TILE_WIDTH - 1:
            yield size // leaves
