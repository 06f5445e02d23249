"""Merkle tree of a tenant's log: hashing, roots and the checking of proofs (RFC 9162 section 2.1).

    leaf hash    SHA-256(0x00 || data)             data of leaf i is the chain link of seq i + 1
    node hash    SHA-256(0x01 || left || right)
    root         of n > 1 leaves: node hash of the roots of the first k and of the rest,
                 where k is the largest power of two < n; of none: SHA-256("")

Invariants::

    leaf_index = seq - 1,  0 <= leaf_index < tree_size
    a frontier of size n holds one hash for every bit set in n

Proofs are made from tiles, in :mod:`ledger.merkle.tiles`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from hashlib import sha256

from ledger import native
from ledger.errors import InvalidInputError, ProofError

HASH_BYTES = 32
EMPTY_ROOT = sha256().digest()
"""Root of the tree without leaves."""


def leaf_hash(data: bytes) -> bytes:
    """Hash of a leaf that holds ``data``."""
    return sha256(b"\x00" + data).digest()


def leaf_hashes(links: Sequence[bytes]) -> list[bytes]:
    """Hashes of the leaves that hold ``links``."""
    hashes = native.leaf_hashes(links)
    return [sha256(b"\x00" + link).digest() for link in links] if hashes is None else hashes


def node_hash(left: bytes, right: bytes) -> bytes:
    """Hash of the node above ``left`` and ``right``."""
    return sha256(b"\x01" + left + right).digest()


def paired(nodes: Sequence[bytes]) -> list[bytes]:
    """Hashes of the nodes above the first two, the next two and so on; a last one without a right is left out."""
    hashes = native.paired(nodes)
    if hashes is not None:
        return hashes
    one_by_one = iter(nodes)
    return [sha256(b"\x01" + left + right).digest() for left, right in zip(one_by_one, one_by_one, strict=False)]


def root(leaves: Iterable[bytes]) -> bytes:
    """Root of the tree over these leaf hashes; ``EMPTY_ROOT`` when there are none."""
    frontier = Frontier()
    frontier.extend(leaves)
    return frontier.root()


class Frontier:
    """The right edge of a growing tree: all that is needed to append and to know the root.

    It keeps the roots of the perfect subtrees that the leaves fall into, one for each bit set in ``size``.
    """

    __slots__ = ("_by_level", "_size")

    def __init__(self) -> None:
        self._size = 0
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
        frontier._size = size
        from_small = iter(reversed(hashes))
        frontier._by_level = [next(from_small) if size >> level & 1 else b"" for level in range(size.bit_length())]
        return frontier

    @property
    def size(self) -> int:
        """Number of leaves."""
        return self._size

    @property
    def hashes(self) -> list[bytes]:
        """Roots of the perfect subtrees from left to right, the largest first; with ``size`` all there is."""
        return [each for each in reversed(self._by_level) if each]

    def append(self, leaf_hash: bytes) -> None:
        """Append one leaf."""
        self.grow([leaf_hash])

    def extend(self, leaf_hashes: Iterable[bytes]) -> None:
        """Append leaves in order."""
        self.grow(list(leaf_hashes))

    def grow(self, leaf_hashes: list[bytes]) -> list[list[bytes]]:
        """Append leaves; returns, from the leaves up, the hashes of the subtrees that they made perfect.

        The first one given for level ``n`` stands at index ``size before >> n`` of that level.
        """
        self._size += len(leaf_hashes)
        grown: list[list[bytes]] = []
        nodes = leaf_hashes
        while nodes:
            level = len(grown)
            grown.append(nodes)
            if level == len(self._by_level):
                self._by_level.append(b"")
            waiting = self._by_level[level]
            if waiting:
                nodes = [waiting, *nodes]
            self._by_level[level] = nodes[-1] if len(nodes) & 1 else b""
            nodes = paired(nodes)
        return grown

    def append_subtree(self, level: int, root: bytes) -> None:
        """Append the ``2^level`` leaves of a perfect subtree, given its root.

        Raises:
            InvalidInputError: the size is not a multiple of ``2^level``, so that the subtree is none of this tree.
        """
        if self._size & ((1 << level) - 1):
            raise InvalidInputError(f"a subtree of {1 << level} leaves does not begin at leaf {self._size}")
        self._size += 1 << level
        by_level = self._by_level
        by_level.extend([b""] * (self._size.bit_length() - len(by_level)))
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


def verify_inclusion(
    leaf_index: int, tree_size: int, leaf_hash: bytes, hashes: Sequence[bytes], root_hash: bytes
) -> None:
    """Check that the leaf is in the tree (RFC 9162 2.1.3.2). ``hashes`` go from the leaf's sibling up.

    Raises:
        ProofError: it is not proved, or the proof is malformed.
    """
    _refuse_malformed([leaf_hash, root_hash, *hashes])
    if not 0 <= leaf_index < tree_size:
        raise ProofError(f"leaf index {leaf_index} is not in a tree of size {tree_size}")
    inner, border = _proof_lengths(leaf_index, tree_size)
    if len(hashes) != inner + border:
        raise ProofError(f"an inclusion proof has {len(hashes)} hashes here, {inner + border} needed")

    computed = _climb(leaf_hash, hashes[:inner], leaf_index)
    computed = _climb_border(computed, hashes[inner:])
    if computed != root_hash:
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
        if hashes:
            raise ProofError("trees of one size need no hashes, the proof has some")
        if first_root != second_root:
            raise ProofError(f"there are two roots for the size {first}")
        return

    # The proof is an inclusion proof of the first tree's last perfect subtree in the second tree, after
    # that subtree's own root, which is left out when it is the whole first tree.
    height = (first & -first).bit_length() - 1
    inner, border = _proof_lengths(first - 1, second)
    inner -= height
    seed_given = first != 1 << height
    if len(hashes) != seed_given + inner + border:
        needed = seed_given + inner + border
        raise ProofError(f"a consistency proof has {len(hashes)} hashes here, {needed} needed")
    seed, path = (hashes[0], hashes[1:]) if seed_given else (first_root, hashes)
    index = (first - 1) >> height

    lefts = [each for level, each in enumerate(path[:inner]) if index >> level & 1]
    if _climb_border(seed, [*lefts, *path[inner:]]) != first_root:
        raise ProofError(f"the proof does not lead to the root {first_root.hex()} of size {first}")
    if _climb_border(_climb(seed, path[:inner], index), path[inner:]) != second_root:
        raise ProofError(f"the proof does not lead to the root {second_root.hex()} of size {second}")


def _refuse_malformed(hashes: Sequence[bytes]) -> None:
    for each in hashes:
        if not isinstance(each, bytes) or len(each) != HASH_BYTES:
            raise ProofError(f"a hash of the proof is not {HASH_BYTES} bytes")


def _proof_lengths(index: int, size: int) -> tuple[int, int]:
    """Hashes of an inclusion proof below and above where the paths to ``index`` and to the last leaf part."""
    inner = (index ^ (size - 1)).bit_length()
    return inner, (index >> inner).bit_count()


def _climb(seed: bytes, hashes: Sequence[bytes], index: int) -> bytes:
    """Root above ``seed``, which stands at ``index`` of its level, with siblings on either side."""
    for level, sibling in enumerate(hashes):
        seed = node_hash(sibling, seed) if index >> level & 1 else node_hash(seed, sibling)
    return seed


def _climb_border(seed: bytes, hashes: Sequence[bytes]) -> bytes:
    """Root above ``seed`` on the right border, where all siblings are on the left."""
    for sibling in hashes:
        seed = node_hash(sibling, seed)
    return seed
