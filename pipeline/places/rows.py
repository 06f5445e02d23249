"""Rows of a ledger as Arrow has them, and the columns of a DataFrame of entries."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

import pyarrow as pa

from ledger.verification import ENTRY_COLUMNS, SNAPSHOT_COLUMNS
from pipeline.arrow import ddl_of, schema_of
from pipeline.places.protocol import BATCH_ROWS_MAX, Piece, PieceReader

ENTRY_SCHEMA: Final = schema_of(ENTRY_COLUMNS)
SNAPSHOT_SCHEMA: Final = schema_of(SNAPSHOT_COLUMNS)

ROW_COLUMNS: Final = ("tenant_id", *ENTRY_COLUMNS)
"""An entry as a row of a DataFrame; every column may be NULL, for somebody may have damaged it."""


def ddl(columns: Sequence[str] = ROW_COLUMNS) -> str:
    """The schema of a DataFrame with these columns of ``ROW_COLUMNS``."""
    return ddl_of(schema_of(columns))


def entry_rows(piece: Piece, reader: PieceReader, columns: Sequence[str] = ROW_COLUMNS) -> Iterator[pa.RecordBatch]:
    """The entries of a piece as rows of a DataFrame with these columns of ``ROW_COLUMNS``."""
    schema = schema_of(columns)
    # A read without columns would have no rows to count.
    read = [name for name in columns if name != "tenant_id"] or ["seq"]
    for batch in reader.entries(read):
        arrays = [
            pa.repeat(piece.tenant_id, batch.num_rows) if name == "tenant_id" else _held(batch.column(name), field.type)
            for name, field in zip(columns, schema, strict=True)
        ]
        yield pa.RecordBatch.from_arrays(arrays, schema=schema)


def sliced(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The same rows in batches that are not empty and of bounded length."""
    for batch in batches:
        for at in range(0, batch.num_rows, BATCH_ROWS_MAX):
            yield batch.slice(at, BATCH_ROWS_MAX)


def _held(array: pa.Array, kind: pa.DataType) -> pa.Array:
    return array if array.type == kind else pa.nulls(len(array), kind)
