"""Verifying and dumping a log for an operator. Changes nothing, takes no lock, and may run beside the writer.

A batch that is being written looks damaged for a moment, so damage at the end of a log is reported only if it is the
same a moment later.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeVar

from ledger.chain.record import decode as decode_event
from ledger.errors import InvalidInputError, NotFoundError, WalCorruptError
from ledger.facts.events import ACTIONS, BATCH_RECORD_TYPE
from ledger.positions import BEFORE_FIRST, Epoch, Lsn
from wal import control as control_file
from wal.control import Control
from wal.format import BATCH_RECORD_BYTES, SEGMENT_HEADER_BYTES, FormatError, hlc_of
from wal.reader import Batch, Damage, Record, batch_at, find_batch, records_of
from wal.recovery import survey
from wal.segment import LOCK_NAME, Segment, list_segments, opened, read_header

Seen = TypeVar("Seen")

SETTLE_S = 0.5
"""How long damage must stay the same before it is reported: a writer that waits for a processor makes no progress."""

READ_INTERVAL_S = 0.05
SETTLE_ATTEMPTS = 50
"""How often a log is read again while its writer moves on."""


@dataclass(frozen=True, slots=True)
class WalReport:
    """The content of one WAL folder. ``verdict`` is ``ok``, ``torn`` (the next start repairs it) or ``corrupt``.

    The latter two have ``segment``, ``offset`` and ``reason``.
    """

    folder: str
    node_id: str
    wal_id: str | None
    verdict: str
    segments: int
    records: int
    first_lsn: Lsn
    last_lsn: Lsn
    last_epoch: Epoch
    known_durable_lsn: Lsn
    segment: str | None = None
    offset: int | None = None
    reason: str | None = None


def wal_folders(path: Path) -> list[Path]:
    """The WAL folders at ``path``, which is a WAL folder itself or a ``wal.dir`` that holds some.

    Raises:
        NotFoundError: there is none.
    """
    if not path.is_dir():
        raise NotFoundError(f"{path} is not a folder")
    folders = [path] if _is_wal(path) else sorted(each for each in path.iterdir() if each.is_dir() and _is_wal(each))
    if not folders:
        raise NotFoundError(f"{path} holds no write-ahead log: give wal.dir, or the folder of one node in it")
    return folders


def verify(path: Path) -> list[WalReport]:
    """A report on every log in ``path``.

    Raises:
        NotFoundError: there is none.
    """
    return [_report(folder) for folder in wal_folders(path)]


def dump(path: Path) -> Iterator[dict[str, Any]]:
    """Every record of every log in ``path``, BATCH records too, as plain values for JSON.

    Keys: ``segment``, ``offset``, ``lsn``, ``epoch``, ``hlc``, ``type``, ``action``, ``length``, ``state``. The state
    follows from the control file's positions; that of a BATCH record is that of its last record. Records of events
    also have ``tenant_id``, ``job_id`` and ``payload``; others have ``payload`` if it is text, else ``payload_hex``.
    For damage an item has ``segment``, ``offset`` and ``error`` instead, and the dump continues after it.

    Raises:
        NotFoundError: there is no log.
    """
    for folder in wal_folders(path):
        node_id, control, _ = _identity(folder)
        for segment in list_segments(folder):
            for item in _dump_segment(segment, node_id):
                if "error" not in item:
                    item["state"] = _state(control, item.get("last_lsn", item["lsn"]))
                yield item


def _state(control: Control | None, lsn: int) -> str:
    """The lowest state that the record at ``lsn`` can be in: the last whose position it does not exceed."""
    positions = (control.committed_lsn, control.chained_lsn, control.signed_lsn) if control is not None else ()
    return ("PENDING", "REGIONAL", "GLOBAL", "COMPACTED")[sum(lsn <= position for position in positions)]


def _is_wal(folder: Path) -> bool:
    return any((folder / name).is_file() for name in (LOCK_NAME, control_file.CONTROL_NAME)) or bool(
        list_segments(folder)
    )


def _identity(folder: Path) -> tuple[str, Control | None, WalCorruptError | None]:
    """Node id of this log, the control file, and its damage. The id is that of the control file, else of the first
    sound segment, else the folder's name."""
    control, damage = None, None
    try:
        control = control_file.load(folder)
    except WalCorruptError as error:
        damage = error
    if control is not None:
        return control.node_id, control, None
    for segment in list_segments(folder):
        with suppress(FormatError):
            return read_header(segment).node_id, None, damage
    return folder.name, None, damage


def _report(folder: Path) -> WalReport:
    node_id, control, damaged_control = _identity(folder)
    known = control.durable_lsn if control else BEFORE_FIRST
    found = _settled(partial(survey, folder, node_id, control, known), attrgetter("finding"))
    verdict = "ok"
    place: tuple[str, int, str] | tuple[None, None, None] = (None, None, None)
    if damaged_control is not None:
        verdict, place = "corrupt", (damaged_control.segment, 0, damaged_control.reason)
    elif (finding := found.finding) is not None:
        verdict = "torn" if finding.corruption is None else "corrupt"
        reason = f"{finding.damage.reason}; {finding.corruption or 'nothing proves that it had been synced'}"
        place = (finding.segment.name, finding.damage.offset, reason)
    elif found.last_lsn < known:
        name = found.last_segment.name if found.last_segment else folder.name
        verdict, place = "corrupt", (name, found.end, f"the log ends below LSN {known}, known to be durable")
    return WalReport(
        str(folder),
        found.node_id,
        found.wal_id,
        verdict,
        found.segments,
        found.records,
        found.first_lsn,
        found.last_lsn,
        found.last_epoch,
        known,
        *place,
    )


def _settled(read: Callable[[], Seen], damage_in: Callable[[Seen], object]) -> Seen:
    """The result of ``read`` once it has no damage, or the same damage for ``SETTLE_S``. A read during which a segment
    was removed is repeated."""
    before, since_s = None, 0.0
    for _ in range(SETTLE_ATTEMPTS):
        with suppress(FileNotFoundError):
            seen = read()
            if (damage := damage_in(seen)) is None:
                return seen
            if damage != before:
                before, since_s = damage, time.monotonic()
            elif time.monotonic() - since_s >= SETTLE_S:
                return seen
        time.sleep(READ_INTERVAL_S)
    return read()


def _dump_segment(segment: Segment, node_id: str) -> Iterator[dict[str, Any]]:
    try:
        read_header(segment)
    except FormatError as error:
        yield {"segment": segment.name, "offset": 0, "error": str(error)}
    with opened(segment.path) as descriptor:
        offset: int | None = SEGMENT_HEADER_BYTES
        above_lsn = Lsn(segment.base_lsn - 1)
        while offset is not None:
            read = partial(batch_at, descriptor, offset, None, node_id)
            if (found := _settled(read, partial(_last_damage, descriptor, above_lsn, node_id))) is None:
                return
            damage = found if isinstance(found, Damage) else None
            batch = found if isinstance(found, Batch) else _sound_part(descriptor, found)
            if batch is not None:
                yield from _items(segment, node_id, batch)
                offset, above_lsn = batch.end, batch.record.last_lsn
            if damage is not None:
                yield {"segment": segment.name, "offset": damage.offset, "error": damage.reason}
                offset = find_batch(descriptor, damage.offset + 1, above_lsn, node_id)


def _last_damage(descriptor: int, above_lsn: Lsn, node_id: str, found: Batch | Damage | None) -> Damage | None:
    """The damage if no batch follows it, so that it may be a batch being written; else None."""
    if not isinstance(found, Damage) or find_batch(descriptor, found.offset + 1, above_lsn, node_id) is not None:
        return None
    return found


def _sound_part(descriptor: int, damage: Damage) -> Batch | None:
    """A damaged batch up to its first bad record; None if the BATCH record is the bad one."""
    if damage.batch is None:
        return None
    body_at = damage.batch_offset + BATCH_RECORD_BYTES
    return Batch(damage.batch_offset, damage.batch, os.pread(descriptor, damage.offset - body_at, body_at))


def _items(segment: Segment, node_id: str, batch: Batch) -> Iterator[dict[str, Any]]:
    """The BATCH record of a batch and its records, as far as they are sound."""
    offset, announced, body = batch
    first_lsn, last_lsn, hlc, *_ = announced
    opening = Record(first_lsn, segment.epoch, hlc_of(hlc, node_id), BATCH_RECORD_TYPE, b"", BATCH_RECORD_BYTES)
    yield _item(segment, offset, opening) | {"first_lsn": first_lsn, "last_lsn": last_lsn}
    offset += BATCH_RECORD_BYTES
    for record in records_of(body, segment.epoch, node_id):
        yield _item(segment, offset, record) | _payload_item(record.payload)
        offset += record.length


def _item(segment: Segment, offset: int, record: Record) -> dict[str, Any]:
    return {
        "segment": segment.name,
        "offset": offset,
        "lsn": record.lsn,
        "epoch": record.epoch,
        "hlc": record.hlc.text(),
        "type": record.type,
        "action": "BATCH" if record.type == BATCH_RECORD_TYPE else ACTIONS.get(record.type, ""),
        "length": record.length,
    }


def _payload_item(payload: bytes) -> dict[str, object]:
    with suppress(InvalidInputError, UnicodeDecodeError):
        event = decode_event(payload)
        return {"tenant_id": event.tenant_id, "job_id": event.job_id, "payload": event.payload.decode()}
    with suppress(UnicodeDecodeError):
        return {"payload": payload.decode()}
    return {"payload_hex": payload.hex()}
