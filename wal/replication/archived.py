"""Bringing a log back from its archive, where every other copy of it is gone.

Members cut their segments in different places, so of those that are archived the ones are taken that follow one another
and reach the furthest; where several do, the ones that begin first. The last segment of a log was never archived.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from ledger.errors import WalCorruptError, WalError
from ledger.hlc import Hlc
from ledger.positions import NO_EPOCH, Epoch, Lsn, after
from wal import control as control_file
from wal.control import Control
from wal.format import WAL_ID_BYTES
from wal.replication.file_log import FileLog
from wal.replication.messages import Position
from wal.scan import scan_segment
from wal.segment import NEW_FILE, opened, segment_name, sync_folder, write_fully

EPOCHS_LOST_MAX = 1 << 20
"""How many epochs may have begun behind the last archived one: those that come are above, so none is used twice."""
_OBJECT = re.compile(r"([0-9a-f]{32})/([0-9]{20})-([0-9]{20})-([1-9][0-9]{0,18})-[0-9a-f]{32}\.wal")


class Source(Protocol):
    """What an archive gives; errors are LedgerErrors."""

    def objects(self, name: str) -> list[str]:
        """The names below ``name`` of everything that is there."""

    def chunks(self, name: str) -> Iterator[bytes]:
        """The object, in pieces."""


class Restored(NamedTuple):
    """A log that was brought back: from which LSN to which record."""

    wal_id: str
    first_lsn: Lsn
    tail: Position


class _Archived(NamedTuple):
    first_lsn: Lsn
    last_lsn: Lsn
    epoch: Epoch
    name: str


def restore(source: Source, node_id: str, wal_id: str | None, folder: Path) -> Restored:
    """Make ``folder`` the WAL folder of ``node_id``, with what the archive holds of the log ``wal_id``, all of which
    was committed; of the only one that it holds where that is None.

    Raises:
        WalError: the folder is not empty, or it is not clear which log is meant.
        WalCorruptError: what is archived is damaged.
        OSError: it cannot be written.
    """
    if folder.exists() and any(folder.iterdir()):
        raise WalError(f"{folder} is not empty: a log is brought back into a folder of its own")
    logs: dict[str, list[_Archived]] = {}
    for name in source.objects(node_id):
        if found := _OBJECT.fullmatch(name):
            each = _Archived(Lsn(int(found[2])), Lsn(int(found[3])), Epoch(int(found[4])), f"{node_id}/{name}")
            logs.setdefault(found[1], []).append(each)
    if wal_id is None and len(logs) == 1:
        (wal_id,) = logs
    if not logs:
        nodes = sorted({name.partition("/")[0] for name in source.objects("") if _OBJECT.search(name)})
        raise WalError(f"the archive holds no log of node {node_id}. It holds logs of: {', '.join(nodes) or 'no node'}")
    if wal_id is None or wal_id not in logs:
        raise WalError(f"of node {node_id} the archive holds logs {', '.join(sorted(logs))}: name one with --wal-id")
    folder.mkdir(parents=True, exist_ok=True)
    for archived in _longest(logs[wal_id]):
        _fetch(source, archived, node_id, folder)
    sync_folder(folder)
    member_id = secrets.token_hex(WAL_ID_BYTES)
    control_file.store(folder, Control(wal_id, node_id, NO_EPOCH, Hlc(0, 0, node_id), member_id=member_id))
    log = FileLog(folder, node_id, wal_id)
    try:
        tail = log.tail
        epoch = Epoch(tail.epoch + EPOCHS_LOST_MAX)
        log.store(log.control._replace(epoch=epoch, promised_epoch=epoch, committed_lsn=tail.lsn))
        return Restored(wal_id, log.first_lsn, tail)
    finally:
        log.close()


def _longest(archived: Sequence[_Archived]) -> list[_Archived]:
    """Those that follow one another and reach the furthest, in order."""
    best: dict[Lsn, tuple[Lsn, _Archived]] = {}
    """By the LSN that one begins with, how far that and those behind it reach."""
    for each in sorted(archived, reverse=True):
        reach = max(each.last_lsn, best[after(each.last_lsn)][0] if after(each.last_lsn) in best else each.last_lsn)
        if each.first_lsn not in best or reach > best[each.first_lsn][0]:
            best[each.first_lsn] = reach, each
    furthest = max(reach for reach, _ in best.values())
    at = min(first_lsn for first_lsn, (reach, _) in best.items() if reach == furthest)
    chain: list[_Archived] = []
    while at in best:
        chain.append(best[at][1])
        at = after(chain[-1].last_lsn)
    return chain


def _fetch(source: Source, archived: _Archived, node_id: str, folder: Path) -> None:
    """Write one segment, synced, and look whether it is what its name says."""
    path = folder / segment_name(archived.first_lsn, archived.epoch)
    with opened(path, NEW_FILE) as descriptor:
        offset = 0
        for chunk in source.chunks(archived.name):
            write_fully(descriptor, (chunk,), offset)
            offset += len(chunk)
        os.fsync(descriptor)
    with opened(path) as descriptor:
        scan = scan_segment(descriptor, archived.first_lsn, node_id)
    if scan.damage is not None or scan.last_lsn != archived.last_lsn:
        reason = scan.damage.reason if scan.damage else f"it ends with LSN {scan.last_lsn}"
        raise WalCorruptError(
            archived.name,
            scan.damage.offset if scan.damage else 0,
            reason,
            f"The object in the archive is damaged. Remove {folder}, and bring the log back from another archive, "
            "or from a copy of this object",
        )
