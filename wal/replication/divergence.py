"""Where two copies of a log part, by their histories alone.

Two copies that agree on an epoch and its first LSN agree on all of its records that both hold (``wal.history``): only
one proposer writes in an epoch, and it appends nowhere before its history was applied there.
"""

from __future__ import annotations

from ledger.positions import BEFORE_FIRST, Lsn, before
from wal.history import EpochStart, History
from wal.replication.messages import Position


def last_common(history: History, tail: Position, other: History) -> Lsn:
    """The last LSN up to which a log of this ``history`` that ends at ``tail`` is that of ``other``, a history without
    an end; 0 when nothing of it is.

    A history may begin late, with an epoch of which the oldest records are gone.
    """
    theirs = dict(other)
    common = [start for start in history if theirs.get(start.epoch) == start.first_lsn]
    if not common:
        return BEFORE_FIRST
    last = common[-1]
    return min(_end(history, last, tail.lsn), _end(other, last, tail.lsn))


def _end(history: History, start: EpochStart, last_lsn: Lsn) -> Lsn:
    """The last LSN that the epoch of ``start`` wrote, in a log that goes up to ``last_lsn``."""
    following = [later.first_lsn for later in history if later.epoch > start.epoch]
    return min([last_lsn, *map(before, following)])
