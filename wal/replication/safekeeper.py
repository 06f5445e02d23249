"""The answers of a safekeeper: it keeps the logs of many nodes, each by the rules of ``acceptor``, in conversations.

A conversation is the messages of one connection: it starts with a Greet, which names the node whose log it is about, or
only requests Status. Several conversations may be about one log at the same time: the promise decides between them.
Each message is answered under the lock of its log. No thread holds that lock while it waits for a peer, so a dead peer
blocks no other.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import structs

from ledger.errors import InvalidInputError, WalCorruptError, WalError
from ledger.positions import BEFORE_FIRST, NO_EPOCH, Epoch, after
from wal import native
from wal.native import Stream
from wal.replication.archive import Archiver
from wal.replication.configuration import NO_MEMBERS
from wal.replication.kept_logs import LOGS_OPEN_MAX, KeptLog, KeptLogs, OpenLog
from wal.replication.messages import (
    EMPTY,
    PROTOCOL_VERSION,
    Append,
    Frame,
    Greet,
    Greeting,
    Message,
    Position,
    Promise,
    Ready,
    Reason,
    Refusal,
    Status,
    StatusReport,
    WalStatus,
)
from wal.scrub import INTERVAL_DEFAULT_S, LogCopy, Report, Scrubber
from wal.segment import FolderLock, Segment

if TYPE_CHECKING:
    from objects.store import ArchiveStore

TEND_INTERVAL_S = 5.0
HELD_UP_S = 30.0
"""A thread that waits longer for the lock of a log refuses: threads MUST NOT queue up for a hung disk."""
REPORT_WALS_MAX = 16
"""Logs in one StatusReport: with all their members it must fit into a frame."""


class Safekeeper:
    """Keeps the logs below ``folder``, which it creates and locks; it MUST be closed.

    One thread recovers all logs, and then tends them; one scrubs them, all of them in ``scrub_interval_s``; and one
    archives them, if there is an ``archive``.

    Raises:
        WalLockedError: another safekeeper has locked the folder.
    """

    def __init__(
        self,
        folder: Path,
        region: str,
        report: Report,
        archive: ArchiveStore | None = None,
        scrub_interval_s: float = INTERVAL_DEFAULT_S,
    ) -> None:
        self.region = region
        self.report = report
        self._lock = FolderLock(folder)
        self.logs = KeptLogs(folder, region, report, is_archived=archive is not None)
        self._closing = threading.Event()
        self._tending = threading.Thread(target=self._open_and_tend, name="upkeep", daemon=True)
        self._tending.start()
        self.scrubber = Scrubber(self._copies, scrub_interval_s, self._scrubbed, report)
        threading.Thread(target=self.scrubber.run, name="scrub", daemon=True).start()
        self.archiver = None if archive is None else Archiver(self.logs, archive, report)
        if self.archiver is not None:
            threading.Thread(target=self.archiver.run, args=(self._closing,), name="archive", daemon=True).start()

    def close(self) -> None:
        """Sync and close all logs."""
        self._closing.set()
        self.scrubber.close()
        self._tending.join()
        self.logs.close()
        self._lock.release()

    def tend(self) -> None:
        """``KeptLog.tend`` each log."""
        for kept in self.logs.all():
            with kept.locked():
                try:
                    kept.tend()
                except Exception as error:
                    # A bug ends the use of this log, not the upkeep of the others.
                    kept.fail(error)

    def _open_and_tend(self) -> None:
        """Recover all logs before they are needed, then tend them. A log that cannot be opened is reported and
        skipped."""
        for kept in self.logs.all()[:LOGS_OPEN_MAX]:
            if self._closing.is_set():
                return
            with kept.locked(), contextlib.suppress(OSError, WalError):
                kept.open("")
        while not self._closing.wait(TEND_INTERVAL_S):
            self.tend()

    def _copies(self) -> Iterator[LogCopy]:
        """The open logs; a closed one is read when it is opened."""
        for kept in self.logs.all():
            with kept.locked():
                copy = kept.copy()
            if copy is not None:
                yield copy

    def _scrubbed(self, copy: LogCopy, segment: Segment, error: WalCorruptError | None) -> None:
        for kept in self.logs.all() if error is not None else ():
            if kept.node_id == copy.node_id:
                with kept.locked():
                    kept.scrubbed(segment)

    def status_report(self, after_node_id: str) -> StatusReport:
        """The state of the logs of the nodes after ``after_node_id``, as many as fit into one report."""
        behind = [kept for kept in self.logs.all() if kept.node_id > after_node_id and kept.folder.is_dir()]
        shown = tuple(self.statuses(behind[:REPORT_WALS_MAX]))
        return StatusReport(self.region, shown, len(behind) > len(shown))

    def statuses(self, kept: Sequence[KeptLog]) -> Iterator[WalStatus]:
        """The state of each of these logs."""
        archiving = "" if self.archiver is None else self.archiver.fault
        for each in kept:
            try:
                status = each.status()
            except OSError as error:
                status = WalStatus(each.node_id, "failed", str(error))
            scrubbed_s = int(self.scrubber.ended_s.get(each.node_id, 0))
            yield structs.replace(status, archive_fault=archiving or each.archive_fault, scrubbed_s=scrubbed_s)


class Conversation:
    """The messages of one connection; belongs to one thread, and MUST be closed.

    ``names`` are those in the peer's certificate, one of which MUST be the node's; None without TLS. Once ``is_over``
    no more messages are answered.
    """

    def __init__(self, safekeeper: Safekeeper, names: Collection[str] | None) -> None:
        self._safekeeper = safekeeper
        self._names = names
        self._kept: KeptLog | None = None
        self._opened: OpenLog | None = None
        """The open log of ``_kept`` at the Greet. If it was opened again since, its acceptor does not know this run."""
        self._run = ""
        self._stream = native.make_stream()
        self.is_over = False

    @property
    def node_id(self) -> str | None:
        """The node whose log it is about; None before the Greet."""
        return None if self._kept is None else self._kept.node_id

    def close(self) -> None:
        if self._kept is not None:
            self._safekeeper.logs.release(self._kept)
            self._kept = None

    def answer(self, frames: Sequence[Frame]) -> list[Frame]:
        """The answers to messages that arrived together, in order. Consecutive Appends are synced together, and have
        one answer. All acknowledged records are durable."""
        if self._kept is None and (first := self._begin(frames[0])) is not None:
            return [first, *(self.answer(frames[1:]) if frames[1:] and not self.is_over else ())]
        kept = self._kept_log
        with kept.locked(HELD_UP_S) as is_locked:
            if not is_locked:
                return [self._end("unavailable", f"for {HELD_UP_S:g} s the log is held up by its disk")]
            answers: list[Frame] = []
            try:
                for frame in frames:
                    self._answer(frame, answers)
                    if self.is_over:
                        return answers
                self._flush(answers)
            except (OSError, WalError) as error:
                kept.fail(error)
                answers.append(self._end("unavailable", kept.fault_of(error)))
            except BaseException as error:
                kept.fail(error)
                raise
            return answers

    def lend(self) -> Stream | None:
        """A stream that continues the log if Appends of this connection follow one another; None if the log cannot be
        lent: then ``answer``, which also takes the log back, handles all messages."""
        if self._stream is None or self._kept is None or self.is_over:
            return None
        with self._kept.locked(HELD_UP_S) as is_locked:
            is_ours = is_locked and self._opened is not None and self._opened is self._kept.opened
            return self._stream if is_ours and self._kept.lend(self._stream, self._run) else None

    # --- the first message ------------------------------------------------------------------------

    def _begin(self, frame: Frame) -> Frame | None:
        """Answer a message that belongs to no log; None for a sound Greet, which sets ``_kept``."""
        message = frame.message
        if isinstance(message, Status):
            return Frame(self._safekeeper.status_report(message.after_node_id))
        if not isinstance(message, Greet):
            return self._end("unreadable", f"a {type(message).__name__} before any Greet")
        if self._names is not None and message.node_id not in self._names:
            detail = f"the certificate names {sorted(self._names)}, not {message.node_id}"
            self._safekeeper.report("safekeeper_peer_refused", {"node_id": message.node_id, "error": detail})
            return self._end("forbidden", detail)
        try:
            self._kept = self._safekeeper.logs.of_node(message.node_id)
        except InvalidInputError as error:
            return self._end("unreadable", str(error))
        except WalError as error:
            return self._end("unavailable", str(error))
        return None

    # --- about a log, under its lock --------------------------------------------------------------

    def _answer(self, frame: Frame, answers: list[Frame]) -> None:
        """Add the answer to one message, if it is due already, after the answers to earlier messages."""
        message = frame.message
        if not isinstance(message, Append):
            self._flush(answers)
        if isinstance(message, Greet):
            answers.append(self._greet(message))
        elif self._opened is None:
            answers.append(self._end("unreadable", f"a {type(message).__name__} about a log that is not here"))
        elif self._opened is not self._kept_log.opened:
            answers.append(self._end("unavailable", "the log was opened anew: say again who you are"))
        else:
            log = self._opened.log
            promised_epoch, tail = log.control.promised_epoch, log.tail
            if (answer := self._opened.acceptor.handle(self._run, frame)) is not None:
                self._flush(answers)
                answers.append(answer)
                self._report(message, answer.message, promised_epoch, tail)

    def _flush(self, answers: list[Frame]) -> None:
        """Acknowledge the earlier Appends."""
        opened = self._opened
        if opened is not None and opened is self._kept_log.opened and (acknowledged := opened.acceptor.flush()):
            opened.note.write(opened.acceptor.committed_lsn)
            answers.append(acknowledged)

    def _greet(self, message: Greet) -> Frame:
        if message.node_id != self.node_id or not message.run or message.version != PROTOCOL_VERSION:
            return self._end(
                "unreadable",
                f"this is about the log of node {self.node_id}, with a run, in version {PROTOCOL_VERSION}",
            )
        try:
            self._opened = self._kept_log.open(message.wal_id)
        except (OSError, WalError) as error:
            return self._end("unavailable", self._kept_log.fault_of(error))
        self._run = message.run
        if self._opened is None:
            return Frame(Greeting("", self._safekeeper.region, "", NO_EPOCH, EMPTY, BEFORE_FIRST, NO_MEMBERS))
        return Frame(self._opened.acceptor.greet(message))

    @property
    def _kept_log(self) -> KeptLog:
        assert self._kept is not None
        return self._kept

    def _report(self, message: Message, answer: Message, promised_epoch: Epoch, tail: Position) -> None:
        """Report events for an operator; ``promised_epoch`` and ``tail`` are those before the message."""
        facts: dict[str, object] = {"node_id": self.node_id, "run": self._run}
        if isinstance(answer, Refusal):
            facts |= {"reason": answer.reason, "detail": answer.detail, "promised_epoch": answer.promised_epoch}
            if answer.reason == "fenced":
                self._safekeeper.report("wal_fencing_reject", facts)
            elif isinstance(message, Append):
                self._safekeeper.report("wal_replication_append_reject", facts)
        elif isinstance(answer, Promise) and answer.epoch > promised_epoch:
            self._safekeeper.report("wal_epoch_bump", facts | {"epoch": answer.epoch, "last_lsn": answer.tail.lsn})
        elif isinstance(answer, Ready) and answer.tail.lsn < tail.lsn:
            cut = {"epoch": tail.epoch, "first_lsn": after(answer.tail.lsn), "last_lsn": tail.lsn}
            self._safekeeper.report("wal_divergent_tail_cut", facts | cut)

    def _end(self, reason: Reason, detail: str) -> Frame:
        """End the conversation with this refusal."""
        self.is_over = True
        return Frame(Refusal(reason, detail, NO_EPOCH))
