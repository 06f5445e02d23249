"""Making a log ready for append after any stop: the torn tail goes, everything else stays or stops the start.

Steps of ``recover``:

    1. Survey the log, changing nothing.
    2. Refuse corruption, and a log that ends below what is known durable.
    3. Keep a copy of the torn batch as ``torn-...``, synced, and let its BATCH record announce only the
       records before the first bad one.
    4. Cut the last segment behind its last batch, write that batch again over itself, and sync: after a
       failed fsync the kernel may hold pages as clean that never reached the disk, and a mere fsync
       would then prove nothing.

A crash in between leaves a torn tail with the same survivors, or none.

Afterwards, always::

    every record up to last_lsn is durable, and every byte of the log is sound
    nothing at or below a known durable position was cut
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from zlib import crc32

from ledger.errors import WalCorruptError
from ledger.hlc import Hlc
from ledger.positions import BEFORE_FIRST, Epoch, Lsn
from wal import control as control_file
from wal.aside import copy_tail, set_aside
from wal.format import BATCH_RECORD_BYTES, SEGMENT_HEADER_BYTES, BatchRecord, encode_batch
from wal.history import History
from wal.scan import WINDOW_BYTES, Damage, end_of_data
from wal.segment import Segment, remove_unnamed, sync_folder, write_fully
from wal.survey import Finding, Survey, survey

TORN_PREFIX = "torn-"


@dataclass(frozen=True, slots=True)
class TornTail:
    """What was cut: everything from byte ``offset`` of ``segment`` on.

    The cut LSNs are ``first_lsn`` to ``last_lsn``; ``last_lsn`` is None when not even the BATCH record was
    whole. ``copies`` are the files that keep what was cut.
    """

    segment: str
    offset: int
    reason: str
    cut_bytes: int
    first_lsn: Lsn
    last_lsn: Lsn | None
    copies: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Recovered:
    """A log ready for append: all of it is durable.

    ``last_lsn`` is 0 when there was no log, ``wal_id`` None when there was no control file either.
    ``first_lsn`` is the oldest LSN still there, or the next one when none is: a caller that has chained
    less than ``first_lsn - 1`` has lost records.
    ``history`` is that of the records that are there, as their segments tell it.
    ``highest_hlc`` is the highest time that may have been given away, cut records included.
    """

    last_lsn: Lsn
    last_epoch: Epoch
    highest_hlc: Hlc | None
    cut: TornTail | None
    epoch_ends: dict[Epoch, Lsn]
    history: History
    wal_id: str | None
    first_lsn: Lsn
    segments: int
    records: int


def recover(
    folder: Path, node_id: str, known_durable_lsn: Lsn = BEFORE_FIRST, *, accept_lost: bool = False
) -> Recovered:
    """Bring the log in ``folder`` into a state that can be appended to. The caller MUST hold its lock.

    ``known_durable_lsn`` is the highest LSN that anyone outside was told is durable; the control file's
    is taken into account here. With ``accept_lost`` corruption is cut like a torn tail, with all that is
    behind it set aside, and a log that ends too early is taken as it is.

    Raises:
        WalCorruptError: damage that is not a torn tail, or an end below a known durable position.
            Nothing was changed.
        OSError: a file cannot be read, or the repair cannot be written; it can be tried again.
    """
    # 1. Survey.
    control = control_file.load(folder)
    known = max(known_durable_lsn, control.durable_lsn if control else BEFORE_FIRST)
    found = survey(folder, node_id, control, known)

    # 2. Refuse.
    finding = found.finding
    if finding is not None and finding.corruption is not None and not accept_lost:
        raise WalCorruptError(
            finding.segment.name, finding.damage.offset, f"{finding.damage.reason}; {finding.corruption}"
        )
    if finding is None and found.last_lsn < known and not accept_lost:
        name = found.last_segment.name if found.last_segment else str(folder)
        raise WalCorruptError(
            name, found.end, f"the log ends with LSN {found.last_lsn}, but LSN {known} is known to be durable"
        )

    # 3. Keep a copy, announce what is left.
    cut = _set_tail_aside(folder, found, finding) if finding is not None else None

    # 4. Cut and sync.
    if found.last_segment is not None:
        _settle(found.last_segment, found.end, found.last_batch_offset)
    remove_unnamed(folder)
    sync_folder(folder)
    return Recovered(
        last_lsn=found.last_lsn,
        last_epoch=found.last_epoch,
        highest_hlc=found.highest_hlc,
        cut=cut,
        epoch_ends=found.epoch_ends,
        history=found.history,
        wal_id=found.wal_id,
        first_lsn=found.first_lsn or Lsn(1),
        segments=found.segments,
        records=found.records,
    )


def _set_tail_aside(folder: Path, found: Survey, finding: Finding) -> TornTail:
    """Set aside what is bad and make ``found`` say what is left."""
    segment, damage = finding.segment, finding.damage
    copies = [set_aside(folder, later, TORN_PREFIX) for later in reversed(finding.later)]
    if damage.offset < SEGMENT_HEADER_BYTES:
        cut_bytes = segment.path.stat().st_size
        copies.append(set_aside(folder, segment, TORN_PREFIX))
    else:
        copies.append(copy_tail(folder, segment, damage.batch_offset, TORN_PREFIX))
        cut_bytes = _announce_survivors(segment, damage)
        found.records += damage.survivors
        found.last_lsn = Lsn(found.last_lsn + damage.survivors)
        found.epoch_ends[segment.epoch] = found.last_lsn
        if damage.survivors:
            found.saw_records(segment)
            found.last_batch_offset = damage.batch_offset
            found.end = damage.offset
    return TornTail(
        segment=segment.name,
        offset=damage.offset,
        reason=damage.reason,
        cut_bytes=cut_bytes,
        first_lsn=damage.lsn,
        last_lsn=damage.batch.last_lsn if damage.batch and not finding.later else None,
        copies=tuple(copies),
    )


def _announce_survivors(segment: Segment, damage: Damage) -> int:
    """Let the BATCH record announce what is left before the damage; how many bytes are to go behind it."""
    cut_at = damage.offset if damage.survivors else damage.batch_offset
    descriptor = os.open(segment.path, os.O_RDWR | os.O_CLOEXEC)
    try:
        if damage.survivors:
            assert damage.batch is not None
            assert damage.sound_hlc is not None
            body_at = damage.batch_offset + BATCH_RECORD_BYTES
            body = os.pread(descriptor, cut_at - body_at, body_at)
            batch = BatchRecord(damage.batch.first_lsn, Lsn(damage.lsn - 1), damage.sound_hlc, len(body), crc32(body))
            write_fully(descriptor, (encode_batch(batch),), damage.batch_offset)
        return end_of_data(descriptor, cut_at) - cut_at
    finally:
        os.close(descriptor)


def _settle(segment: Segment, end: int, last_batch_offset: int | None) -> None:
    """Cut a segment at ``end`` and make what is kept durable, whatever an earlier fsync said."""
    descriptor = os.open(segment.path, os.O_RDWR | os.O_CLOEXEC)
    try:
        os.ftruncate(descriptor, end)
        for start in range(last_batch_offset or SEGMENT_HEADER_BYTES, end, WINDOW_BYTES):
            data = os.pread(descriptor, min(WINDOW_BYTES, end - start), start)
            write_fully(descriptor, (data,), start)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
