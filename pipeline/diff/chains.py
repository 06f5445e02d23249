"""Whether two chains are one history: how many entries they have in common.

A link binds all entries up to its own. So two chains have the first ``n`` entries in common exactly when their entries
``n`` have one link, and the first entry in which they differ is found by halving. Links are taken as they are stored;
``pipeline.diff.events`` computes them from the rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, NamedTuple

from ledger import merkle
from ledger.merkle import HASH_BYTES
from pipeline.arrow import lists_of
from pipeline.places import OpenPlace, Piece

LINKS_AT_ONCE: Final = 10_000
"""Halving ends with so many entries: these are read at once."""


class Meeting(NamedTuple):
    """What two chains of one tenant have in common."""

    common: int
    """Both have the same entries 1..common; 0 when they begin differently or the beginning of one is not there."""
    is_one: bool
    """Whether one continues the other, or they are equal, where both have entries."""
    first_difference: int | None
    """The first seq at which different entries stand; None when there is none, or when it cannot be told."""


def chains_of(place: OpenPlace, tenants: list[str]) -> dict[str, Chain]:
    """The chains of these tenants that are in ``place``, each asked for with a few reads for many."""
    held = set(place.tenants())
    wanted = [tenant for tenant in tenants if tenant in held]
    first = {piece.tenant_id: piece for piece in place.pieces(wanted, from_seq=1, to_seq=1)}
    return {tenant: Chain(place, tenant, first.get(tenant)) for tenant in wanted}


class Chain:
    """One tenant's chain at one of the places."""

    def __init__(self, place: OpenPlace, tenant_id: str, first: Piece | None) -> None:
        """``first`` is the piece of seq 1; None when the place holds a later range."""
        self.place, self.tenant_id = place, tenant_id
        self.has_beginning, self._first_piece = first is not None, first
        self.first_seq = 1 if first is not None else min(piece.bounds[0] for piece in place.pieces([tenant_id]))
        self._last = place.facts(tenant_id).last
        self.last_seq = 0 if self._last is None else self._last.seq

    def link_at(self, seq: int) -> str | None:
        """The stored link of the entry at ``seq``, None when there is none."""
        if self._last is not None and seq == self.last_seq:
            return self._last.chain_link
        return self.links(seq, seq).get(seq)

    def links(self, from_seq: int, to_seq: int) -> dict[int, str]:
        """The stored links of the entries of a range by seq."""
        return {
            seq: link
            for seqs, links in self._stored(("seq", "chain_link"), from_seq, to_seq)
            for seq, link in zip(seqs, links, strict=True)
        }

    def leaves(self, from_seq: int, to_seq: int) -> Iterator[list[bytes]]:
        """The leaves that the entries of a range are of the tree, by seq, some at a time."""
        for (links,) in self._stored(("chain_link",), from_seq, to_seq):
            yield [_leaf(link) for link in links]

    def tile(self, level: int, index: int) -> bytes:
        """A stored tile, as ``ledger.merkle.tiles.GetTile``; nothing of one that is not stored."""
        assert self._first_piece is not None, "a place that stores tiles has the beginning of its chains"
        return (self.place.reader(self._first_piece).tiles(level, index, index) or {}).get(index, b"")

    def _stored(self, columns: tuple[str, ...], from_seq: int, to_seq: int) -> Iterator[list[list[Any]]]:
        for piece in self.place.pieces([self.tenant_id], from_seq=from_seq, to_seq=to_seq):
            for batch in self.place.reader(piece).entries(columns):
                yield lists_of(batch)


def _leaf(link: object) -> bytes:
    try:
        return merkle.leaf_hash(bytes.fromhex(str(link)))
    except ValueError:
        return bytes(HASH_BYTES)


def meet(chain: Chain, other: Chain) -> Meeting:
    """What the two chains have in common, as their stored links say."""
    last = overlap(chain, other)
    if last is None:
        return Meeting(0, min(chain.last_seq, other.last_seq) == 0, None)
    is_one = chain.link_at(last) == other.link_at(last)
    if not (chain.has_beginning and other.has_beginning):
        # Of a later range nothing but its links says what was before.
        return Meeting(0, is_one, None)
    return parting(last, None if is_one else _first_difference(chain, other, last))


def overlap(chain: Chain, other: Chain) -> int | None:
    """The last seq of which both have the entry; None when there is none."""
    last = min(chain.last_seq, other.last_seq)
    return last if last >= max(chain.first_seq, other.first_seq) else None


def parting(last_seq: int, first_difference: int | None) -> Meeting:
    """The meeting of two chains that have the same entries up to ``last_seq``, or up to where they differ."""
    if first_difference is None:
        return Meeting(last_seq, True, None)
    return Meeting(first_difference - 1, False, first_difference)


def _first_difference(chain: Chain, other: Chain, last: int) -> int:
    """The first seq at which the links differ, as those at ``last`` do."""
    if chain.link_at(1) != other.link_at(1):
        return 1
    low, high = 1, last
    while high - low > LINKS_AT_ONCE:
        middle = (low + high) // 2
        low, high = (middle, high) if chain.link_at(middle) == other.link_at(middle) else (low, middle)
    ours, theirs = chain.links(low + 1, high), other.links(low + 1, high)
    return next((seq for seq in range(low + 1, high) if ours.get(seq) != theirs.get(seq)), high)


def forked_log(a: Chain, b: Chain, meeting: Meeting) -> str | None:
    """The origin of the log that both are of, when they part before the end of the shorter; None when they do not.

    Two chains of one log that part are two histories of it, and no import mends that: it takes events of other logs,
    and refuses as a forgery what claims to be born in its own and is not there.
    """
    if meeting.is_one or overlap(a, b) is None:
        return None
    log, other = (chain.place.log_origin(chain.tenant_id) for chain in (a, b))
    return log if log == other else None
