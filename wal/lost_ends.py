"""Ends of a log that lost, as ``wal.truncation`` set them aside: read once, when they are appended again."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from ledger.positions import Epoch
from wal.format import BATCH_RECORD_BYTES, SEGMENT_HEADER_BYTES, FormatError, decode_batch
from wal.reader import Record, records_of
from wal.segment import opened, sync_folder
from wal.truncation import CUT_PREFIX

RETURNED_PREFIX = "returned-"
_NAME = re.compile(CUT_PREFIX + r"[0-9]{20}-(?P<epoch>[0-9]+)-(?P<offset>[0-9]+)(\.[0-9]+)?")


def lost_ends(folder: Path) -> list[Path]:
    """What was cut and is not appended again yet, in log order."""
    return sorted(path for path in folder.iterdir() if _NAME.fullmatch(path.name))


def records_in(path: Path, node_id: str) -> Iterator[Record]:
    """The records of an end that was set aside; in the first batch perhaps some that are in the log, too.

    Raises:
        OSError: it cannot be read.
    """
    named = _NAME.fullmatch(path.name)
    assert named is not None
    with opened(path) as descriptor:
        at = 0 if int(named["offset"]) else SEGMENT_HEADER_BYTES
        while data := os.pread(descriptor, BATCH_RECORD_BYTES, at):
            try:
                batch = decode_batch(data, 0, len(data))
            except FormatError:
                return  # zeros behind the last batch
            yield from records_of(
                os.pread(descriptor, batch.body_bytes, at + BATCH_RECORD_BYTES), Epoch(int(named["epoch"])), node_id
            )
            at += BATCH_RECORD_BYTES + batch.body_bytes


def mark_returned(path: Path) -> None:
    """Its records are in the log again, durably: it is kept under another name."""
    path.rename(path.with_name(RETURNED_PREFIX + path.name.removeprefix(CUT_PREFIX)))
    sync_folder(path.parent)
