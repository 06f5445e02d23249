"""The Python Data Source ``tallystick``: ``spark.read.format("tallystick")``, for notebooks and other programs.

Options::

    dsn | archive | bundle where the ledger is; several bundles are separated by commas
    tenant                 of these tenants alone, separated by commas
    from_seq, to_seq       of these seqs alone, both included
    from_time, to_time     with an HLC from the first time on and before the second, as RFC 3339 has times
    rows_a_piece           most seqs that one task reads of a tenant, by default 65536
    rows_a_batch           a stream only: most entries of one batch, by default 1000000

The columns are ``tenant_id`` and those of an entry, or the subset that a schema names.

Options restrict what is read; ``pushFilters`` is not used. Spark 4.3 keeps the plan of a filter with the loaded
DataFrame and reuses it without the filter, so ``df.where("seq <= 5").count()`` would change the result of
``df.count()``. Spark evaluates its filters itself, on the rows that the options select.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Final

import pyarrow as pa
from pyspark.sql import SparkSession
from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow
from pyspark.sql.types import StructType

from ledger.errors import ConfigurationError, DatabaseWentBackError
from ledger.machines.retention import archived
from ledger.verification.verdict import is_number
from pipeline.arrow import INTEGERS
from pipeline.places import NAMED_BY, place_of
from pipeline.places.postgres import Dsn, PostgresPlace
from pipeline.places.protocol import ROWS_A_PIECE, Facts, Piece, Place, Times
from pipeline.source import ROW_COLUMNS, ddl, entry_rows, in_tasks, open_pieces

FORMAT: Final = "tallystick"


class TallystickSource(DataSource):
    """Entries of a ledger in any place."""

    @classmethod
    def name(cls) -> str:
        """The name for ``format``."""
        return FORMAT

    def schema(self) -> str:
        """``tenant_id`` and the columns of an entry."""
        return ddl()

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802 (Spark's name)
        """The reader of a stream of newly chained entries."""
        return LedgerStreamReader(self.options, schema)

    def reader(self, schema: StructType) -> DataSourceReader:
        """The reader of all entries that exist at planning."""
        return LedgerReader(self.options, schema)


class _Entries:
    """The entries that options select, read by tasks."""

    def __init__(self, options: Mapping[str, str], schema: StructType) -> None:
        refuse_unknown(options)
        self._places, self._tenants = places_of(options), tenants_of(options)
        self._rows_a_piece = number_of(options, "rows_a_piece") or ROWS_A_PIECE
        self._columns = columns_of(schema)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The entries of its pieces.

        Raises:
            ArchivedError: some of them left after they were planned.
        """
        for piece, reader in open_pieces(partition.value or ()):
            if (floor := reader.floor()) is not None and piece.bounds[0] <= floor.to_seq:
                raise archived(f"a part of tenant {piece.tenant_id} that is to be read", floor)
            yield from entry_rows(piece, reader, self._columns)

    def _partitions(self, pieces: Iterable[Piece]) -> list[InputPartition]:
        """One partition for each piece, or for several small ones."""
        return [InputPartition(group) for group in in_tasks(pieces, self._rows_a_piece)]


class LedgerReader(_Entries, DataSourceReader):
    """One read of a ledger: the entries that exist at planning.

    Spark plans in a process that ends before tasks run, so tasks cannot share its transaction. They need none:
    entries never change, a read ends with the last entry at planning, and one whose entries leave meanwhile fails.
    """

    def __init__(self, options: Mapping[str, str], schema: StructType) -> None:
        super().__init__(options, schema)
        self._from_seq, self._to_seq = number_of(options, "from_seq"), number_of(options, "to_seq")
        self._times = times_of(options)

    def partitions(self) -> list[InputPartition]:
        """The partitions of all places."""
        return [partition for place in self._places for partition in self._partitions_of(place)]

    def _partitions_of(self, place: Place) -> list[InputPartition]:
        with place.open(is_plan=True) as opened:
            tenants = self._tenants
            if len(self._places) > 1 and tenants is not None:
                tenants = [tenant for tenant in opened.tenants() if tenant in tenants]
            pieces = opened.pieces(
                tenants,
                rows_a_piece=self._rows_a_piece,
                from_seq=self._from_seq,
                to_seq=self._to_seq,
                times=self._times,
            )
        return self._partitions(pieces)


def register(spark: SparkSession) -> None:
    """Register ``spark.read.format("tallystick")`` in this session."""
    spark.dataSource.register(TallystickSource)


# --- a ledger as a stream -------------------------------------------------------------------------


ROWS_A_BATCH: Final = 1_000_000

Offset = dict[str, int]
"""Tenant to the last seq read."""


class LedgerStreamReader(_Entries, DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Follows a ledger in PostgreSQL. Spark's driver has one instance; tasks have copies that only ``read``."""

    def __init__(self, options: Mapping[str, str], schema: StructType) -> None:
        super().__init__(options, schema)
        if [place.kind for place in self._places] != [PostgresPlace.kind]:
            raise ConfigurationError("only a ledger in PostgreSQL, option dsn, can be read as a stream")
        self._place = PostgresPlace(Dsn(options["dsn"].strip()))
        self._rows_a_batch = number_of(options, "rows_a_batch") or ROWS_A_BATCH
        self._target: Offset | None = None

    def initialOffset(self) -> Offset:  # noqa: N802 (Spark's name)
        """Before the first entry of every tenant."""
        return {}

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802 (Spark's name)
        """The limit of the option ``rows_a_batch``."""
        return ReadMaxRows(self._rows_a_batch)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802 (Spark's name)
        """End the stream with the entries that exist now."""
        self._target = self._ends()

    def latestOffset(self, start: Offset, limit: ReadLimit) -> Offset:  # noqa: N802 (Spark's name)
        """The last seq of the next batch for each tenant.

        Raises:
            DatabaseWentBackError: a tenant ends before the last seq read of it.
        """
        ends = self._target if self._target is not None else self._ends()
        return next_offset(start, ends, limit.max_rows if isinstance(limit, ReadMaxRows) else None)

    def partitions(self, start: Offset, end: Offset) -> list[InputPartition]:
        """The pieces of one batch.

        Raises:
            ArchivedError: entries left after those that were read.
        """
        moved = {tenant: seq for tenant, seq in end.items() if seq > start.get(tenant, 0)}
        if not moved:
            return []
        with self._place.open(is_plan=True) as opened:
            for tenant, floor in opened.floors(moved).items():
                if 0 < start.get(tenant, 0) < floor.to_seq:
                    raise archived(f"tenant {tenant} after seq {start[tenant]}, up to which the stream read it,", floor)
            pieces = [
                piece
                for tenant, seq in moved.items()
                for piece in opened.pieces(
                    [tenant], rows_a_piece=self._rows_a_piece, from_seq=start.get(tenant, 0) + 1, to_seq=seq
                )
            ]
        return self._partitions(pieces)

    def _ends(self) -> Offset:
        with self._place.open(is_plan=True) as opened:
            existing = opened.tenants()
            tenants = existing if self._tenants is None else [name for name in existing if name in self._tenants]
            opened.read_facts(tenants)
            return {tenant: end_of(opened.facts(tenant)) for tenant in tenants}


def next_offset(start: Mapping[str, int], ends: Mapping[str, int], rows_max: int | None) -> Offset:
    """The end of a batch that starts after ``start`` and has at most ``rows_max`` entries.

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
    """The seq up to which entries can be read and no more will be added.

    It is the lower of head and last entry, which differ only if one is forged.
    """
    last_seq = facts.last.seq if facts.last is not None else 0
    return max(0, min(last_seq, facts.head.seq if facts.head is not None and is_number(facts.head.seq) else last_seq))


# --- options --------------------------------------------------------------------------------------


BOUNDS: Final = ("tenant", "from_seq", "to_seq", "from_time", "to_time")
SIZES: Final = ("rows_a_piece", "rows_a_batch")
_NUMBER: Final = re.compile(r"[0-9]+")
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


def places_of(options: Mapping[str, str]) -> list[Place]:
    """The places that the options name.

    Raises:
        ConfigurationError: no kind or several kinds are named, or a named place does not exist.
    """
    named = [name for name in NAMED_BY if options.get(name)]
    if len(named) != 1:
        raise ConfigurationError(f"say where the ledger is by one of the options {', '.join(NAMED_BY)}")
    text = options[named[0]]
    return [place_of(named[0], part.strip()) for part in (text.split(",") if named[0] == "bundle" else [text])]


def refuse_unknown(options: Mapping[str, str]) -> None:
    """Reject unknown options, as a misspelt one would read other entries than intended.

    Raises:
        ConfigurationError: an option is unknown.
    """
    known = (*NAMED_BY, *BOUNDS, *SIZES)
    for name in options:
        if name.lower() not in known:
            raise ConfigurationError(f"there is no option {name!r}; there are {', '.join(known)}")


def tenants_of(options: Mapping[str, str]) -> list[str] | None:
    """The tenants in the option; None for all."""
    named = options.get("tenant")
    return None if named is None else [tenant.strip() for tenant in named.split(",")]


def number_of(options: Mapping[str, str], name: str) -> int | None:
    """The number, at least 1, in an option; None if the option is not given.

    Raises:
        ConfigurationError: it is no such number.
    """
    if (text := options.get(name)) is not None and not (_NUMBER.fullmatch(text) and int(text) >= 1):
        raise ConfigurationError(f"option {name} must be a number, at least 1, and is {text!r}")
    return None if text is None else int(text)


def times_of(options: Mapping[str, str]) -> Times:
    """The HLC times that the options select.

    Raises:
        ConfigurationError: an option is no time.
    """
    begin_ms, end_ms = _milliseconds(options, "from_time"), _milliseconds(options, "to_time")
    return Times(begin_ms, None if end_ms is None else end_ms - 1)


def _milliseconds(options: Mapping[str, str], name: str) -> int | None:
    if (text := options.get(name)) is None:
        return None
    moment = None
    with suppress(ValueError):
        moment = datetime.fromisoformat(text)
    if moment is None or moment.tzinfo is None:
        raise ConfigurationError(f"option {name} must be a time such as 2026-01-31T00:00:00Z, and is {text!r}")
    return (moment - _EPOCH) // timedelta(milliseconds=1)


def columns_of(schema: StructType) -> tuple[str, ...]:
    """The columns that a schema names.

    Raises:
        ConfigurationError: a column does not exist in an entry, or has another type.
    """
    for field in schema.fields:
        kind = "bigint" if field.name in INTEGERS else "string"
        if field.name not in ROW_COLUMNS or field.dataType.simpleString() != kind:
            raise ConfigurationError(f"an entry has no column {field.name} {field.dataType.simpleString()}: {ddl()}")
    return tuple(schema.fieldNames())
