"""Compares chains by their links, and sets of events by a join of their ids.

A link binds all entries up to its own. So two chains share their first ``n`` entries exactly if their links at ``n``
are equal, and a binary search finds the first difference. Links are read as stored, or computed from the rows.

An event has the same id wherever it is chained: its physical and logical time, then the first 40 hex digits of
SHA-256 over its HLC, job, action and payload digest in canonical JSON. The HLC of a CONFLICT entry contains these
digits (``ledger.chain.conflict``), so the id of its event is known without reading its payload.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Iterator, Mapping, Sequence
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import pyarrow as pa

from ledger import canonical, merkle
from ledger.chain import Linker, link_v1
from ledger.chain.conflict import NODE_DIGITS, NODE_PREFIX, Event
from ledger.errors import LedgerError
from ledger.facts.events import SystemAction
from ledger.hlc import LOGICAL_MAX, PHYSICAL_MS_MAX, Hlc
from ledger.machines.retention import Floor
from ledger.merkle import HASH_BYTES
from pipeline.arrow import batch_of, ddl_of, lists_of, rows_of
from pipeline.places import OpenPlace, Piece, PieceReader
from pipeline.places.protocol import ChainName
from pipeline.source import over_pieces

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

COLUMNS: Final = ("seq", "t_hlc", "hlc_physical", "hlc_logical", "hlc_node", "job_id", "action", "payload_digest")

_EVENTS: Final = pa.schema(
    [("tenant_id", pa.string()), ("id", pa.binary()), ("seq", pa.int64()), ("t_hlc", pa.string())]
)
EVENTS_SCHEMA: Final = ddl_of(_EVENTS)

_TIME: Final = struct.Struct(">QQ")
_DIGITS: Final = frozenset("0123456789abcdef")


def event_id(row: Sequence[Any]) -> bytes:
    """The id of the event in a row of ``COLUMNS``, the same wherever it is chained.

    A malformed row has a unique id, so that it shows up as a difference.
    """
    _seq, t_hlc, physical, logical, node, job_id, action, digest = row
    is_time = (
        type(physical) is type(logical) is int and 0 <= physical <= PHYSICAL_MS_MAX and 0 <= logical <= LOGICAL_MAX
    )
    time = _TIME.pack(physical, logical) if is_time else _TIME.pack(0, 0)
    held = _held(node) if action == SystemAction.CONFLICT else None
    if held is not None:
        return time + held
    event = Event(t_hlc, job_id, action, digest)
    try:
        text = canonical.encode(list(event))
    except LedgerError:
        text = repr(event).encode()
    return time + sha256(text).digest()[: NODE_DIGITS // 2]


def events(spark: SparkSession, pieces: Sequence[Piece], *, by_rows: bool = False) -> DataFrame:
    """The events in ``pieces`` as ``EVENTS_SCHEMA``; with ``by_rows`` digests are computed from the payloads."""
    columns = (*COLUMNS[:-1], "payload") if by_rows else COLUMNS

    def read(piece: Piece, reader: PieceReader) -> Iterator[pa.RecordBatch]:
        for batch in reader.entries(columns):
            listed = lists_of(batch)
            if by_rows:
                listed[-1] = [sha256(str(payload).encode()).hexdigest() for payload in listed[-1]]
            rows = [(piece.chain, event_id(row), row[0], row[1]) for row in zip(*listed, strict=True)]
            yield batch_of(rows, _EVENTS)

    return over_pieces(spark, pieces, read, EVENTS_SCHEMA)


def differences(of_a: DataFrame, of_b: DataFrame) -> DataFrame:
    """Every event of one set alone, as ``EVENTS_SCHEMA`` plus its ``side``, ``a`` or ``b``."""
    from pyspark.sql import functions

    return (
        of_a.alias("a")
        .join(of_b.alias("b"), ["tenant_id", "id"], "full_outer")
        .select(
            *("tenant_id", "id"),
            *(functions.coalesce(f"a.{name}", f"b.{name}").alias(name) for name in ("seq", "t_hlc")),
            functions.expr("CASE WHEN b.seq IS NULL THEN 'a' WHEN a.seq IS NULL THEN 'b' END").alias("side"),
        )
        .where("side IS NOT NULL")
    )


def without_left(found: DataFrame, left_to: Mapping[tuple[str, str], str]) -> DataFrame:
    """``found`` without events of a time that has left the other side with a prune. ``left_to`` has, by chain and the
    side that has the events, the highest HLC of what left the other."""
    from pyspark.sql import functions

    for (name, side), hlc in left_to.items():
        at = Hlc.parse(hlc)
        time = functions.lit(_TIME.pack(at.physical_ms, at.logical))
        is_old = functions.substring(found.id, 1, _TIME.size) <= time
        found = found.where(~((found.tenant_id == name) & (found.side == side) & is_old))
    return found


def conflicts(found: DataFrame) -> DataFrame:
    """The events of ``differences`` that claim one HLC, one on each side: ``tenant_id, hlc, seq_a, seq_b``."""
    a, b = (
        found.where(found.side == name).select("tenant_id", found.t_hlc.alias("hlc"), found.seq.alias(f"seq_{name}"))
        for name in ("a", "b")
    )
    return a.join(b, ["tenant_id", "hlc"])


def _held(node: Any) -> bytes | None:
    """The id digits of the event in a CONFLICT entry with this HLC node."""
    digits = node.removeprefix(NODE_PREFIX) if isinstance(node, str) and node.startswith(NODE_PREFIX) else ""
    return bytes.fromhex(digits) if len(digits) == NODE_DIGITS and _DIGITS.issuperset(digits) else None


# --- links computed from rows ---------------------------------------------------------------------


LINK_COLUMNS: Final = (
    *("seq", "t_hlc", "job_id", "action", "link_version", "prev_chain_link", "payload", "origin"),
    *("hlc_physical", "hlc_logical", "hlc_node"),
)
"""Columns from which a link is computed."""
NO_LINK: Final = b""
"""Link of a row too malformed for one."""
_LINKS: Final = pa.schema([("tenant_id", pa.string()), ("seq", pa.int64()), ("link", pa.binary())])


def first_differences(spark: SparkSession, a: OpenPlace, b: OpenPlace, last_seqs: Mapping[str, int]) -> dict[str, int]:
    """By tenant, the first seq up to ``last_seqs`` at which links differ or one side has no row. Tenants without
    such a seq are left out."""
    of_a, of_b = (
        over_pieces(
            spark,
            [piece for name, last in last_seqs.items() for piece in place.pieces([name], from_seq=1, to_seq=last)],
            computed_links,
            ddl_of(_LINKS),
        )
        for place in (a, b)
    )
    both = of_a.alias("a").join(of_b.alias("b"), ["tenant_id", "seq"], "full_outer")
    return dict(both.where("NOT (a.link <=> b.link)").groupBy("tenant_id").agg({"seq": "min"}).collect())


def computed_links(piece: Piece, reader: PieceReader) -> Iterator[pa.RecordBatch]:
    """(tenant, seq, link) of each row of a piece."""
    linker = Linker(piece.tenant_id)
    return (
        batch_of([(piece.chain, row[0], _link_of(linker, row)) for row in rows_of(batch)], _LINKS)
        for batch in reader.entries(LINK_COLUMNS)
    )


def _link_of(linker: Linker, row: Sequence[Any]) -> bytes:
    seq, t_hlc, job_id, action, version, prev, payload, origin, physical, logical, node = row
    try:
        if t_hlc != f"{physical}:{logical}:{node}":
            return NO_LINK
        digest = sha256(payload.encode())
        if version == 1:
            return link_v1(t_hlc, job_id, action, prev, digest.hexdigest())
        before, source = b"" if prev is None else bytes.fromhex(prev), b"" if origin is None else origin.encode()
        return linker.link(seq, t_hlc, job_id, action, before, digest.digest(), source)
    except (AttributeError, TypeError, ValueError, LedgerError):
        return NO_LINK


# --- chains ---------------------------------------------------------------------------------------


LINKS_AT_ONCE: Final = 10_000
"""The binary search ends at this many entries, which are read in one statement."""


class Meeting(NamedTuple):
    """The common part of two chains of one tenant."""

    common: int
    """Both have the same entries 1..common; 0 if their first entries differ or one lacks its beginning."""
    is_one: bool
    """Whether one continues the other or they are equal, in the range that both have."""
    first_difference: int | None
    """The first seq at which entries differ; None if there is none, or if it cannot be determined."""


def chains_of(place: OpenPlace, tenants: Collection[str]) -> dict[str, Chain]:
    """The chains of these tenants in ``place``; a few reads fetch many."""
    chains, named = dict[str, Chain](), set(tenants)
    for ledger, each in place.ledgers().items():
        wanted = [tenant for tenant in each.tenants() if str(ChainName(ledger, tenant)) in named]
        floors = each.floors(wanted)
        first = {piece.tenant_id: piece for piece in each.pieces(wanted, from_seq=1, to_seq=1)}
        chains |= {
            str(ChainName(ledger, tenant)): Chain(each, tenant, first.get(tenant), floors.get(tenant))
            for tenant in wanted
        }
    return chains


class Chain:
    """One tenant's chain at one of the places."""

    def __init__(self, place: OpenPlace, tenant_id: str, first: Piece | None, floor: Floor | None = None) -> None:
        """``first`` is the piece of seq 1; None if the place holds a later range. ``floor`` is what left with a
        prune."""
        self.place, self.tenant_id, self.floor = place, tenant_id, floor
        self._first_piece = first
        self.has_beginning = first is not None and floor is None
        if floor is not None:
            self.first_seq = floor.to_seq + 1
        else:
            self.first_seq = 1 if first is not None else min(piece.bounds[0] for piece in place.pieces([tenant_id]))
        self._last = place.facts(tenant_id).last
        self.last_seq = 0 if self._last is None else self._last.seq

    def link_at(self, seq: int) -> str | None:
        """The stored link of the entry at ``seq``; None if there is none."""
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
        """The tree leaves of the entries of a range by seq, in batches."""
        return ([_leaf(link) for link in links] for (links,) in self._stored(("chain_link",), from_seq, to_seq))

    def tile(self, level: int, index: int) -> bytes:
        """A stored tile, as ``ledger.merkle.tiles.GetTile``; empty if it is not stored."""
        assert self._first_piece is not None, "a place that stores tiles has the beginning of its chains"
        return (self.place.reader(self._first_piece).tiles(level, index, index) or {}).get(index, b"")

    def _stored(self, columns: tuple[str, ...], from_seq: int, to_seq: int) -> Iterator[list[list[Any]]]:
        return (
            lists_of(batch)
            for piece in self.place.pieces([self.tenant_id], from_seq=from_seq, to_seq=to_seq)
            for batch in self.place.reader(piece).entries(columns)
        )


def _leaf(link: object) -> bytes:
    try:
        return merkle.leaf_hash(bytes.fromhex(str(link)))
    except ValueError:
        return bytes(HASH_BYTES)


def meet(chain: Chain, other: Chain) -> Meeting:
    """The common part of the two chains by their stored links."""
    if (last := overlap(chain, other)) is None:
        return Meeting(0, min(chain.last_seq, other.last_seq) == 0, None)
    is_one = chain.link_at(last) == other.link_at(last)
    if not (chain.has_beginning and other.has_beginning):
        # In a later range only the links bind the earlier entries.
        return Meeting(0, is_one, None)
    return parting(last, None if is_one else _first_difference(chain, other, last))


def overlap(chain: Chain, other: Chain) -> int | None:
    """The last seq that both chains have; None if there is none."""
    last = min(chain.last_seq, other.last_seq)
    return last if last >= max(chain.first_seq, other.first_seq) else None


def parting(last_seq: int, first_difference: int | None) -> Meeting:
    """The meeting of two chains with equal entries up to ``last_seq``, or up to their first difference."""
    if first_difference is None:
        return Meeting(last_seq, True, None)
    return Meeting(first_difference - 1, False, first_difference)


def _first_difference(chain: Chain, other: Chain, last: int) -> int:
    """The first seq at which the links differ; the links at ``last`` do."""
    if chain.link_at(1) != other.link_at(1):
        return 1
    low, high = 1, last
    while high - low > LINKS_AT_ONCE:
        middle = (low + high) // 2
        low, high = (middle, high) if chain.link_at(middle) == other.link_at(middle) else (low, middle)
    ours, theirs = chain.links(low + 1, high), other.links(low + 1, high)
    return next((seq for seq in range(low + 1, high) if ours.get(seq) != theirs.get(seq)), high)


def forked_log(a: Chain, b: Chain, meeting: Meeting) -> str | None:
    """The origin of the log of both chains if they fork before the end of the shorter one; else None.

    A forked log has two histories, which no import can repair. An import takes events of other logs, and rejects as
    a forgery an event that claims its own log as origin and is not in it.
    """
    if meeting.is_one or overlap(a, b) is None:
        return None
    log, other = (chain.place.log_origin(chain.tenant_id) for chain in (a, b))
    return log if log == other else None
