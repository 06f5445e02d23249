"""The logs that a safekeeper keeps: ``<dir>/<node_id>/`` each, opened on first use, with a bound on open logs.

Opening a log recovers it. If an operation on its files fails, the log is closed as it is, and opened again on the next
use. If that fails, too, the caller gets the reason, and the next caller may retry.

The file ``committed`` beside a log has the highest LSN that the member knows to be committed. Format, big-endian::

    wal_id 16 B | committed_lsn u64 | crc32 u32 over both

It is overwritten without a sync, so no answer waits for it, and it survives a kill of the process. The control file has
the position durably some seconds later. A file that is damaged, or of another WAL, is ignored.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple
from zlib import crc32

from ledger import names
from ledger.errors import InvalidInputError, WalCorruptError, WalError, WalFilesError
from ledger.hlc import node_hash
from ledger.positions import BEFORE_FIRST, NO_EPOCH, Lsn
from wal import control as control_file
from wal.control import epoch_of
from wal.format import WAL_ID_BYTES
from wal.log import gone
from wal.native import Stream
from wal.replication.acceptor import Acceptor
from wal.replication.file_log import FileLog
from wal.replication.messages import Position, WalStatus
from wal.scrub import LogCopy, Report, check_segment
from wal.segment import Segment, list_segments

LOGS_MAX = 4096
"""Nodes whose logs one safekeeper keeps."""
LOGS_OPEN_MAX = 256
"""How many of them are open at the same time; each has some descriptors."""
STATUS_WAIT_S = 0.2
RECOVERY_SHARE_MAX = 0.1
"""Nodes request a damaged log repeatedly: recovery attempts take at most this part of the time."""

NOTE_NAME = "committed"
NOTE_BYTES = WAL_ID_BYTES + 8 + 4
_NOTED_LSN_AT = slice(WAL_ID_BYTES, WAL_ID_BYTES + 8)

_is_node_id = re.compile(names.NODE_ID).fullmatch


class CommitNote:
    """The file ``committed`` in ``folder``, for the WAL of this id; it MUST be closed. ``lsn`` is its position.

    ``descriptor`` is that of the file, for C, which writes the same bytes.

    Raises:
        OSError: it cannot be opened.
    """

    def __init__(self, folder: Path, wal_id: str) -> None:
        self.wal_id = bytes.fromhex(wal_id)
        self.descriptor = os.open(folder / NOTE_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        data = os.pread(self.descriptor, NOTE_BYTES, 0)
        lsn = Lsn(int.from_bytes(data[_NOTED_LSN_AT], "big"))
        self.lsn = lsn if data == self._encoded(lsn) else BEFORE_FIRST

    def write(self, lsn: Lsn) -> None:
        """Write ``lsn``, which MUST be durable in the log.

        Raises:
            OSError: it cannot be written.
        """
        if lsn > self.lsn:
            os.pwrite(self.descriptor, self._encoded(lsn), 0)
            self.lsn = lsn

    def close(self) -> None:
        os.close(self.descriptor)

    def _encoded(self, lsn: Lsn) -> bytes:
        data = self.wal_id + lsn.to_bytes(8, "big")
        return data + crc32(data).to_bytes(4, "big")


class OpenLog(NamedTuple):
    """A log that is open: its files, the rules over them, and the note of the committed position."""

    log: FileLog
    acceptor: Acceptor
    note: CommitNote


class KeptLog:
    """The log of one node. A caller of any method but ``status`` MUST hold it ``locked``, for no longer than file
    operations take: never while waiting for a peer.

    It may be lent to a ``Stream``, which continues it while no thread has it locked.
    """

    def __init__(self, folder: Path, region: str, report: Report, is_archived: bool) -> None:
        self.node_id = folder.name
        self.folder = folder
        self.users = 0
        """Number of conversations about it; updated by ``KeptLogs``."""
        self.archived_lsn = BEFORE_FIRST if is_archived else None
        """All records of this copy up to here are in the archive; None without an archive."""
        self.archive_fault = ""
        """Why a segment could not be archived; empty after success. Set by the archiver."""
        self.opened: OpenLog | None = None
        self._region = region
        self._report = report
        self._lock = threading.Lock()
        self._failure = ""
        self._damage: tuple[WalCorruptError, frozenset[tuple[str, int, int]], float] | None = None
        """The damage that the last recovery found, and the files. They are not read again before this time of the
        monotonic clock unless they change."""
        self._lent_to: Stream | None = None

    @contextmanager
    def locked(self, timeout_s: float = -1) -> Iterator[bool]:
        """Holds the lock of the log, and takes the log back from a stream first; False if that took longer than
        ``timeout_s``, unless this is below 0."""
        ends_s = time.monotonic() + timeout_s
        if not self._lock.acquire(timeout=timeout_s):
            yield False
            return
        try:
            yield self._take_back(-1 if timeout_s < 0 else max(0.0, ends_s - time.monotonic()))
        finally:
            self._lock.release()

    def open(self, wal_id: str) -> OpenLog | None:
        """Open the log; None if there is no copy and ``wal_id`` is empty.

        Raises:
            OSError, WalError: it cannot be opened now.
        """
        has_control = (self.folder / control_file.CONTROL_NAME).exists()
        is_empty = not has_control and not (self.folder.is_dir() and list_segments(self.folder))
        if self.opened is not None or (is_empty and not wal_id):
            return self.opened
        began_s = time.monotonic()
        if self._damage is not None:
            error, files, next_s = self._damage
            if began_s < next_s and self.folder.is_dir() and _files_in(self.folder) == files:
                raise error
        try:
            with ExitStack() as undo:
                log = FileLog(self.folder, self.node_id, "" if has_control else wal_id)
                undo.callback(log.abandon)
                note = CommitNote(self.folder, log.control.wal_id)
                undo.callback(note.close)
                if note.lsn > log.control.committed_lsn:
                    # A killed process noted it as committed.
                    log.store(log.control._replace(committed_lsn=note.lsn))
                self.opened = opened = OpenLog(log, Acceptor(log, self._region), note)
                undo.pop_all()
        except (OSError, WalError) as error:
            self._note_failure("wal_recovery_failed", error)
            if isinstance(error, WalCorruptError):
                pause_s = (time.monotonic() - began_s) / RECOVERY_SHARE_MAX
                self._damage = error, _files_in(self.folder), began_s + pause_s
            raise
        self._failure, self._damage = "", None
        if self.archived_lsn is not None:
            self.archived_lsn = BEFORE_FIRST
        if log.cut is not None:
            self._report_event("wal_recovery_cut_torn_tail", log.cut)
        self._report_event(
            "wal_recovery_done", {"first_lsn": log.first_lsn, "last_lsn": log.tail.lsn, "epoch": log.tail.epoch}
        )
        return opened

    def fail(self, error: BaseException, event: str = "wal_sync_failure") -> None:
        """An operation on its files failed: close them as they are. Recovery decides which records are kept."""
        self._note_failure(event, error)
        self._abandon()

    def copy(self) -> LogCopy | None:
        """Its files, for scrubbing; None while it is not open."""
        if self.opened is None:
            return None
        log = self.opened.log
        member_ids = sorted(member.member_id for member in log.configuration.members)
        own = log.control.member_id
        place = 1 + member_ids.index(own) if own in member_ids else 0
        return LogCopy(self.node_id, self.folder, log.durable_lsn, place, 1 + len(member_ids))

    def scrubbed(self, segment: Segment) -> None:
        """A segment was found damaged. It is read once more under the lock, as it may have been cut or removed
        meanwhile. A damaged log is closed, and does not vote until it is repaired."""
        copy = self.copy()
        segments = list_segments(self.folder)
        if copy is None or self.opened is None or segment not in segments:
            return
        follower = next((each for each in segments if each > segment), None)
        if (error := check_segment(copy, segment, follower)) is not None:
            # Acknowledged records are then known to be durable: recovery does not take damage to them for a torn tail.
            with suppress(OSError, WalError):
                _store_progress(self.opened)
            self.fail(error, "wal_scrub_damage")

    def lend(self, stream: Stream, run: str) -> bool:
        """Let ``stream`` continue the log for Appends of this run once the lock is released; False if it cannot."""
        if self.opened is None:
            return False
        log, acceptor, note = self.opened
        epoch, space = acceptor.streams(run), log.append_space()
        if epoch is None or space is None:
            return False
        stream.lend(
            epoch,
            log.tail.lsn,
            acceptor.committed_lsn,
            acceptor.settled_lsn,
            node_hash(self.node_id),
            space,
            note.lsn,
            note.wal_id,
            note.descriptor,
        )
        self._lent_to = stream
        return True

    def _take_back(self, timeout_s: float) -> bool:
        """Take the log back from the stream, within ``timeout_s`` unless that is below 0; a fault fails the log."""
        if self._lent_to is None or self.opened is None:
            return True
        log, acceptor, note = self.opened
        try:
            if (back := self._lent_to.take_back(timeout_s)) is None:
                return False
            offset, last_lsn, committed_lsn, settled_lsn, noted_lsn, is_named = back
            log.wrote(offset, last_lsn)
            acceptor.streamed(committed_lsn, settled_lsn)
            note.lsn = noted_lsn
            if not is_named:
                raise gone(self.folder)
        except (OSError, WalError) as error:
            self.fail(error)
        self._lent_to = None
        return True

    def tend(self) -> None:
        """Store the durable and committed positions in the control file, and remove segments that are no longer needed.
        A log that lost records below these positions is not opened, and does not vote. A fault fails the log."""
        if self.opened is None:
            return
        try:
            _store_progress(self.opened)
            settled_lsn = self.opened.acceptor.settled_lsn
            needless_lsn = settled_lsn if self.archived_lsn is None else min(settled_lsn, self.archived_lsn)
            if removed := self.opened.log.remove_upto(needless_lsn):
                self._report_event("wal_segments_removed", {"segments": removed})
        except (OSError, WalError) as error:
            self.fail(error)

    def close(self) -> None:
        """Sync and close the files."""
        self.tend()
        if self.opened is None:
            return
        try:
            self.opened.log.close()
        except (OSError, WalError) as error:
            self.fail(error)
        self._abandon()

    def status(self) -> WalStatus:
        """Its state. Waits briefly for the lock, as a recovery, or a disk that does not answer, may hold it.

        Raises:
            OSError: its files cannot be read.
        """
        with self.locked(STATUS_WAIT_S) as is_locked:
            if not is_locked:
                return WalStatus(self.node_id, "busy")
            if self.opened is None:
                return self._status_closed()
            log, acceptor, _ = self.opened
            return WalStatus(
                node_id=self.node_id,
                state="open",
                wal_id=log.control.wal_id,
                member_id=log.control.member_id,
                promised_epoch=log.control.promised_epoch,
                first_lsn=log.first_lsn,
                tail=log.tail,
                durable_lsn=log.durable_lsn,
                committed_lsn=acceptor.committed_lsn,
                settled_lsn=acceptor.settled_lsn,
                archived_lsn=self.archived_lsn or BEFORE_FIRST,
                disk_bytes=_bytes_in(self.folder),
                configuration=log.configuration,
            )

    def _status_closed(self) -> WalStatus:
        """The state of a closed log, from its control file."""
        control, failure = None, self._failure
        try:
            control = control_file.load(self.folder)
        except WalError as error:
            failure = self.fault_of(error)
        state = "failed" if failure else "closed"
        if control is None:
            return WalStatus(self.node_id, state, failure)
        return WalStatus(
            node_id=self.node_id,
            state=state,
            detail=failure,
            wal_id=control.wal_id,
            member_id=control.member_id,
            promised_epoch=control.promised_epoch,
            tail=Position(epoch_of(control.history, control.durable_lsn) or NO_EPOCH, control.durable_lsn),
            durable_lsn=control.durable_lsn,
            committed_lsn=control.committed_lsn,
            disk_bytes=_bytes_in(self.folder),
        )

    def fault_of(self, error: BaseException) -> str:
        """The fault of the log, and the remedy at a safekeeper."""
        return f"{error.damage}. {self.remedy()}" if isinstance(error, WalFilesError) else str(error)

    def remedy(self) -> str:
        """The remedy for damaged files of this log: its promises are lost with them, so the copy must start again as a
        new member."""
        return (
            f"This safekeeper cannot keep the log of node {self.node_id}: stop this safekeeper, remove the folder "
            f"{self.folder}, start it again, and the node sends it the log. Never bring an old copy of the folder "
            "back: its promises are out of date"
        )

    def _abandon(self) -> None:
        """Close the files as they are."""
        if self.opened is not None:
            self.opened.note.close()
            self.opened.log.abandon()
            self.opened = None

    def _note_failure(self, event: str, error: BaseException) -> None:
        """Keep the fault, and report it unless it is the last reported one."""
        is_news, self._failure = self.fault_of(error) != self._failure, self.fault_of(error)
        if is_news:
            self._report_event(event, {"error": self._failure, "folder": str(self.folder)})

    def _report_event(self, event: str, facts: Mapping[str, object]) -> None:
        self._report(event, {"node_id": self.node_id, **facts})


def _store_progress(opened: OpenLog) -> None:
    """Store the durable and committed positions in the control file."""
    log, committed_lsn = opened.log, opened.acceptor.committed_lsn
    if (log.control.durable_lsn, log.control.committed_lsn) != (log.durable_lsn, committed_lsn):
        log.store(log.control._replace(committed_lsn=committed_lsn))


class KeptLogs:
    """All logs below ``folder``; thread-safe."""

    def __init__(self, folder: Path, region: str, report: Report, *, is_archived: bool) -> None:
        self._folder, self._region, self._report, self._is_archived = folder, region, report, is_archived
        self._lock = threading.Lock()
        """Guards the attributes below. A thread that holds it never waits for the lock of a log."""
        self._logs: dict[str, KeptLog] = {}
        """By node, the least recently used first."""
        for found in sorted(folder.iterdir()):
            if _is_node_id(found.name) and found.is_dir():
                self._logs[found.name] = KeptLog(found, region, report, is_archived)

    def of_node(self, node_id: str) -> KeptLog:
        """The log of a node, open or not, which the caller uses until it calls ``release``.

        Raises:
            InvalidInputError: no node can have this name.
            WalError: too many are kept.
        """
        if not _is_node_id(node_id):
            raise InvalidInputError(f"{node_id!r} is no name of a node")
        with self._lock:
            if (kept := self._logs.pop(node_id, None)) is None:
                if len(self._logs) >= LOGS_MAX:
                    raise WalError(f"{LOGS_MAX} logs are kept here, and there is no room for another")
                kept = KeptLog(self._folder / node_id, self._region, self._report, self._is_archived)
            self._logs[node_id] = kept
            kept.users += 1
        self._close_unused()
        return kept

    def release(self, kept: KeptLog) -> None:
        """The caller no longer uses the log."""
        with self._lock:
            kept.users -= 1
            if not kept.users and not kept.folder.is_dir():
                del self._logs[kept.node_id]

    def all(self) -> list[KeptLog]:
        """All known logs, in the order of their nodes."""
        with self._lock:
            return [self._logs[node_id] for node_id in sorted(self._logs)]

    def close(self) -> None:
        """Sync and close all."""
        for kept in self.all():
            with kept.locked():
                kept.close()

    def _close_unused(self) -> None:
        """Close the least recently used logs if too many are open."""
        with self._lock:
            opened = [kept for kept in self._logs.values() if kept.opened is not None]
            unused = [kept for kept in opened if not kept.users][: max(0, len(opened) + 1 - LOGS_OPEN_MAX)]
        for kept in unused:
            with kept.locked():
                if not kept.users:
                    kept.close()


def _files_in(folder: Path) -> frozenset[tuple[str, int, int]]:
    """Name, size and time of each file of a folder, except files removed meanwhile."""
    found = set()
    with os.scandir(folder) as entries:
        for entry in entries:
            with suppress(FileNotFoundError):
                stat = entry.stat()
                found.add((entry.name, stat.st_size, stat.st_mtime_ns))
    return frozenset(found)


def _bytes_in(folder: Path) -> int:
    return sum(size for _, size, _ in _files_in(folder))
