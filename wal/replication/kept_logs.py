"""The logs that a safekeeper keeps: ``<dir>/<node_id>/`` each, opened when first asked for, so many open at once.

A log is opened by recovering it. If an operation on its files fails, the log is closed as it is, never used further,
and opened again when it is next asked for; if that fails, too, the caller gets the reason, and the next may try again.

The file ``committed`` beside a log says how far the member knows it to be committed. Format, big-endian::

    wal_id 16 B | committed_lsn u64 | crc32 u32 over both

It is written over and over without a sync, so no answer waits for it, and outlives the process that is killed. The
control file has the position durably some seconds later. One that is damaged, or of another WAL, says nothing.
"""

from __future__ import annotations

import contextlib
import os
import re
import struct
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple
from zlib import crc32

from ledger import names
from ledger.errors import InvalidInputError, WalCorruptError, WalError, WalFilesError
from ledger.hlc import node_hash
from ledger.positions import BEFORE_FIRST, NO_EPOCH, Lsn
from wal import control as control_file
from wal import history as histories
from wal import native
from wal.folder import gone
from wal.format import WAL_ID_BYTES
from wal.native import Stream, Streamed
from wal.replication.acceptor import Acceptor
from wal.replication.file_log import FileLog
from wal.replication.messages import Position, WalStatus
from wal.scrub import LogCopy, check_segment
from wal.segment import Segment, list_segments

NOTE_NAME = "committed"
_POSITION = struct.Struct(f">{WAL_ID_BYTES}sQ")
_CRC = struct.Struct(">I")
_BYTES = _POSITION.size + _CRC.size


class CommitNote:
    """The note in ``folder`` on the WAL of this id, which MUST be closed again. ``lsn`` is what it says.

    Raises:
        OSError: it cannot be opened.
    """

    def __init__(self, folder: Path, wal_id: str) -> None:
        self._wal_id = bytes.fromhex(wal_id)
        self._descriptor = os.open(folder / NOTE_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self.lsn = self._read()

    def write(self, lsn: Lsn) -> None:
        """Let it say ``lsn``, which MUST be durable in the log.

        Raises:
            OSError: it cannot be written.
        """
        if lsn > self.lsn:
            data = _POSITION.pack(self._wal_id, lsn)
            os.pwrite(self._descriptor, data + _CRC.pack(crc32(data)), 0)
            self.lsn = lsn

    @property
    def wal_id(self) -> bytes:
        return self._wal_id

    @property
    def descriptor(self) -> int:
        """Of the file, for who writes the same, and sets ``lsn`` then."""
        return self._descriptor

    def close(self) -> None:
        os.close(self._descriptor)

    def _read(self) -> Lsn:
        data = os.pread(self._descriptor, _BYTES, 0)
        if len(data) < _BYTES or _CRC.unpack_from(data, _POSITION.size)[0] != crc32(data[: _POSITION.size]):
            return BEFORE_FIRST
        wal_id, lsn = _POSITION.unpack_from(data)
        return Lsn(lsn) if wal_id == self._wal_id else BEFORE_FIRST


LOGS_MAX = 4096
"""Nodes whose logs one safekeeper keeps."""
LOGS_OPEN_MAX = 256
"""How many of them are open at once; each has some descriptors."""
STATUS_WAIT_S = 0.2
RECOVERY_SHARE_MAX = 0.1
"""Of a log that is damaged, nodes ask again and again: reading it for them takes no more than this part of the time."""

Tell = Callable[[str, Mapping[str, object]], None]
"""Is told what happens: the name of an event, and its facts."""

_is_node_id = re.compile(names.NODE_ID).fullmatch


class LogLock:
    """The lock of a log, which takes it back from the stream it is lent to: ``take_back(timeout_s)`` is called by
    whoever has got it, and says whether he may go on."""

    def __init__(self, take_back: Callable[[float], bool]) -> None:
        self._lock = threading.Lock()
        self._take_back = take_back

    def acquire(self, timeout: float = -1) -> bool:
        """Get it, within so many seconds if that is not below 0; whether it was had."""
        ends_s = time.monotonic() + timeout
        if not self._lock.acquire(timeout=timeout):
            return False
        is_back = False
        try:
            is_back = self._take_back(-1 if timeout < 0 else max(0.0, ends_s - time.monotonic()))
        finally:
            if not is_back:
                self._lock.release()
        return is_back

    def release(self) -> None:
        self._lock.release()

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class _Damage(NamedTuple):
    """What the last recovery found in these files, which are not read again before ``next_s`` unless they change."""

    error: WalCorruptError
    files: frozenset[tuple[str, int, int]]
    next_s: float

    def lasts(self, folder: Path) -> bool:
        return time.monotonic() < self.next_s and _files_in(folder) == self.files


class KeptLog:
    """The log of one node. Whoever calls a method but ``status`` MUST hold ``lock``, and holds it for no longer than
    files take: never while waiting for a peer.

    It may be lent to a ``Stream`` meanwhile, which goes on with it while nobody holds the lock.
    """

    def __init__(self, folder: Path, region: str, tell: Tell, is_archived: bool) -> None:
        self.node_id = folder.name
        self.lock = LogLock(self._take_back)
        self.users = 0
        """Conversations about it; counted by ``KeptLogs``."""
        self.archived_lsn = BEFORE_FIRST if is_archived else None
        """All that is held here up to this is in the archive; None where there is none."""
        self.archive_fault = ""
        """Why a segment of it could not be archived, empty once it was; set by the archiver."""
        self.folder = folder
        self._region = region
        self._tell = tell
        self._acceptor: Acceptor | None = None
        self._log: FileLog | None = None
        self._note: CommitNote | None = None
        self._failure = ""
        self._damage: _Damage | None = None
        self._lent_to: Stream | None = None

    @property
    def acceptor(self) -> Acceptor | None:
        """None while it is not open."""
        return self._acceptor

    @property
    def log(self) -> FileLog:
        assert self._log is not None
        return self._log

    def open(self, wal_id: str) -> Acceptor | None:
        """The acceptor of the log; None where nothing is held, and ``wal_id`` is empty.

        Raises:
            OSError, WalError: it cannot be opened just now.
        """
        if self._acceptor is not None or (not wal_id and self._holds_nothing()):
            return self._acceptor
        if self._damage is not None and self._damage.lasts(self.folder):
            raise self._damage.error
        began_s = time.monotonic()
        try:
            self._log = FileLog(self.folder, self.node_id, "" if self._has_control() else wal_id)
            self._take_note(self._log)
        except (OSError, WalError) as error:
            self._failed("wal_recovery_failed", error)
            self._abandon()
            if isinstance(error, WalCorruptError):
                next_s = began_s + (time.monotonic() - began_s) / RECOVERY_SHARE_MAX
                self._damage = _Damage(error, _files_in(self.folder), next_s)
            raise
        self._failure, self._damage = "", None
        if self.archived_lsn is not None:
            self.archived_lsn = BEFORE_FIRST
        self._acceptor = Acceptor(self._log, self._region)
        if self._log.cut is not None:
            self._told("wal_recovery_cut_torn_tail", asdict(self._log.cut))
        tail = self._log.tail
        self._told("wal_recovery_done", {"first_lsn": self._log.first_lsn, "last_lsn": tail.lsn, "epoch": tail.epoch})
        return self._acceptor

    def fail(self, error: BaseException, event: str = "wal_sync_failure") -> None:
        """An operation on its files failed: what they hold is for recovery to judge."""
        self._failed(event, error)
        self._abandon()

    def copy(self) -> LogCopy | None:
        """Its files as they can be scrubbed; None while it is not open."""
        if self._acceptor is None:
            return None
        member_ids = sorted(member.member_id for member in self.log.configuration.members)
        own = self.log.control.member_id
        place = 1 + member_ids.index(own) if own in member_ids else 0
        return LogCopy(self.node_id, self.folder, self.log.durable_lsn, place, 1 + len(member_ids))

    def scrubbed(self, segment: Segment, error: WalCorruptError | None) -> None:
        """A segment was read again. Where it is damaged it is read once more under the lock: it may have been cut or
        removed meanwhile. A log that is damaged is closed, and no vote counts on it until it is repaired."""
        copy = None if error is None else self.copy()
        if copy is None:
            return
        segments = list_segments(self.folder)
        if segment in segments:
            follower = next((each for each in segments if each > segment), None)
            if (error := check_segment(copy, segment, follower)) is not None:
                # What was acknowledged is known durable then: recovery takes damage to it for no torn tail.
                with contextlib.suppress(OSError, WalError):
                    self._store_progress()
                self.fail(error, "wal_scrub_damage")

    def note_committed(self) -> None:
        """Note how far it is known to be committed by now, where a process that is killed leaves it.

        Raises:
            OSError: that cannot be written.
        """
        if self._note is not None and self._acceptor is not None:
            self._note.write(self._acceptor.committed_lsn)

    def lend(self, stream: Stream, run: str) -> bool:
        """Let ``stream`` go on with the log once the lock is released, for Appends of this run; False where it cannot.

        Raises:
            OSError, WalError: there is no room for more.
        """
        epoch = None if self._acceptor is None else self._acceptor.streams(run)
        room = None if epoch is None else self.log.room()
        if self._acceptor is None or self._note is None or epoch is None or room is None:
            return False
        stream.lend(
            epoch,
            self.log.tail.lsn,
            self._acceptor.committed_lsn,
            self._acceptor.settled_lsn,
            node_hash(self.node_id),
            native.lent_room(room),
            self._note.lsn,
            self._note.wal_id,
            self._note.descriptor,
        )
        self._lent_to = stream
        return True

    def _take_back(self, timeout_s: float) -> bool:
        """Have the log here again, within so many seconds if that is not below 0; a fault fails it."""
        if self._lent_to is None:
            return True
        try:
            back = self._lent_to.take_back(timeout_s)
            if back is None:
                return False
            self._lent_to = None
            assert self._acceptor is not None
            assert self._note is not None
            streamed = Streamed(*back)
            self.log.wrote(streamed.offset, Lsn(streamed.last_lsn))
            self._acceptor.streamed(Lsn(streamed.committed_lsn), Lsn(streamed.settled_lsn))
            self._note.lsn = Lsn(streamed.noted_lsn)
            if not streamed.is_named:
                raise gone(self.folder)
        except (OSError, WalError) as error:
            self._lent_to = None
            self.fail(error)
        return True

    def tend(self) -> None:
        """Let the control file know what is durable and committed by now, so that a log which loses that is not opened
        and does not vote; and remove the segments that nobody will need. A fault fails the log."""
        if self._acceptor is None:
            return
        log = self.log
        try:
            self._store_progress()
            settled_lsn = self._acceptor.settled_lsn
            needless_lsn = settled_lsn if self.archived_lsn is None else min(settled_lsn, self.archived_lsn)
            if removed := log.remove_upto(needless_lsn):
                self._told("wal_segments_removed", {"segments": removed})
        except (OSError, WalError) as error:
            self.fail(error)

    def _store_progress(self) -> None:
        """Let the control file know what is durable and committed."""
        assert self._acceptor is not None
        control, committed_lsn = self.log.control, self._acceptor.committed_lsn
        if (control.durable_lsn, control.committed_lsn) != (self.log.durable_lsn, committed_lsn):
            self.log.store(control._replace(committed_lsn=committed_lsn))

    def close(self) -> None:
        """Close the files, all of which is synced."""
        self.tend()
        if self._log is None:
            return
        try:
            self._log.close()
        except (OSError, WalError) as error:
            self.fail(error)
        self._log = None
        self._abandon()

    def status(self) -> WalStatus:
        """How it stands; waits for ``lock``, but not for long: a recovery, or a disk that does not answer, may hold it.

        Raises:
            OSError: its files cannot be read.
        """
        if not self.lock.acquire(timeout=STATUS_WAIT_S):
            return WalStatus(self.node_id, "busy")
        try:
            return self._status_open(self._acceptor) if self._acceptor is not None else self._status_closed()
        finally:
            self.lock.release()

    def _status_open(self, acceptor: Acceptor) -> WalStatus:
        log = self.log
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
        """What the control file says."""
        control, failure = None, self._failure
        try:
            control = control_file.load(self.folder)
        except WalError as error:
            failure = self.fault_of(error)
        state = "failed" if failure else "closed"
        if control is None:
            return WalStatus(self.node_id, state, failure)
        epoch = histories.epoch_of(control.history, control.durable_lsn)
        return WalStatus(
            node_id=self.node_id,
            state=state,
            detail=failure,
            wal_id=control.wal_id,
            member_id=control.member_id,
            promised_epoch=control.promised_epoch,
            tail=Position(epoch or NO_EPOCH, control.durable_lsn),
            durable_lsn=control.durable_lsn,
            committed_lsn=control.committed_lsn,
            disk_bytes=_bytes_in(self.folder),
        )

    def _take_note(self, log: FileLog) -> None:
        """Let the control file know what a process that was killed had noted as committed."""
        self._note = CommitNote(self.folder, log.control.wal_id)
        if self._note.lsn > log.control.committed_lsn:
            log.store(log.control._replace(committed_lsn=self._note.lsn))

    def _abandon(self) -> None:
        """Let the files go as they are."""
        log, note = self._log, self._note
        self._acceptor = self._log = self._note = None
        if note is not None:
            note.close()
        if log is not None:
            log.abandon()

    def _has_control(self) -> bool:
        return (self.folder / control_file.CONTROL_NAME).exists()

    def _holds_nothing(self) -> bool:
        return not self.folder.is_dir() or not (self._has_control() or list_segments(self.folder))

    def fault_of(self, error: BaseException) -> str:
        """What went wrong with the log, and what to do about it at a safekeeper."""
        return f"{error.damage}. {self.remedy()}" if isinstance(error, WalFilesError) else str(error)

    def remedy(self) -> str:
        """What to do where the files of this log are damaged: its promises are lost with them, so that it begins again
        as a new member."""
        return (
            f"This safekeeper cannot keep the log of node {self.node_id}: stop this safekeeper, remove the folder "
            f"{self.folder}, start it again, and the node sends it the log. Never bring an old copy of the folder "
            "back: its promises are out of date"
        )

    def _failed(self, event: str, error: BaseException) -> None:
        """Keep the fault, and report it unless it is the one that was reported last."""
        is_news, self._failure = self.fault_of(error) != self._failure, self.fault_of(error)
        if is_news:
            self._told(event, {"error": self._failure, "folder": str(self.folder)})

    def _told(self, event: str, facts: Mapping[str, object]) -> None:
        self._tell(event, {"node_id": self.node_id, **facts})


class KeptLogs:
    """All logs below ``folder``; any thread may ask."""

    def __init__(self, folder: Path, region: str, tell: Tell, *, is_archived: bool) -> None:
        self._folder, self._region, self._tell, self._is_archived = folder, region, tell, is_archived
        self._lock = threading.Lock()
        """Of what follows. Nobody who holds it waits for the lock of a log."""
        self._logs: dict[str, KeptLog] = {}
        """By node, the one that was used the longest time ago first."""
        for found in sorted(folder.iterdir()):
            if _is_node_id(found.name) and found.is_dir():
                self._logs[found.name] = KeptLog(found, region, tell, is_archived)

    def of_node(self, node_id: str) -> KeptLog:
        """The log of a node, which the caller uses until he gives it to ``release``. It need not be open.

        Raises:
            InvalidInputError: no node can have this name.
            WalError: too many are kept.
        """
        if not _is_node_id(node_id):
            raise InvalidInputError(f"{node_id!r} is no name of a node")
        with self._lock:
            kept = self._logs.pop(node_id, None)
            if kept is None:
                if len(self._logs) >= LOGS_MAX:
                    raise WalError(f"{LOGS_MAX} logs are kept here, and there is no room for another")
                kept = KeptLog(self._folder / node_id, self._region, self._tell, self._is_archived)
            self._logs[node_id] = kept
            kept.users += 1
        self._close_unused()
        return kept

    def release(self, kept: KeptLog) -> None:
        """It is not used any more, by this caller."""
        with self._lock:
            kept.users -= 1
            if not kept.users and not kept.folder.is_dir():
                del self._logs[kept.node_id]

    def known(self, node_id: str) -> KeptLog | None:
        """The log of a node, None where none is kept."""
        with self._lock:
            return self._logs.get(node_id)

    def all(self) -> list[KeptLog]:
        """Those that are known, in the order of their nodes."""
        with self._lock:
            return [self._logs[node_id] for node_id in sorted(self._logs)]

    def close(self) -> None:
        """Sync and close all."""
        for kept in self.all():
            with kept.lock:
                kept.close()

    def _close_unused(self) -> None:
        """Close those that were not used for the longest time, where too many are open."""
        with self._lock:
            opened = [kept for kept in self._logs.values() if kept.acceptor is not None]
            unused = [kept for kept in opened if not kept.users][: max(0, len(opened) + 1 - LOGS_OPEN_MAX)]
        for kept in unused:
            with kept.lock:
                if not kept.users:
                    kept.close()


def _files_in(folder: Path) -> frozenset[tuple[str, int, int]]:
    """Name, size and time of each file of a folder; none where it is gone."""
    found = set()
    with contextlib.suppress(FileNotFoundError), os.scandir(folder) as entries:
        for entry in entries:
            stat = entry.stat()
            found.add((entry.name, stat.st_size, stat.st_mtime_ns))
    return frozenset(found)


def _bytes_in(folder: Path) -> int:
    """Bytes of all files of a folder; those that go meanwhile do not count."""
    total = 0
    with os.scandir(folder) as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):
                total += entry.stat().st_size
    return total
