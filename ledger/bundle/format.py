"""The members of a bundle, their order and bounds, and the tar container around them.

The format is described in docs/formats/bundle.md. In short, an uncompressed tar of::

    entries/000001.ndjson.gz ... | snapshots.ndjson | checkpoint | anchors.json, if any | job_index.json, if any
        | keys.json | manifest.dsse.json

A member is a ustar header that follows from its name and size alone, its bytes, and zeros up to a multiple of
``BLOCK_BYTES``; two blocks of zeros end the file. So the members determine the container, and a reader checks every
byte outside them.

Invariants::

    1 <= entry parts <= ENTRY_PARTS_MAX                 numbered from 1 without gap
    raw bytes of an entry part <= PART_BYTES_MAX, or it is one row <= ROW_BYTES_MAX
    an imported payload <= PAYLOAD_BYTES_MAX, in a CONFLICT entry <= CONFLICT_BYTES_MAX: so it can be exported again
"""

from __future__ import annotations

import tarfile
from collections.abc import Collection, Sequence
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from ledger.chain.form import ORIGIN_BYTES_MAX, Count, Hash
from ledger.errors import BundleInvalidError

SNAPSHOTS: Final = "snapshots.ndjson"
CHECKPOINT: Final = "checkpoint"
ANCHORS: Final = "anchors.json"
JOB_INDEX: Final = "job_index.json"
"""What is kept of the index of jobs of entries that left before the first one."""
KEYS: Final = "keys.json"
MANIFEST: Final = "manifest.dsse.json"
EVIDENCE: Final = "evidence.dsse.json"
"""Replaces the manifest in a file that is evidence of a broken chain, and no bundle."""
TAIL: Final = (SNAPSHOTS, CHECKPOINT, ANCHORS, JOB_INDEX, KEYS, MANIFEST)
"""Members after the entries, in this order; each once."""
OPTIONAL: Final = (ANCHORS, JOB_INDEX)
"""Those of them that a bundle may lack."""

BLOCK_BYTES: Final = 512
END: Final = bytes(2 * BLOCK_BYTES)
"""The end of the container; no byte follows."""

ROWS_A_PART_MAX: Final = 10_000
PART_BYTES_MAX: Final = 8 << 20
"""Most raw bytes of several rows in one part."""
ROW_BYTES_MAX: Final = 136 << 20
"""Most raw bytes of one row: twice the longest payload, since the payload is escaped, plus the other columns."""
PAYLOAD_BYTES_MAX: Final = 32 << 20
"""Longest payload that is imported: twice the longest record of a WAL, since a REFUSED entry holds one in base64."""
CONFLICT_BYTES_MAX: Final = 2 * PAYLOAD_BYTES_MAX + (4 << 10)
"""The same for a CONFLICT entry, which holds an escaped payload and a few names."""
ENTRY_PARTS_MAX: Final = 100_000
SNAPSHOT_ROW_BYTES_MAX: Final = 1 << 20
SNAPSHOTS_BYTES_MAX: Final = (1 << 33) - BLOCK_BYTES
CHECKPOINT_BYTES_MAX: Final = 1 << 20
ANCHORS_BYTES_MAX: Final = 16 << 20
JOB_INDEX_BYTES_MAX: Final = 64 << 20
KEYS_BYTES_MAX: Final = 4 << 20
MANIFEST_BYTES_BASE: Final = 64 << 10
MANIFEST_BYTES_A_PART: Final = 512
"""A manifest has at most the base and this many bytes for each entry part."""

assert 2 * (CONFLICT_BYTES_MAX + ORIGIN_BYTES_MAX) + (4 << 10) < ROW_BYTES_MAX  # 4 KiB hold all other columns
assert PART_BYTES_MAX < ROW_BYTES_MAX < SNAPSHOTS_BYTES_MAX < 8**11  # 11 octal digits hold a size
assert len(f"{ENTRY_PARTS_MAX}") == 6

_NAME = slice(0, 100)
_SIZE = slice(124, 135)


class Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One member in the manifest's list. ``bytes`` is its size in the file, ``raw_bytes`` its size uncompressed.

    ``rows`` is 0 for members that have none; ``sha256`` is hex, over the bytes in the file.
    """

    name: Annotated[str, Meta(max_length=100)]
    sha256: Hash
    bytes: Count
    raw_bytes: Count
    rows: Count


def entries_name(number: int) -> str:
    """Name of entry part ``number``, from 1."""
    return f"entries/{number:06d}.ndjson.gz"


def tail_of(names: Sequence[str]) -> tuple[str, ...]:
    """The members after the entries of a bundle whose members, except its manifest, have these names."""
    return tuple(name for name in TAIL if name not in OPTIONAL or name in names[-len(OPTIONAL) - 1 :])


def names_after(name: str) -> set[str]:
    """Names that may follow a member after the entries; none after the last."""
    behind = TAIL[TAIL.index(name) + 1 :]
    needed = next((at for at, each in enumerate(behind) if each not in OPTIONAL), -1)
    return {*behind[: needed + 1]}


def version_of(names: Collection[str]) -> Literal[1, 2, 3]:
    """The format version of a bundle with these members."""
    return 3 if JOB_INDEX in names else 2 if ANCHORS in names else 1


def tar_header(name: str, size: int) -> bytes:
    """The only valid header of a member: a plain file, mode 0644, without owner, with time 0."""
    header = tarfile.TarInfo(name)
    header.size = size
    return header.tobuf(tarfile.USTAR_FORMAT, encoding="ascii", errors="strict")


def parse_tar_header(block: bytes) -> tuple[str, int]:
    """Name and size in a header.

    Raises:
        BundleInvalidError: it is not a header that ``tar_header`` makes.
    """
    try:
        name, size = block[_NAME].rstrip(b"\0").decode("ascii"), int(block[_SIZE], 8)
        is_ours = tar_header(name, size) == block
    except ValueError:
        is_ours = False
    if not is_ours:
        raise BundleInvalidError("a tar header is not one of a plain file as bundles have them")
    return name, size


def padding_of(size: int) -> int:
    """Number of zeros after a member of ``size`` bytes."""
    return -size % BLOCK_BYTES


def size_max(name: str, entry_parts: int) -> int:
    """Most bytes that the member may have, in a bundle with ``entry_parts`` entry parts so far."""
    bounds = {
        SNAPSHOTS: SNAPSHOTS_BYTES_MAX,
        CHECKPOINT: CHECKPOINT_BYTES_MAX,
        ANCHORS: ANCHORS_BYTES_MAX,
        JOB_INDEX: JOB_INDEX_BYTES_MAX,
        KEYS: KEYS_BYTES_MAX,
        MANIFEST: MANIFEST_BYTES_BASE + MANIFEST_BYTES_A_PART * entry_parts,
    }
    bounds[EVIDENCE] = bounds[MANIFEST]
    return bounds.get(name, compressed_bytes_max(ROW_BYTES_MAX))


def compressed_bytes_max(raw_bytes: int) -> int:
    """An upper bound of the gzip output for ``raw_bytes`` bytes."""
    return raw_bytes + raw_bytes // 1000 + 1024


def check_parts(parts: Sequence[Part]) -> int:
    """Check the parts of a bundle, without its manifest; returns the number of entry parts.

    Raises:
        BundleInvalidError: names, order, number or a size is wrong.
    """
    tail = tail_of([part.name for part in parts])
    entry_parts = len(parts) - len(tail) + 1
    if not 1 <= entry_parts <= ENTRY_PARTS_MAX:
        raise BundleInvalidError(f"a bundle has 1 to {ENTRY_PARTS_MAX} entry parts")
    names = (*map(entries_name, range(1, entry_parts + 1)), *tail[:-1])
    for part, name in zip(parts, names, strict=True):
        if part.name != name:
            raise BundleInvalidError(f"the manifest lists {part.name[:100]!r} where {name} must stand")
        if name in tail:
            is_counted = name == SNAPSHOTS or part.rows == 0
            is_sized = is_counted and part.raw_bytes == part.bytes <= size_max(name, entry_parts)
        else:
            is_sized = (
                1 <= part.rows <= ROWS_A_PART_MAX
                and part.raw_bytes <= (ROW_BYTES_MAX if part.rows == 1 else PART_BYTES_MAX)
                and part.bytes <= compressed_bytes_max(part.raw_bytes)
            )
        if not is_sized:
            raise BundleInvalidError(f"{name} is larger than a bundle allows, or has a wrong number of rows")
    return entry_parts
