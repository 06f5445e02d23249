"""Nodes of a Merkle tree over a part of its leaves: what is needed to put the whole together from parts.

Leaves ``begin..end - 1`` of a tree fall into perfect subtrees, each of ``2^level`` leaves from a multiple of that on,
from left to right::

    leaves 3..11    level 0 from 3, level 3 from 4          leaves 0..6    levels 2, 1, 0 from 0, 4, 6

The roots of those of adjacent parts, appended one after the other to a ``Frontier``, give the frontier of the tree. A
part of n leaves has at most ``2 * log2(n)`` of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ledger.merkle import Frontier, paired

TreeNode = tuple[int, int]
"""(level, index) of the perfect subtree over leaves index << level and the following 2^level - 1."""


def subtrees(begin: int, end: int) -> Iterator[TreeNode]:
    """The perfect subtrees that leaves ``begin..end - 1`` fall into, from left to right."""
    while begin < end:
        level = (end - begin).bit_length() - 1
        if begin:
            level = min(level, (begin & -begin).bit_length() - 1)
        yield level, begin >> level
        begin += 1 << level


def append_part(frontier: Frontier, end: int, hashes: Sequence[bytes]) -> None:
    """Append leaves up to ``end - 1``, given the roots of the subtrees that they fall into.

    Raises:
        ValueError: these are more or fewer roots than that part has.
    """
    for (level, _), each in zip(subtrees(frontier.size, end), hashes, strict=True):
        frontier.append_subtree(level, each)


class PartOfTree:
    """All nodes over a run of leaves of one tree: about 150 bytes of memory a leaf."""

    def __init__(self, first_leaf: int) -> None:
        """The run begins at leaf ``first_leaf`` of the tree."""
        self.begin = first_leaf
        self._levels: list[tuple[int, list[bytes]]] = [(first_leaf, [])]
        """Index of the first node, and the nodes, from the leaves up."""

    @property
    def end(self) -> int:
        """Index behind the last leaf."""
        return self.begin + len(self._levels[0][1])

    def append(self, leaf_hashes: Sequence[bytes]) -> None:
        """The next leaves."""
        self._levels[0][1].extend(leaf_hashes)
        for level, (first, nodes) in enumerate(self._levels):
            if level + 1 == len(self._levels):
                if len(nodes) < 2:
                    return
                self._levels.append(((first + 1) // 2, []))
            above = self._levels[level + 1][1]
            above += paired(nodes[(first & 1) + 2 * len(above) :])

    def nodes(self, level: int) -> tuple[int, list[bytes]]:
        """Index of the first perfect subtree of ``2^level`` leaves that lies in the run, and the roots of all."""
        if level < len(self._levels):
            return self._levels[level]
        return -(-self.begin >> level), []

    def part(self, begin: int, end: int, *, origin: int = 0) -> list[bytes]:
        """Roots of the subtrees that leaves ``begin..end - 1`` fall into, in the tree that begins at leaf ``origin``.

        ``self.begin <= begin <= end <= self.end`` and ``origin <= begin``.
        """
        return [self._root(origin, level, index) for level, index in subtrees(begin - origin, end - origin)]

    def _root(self, origin: int, level: int, index: int) -> bytes:
        """Root of subtree ``index`` of a level in the tree that begins at ``origin``.

        That tree shares with the whole one every subtree of up to ``2^n`` leaves, where ``2^n`` divides ``origin``.
        """
        shared = level if not origin else min(level, (origin & -origin).bit_length() - 1)
        first, nodes = self.nodes(shared)
        at = (origin >> shared) + (index << (level - shared)) - first
        roots = nodes[at : at + (1 << (level - shared))]
        while len(roots) > 1:
            roots = paired(roots)
        return roots[0]
