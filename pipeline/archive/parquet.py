"""The files of an archive: Parquet in one fixed form, written row group by row group. Equal rows give equal bytes.

Columns are those of the table, in its order and types; ``payload`` and ``origin`` are the stored text. Rows are
sorted by seq and compressed with zstd. Row groups are cut by seq and length alone, never by the batches in which
rows arrive. Only repetitive columns have dictionaries, so the unpacked size of a file is close to its declared size.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial, reduce
from typing import IO, Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from ledger.errors import ArchiveInvalidError, InvalidInputError, refuse, reported_as
from ledger.verification.entry_check import ENTRY_COLUMNS
from ledger.verification.snapshot_check import SNAPSHOT_COLUMNS
from objects.store import ArchiveStore
from pipeline.archive import FILE_BYTES_MAX, FILE_ROWS_MAX, GROUP_BYTES_MAX, GROUP_ROWS, ArchivedFile
from pipeline.arrow import schema_of

ZSTD_LEVEL: Final = 1
"""Half of what a row holds is digests, which no level compresses further; level 3 takes twice the time for 7 %."""
BATCH_ROWS: Final = 4_096
"""Rows decoded per step when a file is read."""
SNAPSHOT_GROUP_ROWS: Final = 1_024
GROUP_UNPACKED_BYTES_MAX: Final = 512 << 20
"""Most bytes that a row group may declare unpacked: its payloads, the longest row and the other columns."""
REPEATED_BYTES_MAX: Final = 64 << 20
"""Most bytes of a batch of a dictionary column, if each value is as long as the longest."""

_REPEATING: Final = ("hlc_node", "job_id", "action")
_COUNTED: Final = ("seq", "hlc_physical", "hlc_logical", "hlc_node", "job_id", "action", "from_seq", "to_seq")
"""Columns with minimum and maximum stored for each row group."""


def _file_schema(columns: Sequence[str], optional: Sequence[str] = ("prev_chain_link", "origin")) -> pa.Schema:
    kinds = {"link_version": pa.int16()}
    return pa.schema(
        [pa.field(each.name, kinds.get(each.name, each.type), each.name in optional) for each in schema_of(columns)]
    )


ENTRY_FILE_SCHEMA: Final = _file_schema(ENTRY_COLUMNS)
SNAPSHOT_FILE_SCHEMA: Final = _file_schema(SNAPSHOT_COLUMNS)
UNSIGNED_FILE_SCHEMA: Final = _file_schema(SNAPSHOT_COLUMNS, ("dsse_envelope",))
"""Schema of a file of snapshots of which one at least is unsigned."""


class FileWriter:
    """Writes one file from batches of any size and keeps it readable. Memory holds one row group."""

    def __init__(self, target: IO[bytes], schema: pa.Schema) -> None:
        self.rows = 0
        self._target, self._schema = target, schema
        self._group_rows = GROUP_ROWS if schema is ENTRY_FILE_SCHEMA else SNAPSHOT_GROUP_ROWS
        self._waiting: list[pa.RecordBatch] = []
        self._waiting_bytes = 0
        self._position: int | None = None
        """Rows between the last multiple of ``_group_rows`` and the next row."""
        self._footers: list[pq.FileMetaData] = []
        self._writer = pq.ParquetWriter(
            target,
            schema,
            metadata_collector=self._footers,
            version="2.6",
            compression="zstd",
            compression_level=ZSTD_LEVEL,
            use_dictionary=[name for name in _REPEATING if name in schema.names],
            write_statistics=[name for name in _COUNTED if name in schema.names],
            store_schema=False,
            sorting_columns=[pq.SortingColumn(0)],
        )

    def add(self, batch: pa.RecordBatch) -> None:
        """Append the next rows, in order of seq.

        Raises:
            InvalidInputError: a column holds a forbidden value, such as NULL.
        """
        with reported_as(
            InvalidInputError,
            "rows are not of the types of their columns",
            *(pa.ArrowInvalid, pa.ArrowNotImplementedError, ValueError),
        ):
            batch = batch.cast(self._schema)
        if self._position is None:
            is_entries = self._schema is ENTRY_FILE_SCHEMA
            self._position = (batch.column(0)[0].as_py() - 1) % self._group_rows if is_entries else 0
        while batch.num_rows:
            count, size, is_end = self._next_group(batch, self._group_rows - self._position)
            self._waiting.append(batch.slice(0, count))
            self._waiting_bytes += size
            self._position = (self._position + count) % self._group_rows
            if is_end:
                self._write_group()
            batch = batch.slice(count)

    def finish(self, name: str) -> ArchivedFile:
        """Write the remaining rows and the footer; returns the manifest's record of the file under ``name``.

        Raises:
            InvalidInputError: the file became larger than an archive allows.
        """
        self._write_group()
        self._writer.close()
        if (size := self._target.seek(0, os.SEEK_END)) > FILE_BYTES_MAX:
            raise InvalidInputError(f"a file has {size} bytes, an archive takes {FILE_BYTES_MAX}")
        self._target.seek(0)
        digest = hashlib.file_digest(self._target, "sha256").hexdigest()  # type: ignore[arg-type]
        return ArchivedFile(name, digest, size, self.rows)

    @property
    def footer(self) -> pq.FileMetaData:
        """What a reader of the finished file would find at its end."""
        return self._footers[0]

    def close(self) -> None:
        """Stop writing; an unfinished file is unusable. A second call, or a call after ``finish``, does nothing."""
        self._writer.close()

    def _next_group(self, batch: pa.RecordBatch, rows_left: int) -> tuple[int, int, bool]:
        """How many rows of ``batch`` go into the current group, their length, and whether they end the group."""
        taken = batch.slice(0, rows_left)
        size = sum(pc.sum(pc.binary_length(column)).as_py() or 0 for column in _long_columns(taken))
        room = GROUP_BYTES_MAX - self._waiting_bytes
        if size <= room:
            return taken.num_rows, size, taken.num_rows == rows_left
        lengths = _lengths(taken)
        count = pc.index(pc.greater(pc.cumulative_sum(lengths), room), pa.scalar(True)).as_py() + 1
        return count, pc.sum(lengths.slice(0, count)).as_py(), True

    def _write_group(self) -> None:
        if self._waiting:
            table = pa.Table.from_batches(self._waiting, self._schema).combine_chunks()
            self._writer.write_table(table, row_group_size=table.num_rows)
            self.rows += table.num_rows
        self._waiting, self._waiting_bytes = [], 0


def _long_columns(batch: pa.RecordBatch) -> list[pa.Array]:
    return [batch.column(name) for name in ("payload", "origin", "dsse_envelope") if name in batch.schema.names]


def _lengths(batch: pa.RecordBatch) -> pa.Array:
    """Bytes of the long columns of each row."""
    lengths = (pc.binary_length(column) for column in _long_columns(batch))
    return reduce(pc.add, (pc.fill_null(each, 0).cast(pa.int64()) for each in lengths))


@contextmanager
def opened(store: ArchiveStore, file: ArchivedFile, schema: pa.Schema) -> Iterator[pq.ParquetFile]:
    """Fetch the file and compare it with its manifest before parsing.

    Raises:
        ArchiveInvalidError: the file is missing, differs from its manifest, or does not have the form of an archive
            file.
        ArchiveUnavailableError: it cannot be read.
    """
    with tempfile.NamedTemporaryFile() as local:
        digest, size = hashlib.sha256(), 0
        try:
            for chunk in store.chunks(file.name):
                size += len(chunk)
                if size > file.bytes:
                    break
                digest.update(chunk)
                local.write(chunk)
        except ArchiveInvalidError as error:
            raise ArchiveInvalidError(str(error), file.parsed.from_seq) from error
        if (size, digest.hexdigest()) != (file.bytes, file.sha256):
            raise ArchiveInvalidError(
                f"{file.name} is not the file that its manifest names: size or digest is another", file.parsed.from_seq
            )
        local.flush()
        try:
            found = pq.ParquetFile(local.name, read_dictionary=[name for name in _REPEATING if name in schema.names])
        except KeyError as error:
            raise ArchiveInvalidError(f"{file.name} does not have the column {error}", file.parsed.from_seq) from error
        except (pa.ArrowException, OSError, ValueError) as error:
            raise ArchiveInvalidError(f"{file.name} is not Parquet: {error}", file.parsed.from_seq) from error
        _check_form(found, file, schema)
        yield found


def batches(
    found: pq.ParquetFile, file: ArchivedFile, columns: Sequence[str] | None = None
) -> Iterator[pa.RecordBatch]:
    """The rows of a file in batches, or only these columns.

    Raises:
        ArchiveInvalidError: they cannot be decoded.
    """
    with reported_as(
        partial(ArchiveInvalidError, seq=file.parsed.from_seq),
        f"rows of {file.name} cannot be decoded",
        *(pa.ArrowException, OSError, ValueError),
    ):
        for batch in found.iter_batches(BATCH_ROWS, columns=None if columns is None else list(columns)):
            yield _decoded(batch, file)


def _decoded(batch: pa.RecordBatch, file: ArchivedFile) -> pa.RecordBatch:
    """The batch with its dictionaries decoded; rejected if decoding would exceed the memory bound."""
    columns = []
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        if isinstance(column, pa.DictionaryArray):
            longest = pc.max(pc.binary_length(column.dictionary)).as_py() or 0
            if longest * len(column) > REPEATED_BYTES_MAX:
                raise ArchiveInvalidError(f"{file.name} has a {name} of {longest} bytes", file.parsed.from_seq)
            column = column.dictionary_decode()
        columns.append(column)
    decoded = pa.RecordBatch.from_arrays(columns, names=batch.schema.names)
    decoded.validate(full=True)
    return decoded


def _check_form(found: pq.ParquetFile, file: ArchivedFile, schema: pa.Schema) -> None:
    metadata, rows_max = found.metadata, GROUP_ROWS if schema is ENTRY_FILE_SCHEMA else SNAPSHOT_GROUP_ROWS
    columns = pa.schema([_plain(field) for field in found.schema_arrow])
    allowed = (schema, UNSIGNED_FILE_SCHEMA) if schema is SNAPSHOT_FILE_SCHEMA else (schema,)
    groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    chunks = [[group.column(number) for number in range(group.num_columns)] for group in groups]
    is_ours = all(
        chunk.compression == "ZSTD" and (chunk.path_in_schema in _REPEATING or not chunk.has_dictionary_page)
        for of_group in chunks
        for chunk in of_group
    )
    unpacked_bytes = max((sum(chunk.total_uncompressed_size for chunk in each) for each in chunks), default=0)
    rows, is_any_odd = [group.num_rows for group in groups], len(groups) > max(FILE_ROWS_MAX, file.rows)
    refuse(
        partial(ArchiveInvalidError, seq=file.parsed.from_seq),
        (
            not any(columns.equals(each) for each in allowed),
            f"{file.name} does not have the columns that it must",
        ),
        (
            {metadata.num_rows, sum(rows)} != {file.rows},
            f"{file.name} does not have the {file.rows} rows that its manifest names",
        ),
        (
            is_any_odd or any(not 1 <= each <= rows_max for each in rows),
            f"{file.name} has a row group of a size that none may have",
        ),
        (not is_ours or unpacked_bytes > GROUP_UNPACKED_BYTES_MAX, f"{file.name} unpacks to more than it may"),
    )


def _plain(field: pa.Field) -> pa.Field:
    """The field without the dictionary that it was read with."""
    return pa.field(field.name, field.type.value_type, field.nullable) if pa.types.is_dictionary(field.type) else field
