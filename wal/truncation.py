"""Removes records from a log: from its end, with copies kept in other files, and from its start. Reads the copies, so
that their records can be appended again.

Steps of ``truncate``, by which a member of a quorum cuts off a divergent end; each is durable before the next:

    1. The control file records no LSN above the position as durable any more.
    2. Segments that begin above it are renamed to ``cut-...``, the newest first.
    3. The end of the segment that holds it is copied to ``cut-...``.
    4. That segment is written again, up to the position, under another name, and renamed to its own.

After a crash between two steps the log is sound and ends at or above the position, so recovery accepts it and the same
call continues. A later epoch may write only after ``truncate`` has returned.

After ``remove_segments``, which removes the oldest::

    the last segment exists
    the segments follow one another without a gap
    every record above upto_lsn exists

The files that were cut off, here or by an accepted loss, may hold records that were acknowledged. They are read record
by record, past any damage. Each record has a CRC of its own, so damage costs only the records in it: the next sound
record is found by the hash of the node's name, which is in every header. No payload can look like a header, since
canonical JSON has no zero bytes and the length field of a header has. Records missing between two sound ones are a
``Gap``.
"""

from __future__ import annotations

import mmap
import os
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from itertools import chain, count, pairwise
from pathlib import Path
from typing import NamedTuple
from zlib import crc32

from ledger.errors import WalError, refuse
from ledger.facts.events import BATCH_RECORD_TYPE
from ledger.hlc import Hlc, node_hash
from ledger.positions import BEFORE_FIRST, Epoch, Lsn, after, before
from objects import sync_folder
from wal import control as control_file
from wal.format import (
    BATCH,
    CRC_BYTES,
    RECORD,
    RECORD_BYTES_LIMIT,
    RECORD_HEADER_BYTES,
    SEGMENT_HEADER_BYTES,
    FormatError,
)
from wal.reader import WINDOW_BYTES, Record, batches, cut_batch, end_of_data, records_of
from wal.segment import (
    NEW_FILE,
    UNNAMED_SUFFIX,
    Segment,
    list_segments,
    opened,
    read_header,
    write_fully,
)

CUT_PREFIX = "cut-"
RETURNED_PREFIX = "returned-"
_CUT_NAME = re.compile(CUT_PREFIX + r"(?P<base>[0-9]{20})-(?P<epoch>[0-9]+)-(?P<offset>[0-9]+)(\.[0-9]+)?")
_HASH_AT = 28
"""Where the hash of the node's name is in a record's header."""


def truncate(folder: Path, node_id: str, last_lsn: Lsn) -> tuple[str, ...]:
    """Cut the log in ``folder`` after ``last_lsn``; returns the names of the files that keep the records above it.

    The caller MUST hold the folder's lock and MUST have recovered and closed the log. A log that ends at ``last_lsn``
    or below is left as it is.

    Raises:
        WalError: records known to be committed would be cut, or the log does not reach back to ``last_lsn``.
            Nothing was changed.
        WalCorruptError: the log is damaged at the position.
        OSError: the caller may retry.
    """
    control = control_file.load(folder)
    segments = list_segments(folder)
    if control is None:
        raise WalError(f"{folder} has no control file: nothing says what of its log is committed")
    committed_lsn, oldest_lsn = control.committed_lsn, segments[0].base_lsn if segments else Lsn(1)
    committed = f"the log in {folder} is committed up to LSN {committed_lsn}, above {last_lsn}"
    removed = f"the log in {folder} begins with LSN {oldest_lsn}; it cannot end with {last_lsn}"
    refuse(WalError, (last_lsn < committed_lsn, committed), (after(last_lsn) < oldest_lsn, removed))

    # 1. no LSN above is recorded as durable
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
    """Rename a segment that no longer belongs to the log, durably; returns its new name."""
    kept = _free_name(folder, segment, 0, prefix)
    os.rename(segment.path, kept)
    sync_folder(folder)
    return kept.name


def keep_tail(folder: Path, segment: Segment, offset: int, prefix: str) -> str:
    """Copy the bytes from ``offset`` on to a file of their own, durably; returns its name."""
    kept = _free_name(folder, segment, offset, prefix)
    unfinished = kept.with_name(kept.name + UNNAMED_SUFFIX)
    with opened(segment.path) as source:
        copy_range(source, unfinished, offset, end_of_data(source, offset))
    os.rename(unfinished, kept)
    sync_folder(folder)
    return kept.name


def copy_range(source: int, target: Path, start: int, end: int, rest: bytes = b"") -> None:
    """Write the bytes from ``start`` to ``end`` of an open file to ``target``, then ``rest``, and sync it."""
    with opened(target, NEW_FILE) as descriptor:
        for at in range(start, end, WINDOW_BYTES):
            write_fully(descriptor, (os.pread(source, min(WINDOW_BYTES, end - at), at),), at - start)
        if rest:
            write_fully(descriptor, (rest,), end - start)
        os.fsync(descriptor)


def _free_name(folder: Path, segment: Segment, offset: int, prefix: str) -> Path:
    """``<prefix><base lsn>-<epoch>-<offset>``, numbered if that name is taken."""
    name = f"{prefix}{segment.path.stem}-{offset}"
    numbered = (f"{name}.{number}" for number in count(2))
    return next(path for each in chain((name,), numbered) if not (path := folder / each).exists())


def remove_segments(
    folder: Path, upto_lsn: int, older_than_s: float, now_s: float, retire: Callable[[str], None] = lambda _: None
) -> list[str]:
    """Remove segments that end at or below ``upto_lsn`` and were last written ``older_than_s`` ago. Returns the names.

    ``upto_lsn`` MUST be chained and signed. ``now_s`` is seconds since 1970, by the file system's clock. ``retire``,
    the method of the writer if there is one, is called with each name before its removal. After a crash in the middle
    fewer segments are removed.
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


class Gap(NamedTuple):
    """Records of one epoch that are missing or damaged, from ``first_lsn`` to ``last_lsn``.

    ``payloads`` are those of the damaged records, located by their own, untrusted, headers if these can be read.
    ``is_proved`` is true if a sound record follows them in the log. Records that are only announced at its end may be
    the torn tail of a batch that was never acknowledged.
    """

    first_lsn: Lsn
    last_lsn: Lsn
    epoch: Epoch
    payloads: tuple[tuple[Lsn, bytes], ...]
    is_proved: bool


def lost_ends(folder: Path) -> list[Path]:
    """The files that were cut off and whose records are not appended again yet, in log order."""
    return sorted(path for path in folder.iterdir() if _CUT_NAME.fullmatch(path.name))


def mark_returned(path: Path) -> None:
    """Rename a file whose records are in the log again, durably."""
    path.rename(path.with_name(RETURNED_PREFIX + path.name.removeprefix(CUT_PREFIX)))
    sync_folder(path.parent)


def records_in(path: Path, node_id: str) -> Iterator[Record | Gap]:
    """The records of a file that was cut off, and the gaps between them. Some records of its first batch may still be
    in the log, too.

    Raises:
        OSError: it cannot be read.
    """
    named = _CUT_NAME.fullmatch(path.name)
    assert named is not None
    segment = Segment(Lsn(int(named["base"])), Epoch(int(named["epoch"])), path)
    return _records_of(segment, node_id, 0 if int(named["offset"]) else SEGMENT_HEADER_BYTES)


def records_below(folder: Path, node_id: str) -> Iterator[Record | Gap]:
    """The records of the whole log whose segments are in ``folder``, and the gaps between them.

    Raises:
        OSError: one cannot be read.
    """
    last_lsn, last_gap = BEFORE_FIRST, None
    for segment in list_segments(folder):
        if last_gap is not None:
            yield last_gap._replace(is_proved=True)
            last_lsn = last_gap.last_lsn
        previous_lsn = BEFORE_FIRST
        with suppress(FormatError):  # not known if the header is damaged
            previous_lsn = read_header(segment).previous_lsn
        if BEFORE_FIRST < last_lsn < previous_lsn:
            yield Gap(after(last_lsn), previous_lsn, segment.epoch, (), is_proved=True)
        last_gap, last_lsn = None, max(last_lsn, before(segment.base_lsn))
        for each in _records_of(segment, node_id, SEGMENT_HEADER_BYTES):
            if isinstance(each, Gap) and not each.is_proved:
                last_gap = each
                continue
            yield each
            last_lsn = each.lsn if isinstance(each, Record) else each.last_lsn
    if last_gap is not None:
        yield last_gap


def highest_hlc(folder: Path, node_id: str) -> Hlc | None:
    """The highest HLC of the log whose segments are in ``folder``: that of its last sound record, as LSNs and HLCs of
    a node rise together. None without a sound record."""
    newest_first = reversed(list_segments(folder))
    lasts = (deque(_headers_of(segment, node_id, SEGMENT_HEADER_BYTES), maxlen=1) for segment in newest_first)
    return next((hlc for last in lasts for _, _, _, hlc, _, _ in last), None)


def _headers_of(segment: Segment, node_id: str, at: int) -> Iterator[tuple[int, int, Lsn, Hlc, int, mmap.mmap]]:
    """Every sound record from byte ``at`` on, including BATCH records: offsets of its start and end, its LSN, HLC and
    type, and the segment's data."""
    hashed = node_hash(node_id)
    with opened(segment.path) as descriptor:
        if os.fstat(descriptor).st_size <= at:
            return
        with mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ) as data:
            while 0 <= at <= len(data) - RECORD_HEADER_BYTES:
                crc, length, lsn, physical_ms, logical, found_hash, _, kind = RECORD.unpack_from(data, at)
                if (
                    found_hash == hashed
                    and RECORD_HEADER_BYTES <= length <= min(RECORD_BYTES_LIMIT, len(data) - at)
                    and crc32(data[at + CRC_BYTES : at + length]) == crc
                ):
                    yield at, at + length, Lsn(lsn), Hlc(physical_ms, logical, node_id), kind, data
                    at += length
                    continue
                found = data.find(hashed, at + 1 + _HASH_AT)
                at = found - _HASH_AT if found >= 0 else -1


def _records_of(segment: Segment, node_id: str, start: int) -> Iterator[Record | Gap]:
    """The sound records from byte ``start`` on in the order of their LSNs, and the gaps between them."""
    next_lsn, announced_lsn, sound_end = segment.base_lsn, BEFORE_FIRST, start
    for at, end, lsn, _, kind, data in _headers_of(segment, node_id, start):
        if kind == BATCH_RECORD_TYPE:
            if end - at == BATCH.size:
                announced_lsn = max(announced_lsn, Lsn(BATCH.unpack_from(data, at)[7]))
            if lsn <= next_lsn:
                sound_end = end
            continue
        if lsn < next_lsn:
            sound_end = end
            continue
        if lsn > next_lsn:
            payloads = tuple(_damaged(data, sound_end, at, next_lsn, before(lsn)))
            yield Gap(next_lsn, before(lsn), segment.epoch, payloads, is_proved=True)
        yield next(records_of(data[at:end], segment.epoch, node_id))
        next_lsn, sound_end = after(lsn), end
    if announced_lsn >= next_lsn:
        yield Gap(next_lsn, announced_lsn, segment.epoch, (), is_proved=False)


def _damaged(data: mmap.mmap, at: int, end: int, first_lsn: Lsn, last_lsn: Lsn) -> Iterable[tuple[Lsn, bytes]]:
    """The payloads between two sound records, by the lengths and LSNs that the damaged headers claim."""
    while at + RECORD_HEADER_BYTES <= end:
        _, length, lsn, _, _, _, _, kind = RECORD.unpack_from(data, at)
        if not RECORD_HEADER_BYTES <= length <= end - at:
            return
        if kind != BATCH_RECORD_TYPE and first_lsn <= lsn <= last_lsn:
            yield Lsn(lsn), data[at + RECORD_HEADER_BYTES : at + length]
        at += length
