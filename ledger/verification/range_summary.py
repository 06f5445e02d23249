"""What checking one range of a chain leaves for the whole: plain values, about a byte and a half for each row.

A range is all entries with ``from_seq <= seq <= to_seq``; the ranges of a chain follow one another without gap, the
first takes all that is lower and the last all that is higher::

    ranges[0].from_seq is None        ranges[n].from_seq == ranges[n - 1].to_seq + 1        ranges[-1].to_seq is None

Hashes of a range are of use only where its entries go without gap, since a gap ends every comparison across it.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import msgspec

from ledger.verification.snapshot_check import OpenedRow
from ledger.verification.tile_check import TileBreak
from ledger.verification.verdict import Found, Head

Interval = tuple[int, int]
"""First and last seq of entries that something covers."""


class RangeTask(NamedTuple):
    """One range to be checked, and what is known before any of its rows is read."""

    tenant_id: str
    number: int
    """Of the range, from 0."""
    from_seq: int | None
    to_seq: int | None
    first_seq: int = 1
    """The first entry of the chain that is verified."""
    tree_size: int = 0
    """Size of the stored tree, 0 when there is none."""
    sizes: tuple[int, ...] = ()
    """Sizes at which a root of the tree must be known: of the stored tree, of checkpoints and of anchors."""
    intervals: tuple[Interval, ...] = ()
    """What signed claims cover besides the snapshot rows that overlap the range."""
    may_be_v1: bool = True
    """Whether all entries before may have version 1."""

    @property
    def begin(self) -> int:
        """The first seq that an entry in its place can have here."""
        return self.first_seq if self.from_seq is None else self.from_seq

    def overlaps(self, from_seq: int, to_seq: int) -> bool:
        """Whether entries ``from_seq..to_seq`` are partly here."""
        return (self.from_seq is None or to_seq >= self.from_seq) and (self.to_seq is None or from_seq <= self.to_seq)

    def holds(self, seq: int) -> bool:
        """Whether entry ``seq`` is here."""
        return self.overlaps(seq, seq)


class Border(NamedTuple):
    """The first entry of a range, as it is to be compared with the one before."""

    seq: int
    prev_link: Any
    has_wrong_type: bool
    """Then nothing is compared with it."""


class Mark(NamedTuple):
    """An entry that something begins or ends with."""

    link: bytes
    hlc: Any


class IntervalPart(NamedTuple):
    """Roots of the subtrees that entries ``begin..end`` fall into, in the tree over an interval alone."""

    interval: Interval
    begin: int
    end: int
    hashes: list[bytes]


Tile = tuple[int, int, Any]
"""Level, index and stored value of a tile whose entries are not all in one range."""


class TileNodes(NamedTuple):
    """Roots of adjacent perfect subtrees of ``256 ** level`` leaves, which belong to tiles that are not all here."""

    level: int
    first: int
    hashes: bytes


class RangeSummary(NamedTuple):
    """Beside the breaks that were listed, all that the whole needs of one range."""

    number: int
    rows: int
    border: Border | None
    """None in the first range of a chain, which has nothing before it, and where there are no entries."""
    has_entries: bool
    """Whether any entry here has its place."""
    next_seq: int
    last_link: Any
    """Link of the last entry that has its place, as stored."""
    last_row: Head | None
    """The last row there is."""
    relied_on_v1: bool
    may_be_v1: bool
    """Whether all entries so far may still have version 1."""
    runs: list[Interval]
    marks: dict[int, Mark]
    parts: list[IntervalPart]
    """Of each interval, what is here of it."""
    segments: list[tuple[int, list[bytes]]]
    """Roots of the subtrees that the entries up to each size fall into, in the tree over all entries."""
    tile_nodes: list[TileNodes]
    tile_breaks: list[tuple[int, TileBreak]]
    """Stored tiles that differ, each with the number of entries up to its end."""
    tiles: list[Tile]
    snapshots: list[OpenedRow]
    """Those stored to begin here."""
    commitments: int
    """Entries whose verdicts are to be judged."""
    found: Found

    def encode(self) -> bytes:
        """As MessagePack."""
        return _ENCODER.encode(self)

    @classmethod
    def decode(cls, data: bytes) -> RangeSummary:
        """What ``encode`` gave."""
        return _DECODER.decode(data)


_ENCODER: Final = msgspec.msgpack.Encoder()
_DECODER: Final = msgspec.msgpack.Decoder(RangeSummary)
