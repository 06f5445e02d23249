"""Checking the stored Merkle tree and given checkpoints against the entries.

The tree is grown again from the chain links. Every stored tile of the stored tree is compared with it, where tiles
are stored, then the root. The stored tree may be behind the chain; it is never ahead. A break is reported at the first
seq under the first hash that differs (``tree``), and a checkpoint at its size (``rollback``).
What does not fit because the chain below already breaks is left undecided.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import NamedTuple

from ledger.merkle import HASH_BYTES
from ledger.tiles import TILE_BYTES, TILE_HEIGHT, TILE_WIDTH, TileCoordinates
from ledger.verdict import Anchored, Findings

TILES_AT_ONCE = 32
"""Tiles worth one look at what is stored: a quarter of a megabyte."""

ReadTiles = Callable[[int, int, int], Awaitable[Mapping[int, bytes] | None]]
"""Stored tiles of one level, from the first to the last index given, by index; None where no tiles are stored."""


class TreeHead(NamedTuple):
    """A tree head that someone kept: ``root`` is 32 raw bytes, ``source`` says who, such as ``node``."""

    size: int
    root: bytes
    source: str
    fault: str | None = None
    """Why it does not open, when it does not: then size and root say nothing."""


class Anchor(NamedTuple):
    """A tree head that somebody outside vouched for, in a statement that is kept inside.

    Who could cut the chain could remove the statement too; so it counts against the chain, and ``compared_with``
    does not name it. The caller has judged the statement: only one of status ``ok`` is compared (see ``Anchored``).
    """

    kind: str
    by: str
    time: str
    size: int
    root: bytes
    status: str = "ok"
    detail: str | None = None

    def found(self, status: str, detail: str | None = None) -> Anchored:
        """What came of it."""
        return Anchored(self.kind, self.by, self.time, self.size, status, detail)


class StoredTree(NamedTuple):
    """The tenant's row of the stored tree; ``root`` is hex."""

    size: int
    root: str


class TreeChecker:
    """Grows the tree of one chain from its first entry."""

    def __init__(
        self,
        findings: Findings,
        stored: StoredTree | None,
        read_tiles: ReadTiles,
        checkpoints: Sequence[TreeHead],
        anchors: Sequence[Anchor],
        *,
        is_from_start: bool,
    ) -> None:
        self._findings = findings
        self._stored = stored
        self._read_tiles = read_tiles
        self._has_place = is_from_start
        self._partial: list[bytearray] = []
        """The last tile of each level, as far as it has grown."""
        self._to_compare: dict[TileCoordinates, bytes] = {}
        self._checkpoints = sorted((head for head in checkpoints if head.size > 0), key=lambda head: head.size)
        self._unreadable = [head for head in checkpoints if head.fault is not None]
        self._anchors = sorted((each for each in anchors if each.status == "ok"), key=lambda each: each.size)
        self._anchored = [each.found(each.status, each.detail) for each in anchors if each.status != "ok"]
        self._is_tree_compared = False
        self._sources = dict.fromkeys((head.source for head in checkpoints), False)

    def compared_sources(self) -> list[str]:
        """Sources of the checkpoints that the chain was compared with so far, in the order they were given."""
        return [source for source, is_compared in self._sources.items() if is_compared]

    def anchored(self) -> tuple[Anchored, ...]:
        """What came of every anchor, once ``finish`` was called."""
        return tuple(sorted(self._anchored, key=lambda each: (each.kind, each.by, each.to_seq)))

    def cut(self, seq: int) -> int | None:
        """The lowest size, not below ``seq``, at which a root must be compared."""
        if not self._has_place:
            return None
        sizes = [head.size for head in self._checkpoints[:1]] + [anchor.size for anchor in self._anchors[:1]]
        if self._stored is not None and not self._is_tree_compared:
            sizes.append(self._stored.size)
        return min((size for size in sizes if size >= seq), default=None)

    def grow(self, grown: Sequence[list[bytes]], size_before: int) -> None:
        """The next entries, none of them past ``cut``: what ``Frontier.grow`` gave for them at ``size_before``."""
        if self._has_place and self._stored is not None and size_before < self._stored.size:
            for level, hashes in enumerate(grown[::TILE_HEIGHT]):
                self._fill_tiles(level, hashes, size_before >> level * TILE_HEIGHT)

    def _fill_tiles(self, level: int, hashes: list[bytes], first: int) -> None:
        """Put ``hashes``, of which the first is number ``first``, into tiles; full ones are to be compared."""
        if level == len(self._partial):
            self._partial.append(bytearray())
        partial, index = self._partial[level], first // TILE_WIDTH
        partial += b"".join(hashes)
        while len(partial) >= TILE_BYTES:
            self._to_compare[level, index] = bytes(partial[:TILE_BYTES])
            del partial[:TILE_BYTES]
            index += 1

    def reached_cut(self, size: int, root: bytes) -> None:
        """The tree has grown to ``size`` and has this root; compare what is known for that size."""
        if not self._has_place:
            return
        if self._stored is not None and self._stored.size == size:
            self._is_tree_compared = True
            for level, partial in enumerate(self._partial):
                if partial:
                    self._to_compare[level, size >> (level + 1) * TILE_HEIGHT] = bytes(partial)
            if self._stored.root != root.hex():
                self._report("tree", size, "the stored root is not that of the entries", root, self._stored.root)
        while self._checkpoints and self._checkpoints[0].size == size:
            head = self._checkpoints.pop(0)
            self._name_source(head)
            if head.root != root:
                detail = f"the first {size} entries are not those of the checkpoint held by {head.source}"
                self._report("rollback", size, detail, head.root, root.hex())
        while self._anchors and self._anchors[0].size == size:
            self._compare_anchor(self._anchors.pop(0), root)

    def lose_place(self) -> None:
        """Entries are missing here: from now on there is no tree to compare with."""
        self._has_place = False

    async def compare_tiles(self, *, at_least: int = 1) -> None:
        """Compare the tiles that are complete with the stored ones, unless they are fewer than ``at_least``."""
        if len(self._to_compare) < at_least:
            return
        by_level: dict[int, list[int]] = {}
        for level, index in self._to_compare:
            by_level.setdefault(level, []).append(index)
        for level, indexes in by_level.items():
            stored = await self._read_tiles(level, min(indexes), max(indexes))
            if stored is None:
                continue
            for index in indexes:
                self._compare_tile(level, index, stored.get(index, b""))
        self._to_compare.clear()

    def finish(self, *, last_seq: int) -> None:
        """No entry follows; ``last_seq`` is that of the last one there is."""
        for head in self._unreadable:
            self._name_source(head)
            detail = f"the checkpoint held by {head.source} does not open: {head.fault}"
            self._findings.add("rollback", max(last_seq, 1), detail)
        for head in self._checkpoints:
            if head.size > last_seq:
                self._name_source(head)
                detail = f"the checkpoint held by {head.source} covers {head.size} entries, there are {last_seq}"
                self._findings.add("rollback", last_seq + 1, detail, expected=head.size, actual=last_seq)
            else:
                self._findings.leave_undecided("checkpoint")
        for anchor in self._anchors:
            detail = f"the {anchor.kind} anchor by {anchor.by} covers {anchor.size} entries, there are {last_seq}"
            if anchor.size > last_seq:
                self._findings.add("rollback", last_seq + 1, detail, expected=anchor.size, actual=last_seq)
                self._anchored.append(anchor.found("broken", detail))
            else:
                self._anchored.append(anchor.found("not_checked", "the entries up to there were not all read"))
        self._anchors.clear()
        if not self._is_tree_compared and last_seq > 0:
            self._findings.leave_undecided("tree")

    def _name_source(self, head: TreeHead) -> None:
        self._findings.begin("checkpoint")
        self._sources[head.source] = True

    def _compare_anchor(self, anchor: Anchor, root: bytes) -> None:
        detail = f"the first {anchor.size} entries are not those of the {anchor.kind} anchor by {anchor.by}"
        if anchor.root == root:
            self._anchored.append(anchor.found("ok"))
        elif self._findings.chain_broken_by(anchor.size):
            self._anchored.append(anchor.found("not_checked", "the chain breaks before"))
        else:
            self._findings.add("rollback", anchor.size, detail, expected=anchor.root.hex(), actual=root.hex())
            self._anchored.append(anchor.found("broken", detail))

    def _compare_tile(self, level: int, index: int, stored: bytes) -> None:
        computed = self._to_compare[level, index]
        stored = stored if isinstance(stored, bytes) else b""
        if stored == computed:
            return
        at = next(
            offset
            for offset in range(0, TILE_BYTES + HASH_BYTES, HASH_BYTES)
            if stored[offset : offset + HASH_BYTES] != computed[offset : offset + HASH_BYTES]
        )
        leaves_before = (index * TILE_WIDTH + at // HASH_BYTES) << level * TILE_HEIGHT
        detail = f"tile {index} of level {level} of the stored tree is missing or is not that of the entries"
        actual = stored[at : at + HASH_BYTES].hex() or None
        self._report("tree", leaves_before + 1, detail, computed[at : at + HASH_BYTES], actual)

    def _report(self, kind: str, seq: int, detail: str, expected: bytes, actual: str | None) -> None:
        if self._findings.chain_broken_by(seq):
            self._findings.leave_undecided("tree" if kind == "tree" else "checkpoint")
        else:
            self._findings.add(kind, seq, detail, expected=expected.hex() or None, actual=actual)
