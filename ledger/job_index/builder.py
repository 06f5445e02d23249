"""Makes the index of a log as its entries pass: in parts, each by itself, which are then put together in order.

``PartIndex`` takes the entries of a part of the log. Its ``IndexPart`` has the runs over the blocks that begin and end
in the part, merged where eight begin at a multiple of eight, and the entries of the blocks that cross its ends.
``IndexBuilder`` takes the parts in order and gives the roots of the index at each size that was asked for::

    part    |   head   | block | eight blocks, merged | block |  tail  |        head, tail < BLOCK_ENTRIES entries

Where the first entries of a log are not known, neither are the runs that reach into them: their root is None.
Memory: 72 bytes for each job of each run below ``LEVEL_MAX``, so at most that for ``run_entries(LEVEL_MAX)`` entries.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from ledger.job_index import (
    BLOCK_ENTRIES,
    LEVEL_MAX,
    RUNS_MERGED,
    block_leaves,
    covering,
    merged_leaves,
    merged_root,
    root_of,
    run_entries,
)
from ledger.merkle import HASH_BYTES

Roots = list[bytes | None]
"""Roots of the runs of an index, from left to right; None of a run that is not known."""

_GROUP_ENTRIES: Final = run_entries(1)


class OpenBlock(msgspec.Struct, array_like=True):
    """Entries from ``begin`` on, of one block: the keys of their jobs, and their leaf hashes."""

    begin: int
    keys: bytes = b""
    hashes: bytes = b""

    @property
    def end(self) -> int:
        """Leaf index after the last entry."""
        return self.begin + len(self.keys) // HASH_BYTES

    def with_entries(self, keys: bytes, hashes: bytes) -> OpenBlock:
        """With these entries behind it."""
        return OpenBlock(self.begin, self.keys + keys, self.hashes + hashes)

    def up_to(self, size: int) -> OpenBlock:
        """The entries before leaf index ``size``."""
        count = (size - self.begin) * HASH_BYTES
        return OpenBlock(self.begin, self.keys[:count], self.hashes[:count])

    def leaves(self) -> bytes:
        """The leaves of the run over them."""
        return block_leaves(self.begin, self.keys, self.hashes)


class PartRun(msgspec.Struct, array_like=True):
    """A run of level 0 or 1 that begins at leaf index ``begin``."""

    level: int
    begin: int
    leaves: bytes
    block_roots: list[bytes]

    @property
    def end(self) -> int:
        """Leaf index after its last entry."""
        return self.begin + run_entries(self.level)


class IndexPart(msgspec.Struct, array_like=True):
    """All that the index needs of one part of a log."""

    head: OpenBlock
    """The entries before the first border of blocks, or all of a part without one."""
    runs: list[PartRun]
    tail: OpenBlock
    """The entries behind the last border."""
    cuts: list[tuple[int, bytes | None]]
    """The sizes asked for, and there the root of the run over an incomplete block that begins in the part."""


class PartIndex:
    """Takes the entries of one part of a log, in order and without a gap."""

    def __init__(self, begin: int, cuts: Sequence[int]) -> None:
        """The part begins at leaf index ``begin``; ``cuts`` are the sizes, ascending, at which roots are wanted."""
        self._cuts = [size for size in cuts if size > begin]
        self._found: list[tuple[int, bytes | None]] = []
        self._head: OpenBlock | None = None
        self._open = OpenBlock(begin)
        self._runs: list[PartRun] = []

    @property
    def end(self) -> int:
        """Leaf index after the last entry."""
        return self._open.end

    def append(self, keys: bytes, hashes: bytes) -> None:
        """The next entries: keys of their jobs, and leaf hashes."""
        at = 0
        while at < len(keys):
            border = (self._open.end // BLOCK_ENTRIES + 1) * BLOCK_ENTRIES
            count = (border - self._open.end) * HASH_BYTES
            self._open = self._open.with_entries(keys[at : at + count], hashes[at : at + count])
            at += count
            self._pass_cuts()
            if self._open.end == border:
                self._close()

    def _pass_cuts(self) -> None:
        while self._cuts and self._cuts[0] <= self._open.end:
            size = self._cuts.pop(0)
            is_whole = self._open.begin % BLOCK_ENTRIES == 0 and size % BLOCK_ENTRIES != 0
            self._found.append((size, root_of(self._open.up_to(size).leaves()) if is_whole else None))

    def _close(self) -> None:
        """The open block is complete."""
        block, self._open = self._open, OpenBlock(self._open.end)
        if block.begin % BLOCK_ENTRIES:
            self._head = block
            return
        if self._head is None:
            self._head = OpenBlock(block.begin)
        leaves = block.leaves()
        self._runs.append(PartRun(0, block.begin, leaves, [root_of(leaves)]))
        group = self._runs[-RUNS_MERGED:]
        if self.end % _GROUP_ENTRIES == 0 and group[0].begin == self.end - _GROUP_ENTRIES:
            merged = merged_leaves([run.leaves for run in group])
            roots = [root for run in group for root in run.block_roots]
            self._runs[-RUNS_MERGED:] = [PartRun(1, group[0].begin, merged, roots)]

    def finish(self) -> IndexPart:
        """The part, once all its entries were given."""
        if self._head is None:
            is_border = self._open.begin % BLOCK_ENTRIES == 0
            self._head, tail = (OpenBlock(self._open.begin), self._open) if is_border else (self._open, self._open)
            self._open = tail if is_border else OpenBlock(self._open.end)
        return IndexPart(self._head, self._runs, self._open, self._found)


class _Run(msgspec.Struct):
    root: bytes
    leaves: bytes
    """Empty of the highest level, whose runs are not merged."""


class IndexBuilder:
    """The index of the first entries of a log, which grows by parts."""

    def __init__(self, size: int = 0) -> None:
        """``size`` entries came before, of which nothing is known."""
        self._runs: dict[tuple[int, int], _Run] = {}
        """By level and first leaf index, the runs of the index of the full blocks, as far as they are known."""
        self._open: OpenBlock | None = None if size % BLOCK_ENTRIES else OpenBlock(size)
        """The entries behind the full blocks, None if not all are known."""

    def add(self, part: IndexPart) -> dict[int, Roots]:
        """Add the next part; returns the roots at its cuts, by size."""
        cuts, found = [*part.cuts], dict[int, Roots]()
        head_end = part.head.end
        if self._open is not None:
            self._open = self._open.with_entries(part.head.keys, part.head.hashes)
        while cuts and (cuts[0][0] < head_end or (cuts[0][0] == head_end and head_end % BLOCK_ENTRIES)):
            size = cuts.pop(0)[0]
            partial = None if self._open is None else root_of(self._open.up_to(size).leaves())
            found[size] = self._roots(size, (), partial)
        if head_end % BLOCK_ENTRIES:
            return found
        if self._open is not None and self._open.keys:
            self._put(0, self._open.begin, self._open.leaves())
        for run in part.runs:
            while cuts and cuts[0][0] < run.end:
                size, partial = cuts.pop(0)
                found[size] = self._roots(size, run.block_roots, partial, run.begin)
            self._put(run.level, run.begin, run.leaves)
        self._open = part.tail
        found.update((size, self._roots(size, (), partial)) for size, partial in cuts)
        return found

    def _put(self, level: int, begin: int, leaves: bytes) -> None:
        """Add a run, and merge it with its neighbours where they are all there."""
        self._runs[level, begin] = _Run(root_of(leaves), leaves if level < LEVEL_MAX else b"")
        entries, above = run_entries(level), run_entries(level + 1)
        if level == LEVEL_MAX or (begin + entries) % above:
            return
        first = begin + entries - above
        group = [self._runs.pop((level, at), None) for at in range(first, first + above, entries)]
        known = [run.leaves for run in group if run is not None]
        if len(known) < RUNS_MERGED:
            return
        if level + 1 == LEVEL_MAX:
            self._runs[LEVEL_MAX, first] = _Run(merged_root(known), b"")
        else:
            self._put(level + 1, first, merged_leaves(known))

    def _roots(self, size: int, blocks: Sequence[bytes], partial: bytes | None, first: int = 0) -> Roots:
        """Roots at ``size``; ``blocks`` are those of the blocks from leaf index ``first`` on, not added yet."""
        found: Roots = []
        for level, begin, end in covering(size):
            at = (begin - first) // BLOCK_ENTRIES
            if end - begin < BLOCK_ENTRIES:
                found.append(partial)
            elif level == 0 and blocks and 0 <= at < len(blocks):
                found.append(blocks[at])
            else:
                run = self._runs.get((level, begin))
                found.append(None if run is None else run.root)
        return found
