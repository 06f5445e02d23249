"""Rows into batches and out of them, and the columns of a batch as Spark is told of them."""

from __future__ import annotations

import pyarrow as pa
import pytest

from ledger.verification import ENTRY_COLUMNS
from pipeline.arrow import batch_of, batch_of_columns, ddl_of, lists_of, rows_of, schema_of

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
