"""Whether two chains are one history, from what is stored of their trees: how many entries they have in common.

A chain's link, and the root of its tree, bind all entries up to a seq. So two chains have the first ``n`` entries in
common exactly when their trees of ``n`` leaves have one root, or their entries ``n`` one link. Where they have not, the
first entry in which they differ is found by going down both trees. Tiles are read where they are stored; where they are
not, tasks make them of rows (``pipeline.diff.blocks``), unless the very first entries differ: then these are two logs.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Final, NamedTuple, Self

from ledger.errors import ProofError
from ledger.merkle import tiles
from ledger.verification import StoredTree
from pipeline.diff.blocks import STORED_LINK, WHOLE_ROW, RowTiles, row_tiles
from pipeline.places import OpenPlace, Piece, PieceReader

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from pipeline.places.protocol import ReaderOf, Where

NO_TREE: Final = StoredTree(0, "")


class Meeting(NamedTuple):
    """What two chains of one tenant have in common."""

    common: int
    """Both have the same entries 1..common; 0 when they begin differently or the beginning of one is not there."""
    is_one: bool
    """Whether one continues the other, or they are equal, where both have entries."""
    first_difference: int | None
    """The first seq at which different entries stand; None when there is none, or when it cannot be told."""


class Side:
    """One of the two places, with one session for what the driver reads of it. Use as a context."""

    def __init__(self, spark: SparkSession, place: OpenPlace, *, by_rows: bool) -> None:
        """With ``by_rows`` stored trees are not asked: every link is computed from its row, and so the tree."""
        self.spark = spark
        self.place = place
        self.by_rows = by_rows
        self._stack = ExitStack()
        self._where: Where | None = None
        self._session: ReaderOf | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def reader(self, piece: Piece) -> PieceReader:
        """A reader of ``piece``, until the next is asked for."""
        if self._session is None or piece.where != self._where:
            self._stack.close()
            self._where, self._session = piece.where, self._stack.enter_context(piece.where.session())
        return self._session(piece)

    def chains(self, tenants: list[str]) -> dict[str, Chain]:
        """The chains of these tenants that are here, each asked for with a few reads for many."""
        held = set(self.place.tenants())
        wanted = [tenant for tenant in tenants if tenant in held]
        first = {piece.tenant_id: piece for piece in self.place.pieces(wanted, from_seq=1, to_seq=1)}
        return {tenant: Chain(self, tenant, first.get(tenant)) for tenant in wanted}


class Chain:
    """One tenant's chain at one of the places."""

    def __init__(self, side: Side, tenant_id: str, first: Piece | None) -> None:
        """``first`` is the piece of seq 1; None when the place holds a later range."""
        facts = side.place.facts(tenant_id)
        self.side = side
        self.tenant_id = tenant_id
        self.last_seq = 0 if facts.last is None else facts.last.seq
        self.last_hlc = None if facts.last is None else facts.last.hlc
        self.has_beginning = first is not None
        self.first_seq = 1
        self.tree = facts.tree or NO_TREE
        self._last_link = None if facts.last is None else facts.last.chain_link
        self._piece = first
        self._tiles: dict[tiles.TileCoordinates, bytes] = {}
        self._row_tiles: RowTiles | None = None
        # Where no tree is stored yet there are no tiles either.
        self._stores_tiles: bool | None = None if self.tree.size else False
        if first is None:
            self.first_seq = min(piece.bounds[0] for piece in side.place.pieces([tenant_id]))

    @property
    def entry_count(self) -> int:
        """Entries from the first to the last seq."""
        return self.last_seq - self.first_seq + 1 if self.last_seq else 0

    def link_at(self, seq: int) -> str | None:
        """The stored link of the entry at ``seq``, None when there is none."""
        return self._last_link if seq == self.last_seq else self._value_at(seq, "chain_link")

    def hlc_at(self, seq: int) -> str | None:
        """The stored HLC of the entry at ``seq``, None when there is none."""
        return self.last_hlc if seq == self.last_seq else self._value_at(seq, "t_hlc")

    def root_at(self, size: int) -> str:
        """Root, hex, of the tree over the first ``size`` entries.

        Raises:
            ProofError: stored tiles are missing.
        """
        if size == self.tree.size and not self.side.by_rows:
            return self.tree.root
        return tiles.root_at(size, self.tile).hex()

    def tile(self, level: int, index: int) -> bytes:
        """A tile, as stored or made of rows."""
        found = self._tiles.get((level, index))
        if found is None:
            found = self._tiles[level, index] = self._stored_tile(level, index)
        return found

    def compared_size(self, other: Chain) -> int:
        """The largest size at which both trees are known."""
        sizes = [each.last_seq if each.side.by_rows else each.tree.size or each.last_seq for each in (self, other)]
        return min(sizes)

    def _value_at(self, seq: int, column: str) -> str | None:
        for piece in self.side.place.pieces([self.tenant_id], from_seq=seq, to_seq=seq):
            for batch in self.side.reader(piece).entries((column,)):
                value: str | None = batch.column(0)[0].as_py()
                return value
        return None

    def _stored_tile(self, level: int, index: int) -> bytes:
        if self._stores_tiles is not False and not self.side.by_rows and self._piece is not None:
            found = self.side.reader(self._piece).tiles(level, index, index)
            self._stores_tiles = found is not None
            if found is not None:
                return found.get(index, b"")
        if self._row_tiles is None:
            columns = WHOLE_ROW if self.side.by_rows else STORED_LINK
            size = self.last_seq if self.side.by_rows else self.tree.size or self.last_seq
            self._row_tiles = row_tiles(self.side.spark, self.side.place, self.tenant_id, size, columns)
        return self._row_tiles.tile(level, index)


def meet(chain: Chain, other: Chain) -> Meeting:
    """What the two chains have in common.

    Raises:
        ProofError: the stored tree of one lacks tiles.
    """
    last = min(chain.last_seq, other.last_seq)
    if last < max(chain.first_seq, other.first_seq):
        return Meeting(0, last == 0, None)
    by_rows = chain.side.by_rows
    is_whole = chain.has_beginning and other.has_beginning
    if not is_whole:
        # Of a later range nothing but its links, and the root at its end, says what was before.
        return Meeting(0, chain.link_at(last) == other.link_at(last), None)
    size = chain.compared_size(other)
    is_said = not by_rows and chain.tree.size == other.tree.size == size
    if not (is_said and chain.tree.root == other.tree.root) and not by_rows and chain.link_at(1) != other.link_at(1):
        return Meeting(0, False, 1)
    try:
        differs = _differing_leaf(chain, other, size)
    except ProofError as error:
        raise ProofError(f"tenant {chain.tenant_id}: {error}") from error
    if differs is not None:
        return Meeting(differs, False, differs + 1)
    if size == last or chain.link_at(last) == other.link_at(last):
        return Meeting(last, True, None)
    common = _last_common(chain, other, size, last)
    return Meeting(common, False, common + 1)


def _differing_leaf(chain: Chain, other: Chain, size: int) -> int | None:
    if chain.root_at(size) == other.root_at(size):
        return None
    return tiles.first_difference(size, chain.tile, other.tile)


def _last_common(chain: Chain, other: Chain, low: int, high: int) -> int:
    """The last seq in ``low..high - 1`` with one link, where both have one at ``low`` and not at ``high``."""
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if chain.link_at(middle) == other.link_at(middle) else (low, middle)
    return low


def forked_log(a: Chain, b: Chain, meeting: Meeting) -> str | None:
    """The origin of the log that both are of, when they part before the end of the shorter; None when they do not.

    Two chains of one log that part are two histories of it, and no import mends that: it takes events of other logs,
    and refuses as a forgery what claims to be born in its own and is not there.
    """
    if meeting.is_one or min(a.last_seq, b.last_seq) < max(a.first_seq, b.first_seq):
        return None
    log, other = (chain.side.place.log_origin(chain.tenant_id) for chain in (a, b))
    return log if log == other else None
