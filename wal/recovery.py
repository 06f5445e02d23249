"""Makes a log ready for appends after any stop: cuts off a torn tail and keeps everything else, or refuses the start.

Steps of ``recover``:

    1. Survey the log, changing nothing.
    2. Refuse corruption, and a log that ends below an LSN known to be durable.
    3. Keep a copy of the torn batch as ``torn-...``, synced, and write a BATCH record that announces only the
       records before the first bad one. If the damage is corruption that was accepted, the copy holds records
       that were acknowledged: it is named ``cut-...``, and its sound records are appended again (``wal.truncation``).
    4. Cut the last segment after its last batch, write that batch again over itself, and sync: after a
       failed fsync the kernel may hold pages as clean that never reached the disk, and another fsync alone
       would prove nothing.

A crash in between leaves a torn tail with the same sound records, or no torn tail.

Damage is corruption if the damaged bytes had been synced. Proofs of a sync:

    a sound BATCH record after them       the writer never has two unsynced batches
    a later segment                       it is created only when everything before it is synced
    a known durable position at or above  it was reported outside

Any other damage is the torn tail of the last batch. Segments of another WAL or node, missing segments and epochs that
go down are corruption, since no crash causes them.

Afterwards, always::

    every record up to last_lsn is durable, and every byte of the log is sound
    nothing at or below a known durable position was cut
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from ledger.errors import WalCorruptError
from ledger.hlc import Hlc
from ledger.positions import BEFORE_FIRST, NO_EPOCH, Epoch, Lsn
from objects import sync_folder
from wal import control as control_file
from wal.control import Control, History, begin_epoch, epoch_of
from wal.format import BATCH_RECORD_BYTES, SEGMENT_HEADER_BYTES, FormatError, batch_of, encode_batch, hlc_of
from wal.reader import WINDOW_BYTES, Damage, end_of_data, find_batch, scan_segment
from wal.segment import Segment, list_segments, misplaced, opened, read_header, remove_unnamed, write_fully
from wal.truncation import CUT_PREFIX, keep_segment, keep_tail


class Finding(NamedTuple):
    """The first damage of a log. ``later`` are the segments after it.

    ``corruption`` is the reason why the damage cannot be a torn tail; None if it is one.
    """

    segment: Segment
    damage: Damage
    later: tuple[Segment, ...]
    corruption: str | None


@dataclass(slots=True)
class Survey:
    """The content of a log. ``last_lsn`` is that of its last sound record, 0 for an empty log.

    ``first_lsn`` is the oldest LSN still in the log; for an empty recovered log it is the next LSN. So a caller that
    has chained less than ``first_lsn - 1`` has lost records. ``wal_id`` is None without segments and control file.
    ``end`` and ``last_batch_offset`` are offsets in ``last_segment``, the last one with a sound header.
    ``highest_hlc`` includes the HLC that a torn batch announced: that time MUST NOT be given again.
    ``epoch_ends`` has the last LSN of the log at the end of each epoch, ``history`` the first of each that left any.
    ``finding`` is the damage. ``cut`` has the facts of an event about the bytes that recovery cut because of it:
    everything from byte ``offset`` of ``segment`` on, ``cut_bytes`` in all, for this ``reason``; LSNs ``first_lsn`` to
    ``last_lsn``, which is None if not even the BATCH record was whole; and ``copies``, the files that keep the bytes.
    """

    node_id: str
    wal_id: str | None = None
    first_lsn: Lsn = BEFORE_FIRST
    last_lsn: Lsn = BEFORE_FIRST
    last_epoch: Epoch = NO_EPOCH
    segments: int = 0
    records: int = 0
    highest_hlc: Hlc | None = None
    epoch_ends: dict[Epoch, Lsn] = field(default_factory=dict)
    history: History = ()
    last_segment: Segment | None = None
    end: int = 0
    last_batch_offset: int | None = None
    finding: Finding | None = None
    cut: dict[str, object] | None = None

    def saw_records(self, segment: Segment) -> None:
        """Add ``segment``, which holds at least one record, to the history."""
        if not self.history or self.history[-1].epoch < segment.epoch:
            self.history = begin_epoch(self.history, segment.epoch, segment.base_lsn)

    def saw_hlc(self, packed: bytes | None) -> None:
        """Raise ``highest_hlc`` to a packed one of this node."""
        if packed is not None:
            hlc = hlc_of(packed, self.node_id)
            self.highest_hlc = max(self.highest_hlc or hlc, hlc)


def survey(folder: Path, node_id: str, control: Control | None, known_durable_lsn: Lsn) -> Survey:
    """Read the log in ``folder`` to its end or to its first damage.

    Raises:
        OSError: a file cannot be read.
    """
    result = Survey(node_id, control.wal_id if control else None)
    segments = list_segments(folder)
    for index, segment in enumerate(segments):
        later = tuple(segments[index + 1 :])
        damage, corruption = _read_segment(result, segment, control.history if control else ())
        if damage is not None:
            corruption = corruption or _proof_of_sync(result, segment, damage, later, known_durable_lsn)
            result.finding = Finding(segment, damage, later, corruption)
            return result
    return result


def _read_segment(result: Survey, segment: Segment, known: History) -> tuple[Damage | None, str | None]:
    """Add ``segment`` to ``result``; returns its damage, and the reason if that is certainly corruption."""
    first = result.segments == 0
    if first:
        result.first_lsn = segment.base_lsn
        result.last_lsn = Lsn(segment.base_lsn - 1)
    next_lsn = Lsn(result.last_lsn + 1)
    try:
        header = read_header(segment)
    except FormatError as error:
        result.last_epoch = max(result.last_epoch, segment.epoch)
        return Damage(0, next_lsn, str(error), 0), None
    with opened(segment.path) as descriptor:
        scan = scan_segment(descriptor, header.base_lsn, result.node_id)
    has_records = scan.last_lsn >= header.base_lsn
    written_by = epoch_of(known, header.base_lsn) if has_records else None
    reason = misplaced(
        header,
        node_id=result.node_id,
        wal_id=result.wal_id,
        epoch=result.last_epoch,
        last_lsn=None if first else result.last_lsn,
    )
    if reason is None and written_by not in (None, header.epoch):
        reason = f"the segment is of epoch {header.epoch}, but by the control file epoch {written_by} wrote its records"
    if reason is not None:
        return Damage(0, next_lsn, reason, 0), "no crash does that"
    result.wal_id = header.wal_id
    result.segments += 1
    result.records += scan.last_lsn - header.base_lsn + 1
    result.last_lsn = result.epoch_ends[header.epoch] = scan.last_lsn
    result.last_epoch = header.epoch
    result.last_segment = segment
    result.end = scan.end
    result.last_batch_offset = scan.last_batch_offset
    if has_records:
        result.saw_records(segment)
    result.saw_hlc(scan.highest_hlc)
    if scan.damage is not None and scan.damage.batch is not None:
        result.saw_hlc(scan.damage.batch.hlc)
    return scan.damage, None


def _proof_of_sync(
    result: Survey, segment: Segment, damage: Damage, later: tuple[Segment, ...], known_durable_lsn: Lsn
) -> str | None:
    """Why ``damage`` cannot be a torn tail; None if it can."""
    if later:
        return f"segment {later[0].name} was begun later, so this one had been synced"
    if damage.lsn <= known_durable_lsn:
        return f"LSN {known_durable_lsn} is known to be durable"
    with opened(segment.path) as descriptor:
        behind = find_batch(descriptor, damage.offset + 1, result.last_lsn, result.node_id)
    return None if behind is None else f"the batch at byte {behind} was written later, so this had been synced"


TORN_PREFIX = "torn-"


def recover(folder: Path, node_id: str, known_durable_lsn: Lsn = BEFORE_FIRST, *, accept_lost: bool = False) -> Survey:
    """Make the log in ``folder`` ready for appends, all of it durable, and return its content.

    The caller MUST hold its lock.

    ``known_durable_lsn`` is the highest LSN that was reported outside as durable; recovery also uses the control
    file's. With ``accept_lost`` corruption is cut like a torn tail, all segments after it are renamed, and a log that
    ends too early is accepted.

    Raises:
        WalCorruptError: damage that is not a torn tail, or an end below a known durable position.
            Nothing was changed.
        OSError: a file cannot be read, or the repair cannot be written; the caller may retry.
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

    # 3. Keep a copy, announce the sound records.
    if finding is not None:
        found.cut = _cut_tail(folder, found, finding)

    # 4. Cut and sync.
    if found.last_segment is not None:
        _cut_and_sync(found.last_segment, found.end, found.last_batch_offset)
    remove_unnamed(folder)
    sync_folder(folder)
    found.first_lsn = found.first_lsn or Lsn(1)
    return found


def _cut_tail(folder: Path, found: Survey, finding: Finding) -> dict[str, object]:
    """Cut off the damage and update ``found`` to what is left."""
    segment, damage = finding.segment, finding.damage
    prefix = TORN_PREFIX if finding.corruption is None else CUT_PREFIX
    copies = [keep_segment(folder, later, prefix) for later in reversed(finding.later)]
    if damage.offset < SEGMENT_HEADER_BYTES:
        cut_bytes = segment.path.stat().st_size
        copies.append(keep_segment(folder, segment, prefix))
    else:
        copies.append(keep_tail(folder, segment, damage.batch_offset, prefix))
        cut_bytes = _announce_sound_part(segment, damage)
        found.records += damage.survivors
        found.last_lsn = Lsn(found.last_lsn + damage.survivors)
        found.epoch_ends[segment.epoch] = found.last_lsn
        if damage.survivors:
            found.saw_records(segment)
            found.last_batch_offset = damage.batch_offset
            found.end = damage.offset
    return {
        "segment": segment.name,
        "offset": damage.offset,
        "reason": damage.reason,
        "cut_bytes": cut_bytes,
        "first_lsn": damage.lsn,
        "last_lsn": damage.batch.last_lsn if damage.batch and not finding.later else None,
        "copies": tuple(copies),
    }


def _announce_sound_part(segment: Segment, damage: Damage) -> int:
    """Write a BATCH record that announces the records before the damage; returns how many bytes are to be cut."""
    cut_at = damage.offset if damage.survivors else damage.batch_offset
    with opened(segment.path, os.O_RDWR) as descriptor:
        if damage.batch is not None and damage.sound_hlc is not None:
            body_at = damage.batch_offset + BATCH_RECORD_BYTES
            body = os.pread(descriptor, cut_at - body_at, body_at)
            batch = batch_of(damage.batch.first_lsn, Lsn(damage.lsn - 1), damage.sound_hlc, body)
            write_fully(descriptor, (encode_batch(batch),), damage.batch_offset)
        return end_of_data(descriptor, cut_at) - cut_at


def _cut_and_sync(segment: Segment, end: int, last_batch_offset: int | None) -> None:
    """Cut a segment at ``end`` and make the rest durable, whatever an earlier fsync returned."""
    with opened(segment.path, os.O_RDWR) as descriptor:
        os.ftruncate(descriptor, end)
        for start in range(last_batch_offset or SEGMENT_HEADER_BYTES, end, WINDOW_BYTES):
            write_fully(descriptor, (os.pread(descriptor, min(WINDOW_BYTES, end - start), start),), start)
        os.fsync(descriptor)
