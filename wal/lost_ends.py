"""Reading what was cut off a log, to append it again: ends that ``wal.truncation`` or an accepted loss cut off, and the
segments of a whole log that was replaced. They may hold records that were acknowledged.

Reading goes record by record, past any damage. Each record has a CRC of its own, so damage costs only the records in
it: the next sound one is found by the hash of the node's name, which is in every header. No payload can look like a
header, since canonical JSON has no zero bytes and the length of a header has. What is missing between two sound records
is a ``Gap``.
"""

from __future__ import annotations

import mmap
import os
import re
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple
from zlib import crc32

from ledger.facts.events import BATCH_RECORD_TYPE
from ledger.hlc import Hlc, node_hash
from ledger.positions import BEFORE_FIRST, Epoch, Lsn, after, before
from wal.format import (
    BATCH,
    CRC_BYTES,
    RECORD,
    RECORD_BYTES_LIMIT,
    RECORD_HEADER_BYTES,
    SEGMENT_HEADER_BYTES,
    FormatError,
)
from wal.reader import Record, records_of
from wal.segment import Segment, list_segments, opened, read_header, sync_folder
from wal.truncation import CUT_PREFIX

RETURNED_PREFIX = "returned-"
_CUT_NAME = re.compile(CUT_PREFIX + r"(?P<base>[0-9]{20})-(?P<epoch>[0-9]+)-(?P<offset>[0-9]+)(\.[0-9]+)?")
_HASH_AT = 28
"""Where the hash of the node's name is in a record's header."""


class Gap(NamedTuple):
    """Records of one epoch that are missing or damaged, from ``first_lsn`` to ``last_lsn``.

    ``payloads`` are those of the damaged records by their own, untrusted, headers, as far as these can be read.
    ``is_proved`` says whether something sound is behind them in the log; what is only announced at its end may be the
    torn tail of a batch that was never acknowledged.
    """

    first_lsn: Lsn
    last_lsn: Lsn
    epoch: Epoch
    payloads: tuple[tuple[Lsn, bytes], ...]
    is_proved: bool


def lost_ends(folder: Path) -> list[Path]:
    """The files that were cut off and are not appended again yet, in log order."""
    return sorted(path for path in folder.iterdir() if _CUT_NAME.fullmatch(path.name))


def mark_returned(path: Path) -> None:
    """Rename a file whose records are in the log again, durably."""
    path.rename(path.with_name(RETURNED_PREFIX + path.name.removeprefix(CUT_PREFIX)))
    sync_folder(path.parent)


def records_in(path: Path, node_id: str) -> Iterator[Record | Gap]:
    """The records of an end that was cut, and what is missing between them; in the first batch perhaps some that are in
    the log, too.

    Raises:
        OSError: it cannot be read.
    """
    named = _CUT_NAME.fullmatch(path.name)
    assert named is not None
    segment = Segment(Lsn(int(named["base"])), Epoch(int(named["epoch"])), path)
    return _records_of(segment, node_id, 0 if int(named["offset"]) else SEGMENT_HEADER_BYTES)


def records_below(folder: Path, node_id: str) -> Iterator[Record | Gap]:
    """The records of the whole log whose segments are in ``folder``, and what is missing between them.

    Raises:
        OSError: one cannot be read.
    """
    last_lsn, last_gap = BEFORE_FIRST, None
    for segment in list_segments(folder):
        if last_gap is not None:
            yield last_gap._replace(is_proved=True)
            last_lsn = last_gap.last_lsn
        previous_lsn = BEFORE_FIRST
        with suppress(FormatError):  # not known where the header is damaged
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
    a node rise together. None where there is none."""
    for segment in reversed(list_segments(folder)):
        last = deque(_headers_of(segment, node_id, SEGMENT_HEADER_BYTES), maxlen=1)
        for _, _, _, hlc, _, _ in last:
            return hlc
    return None


def _headers_of(segment: Segment, node_id: str, at: int) -> Iterator[tuple[int, int, Lsn, Hlc, int, mmap.mmap]]:
    """Every sound record from byte ``at`` on, BATCH records among them: where it begins and ends, its LSN, HLC and
    type, and the segment."""
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
    """The sound records from byte ``start`` on in the order of their LSNs, and what is missing between them."""
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
