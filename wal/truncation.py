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

from ledger.errors import WalError
from ledger.positions import Epoch, Lsn
from wal import control as control_file
from wal.aside import copy_range, copy_tail, set_aside
from wal.format import HLC_AT, batch_of, encode_batch
from wal.reader import batches, records_of
from wal.scan import Batch
from wal.segment import UNNAMED_SUFFIX, Segment, list_segments, opened, sync_folder

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
    for batch in batches(segment, node_id, Lsn(last_lsn + 1)):
        aside = copy_tail(folder, segment, batch.offset, CUT_PREFIX)
        unnamed = segment.path.with_name(segment.name + UNNAMED_SUFFIX)
        with opened(segment.path) as source:
            copy_range(source, unnamed, 0, batch.offset, _first_of(batch, segment.epoch, node_id, last_lsn))
        os.rename(unnamed, segment.path)
        sync_folder(folder)
        return [aside]
    return []


def _first_of(batch: Batch, epoch: Epoch, node_id: str, last_lsn: Lsn) -> bytes:
    """The batch with its records up to ``last_lsn`` alone; nothing when that is none of them."""
    left = [record for record in records_of(batch.body, epoch, node_id) if record.lsn <= last_lsn]
    if not left:
        return b""
    body = batch.body[: sum(record.length for record in left)]
    last_at = len(body) - left[-1].length
    hlc = body[last_at + HLC_AT.start : last_at + HLC_AT.stop]
    return encode_batch(batch_of(left[0].lsn, last_lsn, hlc, body)) + body
