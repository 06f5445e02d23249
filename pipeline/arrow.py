"""A ledger's rows in Arrow: building batches, reading them, and the Spark schema of their columns.

An Arrow schema is the only declaration of a batch's columns. Tasks exchange batches as plain values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, NamedTuple, TypeVar

import pyarrow as pa

from ledger import native
from ledger.verification import ENTRY_COLUMNS, SNAPSHOT_COLUMNS
from ledger.verification.entry_check import Passed

INTEGERS: Final = frozenset(
    (
        *("seq", "hlc_physical", "hlc_logical", "link_version", "from_seq", "to_seq", "entry_count", "last_seq"),
        *("created_physical", "created_logical", "head_seq", "tree_size", "level", "tile_index", "ended_seq"),
        *("ended_ms", "run_ms"),
    )
)
"""Columns of a ledger that hold integers; all others hold text, except the hashes of a tile."""

ROWS_A_BATCH: Final = 1000
"""Rows in one output batch of a task."""
BYTES_A_BATCH: Final = 4 << 20

Row = tuple[Any, ...]
"""Plain values, column by column."""
T = TypeVar("T")

_SPARK: Final = {
    pa.bool_(): "boolean",
    pa.int32(): "int",
    pa.int64(): "bigint",
    pa.string(): "string",
    pa.binary(): "binary",
}


class ArrowEntries(NamedTuple):
    """Entries as a batch, of any schema."""

    batch: pa.RecordBatch

    def passed(self, *known: Any) -> Passed | None:
        """The result of the native check; None if it cannot handle the batch."""
        batch = self.batch
        if not batch.schema.equals(ENTRY_SCHEMA):
            return None
        found = native.entries_in_columns(*known, batch.num_rows, [*map(_buffers, batch.columns)])
        return None if found is None else Passed(*found)


def _buffers(column: pa.Array) -> tuple[pa.Buffer | None, pa.Buffer | None, pa.Buffer | None, int]:
    """Validity, values, offsets and the place of the first value."""
    valid, *offsets, values = column.buffers()
    return valid, values, offsets[0] if offsets else None, column.offset


def schema_of(columns: Iterable[str]) -> pa.Schema:
    """These columns of a ledger."""
    return pa.schema([(name, pa.int64() if name in INTEGERS else pa.string()) for name in columns])


ENTRY_SCHEMA: Final = schema_of(ENTRY_COLUMNS)
SNAPSHOT_SCHEMA: Final = schema_of(SNAPSHOT_COLUMNS)


def ddl_of(schema: pa.Schema) -> str:
    """The columns of ``schema`` as Spark spells them."""
    return ", ".join(f"{field.name} {_spelt(field.type)}" for field in schema)


def _spelt(kind: pa.DataType) -> str:
    if pa.types.is_list(kind):
        return f"array<{_spelt(kind.value_type)}>"
    if pa.types.is_struct(kind):
        return f"struct<{', '.join(f'{field.name}: {_spelt(field.type)}' for field in kind)}>"
    return _SPARK[kind]


def batch_of(rows: Iterable[Sequence[Any]], schema: pa.Schema) -> pa.RecordBatch:
    """``rows``, at least one, in the order of ``schema``."""
    return batch_of_columns(zip(*rows, strict=True), schema)


def batch_of_columns(columns: Iterable[Sequence[Any]], schema: pa.Schema) -> pa.RecordBatch:
    """``columns``, all of one length, in the order of ``schema``."""
    return pa.RecordBatch.from_arrays(
        [pa.array(column, field.type) for column, field in zip(columns, schema, strict=True)], schema=schema
    )


def batched(
    rows: Iterable[Sequence[Any]], schema: pa.Schema, bytes_of: Callable[[Any], int] = lambda row: 0
) -> Iterator[pa.RecordBatch]:
    """``rows`` in batches that are bounded in number and, as ``bytes_of`` measures each row, in bytes."""
    return (batch_of(held, schema) for held in bounded(rows, ROWS_A_BATCH, bytes_of))


def bounded(rows: Iterable[T], rows_max: int, bytes_of: Callable[[T], int]) -> Iterator[list[T]]:
    """``rows`` in lists of at most ``rows_max``, each of which ends with the row that reaches ``BYTES_A_BATCH``."""
    held, size_bytes = list[T](), 0
    for row in rows:
        held.append(row)
        size_bytes += bytes_of(row)
        if len(held) == rows_max or size_bytes >= BYTES_A_BATCH:
            yield held
            held, size_bytes = [], 0
    if held:
        yield held


def lists_of(batch: pa.RecordBatch) -> list[list[Any]]:
    """The columns of a batch as plain values."""
    return [column.to_pylist() for column in batch.columns]


def rows_of(batch: pa.RecordBatch) -> Iterator[Row]:
    """The rows of a batch as plain values."""
    return zip(*lists_of(batch), strict=True)
