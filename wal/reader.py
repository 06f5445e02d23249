"""Reading records back in LSN order, each batch checked before the first record of it is given out."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from ledger.errors import WalCorruptError, WalError
from ledger.hlc import Hlc
from ledger.positions import Epoch, Lsn
from wal.format import (
    BATCH_RECORD_BYTES,
    RECORD,
    RECORD_HEADER_BYTES,
    SEGMENT_HEADER_BYTES,
    BatchRecord,
    FormatError,
    decode_batch,
)
from wal.scan import end_of_data, find_bad_record
from wal.segment import Segment, list_segments, read_header


class Record(NamedTuple):
    """One record of a log."""

    lsn: Lsn
    epoch: Epoch
    hlc: Hlc
    type: int
    payload: bytes


def read(folder: Path, from_lsn: Lsn, node_id: str, upto_lsn: Lsn | None = None) -> Iterator[Record]:
    """Records from ``from_lsn`` on, in order; memory is bounded by one batch.

    Without ``upto_lsn`` to the end of the log, which must be sound: only for a log that nobody writes.
    With it up to that LSN, which must be durable: safe beside the writer.

    Raises:
        WalError: ``from_lsn`` is older than the log, or ``upto_lsn`` is not in it.
        WalCorruptError: the log is damaged at or before the next record.
    """
    if upto_lsn is not None and upto_lsn < from_lsn:
        return
    segments = list_segments(folder)
    if segments and from_lsn < segments[0].base_lsn:
        raise WalError(
            f"LSN {from_lsn} is no longer in {folder}; its oldest segment begins with {segments[0].base_lsn}"
        )
    begun = max((at for at, segment in enumerate(segments) if segment.base_lsn <= from_lsn), default=0)
    last_lsn = None
    for segment in segments[begun:]:
        for record in _read_segment(segment, from_lsn, node_id, last_lsn):
            yield record
            last_lsn = record.lsn
            if last_lsn == upto_lsn:
                return
    if upto_lsn is not None:
        raise WalError(f"LSN {upto_lsn} is not in {folder}")


def _read_segment(segment: Segment, from_lsn: Lsn, node_id: str, last_lsn: Lsn | None) -> Iterator[Record]:
    try:
        header = read_header(segment)
    except FormatError as error:
        raise WalCorruptError(segment.name, 0, str(error)) from error
    if header.node_id != node_id:
        raise WalCorruptError(segment.name, 0, f"the segment belongs to node {header.node_id}, not {node_id}")
    if last_lsn is not None and header.previous_lsn != last_lsn:
        reason = f"the segment follows LSN {header.previous_lsn}, but {last_lsn} is the one before it"
        raise WalCorruptError(segment.name, 0, reason)
    descriptor = os.open(segment.path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        offset = SEGMENT_HEADER_BYTES
        next_lsn = header.base_lsn
        while (batch := read_batch(segment, descriptor, offset, next_lsn)) is not None:
            if batch.last_lsn >= from_lsn:
                yield from _records(segment, read_body(segment, descriptor, offset, batch, node_id), from_lsn, node_id)
            offset += BATCH_RECORD_BYTES + batch.body_bytes
            next_lsn = Lsn(batch.last_lsn + 1)
    finally:
        os.close(descriptor)


def read_batch(segment: Segment, descriptor: int, offset: int, next_lsn: Lsn) -> BatchRecord | None:
    """The BATCH record at ``offset``, None at the end of the segment.

    Raises:
        WalCorruptError: something else stands there.
    """
    data = os.pread(descriptor, BATCH_RECORD_BYTES, offset)
    if not data:
        return None
    try:
        batch = decode_batch(data, 0, len(data))
    except FormatError as error:
        if end_of_data(descriptor, offset) == offset:
            return None
        raise WalCorruptError(segment.name, offset, str(error)) from error
    if batch.first_lsn != next_lsn:
        raise WalCorruptError(segment.name, offset, f"LSN {batch.first_lsn} stands where {next_lsn} should")
    return batch


def read_body(segment: Segment, descriptor: int, offset: int, batch: BatchRecord, node_id: str) -> bytes:
    """The records of the batch at ``offset``, every one checked.

    Raises:
        WalCorruptError: one is damaged.
    """
    damage = find_bad_record(descriptor, offset, batch, node_id)
    if damage is not None:
        raise WalCorruptError(segment.name, damage.offset, damage.reason)
    return os.pread(descriptor, batch.body_bytes, offset + BATCH_RECORD_BYTES)


def _records(segment: Segment, body: bytes, from_lsn: Lsn, node_id: str) -> Iterator[Record]:
    at = 0
    while at < len(body):
        _, length, lsn, physical_ms, logical, _, _, kind = RECORD.unpack_from(body, at)
        if lsn >= from_lsn:
            hlc = Hlc(physical_ms, logical, node_id)
            yield Record(Lsn(lsn), segment.epoch, hlc, kind, body[at + RECORD_HEADER_BYTES : at + length])
        at += length
