"""Arrow batches of entries judged column by column, without a Python object for each value.

A batch in which everything is as it must be costs two hashes a row and some arithmetic over its buffers. In any other
batch something is wrong, or it begins a chain, or has links of version 1: its rows go to
``ledger.verification.entry_check``, which says what. Both judge alike, which a property test says.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from typing import Any, Final, overload

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ledger.chain import Linker
from ledger.merkle import HASH_BYTES
from ledger.verification import ENTRY_COLUMNS
from ledger.verification.entry_check import EntryChecker
from ledger.verification.range_check import RangeChecker
from ledger.verification.verdict import Head
from pipeline.arrow import INTEGERS, lists_of

_LINK_DIGITS: Final = 2 * HASH_BYTES
_LENGTH: Final = np.dtype(">u4")
_LINK_LENGTH: Final = np.frombuffer(HASH_BYTES.to_bytes(4), np.uint8)
_MAY_BE_NULL: Final = frozenset(("prev_chain_link", "origin"))
_NOTHING: Final = pa.scalar(b"", pa.binary())


def check_batch(checker: RangeChecker, batch: pa.RecordBatch) -> None:
    """Take the next rows of a range, at least one, by ``ENTRY_COLUMNS``."""
    first = batch.slice(0, 1)
    entries = checker.entries([column[0].as_py() for column in first.columns])
    if entries.last_link is None and batch.num_rows > 1:
        # The first entry of a chain names none before it.
        check_batch(checker, first)
        batch = batch.slice(1)
    links = _links_when_in_order(entries, batch)
    if links is None:
        checker.check_columns(lists_of(batch))
        return
    seq, hlc, link = (batch.column(at)[-1].as_py() for at in (0, 1, 9))
    checker.take(entries.pass_over(links, _Texts(batch.column(1)), link), Head(seq, link, hlc))


class _Texts(Sequence[Any]):
    """A column of which few values are asked for."""

    def __init__(self, column: pa.Array) -> None:
        self._column = column

    def __len__(self) -> int:
        return len(self._column)

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Any]: ...
    def __getitem__(self, index: int | slice) -> Any:
        found = self._column[index]
        return found.to_pylist() if isinstance(index, slice) else found.as_py()


def _links_when_in_order(entries: EntryChecker, batch: pa.RecordBatch) -> list[bytes] | None:
    """The raw links of the rows, None when anything at all is wrong with them or has version 1."""
    if not _are_well_formed(batch):
        return None
    seq, hlc, physical, logical, node, job, action, version, prev, stored, digest, payload, origin = batch.columns
    count, next_seq, last_link = batch.num_rows, entries.next_seq, entries.last_link
    # 1. What compares without hashing.
    spelt = pc.binary_join_element_wise(physical.cast(pa.string()), logical.cast(pa.string()), node, ":")
    if (
        not np.array_equal(seq.to_numpy(), np.arange(next_seq, next_seq + count))
        or not pc.all(pc.equal(version, 2)).as_py()
        or not entries.is_prev_known
        or prev.null_count
        or prev[0].as_py() != last_link
        or not prev[1:].equals(stored[:-1])
        or not spelt.equals(hlc)
    ):
        return None
    # 2. Payloads.
    digests = [sha256(text).digest() for text in payload.cast(pa.binary()).to_pylist()]
    raw_digests = b"".join(digests)
    if raw_digests.hex().encode() != _digits(digest):
        return None
    # 3. Links. That what is stored follows one another is known from 1.
    spelt_links = _digits(stored)
    raw_links = _raw(spelt_links, count)
    raw_last = _raw(last_link.encode(), 1) if isinstance(last_link, str) else None
    if raw_links is None or raw_last is None or raw_last.hex() != last_link:
        return None
    fields = _fields(seq, hlc, job, action, raw_last + raw_links[:-HASH_BYTES], raw_digests, origin)
    prefix = pa.scalar(Linker(entries.tenant_id).prefix, pa.binary())
    links = [sha256(data).digest() for data in pc.binary_join_element_wise(prefix, *fields, _NOTHING).to_pylist()]
    return links if b"".join(links) == raw_links and raw_links.hex().encode() == spelt_links else None


def _are_well_formed(batch: pa.RecordBatch) -> bool:
    return all(
        (pa.types.is_signed_integer(column.type) if name in INTEGERS else column.type == pa.string())
        and (name in _MAY_BE_NULL or not column.null_count)
        for name, column in zip(ENTRY_COLUMNS, batch.columns, strict=True)
    )


def _digits(column: pa.StringArray) -> bytes:
    """The texts of a column one after the other, nothing unless each is as long as a hash is in hex."""
    offsets = np.frombuffer(column.buffers()[1], np.int32)[column.offset : column.offset + len(column) + 1]
    if not (np.diff(offsets) == _LINK_DIGITS).all():
        return b""
    return bytes(column.buffers()[2][int(offsets[0]) : int(offsets[-1])])


def _raw(digits: bytes, count: int) -> bytes | None:
    """The ``count`` hashes that ``digits`` spell, None where they spell none; how they are spelt is not judged."""
    try:
        raw = bytes.fromhex(digits.decode())
    except ValueError:
        return None
    return raw if len(raw) == count * HASH_BYTES else None


def _fields(
    seq: pa.Array, hlc: pa.Array, job: pa.Array, action: pa.Array, prevs: bytes, digests: bytes, origin: pa.Array
) -> list[pa.Array]:
    """What a link of version 2 hashes behind the tenant, as :mod:`ledger.chain` has it, field by field."""
    count = len(seq)
    seqs = np.empty(count, [("length", _LENGTH), ("seq", ">u8"), ("hlc_length", _LENGTH)])
    seqs["length"], seqs["seq"], seqs["hlc_length"] = 8, seq.to_numpy(), _lengths(hlc)
    hashes = np.empty((count, 2 * (4 + HASH_BYTES)), np.uint8)
    for at, raw in ((0, prevs), (4 + HASH_BYTES, digests)):
        hashes[:, at : at + 4] = _LINK_LENGTH
        hashes[:, at + 4 : at + 4 + HASH_BYTES] = np.frombuffer(raw, np.uint8).reshape(count, HASH_BYTES)
    source = pc.fill_null(origin, "")
    return [
        _of_width(seqs),
        hlc.cast(pa.binary()),
        _of_width(_lengths(job)),
        job.cast(pa.binary()),
        _of_width(_lengths(action)),
        action.cast(pa.binary()),
        _of_width(hashes),
        _of_width(_lengths(source)),
        source.cast(pa.binary()),
    ]


def _lengths(column: pa.Array) -> np.ndarray[Any, Any]:
    lengths: np.ndarray[Any, Any] = pc.binary_length(column).to_numpy(zero_copy_only=False)
    return lengths.astype(_LENGTH)


def _of_width(rows: np.ndarray[Any, Any]) -> pa.Array:
    """Each row of ``rows`` as the bytes it is made of."""
    width = rows.nbytes // len(rows)
    offsets = np.arange(0, rows.nbytes + 1, width, dtype=np.int32)
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(np.ascontiguousarray(rows).view(np.uint8).reshape(-1))]
    return pa.Array.from_buffers(pa.binary(), len(rows), buffers)
