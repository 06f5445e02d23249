"""Reads a log in bounded memory, and changes nothing: batches, records, and whole segments.

``batch_at`` reads one batch and checks every record of it. ``scan_segment`` scans a whole segment for recovery: it
checks the CRC of every BATCH record, that each batch begins where the previous one ended, and the CRC of every body. It
checks record by record only the last batch and the one that ends the scan; the LSN range of any other batch is checked
against the BATCH record after it. ``read`` yields records in LSN order, and checks each batch before its first record.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple
from zlib import crc32

from ledger.errors import InvalidInputError, WalCorruptError, WalError, reported_as
from ledger.facts.events import BATCH_RECORD_TYPE, RETURNED_RECORD_TYPE
from ledger.hlc import Hlc, node_hash
from ledger.positions import BEFORE_FIRST, NO_EPOCH, Epoch, Lsn, after, before
from wal import native
from wal.format import (
    BATCH,
    BATCH_BODY_BYTES_LIMIT,
    BATCH_RECORD_BYTES,
    CRC_BYTES,
    HLC_AT,
    LSN_LIMIT,
    NODE_HASH_AT,
    PENDING,
    RECORD,
    RECORD_HEADER_BYTES,
    SEGMENT_HEADER_BYTES,
    BatchRecord,
    FormatError,
    SegmentHeader,
    batch_of,
    check_record,
    decode_batch,
    decode_returned,
    encode_batch,
)
from wal.segment import Segment, list_segments, misplaced, opened, read_header

WINDOW_BYTES = 4 << 20
"""Bytes read at once. A scan holds one window, and the body of a batch that is longer, damaged or the last."""

_ZEROS = bytes(WINDOW_BYTES)
_BATCH_LENGTH = BATCH_RECORD_BYTES.to_bytes(4, "big")
_LENGTH_AT = 4


class Batch(NamedTuple):
    """One batch, with its BATCH record at ``offset``; ``body`` is its records, each checked."""

    offset: int
    record: BatchRecord
    body: bytes

    @property
    def end(self) -> int:
        """Where the next batch begins."""
        return self.offset + BATCH_RECORD_BYTES + self.record.body_bytes


class Damage(NamedTuple):
    """The first bad record of a segment: it is at ``offset``, and should have had ``lsn``.

    ``batch`` is the BATCH record at ``batch_offset``, None if that record is the bad one;
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
    """One segment: sound up to ``end``, its last sound LSN ``last_lsn``, and the damage after it.

    ``last_batch_offset`` and ``highest_hlc`` (packed) are those of the last sound batch, None without one
    or if it is not known.
    """

    end: int
    last_lsn: Lsn
    last_batch_offset: int | None
    highest_hlc: bytes | None
    damage: Damage | None


def batch_at(
    descriptor: int, offset: int, next_lsn: Lsn | None, node_id: str, from_lsn: Lsn = BEFORE_FIRST
) -> Batch | Damage | None:
    """The batch at ``offset``, or the damage there; None at the end of the segment.

    The batch must begin with ``next_lsn``, if that is known. If it ends below ``from_lsn``, its records are not read
    and its body is empty.
    """
    data = os.pread(descriptor, BATCH_RECORD_BYTES, offset)
    try:
        record = _batch_record(data, next_lsn)
    except FormatError as error:
        is_end = end_of_data(descriptor, offset) == offset
        return None if is_end else Damage(offset, next_lsn or BEFORE_FIRST, str(error), offset)
    if record.last_lsn < from_lsn:
        return Batch(offset, record, b"")
    batch = Batch(offset, record, os.pread(descriptor, record.body_bytes, offset + BATCH_RECORD_BYTES))
    if native.check_batches(data + batch.body, record.first_lsn, node_hash(node_id)) is not None:
        return batch
    return _bad_record(batch, node_id) or batch


def _bad_record(batch: Batch, node_id: str) -> Damage | None:
    """Check a batch record by record; None if it matches its BATCH record."""
    offset, announced, body = batch
    at = 0
    lsn = announced.first_lsn
    sound_hlc = None
    try:
        while lsn <= announced.last_lsn:
            length = check_record(body, at, lsn=lsn, node_id=node_id, available=len(body) - at)
            sound_hlc = body[at + HLC_AT.start : at + HLC_AT.stop]
            at += length
            lsn = after(lsn)
    except FormatError as error:
        return Damage(offset + BATCH_RECORD_BYTES + at, lsn, str(error), offset, announced, sound_hlc)
    if at != announced.body_bytes or sound_hlc != announced.hlc or crc32(body) != announced.body_crc32:
        return Damage(offset, announced.first_lsn, "the BATCH record disagrees with its records", offset)
    return None


def check_batches(data: bytes | memoryview, first_lsn: Lsn, node_id: str) -> Lsn:
    """Check every CRC, length and LSN of the batches in ``data``, from ``first_lsn`` on; returns their last LSN.

    Raises:
        InvalidInputError: a check failed; the text has the reason and the offset.
    """
    checked = native.check_batches(data, first_lsn, node_hash(node_id))
    return check_each(data, first_lsn, node_id) if checked is None else Lsn(checked)


def check_each(data: bytes | memoryview, first_lsn: Lsn, node_id: str) -> Lsn:
    """``check_batches`` in Python."""
    whole = bytes(data)
    at, next_lsn = 0, first_lsn
    while at < len(whole):
        body_at = at + BATCH_RECORD_BYTES
        with reported_as(InvalidInputError, f"byte {at}", FormatError):
            record = _batch_record(whole[at:body_at], next_lsn)
            batch = Batch(at, record, whole[body_at : body_at + record.body_bytes])
            if len(batch.body) == record.body_bytes and crc32(batch.body) != record.body_crc32:
                raise FormatError("the CRC of the batch does not match")
        if (damage := _bad_record(batch, node_id)) is not None:
            raise InvalidInputError(f"byte {damage.offset}: {damage.reason}")
        at, next_lsn = batch.end, after(record.last_lsn)
    return before(next_lsn)


def _batch_record(data: bytes, next_lsn: Lsn | None) -> BatchRecord:
    """The BATCH record at the start of ``data``, of a batch that must begin with ``next_lsn``, if that is known.

    Raises:
        FormatError: it is not a sound BATCH record, or of another batch.
    """
    record = decode_batch(data, 0, len(data))
    if next_lsn not in (None, record.first_lsn):
        raise FormatError(f"a batch begins with LSN {record.first_lsn} where {next_lsn} should be")
    return record


def scan_segment(descriptor: int, next_lsn: Lsn, node_id: str) -> SegmentScan:
    """Scan the segment open as ``descriptor``, whose first record must have ``next_lsn``.

    Raises:
        OSError: the file cannot be read.
    """
    last: SoundRun | None = None
    damage: Damage | None = None
    for found in sound_runs(descriptor, next_lsn, node_id, WINDOW_BYTES):
        if isinstance(found, Damage):
            damage = found
        else:
            last = found
    if last is None:
        return SegmentScan(SEGMENT_HEADER_BYTES, before(next_lsn), None, None, damage)
    batch = batch_at(descriptor, last.last_at, last.first_lsn, node_id)
    if isinstance(batch, Batch):
        return SegmentScan(last.end, before(last.next_lsn), last.last_at, batch.record.hlc, damage)
    return SegmentScan(last.last_at, before(last.first_lsn), None, None, batch)


class SoundRun(NamedTuple):
    """Consecutive sound batches up to ``end``; the last begins at ``last_at``, with ``first_lsn``."""

    end: int
    next_lsn: Lsn
    last_at: int
    first_lsn: Lsn


def sound_runs(descriptor: int, next_lsn: Lsn, node_id: str, window_bytes: int) -> Iterator[SoundRun | Damage]:
    """The sound batches of a segment whose first record must have ``next_lsn``, window by window; then the damage that
    ends them, if any.

    Raises:
        OSError: the file cannot be read.
    """
    window = memoryview(bytearray(window_bytes))
    offset = SEGMENT_HEADER_BYTES
    while filled := os.preadv(descriptor, (window,), offset):
        run = _sound_run(window[:filled], next_lsn)
        if not run.end:  # longer than the window, or damaged, or the end
            found = batch_at(descriptor, offset, next_lsn, node_id)
            if not isinstance(found, Batch):
                if found is not None:
                    yield found
                return
            run = SoundRun(found.end - offset, after(found.record.last_lsn), 0, next_lsn)
        yield run._replace(end=offset + run.end, last_at=offset + run.last_at)
        offset += run.end
        next_lsn = run.next_lsn


def _sound_run(data: memoryview, first_lsn: Lsn) -> SoundRun:
    """The sound batches that are whole in ``data``, from its start on.

    Makes the checks of ``decode_batch``, in the order that is fastest for a sound batch.
    """
    at = last_at = 0
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
        last_at, at = at, behind
        first_lsn, next_lsn = first, last + 1
    return SoundRun(at, Lsn(next_lsn), last_at, first_lsn)


def find_batch(descriptor: int, offset: int, above_lsn: Lsn, node_id: str) -> int | None:
    """Offset of the first sound BATCH record at or after ``offset`` that begins above ``above_lsn``.

    Every byte is tried, since damage may have made every length before it wrong.
    """
    hashed = node_hash(node_id)
    for start, data in _windows(descriptor, offset, overlap=BATCH_RECORD_BYTES - 1):
        found = data.find(_BATCH_LENGTH, _LENGTH_AT)
        while found >= 0:
            try:
                batch = decode_batch(data, found - _LENGTH_AT, len(data))
            except FormatError:
                batch = None
            if batch is not None and batch.first_lsn > above_lsn and batch.hlc[NODE_HASH_AT] == hashed:
                return start + found - _LENGTH_AT
            found = data.find(_BATCH_LENGTH, found + 1)
    return None


def end_of_data(descriptor: int, offset: int) -> int:
    """Offset after the last byte that is not zero; ``offset`` if only zeros follow it."""
    end = offset
    for start, data in _windows(descriptor, offset):
        if data != _ZEROS[: len(data)]:
            end = start + len(data.rstrip(b"\0"))
    return end


def _windows(descriptor: int, offset: int, overlap: int = 0) -> Iterator[tuple[int, bytes]]:
    """``(offset, bytes)`` from ``offset`` to the end of the file; neighbours share ``overlap`` bytes."""
    while data := os.pread(descriptor, WINDOW_BYTES, offset):
        yield offset, data
        if len(data) <= overlap:
            return
        offset += len(data) - overlap


class Record(NamedTuple):
    """One record of a log. A record that was appended again has its original HLC, type and payload. ``length`` is the
    size of the whole record in bytes."""

    lsn: Lsn
    epoch: Epoch
    hlc: Hlc
    type: int
    payload: bytes
    length: int


def read(folder: Path, from_lsn: Lsn, node_id: str, upto_lsn: Lsn | None = None) -> Iterator[Record]:
    """Records from ``from_lsn`` on, in order; memory is bounded by one batch.

    Without ``upto_lsn`` it reads to the end of the log, which must be sound: only for a log without a writer.
    With it, it reads up to that LSN, which must be durable: safe while the writer runs.

    Raises:
        WalError: ``from_lsn`` is older than the log, or ``upto_lsn`` is not in it.
        WalCorruptError: the log is damaged at or before the next record.
    """
    if upto_lsn is not None and upto_lsn < from_lsn:
        return
    if (segments := list_segments(folder)) and from_lsn < segments[0].base_lsn:
        raise WalError(
            f"LSN {from_lsn} is no longer in {folder}; its oldest segment begins with {segments[0].base_lsn}"
        )
    first = max((at for at, segment in enumerate(segments) if segment.base_lsn <= from_lsn), default=0)
    last_lsn = before = None
    for segment in segments[first:]:
        before = _header(segment, node_id, before, last_lsn)
        if last_lsn is not None:
            # A segment may begin above it, after records that were given up, and be empty itself.
            last_lsn = Lsn(segment.base_lsn - 1)
        for batch in batches(segment, node_id, from_lsn):
            for record in records_of(batch.body, segment.epoch, node_id):
                if record.lsn >= from_lsn:
                    yield record
                    last_lsn = record.lsn
                    if last_lsn == upto_lsn:
                        return
    if upto_lsn is not None:
        raise WalError(f"LSN {upto_lsn} is not in {folder}")


def _header(segment: Segment, node_id: str, before: SegmentHeader | None, last_lsn: Lsn | None) -> SegmentHeader:
    """The header of a segment, checked to follow the segment of ``before``, which ends with ``last_lsn``."""
    try:
        header = read_header(segment)
    except FormatError as error:
        raise WalCorruptError(segment.name, 0, str(error)) from error
    wal_id, epoch = (None, NO_EPOCH) if before is None else (before.wal_id, before.epoch)
    reason = misplaced(header, node_id=node_id, wal_id=wal_id, epoch=epoch, last_lsn=last_lsn)
    if reason is not None:
        raise WalCorruptError(segment.name, 0, reason)
    return header


def batches(segment: Segment, node_id: str, from_lsn: Lsn, offset: int = SEGMENT_HEADER_BYTES) -> Iterator[Batch]:
    """The batches of a segment that end with ``from_lsn`` or later, every record of them checked. If ``offset`` is not
    the end of the header, the batch at ``offset`` must begin with ``from_lsn``.

    Raises:
        WalCorruptError: one is damaged, or the BATCH record of an earlier one is.
    """
    with opened(segment.path) as descriptor:
        next_lsn = segment.base_lsn if offset == SEGMENT_HEADER_BYTES else from_lsn
        while (found := batch_at(descriptor, offset, next_lsn, node_id, from_lsn)) is not None:
            if isinstance(found, Damage):
                raise WalCorruptError(segment.name, found.offset, found.reason)
            if found.body:
                yield found
            offset, next_lsn = found.end, after(found.record.last_lsn)


def records_of(body: bytes, epoch: Epoch, node_id: str) -> Iterator[Record]:
    """The records in the body of a batch, or in the sound part of a body."""
    at = 0
    while at < len(body):
        _, length, lsn, physical_ms, logical, _, _, kind = RECORD.unpack_from(body, at)
        payload = body[at + RECORD_HEADER_BYTES : at + length]
        hlc = Hlc(physical_ms, logical, node_id)
        if kind == RETURNED_RECORD_TYPE:
            hlc, kind, payload = decode_returned(payload, node_id)
        yield Record(Lsn(lsn), epoch, hlc, kind, payload, length)
        at += length


def cut_batch(batch: Batch, node_id: str, from_lsn: Lsn, upto_lsn: Lsn) -> bytes:
    """The records of a batch from ``from_lsn`` to ``upto_lsn`` as a batch of their own, with its BATCH record; empty if
    the batch has none of them."""
    announced, body = batch.record, batch.body
    if from_lsn <= announced.first_lsn and announced.last_lsn <= upto_lsn:
        return encode_batch(announced) + body
    start = end = last_at = 0
    for record in records_of(body, NO_EPOCH, node_id):
        if record.lsn < from_lsn:
            start = end = end + record.length
        elif record.lsn <= upto_lsn:
            last_at, end = end, end + record.length
    if start == end:
        return b""
    hlc, body = body[last_at + HLC_AT.start : last_at + HLC_AT.stop], body[start:end]
    return (
        encode_batch(batch_of(max(announced.first_lsn, from_lsn), min(announced.last_lsn, upto_lsn), hlc, body)) + body
    )
