"""Archives the committed segments of the logs that a safekeeper keeps, and restores a log from the archive.

An object is an unchanged copy of one segment, whose CRCs were all checked. It is written once, and named::

    <node_id>/<wal_id>/<20-digit first lsn>-<20-digit last lsn>-<epoch>-<member_id>.wal

Nothing is removed from the archive. Members rotate their segments at different LSNs, so each archives its own; any
chain of consecutive segments is a part of the log. ``restore_log`` takes the chain that reaches the furthest; if
several do, the one that begins first. The last segment of a log is archived only once it is full or another epoch
begins.
"""

from __future__ import annotations

import os
import re
import secrets
import threading
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ledger.errors import ArchiveConflictError, LedgerError, WalCorruptError, WalError
from ledger.hlc import Hlc
from ledger.positions import BEFORE_FIRST, NO_EPOCH, Epoch, Lsn, after, before
from objects import sync_folder
from wal import control as control_file
from wal.control import Control
from wal.format import WAL_ID_BYTES
from wal.reader import scan_segment
from wal.replication.file_log import FileLog
from wal.replication.kept_logs import KeptLog, KeptLogs
from wal.replication.messages import Position
from wal.scrub import Report
from wal.segment import Segment, list_segments, open_regular, opened, segment_name, write_fully

if TYPE_CHECKING:
    from objects.store import ArchiveStore

ARCHIVE_INTERVAL_S = 5.0


class Archiver:
    """Archives ``logs`` into ``store``, in ``run``, on a thread of its own, since it may wait for the network.

    An unreachable archive is prepared once it is reachable again. Until then the segments are kept, and ``fault`` has
    the reason.
    """

    def __init__(self, logs: KeptLogs, store: ArchiveStore, report: Report) -> None:
        self._logs = logs
        self._store = store
        self._report = report
        self._is_prepared = False
        self.fault = ""
        """Why the archive as a whole cannot be written to; empty if it can."""

    def run(self, closing: threading.Event) -> None:
        """Archive due segments periodically until ``closing`` is set."""
        self.archive_all(closing)
        while not closing.wait(ARCHIVE_INTERVAL_S):
            self.archive_all(closing)

    def archive_all(self, closing: threading.Event) -> None:
        """Archive due segments. A failure is reported once, and retried by the next call, which prepares the archive
        again."""
        if not self._is_prepared:
            self.fault = self._fault_of(self._store.prepare, {}, self.fault)
            self._is_prepared = not self.fault
        for kept in self._logs.all() if self._is_prepared else ():
            facts: dict[str, object] = {"node_id": kept.node_id}
            kept.archive_fault = self._fault_of(partial(self._archive, kept, closing), facts, kept.archive_fault)
            self._is_prepared = self._is_prepared and not kept.archive_fault

    def _fault_of(self, act: Callable[[], None], facts: dict[str, object], known_fault: str) -> str:
        """Call ``act``; returns its fault, empty for none. Reports a new fault, or the end of the known one."""
        fault = ""
        try:
            act()
        except (LedgerError, OSError) as error:
            fault = str(error)
        if fault and fault != known_fault:
            self._report("wal_archive_failed", facts | {"error": fault})
        elif known_fault and not fault:
            self._report("wal_archive_resumed", facts)
        return fault

    def _archive(self, kept: KeptLog, closing: threading.Event) -> None:
        with kept.locked():
            if kept.opened is None:
                return
            log, acceptor, _ = kept.opened
            committed_lsn = min(acceptor.committed_lsn, log.durable_lsn)
            archived_lsn = kept.archived_lsn or BEFORE_FIRST
            control = log.control
            segments = list_segments(kept.folder)
        prefix, suffix = f"{kept.node_id}/{control.wal_id}", control.member_id
        for segment, follower in pairwise(segments):
            if (last_lsn := before(follower.base_lsn)) > committed_lsn or closing.is_set():
                return
            if last_lsn > archived_lsn:
                self._put(kept, segment, prefix, suffix)
                with kept.locked():
                    kept.archived_lsn = max(last_lsn, kept.archived_lsn or BEFORE_FIRST)

    def _put(self, kept: KeptLog, segment: Segment, prefix: str, suffix: str) -> None:
        """Archive one segment, to which no batch is appended any more.

        Raises:
            ArchiveConflictError: another object has its name.
            LedgerError, OSError: it cannot be read, or written there.
        """
        with os.fdopen(open_regular(segment.path), "rb") as file:
            scan = scan_segment(file.fileno(), segment.base_lsn, kept.node_id)
            if scan.damage is not None:
                error = WalCorruptError(segment.name, scan.damage.offset, scan.damage.reason, kept.remedy())
                with kept.locked():
                    kept.fail(error)
                raise error
            if scan.last_lsn < segment.base_lsn:
                return
            name = f"{prefix}/{segment.base_lsn:020d}-{scan.last_lsn:020d}-{segment.epoch}-{suffix}.wal"
            if not self._store.create(name, file):
                size = os.fstat(file.fileno()).st_size
                if self._store.read(name, size) != os.pread(file.fileno(), size, 0):
                    raise ArchiveConflictError(f"{name} stands in the archive already, and is not {segment.path}")
        self._report("wal_segment_archived", {"node_id": kept.node_id, "object": name})


EPOCHS_LOST_MAX = 1 << 20
"""At most so many epochs started after the last archived one. A restored log starts above them, so no epoch is used
twice."""
_OBJECT = re.compile(r"([0-9a-f]{32})/([0-9]{20})-([0-9]{20})-([1-9][0-9]{0,18})-[0-9a-f]{32}\.wal")


class _Archived(NamedTuple):
    first_lsn: Lsn
    last_lsn: Lsn
    epoch: Epoch
    name: str


def restore_log(source: ArchiveStore, node_id: str, wal_id: str | None, folder: Path) -> tuple[str, Lsn, Position]:
    """Restore the log ``wal_id`` of ``node_id`` from the archive into ``folder``; all archived records were committed.
    If ``wal_id`` is None, the archive must hold only one log of the node. Returns the id of the log, its first LSN, and
    its end.

    Raises:
        WalError: the folder is not empty, or the log is missing or ambiguous.
        WalCorruptError: an archived segment is damaged.
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
    with closing(FileLog(folder, node_id, wal_id)) as log:
        epoch = Epoch(log.tail.epoch + EPOCHS_LOST_MAX)
        log.store(log.control._replace(epoch=epoch, promised_epoch=epoch, committed_lsn=log.tail.lsn))
        return wal_id, log.first_lsn, log.tail


def _longest(archived: Sequence[_Archived]) -> list[_Archived]:
    """The chain of consecutive segments that reaches the furthest, in order."""
    best: dict[Lsn, tuple[Lsn, _Archived]] = {}
    """By first LSN, how far the best chain from that segment reaches, and the segment."""
    for each in sorted(archived, reverse=True):
        reach = max(each.last_lsn, best[after(each.last_lsn)][0] if after(each.last_lsn) in best else each.last_lsn)
        if each.first_lsn not in best or reach > best[each.first_lsn][0]:
            best[each.first_lsn] = reach, each
    at = max(best, key=lambda first_lsn: (best[first_lsn][0], -first_lsn))
    chain: list[_Archived] = []
    while at in best:
        chain.append(best[at][1])
        at = after(chain[-1].last_lsn)
    return chain


def _fetch(source: ArchiveStore, archived: _Archived, node_id: str, folder: Path) -> None:
    """Write one segment, synced, and check that it matches its name."""
    path = folder / segment_name(archived.first_lsn, archived.epoch)
    with opened(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC) as descriptor:
        offset = 0
        for chunk in source.chunks(archived.name):
            write_fully(descriptor, (chunk,), offset)
            offset += len(chunk)
        os.fsync(descriptor)
        scan = scan_segment(descriptor, archived.first_lsn, node_id)
    if scan.damage is not None or scan.last_lsn != archived.last_lsn:
        raise WalCorruptError(
            archived.name,
            scan.damage.offset if scan.damage else 0,
            scan.damage.reason if scan.damage else f"it ends with LSN {scan.last_lsn}",
            f"The object in the archive is damaged. Remove {folder}, and bring the log back from another archive, "
            "or from a copy of this object",
        )
