"""What every place of a ledger is asked, on the driver and in tasks; and pieces: plain values that say which rows one
task reads, and where.

Pieces of one tenant follow one another: each begins where the one before it ends. The first is open below and the last
above, unless bounds were asked for, so that no row falls between, whatever seq somebody gave it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final, NamedTuple, Protocol

from ledger.errors import ArchiveInvalidError, TenantNotFoundError
from ledger.verification import ENTRY_COLUMNS, Head, StoredTree
from ledger.verification.range_fold import ChainBounds
from signing.keys import Keyring

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


class Sealed(NamedTuple):
    """A checkpoint that a place has of a tenant's log, and the end of the entries that it is proved to cover."""

    to_seq: int | None
    """None where it covers every entry up to its size, as the stored tree proves."""
    checkpoint: str
    consistency: Sequence[bytes]
    """The proof that the checkpoint's tree extends that of the entries up to ``to_seq``."""


class Judged(NamedTuple):
    """What a place says of a tenant's chain as a whole, judged before its rows are checked."""

    ends: ChainBounds
    told: Callable[[dict[str, Any]], dict[str, Any]]
    """The verdict object on the rows with what was judged before."""


Judgement = tuple[dict[str, Judged], dict[str, ArchiveInvalidError]]
"""By tenant what was judged, and what does not hold so that its rows say nothing."""


class PieceReader(Protocol):
    """Reads one piece, inside a task. Batches are not empty, and bounded in rows and bytes.

    What is written out here is that of copies of ledgers, which hold entries and snapshots and nothing else.
    """

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
        return None

    def followed_seq(self) -> int:
        """How far the stored jobs and commitments follow the tenant's chain; 0 where none are stored."""
        return 0

    def jobs(self) -> Iterator[pa.RecordBatch] | None:
        """``JOB_COLUMNS`` of all stored jobs of the tenant by job id; None when this form of a ledger stores none."""
        return None

    def promised(self) -> Iterator[pa.RecordBatch]:
        """``PROMISED_COLUMNS`` of the tenant's table of commitments by seq, which follows as the stored jobs do."""
        return iter(())


ReaderOf = Callable[["Piece"], PieceReader]
"""Gives the reader of a piece, good until the next is asked for."""


class Where(Protocol):
    """The place of a piece as a task sees it: a plain value, which tells no password."""

    def session(self) -> AbstractContextManager[ReaderOf]:
        """Read pieces of this place, through one connection or file where there is one."""


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
    """A place held in one state, on the driver. ``str()`` of it tells no password.

    What is written out here is that of copies of ledgers.
    """

    is_copy: ClassVar[bool] = True
    """Whether it is a copy of parts of a ledger, so that nothing follows from what it lacks: neither job states nor
    keys are stored with it."""
    file: Path | None = None
    """The one signed file that it is, None when it is none."""

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
        named = self.tenants() if tenants is None else self.existing(tenants)
        return self.pieces_of(named, rows_a_piece, from_seq, to_seq, times)

    def pieces_of(
        self, tenants: Sequence[str], rows_a_piece: int, from_seq: int | None, to_seq: int | None, times: Times
    ) -> list[Piece]:
        """As ``pieces``, of tenants that are there."""

    def existing(self, tenants: Collection[str]) -> list[str]:
        """``tenants``, each once, in byte order; raises as ``pieces``."""
        named = sorted(set(tenants))
        held = self.tenants_among(named)
        for tenant_id in named:
            if tenant_id not in held:
                raise TenantNotFoundError(f"there is no tenant {tenant_id!r} in {self}")
        return named

    def tenants_among(self, tenants: Sequence[str]) -> Collection[str]:
        """Those of ``tenants`` that it holds anything of, perhaps among others."""
        return self.tenants()

    def reader(self, piece: Piece) -> PieceReader:
        """Reads one of its pieces here, on the driver; good until the next is asked for."""

    def facts(self, tenant_id: str) -> Facts:
        """What it says of a tenant's chain as a whole."""

    def log_origin(self, tenant_id: str) -> str | None:
        """The origin of the tenant's log but for the tenant; None when it does not say."""

    def sealed(self, tenant_id: str) -> Sequence[Sealed]:
        """What it has checkpoints of, by seq, the newest last; what they are worth is not judged.

        Raises:
            ArchiveInvalidError: they cannot be read.
        """

    def named_keys(self) -> Keyring | None:
        """The keys that it names, with which no signature is good; None when it names none that counts, as who made a
        copy may have named any."""
        return None

    def judged(self, tenants: Collection[str], keyring: Keyring | None) -> Judgement:
        """What it says of these tenants' chains, judged by ``keyring``; their rows are read as ``pieces``.

        Raises:
            InvalidInputError: it is not verified so.
        """


class Place(Protocol):
    """Where a ledger is. ``str()`` of it tells no password."""

    kind: ClassVar[str]
    """The option that names such a place: one of ``pipeline.places.NAMED_BY``."""

    def open(self, keyring: Keyring | None = None) -> AbstractContextManager[OpenPlace]:
        """Hold it in one state for as long as the context lasts: tasks that read its pieces MUST run within.

        With ``keyring`` a manifest is refused before it is parsed that a key of it is named for and did not sign.
        """

    def planned(self) -> AbstractContextManager[OpenPlace]:
        """As ``open``, for a planner that ends before tasks run: these see the state of the moment. No piece reaches
        beyond the last entry that there is now."""
        return self.open()


def cut(whole: Piece, occupied: Sequence[int], last_seq: int, rows_a_piece: int) -> list[Piece]:
    """``whole``, all that is asked for of a tenant, as pieces of at most ``rows_a_piece`` seqs that hold rows.

    ``occupied`` has the lowest stored seq of each stretch of that many seqs that holds any, ascending: a forged seq far
    out costs one piece, not as many as there is room before it.
    """
    if not occupied:
        return [whole]
    # Stretches begin at 1; the first reaches down to all there is.
    starts = [max(seq - 1, 0) // rows_a_piece * rows_a_piece + 1 for seq in occupied[1:]]
    ends = [start - 1 for start in starts]
    bounds = zip([whole.from_seq, *starts], [*ends, whole.to_seq], strict=True)
    rows = [min(rows_a_piece, last - seq + 1) for seq, last in zip(occupied, [*ends, last_seq], strict=True)]
    return [
        replace(whole, from_seq=start, to_seq=end, rows=rows[at], is_first=at == 0)
        for at, (start, end) in enumerate(bounds)
    ]
