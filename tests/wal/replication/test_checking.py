"""Batches from elsewhere are taken whole and sound or not at all, and C judges as Python does."""

from __future__ import annotations

import struct
from zlib import crc32

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ledger.errors import InvalidInputError
from ledger.hlc import node_hash
from tests.wal.logs import NODE
from tests.wal.replication.quorums import batch
from tests.wal.test_native import IS_BUILT
from wal import native
from wal.format import BATCH, BATCH_RECORD_BYTES, RECORD, RECORD_HEADER_BYTES
from wal.replication.checking import check_batches, check_each

HASH = node_hash(NODE)
RIGHT = 6
"""One in so many fields is drawn wrong."""


def seldom(right: int, *wrong: int) -> st.SearchStrategy[int]:
    return st.sampled_from([right] * RIGHT * max(1, len(wrong)) + list(wrong))


def summed(record: bytes, is_right: bool) -> bytes:
    return struct.pack(">I", crc32(record[4:]) ^ (not is_right)) + record[4:]


@st.composite
def records(draw: st.DrawFn, lsn: int) -> bytes:
    payload = draw(st.binary(max_size=40))
    length = draw(seldom(RECORD_HEADER_BYTES + len(payload), 0, 33, RECORD_HEADER_BYTES + len(payload) + 1, 2**32 - 1))
    hashed = draw(st.sampled_from([HASH] * 30 + [b"else"]))
    fields = (0, length, draw(seldom(lsn, lsn + 1, 0)), draw(st.integers(0, 9)), 0, hashed)
    record = RECORD.pack(*fields, draw(seldom(0, 1)), draw(seldom(1, 16, 255))) + payload
    return summed(record, bool(draw(seldom(1, 0))))


@st.composite
def wire(draw: st.DrawFn) -> tuple[bytes, int]:
    first_lsn = lsn = draw(st.sampled_from([1, 7, 2**62, 2**63 - 2]))
    data = b""
    for _ in range(draw(st.integers(0, 3))):
        count = draw(st.integers(1, 3))
        drawn = [draw(records(lsn + number)) for number in range(count)]
        body = b"".join(drawn)
        last_hlc = bytearray(drawn[-1][16:32])
        last_hlc[7] ^= draw(seldom(0, 1))
        head = BATCH.pack(
            0,
            draw(seldom(BATCH_RECORD_BYTES, 34)),
            draw(seldom(lsn, lsn + 1)) % 2**64,
            bytes(last_hlc),
            draw(seldom(0, 1)),
            draw(seldom(16, 1)),
            draw(seldom(lsn, 0, lsn + 1)) % 2**64,
            draw(seldom(lsn + count - 1, lsn + count, lsn - 1, 2**64 - 1)) % 2**64,
            draw(seldom(len(body), len(body) - 1, len(body) + 1, 2**32 - 1)) % 2**32,
            crc32(body) ^ draw(seldom(0, 1)),
        )
        data += summed(head, bool(draw(seldom(1, 0)))) + body
        lsn += count
    cut = draw(seldom(0, 1, 30))
    return data[: len(data) - cut], draw(seldom(first_lsn, first_lsn + 1))


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
