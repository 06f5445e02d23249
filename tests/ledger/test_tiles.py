"""The tree in tiles: the same roots and proofs as the naive tree, at and around every border."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ledger.errors import InvalidInputError, ProofError
from ledger.merkle import EMPTY_ROOT, Frontier, leaf_hash, root, verify_consistency, verify_inclusion
from ledger.merkle.tiles import (
    TILE_WIDTH,
    TileTree,
    consistency_proof,
    consistency_tiles,
    has_leaf,
    inclusion_proof,
    inclusion_tiles,
    right_edge,
    root_at,
    root_tiles,
)
from tests.conftest import EXAMPLES
from tests.ledger import naive_merkle as naive

LEAVES = [leaf_hash(index.to_bytes(4, "big")) for index in range(65_540)]
SMALL_SIZES = [*range(1, 40), *range(250, 262), *range(508, 518), 700]
BORDERS = [65_535, 65_536, 65_537, 65_540]
EDGE_OF_70_000 = {(0, 273): b"\x07" * 32 * 112, (1, 1): b"\x07" * 32 * 17, (2, 0): b"\x07" * 32}


class Shelf:
    """Tiles kept as a database would keep them, which remembers what was asked for."""

    def __init__(self) -> None:
        self.tiles: dict[tuple[int, int], bytes] = {}
        self.asked: set[tuple[int, int]] = set()

    def get(self, level: int, index: int) -> bytes:
        self.asked.add((level, index))
        return self.tiles[level, index]

    def edge(self, size: int) -> dict[tuple[int, int], bytes]:
        return {each: self.tiles[each] for each in right_edge(size)}


def shelf_of(size: int, portion: int = 1000) -> Shelf:
    shelf = Shelf()
    tree = TileTree(0, {})
    for at in range(0, size, portion):
        tree.append_leaf_hashes(LEAVES[at : min(size, at + portion)])
        shelf.tiles |= tree.changed
        tree.forget_changed()
    return shelf


@pytest.fixture(scope="module")
def large() -> Shelf:
    """Tiles of the largest tree here; they serve every smaller size too."""
    return shelf_of(BORDERS[-1])


# --- appending ------------------------------------------------------------------------------------


def test_appending_leaf_by_leaf_gives_the_naive_root_and_the_documented_tiles_at_every_size() -> None:
    shelf = Shelf()
    tree = TileTree(0, {})
    for size in range(600):
        assert (tree.size, tree.root()) == (size, naive.root(LEAVES[:size]))
        assert shelf.tiles == naive_tiles(size)
        tree.append_leaf_hashes(LEAVES[size : size + 1])
        shelf.tiles |= tree.changed
        tree.forget_changed()


def naive_tiles(size: int) -> dict[tuple[int, int], bytes]:
    """All tiles of a tree of less than 65,536 leaves, straight from the definition."""
    full = [naive_full_tile(index) for index in range(size // TILE_WIDTH)]
    tiles = {
        (0, index): b"".join(LEAVES[index * 256 : min(size, index * 256 + 256)]) for index in range(-(-size // 256))
    }
    return tiles | ({(1, 0): b"".join(full)} if full else {})


FULL_TILE_ROOTS: dict[int, bytes] = {}


def naive_full_tile(index: int) -> bytes:
    if index not in FULL_TILE_ROOTS:
        FULL_TILE_ROOTS[index] = naive.root(LEAVES[index * 256 : index * 256 + 256])
    return FULL_TILE_ROOTS[index]


@given(st.lists(st.integers(0, 700), min_size=1, max_size=6))
def test_portions_and_restarts_from_the_right_edge_change_nothing(portions: list[int]) -> None:
    shelf = Shelf()
    size = 0
    for portion in portions:
        tree = TileTree(size, shelf.edge(size))
        tree.append_leaf_hashes(LEAVES[size : size + portion])
        size += portion
        shelf.tiles |= tree.changed
        assert (tree.size, tree.root()) == (size, root(LEAVES[:size]))
    assert shelf.tiles == naive_tiles(size)


@pytest.mark.parametrize("size", [254, 255, 256, 257, *BORDERS[:3]])
def test_a_tree_restored_at_a_border_goes_on_as_if_it_had_never_stopped(large: Shelf, size: int) -> None:
    tree = TileTree(size, large.edge(size))
    frontier = Frontier()
    frontier.extend(LEAVES[:size])
    assert tree.root() == frontier.root()
    for leaf in LEAVES[size : size + 3]:
        tree.append_leaf_hashes([leaf])
        frontier.extend([leaf])
        assert tree.root() == frontier.root()
    for (level, index), tile in tree.changed.items():
        assert tile == large.tiles[level, index][: len(tile)]
        assert len(tile) == 32 * min(256, (size + 3) // 256**level - 256 * index)


def test_the_tiles_of_65_537_leaves_reach_up_to_the_third_level(large: Shelf) -> None:
    assert right_edge(65_535) == [(0, 255), (1, 0)]
    assert right_edge(65_536) == [(2, 0)]
    assert right_edge(65_537) == [(0, 256), (2, 0)]
    assert large.tiles[2, 0] == naive.root(LEAVES[:65_536])
    assert large.tiles[1, 0] == b"".join(naive_full_tile(index) for index in range(256))
    assert large.tiles[0, 256] == b"".join(LEAVES[65_536:])


def test_the_worked_example_of_the_docs_holds() -> None:
    assert right_edge(70_000) == [(0, 273), (1, 1), (2, 0)]
    assert TileTree(70_000, EDGE_OF_70_000).size == 70_000


def test_changed_tiles_stay_listed_until_they_are_forgotten() -> None:
    tree = TileTree(0, {})
    tree.append_leaf_hashes(LEAVES[:256])
    assert tree.changed == naive_tiles(256)
    tree.append_leaf_hashes(LEAVES[256:300])
    assert tree.changed == naive_tiles(300)
    tree.forget_changed()
    assert tree.changed == {}
    tree.append_leaf_hashes([])
    assert tree.changed == {}
    tree.append_leaf_hashes(LEAVES[300:301])
    assert tree.changed == {(0, 1): b"".join(LEAVES[256:301])}


@pytest.mark.parametrize("lost", [(0, 273), (1, 1), (2, 0)])
def test_a_right_edge_with_a_missing_or_narrow_tile_is_refused(lost: tuple[int, int]) -> None:
    tile = EDGE_OF_70_000[lost]
    for tiles in (EDGE_OF_70_000 | {lost: tile[:-32]}, EDGE_OF_70_000 | {lost: tile[:-1]}, {}):
        with pytest.raises(ProofError):
            TileTree(70_000, tiles)


def test_a_right_edge_wider_than_the_tree_is_cut_to_it() -> None:
    tree = TileTree(5, {(0, 0): b"".join(LEAVES[:9])})
    assert tree.root() == naive.root(LEAVES[:5])
    tree.append_leaf_hashes(LEAVES[5:7])
    assert tree.changed == {(0, 0): b"".join(LEAVES[:7])}


# --- proofs ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", SMALL_SIZES)
def test_roots_and_inclusion_proofs_are_those_of_the_naive_tree(large: Shelf, size: int) -> None:
    whole = naive.root(LEAVES[:size])
    assert root_at(size, large.get) == whole
    for index in {*range(min(size, 12)), size // 2, size - 2, size - 1} & set(range(size)):
        hashes = inclusion_proof(index, size, large.get)
        assert hashes == naive.inclusion_path(index, LEAVES[:size])
        verify_inclusion(index, size, LEAVES[index], hashes, whole)


def test_only_the_link_that_a_tree_was_made_of_is_found_to_be_its_leaf() -> None:
    links = [index.to_bytes(4, "big").hex() for index in range(700)]
    stored, whole = shelf_of(700).tiles, naive.root(LEAVES[:700])
    for index in (0, 255, 256, 699):
        assert has_leaf(index, 700, whole, links[index], stored)
        assert not has_leaf(index, 700, whole, links[index - 1], stored)
        assert not has_leaf(index, 700, naive.root(LEAVES[:699]), links[index], stored)
        assert not has_leaf(index, 701, whole, links[index], stored)
        for nothing in (None, "", "no hex"):
            assert not has_leaf(index, 700, whole, nothing, stored)
        for tile in inclusion_tiles(index, 700):
            assert not has_leaf(index, 700, whole, links[index], {**stored, tile: b""}), tile
            assert not has_leaf(index, 700, whole, links[index], {at: stored[at] for at in stored.keys() - {tile}})


@pytest.mark.parametrize("second", SMALL_SIZES)
def test_consistency_proofs_are_those_of_the_naive_tree(large: Shelf, second: int) -> None:
    for first in {*range(1, 12), 255, 256, 257, second // 2, second - 1, second} & set(range(1, second + 1)):
        hashes = consistency_proof(first, second, large.get)
        assert hashes == naive.consistency_proof(first, LEAVES[:second])
        verify_consistency(first, second, naive.root(LEAVES[:first]), naive.root(LEAVES[:second]), hashes)


@pytest.mark.parametrize("size", BORDERS)
def test_proofs_hold_around_the_border_of_the_second_level(large: Shelf, size: int) -> None:
    whole = root(LEAVES[:size])
    assert root_at(size, large.get) == whole
    for index in (0, 1, 255, 256, 32_767, 32_768, 65_279, 65_280, size - 1):
        verify_inclusion(index, size, LEAVES[index], inclusion_proof(index, size, large.get), whole)
    for first in (1, 255, 256, 257, 32_768, 65_280, 65_535, size):
        hashes = consistency_proof(first, size, large.get)
        verify_consistency(first, size, root(LEAVES[:first]), whole, hashes)


@settings(max_examples=2 * EXAMPLES)
@given(st.data())
def test_proofs_ask_for_exactly_the_tiles_they_name_and_for_few(large: Shelf, data: st.DataObject) -> None:
    size = data.draw(st.integers(1, len(LEAVES)))
    index = data.draw(st.integers(0, size - 1))
    large.asked.clear()
    hashes = inclusion_proof(index, size, large.get)
    assert large.asked == inclusion_tiles(index, size)
    assert len(large.asked) <= 6

    large.asked.clear()
    whole = root_at(size, large.get)
    assert large.asked == root_tiles(size)
    verify_inclusion(index, size, LEAVES[index], hashes, whole)

    large.asked.clear()
    hashes = consistency_proof(index + 1, size, large.get)
    assert large.asked == consistency_tiles(index + 1, size)
    assert len(large.asked) <= 6
    verify_consistency(index + 1, size, root_at(index + 1, large.get), whole, hashes)


def test_the_tiles_of_a_root_are_the_right_edge() -> None:
    for size in (0, 1, 255, 256, 257, 65_535, 65_536, 70_000, 2**40 + 12_345):
        assert root_tiles(size) == set(right_edge(size))


def test_the_empty_tree_needs_no_tiles() -> None:
    assert root_at(0, Shelf().get) == EMPTY_ROOT == TileTree(0, {}).root()
    assert right_edge(0) == []


@pytest.mark.parametrize(("index", "size"), [(0, 0), (-1, 5), (5, 5), (6, 5), (0, -1)])
def test_a_leaf_outside_the_tree_has_no_proof(large: Shelf, index: int, size: int) -> None:
    with pytest.raises(InvalidInputError):
        inclusion_proof(index, size, large.get)
    with pytest.raises(InvalidInputError):
        inclusion_tiles(index, size)


@pytest.mark.parametrize(("first", "second"), [(0, 0), (0, 5), (-1, 5), (6, 5)])
def test_sizes_out_of_order_or_empty_have_no_proof(large: Shelf, first: int, second: int) -> None:
    with pytest.raises(InvalidInputError):
        consistency_proof(first, second, large.get)
    with pytest.raises(InvalidInputError):
        consistency_tiles(first, second)


def test_a_stored_tile_that_is_too_narrow_is_named() -> None:
    shelf = shelf_of(300)
    shelf.tiles[0, 1] = shelf.tiles[0, 1][:-32]
    with pytest.raises(ProofError, match="tile 1 of level 0 holds 43 hashes, 44 needed"):
        root_at(300, shelf.get)
