"""Merkle tree of a tenant's log: hashing, roots and the checking of proofs (RFC 9162 section 2.1).

    leaf hash    SHA-256(0x00 || data)             data of leaf i is the chain link of seq i + 1
    node hash    SHA-256(0x01 || left || right)
    root         of n > 1 leaves: node hash of the roots of the first k and of the rest,
                 where k is the largest power of two < n; of none: SHA-256("")

Invariants::

    leaf_index = seq - 1,  0 <= leaf_index < tree_size
    a frontier of size n holds one hash for every bit set in n

Proofs are made from tiles, in :mod:`ledger.merkle.tiles`.

Leaves ``begin..end - 1`` of a tree fall into perfect subtrees, each of ``2^level`` leaves from a multiple of that on,
from left to right::

    leaves 3..11    level 0 from 3, level 3 from 4          leaves 0..6    levels 2, 1, 0 from 0, 4, 6

The roots of those of adjacent parts, appended one after the other to a ``Frontier``, give the frontier of the tree. A
part of n leaves has at most ``2 * log2(n)`` of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from hashlib import sha256

from ledger import native
from ledger.errors import InvalidInputError, ProofError, refuse

HASH_BYTES = 32
EMPTY_ROOT = sha256().digest()
"""Root of the tree without leaves."""


def leaf_hash(data: bytes) -> bytes:
    """Hash of a leaf that holds ``data``."""
    return sha256(b"\x00" + data).digest()


def leaf_hashes(links: Sequence[bytes]) -> list[bytes]:
    """Hashes of the leaves that hold ``links``."""
    return [sha256(b"\x00" + link).digest() for link in links]


def node_hash(left: bytes, right: bytes) -> bytes:
    """Hash of the node above ``left`` and ``right``."""
    return sha256(b"\x01" + left + right).digest()


def paired(nodes: Sequence[bytes]) -> list[bytes]:
    """Hashes of the nodes above each pair; a last node without a right sibling is left out."""
    if (hashes := native.paired(nodes)) is not None:
        return hashes
    one_by_one = iter(nodes)
    return [sha256(b"\x01" + left + right).digest() for left, right in zip(one_by_one, one_by_one, strict=False)]


def root(leaves: Iterable[bytes]) -> bytes:
    """Root of the tree over these leaf hashes; ``EMPTY_ROOT`` when there are none."""
    frontier = Frontier()
    frontier.extend(leaves)
    return frontier.root()


Levels = Sequence[Sequence[bytes]]
"""The nodes of a tree by level, leaf hashes first; the last level is the root alone."""


def levels_of(leaves: Sequence[bytes]) -> Levels:
    """The nodes of the tree over these leaf hashes, at least one. One without a sibling is in the level above too."""
    levels = [leaves]
    while len(nodes := levels[-1]) > 1:
        levels.append([*paired(nodes), *nodes[len(nodes) & ~1 :]])
    return levels


class Frontier:
    """The right edge of a growing tree: enough state to append and to compute the root.

    It keeps the roots of the perfect subtrees that the leaves fall into, one for each bit set in ``size``.
    """

    __slots__ = ("_by_level", "size")

    def __init__(self) -> None:
        self.size = 0
        """Number of leaves."""
        self._by_level: list[bytes] = []

    @classmethod
    def restore(cls, size: int, hashes: Sequence[bytes]) -> Frontier:
        """The frontier that had this ``size`` and these ``hashes``.

        Raises:
            InvalidInputError: the hashes are not as many as ``size`` has bits set, or not of 32 bytes.
        """
        if size < 0 or size.bit_count() != len(hashes) or any(len(each) != HASH_BYTES for each in hashes):
            raise InvalidInputError(f"a frontier of size {size} needs {size.bit_count()} hashes of {HASH_BYTES} bytes")
        frontier = cls()
        frontier.size = size
        from_small = iter(reversed(hashes))
        frontier._by_level = [next(from_small) if size >> level & 1 else b"" for level in range(size.bit_length())]
        return frontier

    @property
    def hashes(self) -> list[bytes]:
        """Roots of the perfect subtrees from left to right, largest first; with ``size`` the whole state."""
        return [each for each in reversed(self._by_level) if each]

    def extend(self, leaf_hashes: Iterable[bytes]) -> None:
        """Append leaves in order."""
        self.grow(list(leaf_hashes))

    def grow(self, leaf_hashes: list[bytes]) -> list[list[bytes]]:
        """Append leaves; returns, from the leaves up, the hashes of the subtrees that they made perfect.

        The first hash of level ``n`` has index ``size before >> n`` in that level.
        """
        self.size += len(leaf_hashes)
        grown: list[list[bytes]] = []
        nodes = leaf_hashes
        while nodes:
            level = len(grown)
            grown.append(nodes)
            if level == len(self._by_level):
                self._by_level.append(b"")
            if waiting := self._by_level[level]:
                nodes = [waiting, *nodes]
            self._by_level[level] = nodes[-1] if len(nodes) & 1 else b""
            nodes = paired(nodes)
        return grown

    def append_subtree(self, level: int, root: bytes) -> None:
        """Append the ``2^level`` leaves of a perfect subtree, given its root.

        Raises:
            InvalidInputError: the size is not a multiple of ``2^level``, so the subtree does not belong to this tree.
        """
        if self.size & ((1 << level) - 1):
            raise InvalidInputError(f"a subtree of {1 << level} leaves does not begin at leaf {self.size}")
        self.size += 1 << level
        by_level = self._by_level
        by_level.extend([b""] * (self.size.bit_length() - len(by_level)))
        while by_level[level]:
            root, by_level[level] = node_hash(by_level[level], root), b""
            level += 1
        by_level[level] = root

    def root(self) -> bytes:
        """Root of the tree over all leaves so far."""
        result = b""
        for each in self._by_level:
            if each:
                result = node_hash(each, result) if result else each
        return result or EMPTY_ROOT


def root_of_path(leaf_index: int, tree_size: int, leaf_hash: bytes, hashes: Sequence[bytes]) -> bytes:
    """The root to which ``hashes``, from the leaf's sibling up, lead (RFC 9162 2.1.3.2).

    Raises:
        ProofError: there is no such leaf, or the proof is malformed.
    """
    _refuse_malformed([leaf_hash, *hashes])
    if not 0 <= leaf_index < tree_size:
        raise ProofError(f"leaf index {leaf_index} is not in a tree of size {tree_size}")
    inner, border = _proof_lengths(leaf_index, tree_size)
    if len(hashes) != inner + border:
        raise ProofError(f"an inclusion proof has {len(hashes)} hashes here, {inner + border} needed")
    return _climb_border(_climb(leaf_hash, hashes[:inner], leaf_index), hashes[inner:])


def verify_inclusion(
    leaf_index: int, tree_size: int, leaf_hash: bytes, hashes: Sequence[bytes], root_hash: bytes
) -> None:
    """Check that the leaf is in the tree (RFC 9162 2.1.3.2). ``hashes`` go from the leaf's sibling up.

    Raises:
        ProofError: it is not proved, or the proof is malformed.
    """
    _refuse_malformed([root_hash])
    if root_of_path(leaf_index, tree_size, leaf_hash, hashes) != root_hash:
        raise ProofError(f"the proof of leaf {leaf_index} does not lead to the root {root_hash.hex()}")


def verify_consistency(first: int, second: int, first_root: bytes, second_root: bytes, hashes: Sequence[bytes]) -> None:
    """Check that the tree of size ``first`` is the beginning of that of size ``second`` (RFC 9162 2.1.4.2).

    A first tree without leaves is refused: its root says nothing, so nothing would be proved.

    Raises:
        ProofError: it is not proved, or the proof is malformed.
    """
    _refuse_malformed([first_root, second_root, *hashes])
    if not 1 <= first <= second:
        raise ProofError(f"sizes {first} and {second} are not 1 <= first <= second")
    if first == second:
        refuse(
            ProofError,
            (bool(hashes), "trees of one size need no hashes, the proof has some"),
            (first_root != second_root, f"there are two roots for the size {first}"),
        )
        return

    # The proof is an inclusion proof of the first tree's last perfect subtree in the second tree, after
    # that subtree's own root, which is left out when it is the whole first tree.
    height = (first & -first).bit_length() - 1
    inner, border = _proof_lengths(first - 1, second)
    inner -= height
    seed_given = first != 1 << height
    if len(hashes) != seed_given + inner + border:
        raise ProofError(f"a consistency proof has {len(hashes)} hashes here, {seed_given + inner + border} needed")
    seed, path = (hashes[0], hashes[1:]) if seed_given else (first_root, hashes)
    index = (first - 1) >> height

    lefts = [each for level, each in enumerate(path[:inner]) if index >> level & 1]
    computed = _climb_border(_climb(seed, path[:inner], index), path[inner:])
    refuse(
        ProofError,
        (
            _climb_border(seed, [*lefts, *path[inner:]]) != first_root,
            f"the proof does not lead to the root {first_root.hex()} of size {first}",
        ),
        (computed != second_root, f"the proof does not lead to the root {second_root.hex()} of size {second}"),
    )


def _refuse_malformed(hashes: Sequence[bytes]) -> None:
    if any(not isinstance(each, bytes) or len(each) != HASH_BYTES for each in hashes):
        raise ProofError(f"a hash of the proof is not {HASH_BYTES} bytes")


def _proof_lengths(index: int, size: int) -> tuple[int, int]:
    """Hashes of an inclusion proof below and above where the paths to ``index`` and to the last leaf part."""
    inner = (index ^ (size - 1)).bit_length()
    return inner, (index >> inner).bit_count()


def _climb(seed: bytes, hashes: Sequence[bytes], index: int) -> bytes:
    """Root above ``seed``, which has ``index`` in its level, with siblings on either side."""
    for level, sibling in enumerate(hashes):
        seed = node_hash(sibling, seed) if index >> level & 1 else node_hash(seed, sibling)
    return seed


def _climb_border(seed: bytes, hashes: Sequence[bytes]) -> bytes:
    """Root above ``seed`` on the right border, where all siblings are on the left."""
    for sibling in hashes:
        seed = node_hash(sibling, seed)
    return seed


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
        ValueError: the number of roots is not that of the part.
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
        """Index after the last leaf."""
        return self.begin + len(self._levels[0][1])

    def append(self, leaf_hashes: Sequence[bytes]) -> None:
        """Append leaves in order."""
        self._levels[0][1].extend(leaf_hashes)
        for level, (first, nodes) in enumerate(self._levels):
            if level + 1 == len(self._levels):
                if len(nodes) < 2:
                    return
                self._levels.append(((first + 1) // 2, []))
            above = self._levels[level + 1][1]
            above += paired(nodes[(first & 1) + 2 * len(above) :])

    def nodes(self, level: int) -> tuple[int, list[bytes]]:
        """Index of the first perfect subtree of ``2^level`` leaves in the run, and the roots of all such subtrees."""
        return self._levels[level] if level < len(self._levels) else (-(-self.begin >> level), [])

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
