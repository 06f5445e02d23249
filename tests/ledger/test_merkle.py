"""The Merkle tree: the public vectors, a naive recursion beside it, and proofs that cannot be bent."""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import sha256

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ledger.errors import InvalidInputError, ProofError
from ledger.merkle import (
    EMPTY_ROOT,
    Frontier,
    leaf_hash,
    node_hash,
    root,
    verify_consistency,
    verify_inclusion,
)
from tests.ledger import naive_merkle as naive

LEAVES = [leaf_hash(index.to_bytes(4, "big")) for index in range(300)]
SOME_HASH = sha256(b"some").digest()


def unhex(*texts: str) -> list[bytes]:
    return [bytes.fromhex(text) for text in texts]


# --- public vectors: those of Certificate Transparency, as in transparency-dev/merkle --------------

CT_LEAVES = [
    leaf_hash(data)
    for data in unhex(
        "", "00", "10", "2021", "3031", "40414243", "5051525354555657", "606162636465666768696a6b6c6d6e6f"
    )
]
CT_ROOTS = unhex(
    "6e340b9cffb37a989ca544e6bb780a2c78901d3fb33738768511a30617afa01d",
    "fac54203e7cc696cf0dfcb42c92a1d9dbaf70ad9e621f4bd8d98662f00e3c125",
    "aeb6bcfe274b70a14fb067a5e5578264db0fa9b51af5e0ba159158f329e06e77",
    "d37ee418976dd95753c1c73862b9398fa2a2cf9b4ff0fdfe8b30cd95209614b7",
    "4e3bbb1f7b478dcfe71fb631631519a3bca12c9aefca1612bfce4c13a86264d4",
    "76e67dadbcdf1e10e1b74ddc608abd2f98dfb16fbce75277b5232a127f2087ef",
    "ddb89be403809e325750d3d263cd78929c2942b7942a34b77e122c9594a74c8c",
    "5dc9da79a70659a9ad559cb701ded9a2ab9d823aad2f4960cfe370eff4604328",
)
CT_INCLUSION = [
    (0, 1, []),
    (
        0,
        8,
        unhex(
            "96a296d224f285c67bee93c30f8a309157f0daa35dc5b87e410b78630a09cfc7",
            "5f083f0a1a33ca076a95279832580db3e0ef4584bdff1f54c8a360f50de3031e",
            "6b47aaf29ee3c2af9af889bc1fb9254dabd31177f16232dd6aab035ca39bf6e4",
        ),
    ),
    (
        5,
        8,
        unhex(
            "bc1a0643b12e4d2d7c77918f44e0f4f79a838b6cf9ec5b5c283e1f4d88599e6b",
            "ca854ea128ed050b41b35ffc1b87b8eb2bde461e9e3b5596ece6b9d5975a0ae0",
            "d37ee418976dd95753c1c73862b9398fa2a2cf9b4ff0fdfe8b30cd95209614b7",
        ),
    ),
    (2, 3, unhex("fac54203e7cc696cf0dfcb42c92a1d9dbaf70ad9e621f4bd8d98662f00e3c125")),
    (
        1,
        5,
        unhex(
            "6e340b9cffb37a989ca544e6bb780a2c78901d3fb33738768511a30617afa01d",
            "5f083f0a1a33ca076a95279832580db3e0ef4584bdff1f54c8a360f50de3031e",
            "bc1a0643b12e4d2d7c77918f44e0f4f79a838b6cf9ec5b5c283e1f4d88599e6b",
        ),
    ),
]
CT_CONSISTENCY = [
    (1, 1, []),
    (
        1,
        8,
        unhex(
            "96a296d224f285c67bee93c30f8a309157f0daa35dc5b87e410b78630a09cfc7",
            "5f083f0a1a33ca076a95279832580db3e0ef4584bdff1f54c8a360f50de3031e",
            "6b47aaf29ee3c2af9af889bc1fb9254dabd31177f16232dd6aab035ca39bf6e4",
        ),
    ),
    (
        6,
        8,
        unhex(
            "0ebc5d3437fbe2db158b9f126a1d118e308181031d0a949f8dededebc558ef6a",
            "ca854ea128ed050b41b35ffc1b87b8eb2bde461e9e3b5596ece6b9d5975a0ae0",
            "d37ee418976dd95753c1c73862b9398fa2a2cf9b4ff0fdfe8b30cd95209614b7",
        ),
    ),
    (
        2,
        5,
        unhex(
            "5f083f0a1a33ca076a95279832580db3e0ef4584bdff1f54c8a360f50de3031e",
            "bc1a0643b12e4d2d7c77918f44e0f4f79a838b6cf9ec5b5c283e1f4d88599e6b",
        ),
    ),
    (
        6,
        7,
        unhex(
            "0ebc5d3437fbe2db158b9f126a1d118e308181031d0a949f8dededebc558ef6a",
            "b08693ec2e721597130641e8211e7eedccb4c26413963eee6c1e2ed16ffb1a5f",
            "d37ee418976dd95753c1c73862b9398fa2a2cf9b4ff0fdfe8b30cd95209614b7",
        ),
    ),
]


def test_the_empty_tree_has_the_hash_of_nothing() -> None:
    assert EMPTY_ROOT.hex() == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    assert root([]) == EMPTY_ROOT == Frontier().root()


@pytest.mark.parametrize("size", range(1, 9))
def test_roots_are_those_of_the_public_vectors(size: int) -> None:
    assert root(CT_LEAVES[:size]) == CT_ROOTS[size - 1] == naive.root(CT_LEAVES[:size])


@pytest.mark.parametrize(("index", "size", "hashes"), CT_INCLUSION)
def test_public_inclusion_proofs_hold(index: int, size: int, hashes: list[bytes]) -> None:
    verify_inclusion(index, size, CT_LEAVES[index], hashes, CT_ROOTS[size - 1])
    assert naive.inclusion_path(index, CT_LEAVES[:size]) == hashes


@pytest.mark.parametrize(("first", "second", "hashes"), CT_CONSISTENCY)
def test_public_consistency_proofs_hold(first: int, second: int, hashes: list[bytes]) -> None:
    verify_consistency(first, second, CT_ROOTS[first - 1], CT_ROOTS[second - 1], hashes)
    assert naive.consistency_proof(first, CT_LEAVES[:second]) == hashes


def test_leaves_and_nodes_are_hashed_apart() -> None:
    left, right = CT_LEAVES[:2]
    assert node_hash(left, right) == CT_ROOTS[1]
    assert leaf_hash(left + right) != node_hash(left, right)


# --- against the naive recursion ------------------------------------------------------------------


def test_a_growing_frontier_has_the_root_of_the_naive_tree_at_every_size() -> None:
    frontier = Frontier()
    for size in range(len(LEAVES)):
        assert (frontier.size, frontier.root()) == (size, naive.root(LEAVES[:size]))
        frontier.extend([LEAVES[size]])


@settings(deadline=None)
@given(st.lists(st.integers(0, 90), max_size=5))
def test_it_does_not_matter_in_what_portions_leaves_come(portions: list[int]) -> None:
    frontier = Frontier()
    at = 0
    for portion in portions:
        frontier.extend((LEAVES * 2)[at : at + portion])
        at += portion
        frontier = Frontier.restore(frontier.size, frontier.hashes)
    assert (frontier.size, frontier.root()) == (at, naive.root((LEAVES * 2)[:at]))


def test_a_frontier_keeps_one_hash_for_every_bit_of_its_size_the_largest_subtree_first() -> None:
    frontier = Frontier()
    frontier.extend(LEAVES[:13])
    assert frontier.hashes == [naive.root(LEAVES[:8]), naive.root(LEAVES[8:12]), LEAVES[12]]


@pytest.mark.parametrize(
    ("size", "hashes"),
    [(0, [SOME_HASH]), (3, [SOME_HASH]), (1, [b"short"]), (-1, []), (1, []), (-1, [SOME_HASH])],
)
def test_a_frontier_that_cannot_be_is_refused(size: int, hashes: list[bytes]) -> None:
    with pytest.raises(InvalidInputError):
        Frontier.restore(size, hashes)


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8, 13, 31, 32, 33, 64, 100])
def test_every_naive_inclusion_proof_holds(size: int) -> None:
    whole = naive.root(LEAVES[:size])
    for index in range(size):
        verify_inclusion(index, size, LEAVES[index], naive.inclusion_path(index, LEAVES[:size]), whole)


@pytest.mark.parametrize("second", [1, 2, 3, 5, 8, 13, 31, 32, 33, 64, 100])
def test_every_naive_consistency_proof_holds(second: int) -> None:
    whole = naive.root(LEAVES[:second])
    for first in range(1, second + 1):
        hashes = naive.consistency_proof(first, LEAVES[:second])
        verify_consistency(first, second, naive.root(LEAVES[:first]), whole, hashes)


# --- bent proofs ----------------------------------------------------------------------------------


def bent_lists(hashes: list[bytes], *extra: bytes) -> Iterator[list[bytes]]:
    """Lists of hashes that are not ``hashes``."""
    for each in (b"", SOME_HASH, *extra):
        yield [*hashes, each]
        yield [each, *hashes]
    for at, each in enumerate(hashes):
        yield hashes[:at] + hashes[at + 1 :]
        yield [*hashes[:at], bytes([each[0] ^ 8]) + each[1:], *hashes[at + 1 :]]
        yield [*hashes[:at], each[:31], *hashes[at + 1 :]]
        yield [*hashes[:at], each + b"\0", *hashes[at + 1 :]]
    if len(hashes) > 1:
        yield hashes[::-1]
        yield [hashes[0] + hashes[1], *hashes[2:]]
        yield [(hashes[0] + hashes[1])[:40], (hashes[0] + hashes[1])[40:], *hashes[2:]]


@pytest.mark.parametrize(("index", "size"), [(0, 1), (0, 8), (5, 8), (2, 3), (1, 5), (6, 7), (70, 100), (99, 100)])
def test_a_bent_inclusion_proof_is_refused(index: int, size: int) -> None:
    leaf, whole = LEAVES[index], naive.root(LEAVES[:size])
    hashes = naive.inclusion_path(index, LEAVES[:size])
    verify_inclusion(index, size, leaf, hashes, whole)
    bent = [(index, size, leaf, each, whole) for each in bent_lists(hashes, whole)]
    bent += [(other, size, leaf, hashes, whole) for other in (index - 1, index + 1, index ^ 2, -1, size)]
    bent += [(index, other, leaf, hashes, whole) for other in (size * 2, size // 2, 0, -size)]
    bent += [(index, size, other, hashes, whole) for other in (SOME_HASH, b"", leaf[:31], leaf + b"\0")]
    bent += [(index, size, leaf, hashes, other) for other in (SOME_HASH, b"", EMPTY_ROOT, whole[:31])]
    for case in bent:
        with pytest.raises(ProofError):
            verify_inclusion(*case)


@pytest.mark.parametrize(("first", "second"), [(1, 8), (6, 8), (2, 5), (6, 7), (4, 8), (64, 100), (65, 100), (99, 100)])
def test_a_bent_consistency_proof_is_refused(first: int, second: int) -> None:
    old, new = naive.root(LEAVES[:first]), naive.root(LEAVES[:second])
    hashes = naive.consistency_proof(first, LEAVES[:second])
    verify_consistency(first, second, old, new, hashes)
    bent = [(first, second, old, new, each) for each in [[], *bent_lists(hashes, old, new, hashes[0])]]
    bent += [(other, second, old, new, hashes) for other in (first - 1, first + 1, first ^ 2, 0, -1, second)]
    bent += [(first, other, old, new, hashes) for other in (second * 2, second // 2, 0, first)]
    bent += [(first, second, other, new, hashes) for other in (SOME_HASH, new, b"", EMPTY_ROOT)]
    bent += [(first, second, old, other, hashes) for other in (SOME_HASH, old, b"", EMPTY_ROOT)]
    for case in bent:
        with pytest.raises(ProofError):
            verify_consistency(*case)


@pytest.mark.parametrize("cut", [1, 31, 33, 63])
def test_hashes_cut_elsewhere_are_refused_though_their_bytes_joined_are_the_same(cut: int) -> None:
    joined = LEAVES[0] + LEAVES[1]
    assert node_hash(joined[:cut], joined[cut:]) == naive.root(LEAVES[:2])
    with pytest.raises(ProofError):
        verify_inclusion(0, 2, joined[:cut], [joined[cut:]], naive.root(LEAVES[:2]))


@pytest.mark.parametrize("second", [0, 1, 5])
def test_consistency_with_the_empty_tree_is_refused(second: int) -> None:
    with pytest.raises(ProofError):
        verify_consistency(0, second, EMPTY_ROOT, naive.root(LEAVES[:second]), [])


def test_trees_of_one_size_are_consistent_when_their_roots_are_equal_and_nothing_is_added() -> None:
    verify_consistency(5, 5, SOME_HASH, SOME_HASH, [])
    with pytest.raises(ProofError):
        verify_consistency(5, 5, SOME_HASH, EMPTY_ROOT, [])
    with pytest.raises(ProofError):
        verify_consistency(5, 5, SOME_HASH, SOME_HASH, [SOME_HASH])
