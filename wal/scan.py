"""Reading one segment from its first byte to its last sound batch, in bounded memory, changing nothing.

The scan checks the CRC of every BATCH record, that each batch begins where the one before it ended,
and the CRC of every body. Only a body that fails, and the last one, are walked record by record.
The announced range of every other batch is held to by the BATCH record after it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import NamedTuple
from zlib import crc32

from ledger.hlc import node_hash
from ledger.machines.events import BATCH_RECORD_TYPE
from ledger.positions import Lsn
from wal.format import (
    BATCH,
    BATCH_BODY_BYTES_LIMIT,
    BATCH_RECORD_BYTES,
    CRC_BYTES,
    LSN_LIMIT,
    PENDING,
    RECORD_HEADER_BYTES,
    SEGMENT_HEADER_BYTES,
    BatchRecord,
    FormatError,
    check_record,
    decode_batch,
    node_of,
)

WINDOW_BYTES = 4 << 20
"""What is read at once. A scan holds one of these and, for a damaged or last batch, its body."""

_ZEROS = bytes(WINDOW_BYTES)
_BATCH_LENGTH = BATCH_RECORD_BYTES.to_bytes(4, "big")
_LENGTH_AT = 4


class Damage(NamedTuple):
    """The first thing wrong in a segment: the record at ``offset``, which should have had ``lsn``.

    ``batch`` is what the BATCH record at ``batch_offset`` announces, None when that record is the bad one;
    then ``batch_offset == offset``. ``sound_hlc`` is the packed HLC of the batch's last sound record, if any.
    """

    offset: int
    lsn: Lsn
    reason: str
    batch_offset: int
    batch: BatchRecord | None = None
    sound_hlc: bytes | None = None

    @property
    def survivors(self) -> int:
        """Sound records of the batch, before the bad one."""
        return 0 if self.batch is None else self.lsn - self.batch.first_lsn


class SegmentScan(NamedTuple):
    """One segment: sound up to ``end``, its last sound LSN ``last_lsn``, and what is wrong behind it.

    ``last_batch_offset`` and ``highest_hlc`` (packed) are those of the last sound batch, None without one
    or where it is not known.
    """

    end: int
    last_lsn: Lsn
    batches: int
    last_batch_offset: int | None
    highest_hlc: bytes | None
    damage: Damage | None


def scan_segment(descriptor: int, next_lsn: Lsn, node_id: str) -> SegmentScan:
    """Scan the segment open as ``descriptor``, whose first record must have ``next_lsn``.

    Raises:
        OSError: the file cannot be read.
    """
    window = memoryview(bytearray(WINDOW_BYTES))
    offset = SEGMENT_HEADER_BYTES
    batches = 0
    last_offset: int | None = None
    damage: Damage | None = None
    while filled := os.preadv(descriptor, (window,), offset):
        run = _sound_run(window[:filled], next_lsn)
        if run.batches == 0:
            # Longer than the window, or damaged, or the end.
            batch, damage = _check_batch(descriptor, offset, next_lsn, node_id)
            if batch is None:
                break
            run = _Run(1, 0, BATCH_RECORD_BYTES + batch.body_bytes, Lsn(batch.last_lsn + 1))
        batches += run.batches
        last_offset = offset + run.last_at
        offset += run.end
        next_lsn = run.next_lsn
    if last_offset is None:
        return SegmentScan(offset, Lsn(next_lsn - 1), batches, None, None, damage)
    last = decode_batch(os.pread(descriptor, BATCH_RECORD_BYTES, last_offset), 0, BATCH_RECORD_BYTES)
    if damage is None:
        damage = find_bad_record(descriptor, last_offset, last, node_id)
        if damage is not None:
            return SegmentScan(last_offset, Lsn(last.first_lsn - 1), batches - 1, None, None, damage)
    return SegmentScan(offset, Lsn(next_lsn - 1), batches, last_offset, last.hlc, damage)


class _Run(NamedTuple):
    """Sound batches one behind the other: the last begins at ``last_at``, the run ends at ``end``."""

    batches: int
    last_at: int
    end: int
    next_lsn: Lsn


def _sound_run(data: memoryview, first_lsn: Lsn) -> _Run:
    """The sound batches that lie whole in ``data``, from its start on.

    Asks of each what ``_check_batch`` asks, in the order that is fastest for a batch that passes.
    """
    at = last_at = batches = 0
    next_lsn: int = first_lsn
    end = len(data)
    unpack = BATCH.unpack_from
    while end - at >= BATCH_RECORD_BYTES:
        crc, length, lsn, _, state, kind, first, last, body_bytes, body_crc32 = unpack(data, at)
        body_at = at + BATCH_RECORD_BYTES
        behind = body_at + body_bytes
        if (
            behind > end
            or crc32(data[at + CRC_BYTES : body_at]) != crc
            or crc32(data[body_at:behind]) != body_crc32
            or not lsn == first == next_lsn <= last <= LSN_LIMIT
            or not (last - first + 1) * RECORD_HEADER_BYTES <= body_bytes <= BATCH_BODY_BYTES_LIMIT
            or length != BATCH_RECORD_BYTES
            or kind != BATCH_RECORD_TYPE
            or state != PENDING
        ):
            break
        batches += 1
        last_at = at
        at = behind
        next_lsn = last + 1
    return _Run(batches, last_at, at, Lsn(next_lsn))


def _check_batch(descriptor: int, offset: int, next_lsn: Lsn, node_id: str) -> tuple[BatchRecord | None, Damage | None]:
    """The batch at ``offset`` when it is sound, else what is wrong with it; neither at the end of the segment."""
    data = os.pread(descriptor, BATCH_RECORD_BYTES, offset)
    try:
        batch = decode_batch(data, 0, len(data))
        if batch.first_lsn != next_lsn:
            raise FormatError(f"a batch begins with LSN {batch.first_lsn} where {next_lsn} should be")
    except FormatError as error:
        if end_of_data(descriptor, offset) == offset:
            return None, None
        return None, Damage(offset, next_lsn, str(error), offset)
    crc = 0
    left = batch.body_bytes
    at = offset + BATCH_RECORD_BYTES
    while left and (part := os.pread(descriptor, min(left, WINDOW_BYTES), at)):
        crc = crc32(part, crc)
        left -= len(part)
        at += len(part)
    if left or crc != batch.body_crc32:
        return None, find_bad_record(descriptor, offset, batch, node_id)
    return batch, None


def find_bad_record(descriptor: int, offset: int, batch: BatchRecord, node_id: str) -> Damage | None:
    """Walk the batch at ``offset`` record by record; None when it is all it announces to be."""
    body = os.pread(descriptor, batch.body_bytes, offset + BATCH_RECORD_BYTES)
    at = 0
    lsn = batch.first_lsn
    sound_hlc = None
    try:
        while lsn <= batch.last_lsn:
            length = check_record(body, at, lsn=lsn, node_id=node_id, available=len(body) - at)
            sound_hlc = body[at + 16 : at + 32]
            at += length
            lsn = Lsn(lsn + 1)
    except FormatError as error:
        return Damage(offset + BATCH_RECORD_BYTES + at, lsn, str(error), offset, batch, sound_hlc)
    if at != batch.body_bytes or sound_hlc != batch.hlc or crc32(body) != batch.body_crc32:
        return Damage(offset, batch.first_lsn, "the BATCH record disagrees with its records", offset)
    return None


def find_batch(descriptor: int, offset: int, above_lsn: Lsn, node_id: str) -> int | None:
    """Offset of the first sound BATCH record at or behind ``offset`` that begins above ``above_lsn``.

    It is looked for at every byte, since damage may have made every length before it worthless.
    """
    hashed = node_hash(node_id)
    for start, data in _windows(descriptor, offset, overlap=BATCH_RECORD_BYTES - 1):
        found = data.find(_BATCH_LENGTH, _LENGTH_AT)
        while found >= 0:
            try:
                batch = decode_batch(data, found - _LENGTH_AT, len(data))
            except FormatError:
                batch = None
            if batch is not None and batch.first_lsn > above_lsn and node_of(batch.hlc) == hashed:
                return start + found - _LENGTH_AT
            found = data.find(_BATCH_LENGTH, found + 1)
    return None


def end_of_data(descriptor: int, offset: int) -> int:
    """Offset behind the last byte that is not zero; ``offset`` when there is none from there on."""
    end = offset
    for start, data in _windows(descriptor, offset):
        if data != _ZEROS[: len(data)]:
            end = start + len(data.rstrip(b"\0"))
    return end


def _windows(descriptor: int, offset: int, overlap: int = 0) -> Iterator[tuple[int, bytes]]:
    """``(offset, bytes)`` from ``offset`` to the end of the file, ``overlap`` bytes in common."""
    while data := os.pread(descriptor, WINDOW_BYTES, offset):
        yield offset, data
        if len(data) <= overlap:
            return
        offset += len(data) - overlap
