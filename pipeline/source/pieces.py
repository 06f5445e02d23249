"""Pieces of a ledger: plain values that say which rows one task reads, and where; and what a driver asks of a place.

Pieces of one tenant follow one another: each begins where the one before it ends. The first is open below and the last
above, unless bounds were asked for, so that no row falls between, whatever seq somebody gave it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from ledger.verification import ENTRY_COLUMNS, Head, StoredTree

if TYPE_CHECKING:
    import pyarrow as pa

ROWS_A_PIECE: Final = 65_536
"""Entries of one piece: those under one tile of level 1 of the Merkle tree."""
BATCH_ROWS_MAX: Final = 10_000
BATCH_BYTES_HINT: Final = 4 << 20
"""A batch is closed by the row that takes it to this many bytes."""
SEQ_MIN: Final = -(2**63)
SEQ_MAX: Final = 2**63 - 1


class Times(NamedTuple):
    """Entries of these HLC times alone, in milliseconds since 1970, both included; None is no bound."""

    from_ms: int | None = None
    to_ms: int | None = None


EVER: Final = Times()


class Facts(NamedTuple):
    """What a place says of a tenant's chain as a whole, as ``ledger.verification.ChainReader`` has it."""

    tenant_id: str
    head: Head | None
    last: Head | None
    tree: StoredTree | None


class PieceReader(Protocol):
    """Reads one piece, inside a task. Batches are not empty, and bounded in rows and bytes."""

    def entries(self, columns: Sequence[str] = ENTRY_COLUMNS) -> Iterator[pa.RecordBatch]:
        """The piece's entries by seq, in order of storage where seqs repeat.

        Where somebody altered the type of a column, its values come as that type, or as bytes of their text.
        """

    def snapshots(self) -> Iterator[pa.RecordBatch]:
        """``SNAPSHOT_COLUMNS`` by ``from_seq`` of the snapshots whose range touches the piece's.

        Those that lack a bound are read with the tenant's first piece.
        """

    def tiles(self, level: int, first: int, last: int) -> Mapping[int, bytes] | None:
        """Stored tiles ``first..last`` of a level, those there are; None when this form of a ledger stores none."""

    def jobs(self) -> Iterator[pa.RecordBatch] | None:
        """``JOB_COLUMNS`` of all stored jobs of the tenant by job id; None when this form of a ledger stores none."""


class Where(Protocol):
    """The place of a piece as a task sees it: a plain value, which tells no password."""

    def session(self) -> AbstractContextManager[Session]:
        """What pieces of this place are read through: one connection, or nothing at all."""


class Session(Protocol):
    """Reads pieces one after another."""

    def reader(self, piece: Piece) -> PieceReader:
        """A reader of ``piece``, until the next is asked for."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Entries ``from_seq..to_seq`` of a tenant, both included, None where open."""

    tenant_id: str
    from_seq: int | None
    to_seq: int | None
    rows: int
    """How many rows it has about."""
    is_first: bool
    """Whether it is the tenant's first of those read."""
    where: Where
    times: Times = EVER

    @property
    def bounds(self) -> tuple[int, int]:
        """Its lowest and highest seq as numbers."""
        return (SEQ_MIN if self.from_seq is None else self.from_seq, SEQ_MAX if self.to_seq is None else self.to_seq)


class OpenPlace(Protocol):
    """A place held in one state, on the driver."""

    def tenants(self) -> list[str]:
        """Every tenant that it holds anything of, in byte order."""

    def pieces(
        self,
        tenants: Collection[str] | None = None,
        *,
        rows_a_piece: int = ROWS_A_PIECE,
        from_seq: int | None = None,
        to_seq: int | None = None,
        times: Times = EVER,
    ) -> list[Piece]:
        """The pieces of these tenants, by default of all, tenant by tenant and by seq.

        Raises:
            TenantNotFoundError: there is nothing of a tenant that was named.
        """

    def facts(self, tenant_id: str) -> Facts:
        """What it says of a tenant's chain as a whole."""


class Place(Protocol):
    """Where a ledger is. ``str()`` of it tells no password."""

    def open(self) -> AbstractContextManager[OpenPlace]:
        """Hold it in one state for as long as the context lasts: tasks that read its pieces MUST run within."""


def cut(
    whole: Piece,
    occupied: Sequence[int],
    last_seq: int,
    rows_a_piece: int,
) -> list[Piece]:
    """``whole``, all that is asked for of a tenant, as pieces of at most ``rows_a_piece`` seqs that hold rows.

    ``occupied`` has the lowest stored seq of each stretch of that many seqs that holds any, ascending: a forged seq far
    out costs one piece, not as many as there is room before it.
    """
    if not occupied:
        return [whole]
    starts = [start_of(seq, rows_a_piece) for seq in occupied[1:]]
    ends = [start - 1 for start in starts]
    bounds = zip([whole.from_seq, *starts], [*ends, whole.to_seq], strict=True)
    rows = [min(rows_a_piece, last - seq + 1) for seq, last in zip(occupied, [*ends, last_seq], strict=True)]
    return [
        replace(whole, from_seq=start, to_seq=end, rows=rows[at], is_first=at == 0)
        for at, (start, end) in enumerate(bounds)
    ]


def start_of(seq: int, rows_a_piece: int) -> int:
    """First seq of the stretch that ``seq`` lies in. Stretches begin at 1; the first reaches down to all there is."""
    return max(seq - 1, 0) // rows_a_piece * rows_a_piece + 1
