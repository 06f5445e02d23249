"""New rows of the log on their way to it, and to those who come behind the commit.

They are in pieces, of one tenant each, as COPY takes them: one object for some dozens of rows, which costs less to keep
than the values of one row by themselves. Rows that C leaves to Python are tuples, and so is what somebody reads.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple

from ledger import native
from ledger.verification import ENTRY_COLUMNS

LOG_COLUMNS = ("tenant_id", *ENTRY_COLUMNS)
"""Columns of one new row, in the order of the tuples."""

Row = tuple[Any, ...]
"""A row of ``LOG_COLUMNS``."""

_INTEGERS = ("seq", "hlc_physical", "hlc_logical", "link_version")
_FORMS = "".join("i" if name in _INTEGERS else "t" for name in LOG_COLUMNS).encode()
_HEADER = b"PGCOPY\n\xff\r\n\0" + bytes(8)
_TRAILER = b"\xff\xff"
_ROW_BYTES = 800
"""What a tuple takes beside its payload, about."""
_PIECE_BYTES = 300
"""What a piece takes beside its rows, about."""


class Piece(NamedTuple):
    """Rows of one tenant that follow one another by seq."""

    tenant_id: str
    first_seq: int
    length: int
    kept: bytes | Sequence[Row]
    """As COPY takes them, between its header and its trailer; or tuples."""

    @property
    def last_seq(self) -> int:
        """Of the last row."""
        return self.first_seq + self.length - 1

    @property
    def size_bytes(self) -> int:
        """What they take, about."""
        if isinstance(self.kept, bytes):
            return _PIECE_BYTES + len(self.kept)
        return _PIECE_BYTES + sum(_ROW_BYTES + len(row[-2]) for row in self.kept)

    def rows(self) -> Sequence[Row]:
        """The rows as tuples."""
        if not isinstance(self.kept, bytes):
            return self.kept
        rows = native.rows_in_copy(_FORMS, self.kept)
        assert rows is not None
        return rows

    def encoded(self) -> bytes | None:
        """The rows as COPY takes them; None where that is left to the driver."""
        return self.kept if isinstance(self.kept, bytes) else None


class LogRows:
    """New rows; those of one tenant in seq order."""

    def __init__(self, pieces: Iterable[Piece] = ()) -> None:
        self.pieces = list(pieces)

    def __len__(self) -> int:
        return sum(piece.length for piece in self.pieces)

    def __iter__(self) -> Iterator[Row]:
        return chain.from_iterable(piece.rows() for piece in self.pieces)

    def for_copy(self) -> bytes | None:
        """All rows in the binary form of COPY, those of a tenant behind each other: they go into one partition. None
        where that is left to the driver."""
        of_tenants: dict[str, list[bytes]] = {}
        for piece in self.pieces:
            if (encoded := piece.encoded()) is None:
                return None
            of_tenants.setdefault(piece.tenant_id, []).append(encoded)
        return b"".join((_HEADER, *chain.from_iterable(of_tenants.values()), _TRAILER))

    def sent(self) -> list[tuple[str, int, int, int]]:
        """(tenant, first seq, last seq, rows) of each tenant."""
        ends: dict[str, tuple[int, int, int]] = {}
        for piece in self.pieces:
            first_seq, _, length = ends.get(piece.tenant_id, (piece.first_seq, 0, 0))
            ends[piece.tenant_id] = first_seq, piece.last_seq, length + piece.length
        return [(tenant_id, *end) for tenant_id, end in ends.items()]


class RecentRows:
    """The newest rows that this node added to one chain, without a gap, as long as somebody has to come behind them."""

    __slots__ = ("_pieces", "size_bytes")

    def __init__(self) -> None:
        self._pieces: deque[Piece] = deque()
        self.size_bytes = 0

    def add(self, piece: Piece) -> None:
        """Keep these too; those before only if these follow on them."""
        if self._pieces and piece.first_seq != self._pieces[-1].last_seq + 1:
            self._pieces.clear()
            self.size_bytes = 0
        self._pieces.append(piece)
        self.size_bytes += piece.size_bytes

    def after(self, seq: int, limit: int) -> list[Row]:
        """Up to ``limit`` rows that come behind ``seq``; none where the first of them is not kept."""
        found: list[Row] = []
        if not self._pieces or self._pieces[0].first_seq > seq + 1:
            return found
        for piece in self._pieces:
            if len(found) == limit:
                break
            if piece.last_seq > seq:
                skipped = max(0, seq + 1 - piece.first_seq)
                found += piece.rows()[skipped : skipped + limit - len(found)]
        return found

    def forget(self, upto_seq: int) -> None:
        """Drop the pieces that end there or before; one that goes beyond stays whole."""
        while self._pieces and self._pieces[0].last_seq <= upto_seq:
            self.size_bytes -= self._pieces.popleft().size_bytes
