"""Reads places with Spark: pieces in tasks, and the Data Source ``tallystick`` for notebooks.

``over_pieces`` calls a function with each piece of a place and its reader; ``entries`` returns all entries as a
DataFrame; ``over_numbers`` is for tasks that read whole files.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack
from functools import cache
from typing import TYPE_CHECKING, Final

import pyarrow as pa

from ledger.verification import ENTRY_COLUMNS
from pipeline.arrow import ddl_of, schema_of
from pipeline.places.protocol import EVER, ROWS_A_PIECE, OpenPlace, Piece, PieceReader, ReaderOf, Times, Where

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


__all__ = ["entries", "in_tasks", "open_pieces", "over_numbers", "over_pieces"]


ROW_COLUMNS: Final = ("tenant_id", *ENTRY_COLUMNS)
"""An entry as a row of a DataFrame; every column may be NULL, as the entry may be damaged."""
PIECES_A_TASK_MAX: Final = 256
"""Most pieces in one task, however few rows they have; each costs a statement or the opening of a file."""
TASKS_A_CORE: Final = 8
"""More tasks do not improve the balance; each costs Spark about 40 ms of a core."""
Read = Callable[[Piece, PieceReader], Iterable[pa.RecordBatch]]
"""A task's function of a piece. It travels to the workers, so it must hold only plain values."""


def entries(
    spark: SparkSession,
    place: OpenPlace,
    *,
    tenants: Collection[str] | None = None,
    columns: Sequence[str] = ROW_COLUMNS,
    rows_a_piece: int = ROWS_A_PIECE,
    from_seq: int | None = None,
    to_seq: int | None = None,
    times: Times = EVER,
) -> DataFrame:
    """The entries of ``place``, which MUST stay open until the DataFrame has been used.

    Within a partition the entries of a tenant are in order of seq. A value that its column cannot hold is NULL. With
    several ledgers, ``tenant_id`` has the names of chains.
    """
    pieces = place.pieces(tenants, rows_a_piece=rows_a_piece, from_seq=from_seq, to_seq=to_seq, times=times)
    names = tuple(columns)

    def read(piece: Piece, reader: PieceReader) -> Iterator[pa.RecordBatch]:
        return entry_rows(piece, reader, names)

    return over_pieces(spark, pieces, read, ddl(names), rows_a_piece)


def ddl(columns: Sequence[str] = ROW_COLUMNS) -> str:
    """The schema of a DataFrame with these columns of ``ROW_COLUMNS``."""
    return ddl_of(schema_of(columns))


def entry_rows(piece: Piece, reader: PieceReader, columns: Sequence[str] = ROW_COLUMNS) -> Iterator[pa.RecordBatch]:
    """The entries of a piece as rows of a DataFrame with these columns of ``ROW_COLUMNS``."""
    schema = schema_of(columns)
    # A batch without columns would have no rows to count.
    for batch in reader.entries([name for name in columns if name != "tenant_id"] or ["seq"]):
        arrays = [
            pa.repeat(piece.chain, batch.num_rows) if name == "tenant_id" else _held(batch.column(name), field.type)
            for name, field in zip(columns, schema, strict=True)
        ]
        yield pa.RecordBatch.from_arrays(arrays, schema=schema)


def _held(array: pa.Array, kind: pa.DataType) -> pa.Array:
    return array if array.type == kind else pa.nulls(len(array), kind)


def over_pieces(
    spark: SparkSession, pieces: Sequence[Piece], read: Read, schema: str, rows_a_task: int = ROWS_A_PIECE
) -> DataFrame:
    """The results of ``read`` for every piece, as a DataFrame of ``schema``.

    A task reads one piece, or several small ones in order with at most ``rows_a_task`` rows together.
    """
    if not (groups := in_tasks(pieces, rows_a_task)):
        return spark.createDataFrame([], schema)

    def work(number: int) -> Iterator[pa.RecordBatch]:
        for piece, reader in open_pieces(groups[number]):
            yield from read(piece, reader)

    return over_numbers(spark, len(groups), work, schema)


def over_numbers(
    spark: SparkSession, count: int, work: Callable[[int], Iterable[pa.RecordBatch]], schema: str
) -> DataFrame:
    """The results of ``work`` for each number below ``count``, each in its own task, as a DataFrame of ``schema``."""

    def of_numbers(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        _spare_the_collector()
        for batch in batches:
            for number in batch.column(0).to_pylist():
                yield from work(number)

    return spark.range(0, count, 1, max(1, count)).mapInArrow(of_numbers, schema)


@cache
def _spare_the_collector() -> None:
    """Exclude all loaded objects from garbage collection, once a process. A Spark worker collects after each task,
    which took as long as reading fifty thousand rows."""
    gc.freeze()


def in_tasks(pieces: Iterable[Piece], rows_a_task: int = ROWS_A_PIECE) -> list[list[Piece]]:
    """The pieces of each task; small ones share a task up to ``rows_a_task`` rows together."""
    groups, rows = list[list[Piece]](), 0
    for piece in pieces:
        if not groups or rows + piece.rows > rows_a_task or len(groups[-1]) == PIECES_A_TASK_MAX:
            groups.append([])
            rows = 0
        groups[-1].append(piece)
        rows += piece.rows
    return groups


def rows_a_task(pieces: Iterable[Piece], cores: int) -> int:
    """Most rows of small pieces that share a task, so that there are few more than ``TASKS_A_CORE`` tasks a core."""
    return max(ROWS_A_PIECE, sum(piece.rows for piece in pieces) // (TASKS_A_CORE * cores))


def open_pieces(pieces: Iterable[Piece]) -> Iterator[tuple[Piece, PieceReader]]:
    """Each piece with its reader, valid until the next; connections are reused, and closed at the end."""
    held: Where | None = None
    reader_of: ReaderOf | None = None
    with ExitStack() as stack:
        for piece in pieces:
            if reader_of is None or piece.where != held:
                stack.close()
                held, reader_of = piece.where, stack.enter_context(piece.where.session())
            yield piece, reader_of(piece)
