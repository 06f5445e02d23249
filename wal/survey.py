"""Judging a whole log: where it ends, and whether what is wrong is a torn tail or corruption.

Nothing here changes anything.

What proves that bytes had been synced, so that damage to them is corruption:

    a sound BATCH record behind them      the writer never has two unsynced batches
    a later segment                       it is made only when all before it is synced
    a known durable position at or above  somebody was told so

Damage that nothing of this covers is the torn tail of the last batch. Segments of another WAL or node,
missing segments and epochs that go down are corruption: no crash makes them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from ledger.hlc import Hlc, unpack16
from ledger.positions import BEFORE_FIRST, NO_EPOCH, Epoch, Lsn
from wal import history
from wal.control import Control
from wal.format import FormatError
from wal.history import History
from wal.scan import Damage, find_batch, scan_segment
from wal.segment import Segment, list_segments, misplaced, opened, read_header


class Finding(NamedTuple):
    """What is wrong with a log, at its first place. ``later`` are the segments behind it.

    ``corruption`` says why it cannot be a torn tail; None when it is one.
    """

    segment: Segment
    damage: Damage
    later: tuple[Segment, ...]
    corruption: str | None


@dataclass(frozen=True, slots=True)
class TornTail:
    """What recovery cut: everything from byte ``offset`` of ``segment`` on.

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


@dataclass(slots=True)
class Survey:
    """One log as it stands. ``last_lsn`` is that of its last sound record, 0 for an empty log.

    ``first_lsn`` is the oldest LSN still there; of an empty log that was recovered the next one, so a caller that has
    chained less than ``first_lsn - 1`` has lost records. ``wal_id`` is None when there is no control file either.
    ``end`` and ``last_batch_offset`` are places in ``last_segment``, the last one with a sound header.
    ``highest_hlc`` counts what a torn batch announced, too: nobody must be given that time again.
    ``epoch_ends`` has the last LSN of the log at the end of each epoch, ``history`` the first of each that left any.
    ``finding`` is what was wrong, ``cut`` what recovery took away because of it.
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
    cut: TornTail | None = None

    def saw_records(self, segment: Segment) -> None:
        """``segment`` holds at least one."""
        if not self.history or self.history[-1].epoch < segment.epoch:
            self.history = history.begin(self.history, segment.epoch, segment.base_lsn)

    def saw(self, hlc: bytes | None) -> None:
        """Raise ``highest_hlc`` to a packed one of this node."""
        if hlc is None:
            return
        physical_ms, logical, _ = unpack16(hlc)
        seen = Hlc(physical_ms, logical, self.node_id)
        if self.highest_hlc is None or seen > self.highest_hlc:
            self.highest_hlc = seen


def survey(folder: Path, node_id: str, control: Control | None, known_durable_lsn: Lsn) -> Survey:
    """Read the log in ``folder`` to its end or to the first thing wrong with it.

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
    """Add ``segment`` to ``result``; what is wrong with it, and why that is surely corruption."""
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
    reason = misplaced(
        header,
        node_id=result.node_id,
        wal_id=result.wal_id,
        epoch=result.last_epoch,
        last_lsn=None if first else result.last_lsn,
    )
    if reason is not None:
        return Damage(0, next_lsn, reason, 0), "no crash does that"
    with opened(segment.path) as descriptor:
        scan = scan_segment(descriptor, header.base_lsn, result.node_id)
    written_by = history.epoch_of(known, header.base_lsn) if scan.last_lsn >= header.base_lsn else None
    if written_by not in (None, header.epoch):
        reason = f"the segment is of epoch {header.epoch}, but by the control file epoch {written_by} wrote its records"
        return Damage(0, next_lsn, reason, 0), "no crash does that"
    result.wal_id = header.wal_id
    result.segments += 1
    result.records += scan.last_lsn - header.base_lsn + 1
    result.last_lsn = result.epoch_ends[header.epoch] = scan.last_lsn
    result.last_epoch = header.epoch
    result.last_segment = segment
    result.end = scan.end
    result.last_batch_offset = scan.last_batch_offset
    if scan.last_lsn >= header.base_lsn:
        result.saw_records(segment)
    result.saw(scan.highest_hlc)
    if scan.damage is not None and scan.damage.batch is not None:
        result.saw(scan.damage.batch.hlc)
    return scan.damage, None


def _proof_of_sync(
    result: Survey, segment: Segment, damage: Damage, later: tuple[Segment, ...], known_durable_lsn: Lsn
) -> str | None:
    """Why ``damage`` cannot be a torn tail; None when it can."""
    if later:
        return f"segment {later[0].name} was begun later, so this one had been synced"
    if damage.lsn <= known_durable_lsn:
        return f"LSN {known_durable_lsn} is known to be durable"
    with opened(segment.path) as descriptor:
        behind = find_batch(descriptor, damage.offset + 1, result.last_lsn, result.node_id)
    if behind is not None:
        return f"the batch at byte {behind} was written later, so this had been synced"
    return None
