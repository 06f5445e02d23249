"""The protocol of places of a ledger, on the driver and in tasks; and pieces: plain values that name the rows one
task reads, and their place.

Pieces of one tenant are contiguous. The first is open below and the last above, unless bounds were requested, so
that every row is in a piece, even one with a forged seq.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final, NamedTuple, Protocol

from ledger.errors import ArchiveInvalidError, TenantNotFoundError
from ledger.machines.exclusions import COUNT_ALL, Exclusions
from ledger.machines.retention import Floor
from ledger.verification import ENTRY_COLUMNS, Head, StoredTree
from ledger.verification.left_index import IndexSource
from ledger.verification.range_fold import ChainBounds
from ledger.verification.verdict import Anchor
from signing.anchors import ExternalWitnesses
from signing.keys import Keyring

if TYPE_CHECKING:
    import pyarrow as pa

    from pipeline.archive import SealedManifest

ROWS_A_PIECE: Final = 65_536
"""Entries of one piece: those under one tile of level 1 of the Merkle tree."""
BATCH_ROWS_MAX: Final = 10_000
BATCH_BYTES_HINT: Final = 4 << 20
"""A batch ends with the row that reaches this many bytes."""
CHAIN_SEPARATOR: Final = "\0"
"""Between ledger and tenant in the name of a chain. No text of PostgreSQL and no name of a file contains it."""
SEQ_MIN: Final = -(2**63)
SEQ_MAX: Final = 2**63 - 1


class Times(NamedTuple):
    """Bounds of HLC times, in milliseconds since 1970, both included; None is no bound."""

    from_ms: int | None = None
    to_ms: int | None = None


EVER: Final = Times()


class ChainName(NamedTuple):
    """A tenant's chain among those of all ledgers that are read together."""

    ledger: str | None
    """None if one ledger is read."""
    tenant_id: str

    @classmethod
    def parse(cls, text: str) -> ChainName:
        """The name in the text that ``str`` makes of it."""
        ledger, separator, tenant_id = text.partition(CHAIN_SEPARATOR)
        return cls(ledger, tenant_id) if separator else cls(None, text)

    @classmethod
    def of(cls, verdict: Mapping[str, Any]) -> ChainName:
        """The chain that a verdict, or a row of one, is about."""
        return cls(verdict.get("ledger"), verdict["tenant_id"] or "")

    def __str__(self) -> str:
        return self.tenant_id if self.ledger is None else f"{self.ledger}{CHAIN_SEPARATOR}{self.tenant_id}"

    @property
    def shown(self) -> str:
        """The name in messages and tables."""
        return self.tenant_id if self.ledger is None else f"{self.ledger}/{self.tenant_id}"

    def named(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """``row``, which is about this chain, with the ledger's name if there is one."""
        return {**row} if self.ledger is None else {"ledger": self.ledger, **row}


class Facts(NamedTuple):
    """A place's record of a tenant's chain as a whole, as in ``ledger.verification.ChainReader``."""

    tenant_id: str
    head: Head | None
    last: Head | None
    tree: StoredTree | None


class Sealed(NamedTuple):
    """A stored checkpoint of a tenant's log, and the end of the entries that it provably covers."""

    to_seq: int | None
    """None if it covers every entry up to its size, as the stored tree proves."""
    checkpoint: str
    consistency: Sequence[bytes]
    """The proof that the checkpoint's tree extends that of the entries up to ``to_seq``."""


class Judged(NamedTuple):
    """Checks of a tenant's chain as a whole, made before its rows are checked."""

    ends: ChainBounds
    told: Callable[[dict[str, Any]], dict[str, Any]]
    """Adds these checks to the verdict object on the rows."""


Judgement = tuple[dict[str, Judged], dict[str, ArchiveInvalidError]]
"""By tenant the checked chains, and the errors of tenants whose rows cannot be trusted."""


class PieceReader(Protocol):
    """Reads one piece, inside a task. Batches are not empty, and bounded in rows and bytes.

    The default methods are those of copies of ledgers, which hold only entries and snapshots.
    """

    def entries(self, columns: Sequence[str] = ENTRY_COLUMNS) -> Iterator[pa.RecordBatch]:
        """The piece's entries by seq, then by storage order if seqs repeat.

        Values of a column with an altered type have that type, or are bytes of their text.
        """

    def snapshots(self) -> Iterator[pa.RecordBatch]:
        """``SNAPSHOT_COLUMNS`` by ``from_seq`` of the snapshots that overlap the piece.

        Snapshots that lack a bound are read with the tenant's first piece.
        """

    def tiles(self, level: int, first: int, last: int) -> Mapping[int, bytes] | None:
        """The existing tiles ``first..last`` of a level; None if this form of a ledger stores no tiles."""
        return None

    def followed_seq(self) -> int:
        """The last seq that the stored commitments cover; 0 if none are stored."""
        return 0

    def jobs(self) -> Iterator[pa.RecordBatch] | None:
        """``JOB_COLUMNS`` of all stored jobs of the tenant by job id; None if this form of a ledger stores none."""
        return None

    def jobs_seq(self) -> int:
        """The last seq that the stored jobs cover; 0 if they may have been written with other exclusions."""
        return self.followed_seq()

    def exclusions(self) -> Exclusions:
        """What is excluded from the fold with which the stored jobs are compared."""
        return COUNT_ALL

    def promised(self) -> Iterator[pa.RecordBatch]:
        """``PROMISED_COLUMNS`` of the tenant's table of commitments by seq."""
        return iter(())

    def floor(self) -> Floor | None:
        """Where the tenant's chain begins in the state that is read, if entries left it; unjudged."""
        return None


ReaderOf = Callable[["Piece"], PieceReader]
"""Returns the reader of a piece, valid until the next call."""


class Where(Protocol):
    """The place of a piece for a task: a plain value that shows no password."""

    def session(self) -> AbstractContextManager[ReaderOf]:
        """A session that reads pieces of this place, through one connection or file if it has one."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Entries ``from_seq..to_seq`` of a tenant, both included, None where open."""

    tenant_id: str
    from_seq: int | None
    to_seq: int | None
    rows: int
    """Approximate number of rows."""
    is_first: bool
    """Whether it is the first piece read of the tenant."""
    where: Where
    times: Times = EVER
    ledger: str | None = None
    """The name of its ledger; None if one ledger is read."""

    @property
    def chain(self) -> str:
        """The name of its chain, as text."""
        return str(ChainName(self.ledger, self.tenant_id))

    @property
    def bounds(self) -> tuple[int, int]:
        """Its lowest and highest seq; open bounds become numbers."""
        return (SEQ_MIN if self.from_seq is None else self.from_seq, SEQ_MAX if self.to_seq is None else self.to_seq)


class OpenPlace(Protocol):
    """A place held in one state, on the driver. Its ``str()`` contains no password.

    The default methods are those of copies of ledgers.
    """

    is_copy: bool = True
    """Whether it is a copy of parts of a ledger, without job states and keys; nothing follows from data that it
    lacks."""
    file: Path | None = None
    """The one signed file of the place; None if it is no single file."""

    def tenants(self) -> list[str]:
        """Every tenant with data here, in byte order. With several ledgers, the names of their chains."""

    def ledgers(self) -> Mapping[str | None, OpenPlace]:
        """The ledgers read together, by name; one without a name if it is read alone."""
        return {None: self}

    def chains_of(self, tenants: Collection[str]) -> list[str]:
        """The chains of ``tenants`` here, in every ledger; a tenant without data has none."""
        return [chain for chain in self.tenants() if ChainName.parse(chain).tenant_id in tenants]

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
            TenantNotFoundError: a named tenant has no data here.
        """
        return self.pieces_of(
            self.tenants() if tenants is None else self.existing(tenants), rows_a_piece, from_seq, to_seq, times
        )

    def pieces_of(
        self, tenants: Sequence[str], rows_a_piece: int, from_seq: int | None, to_seq: int | None, times: Times
    ) -> list[Piece]:
        """As ``pieces``, for existing tenants."""

    def existing(self, tenants: Collection[str]) -> list[str]:
        """``tenants``, each once, in byte order; raises as ``pieces``."""
        named = sorted(set(tenants))
        for tenant_id in sorted(set(named) - set(self.tenants_among(named))):
            raise TenantNotFoundError(f"there is no tenant {tenant_id!r} in {self}")
        return named

    def tenants_among(self, tenants: Sequence[str]) -> Collection[str]:
        """The tenants of ``tenants`` with data here, and possibly other tenants."""
        return self.tenants()

    def left_pieces(self, tenants: Collection[str], rows_a_piece: int = ROWS_A_PIECE) -> list[Piece]:
        """The pieces of entries that left with a prune and are still stored, while they are removed. No other pieces
        have them."""
        return []

    def floors(self, tenants: Collection[str]) -> Mapping[str, Floor]:
        """What left these chains with a prune; chains of which nothing did are left out."""
        return {}

    def begun(
        self, ends: Mapping[str, ChainBounds], keyring: Keyring | None, archived: Mapping[str, IndexSource]
    ) -> dict[str, ChainBounds]:
        """``ends`` of chains, each from its first entry that has not left, as entries say whose statements ``keyring``
        judges. ``archived`` have what left some of them."""
        return dict(ends)

    def reader(self, piece: Piece) -> PieceReader:
        """The reader of a piece on the driver, valid until the next call."""

    def facts(self, tenant_id: str) -> Facts:
        """The place's record of a tenant's chain as a whole."""

    def log_origin(self, tenant_id: str) -> str | None:
        """The origin of the tenant's log without the tenant; None if the place does not have it."""

    def sealed(self, tenant_id: str) -> Sequence[Sealed]:
        """Its checkpoints by seq, the newest last; signatures are not verified.

        Raises:
            ArchiveInvalidError: they cannot be read.
        """

    def cosigned(self, tenant_id: str, keyring: Keyring | None, external: ExternalWitnesses) -> tuple[Anchor, ...]:
        """The newest cosignature of each of these witnesses on its checkpoints, judged; none that counts without
        keys."""
        return ()

    def manifests(self, tenant_id: str) -> Sequence[SealedManifest]:
        """The manifests of an archived tenant by seq; their signatures may be unverified. Other places have none.

        Raises:
            ArchiveInvalidError: they cannot be read.
        """
        return ()

    def named_keys(self) -> Keyring | None:
        """The keys that it names, by which no signature is valid. None for a copy, whose maker may have named any
        keys."""
        return None

    def tables(self, keyring: Keyring | None, broken: Collection[str]) -> list[dict[str, Any]]:
        """The verdicts on its tables for query engines, as ``verify_table_of`` makes them; none without such tables.
        The verdicts on the chains ``broken`` found what the archive has of them broken.

        Raises:
            ArchiveUnavailableError: one cannot be read.
        """
        return []

    def judged(self, tenants: Collection[str], keyring: Keyring | None) -> Judgement:
        """Check its records of these tenants' chains by ``keyring``; their rows are read as ``pieces``.

        Raises:
            InvalidInputError: this kind of place is verified in another way.
        """


class Place(Protocol):
    """The place of a ledger. Its ``str()`` contains no password."""

    kind: ClassVar[str]
    """The option that names such a place: one of ``pipeline.places.NAMED_BY``."""

    def open(self, keyring: Keyring | None = None, *, is_plan: bool = False) -> AbstractContextManager[OpenPlace]:
        """Hold it in one state while the context lasts. Tasks that read its pieces MUST run within.

        With ``keyring``, a manifest that names one of its keys without a valid signature is rejected before parsing.
        With ``is_plan`` the context ends before tasks run, and they read the current state: no piece reaches beyond
        the last entry at planning.
        """


def cut(whole: Piece, occupied: Sequence[int], last_seq: int, rows_a_piece: int) -> list[Piece]:
    """``whole``, the requested range of a tenant, as pieces of at most ``rows_a_piece`` seqs that hold rows.

    ``occupied`` has the lowest stored seq of each non-empty stretch of that many seqs, ascending. So a far-out
    forged seq costs one piece, not one for each empty stretch before it.
    """
    if not occupied:
        return [whole]
    # Stretches start at 1; the first piece includes all lower seqs.
    starts = [max(seq - 1, 0) // rows_a_piece * rows_a_piece + 1 for seq in occupied[1:]]
    ends = [start - 1 for start in starts]
    bounds = zip([whole.from_seq, *starts], [*ends, whole.to_seq], strict=True)
    rows = [min(rows_a_piece, last - seq + 1) for seq, last in zip(occupied, [*ends, last_seq], strict=True)]
    return [
        replace(whole, from_seq=start, to_seq=end, rows=rows[at], is_first=at == 0)
        for at, (start, end) in enumerate(bounds)
    ]
