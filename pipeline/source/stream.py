"""A ledger as a stream: each batch is the entries chained since the one before, by seq.

An offset is the last seq read of each tenant. Entries below a tenant's end never change and get no others between, so
offsets alone say what a batch holds: when it is read again after a crash, it holds the same entries, and no snapshot
needs to be kept. Tenants that appear are read from seq 1.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Final

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow

from ledger.errors import ConfigurationError, DatabaseWentBackError
from ledger.verification.verdict import is_number
from pipeline.places.dsn import Dsn
from pipeline.places.postgres import OpenPostgres, PostgresPlace
from pipeline.places.protocol import ROWS_A_PIECE, Facts, Piece
from pipeline.source.frames import entry_rows, in_tasks, open_pieces
from pipeline.source.options import columns_of, number_of, places_of, refuse_unknown, tenants_of

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType

ROWS_A_BATCH: Final = 1_000_000

Offset = dict[str, int]
"""Tenant to the last seq read."""


class PiecePartition(InputPartition):
    """What one task reads: a piece, or several small ones."""

    def __init__(self, pieces: list[Piece]) -> None:
        super().__init__(pieces)


class LedgerStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Follows a ledger in PostgreSQL. Spark's driver has one at work, and tasks copies that only ``read``."""

    def __init__(self, options: Mapping[str, str], schema: StructType) -> None:
        refuse_unknown(options)
        if [place.kind for place in places_of(options)] != [PostgresPlace.kind]:
            raise ConfigurationError("only a ledger in PostgreSQL, option dsn, can be read as a stream")
        self._dsn = Dsn(options["dsn"].strip())
        self._tenants = tenants_of(options)
        self._rows_a_piece = number_of(options, "rows_a_piece") or ROWS_A_PIECE
        self._rows_a_batch = number_of(options, "rows_a_batch") or ROWS_A_BATCH
        self._columns = columns_of(schema)
        self._target: Offset | None = None

    # --- on the driver ----------------------------------------------------------------------------

    def initialOffset(self) -> Offset:  # noqa: N802 (Spark's name)
        """Before the first entry of every tenant."""
        return {}

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802 (Spark's name)
        """What the option ``rows_a_batch`` says."""
        return ReadMaxRows(self._rows_a_batch)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802 (Spark's name)
        """From now on, what is there now is all there is."""
        self._target = self._ends()

    def latestOffset(self, start: Offset, limit: ReadLimit) -> Offset:  # noqa: N802 (Spark's name)
        """Up to which seq of each tenant the next batch goes.

        Raises:
            DatabaseWentBackError: a tenant ends before what was read of it.
        """
        ends = self._target if self._target is not None else self._ends()
        rows_max = limit.max_rows if isinstance(limit, ReadMaxRows) else None
        return next_offset(start, ends, rows_max)

    def partitions(self, start: Offset, end: Offset) -> list[InputPartition]:
        """The pieces of one batch."""
        moved = {tenant: seq for tenant, seq in end.items() if seq > start.get(tenant, 0)}
        if not moved:
            return []
        with self._opened() as opened:
            pieces = [
                piece
                for tenant, seq in moved.items()
                for piece in opened.pieces(
                    [tenant], rows_a_piece=self._rows_a_piece, from_seq=start.get(tenant, 0) + 1, to_seq=seq
                )
            ]
        return [PiecePartition(group) for group in in_tasks(pieces, self._rows_a_piece)]

    # --- in tasks -----------------------------------------------------------------------------------

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The entries of its pieces."""
        for piece, reader in open_pieces(partition.value):
            yield from entry_rows(piece, reader, self._columns)

    def _ends(self) -> Offset:
        with self._opened() as opened:
            existing = opened.tenants()
            tenants = existing if self._tenants is None else [name for name in existing if name in self._tenants]
            opened.read_facts(tenants)
            return {tenant: end_of(opened.facts(tenant)) for tenant in tenants}

    def _opened(self) -> AbstractContextManager[OpenPostgres]:
        return PostgresPlace(self._dsn).planned()


def next_offset(start: Mapping[str, int], ends: Mapping[str, int], rows_max: int | None) -> Offset:
    """Where a batch ends that begins behind ``start`` and has at most ``rows_max`` entries.

    Tenants share a batch evenly, so that none waits for another's backlog.

    Raises:
        DatabaseWentBackError: a tenant ends before ``start``.
    """
    waiting = {}
    for tenant in {*start, *ends}:
        done, end = start.get(tenant, 0), ends.get(tenant, 0)
        if end < done:
            raise DatabaseWentBackError(
                f"tenant {tenant!r} ends at seq {end}, and was read up to {done}: the database was set back, or entries"
                " were removed; verify it, and begin the stream with a new checkpoint folder"
            )
        waiting[tenant] = end - done
    offset = dict(start)
    left = sum(waiting.values()) if rows_max is None else rows_max
    for at, tenant in enumerate(sorted(waiting, key=lambda tenant: (waiting[tenant], tenant))):
        share = -(-left // (len(waiting) - at))
        taken = min(waiting[tenant], share if rows_max is not None else left)
        left -= taken
        if taken:
            offset[tenant] = start.get(tenant, 0) + taken
    return offset


def end_of(facts: Facts) -> int:
    """The seq up to which entries can be read and none will be added.

    It is the lower one of head and last entry: these differ only where somebody forged one of them.
    """
    last_seq = facts.last.seq if facts.last is not None else 0
    head_seq = facts.head.seq if facts.head is not None and is_number(facts.head.seq) else last_seq
    return max(0, min(last_seq, head_seq))
