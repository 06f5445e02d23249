"""Putting what is committed of the logs that a safekeeper keeps into an archive, from which nothing is removed.

An object is one segment as it stands, each of its CRCs checked before, written once, and named::

    <node_id>/<wal_id>/<20-digit first lsn>-<20-digit last lsn>-<epoch>-<member_id>.wal

Members cut their segments in different places, so each archives its own; any of them that follow one another are the
log. The last segment of a log is not archived: it goes on, until it is full or another epoch begins.
"""

from __future__ import annotations

import os
import threading
from itertools import pairwise
from typing import IO, Protocol

from ledger.errors import ArchiveConflictError, LedgerError, WalCorruptError
from ledger.positions import Lsn, before
from wal.replication.kept_logs import KeptLog, KeptLogs, Tell
from wal.scan import scan_segment
from wal.segment import Segment, list_segments, open_regular

ARCHIVE_INTERVAL_S = 5.0


class Store(Protocol):
    """Objects that are written once; errors are LedgerErrors."""

    def prepare(self) -> None:
        """Make it ready to be written to."""

    def create(self, name: str, source: IO[bytes]) -> bool:
        """Write all of ``source`` under ``name``, durably; False, and nothing is written, where it is taken."""

    def read(self, name: str, bytes_max: int) -> bytes | None:
        """What stands there, if anything does."""


class Archiver:
    """Archives ``logs`` into ``store``, in ``run``, on a thread of its own: it may wait for a network.

    An archive that is away is prepared once it is back. Until then the segments are kept, and ``fault`` says why.
    """

    def __init__(self, logs: KeptLogs, store: Store, tell: Tell) -> None:
        self._logs = logs
        self._store = store
        self._tell = tell
        self._is_prepared = False
        self.fault = ""
        """Why the archive as a whole cannot be written to, empty while it can."""

    def run(self, closing: threading.Event) -> None:
        """Archive what is to be, now and then, until ``closing`` is set."""
        self.archive_all(closing)
        while not closing.wait(ARCHIVE_INTERVAL_S):
            self.archive_all(closing)

    def archive_all(self, closing: threading.Event) -> None:
        """Archive what is to be. What fails is told once, and tried again the next time."""
        if not self._prepare():
            return
        for kept in self._logs.all():
            fault = ""
            try:
                self._archive(kept, closing)
            except (LedgerError, OSError) as error:
                fault, self._is_prepared = str(error), False
            if fault and fault != kept.archive_fault:
                self._tell("wal_archive_failed", {"node_id": kept.node_id, "error": fault})
            elif kept.archive_fault and not fault:
                self._tell("wal_archive_resumed", {"node_id": kept.node_id})
            kept.archive_fault = fault

    def _prepare(self) -> bool:
        """Whether the archive can be written to, as far as is known."""
        if self._is_prepared:
            return True
        try:
            self._store.prepare()
        except (LedgerError, OSError) as error:
            if str(error) != self.fault:
                self._tell("wal_archive_failed", {"error": str(error)})
            self.fault = str(error)
        else:
            if self.fault:
                self._tell("wal_archive_resumed", {})
            self._is_prepared, self.fault = True, ""
        return self._is_prepared

    def _archive(self, kept: KeptLog, closing: threading.Event) -> None:
        with kept.lock:
            acceptor = kept.acceptor
            if acceptor is None:
                return
            committed_lsn = min(acceptor.committed_lsn, kept.log.durable_lsn)
            archived_lsn = kept.archived_lsn or Lsn(0)
            control = kept.log.control
            segments = list_segments(kept.folder)
        prefix, suffix = f"{kept.node_id}/{control.wal_id}", control.member_id
        for segment, follower in pairwise(segments):
            last_lsn = before(follower.base_lsn)
            if last_lsn > committed_lsn or closing.is_set():
                return
            if last_lsn > archived_lsn:
                self._put(kept, segment, prefix, suffix)
                with kept.lock:
                    kept.archived_lsn = last_lsn

    def _put(self, kept: KeptLog, segment: Segment, prefix: str, suffix: str) -> None:
        """Archive one segment, to which nothing is added any more.

        Raises:
            ArchiveConflictError: something else stands in its place.
            LedgerError, OSError: it cannot be read, or written there.
        """
        with os.fdopen(open_regular(segment.path), "rb") as file:
            scan = scan_segment(file.fileno(), segment.base_lsn, kept.node_id)
            if scan.damage is not None:
                remedy = kept.remedy()
                error = WalCorruptError(segment.name, scan.damage.offset, scan.damage.reason, remedy)
                with kept.lock:
                    kept.fail(error)
                raise error
            if scan.last_lsn < segment.base_lsn:
                return
            name = f"{prefix}/{segment.base_lsn:020d}-{scan.last_lsn:020d}-{segment.epoch}-{suffix}.wal"
            if not self._store.create(name, file):
                size = os.fstat(file.fileno()).st_size
                if self._store.read(name, size) != os.pread(file.fileno(), size, 0):
                    raise ArchiveConflictError(f"{name} stands in the archive already, and is not {segment.path}")
        self._tell("wal_segment_archived", {"node_id": kept.node_id, "object": name})
