"""The index of jobs: which entries of a log are of which job, so that a list of them can be proved to be whole.

The log is cut into blocks of ``BLOCK_ENTRIES`` entries. A **run** has one leaf for each job of a block, or of eight
neighbouring runs of the level below, sorted by the job's key (docs/formats/job-index.md)::

    key      SHA-256 of the job id
    leaf     key || number of entries (u64) || digest                                           72 bytes
    digest   in a block:      SHA-256(02 || leaf index (u64) || leaf hash, of each entry)
             in a merged run: SHA-256(03 || number (u64) || digest, of each part that has the job),
                              where several parts have it; else that of the one part
    root     of the tree (RFC 9162) whose leaves hold these 72 bytes

    run of level n      BLOCK_ENTRIES * RUNS_MERGED ** n entries, from a multiple of that on;  n <= LEVEL_MAX
    index of ``size``   the fewest runs over its full blocks, and a run over the entries behind them, if there are any

An index begins with leaf 0; where entries left before there was one, at the first border of blocks behind them.

Full blocks are merged as soon as eight are there, so an index has at most seven runs of each level below ``LEVEL_MAX``.
Runs of that level are never merged: their leaves need not be kept to go on, whatever the length of the log.

A batch is built and merged in C (``ledger.native``), with twins here.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from hashlib import sha256
from typing import Final, NamedTuple

from ledger import merkle, native
from ledger.merkle import HASH_BYTES, leaf_hash
from ledger.merkle.tiles import TILE_WIDTH

BLOCK_ENTRIES: Final = 1024
RUNS_MERGED: Final = 8
LEVEL_MAX: Final = 3

COUNT_BYTES: Final = 8
LEAF_BYTES: Final = HASH_BYTES + COUNT_BYTES + HASH_BYTES
PIECE_LEAVES: Final = TILE_WIDTH
"""Leaves of a run that are stored together: a perfect subtree."""

_SLICE: Final = 16
"""Values of the first byte of the keys that are merged at once: a sixteenth of the jobs."""
_OF_ENTRIES: Final = b"\x02"
_OF_PARTS: Final = b"\x03"


class RunPlace(NamedTuple):
    """The entries of a run: leaves ``begin..end - 1`` of the log. A run of level 0 may be shorter than a block."""

    level: int
    begin: int
    end: int


def run_entries(level: int) -> int:
    """Entries under a run of a level."""
    return BLOCK_ENTRIES * int(RUNS_MERGED**level)


def covering(size: int, begin: int = 0) -> Iterator[RunPlace]:
    """The runs of an index of leaves ``begin..size - 1`` of the log, from left to right; ``begin`` is a border of
    blocks."""
    while begin < size:
        level = LEVEL_MAX
        while level and (begin % run_entries(level) or size - begin < run_entries(level)):
            level -= 1
        end = min(begin + run_entries(level), size)
        yield RunPlace(level, begin, end)
        begin = end


def begin_behind(size: int) -> int:
    """Where an index begins of a log whose first ``size`` entries are not known: at the next border of blocks."""
    return -(-size // BLOCK_ENTRIES) * BLOCK_ENTRIES


def full_run(begin: int) -> RunPlace:
    """The run of ``LEVEL_MAX`` that begins there."""
    return RunPlace(LEVEL_MAX, begin, begin + run_entries(LEVEL_MAX))


def group_begin(size: int) -> int:
    """Where the runs begin that a later one is merged of, in an index that ends at ``size``: those before stay."""
    return size - size % run_entries(LEVEL_MAX)


def key_of(job_id: str) -> bytes:
    """The key of a job."""
    return sha256(job_id.encode("utf-8", "surrogatepass")).digest()


def keys_of(job_ids: Sequence[object]) -> bytes:
    """The keys of jobs, one after the other; of an edited value that is no text, that of its text."""
    return b"".join([key_of(str(each)) for each in job_ids])


def leaf_of(key: bytes, count: int, digest: bytes) -> bytes:
    """The leaf of a job."""
    return key + count.to_bytes(COUNT_BYTES, "big") + digest


def block_leaves(first_leaf: int, keys: bytes, hashes: bytes) -> bytes:
    """The leaves of the run over a block, or over a part of one.

    Args:
        first_leaf: leaf index of the first entry in the log.
        keys: key of the job of each entry.
        hashes: leaf hash of each entry, as many.
    """
    if (leaves := native.block_leaves(first_leaf, keys, hashes)) is not None:
        return leaves
    found: dict[bytes, list[bytes]] = {}
    for at in range(0, len(keys), HASH_BYTES):
        place = (first_leaf + at // HASH_BYTES).to_bytes(COUNT_BYTES, "big")
        found.setdefault(keys[at : at + HASH_BYTES], []).append(place + hashes[at : at + HASH_BYTES])
    return b"".join(
        leaf_of(key, len(entries), sha256(_OF_ENTRIES + b"".join(entries)).digest())
        for key, entries in sorted(found.items())
    )


def merged_leaves(runs: Sequence[bytes]) -> bytes:
    """The leaves of the run over neighbouring runs, given their leaves in order."""
    if (leaves := native.merged_leaves(runs)) is not None:
        return leaves
    found: dict[bytes, list[bytes]] = {}
    for run in runs:
        for at in range(0, len(run), LEAF_BYTES):
            found.setdefault(run[at : at + HASH_BYTES], []).append(run[at + HASH_BYTES : at + LEAF_BYTES])
    return b"".join(key + _joined(parts) for key, parts in sorted(found.items()))


def merged_root(runs: Sequence[bytes]) -> bytes:
    """Root of the run over neighbouring runs, whose leaves are never all in memory at once."""
    found, held = merkle.Frontier(), b""
    for first_byte in range(0, 256, _SLICE):
        held += merged_leaves([_slice(run, first_byte) for run in runs])
        whole = len(held) - len(held) % (PIECE_LEAVES * LEAF_BYTES)
        found.extend(piece_roots(held[:whole]))
        held = held[whole:]
    found.extend(piece_roots(held))
    return found.root()


def _slice(run: bytes, first_byte: int) -> bytes:
    """The leaves of a run whose keys begin with one of the next ``_SLICE`` bytes."""
    jobs = range(len(run) // LEAF_BYTES)
    begin, end = (
        bisect_left(jobs, bound, key=lambda at: run[at * LEAF_BYTES]) for bound in (first_byte, first_byte + _SLICE)
    )
    return run[begin * LEAF_BYTES : end * LEAF_BYTES]


def _joined(parts: Sequence[bytes]) -> bytes:
    """Count and digest of a job, of which each part has these."""
    if len(parts) == 1:
        return parts[0]
    count = sum(int.from_bytes(part[:COUNT_BYTES], "big") for part in parts)
    return count.to_bytes(COUNT_BYTES, "big") + sha256(_OF_PARTS + b"".join(parts)).digest()


def run_leaves(place: RunPlace, keys: bytes, hashes: bytes) -> bytes:
    """The leaves of a run, given key and leaf hash of each entry under it."""
    if place.level == 0:
        return block_leaves(place.begin, keys, hashes)
    step, parts = run_entries(place.level - 1), []
    for begin in range(place.begin, place.end, step):
        at, end = ((each - place.begin) * HASH_BYTES for each in (begin, begin + step))
        part = RunPlace(place.level - 1, begin, begin + step)
        parts.append(run_leaves(part, keys[at:end], hashes[at:end]))
    return merged_leaves(parts)


def piece_roots(leaves: bytes) -> list[bytes]:
    """Roots of the subtrees over each ``PIECE_LEAVES`` leaves of a run."""
    if (roots := native.piece_roots(leaves, PIECE_LEAVES)) is None:
        hashes = leaf_hashes(leaves)
        return [merkle.root(hashes[at : at + PIECE_LEAVES]) for at in range(0, len(hashes), PIECE_LEAVES)]
    return [roots[at : at + HASH_BYTES] for at in range(0, len(roots), HASH_BYTES)]


def leaf_hashes(leaves: bytes) -> list[bytes]:
    """Hash of each leaf."""
    return [leaf_hash(leaves[at : at + LEAF_BYTES]) for at in range(0, len(leaves), LEAF_BYTES)]


def root_of(leaves: bytes) -> bytes:
    """Root of a run, given its leaves."""
    return merkle.root(piece_roots(leaves))


def digest_in(place: RunPlace, entries: Sequence[tuple[int, bytes]]) -> tuple[int, bytes]:
    """Count and digest of a job in a run, given leaf index and leaf hash of each of its entries there, in order."""
    if place.level == 0:
        data = b"".join(index.to_bytes(COUNT_BYTES, "big") + each for index, each in entries)
        return len(entries), sha256(_OF_ENTRIES + data).digest()
    step = run_entries(place.level - 1)
    parts = []
    for begin in range(place.begin, place.end, step):
        part = RunPlace(place.level - 1, begin, begin + step)
        if inside := [each for each in entries if part.begin <= each[0] < part.end]:
            count, digest = digest_in(part, inside)
            parts.append(count.to_bytes(COUNT_BYTES, "big") + digest)
    joined = _joined(parts)
    return int.from_bytes(joined[:COUNT_BYTES], "big"), joined[COUNT_BYTES:]
