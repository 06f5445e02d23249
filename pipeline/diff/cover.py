"""Which ranges of a chain to carry over so that the other side has all of some entries: few, and not much longer.

Each range becomes a bundle, and whoever imports it passes over what it has already. So ranges that lie near one another
are carried as one, and there are never more than ``RANGES_MAX``.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple

GAP_MAX: Final = 1000
"""Entries that are there already and carried all the same, so that two ranges are one bundle."""
RANGES_MAX: Final = 100
"""Bundles of one tenant in one direction."""


class SeqRange(NamedTuple):
    """Entries ``from_seq..to_seq``, both included."""

    from_seq: int
    to_seq: int


def cover(wanted: Iterable[SeqRange], *, gap_max: int = GAP_MAX, ranges_max: int = RANGES_MAX) -> list[SeqRange]:
    """Ranges, ascending and apart, that hold all of ``wanted``, which may come in any order and overlap.

    No two of them are ``gap_max`` entries or fewer apart; of more than ``ranges_max`` those that are nearest to one
    another are joined, whatever lies between.
    """
    joined: list[SeqRange] = []
    for each in sorted(wanted):
        if joined and each.from_seq - joined[-1].to_seq - 1 <= gap_max:
            joined[-1] = SeqRange(joined[-1].from_seq, max(joined[-1].to_seq, each.to_seq))
        else:
            joined.append(each)
    if len(joined) <= ranges_max:
        return joined
    gaps = sorted(range(1, len(joined)), key=lambda at: joined[at].from_seq - joined[at - 1].to_seq)
    kept = sorted(gaps[len(joined) - ranges_max :])
    starts, ends = [0, *kept], [*kept, len(joined)]
    return [SeqRange(joined[start].from_seq, joined[end - 1].to_seq) for start, end in zip(starts, ends, strict=True)]
