"""Batches from elsewhere are taken whole and sound or not at all, and C judges as Python does."""

from __future__ import annotations

import struct
from typing import Any
from zlib import crc32

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ledger.errors import InvalidInputError
from ledger.hlc import node_hash
from tests.conftest import EXAMPLES
from tests.wal.logs import NODE
from tests.wal.replication.quorums import batch
from tests.wal.test_native import IS_BUILT
from wal import native
from wal.format import BATCH, BATCH_RECORD_BYTES, RECORD, RECORD_HEADER_BYTES
from wal.reader import check_batches, check_each

HASH = node_hash(NODE)
FIELDS = (
    "nothing", "crc", "length", "lsn", "hash", "state", "type",
    "batch crc", "batch length", "batch lsn", "batch state", "batch type", "batch hlc",
    "first", "last", "bytes", "body crc", "cut", "begin",
)  # fmt: skip
"""One of these is wrong in what is drawn, in one place or in each."""


def summed(record: bytes, wrong: int) -> bytes:
    return struct.pack(">I", crc32(record[4:]) ^ wrong) + record[4:]


class Drawn:
    """Values of fields: right ones, but in the one field."""

    def __init__(self, draw: st.DrawFn) -> None:
        self.draw = draw
        self._wrong = draw(st.sampled_from(FIELDS))

    def __call__(self, field: str, right: Any, *wrong: Any) -> Any:
        return self.draw(st.sampled_from((right, *wrong))) if field == self._wrong else right


def record_of(drawn: Drawn, lsn: int) -> bytes:
    payload = drawn.draw(st.binary(max_size=40))
    whole = RECORD_HEADER_BYTES + len(payload)
    record = RECORD.pack(
        0,
        drawn("length", whole, 0, 33, whole - 1, whole + 1, 2**32 - 1),
        drawn("lsn", lsn, lsn + 1, 0),
        drawn.draw(st.integers(0, 9)),
        0,
        drawn("hash", HASH, b"else"),
        drawn("state", 0, 1),
        drawn("type", 1, 16, 255),
    )
    return summed(record + payload, drawn("crc", 0, 1))


@st.composite
def wire(draw: st.DrawFn) -> tuple[bytes, int]:
    drawn = Drawn(draw)
    first_lsn = lsn = draw(st.sampled_from([1, 7, 2**62, 2**63 - 2]))
    data = b""
    for _ in range(draw(st.integers(0, 3))):
        count = draw(st.integers(1, 3))
        records = [record_of(drawn, lsn + number) for number in range(count)]
        body = b"".join(records)
        hlc = records[-1][16:32]
        head = BATCH.pack(
            0,
            drawn("batch length", BATCH_RECORD_BYTES, 34),
            drawn("batch lsn", lsn, lsn + 1),
            drawn("batch hlc", hlc, bytes(12) + hlc[12:], hlc[:12] + b"else"),
            drawn("batch state", 0, 1),
            drawn("batch type", 16, 1),
            drawn("first", lsn, 0, lsn + 1),
            drawn("last", lsn + count - 1, lsn + count, lsn - 1, 2**63, 2**64 - 1),
            drawn("bytes", len(body), len(body) - 1, len(body) + 1, 0, 2**32 - 1),
            drawn("body crc", crc32(body), crc32(body) ^ 1),
        )
        data += summed(head, drawn("batch crc", 0, 1)) + body
        lsn += count
    return data[: len(data) - drawn("cut", 0, 1, 30)], drawn("begin", first_lsn, first_lsn + 1)


@settings(max_examples=4 * EXAMPLES)
@given(wire())
def test_c_takes_what_python_takes_and_nothing_else(drawn: tuple[bytes, int]) -> None:
    data, first_lsn = drawn
    try:
        expected = check_each(data, first_lsn, NODE)
    except InvalidInputError:
        expected = None
    found = native.check_batches(data, first_lsn, HASH)
    assert found == expected if IS_BUILT and expected != 0 else found is None
    assert native.check_batches(memoryview(b"x" + data)[1:], first_lsn, HASH) == found


def test_what_is_sound_is_judged_by_c_alone_where_it_is_built() -> None:
    data = batch(5, 9) + batch(10, 10)
    assert native.check_batches(data, 5, HASH) == (10 if IS_BUILT else None)
    for at in range(len(data)):
        damaged = bytearray(data)
        damaged[at] ^= 1
        assert native.check_batches(damaged, 5, HASH) is None
        assert native.check_batches(data[:at], 5, HASH) in (None, 9 if at else 4)


def test_what_is_wrong_is_said_with_its_place() -> None:
    data = bytearray(batch(1, 3))
    data[-1] ^= 1
    with pytest.raises(InvalidInputError, match="CRC of the batch does not match"):
        check_batches(data, 1, NODE)
    with pytest.raises(InvalidInputError, match="begins with LSN 1 where 2 should be"):
        check_batches(batch(1, 3), 2, NODE)
    with pytest.raises(InvalidInputError, match="HLC of the record is not of node other"):
        check_batches(batch(1, 3), 1, "other")
