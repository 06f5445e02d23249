"""Where incoming entries say that they were born: in a log of this ledger only what stands in it there.

An entry takes along where it was chained first, and whoever signs a bundle may write there what he likes. What is said
of other ledgers cannot be looked up here. What is said of this one can.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import orjson

from app.store.existing import ChainedEntry
from ledger.bundle.merge import Incoming, event_of, held_by
from ledger.errors import BundleInvalidError

Born = Mapping[int, Sequence[Incoming]]
"""Entries that say they were born in one log, by their seq there."""


def born_in(log: str, entries: Sequence[Incoming]) -> Born:
    """The entries that say they were born in ``log``, by their seq there."""
    born: dict[int, list[Incoming]] = {}
    for entry in entries:
        if entry.key.log == log:
            born.setdefault(entry.key.seq, []).append(entry)
    return born


def check_births(born: Born, chained: Mapping[int, ChainedEntry]) -> None:
    """Refuse entries that are not the ones that stand where they say they were born; where none stands, what is said
    can be true of a chain that was longer once.

    Raises:
        BundleInvalidError: names the first.
    """
    for seq in born.keys() & chained.keys():
        stands = chained[seq]
        for entry in born[seq]:
            link = entry.chain_link if entry.origin is None else orjson.loads(entry.origin)["chain_link"]
            if link != stands.chain_link or stands.event not in (event_of(entry), held_by(entry)):
                raise BundleInvalidError(
                    f"the entry with HLC {entry.t_hlc} says that it was chained first as seq {seq} of {entry.key.log}, "
                    "a log of this ledger, and another entry stands there"
                )
