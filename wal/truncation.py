"""Cutting a log back to a position: what a member of a quorum does with the end of a log that lost.

Steps of ``truncate``, each durable before the next:

    1. The control file knows nothing above the position as durable any more.
    2. Segments that begin above it are set aside, the newest first.
    3. The end of the segment that holds it is copied aside.
    4. That segment is made anew, up to the position, under another name, and takes its place.

After a crash between any two the log is sound and ends at or above the position, so that recovery finds nothing wrong
with it and the same call goes on. A later epoch may write only once it has returned.
"""

from __future__ import annotations

import os
from pathlib import Path
from zlib import crc32

from ledger.errors import WalError
from ledger.positions import Lsn
from wal import control as control_file
from wal.aside import copy_range, copy_tail, set_aside
from wal.format import BATCH_RECORD_BYTES, HLC_AT, RECORD, SEGMENT_HEADER_BYTES, BatchRecord, encode_batch
from wal.reader import read_batch, read_body
from wal.segment import UNNAMED_SUFFIX, Segment, list_segments, sync_folder

CUT_PREFIX = "cut-"


def truncate(folder: Path, node_id: str, last_lsn: Lsn) -> tuple[str, ...]:
    """Let the log in ``folder`` end with ``last_lsn``; the names under which what stood above it is kept.

    The caller MUST hold the folder's lock and MUST have recovered the log, which nobody may have open. A log that ends
    there or below is left as it is.

    Raises:
        WalError: records that are known to be committed would go, or the log does not reach back to ``last_lsn``.
            Nothing was changed.
        WalCorruptError: the log is damaged at the position.
        OSError: it can be tried again.
    """
    control = control_file.load(folder)
    segments = list_segments(folder)
    if control is None:
        raise WalError(f"{folder} has no control file: nothing says what of its log is committed")
    if last_lsn < control.committed_lsn:
        raise WalError(f"the log in {folder} is committed up to LSN {control.committed_lsn}, above {last_lsn}")
    if segments and last_lsn + 1 < segments[0].base_lsn:
        raise WalError(f"the log in {folder} begins with LSN {segments[0].base_lsn}; it cannot end with {last_lsn}")

    # 1. nothing above is known to be durable
    if control.durable_lsn > last_lsn:
        control_file.store(folder, control._replace(durable_lsn=last_lsn))

    # 2. whole segments
    later = [segment for segment in segments if segment.base_lsn > last_lsn + 1]
    kept = [set_aside(folder, segment, CUT_PREFIX) for segment in reversed(later)]

    # 3. and 4. the rest of one
    for segment in segments[: len(segments) - len(later)][-1:]:
        kept += _shorten(folder, segment, node_id, last_lsn)
    return tuple(kept)


def _shorten(folder: Path, segment: Segment, node_id: str, last_lsn: Lsn) -> list[str]:
    descriptor = os.open(segment.path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        offset, next_lsn = SEGMENT_HEADER_BYTES, segment.base_lsn
        while (batch := read_batch(segment, descriptor, offset, next_lsn)) and batch.last_lsn <= last_lsn:
            offset += BATCH_RECORD_BYTES + batch.body_bytes
            next_lsn = Lsn(batch.last_lsn + 1)
        if batch is None:
            return []
        aside = copy_tail(folder, segment, offset, CUT_PREFIX)
        rest = _first_of(batch, read_body(segment, descriptor, offset, batch, node_id), last_lsn)
        unnamed = segment.path.with_name(segment.name + UNNAMED_SUFFIX)
        copy_range(descriptor, unnamed, 0, offset, rest)
        os.rename(unnamed, segment.path)
        sync_folder(folder)
        return [aside]
    finally:
        os.close(descriptor)


def _first_of(batch: BatchRecord, body: bytes, last_lsn: Lsn) -> bytes:
    """The batch with its records up to ``last_lsn`` alone; nothing when that is none of them."""
    end = 0
    hlc = b""
    for _ in range(batch.first_lsn, last_lsn + 1):
        hlc = body[end:][HLC_AT]
        end += RECORD.unpack_from(body, end)[1]
    if end == 0:
        return b""
    left = body[:end]
    return encode_batch(BatchRecord(batch.first_lsn, last_lsn, hlc, len(left), crc32(left))) + left
