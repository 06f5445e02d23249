"""Reading records back in LSN order, each batch checked before the first record of it is given out."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from ledger.errors import WalCorruptError, WalError
from ledger.hlc import Hlc
from ledger.machines.events import RETURNED_RECORD_TYPE
from ledger.positions import NO_EPOCH, Epoch, Lsn
from wal.format import (
    RECORD,
    RECORD_HEADER_BYTES,
    SEGMENT_HEADER_BYTES,
    FormatError,
    SegmentHeader,
    decode_returned,
)
from wal.scan import Batch, Damage, batch_at
from wal.segment import Segment, list_segments, misplaced, opened, read_header


class Record(NamedTuple):
    """One record of a log; of one that was appended again HLC, type and payload are its own. ``length`` is the bytes of
    the whole record where it stands."""

    lsn: Lsn
    epoch: Epoch
    hlc: Hlc
    type: int
    payload: bytes
    length: int


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
    last_lsn = before = None
    for segment in segments[begun:]:
        before = _header(segment, node_id, before, last_lsn)
        if last_lsn is not None:
            # A segment may begin above it, behind records that were given up, and hold none itself.
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
    """The header of a segment that may follow the one of ``before``, which goes up to ``last_lsn``."""
    try:
        header = read_header(segment)
    except FormatError as error:
        raise WalCorruptError(segment.name, 0, str(error)) from error
    wal_id, epoch = (None, NO_EPOCH) if before is None else (before.wal_id, before.epoch)
    reason = misplaced(header, node_id=node_id, wal_id=wal_id, epoch=epoch, last_lsn=last_lsn)
    if reason is not None:
        raise WalCorruptError(segment.name, 0, reason)
    return header


def batches(segment: Segment, node_id: str, from_lsn: Lsn) -> Iterator[Batch]:
    """The batches of a segment that end with ``from_lsn`` or later, every record of them checked.

    Raises:
        WalCorruptError: one is damaged, or the BATCH record of one before them.
    """
    with opened(segment.path) as descriptor:
        offset, next_lsn = SEGMENT_HEADER_BYTES, segment.base_lsn
        while (found := batch_at(descriptor, offset, next_lsn, node_id, from_lsn)) is not None:
            if isinstance(found, Damage):
                raise WalCorruptError(segment.name, found.offset, found.reason)
            if found.body:
                yield found
            offset, next_lsn = found.end, Lsn(found.record.last_lsn + 1)


def records_of(body: bytes, epoch: Epoch, node_id: str) -> Iterator[Record]:
    """The records in the body of a batch, or in the sound beginning of one."""
    at = 0
    while at < len(body):
        _, length, lsn, physical_ms, logical, _, _, kind = RECORD.unpack_from(body, at)
        payload = body[at + RECORD_HEADER_BYTES : at + length]
        hlc = Hlc(physical_ms, logical, node_id)
        if kind == RETURNED_RECORD_TYPE:
            hlc, kind, payload = decode_returned(payload, node_id)
        yield Record(Lsn(lsn), epoch, hlc, kind, payload, length)
        at += length
