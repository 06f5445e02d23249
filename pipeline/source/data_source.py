"""The Python Data Source ``tallystick``: ``spark.read.format("tallystick")``, for notebooks and programs of others.

Options::

    dsn | archive | bundle where the ledger is; several bundles are separated by commas
    tenant                 of these tenants alone, separated by commas
    from_seq, to_seq       of these seqs alone, both included
    from_time, to_time     with an HLC from the first time on and before the second, as RFC 3339 has times
    rows_a_piece           most seqs that one task reads of a tenant, by default 65536
    rows_a_batch           a stream only: most entries of one batch, by default 1000000

The columns are ``tenant_id`` and those of an entry, or those of them that a schema names.

What is not wanted is left out by options, before it is read, and not by ``pushFilters``: Spark 4.3 keeps what was
planned for a filter with the loaded DataFrame and reads no more than that wherever the DataFrame is used again, without
the filter too, so that ``df.where("seq <= 5").count()`` would change what ``df.count()`` says. A filter of Spark's is
evaluated by Spark, on all that the options leave.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Final

from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader, InputPartition

from pipeline.places.protocol import ROWS_A_PIECE, OpenPlace, Place
from pipeline.source.frames import ddl, entry_rows, in_tasks, open_pieces
from pipeline.source.options import columns_of, number_of, places_of, refuse_unknown, tenants_of, times_of
from pipeline.source.stream import LedgerStreamReader, PiecePartition

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import SparkSession
    from pyspark.sql.types import StructType

FORMAT: Final = "tallystick"


class TallystickSource(DataSource):
    """Entries of a ledger, wherever it is."""

    @classmethod
    def name(cls) -> str:
        """The name to say in ``format``."""
        return FORMAT

    def schema(self) -> str:
        """``tenant_id`` and the columns of an entry."""
        return ddl()

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802 (Spark's name)
        """Reads what is chained as time goes on."""
        return LedgerStreamReader(self.options, schema)

    def reader(self, schema: StructType) -> DataSourceReader:
        """Reads all that there is when the query is planned."""
        return LedgerReader(self.options, schema)


class LedgerReader(DataSourceReader):
    """One read of a ledger: the entries that it had when it was planned.

    Spark plans in a process that has ended when tasks run, so no transaction of its own is left to share. None is
    needed: entries never change, and a read ends with the last one that was there.
    """

    def __init__(self, options: Mapping[str, str], schema: StructType) -> None:
        refuse_unknown(options)
        self._places, self._tenants = places_of(options), tenants_of(options)
        self._from_seq, self._to_seq = number_of(options, "from_seq"), number_of(options, "to_seq")
        self._times = times_of(options)
        self._rows_a_piece = number_of(options, "rows_a_piece") or ROWS_A_PIECE
        self._columns = columns_of(schema)

    def partitions(self) -> list[InputPartition]:
        """One for each piece, or for several small ones."""
        return [partition for place in self._places for partition in self._partitions_of(place)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The entries of its pieces."""
        for piece, reader in open_pieces(partition.value or ()):
            yield from entry_rows(piece, reader, self._columns)

    def _partitions_of(self, place: Place) -> list[InputPartition]:
        with place.planned() as opened:
            return self._pieces_of(opened)

    def _pieces_of(self, opened: OpenPlace) -> list[InputPartition]:
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
        return [PiecePartition(group) for group in in_tasks(pieces, self._rows_a_piece)]


def register(spark: SparkSession) -> None:
    """Make ``spark.read.format("tallystick")`` known to this session."""
    spark.dataSource.register(TallystickSource)
