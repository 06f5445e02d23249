"""Rows into batches and out of them, and the columns of a batch as Spark is told of them."""

from __future__ import annotations

from array import array
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ledger import native
from ledger.verification import ENTRY_COLUMNS
from pipeline.arrow import (
    ENTRY_SCHEMA,
    ArrowEntries,
    _buffers,
    batch_of,
    batch_of_columns,
    ddl_of,
    lists_of,
    rows_of,
    schema_of,
)
from tests.ledger.damage import DAMAGE, damage
from tests.ledger.test_native import outcome
from tests.ledger.test_packed_entries import WHOLE, by_rows, known_at
from tests.ledger.test_packed_entries import rows_of as rows_of_ledger

SCHEMA = pa.schema([("seq", pa.int64()), ("link", pa.string()), ("leaf", pa.binary())])
ROWS = [(1, "ab", b"\x00"), (2, None, None)]


def test_rows_come_out_of_a_batch_as_they_went_in() -> None:
    batch = batch_of(ROWS, SCHEMA)
    assert batch.schema == SCHEMA
    assert list(rows_of(batch)) == ROWS
    assert lists_of(batch) == [[1, 2], ["ab", None], [b"\x00", None]]
    assert batch_of_columns(lists_of(batch), SCHEMA).equals(batch)


def test_rows_that_are_not_of_the_schema_are_refused() -> None:
    with pytest.raises(ValueError, match="zip"):
        batch_of([(1, "ab")], SCHEMA)
    with pytest.raises(pa.ArrowInvalid):
        batch_of([("one", "ab", b"")], SCHEMA)


def test_columns_are_told_to_spark_as_it_spells_them_nested_ones_too() -> None:
    pair = pa.struct([("hlc", pa.string()), ("seq", pa.int64())])
    schema = pa.schema([("rank", pa.int32()), ("is_whole", pa.bool_()), ("pairs", pa.list_(pair))])
    assert ddl_of(SCHEMA) == "seq bigint, link string, leaf binary"
    assert ddl_of(schema) == "rank int, is_whole boolean, pairs array<struct<hlc: string, seq: bigint>>"


def test_numbers_of_a_ledger_are_integers_and_all_else_is_text() -> None:
    kinds = dict(zip(ENTRY_COLUMNS, schema_of(ENTRY_COLUMNS).types, strict=True))
    assert {name for name, kind in kinds.items() if kind == pa.int64()} == {
        *("seq", "hlc_physical", "hlc_logical", "link_version")
    }
    assert {*kinds.values()} == {pa.int64(), pa.string()}


# --- entries that are judged as columns -----------------------------------------------------------


@given(
    st.none() | st.tuples(st.integers(0, len(DAMAGE) - 1), st.integers(0, 39), st.integers(0, 2000)),
    st.integers(0, 3),
)
@example(None, 0)
@example((4, 1, 0), 2)
@example((8, 30, 261), 0)
def test_columns_are_judged_as_their_rows_are(edit: tuple[int, int, int] | None, before: int) -> None:
    ledger = WHOLE.copy()
    if edit is not None:
        damage(ledger, *edit)
    rows = rows_of_ledger(ledger)
    before = min(before, len(rows))
    batch: Any = outcome(batch_of, [*rows[:before], *rows], ENTRY_SCHEMA)
    if not rows or not isinstance(batch, pa.RecordBatch):
        return  # Arrow does not hold it.
    expected = outcome(by_rows, rows, known_at())
    found = ArrowEntries(batch.slice(before)).passed(*known_at())
    # What is about no job may have a name beyond ASCII: such a batch is left to the rows, which judge it alike.
    is_plain = all(str(row[ENTRY_COLUMNS.index("job_id")]).isascii() for row in rows)
    is_whole = native.NAME == "c" and isinstance(expected, tuple) and is_plain
    assert (None if found is None else found) == ((*expected, len(rows)) if is_whole else None)


def test_columns_of_another_type_are_left_and_so_are_buffers_that_are_too_short() -> None:
    batch = batch_of(rows_of_ledger(WHOLE), ENTRY_SCHEMA)
    for at, name in enumerate(ENTRY_COLUMNS):
        kind = pa.float64() if pa.types.is_integer(batch.schema.field(at).type) else pa.binary()
        other = batch.set_column(at, name, batch.column(at).cast(kind))
        assert ArrowEntries(other).passed(*known_at()) is None
    columns = [_buffers(column) for column in batch.columns]
    assert (native.entries_in_columns(*known_at(), 40, columns) is not None) == (native.NAME == "c")
    for rows, first in ((4000, 0), (40, 4000), (40, 2**40), (2**40, 0), (-1, 0), (40, -1)):
        moved = [(*column[:3], first) for column in columns]
        assert native.entries_in_columns(*known_at(), rows, moved) is None
    for at, (valid, values, offsets, first) in enumerate(columns[:-1]):
        for cut in ((valid, None, offsets, first), (valid, values, values if offsets is None else None, first)):
            assert native.entries_in_columns(*known_at(), 40, [*columns[:at], cut, *columns[at + 1 :]]) is None


def test_texts_that_are_said_to_end_behind_their_buffer_are_left() -> None:
    columns = [_buffers(column) for column in batch_of(rows_of_ledger(WHOLE), ENTRY_SCHEMA).columns]
    at = ENTRY_COLUMNS.index("payload")
    valid, values, offsets, first = columns[at]
    assert offsets is not None
    for number, value in ((40, 2**31 - 1), (0, -(2**30)), (20, 0)):
        moved = [*memoryview(offsets).cast("i")]
        moved[number] = value
        columns[at] = (valid, values, pa.py_buffer(array("i", moved)), first)
        assert native.entries_in_columns(*known_at(), 40, columns) is None
