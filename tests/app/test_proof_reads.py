"""A proof reads a number of tiles that grows with the logarithm of the tree, in a fixed number of statements."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

import asyncpg
import pytest

from app.read import proofs
from ledger import merkle
from ledger.errors import NotFoundError, SeqOutOfRangeError
from signing.checkpoint import Checkpoint
from tests.app.synthetic_trees import insert_tree, leaf
from tests.conftest import Database
from tests.signing.conftest import RFC_8032_TEST_1, ed25519

SIZE = 70_000 + 256 * 1000
"""Of 1273 full tiles and a partial one, on three levels."""
LEVELS = 3
TILES_MAX = 4 * LEVELS
"""Tiles of one proof: on each level the path to the leaf, the sibling of that, and the right edge of each size."""
STATEMENTS_MAX = 4
"""BEGIN, the head, the tiles, COMMIT."""


class Reads:
    """Statements that were executed, and tiles that they asked for."""

    def __init__(self) -> None:
        self.statements = 0
        self.tiles = 0

    def __call__(self, query: Any) -> None:
        self.statements += 1
        if "merkle_tile" in query.query:
            self.tiles += len(query.args[1])

    def reset(self) -> None:
        self.statements = self.tiles = 0


@pytest.fixture
def reads() -> Reads:
    return Reads()


@pytest.fixture
async def counted(database: Database, reads: Reads) -> AsyncIterator[asyncpg.Pool]:
    """The service's pool, with every statement noted in ``reads``."""

    async def init(connection: asyncpg.Connection) -> None:
        connection.add_query_logger(reads)

    async with asyncpg.create_pool(database.service_url, min_size=1, max_size=1, init=init, reset=_no_reset) as pool:
        yield pool


def raw(hashes: Sequence[str]) -> list[bytes]:
    return [*map(bytes.fromhex, hashes)]


async def _no_reset(_connection: asyncpg.Connection) -> None:
    return None


@pytest.fixture
async def tree(superuser: asyncpg.Connection) -> Checkpoint:
    """The tenant ``acme`` with ``SIZE`` leaves."""
    return await insert_tree(superuser, "acme", SIZE, ed25519(RFC_8032_TEST_1))


async def test_proofs_of_any_leaf_and_size_hold_and_read_few_tiles(
    counted: asyncpg.Pool, reads: Reads, tree: Checkpoint
) -> None:
    await proofs.inclusion(counted, "acme", 1, 1)  # the driver looks types up once a connection
    for seq, size in ((1, SIZE), (SIZE, SIZE), (70_001, SIZE), (65_536, 65_537), (200_000, 299_999), (1, 1)):
        reads.reset()
        proof = await proofs.inclusion(counted, "acme", seq, size)
        assert reads.statements <= STATEMENTS_MAX
        assert reads.tiles <= TILES_MAX
        root = bytes.fromhex(proof["root_hash"])
        merkle.verify_inclusion(seq - 1, size, leaf(seq - 1), raw(proof["hashes"]), root)
        if size == SIZE:
            assert root == tree.root
    for first, second in ((1, SIZE), (65_535, SIZE), (65_536, 131_072), (70_000, 299_999), (SIZE, SIZE)):
        reads.reset()
        grown = await proofs.consistency(counted, "acme", first, second)
        assert reads.statements <= STATEMENTS_MAX
        assert reads.tiles <= TILES_MAX
        first_root, second_root = raw((grown["first_root"], grown["second_root"]))
        merkle.verify_consistency(first, second, first_root, second_root, raw(grown["hashes"]))


async def test_nothing_past_the_newest_checkpoint_is_proved_or_served(
    counted: asyncpg.Pool, superuser: asyncpg.Connection, tree: Checkpoint
) -> None:
    await superuser.execute("UPDATE scheduler.merkle_head SET tree_size = tree_size + 256")
    with pytest.raises(SeqOutOfRangeError):
        await proofs.inclusion(counted, "acme", 1, SIZE + 1)
    with pytest.raises(SeqOutOfRangeError):
        await proofs.consistency(counted, "acme", 1, SIZE + 1)
    with pytest.raises(NotFoundError):
        await proofs.hash_tile(counted, "acme", 0, SIZE // 256, SIZE % 256 + 1)
    assert len(await proofs.hash_tile(counted, "acme", 0, SIZE // 256, SIZE % 256)) == SIZE % 256 * 32
