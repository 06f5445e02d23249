"""Checks one range of a chain by itself, in one pass; :mod:`ledger.verification.range_fold` folds the results.

Checks that need other ranges are left to the fold: whether the first entry follows the last of the range before,
entries of a snapshot beyond the border, the root of the tree. Memory grows with the rows of the range, about 200 bytes
each. Order of calls: ``check`` or ``check_packed``, ``tiles`` with ``compare_tiles``, ``finish``.

A range is all entries with ``from_seq <= seq <= to_seq``. The ranges of a chain are adjacent; the first takes all lower
seqs and the last all higher ones::

    ranges[0].from_seq is None        ranges[n].from_seq == ranges[n - 1].to_seq + 1        ranges[-1].to_seq is None

Hashes are kept only for stretches without a gap, since a gap ends every comparison across it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from itertools import count, pairwise
from typing import Any, Final, NamedTuple

import msgspec

from ledger.job_index import keys_of
from ledger.job_index.builder import IndexPart, PartIndex
from ledger.merkle import HASH_BYTES, PartOfTree, leaf_hashes
from ledger.merkle.tiles import TILE_HEIGHT, TILE_WIDTH
from ledger.verification.caller_check import NOBODY_KNOWN, CallerChecker, CallerJudge
from ledger.verification.entry_check import (
    DeferredRow,
    EntryChecker,
    EntryRow,
    Packed,
    Passed,
    columns_of_wrong_type,
)
from ledger.verification.reader import of_commitments
from ledger.verification.snapshot_check import OpenedRow, OpenSnapshot, SnapshotRow, has_place, open_row
from ledger.verification.tree_check import TILES_AT_ONCE, tile_break
from ledger.verification.verdict import Break, Findings, Found, Head

Interval = tuple[int, int]
"""First and last seq of a covered run of entries."""


class RangeTask(NamedTuple):
    """One range to check, and the facts known before any of its rows is read."""

    tenant_id: str
    number: int
    """Number of the range, from 0."""
    from_seq: int | None
    to_seq: int | None
    first_seq: int = 1
    """The first verified entry of the chain."""
    tree_size: int = 0
    """Size of the stored tree, 0 when there is none."""
    sizes: tuple[int, ...] = ()
    """Sizes at which a root of the tree must be known: of the stored tree, of checkpoints and of anchors."""
    intervals: tuple[Interval, ...] = ()
    """Entries that snapshots cover, besides the snapshot rows that are given with the range."""
    may_be_v1: bool = True
    """Whether all entries before may have version 1."""
    is_tree_known: bool = True
    """Whether the tree over the entries before ``first_seq`` is known, so that tiles can be compared."""
    indexed: int = 0
    """Entries of the chain that the index of jobs has already."""

    @property
    def begin(self) -> int:
        """The lowest valid seq of an entry in this range."""
        return self.first_seq if self.from_seq is None else self.from_seq

    def overlaps(self, from_seq: int, to_seq: int) -> bool:
        """Whether entries ``from_seq..to_seq`` overlap this range."""
        return (self.from_seq is None or to_seq >= self.from_seq) and (self.to_seq is None or from_seq <= self.to_seq)

    def holds(self, seq: int) -> bool:
        """Whether entry ``seq`` is in this range."""
        return self.overlaps(seq, seq)


class Border(NamedTuple):
    """The first entry of a range, for the comparison with the last one before it."""

    seq: int
    prev_link: Any
    has_wrong_type: bool
    """If true, the entry is not compared."""


Mark = tuple[bytes, Any]
"""Raw link and stored ``t_hlc`` of an entry at the start or end of an interval."""


class IntervalPart(NamedTuple):
    """Roots of the subtrees that entries ``begin..end`` fall into, in the tree over an interval alone."""

    interval: Interval
    begin: int
    end: int
    hashes: list[bytes]


Tile = tuple[int, int, Any]
"""Level, index and stored value of a tile whose entries are not all in one range."""


class TileNodes(NamedTuple):
    """Roots of adjacent perfect subtrees of ``256 ** level`` leaves, of tiles that are not wholly in the range."""

    level: int
    first: int
    hashes: bytes


class RangeSummary(msgspec.Struct, array_like=True):
    """All that the fold needs of one range, besides the listed breaks."""

    snapshots: list[OpenedRow]
    """Snapshots whose stored rows begin in the range."""
    next_seq: int
    may_be_v1: bool
    """Whether all entries so far may still have version 1."""
    deferred: list[DeferredRow] = []
    """Rows of version 1 with which the range begins."""
    rows: int = 0
    border: Border | None = None
    """None in the first range of a chain, and if there are no entries."""
    last_link: Any = None
    """Stored link of the last entry that is in its place."""
    last_row: Head | None = None
    """The last row of the range."""
    runs: list[Interval] = []
    """Runs of consecutive entries that are in their places."""
    marks: dict[int, Mark] = {}
    parts: list[IntervalPart] = []
    """Of each interval, what is here of it."""
    segments: list[tuple[int, list[bytes]]] = []
    """Roots of the subtrees that the entries up to each size fall into, in the tree over all entries."""
    tile_nodes: list[TileNodes] = []
    tile_breaks: list[tuple[int, Break]] = []
    """Stored tiles that differ, each with the number of entries up to its end."""
    tiles: list[Tile] = []
    commitments: int = 0
    """Entries whose verdicts are to be judged."""
    job_index: IndexPart | None = None
    """What the index of jobs needs of the range, None if it does not follow the range before without gap."""
    signed: bytes = b""
    """What ``CallerChecker`` collected."""
    found: Found = msgspec.field(default_factory=Found)


SEQ_MAX: Final = 2**63 - 1
"""Of entries that a table can hold."""

TileRange = tuple[int, int, int]
"""Level, and first and last index, of adjacent tiles."""


class RangeChecker:
    """Takes the rows of one range in order; ``finish`` returns the summary for the fold."""

    def __init__(
        self,
        task: RangeTask,
        snapshots: Sequence[OpenedRow],
        findings: Findings,
        callers: CallerJudge = NOBODY_KNOWN,
    ) -> None:
        """
        Args:
            task: the range.
            snapshots: all snapshots that overlap it or begin in it, ordered as they are stored, perhaps more.
            findings: receives the breaks of the range.
            callers: judges what callers signed.
        """
        self.task = task
        self._findings = findings
        self._callers = CallerChecker(task.tenant_id, findings, callers)
        # The first range of a chain begins with the first entry.
        self._is_first = task.from_seq is None and task.first_seq == 1
        verified = [each for each in snapshots if each.stored_from >= task.first_seq]
        self.summary = RangeSummary(
            [each for each in verified if task.holds(each.stored_from)], task.begin, task.may_be_v1
        )
        """What is known of the entries so far."""
        self._entries = self._begin(task.begin, None, is_prev_known=self._is_first)
        self._runs: list[PartOfTree] = []
        covered = {(each.stored_from, each.stored_to) for each in verified} | {*task.intervals}
        self._intervals = sorted(each for each in covered if each[0] <= each[1] and task.overlaps(*each))
        self._to_mark = sorted({seq for each in self._intervals for seq in each})
        ends = sorted({to_seq for _, to_seq in self._intervals})
        self._job_index = PartIndex(max(task.begin - 1, task.indexed), ends)

    def _begin(self, first_seq: int, prev_link: Any, *, is_prev_known: bool = True) -> EntryChecker:
        return EntryChecker(
            self.task.tenant_id,
            self._findings,
            first_seq=first_seq,
            prev_link=prev_link,
            is_prev_known=is_prev_known,
            may_be_v1=self.task.may_be_v1,
            deferred=self.summary.deferred,
        )

    def check(self, rows: Sequence[EntryRow]) -> None:
        """The next rows, at least one."""
        found = self.summary
        if not self._is_first and not self._entries.entries_checked:
            # The first row's previous link is trusted here, and compared by the fold.
            found.border = Border(rows[0][0], rows[0][8], bool(columns_of_wrong_type(rows[0])))
            self._entries = self._begin(rows[0][0], rows[0][8])
        found.commitments += len(of_commitments(rows))
        self._callers.check_rows(rows)
        for run in self._entries.check(rows):
            self._append(run.first_seq, leaf_hashes(run.links), keys_of(run.jobs))
            end = run.first_seq + len(run.links)
            for seq in self._to_mark[bisect_left(self._to_mark, run.first_seq) : bisect_left(self._to_mark, end)]:
                found.marks[seq] = run.links[seq - run.first_seq], run.hlcs[seq - run.first_seq]
        found.last_row = Head(rows[-1][0], rows[-1][9], rows[-1][1])

    def check_packed(self, packed: Packed, stop_seq: int = SEQ_MAX) -> Passed | None:
        """As ``check``, for entries up to ``stop_seq``. None, with no entry taken, if ``check`` must be called."""
        found, entries = self.summary, self._entries
        first_seq, is_begun = entries.next_seq, self._is_first or entries.entries_checked
        if (
            passed := entries.check_packed(packed, stop_seq, self._to_mark, self._callers.sees_all)
        ) is None or not passed.leaves:
            return passed
        if not is_begun:
            found.border = Border(first_seq, passed.first_prev, False)
        found.commitments += passed.commitments
        self._callers.check(passed.said)
        self._append(first_seq, passed.leaves, passed.keys)
        found.marks.update((seq, (link, hlc)) for seq, link, hlc in passed.marks)
        found.last_row = Head(entries.last_seq, passed.last_link, passed.last_hlc)
        return passed

    def _append(self, first_seq: int, leaves: list[bytes], keys: bytes) -> None:
        if not self._runs or self._runs[-1].end != first_seq - 1:
            self._runs.append(PartOfTree(first_seq - 1))
        self._runs[-1].append(leaves)
        if 0 <= (known := self._job_index.end - first_seq + 1) < len(leaves):
            self._job_index.append(keys[known * HASH_BYTES :], b"".join(leaves[known:]))

    @property
    def _part(self) -> PartOfTree | None:
        """The entries as part of the tree, if they follow the range before without gap."""
        return self._runs[0] if self._runs and self._runs[0].begin == self.task.begin - 1 else None

    @property
    def _tree(self) -> PartOfTree | None:
        """The same part if tiles can be compared: these belong to the tree from the first entry on."""
        return self._part if self.task.is_tree_known else None

    def tiles(self) -> Iterator[TileRange]:
        """After the last row: the tiles to read and pass to ``compare_tiles``, as far as they are stored."""
        if self._tree is None:
            return
        for level in range(-(-self.task.tree_size.bit_length() // TILE_HEIGHT)):
            first, nodes = _nodes(self._tree, self.task.tree_size, level)
            full = _full_tiles(first, first + len(nodes))
            for begin in full[::TILES_AT_ONCE]:
                yield level, begin, min(begin + TILES_AT_ONCE, full.stop) - 1
            for index in self._shared_tiles(level):
                yield level, index, index

    def compare_tiles(self, tiles: TileRange, stored: Mapping[int, Any]) -> None:
        """Compare stored tiles, by index, of one of ``tiles()`` with the entries; the fold compares shared ones."""
        level, begin, last = tiles
        assert self._tree is not None
        first, nodes = _nodes(self._tree, self.task.tree_size, level)
        for index in range(begin, last + 1):
            at, held = index * TILE_WIDTH - first, stored.get(index, b"")
            if at < 0 or at + TILE_WIDTH > len(nodes):
                self.summary.tiles.append((level, index, held))
            elif (differs := tile_break(level, index, b"".join(nodes[at : at + TILE_WIDTH]), held)) is not None:
                self.summary.tile_breaks.append(((index + 1) << ((level + 1) * TILE_HEIGHT), differs))

    def finish(self) -> RangeSummary:
        """The summary of this range for the fold."""
        entries = self._entries
        return msgspec.structs.replace(
            self.summary,
            rows=entries.entries_checked,
            next_seq=entries.next_seq,
            last_link=entries.last_link,
            may_be_v1=entries.may_be_v1,
            runs=[(run.begin + 1, run.end) for run in self._runs],
            parts=[*self._parts()],
            segments=[] if self._part is None else [*self._segments(self._part)],
            job_index=None if self._part is None else self._job_index.finish(),
            tile_nodes=[] if self._tree is None else [*_tile_nodes(self._tree, self.task.tree_size)],
            signed=bytes(self._callers.signed),
            found=self._findings.found,
        )

    def _parts(self) -> Iterator[IntervalPart]:
        """The part of each interval in this range, if no entry of the part is missing."""
        task = self.task
        for from_seq, to_seq in self._intervals:
            begin = from_seq if task.from_seq is None else max(from_seq, task.from_seq)
            end = to_seq if task.to_seq is None else min(to_seq, task.to_seq)
            for run in self._runs:
                if run.begin < begin and end <= run.end:
                    yield IntervalPart((from_seq, to_seq), begin, end, run.part(begin - 1, end, origin=from_seq - 1))

    def _segments(self, tree: PartOfTree) -> Iterator[tuple[int, list[bytes]]]:
        cuts = {tree.begin, tree.end, *self.task.sizes, *(to_seq for _, to_seq in self._intervals)}
        for begin, end in pairwise(sorted(cut for cut in cuts if tree.begin <= cut <= tree.end)):
            yield end, tree.part(begin, end)

    def _shared_tiles(self, level: int) -> Iterator[int]:
        """Tiles of a level that end in this range and begin before it, or are partial."""
        task, leaves = self.task, 1 << ((level + 1) * TILE_HEIGHT)
        begin, size = task.begin - 1, task.tree_size
        index, inside = divmod(begin, leaves)
        end = (index + 1) * leaves
        if inside and end <= size and task.holds(end):
            yield index
        if task.holds(size) and (size >> (level * TILE_HEIGHT)) & (TILE_WIDTH - 1):
            yield size // leaves


def opened_for(
    task: RangeTask, rows: Sequence[SnapshotRow], open_snapshot: OpenSnapshot | None, findings: Findings
) -> list[OpenedRow]:
    """Stored snapshots as the checker of a range takes them that is checked by itself.

    One that begins in another range is judged there, so here it is not opened. Those that lack where they begin or end
    MUST be given with one range alone.
    """
    return [
        open_row(row, open_snapshot if task.holds(row[0]) else None, findings)
        for row in rows
        if has_place(row, findings) and row[0] >= task.first_seq
    ]


# --- tiles ----------------------------------------------------------------------------------------


def _tile_nodes(tree: PartOfTree, tree_size: int) -> Iterator[TileNodes]:
    """The nodes of those tiles of a tree of ``tree_size`` leaves that are not full or not all in this part."""
    for level in count():
        first, nodes = _nodes(tree, tree_size, level)
        if not nodes:
            return
        end = first + len(nodes)
        full = _full_tiles(first, end)
        before, behind = (full.start * TILE_WIDTH, full.stop * TILE_WIDTH) if full else (end, end)
        for begin, stop in ((first, before), (behind, end)):
            if begin < stop:
                yield TileNodes(level, begin, b"".join(nodes[begin - first : stop - first]))


def _nodes(tree: PartOfTree, tree_size: int, level: int) -> tuple[int, list[bytes]]:
    """Index of the first, and the hashes of all nodes of a tile level that lie in this part of a tree of that size."""
    first, nodes = tree.nodes(level * TILE_HEIGHT)
    return first, nodes[: max(0, (tree_size >> (level * TILE_HEIGHT)) - first)]


def _full_tiles(first: int, end: int) -> range:
    """Indexes of the tiles whose nodes all lie in ``first..end - 1`` of a level."""
    return range(-(-first // TILE_WIDTH), end // TILE_WIDTH)
