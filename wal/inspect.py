"""Looking into a log for an operator. Changes nothing, takes no lock, and may run beside the writer.

A batch that is being written looks damaged for a moment, so damage at the end of a log counts only when
it is still the same a moment later.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from ledger.chain.record import decode as decode_event
from ledger.errors import InvalidInputError, NotFoundError, WalCorruptError
from ledger.hlc import unpack16
from ledger.machines.events import ACTIONS, BATCH_RECORD_TYPE
from ledger.positions import BEFORE_FIRST, Epoch, Lsn
from wal import control as control_file
from wal.control import Control
from wal.format import (
    BATCH_RECORD_BYTES,
    HLC_AT,
    RECORD,
    RECORD_HEADER_BYTES,
    SEGMENT_HEADER_BYTES,
    BatchRecord,
    FormatError,
    decode_batch,
)
from wal.lock import LOCK_NAME
from wal.scan import Damage, end_of_data, find_bad_record, find_batch
from wal.segment import Segment, list_segments, read_header
from wal.survey import Survey, survey

SETTLE_S = 0.05
"""How long damage must stand unchanged before it counts."""

SETTLE_ATTEMPTS = 50
"""How often a log is read again while its writer moves on."""


@dataclass(frozen=True, slots=True)
class WalReport:
    """What stands in one WAL folder. ``verdict`` is ``ok``, ``torn`` (the next start repairs it) or ``corrupt``.

    For the latter two ``segment``, ``offset`` and ``reason`` say where and why.
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

    def to_json(self) -> dict[str, object]:
        """Plain values, for JSON."""
        return asdict(self)


def wal_folders(path: Path) -> list[Path]:
    """The WAL folders meant by ``path``, which is one itself or a ``wal.dir`` that holds some.

    Raises:
        NotFoundError: there is none.
    """
    if not path.is_dir():
        raise NotFoundError(f"{path} is not a folder")
    inside = (sub for sub in path.iterdir() if sub.is_dir() and _is_wal(sub))
    folders = [path] if _is_wal(path) else sorted(inside)
    if not folders:
        raise NotFoundError(f"{path} holds no write-ahead log: give wal.dir, or the folder of one node in it")
    return folders


def verify(path: Path) -> list[WalReport]:
    """A report on every log in ``path``.

    Raises:
        NotFoundError: there is none.
    """
    return [_report(folder) for folder in wal_folders(path)]


def dump(path: Path) -> Iterator[dict[str, object]]:
    """Every record of every log in ``path``, BATCH records too, as plain values for JSON.

    Keys: ``segment``, ``offset``, ``lsn``, ``epoch``, ``hlc``, ``type``, ``action``, ``length``; for records of
    events also ``tenant_id``, ``job_id`` and ``payload``; for others ``payload`` when it is text, else
    ``payload_hex``. Where the log is damaged an item has ``segment``, ``offset`` and ``error`` instead, and
    reading goes on behind it.

    Raises:
        NotFoundError: there is no log.
    """
    for folder in wal_folders(path):
        node_id = _node_id(folder, _control(folder)[0])
        for segment in list_segments(folder):
            yield from _dump_segment(segment, node_id)


def _is_wal(folder: Path) -> bool:
    return any((folder / name).is_file() for name in (LOCK_NAME, control_file.CONTROL_NAME)) or bool(
        list_segments(folder)
    )


def _control(folder: Path) -> tuple[Control | None, WalCorruptError | None]:
    try:
        return control_file.load(folder), None
    except WalCorruptError as error:
        return None, error


def _node_id(folder: Path, control: Control | None) -> str:
    """Whose log this is: as the control file says, or the first sound segment, or the folder's name."""
    if control is not None:
        return control.node_id
    for segment in list_segments(folder):
        try:
            return read_header(segment).node_id
        except FormatError:
            continue
    return folder.name


def _report(folder: Path) -> WalReport:
    control, damaged_control = _control(folder)
    known = control.durable_lsn if control else BEFORE_FIRST
    found = _settled_survey(folder, _node_id(folder, control), control, known)
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


def _settled_survey(folder: Path, node_id: str, control: Control | None, known: Lsn) -> Survey:
    """A survey whose finding, if any, is not a batch in flight or a segment just removed."""
    before: object = None
    for _ in range(SETTLE_ATTEMPTS):
        try:
            found = survey(folder, node_id, control, known)
        except FileNotFoundError:
            continue
        if found.finding is None or found.finding == before:
            break
        before = found.finding
        time.sleep(SETTLE_S)
    return found


def _dump_segment(segment: Segment, node_id: str) -> Iterator[dict[str, object]]:
    try:
        read_header(segment)
    except FormatError as error:
        yield {"segment": segment.name, "offset": 0, "error": str(error)}
    descriptor = os.open(segment.path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        offset: int | None = SEGMENT_HEADER_BYTES
        above_lsn = Lsn(segment.base_lsn - 1)
        while offset is not None:
            batch, damage = _settled_batch(descriptor, offset, Lsn(above_lsn + 1), node_id)
            if batch is not None:
                yield from _items(segment, descriptor, node_id, offset, batch, damage)
                above_lsn = batch.last_lsn
                offset += BATCH_RECORD_BYTES + batch.body_bytes
            elif damage is None:
                return
            if damage is not None:
                yield {"segment": segment.name, "offset": damage.offset, "error": damage.reason}
                offset = find_batch(descriptor, damage.offset + 1, above_lsn, node_id)
    finally:
        os.close(descriptor)


def _settled_batch(
    descriptor: int, offset: int, next_lsn: Lsn, node_id: str
) -> tuple[BatchRecord | None, Damage | None]:
    """What the BATCH record at ``offset`` announces and what is wrong there; neither at the end of the segment."""
    before = None
    for _ in range(SETTLE_ATTEMPTS):
        batch, damage = _read_batch(descriptor, offset, next_lsn, node_id)
        if damage is None or damage == before:
            break
        before = damage
        time.sleep(SETTLE_S)
    return batch, damage


def _read_batch(descriptor: int, offset: int, next_lsn: Lsn, node_id: str) -> tuple[BatchRecord | None, Damage | None]:
    data = os.pread(descriptor, BATCH_RECORD_BYTES, offset)
    try:
        batch = decode_batch(data, 0, len(data))
    except FormatError as error:
        if end_of_data(descriptor, offset) == offset:
            return None, None
        return None, Damage(offset, next_lsn, str(error), offset)
    return batch, find_bad_record(descriptor, offset, batch, node_id)


def _items(
    segment: Segment, descriptor: int, node_id: str, offset: int, batch: BatchRecord, damage: Damage | None
) -> Iterator[dict[str, object]]:
    """The BATCH record at ``offset`` and the sound records behind it."""
    size = BATCH_RECORD_BYTES + batch.body_bytes
    data = os.pread(descriptor, size if damage is None else max(damage.offset - offset, BATCH_RECORD_BYTES), offset)
    at = 0
    while at < len(data):
        _, length, lsn, _, _, _, _, kind = RECORD.unpack_from(data, at)
        physical_ms, logical, _ = unpack16(data[at : at + RECORD_HEADER_BYTES][HLC_AT])
        item: dict[str, object] = {
            "segment": segment.name,
            "offset": offset + at,
            "lsn": lsn,
            "epoch": segment.epoch,
            "hlc": f"{physical_ms}:{logical}:{node_id}",
            "type": kind,
            "action": "BATCH" if kind == BATCH_RECORD_TYPE else ACTIONS.get(kind, ""),
            "length": length,
        }
        if kind == BATCH_RECORD_TYPE:
            yield item | {"first_lsn": batch.first_lsn, "last_lsn": batch.last_lsn}
        else:
            yield item | _payload_item(data[at + RECORD_HEADER_BYTES : at + length])
        at += length


def _payload_item(payload: bytes) -> dict[str, object]:
    try:
        event = decode_event(payload)
        return {"tenant_id": event.tenant_id, "job_id": event.job_id, "payload": event.payload.decode()}
    except (InvalidInputError, UnicodeDecodeError):
        return _plain_payload_item(payload)


def _plain_payload_item(payload: bytes) -> dict[str, object]:
    try:
        return {"payload": payload.decode()}
    except UnicodeDecodeError:
        return {"payload_hex": payload.hex()}
