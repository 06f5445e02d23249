"""What a safekeeper answers: the logs of many nodes, each behind the rules of ``acceptor``, in conversations.

One conversation is what is said over one connection: it begins with a Greet, which names the node whose log it is
about, or asks for Status and nothing else. Any number may be about one log at the same time: what was promised decides.
Each message is answered under the lock of its log, which nobody holds while he waits for a peer; so a peer that died
keeps nobody from anything.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from msgspec import structs

from ledger.errors import InvalidInputError, WalCorruptError, WalError
from ledger.positions import BEFORE_FIRST, NO_EPOCH, Epoch, after
from wal import native
from wal.folder import FolderLock
from wal.native import Stream
from wal.replication import messages
from wal.replication.acceptor import Acceptor
from wal.replication.archive import Archiver, Store
from wal.replication.configuration import NO_MEMBERS
from wal.replication.kept_logs import LOGS_OPEN_MAX, KeptLog, KeptLogs, Tell
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
    Refusal,
    Status,
    StatusReport,
    WalStatus,
)
from wal.scrub import INTERVAL_DEFAULT_S, LogCopy, Scrubber
from wal.segment import Segment

TEND_INTERVAL_S = 5.0
HELD_UP_S = 30.0
"""Who waits longer for the lock of a log is told so: threads MUST NOT gather behind a disk that does not answer."""
REPORT_WALS_MAX = 16
"""Logs in one StatusReport: it has to fit into a frame with all their members."""


class Safekeeper:
    """Keeps the logs below ``folder``, which is made where it is missing, is locked, and MUST be closed again.

    A thread of its own recovers them all, and tends them from then on. Another one reads them again, all of them in
    ``scrub_interval_s``, and one archives them, where there is an ``archive``.

    Raises:
        WalLockedError: another safekeeper is at work there.
    """

    def __init__(
        self,
        folder: Path,
        region: str,
        tell: Tell,
        archive: Store | None = None,
        scrub_interval_s: float = INTERVAL_DEFAULT_S,
    ) -> None:
        self.region = region
        self.tell = tell
        self._lock = FolderLock(folder)
        self.logs = KeptLogs(folder, region, tell, is_archived=archive is not None)
        self._closing = threading.Event()
        self._tending = threading.Thread(target=self._open_and_tend, name="upkeep", daemon=True)
        self._tending.start()
        self.scrubber = Scrubber(self._copies, scrub_interval_s, self._scrubbed, tell)
        threading.Thread(target=self.scrubber.run, name="scrub", daemon=True).start()
        self.archiver = None if archive is None else Archiver(self.logs, archive, tell)
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
            with kept.lock:
                try:
                    kept.tend()
                except Exception as error:
                    # A fault of ours ends the use of this log, not the care for the others.
                    kept.fail(error)

    def _open_and_tend(self) -> None:
        """Recover what is kept before somebody needs it, and tend it. What cannot be opened is told, and left."""
        for kept in self.logs.all()[:LOGS_OPEN_MAX]:
            if self._closing.is_set():
                return
            with kept.lock, contextlib.suppress(OSError, WalError):
                kept.open("")
        while not self._closing.wait(TEND_INTERVAL_S):
            self.tend()

    def _copies(self) -> Iterator[LogCopy]:
        """The logs that are open: one that is not is read when it is opened."""
        for kept in self.logs.all():
            with kept.lock:
                copy = kept.copy()
            if copy is not None:
                yield copy

    def _scrubbed(self, copy: LogCopy, segment: Segment, error: WalCorruptError | None) -> None:
        kept = self.logs.known(copy.node_id) if error is not None else None
        if kept is not None:
            with kept.lock:
                kept.scrubbed(segment, error)

    def report(self, after_node_id: str) -> StatusReport:
        """How the logs stand, of the nodes behind that one, as many as go into one report."""
        behind = [kept for kept in self.logs.all() if kept.node_id > after_node_id and kept.folder.is_dir()]
        shown = tuple(self.statuses(behind[:REPORT_WALS_MAX]))
        return StatusReport(self.region, shown, len(behind) > len(shown))

    def statuses(self, kept: Sequence[KeptLog]) -> Iterator[WalStatus]:
        """How each of these logs stands."""
        archiving = "" if self.archiver is None else self.archiver.fault
        for each in kept:
            try:
                status = each.status()
            except OSError as error:
                status = WalStatus(each.node_id, "failed", str(error))
            scrubbed_s = int(self.scrubber.ended_s.get(each.node_id, 0))
            yield structs.replace(status, archive_fault=archiving or each.archive_fault, scrubbed_s=scrubbed_s)


class Conversation:
    """What is said over one connection, which MUST be closed; belongs to one thread.

    ``names`` are those that the peer has proved to have, one of which MUST be the node's; None where nobody proves
    anything. Once ``is_over`` nothing more is to be answered.
    """

    def __init__(self, safekeeper: Safekeeper, names: Collection[str] | None) -> None:
        self._safekeeper = safekeeper
        self._names = names
        self._kept: KeptLog | None = None
        self._acceptor: Acceptor | None = None
        """That of ``_kept`` when it was greeted; another one knows nothing of what was said."""
        self._run = ""
        self._stream = native.make_stream()
        self.is_over = False

    @property
    def node_id(self) -> str | None:
        """Whose log it is about; None while that was not said."""
        return None if self._kept is None else self._kept.node_id

    def close(self) -> None:
        if self._kept is not None:
            self._safekeeper.logs.release(self._kept)
            self._kept = None

    def answer(self, frames: Sequence[Frame]) -> list[Frame]:
        """The answers to messages that came together, in order; Appends that follow one another are synced together,
        and have one answer. All that is said in them is durable."""
        if self._kept is None:
            begun = self._begin(frames[0])
            if begun is not None:
                return [begun, *(self.answer(frames[1:]) if frames[1:] and not self.is_over else ())]
        kept = self._kept_log
        if not kept.lock.acquire(timeout=HELD_UP_S):
            return [self._end(messages.UNAVAILABLE, f"for {HELD_UP_S:g} s the log is held up by its disk")]
        try:
            return self._answer_all(kept, frames)
        finally:
            kept.lock.release()

    def lend(self) -> Stream | None:
        """A stream that goes on with the log where Appends of this connection come one behind the other; None where it
        cannot be lent, and all is for ``answer``, which takes it back."""
        kept, stream = self._kept, self._stream
        if stream is None or kept is None or self.is_over or not kept.lock.acquire(timeout=HELD_UP_S):
            return None
        try:
            is_lent = self._acceptor is not None and self._acceptor is kept.acceptor and kept.lend(stream, self._run)
        except (OSError, WalError) as error:
            kept.fail(error)
            return None
        finally:
            kept.lock.release()
        return stream if is_lent else None

    def _answer_all(self, kept: KeptLog, frames: Sequence[Frame]) -> list[Frame]:
        answers: list[Frame] = []
        try:
            for frame in frames:
                self._answer(frame, answers)
                if self.is_over:
                    return answers
            self._flush(answers)
        except (OSError, WalError) as error:
            kept.fail(error)
            answers.append(self._end(messages.UNAVAILABLE, kept.fault_of(error)))
        except BaseException as error:
            kept.fail(error)
            raise
        return answers

    # --- the first message ------------------------------------------------------------------------

    def _begin(self, frame: Frame) -> Frame | None:
        """Answer a message that is about no log; None for a Greet that is in order, and about ``_kept`` then."""
        message = frame.message
        if isinstance(message, Status):
            return Frame(self._safekeeper.report(message.after_node_id))
        if not isinstance(message, Greet):
            return self._end(messages.UNREADABLE, f"a {type(message).__name__} before any Greet")
        if self._names is not None and message.node_id not in self._names:
            detail = f"the certificate names {sorted(self._names)}, not {message.node_id}"
            self._safekeeper.tell("safekeeper_peer_refused", {"node_id": message.node_id, "error": detail})
            return self._end(messages.FORBIDDEN, detail)
        try:
            self._kept = self._safekeeper.logs.of_node(message.node_id)
        except InvalidInputError as error:
            return self._end(messages.UNREADABLE, str(error))
        except WalError as error:
            return self._end(messages.UNAVAILABLE, str(error))
        return None

    # --- about a log, under its lock --------------------------------------------------------------

    def _answer(self, frame: Frame, answers: list[Frame]) -> None:
        """Add the answer to one message, if it has one already, behind those to the messages before."""
        message = frame.message
        if not isinstance(message, Append):
            self._flush(answers)
        if isinstance(message, Greet):
            answers.append(self._greet(message))
        elif self._acceptor is None:
            answers.append(self._end(messages.UNREADABLE, f"a {type(message).__name__} about a log that is not here"))
        elif self._acceptor is not self._kept_log.acceptor:
            answers.append(self._end(messages.UNAVAILABLE, "the log was opened anew: say again who you are"))
        else:
            promised_epoch, tail = self._kept_log.log.control.promised_epoch, self._kept_log.log.tail
            answer = self._acceptor.handle(self._run, frame)
            if answer is not None:
                self._flush(answers)
                answers.append(answer)
                self._tell(message, answer.message, promised_epoch, tail)

    def _flush(self, answers: list[Frame]) -> None:
        """Acknowledge the Appends before."""
        if self._acceptor is not None and self._acceptor is self._kept_log.acceptor:
            acknowledged = self._acceptor.flush()
            if acknowledged is not None:
                self._kept_log.note_committed()
                answers.append(acknowledged)

    def _greet(self, message: Greet) -> Frame:
        if message.node_id != self.node_id or not message.run or message.version != PROTOCOL_VERSION:
            return self._end(
                messages.UNREADABLE,
                f"this is about the log of node {self.node_id}, with a run, in version {PROTOCOL_VERSION}",
            )
        try:
            self._acceptor = self._kept_log.open(message.wal_id)
        except (OSError, WalError) as error:
            return self._end(messages.UNAVAILABLE, self._kept_log.fault_of(error))
        self._run = message.run
        if self._acceptor is None:
            return Frame(Greeting("", self._safekeeper.region, "", NO_EPOCH, EMPTY, BEFORE_FIRST, NO_MEMBERS))
        answer = self._acceptor.handle(self._run, Frame(message))
        assert answer is not None
        return answer

    @property
    def _kept_log(self) -> KeptLog:
        assert self._kept is not None
        return self._kept

    def _tell(self, message: Message, answer: Message, promised_epoch: Epoch, tail: Position) -> None:
        """Tell of what somebody may want to look into; ``promised_epoch`` and ``tail`` are those before."""
        facts: dict[str, object] = {"node_id": self.node_id, "run": self._run}
        if isinstance(answer, Refusal):
            facts |= {"reason": answer.reason, "detail": answer.detail, "promised_epoch": answer.promised_epoch}
            if answer.reason == messages.FENCED:
                self._safekeeper.tell("wal_fencing_reject", facts)
            elif isinstance(message, Append):
                self._safekeeper.tell("wal_replication_append_reject", facts)
        elif isinstance(answer, Promise) and answer.epoch > promised_epoch:
            self._safekeeper.tell("wal_epoch_bump", facts | {"epoch": answer.epoch, "last_lsn": answer.tail.lsn})
        elif isinstance(answer, Ready) and answer.tail.lsn < tail.lsn:
            cut = {"epoch": tail.epoch, "first_lsn": after(answer.tail.lsn), "last_lsn": tail.lsn}
            self._safekeeper.tell("wal_divergent_tail_cut", facts | cut)

    def _end(self, reason: str, detail: str) -> Frame:
        """The refusal with which the conversation is over."""
        self.is_over = True
        return Frame(Refusal(reason, detail, NO_EPOCH))
