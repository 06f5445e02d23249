"""The bytes of a WAL segment.

A segment is one header and then batches. A batch is one BATCH record and then the records it announces.
All integers are big-endian; CRC32 is that of zlib.

Segment header, 120 bytes::

    magic 8 B "TALLYWAL" | version u16 = 1 | node_id length u16 | node_id 64 B, zero-padded | wal_id 16 B
    | epoch u64 | base_lsn u64 | previous_lsn u64 | crc32 u32 over all before it

Record, a header of 34 bytes and a payload::

    crc32 u32 | length u32 | lsn u64 | hlc 16 B | state u8 | type u8 | payload

``crc32`` covers everything after itself, ``length`` is the whole record, ``hlc`` is the packed form of
``ledger.hlc``, ``state`` is PENDING = 0, the state at the time of writing; it is never patched.

BATCH record, type 16, takes no LSN: its ``lsn`` is that of the first record of its batch, its ``hlc``
that of the last. Its payload, 24 bytes::

    first_lsn u64 | last_lsn u64 | body_bytes u32 | body_crc32 u32

``body`` is everything up to the next BATCH record; one CRC over it lets recovery check a batch at the
speed of the CRC. After the last batch a segment may hold zeros up to its end: preallocated space.

RETURNED record, type 33: a record of this node that lost its place in the log, appended again. Its payload::

    hlc physical u64 | hlc logical u32 | type u8 | payload of that record

Worked example: node ``a``, one record, LSN 1, HLC 5:0:a, type 1, payload ``{}``::

    1ac35ab9 0000003a 0000000000000001 0000000000000005 00000000 ca978112 00 10     BATCH, LSN 1
             0000000000000001 0000000000000001 00000024 e6e446df                    1 to 1, 36 bytes
    f709cce3 00000024 0000000000000001 0000000000000005 00000000 ca978112 00 01 7b7d

Invariants::

    RECORD_HEADER_BYTES <= length <= RECORD_BYTES_LIMIT
    1 <= first_lsn <= last_lsn
    (last_lsn - first_lsn + 1) * RECORD_HEADER_BYTES <= body_bytes <= BATCH_BODY_BYTES_LIMIT
    previous_lsn < base_lsn    and base_lsn == previous_lsn + 1 inside one epoch
"""

from __future__ import annotations

import struct
from typing import NamedTuple
from zlib import crc32

from ledger.errors import WalError, refuse
from ledger.facts.events import BATCH_RECORD_TYPE
from ledger.hlc import Hlc, node_hash, unpack16
from ledger.positions import Epoch, Lsn

SEGMENT_MAGIC = b"TALLYWAL"
SEGMENT_VERSION = 1
NODE_ID_BYTES_MAX = 64
WAL_ID_BYTES = 16

RECORD_BYTES_LIMIT = 16 << 20
"""No record is larger, whatever the settings are; a reader checks a length against this before it reads the record."""

BATCH_BODY_BYTES_LIMIT = 64 << 20
"""No batch body is larger, whatever the settings are."""

LSN_LIMIT = 2**63 - 1
"""Largest LSN: the largest PostgreSQL ``bigint``."""

_SEGMENT = struct.Struct(f">8sHH{NODE_ID_BYTES_MAX}s{WAL_ID_BYTES}sQQQ")
CRC = struct.Struct(">I")
_RETURNED = struct.Struct(">QIB")
RECORD = struct.Struct(">IIQQI4sBB")
"""crc32, length, lsn, hlc physical, hlc logical, node hash, state, type."""
BATCH = struct.Struct(">IIQ16sBBQQII")
"""crc32, length, lsn, packed hlc, state, type, first_lsn, last_lsn, body_bytes, body_crc32."""

SEGMENT_HEADER_BYTES = _SEGMENT.size + CRC.size
RECORD_HEADER_BYTES = RECORD.size
BATCH_RECORD_BYTES = BATCH.size
CRC_BYTES = CRC.size
HLC_AT = slice(16, 32)
"""Where the packed HLC is in a record."""
NODE_HASH_AT = slice(12, 16)
"""Where the hash of the node's name is in a packed HLC."""

assert SEGMENT_HEADER_BYTES == 120
assert RECORD_HEADER_BYTES == 34
assert BATCH_RECORD_BYTES == 58
assert RECORD_BYTES_LIMIT <= BATCH_BODY_BYTES_LIMIT < 2**32


QueuedRecord = tuple[Hlc, int, bytes]
"""HLC, type and payload of a record to be written; its LSN follows from its place in the queue."""


PENDING = 0
"""The only state that is written; any other is read as damage. Later states follow from the positions of the log."""


class FormatError(WalError):
    """Bytes are not of this format; the text has the reason. Readers of segments add segment and offset."""


class SegmentHeader(NamedTuple):
    """The header of a segment. ``wal_id`` is 32 hex digits.

    ``previous_lsn`` is the last LSN of the log when the segment was created, 0 for none: it reveals a
    missing segment even if a new epoch skipped LSNs.
    """

    node_id: str
    wal_id: str
    epoch: Epoch
    base_lsn: Lsn
    previous_lsn: Lsn


class BatchRecord(NamedTuple):
    """The content of a BATCH record. ``hlc`` is the packed HLC of the last record."""

    first_lsn: Lsn
    last_lsn: Lsn
    hlc: bytes
    body_bytes: int
    body_crc32: int


def encode_segment_header(header: SegmentHeader) -> bytes:
    """The first ``SEGMENT_HEADER_BYTES`` bytes of a segment."""
    node = header.node_id.encode()
    assert 1 <= len(node) <= NODE_ID_BYTES_MAX
    assert 0 <= header.previous_lsn < header.base_lsn <= LSN_LIMIT
    fields = _SEGMENT.pack(
        SEGMENT_MAGIC,
        SEGMENT_VERSION,
        len(node),
        node,
        bytes.fromhex(header.wal_id),
        header.epoch,
        header.base_lsn,
        header.previous_lsn,
    )
    return fields + CRC.pack(crc32(fields))


def decode_segment_header(data: bytes) -> SegmentHeader:
    """The header at the start of ``data``.

    Raises:
        FormatError: ``data`` is short, of another format or version, or damaged.
    """
    if len(data) < SEGMENT_HEADER_BYTES:
        raise FormatError(f"the segment header is cut short at {len(data)} of {SEGMENT_HEADER_BYTES} bytes")
    magic, version, node_bytes, node, wal_id, epoch, base_lsn, previous_lsn = _SEGMENT.unpack_from(data)
    is_damaged = CRC.unpack_from(data, _SEGMENT.size)[0] != crc32(data[: _SEGMENT.size])
    is_consistent = 1 <= node_bytes <= NODE_ID_BYTES_MAX and previous_lsn < base_lsn <= LSN_LIMIT
    refuse(
        FormatError,
        (magic != SEGMENT_MAGIC, f"the segment header does not begin with {SEGMENT_MAGIC.decode()}"),
        (is_damaged, "the CRC of the segment header does not match"),
        (version != SEGMENT_VERSION, f"segment version {version} is not known, only {SEGMENT_VERSION}"),
        (not is_consistent, "the segment header contradicts itself"),
    )
    return SegmentHeader(node[:node_bytes].decode(), wal_id.hex(), Epoch(epoch), Lsn(base_lsn), Lsn(previous_lsn))


def encode_record(lsn: Lsn, hlc: bytes, record_type: int, payload: bytes) -> bytes:
    """One record, PENDING, with its packed HLC."""
    tail = struct.pack(">IQ16sBB", RECORD_HEADER_BYTES + len(payload), lsn, hlc, PENDING, record_type)
    return CRC.pack(crc32(payload, crc32(tail))) + tail + payload


def encode_returned(hlc: Hlc, record_type: int, payload: bytes) -> bytes:
    """The payload of a RETURNED record: HLC, type and payload of a record that this node appends again."""
    return _RETURNED.pack(hlc.physical_ms, hlc.logical, record_type) + payload


def decode_returned(payload: bytes, node_id: str) -> QueuedRecord:
    """HLC, type and payload of the record that is appended again.

    Raises:
        FormatError: it is cut short.
    """
    if len(payload) < _RETURNED.size:
        raise FormatError("a RETURNED record is cut short")
    physical_ms, logical, record_type = _RETURNED.unpack_from(payload)
    return Hlc(physical_ms, logical, node_id), record_type, payload[_RETURNED.size :]


def batch_of(first_lsn: Lsn, last_lsn: Lsn, hlc: bytes, body: bytes) -> BatchRecord:
    """The BATCH record of ``body``, the records ``first_lsn`` to ``last_lsn``; ``hlc`` is the last one's, packed."""
    return BatchRecord(first_lsn, last_lsn, hlc, len(body), crc32(body))


def encode_batch(batch: BatchRecord) -> bytes:
    """The BATCH record that opens a batch."""
    payload = struct.pack(">QQII", batch.first_lsn, batch.last_lsn, batch.body_bytes, batch.body_crc32)
    return encode_record(batch.first_lsn, batch.hlc, BATCH_RECORD_TYPE, payload)


def decode_batch(data: bytes | bytearray, at: int, end: int) -> BatchRecord:
    """The BATCH record at ``at``; bytes of ``data`` from ``end`` on are ignored.

    Raises:
        FormatError: it is missing or damaged, or contradicts itself.
    """
    if end - at < BATCH_RECORD_BYTES:
        raise FormatError("the BATCH record is cut short")
    crc, length, lsn, hlc, state, kind, first, last, body_bytes, body_crc32 = BATCH.unpack_from(data, at)
    is_batch = (length, kind, state) == (BATCH_RECORD_BYTES, BATCH_RECORD_TYPE, PENDING)
    is_damaged = crc != crc32(memoryview(data)[at + CRC_BYTES : at + BATCH_RECORD_BYTES])
    is_consistent = (
        1 <= lsn == first <= last <= LSN_LIMIT
        and (last - first + 1) * RECORD_HEADER_BYTES <= body_bytes <= BATCH_BODY_BYTES_LIMIT
    )
    refuse(
        FormatError,
        (not is_batch, "a BATCH record should stand here"),
        (is_damaged, "the CRC of the BATCH record does not match"),
        (not is_consistent, "the BATCH record contradicts itself"),
    )
    return BatchRecord(first, last, hlc, body_bytes, body_crc32)


def hlc_of(packed: bytes, node_id: str) -> Hlc:
    """The HLC of this node in its packed form."""
    return Hlc(*unpack16(packed)[:2], node_id)


def check_record(data: bytes, at: int, *, lsn: Lsn, node_id: str, available: int) -> int:
    """Length of the record at ``at``, which must be sound and have this LSN and an HLC of this node.

    ``available`` is the number of bytes of its batch from ``at`` on.

    Raises:
        FormatError: the record fails a check.
    """
    if available < RECORD_HEADER_BYTES:
        raise FormatError("the record is cut short")
    crc, length, found_lsn, _, _, hashed, state, kind = RECORD.unpack_from(data, at)
    is_bounded = RECORD_HEADER_BYTES <= length <= RECORD_BYTES_LIMIT
    is_damaged = crc != crc32(memoryview(data)[at + CRC_BYTES : at + length])
    is_strange = kind == BATCH_RECORD_TYPE or state != PENDING
    refuse(
        FormatError,
        (not is_bounded, f"a record of {length} bytes is out of bounds"),
        (length > available, f"the record is cut short: {length} bytes long, {available} there"),
        (is_damaged, "the CRC of the record does not match"),
        (found_lsn != lsn, f"the record has LSN {found_lsn} where {lsn} should stand"),
        (is_strange, f"a record of type {kind}, state {state} does not belong inside a batch"),
        (hashed != node_hash(node_id), f"the HLC of the record is not of node {node_id}"),
    )
    return int(length)
