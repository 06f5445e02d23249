"""Proofs that a list of entries of a job is whole, run by run, and that a job has no entry.

Of each run of an index (docs/formats/job-index.md)::

    the job has entries there    its leaf, made from them, is leaf ``at`` of ``jobs``
    it has none                  leaves ``at - 1`` and ``at`` are neighbours, and its key is between theirs

The right neighbour is proved in the subtree that is a hash of the left one's proof: the one over the leaves behind the
left neighbour, of as many leaves as the largest power of two that divides ``at``, or as there are.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Annotated, Final, NamedTuple

import msgspec
from msgspec import Meta

from ledger.chain.form import Hash, Seq
from ledger.errors import ProofError, refuse
from ledger.job_index import (
    COUNT_BYTES,
    LEAF_BYTES,
    PIECE_LEAVES,
    RunPlace,
    covering,
    digest_in,
    key_of,
    leaf_hashes,
    leaf_of,
    piece_roots,
)
from ledger.merkle import HASH_BYTES, Levels, leaf_hash, levels_of, verify_inclusion

HASHES_MAX: Final = 64
"""Of one proof: one a level of the tree."""
RUNS_MAX: Final = 10_000
ENTRIES_MAX: Final = 10_000

_Path = Annotated[list[Hash], Meta(max_length=HASHES_MAX)]


class Neighbour(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """The leaf of another job, and its path. The fields are in the order of canonical JSON, as below."""

    count: Seq
    digest: Hash
    hashes: _Path
    key: Hash

    @property
    def leaf_hash(self) -> bytes:
        return leaf_hash(leaf_of(bytes.fromhex(self.key), self.count, bytes.fromhex(self.digest)))


class RunProof(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """The place of a job in one run. ``hashes`` is the path of its leaf; null where it has no entries there."""

    at: Annotated[int, Meta(ge=0, le=2**53 - 1)]
    hashes: _Path | None
    jobs: Seq
    left: Neighbour | None
    right: Neighbour | None


def verify_job(
    job_id: str,
    size: int,
    roots: Sequence[bytes],
    entries: Sequence[tuple[int, bytes]],
    proofs: Sequence[RunProof],
    begin: int = 0,
) -> None:
    """Check that the job has these entries among leaves ``begin..size - 1`` of the log, and no others.

    Args:
        job_id: the job.
        size: leaf index behind the last entry that the index covers.
        roots: roots of its runs; the caller MUST have checked who signed them.
        entries: leaf index and leaf hash of each entry; none where the job must have none.
        proofs: one for each run.
        begin: leaf index of the first entry that it covers.

    Raises:
        ProofError: a proof does not hold, or one is missing.
    """
    places, key = [*covering(size, begin)], key_of(job_id)
    indexes = [index for index, _ in entries]
    refuse(
        ProofError,
        (len(roots) != len(places), f"an index of {size} entries has {len(places)} runs, not {len(roots)}"),
        (len(proofs) != len(places), f"{len(proofs)} runs are proved, of {len(places)}"),
        (any(one >= other for one, other in pairwise(indexes)), "the entries do not ascend by leaf index"),
        (bool(indexes) and not begin <= indexes[0] <= indexes[-1] < size, "an entry is not covered by the index"),
    )
    for place, root, proof in zip(places, roots, proofs, strict=True):
        inside = entries[bisect_left(indexes, place.begin) : bisect_left(indexes, place.end)]
        try:
            if inside:
                _verify_presence(key, place, inside, proof, root)
            else:
                _verify_absence(key, proof, root)
        except ProofError as error:
            raise ProofError(f"entries {place.begin + 1} to {place.end}: {error}") from error


def _verify_presence(
    key: bytes, place: RunPlace, entries: Sequence[tuple[int, bytes]], proof: RunProof, root: bytes
) -> None:
    if proof.hashes is None or proof.left is not None or proof.right is not None:
        raise ProofError("the job has entries here, and the proof is of none")
    leaf = leaf_hash(leaf_of(key, *digest_in(place, entries)))
    verify_inclusion(proof.at, proof.jobs, leaf, _raw(proof.hashes), root)


def _verify_absence(key: bytes, proof: RunProof, root: bytes) -> None:
    at, jobs, left, right = proof.at, proof.jobs, proof.left, proof.right
    refuse(
        ProofError,
        (proof.hashes is not None, "the job has no entry here, and the proof is of some"),
        (at > jobs, f"place {at} is beyond the {jobs} jobs of the run"),
        ((left is None) != (at == 0), "the left neighbour is missing, or there is one too many"),
        ((right is None) != (at == jobs), "the right neighbour is missing, or there is one too many"),
        (left is not None and bytes.fromhex(left.key) >= key, "the left neighbour is not before the job"),
        (right is not None and bytes.fromhex(right.key) <= key, "the right neighbour is not behind the job"),
    )
    begin, end = at, jobs
    if left is not None:
        hashes = _raw(left.hashes)
        verify_inclusion(at - 1, jobs, left.leaf_hash, hashes, root)
        if right is None:
            return
        begin, end = 0, _leaves_behind(at, jobs)
        root = hashes[_place_of_subtree(at)]
    assert right is not None
    verify_inclusion(begin, end, right.leaf_hash, _raw(right.hashes), root)


def _place_of_subtree(at: int) -> int:
    """Place, in the path of leaf ``at - 1``, of the hash of the subtree that begins with leaf ``at``."""
    return (at & -at).bit_length() - 1


def _leaves_behind(at: int, jobs: int) -> int:
    """Leaves of that subtree."""
    return min(at & -at, jobs - at)


def _raw(hashes: Sequence[str]) -> list[bytes]:
    return [bytes.fromhex(each) for each in hashes]


# --- making proofs --------------------------------------------------------------------------------


class Directory(NamedTuple):
    """A run whose leaves are stored in pieces of ``PIECE_LEAVES``: of each piece its first key and its root."""

    jobs: int
    keys: Sequence[bytes]
    roots: Sequence[bytes]

    @classmethod
    def of(cls, leaves: bytes) -> Directory:
        """The directory of a run, given its leaves."""
        step = PIECE_LEAVES * LEAF_BYTES
        keys = [leaves[at : at + HASH_BYTES] for at in range(0, len(leaves), step)]
        return cls(len(leaves) // LEAF_BYTES, keys, piece_roots(leaves))

    def wanted(self, key: bytes) -> list[int]:
        """The pieces that ``prove`` asks for."""
        first = max(0, bisect_right(self.keys, key) - 1)
        return [each for each in (first, first + 1) if each < len(self.keys)]


def pieces_of(leaves: bytes) -> dict[int, bytes]:
    """The pieces of a run."""
    step = PIECE_LEAVES * LEAF_BYTES
    return {at // step: leaves[at : at + step] for at in range(0, len(leaves), step)}


def prove(key: bytes, directory: Directory, pieces: Mapping[int, bytes]) -> RunProof:
    """The place of a job in a run; ``pieces`` has the wanted ones. What it proves is what the leaves say.

    Raises:
        ProofError: a piece is missing or too short.
    """
    run = _Run(directory, pieces)
    first, *_ = directory.wanted(key)
    piece = pieces.get(first, b"")
    inside = bisect_left(range(len(piece) // LEAF_BYTES), key, key=lambda leaf: _key_at(piece, leaf))
    at = first * PIECE_LEAVES + inside
    if _key_at(piece, inside) == key:
        return RunProof(at, _hex(run.path(at)), directory.jobs, None, None)
    left = right = None
    if at > 0:
        left = run.neighbour(at - 1)
    if at < directory.jobs:
        right = run.neighbour(at, HASHES_MAX if left is None else (_leaves_behind(at, directory.jobs) - 1).bit_length())
    return RunProof(at, None, directory.jobs, left, right)


def _key_at(piece: bytes, leaf: int) -> bytes:
    return piece[leaf * LEAF_BYTES : leaf * LEAF_BYTES + HASH_BYTES]


class _Run:
    """The wanted pieces of a run; the nodes over each are computed once."""

    def __init__(self, directory: Directory, pieces: Mapping[int, bytes]) -> None:
        self._pieces = pieces
        self._above = levels_of(directory.roots)
        self._inside: dict[int, Levels] = {}

    def path(self, at: int) -> list[bytes]:
        """The path of leaf ``at``."""
        piece, place = divmod(at, PIECE_LEAVES)
        if piece not in self._inside:
            self._inside[piece] = levels_of(leaf_hashes(self._pieces.get(piece, b"")))
        return path_in(self._inside[piece], place) + path_in(self._above, piece)

    def neighbour(self, at: int, hashes: int = HASHES_MAX) -> Neighbour:
        """Leaf ``at``, with so many hashes of its path."""
        piece, place = divmod(at, PIECE_LEAVES)
        leaf = self._pieces.get(piece, b"")[place * LEAF_BYTES : (place + 1) * LEAF_BYTES]
        if len(leaf) < LEAF_BYTES:
            raise ProofError(f"piece {piece} of a run of the index of jobs has no leaf {place}")
        count = int.from_bytes(leaf[HASH_BYTES : HASH_BYTES + COUNT_BYTES], "big")
        digest = leaf[HASH_BYTES + COUNT_BYTES :]
        return Neighbour(count, digest.hex(), _hex(self.path(at)[:hashes]), leaf[:HASH_BYTES].hex())


def path_in(levels: Levels, index: int) -> list[bytes]:
    """PATH(index, D) of RFC 9162 2.1.3.1, from the leaf's sibling up."""
    siblings = (((index >> level) ^ 1, nodes) for level, nodes in enumerate(levels[:-1]))
    return [nodes[sibling] for sibling, nodes in siblings if sibling < len(nodes)]


def _hex(hashes: Sequence[bytes]) -> list[str]:
    return [each.hex() for each in hashes]
