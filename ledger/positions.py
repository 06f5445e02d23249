"""Positions, each a type of its own so that one cannot be taken for another.

Lsn        position in one node's WAL, from 1, gapless inside an epoch
Epoch      number of a writer's term on one WAL, from 1
Seq        position in one tenant's chain, from 1, gapless
LeafIndex  position in one tenant's Merkle log, from 0

leaf_index == seq - 1
"""

from collections.abc import Iterator
from itertools import count
from typing import NewType, cast

Lsn = NewType("Lsn", int)
Epoch = NewType("Epoch", int)
Seq = NewType("Seq", int)
LeafIndex = NewType("LeafIndex", int)

BEFORE_FIRST = Lsn(0)
"""Below the first LSN: no record was written, synced or chained."""
NO_EPOCH = Epoch(0)
"""Below the first epoch: no node has written yet."""


def before(lsn: Lsn) -> Lsn:
    """The LSN that comes before."""
    return Lsn(lsn - 1)


def after(lsn: Lsn) -> Lsn:
    """The LSN that comes next."""
    return Lsn(lsn + 1)


def lsns_from(first: Lsn) -> Iterator[Lsn]:
    """``first`` and all later LSNs, without end."""
    return cast("Iterator[Lsn]", count(first))


def leaf_index_of(seq: Seq) -> LeafIndex:
    """The Merkle leaf that holds the chain link of ``seq``."""
    return LeafIndex(seq - 1)


def seq_of(leaf_index: LeafIndex) -> Seq:
    """The entry whose chain link the Merkle leaf holds."""
    return Seq(leaf_index + 1)
