"""The index of jobs of entries that left with a prune: what is kept of it, so that runs over what left and what stays
are made again and compared.

Runs end in groups: what is behind ``group_begin`` is merged into later runs, and needs its leaves; of all before, the
roots are enough. Nothing that is kept is trusted, but compared with the snapshot that ends at the floor, which the
PRUNED entry names::

    kept      leaves of the runs over full blocks of the last group, and the entries behind them
    roots     of these and of all runs before, in the snapshot at the floor
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from hashlib import sha256
from typing import Final, NamedTuple, Protocol

import msgspec

from ledger.job_index import group_begin
from ledger.job_index.builder import IndexBuilder, LeftIndex, OpenBlock, PartIndex
from ledger.machines.retention import Floor
from ledger.merkle import HASH_BYTES
from ledger.verification.snapshot_check import claim_in

ENTRIES_AT_ONCE: Final = 16_384
"""Entries that are read at once to make an index of them."""


class IndexAtFloor(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """What is kept of the index of jobs of entries that left; nothing of it is trusted. The fields are in the order of
    canonical JSON, as a bundle has them."""

    hashes: bytes = b""
    keys: bytes = b""
    """Leaf hashes of the entries behind the full blocks, and keys of their jobs, as in ``LeftIndex``."""
    payload: bytes
    """Of the snapshot that ends where they end."""
    runs: Sequence[bytes] = ()
    """Leaves of runs, as in ``LeftIndex``."""


class KeptIndex(NamedTuple):
    """As it is stored: of entries up to ``to_seq``."""

    first_leaf: int
    """Of the entries behind the full blocks."""
    keys: bytes
    runs: Sequence[bytes]

    @property
    def to_seq(self) -> int:
        """The last entry that left."""
        return self.first_leaf + len(self.keys) // HASH_BYTES


class IndexSource(Protocol):
    """Reads what a database has of a tenant, in one state."""

    async def kept(self) -> KeptIndex | None:
        """What is kept of the newest entries that left."""

    async def payload_at(self, to_seq: int) -> bytes:
        """The payload of the snapshot that ends there, empty if there is none."""

    async def left_hashes(self, begin: int, end: int) -> bytes:
        """Leaf hashes ``begin..end - 1`` of the stored tree."""

    async def entries(self, begin: int, end: int) -> tuple[bytes, bytes]:
        """Keys of the jobs and leaf hashes of the entries of these leaf indexes, of those that are there."""


async def index_at(source: IndexSource, to_seq: int) -> IndexAtFloor | None:
    """What is kept of the index of entries up to ``to_seq``, which left or are about to; None if the snapshot there has
    none."""
    claim = claim_in(payload := await source.payload_at(to_seq))
    if claim is None or not claim.index_roots:
        return None
    left = None
    with suppress(TypeError, ValueError):  # An edited row can hold anything.
        left = (await builder_at(source, to_seq, claim.index_begin)).left()
    return IndexAtFloor(payload=payload) if left is None else at_floor(payload, left)


def at_floor(payload: bytes, left: LeftIndex) -> IndexAtFloor:
    """What is kept, of this index and the payload of the snapshot at its end."""
    return IndexAtFloor(payload=payload, runs=left.runs, keys=left.open.keys, hashes=left.open.hashes)


async def builder_at(source: IndexSource, size: int, index_begin: int = 0) -> IndexBuilder:
    """The last group of the index of the first ``size`` entries, by what is kept of entries that left and the entries
    behind them, as stored. Nothing is known of it if one of them is missing."""
    builder, kept = IndexBuilder(max(index_begin, group_begin(size))), await source.kept()
    if kept is not None and builder.size < kept.to_seq <= size:
        payload, hashes = await source.payload_at(kept.to_seq), await source.left_hashes(kept.first_leaf, kept.to_seq)
        builder = index_behind(
            kept.to_seq, IndexAtFloor(payload=payload, runs=kept.runs, keys=kept.keys, hashes=hashes)
        )
    for first in range(builder.size, size, ENTRIES_AT_ONCE):
        end = min(first + ENTRIES_AT_ONCE, size)
        keys, hashes = await source.entries(first, end)
        if not len(keys) == len(hashes) == (end - first) * HASH_BYTES:
            return IndexBuilder(size)
        part = PartIndex(first, ())
        part.append(keys, hashes)
        builder.add(part.finish())
    return builder


async def index_of_left(sources: Iterable[IndexSource], floor: Floor) -> IndexBuilder:
    """The index of jobs of the entries that left, by the first source that has all of it."""
    found = IndexBuilder(floor.to_seq)
    for source in sources:
        found = index_at_floor(floor, await index_at(source, floor.to_seq))
        if found.left() is not None:
            break
    return found


def index_at_floor(floor: Floor, kept: IndexAtFloor | None) -> IndexBuilder:
    """The index of jobs of the entries that left, as far as what is kept of it is the one that was signed."""
    if kept is None or sha256(kept.payload).hexdigest() != floor.snapshot:
        return IndexBuilder(floor.to_seq)
    return index_behind(floor.to_seq, kept)


def index_behind(to_seq: int, kept: IndexAtFloor) -> IndexBuilder:
    """The index of jobs of the first ``to_seq`` entries, as far as what is kept of it is that of its snapshot, which
    the caller MUST trust."""
    found, claim = IndexBuilder(to_seq), claim_in(kept.payload)
    if claim is None or claim.to_seq != to_seq or len(roots := claim.index_roots) != len(claim.index_places):
        return found
    block_begin = to_seq - len(kept.keys) // HASH_BYTES
    left = LeftIndex(claim.index_begin, [*kept.runs], OpenBlock(block_begin, kept.keys, kept.hashes))
    if left.fits(to_seq, roots):
        return IndexBuilder.behind(left, roots)
    found.knows({place: root for place, root in roots.items() if place.end <= group_begin(to_seq)})
    return found
