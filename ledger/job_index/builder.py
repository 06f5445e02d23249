"""Makes the index of a log as its entries pass: in parts, each by itself, which are then put together in order.

``PartIndex`` takes the entries of a part of the log. Its ``IndexPart`` has the runs over the blocks that begin and end
in the part, merged where eight begin at a multiple of eight, and the entries of the blocks that cross its ends.
``IndexBuilder`` takes the parts in order and gives the roots of the index at each size that was asked for::

    part    |   head   | block | eight blocks, merged | block |  tail  |        head, tail < BLOCK_ENTRIES entries

Where the first entries of a log are not known, neither are the runs that reach into them, unless what is needed of them
was kept (``LeftIndex``). Memory: 72 bytes for each job of each run below ``LEVEL_MAX``, so at most that for
``run_entries(LEVEL_MAX)`` entries.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from ledger.job_index import (
    BLOCK_ENTRIES,
    LEAF_BYTES,
    LEVEL_MAX,
    RUNS_MERGED,
    RunPlace,
    begin_behind,
    block_leaves,
    covering,
    group_begin,
    merged_leaves,
    merged_root,
    root_of,
    run_entries,
)
from ledger.merkle import HASH_BYTES

Roots = Mapping[RunPlace, bytes]
"""Roots of the runs that are known, by their places, among them those of an index of a size."""

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


class _Run(msgspec.Struct, frozen=True):
    root: bytes
    leaves: bytes
    """Empty of a run that is never merged."""


class LeftIndex(msgspec.Struct, frozen=True):
    """What the index needs of entries that left, at most 72 bytes for each of ``run_entries(LEVEL_MAX)`` jobs."""

    begin: int
    """Where the index begins."""
    runs: list[bytes]
    """Leaves of the runs over full blocks that a later run is merged of, from left to right."""
    open: OpenBlock
    """The entries behind the full blocks."""

    def fits(self, size: int, roots: Roots) -> bool:
        """Whether it is that of the index of ``size`` entries with these roots."""
        held, places = self.open, self.places()
        if held.begin != size - size % BLOCK_ENTRIES or len(self.runs) != len(places):
            return False
        is_whole = len(held.keys) == len(held.hashes) == (size - held.begin) * HASH_BYTES
        if not is_whole or any(len(run) % LEAF_BYTES or not run for run in self.runs):
            return False
        found = dict(zip(places, map(root_of, self.runs), strict=True))
        if held.keys:
            found[RunPlace(0, held.begin, size)] = root_of(held.leaves())
        return found == {place: root for place, root in roots.items() if place.begin >= group_begin(size)}

    def places(self) -> list[RunPlace]:
        """The places of its runs."""
        return [*covering(self.open.begin, max(self.begin, group_begin(self.open.begin)))]


class IndexBuilder:
    """The index of the first entries of a log, which grows by parts."""

    def __init__(self, size: int = 0) -> None:
        """``size`` entries came before, of which nothing is known."""
        self.size = size
        self.begin = begin_behind(size)
        """Where the index begins, by what is known."""
        self._runs: dict[tuple[int, int], _Run] = {}
        """By level and first leaf index, the known runs over full blocks that are not merged yet."""
        self._open: OpenBlock | None = None if size % BLOCK_ENTRIES else OpenBlock(size)
        """The entries behind the full blocks, None if not all are known."""
        self._known: dict[RunPlace, bytes] = {}
        """Roots of all runs over full blocks that there were: an index that begins later has some that were merged."""

    @classmethod
    def behind(cls, left: LeftIndex, roots: Roots) -> IndexBuilder:
        """The index of a log whose first entries left, given its roots there; ``left`` MUST fit them."""
        found = cls(left.open.end)
        found.begin = left.begin
        found._runs = {place[:2]: _Run(root, b"") for place, root in roots.items() if place.end % BLOCK_ENTRIES == 0}
        found._runs |= {
            place[:2]: _Run(roots[place], leaves) for place, leaves in zip(left.places(), left.runs, strict=True)
        }
        found._open = left.open
        found.knows(roots)
        return found

    def copy(self) -> IndexBuilder:
        """One that grows by itself."""
        found = IndexBuilder(self.size)
        found.begin = self.begin
        found._runs, found._open, found._known = {**self._runs}, self._open, {**self._known}
        return found

    @property
    def open(self) -> OpenBlock | None:
        """The entries behind the full blocks, None if not all are known."""
        return self._open

    def left(self) -> LeftIndex | None:
        """What is needed of these entries once they have left, None if not all of that is known."""
        if self._open is None:
            return None
        places = LeftIndex(self.begin, [], self._open).places()
        runs = [self._runs[place[:2]].leaves for place in places if place[:2] in self._runs]
        return LeftIndex(self.begin, runs, self._open) if len(runs) == len(places) else None

    def knows(self, roots: Roots) -> None:
        """Take the roots of these runs over full blocks as known."""
        self._known |= {place: root for place, root in roots.items() if place.end % BLOCK_ENTRIES == 0}

    def roots(self) -> Roots:
        """The roots at this size."""
        is_any = self._open is not None and self._open.keys
        return self._roots(self.size, root_of(self._open.leaves()) if self._open is not None and is_any else None)

    def add(self, part: IndexPart) -> dict[int, Roots]:
        """Add the next part; returns the roots at its cuts, by size."""
        cuts, found = [*part.cuts], dict[int, Roots]()
        head_end, self.size = part.head.end, part.tail.end
        if self._open is not None:
            self._open = self._open.with_entries(part.head.keys, part.head.hashes)
        while cuts and (cuts[0][0] < head_end or (cuts[0][0] == head_end and head_end % BLOCK_ENTRIES)):
            size = cuts.pop(0)[0]
            partial = None if self._open is None else root_of(self._open.up_to(size).leaves())
            found[size] = self._roots(size, partial)
        if head_end % BLOCK_ENTRIES:
            return found
        if self._open is not None and self._open.keys:
            self._put(0, self._open.begin, self._open.leaves())
        for run in part.runs:
            for at, root in enumerate(run.block_roots):
                begin = run.begin + at * BLOCK_ENTRIES
                self._known[RunPlace(0, begin, begin + BLOCK_ENTRIES)] = root
            while cuts and cuts[0][0] < run.end:
                size, partial = cuts.pop(0)
                found[size] = self._roots(size, partial)
            self._put(run.level, run.begin, run.leaves)
        self._open = part.tail
        found.update((size, self._roots(size, partial)) for size, partial in cuts)
        return found

    def _put(self, level: int, begin: int, leaves: bytes) -> None:
        """Add a run, and merge it with its neighbours where they are all there."""
        root, end = root_of(leaves), begin + run_entries(level)
        self._runs[level, begin] = _Run(root, leaves if level < LEVEL_MAX else b"")
        self._known[RunPlace(level, begin, end)] = root
        above = run_entries(level + 1)
        if level == LEVEL_MAX or end % above:
            return
        group = [(level, at) for at in range(end - above, end, run_entries(level))]
        known = [self._runs[each].leaves for each in group if each in self._runs]
        if len(known) < RUNS_MERGED:
            return
        for each in group:
            del self._runs[each]
        if level + 1 == LEVEL_MAX:
            place = RunPlace(LEVEL_MAX, end - above, end)
            self._runs[place[:2]] = _Run(merged_root(known), b"")
            self._known[place] = self._runs[place[:2]].root
        else:
            self._put(level + 1, end - above, merged_leaves(known))

    def _roots(self, size: int, partial: bytes | None) -> Roots:
        """Roots at ``size``, of which ``partial`` is that of the run over the entries behind the full blocks. Runs that
        are added later may be among them: no index of ``size`` has these."""
        behind = {} if partial is None else {RunPlace(0, size - size % BLOCK_ENTRIES, size): partial}
        return ChainMap(behind, self._known)


def in_order(roots: Roots, size: int, begin: int = 0) -> list[bytes | None]:
    """Those of an index, from left to right; None of a run that is not known."""
    return [roots.get(place) for place in covering(size, begin)]
