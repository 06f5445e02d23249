"""Bytes of the WAL: the documented example, and that nothing damaged or contradictory passes."""

from __future__ import annotations

import re
from pathlib import Path
from zlib import crc32

import pytest
from hypothesis import given
from hypothesis import strategies as st

import wal.format
from ledger.hlc import Hlc
from tests.wal.logs import NODE, WAL_ID, LogWriter, hlc_of, payload_of
from wal.format import (
    BATCH_RECORD_BYTES,
    RECORD_HEADER_BYTES,
    SEGMENT_HEADER_BYTES,
    BatchRecord,
    FormatError,
    SegmentHeader,
    check_record,
    decode_batch,
    decode_segment_header,
    encode_batch,
    encode_record,
    encode_segment_header,
)

HEADER = SegmentHeader(NODE, WAL_ID, 3, 17, 16)


def documented_example() -> bytes:
    """The hex of the worked example in the docstring of ``wal.format``."""
    example = (wal.format.__doc__ or "").split("Worked example")[1].split("Invariants")[0]
    lines = [re.match(r"((?:[0-9a-f]{2,}\s)+)", line.strip() + " ") for line in example.splitlines()[2:]]
    return bytes.fromhex("".join(match[1] for match in lines if match))


def test_the_worked_example_is_what_is_written() -> None:
    record = encode_record(1, Hlc(5, 0, "a").pack(), 1, b"{}")
    opening = encode_batch(BatchRecord(1, 1, Hlc(5, 0, "a").pack(), len(record), crc32(record)))
    assert documented_example() == opening + record


def test_the_writer_writes_the_same_bytes_as_the_plain_encoders(tmp_path: Path) -> None:
    with LogWriter(tmp_path) as log:
        log.batches([1, 3])
    bodies = [[1], [2, 3, 4]]
    expected = encode_segment_header(SegmentHeader(NODE, WAL_ID, 1, 1, 0))
    for lsns in bodies:
        body = b"".join(encode_record(lsn, hlc_of(lsn).pack(), 1, payload_of(lsn)) for lsn in lsns)
        expected += encode_batch(BatchRecord(lsns[0], lsns[-1], hlc_of(lsns[-1]).pack(), len(body), crc32(body))) + body
    (segment,) = tmp_path.glob("*.wal")
    assert segment.read_bytes() == expected


@given(
    st.from_regex(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", fullmatch=True),
    st.binary(min_size=16, max_size=16),
    st.integers(1, 2**63 - 1),
    st.integers(1, 2**62),
    st.integers(0, 2**20),
)
def test_segment_headers_come_back_as_they_were(node: str, wal_id: bytes, epoch: int, base: int, gap: int) -> None:
    header = SegmentHeader(node, wal_id.hex(), epoch, base + gap, base - 1)
    assert decode_segment_header(encode_segment_header(header)) == header


@pytest.mark.parametrize("at", range(SEGMENT_HEADER_BYTES))
def test_no_changed_byte_of_a_segment_header_passes(at: int) -> None:
    data = bytearray(encode_segment_header(HEADER))
    data[at] ^= 1
    with pytest.raises(FormatError):
        decode_segment_header(bytes(data))


def test_a_segment_header_cut_short_is_refused() -> None:
    data = encode_segment_header(HEADER)
    for size in range(SEGMENT_HEADER_BYTES):
        with pytest.raises(FormatError):
            decode_segment_header(data[:size])


@given(
    first=st.integers(1, 2**62),
    count=st.integers(1, 1000),
    payload_bytes=st.integers(0, 10_000),
    body_crc=st.integers(0, 2**32 - 1),
)
def test_batch_records_come_back_as_they_were(first: int, count: int, payload_bytes: int, body_crc: int) -> None:
    size = count * RECORD_HEADER_BYTES + payload_bytes
    batch = BatchRecord(first, first + count - 1, hlc_of(first).pack(), size, body_crc)
    data = b"\xff" * 7 + encode_batch(batch)
    assert decode_batch(data, 7, len(data)) == batch


@pytest.mark.parametrize("at", range(BATCH_RECORD_BYTES))
def test_no_changed_byte_of_a_batch_record_passes(at: int) -> None:
    data = bytearray(encode_batch(BatchRecord(5, 6, hlc_of(6).pack(), 100, 7)))
    data[at] ^= 0x40
    with pytest.raises(FormatError):
        decode_batch(data, 0, len(data))


@pytest.mark.parametrize(
    "batch",
    [
        BatchRecord(0, 0, hlc_of(1).pack(), 100, 7),
        BatchRecord(6, 5, hlc_of(1).pack(), 100, 7),
        BatchRecord(5, 8, hlc_of(1).pack(), 4 * RECORD_HEADER_BYTES - 1, 7),
        BatchRecord(5, 5, hlc_of(1).pack(), wal.format.BATCH_BODY_BYTES_LIMIT + 1, 7),
    ],
    ids=["no-lsn", "backwards", "too-small-for-its-records", "over-the-limit"],
)
def test_a_batch_record_that_contradicts_itself_is_refused(batch: BatchRecord) -> None:
    data = encode_batch(batch)
    with pytest.raises(FormatError, match="contradicts"):
        decode_batch(data, 0, len(data))


def test_a_record_is_held_to_its_place() -> None:
    record = encode_record(9, hlc_of(9).pack(), 1, b"abc")

    def check(data: bytes, *, lsn: int = 9, node_id: str = NODE, available: int | None = None) -> int:
        return check_record(data, 0, lsn=lsn, node_id=node_id, available=len(data) if available is None else available)

    assert check(record) == len(record)
    with pytest.raises(FormatError, match="LSN 9 where 8"):
        check(record, lsn=8)
    with pytest.raises(FormatError, match="not of node b"):
        check(record, node_id="b")
    with pytest.raises(FormatError, match="cut short"):
        check(record, available=len(record) - 1)
    with pytest.raises(FormatError, match="out of bounds"):
        check(record[:4] + b"\xff\xff\xff\xff" + record[8:])
    with pytest.raises(FormatError, match="does not belong inside a batch"):
        check(encode_record(9, hlc_of(9).pack(), wal.format.BATCH_RECORD_TYPE, b""))
    for at in range(len(record)):
        with pytest.raises(FormatError):
            check(record[:at] + bytes((record[at] ^ 0x80,)) + record[at + 1 :])
