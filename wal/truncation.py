"""Taking records out of a log: at its end, which is kept in other files, and at its start.

Steps of ``truncate``, by which a member of a quorum cuts off the end of a log that lost; each is durable before the
next:

    1. The control file records nothing above the position as durable any more.
    2. Segments that begin above it are renamed to ``cut-...``, the newest first.
    3. The end of the segment that holds it is copied to ``cut-...``.
    4. That segment is written again, up to the position, under another name, and renamed to its own.

After a crash between any two the log is sound and ends at or above the position, so recovery accepts it and the same
call continues. A later epoch may write only once it has returned.

After ``remove_segments``, which removes the oldest::

    the last segment is there
    the segments that are there follow one another without a gap
    every record above upto_lsn is there
"""

from __future__ import annotations

import os
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

from ledger.errors import WalError
from ledger.positions import Lsn
from wal import control as control_file
from wal.reader import WINDOW_BYTES, batches, cut_batch, end_of_data
from wal.segment import NEW_FILE, UNNAMED_SUFFIX, Segment, list_segments, opened, sync_folder, write_fully

CUT_PREFIX = "cut-"


def truncate(folder: Path, node_id: str, last_lsn: Lsn) -> tuple[str, ...]:
    """Cut the log in ``folder`` behind ``last_lsn``; the names of the files that keep what was above it.

    The caller MUST hold the folder's lock and MUST have recovered and closed the log. A log that ends there or below is
    left as it is.

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
    kept = [keep_segment(folder, segment, CUT_PREFIX) for segment in reversed(later)]

    # 3. and 4. the rest of one
    for segment in segments[: len(segments) - len(later)][-1:]:
        kept += _shorten(folder, segment, node_id, last_lsn)
    return tuple(kept)


def _shorten(folder: Path, segment: Segment, node_id: str, last_lsn: Lsn) -> list[str]:
    for batch in batches(segment, node_id, Lsn(last_lsn + 1)):
        copy = keep_tail(folder, segment, batch.offset, CUT_PREFIX)
        unnamed = segment.path.with_name(segment.name + UNNAMED_SUFFIX)
        with opened(segment.path) as source:
            copy_range(source, unnamed, 0, batch.offset, cut_batch(batch, node_id, batch.record.first_lsn, last_lsn))
        os.rename(unnamed, segment.path)
        sync_folder(folder)
        return [copy]
    return []


def keep_segment(folder: Path, segment: Segment, prefix: str) -> str:
    """Rename a segment that no longer belongs to the log; its new name, which is durable."""
    kept = _free_name(folder, segment, 0, prefix)
    os.rename(segment.path, kept)
    sync_folder(folder)
    return kept.name


def keep_tail(folder: Path, segment: Segment, offset: int, prefix: str) -> str:
    """Copy the bytes from ``offset`` on to a file of their own, durably; its name."""
    kept = _free_name(folder, segment, offset, prefix)
    unfinished = kept.with_name(kept.name + UNNAMED_SUFFIX)
    with opened(segment.path) as source:
        copy_range(source, unfinished, offset, end_of_data(source, offset))
    os.rename(unfinished, kept)
    sync_folder(folder)
    return kept.name


def copy_range(source: int, target: Path, start: int, end: int, rest: bytes = b"") -> None:
    """Make the file ``target`` of the bytes from ``start`` to ``end`` of an open file, then ``rest``, and sync it."""
    with opened(target, NEW_FILE) as descriptor:
        for at in range(start, end, WINDOW_BYTES):
            data = os.pread(source, min(WINDOW_BYTES, end - at), at)
            write_fully(descriptor, (data,), at - start)
        if rest:
            write_fully(descriptor, (rest,), end - start)
        os.fsync(descriptor)


def _free_name(folder: Path, segment: Segment, offset: int, prefix: str) -> Path:
    """``<prefix><base lsn>-<epoch>-<offset>``, numbered when something earlier took that."""
    name = f"{prefix}{segment.path.stem}-{offset}"
    path = folder / name
    number = 1
    while path.exists():
        number += 1
        path = folder / f"{name}.{number}"
    return path


def remove_segments(
    folder: Path, upto_lsn: int, older_than_s: float, now_s: float, retire: Callable[[str], None] = lambda _: None
) -> list[str]:
    """Remove segments that end at or below ``upto_lsn`` and were last written ``older_than_s`` ago; their names.

    ``upto_lsn`` MUST be chained and signed. ``now_s`` is seconds since 1970, as the file system counts them. ``retire``
    is called with each name before: that of the writer, if there is one. A crash in the middle leaves fewer removed.
    """
    removed = []
    for segment, follower in pairwise(list_segments(folder)):
        if follower.base_lsn - 1 > upto_lsn or segment.path.stat().st_mtime > now_s - older_than_s:
            break
        retire(segment.name)
        segment.path.unlink()
        removed.append(segment.name)
        sync_folder(folder)
    return removed
