"""The Merkle tree straight from RFC 9162 section 2.1, by recursion over leaf hashes: slow and plain."""

from __future__ import annotations

from hashlib import sha256


def split(size: int) -> int:
    """The largest power of two smaller than ``size``."""
    power = 1
    while power * 2 < size:
        power *= 2
    return power


def root(leaves: list[bytes]) -> bytes:
    """MTH (2.1.1), the leaves already hashed."""
    if not leaves:
        return sha256(b"").digest()
    if len(leaves) == 1:
        return leaves[0]
    k = split(len(leaves))
    return sha256(b"\x01" + root(leaves[:k]) + root(leaves[k:])).digest()


def inclusion_path(index: int, leaves: list[bytes]) -> list[bytes]:
    """PATH (2.1.3.1)."""
    if len(leaves) == 1:
        return []
    k = split(len(leaves))
    if index < k:
        return [*inclusion_path(index, leaves[:k]), root(leaves[k:])]
    return [*inclusion_path(index - k, leaves[k:]), root(leaves[:k])]


def consistency_proof(first: int, leaves: list[bytes]) -> list[bytes]:
    """PROOF (2.1.4.1)."""
    return _subproof(first, leaves, root_known=True)


def _subproof(first: int, leaves: list[bytes], *, root_known: bool) -> list[bytes]:
    if first == len(leaves):
        return [] if root_known else [root(leaves)]
    k = split(len(leaves))
    if first <= k:
        return [*_subproof(first, leaves[:k], root_known=root_known), root(leaves[k:])]
    return [*_subproof(first - k, leaves[k:], root_known=False), root(leaves[:k])]
