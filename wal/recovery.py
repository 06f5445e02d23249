"""Making a log ready for append after any stop: the torn tail goes, everything else stays or stops the start.

Steps of ``recover``:

    1. Survey the log, changing nothing.
    2. Refuse corruption, and a log that ends below what is known durable.
    3. Keep a copy of the torn batch as ``torn-...``, synced, and let its BATCH record announce only the
       records before the first bad one. Where the damage is corruption that was accepted, what is copied was
       answered: it is named ``cut-...``, and its sound records are appended again (``wal.lost_ends``).
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
from pathlib import Path

from ledger.errors import WalCorruptError
from ledger.positions import BEFORE_FIRST, Lsn
from wal import control as control_file
from wal.aside import copy_tail, set_aside
from wal.format import BATCH_RECORD_BYTES, SEGMENT_HEADER_BYTES, batch_of, encode_batch
from wal.scan import WINDOW_BYTES, Damage, end_of_data
from wal.segment import Segment, opened, remove_unnamed, sync_folder, write_fully
from wal.survey import Finding, Survey, TornTail, survey
from wal.truncation import CUT_PREFIX

TORN_PREFIX = "torn-"


def recover(folder: Path, node_id: str, known_durable_lsn: Lsn = BEFORE_FIRST, *, accept_lost: bool = False) -> Survey:
    """Bring the log in ``folder`` into a state that can be appended to, all of it durable, and say what is there.

    The caller MUST hold its lock.

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
    if finding is not None:
        found.cut = _set_tail_aside(folder, found, finding)

    # 4. Cut and sync.
    if found.last_segment is not None:
        _settle(found.last_segment, found.end, found.last_batch_offset)
    remove_unnamed(folder)
    sync_folder(folder)
    found.first_lsn = found.first_lsn or Lsn(1)
    return found


def _set_tail_aside(folder: Path, found: Survey, finding: Finding) -> TornTail:
    """Set aside what is bad and make ``found`` say what is left."""
    segment, damage = finding.segment, finding.damage
    prefix = TORN_PREFIX if finding.corruption is None else CUT_PREFIX
    copies = [set_aside(folder, later, prefix) for later in reversed(finding.later)]
    if damage.offset < SEGMENT_HEADER_BYTES:
        cut_bytes = segment.path.stat().st_size
        copies.append(set_aside(folder, segment, prefix))
    else:
        copies.append(copy_tail(folder, segment, damage.batch_offset, prefix))
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
    with opened(segment.path, os.O_RDWR) as descriptor:
        if damage.survivors:
            assert damage.batch is not None
            assert damage.sound_hlc is not None
            body_at = damage.batch_offset + BATCH_RECORD_BYTES
            body = os.pread(descriptor, cut_at - body_at, body_at)
            batch = batch_of(damage.batch.first_lsn, Lsn(damage.lsn - 1), damage.sound_hlc, body)
            write_fully(descriptor, (encode_batch(batch),), damage.batch_offset)
        return end_of_data(descriptor, cut_at) - cut_at


def _settle(segment: Segment, end: int, last_batch_offset: int | None) -> None:
    """Cut a segment at ``end`` and make what is kept durable, whatever an earlier fsync said."""
    with opened(segment.path, os.O_RDWR) as descriptor:
        os.ftruncate(descriptor, end)
        for start in range(last_batch_offset or SEGMENT_HEADER_BYTES, end, WINDOW_BYTES):
            data = os.pread(descriptor, min(WINDOW_BYTES, end - start), start)
            write_fully(descriptor, (data,), start)
        os.fsync(descriptor)
