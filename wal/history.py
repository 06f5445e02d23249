"""The history of a log: with which LSN each epoch that wrote into it began.

Epochs and LSNs rise; an epoch reaches up to the next one's first LSN, the last one to the end of the log. An epoch that
left no record is not in it. It is as short as the log: a start drops what ended before the record in front of the
oldest.

Two logs of one WAL that agree on an epoch's first LSN agree on all of its records that both hold: only one proposer
writes in an epoch, and it appends nowhere before its history was applied there. Where two histories part, the logs do.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

from ledger.positions import BEFORE_FIRST, Epoch, Lsn, before


class EpochStart(NamedTuple):
    """An epoch, and the LSN of its first record."""

    epoch: Epoch
    first_lsn: Lsn


History = tuple[EpochStart, ...]


def rises(history: History) -> bool:
    """Whether its epochs and LSNs rise."""
    return all(a.epoch < b.epoch and a.first_lsn < b.first_lsn for a, b in pairwise(history))


def begin(history: History, epoch: Epoch, first_lsn: Lsn) -> History:
    """The history once ``epoch`` writes from ``first_lsn`` on; it replaces what was there before."""
    assert all(start.epoch < epoch for start in history)
    return (*up_to(history, Lsn(first_lsn - 1)), EpochStart(epoch, first_lsn))


def up_to(history: History, last_lsn: Lsn) -> History:
    """The history of a log that ends with ``last_lsn``."""
    return tuple(start for start in history if start.first_lsn <= last_lsn)


def since(history: History, first_lsn: Lsn) -> History:
    """The history of a log whose oldest record is ``first_lsn``."""
    ended = [earlier for earlier, later in pairwise(history) if later.first_lsn <= first_lsn]
    return history[len(ended) :]


def epoch_of(history: History, lsn: Lsn) -> Epoch | None:
    """The epoch that wrote ``lsn``; None where the history does not reach back to it."""
    for epoch, first_lsn in reversed(history):
        if first_lsn <= lsn:
            return epoch
    return None


def last_common(history: History, last_lsn: Lsn, other: History) -> Lsn:
    """The last LSN up to which a log of this ``history`` that ends with ``last_lsn`` is that of ``other``, a history
    without an end; 0 when nothing of it is.

    A history may begin late, with an epoch of which the oldest records are gone.
    """
    theirs = dict(other)
    common = [start for start in history if theirs.get(start.epoch) == start.first_lsn]
    if not common:
        return BEFORE_FIRST
    last = common[-1]
    return min(_end(history, last, last_lsn), _end(other, last, last_lsn))


def _end(history: History, start: EpochStart, last_lsn: Lsn) -> Lsn:
    """The last LSN that the epoch of ``start`` wrote, in a log that goes up to ``last_lsn``."""
    following = [later.first_lsn for later in history if later.epoch > start.epoch]
    return min([last_lsn, *map(before, following)])
