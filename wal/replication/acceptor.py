"""The rules of a member that keeps the log of a node: for one log, one message at a time, pure except for the log.

Always true::

    promised epoch >= epoch of the tail
    no batch is appended in an epoch whose history was not applied since the acceptor was created
    the tail is never cut below the known committed position
    an answer reports only durable positions

The elected epoch is not stored: a member that restarts is sent the history again, and applying it changes nothing.
"""

from __future__ import annotations

from ledger.errors import InvalidInputError, WalCorruptError, WalError
from ledger.positions import BEFORE_FIRST, NO_EPOCH, Epoch, Lsn, after, before
from wal.control import History, epoch_of, history_rises, history_up_to, last_common
from wal.format import LSN_LIMIT
from wal.reader import check_batches
from wal.replication.configuration import Configuration
from wal.replication.file_log import FileLog
from wal.replication.messages import (
    Ack,
    Append,
    Batches,
    Configure,
    Configured,
    Elected,
    Fetch,
    Frame,
    Greet,
    Greeting,
    Message,
    Prepare,
    Promise,
    Ready,
    Reason,
    Refusal,
)

FETCH_BYTES_MAX = 4 << 20
"""The answer to a Fetch has at most about so many bytes, whatever the request."""


Check = tuple[bool, Reason, str]
"""Whether a message is refused, why, and the detail."""


class Acceptor:
    """Keeps one log, for the proposer of one run of a node."""

    def __init__(self, log: FileLog, region: str) -> None:
        self.log = log
        self._region = region
        self._elected: Epoch = NO_EPOCH
        self._history: History = ()
        """History of the proposer of the epoch ``_elected``."""
        self.committed_lsn = log.control.committed_lsn
        """The highest position that this member knows to be committed; it may lag."""
        self.settled_lsn = BEFORE_FIRST
        """The log up to here is not needed again, as the proposer reported since this was created; it is committed."""
        self._unsynced = False
        self._owes_ack = False

    def handle(self, run: str, frame: Frame) -> Frame | None:
        """The answer to a message of the run ``run`` of the proposer; None for an Append, which ``flush`` answers.

        Raises:
            OSError, WalError: the log failed; nothing was promised or acknowledged, and it MUST be opened again.
        """
        match frame.message:
            case Append() as message:
                refusal = self._append(run, message, frame.body)
                return None if refusal is None else Frame(refusal)
            case Fetch() as message:
                return self._fetch(message)
            case Greet() as message:
                return Frame(self.greet(message))
            case Prepare() as message:
                return Frame(self._prepare(run, message))
            case Elected() as message:
                return Frame(self._apply(run, message))
            case Configure() as message:
                return Frame(self._configure(run, message))
        return Frame(self._refuse("unreadable", f"a safekeeper is not told {type(frame.message).__name__}"))

    def streams(self, run: str) -> Epoch | None:
        """The epoch whose Appends a stream may take: until the log gets another request, each sound batch of this run
        after its end would be accepted. None if the log cannot be lent."""
        epoch = self._elected
        is_so = self._is_promised_to(run, epoch) and self.log.tail.epoch == epoch and not self._owes_ack
        return epoch if is_so and not self._unsynced else None

    def streamed(self, committed_lsn: Lsn, settled_lsn: Lsn) -> None:
        """The log is back from the stream. The positions are those that the proposer reported meanwhile, at most the
        end of the log."""
        assert self.committed_lsn <= committed_lsn <= self.log.tail.lsn
        assert self.settled_lsn <= settled_lsn <= committed_lsn
        self.committed_lsn, self.settled_lsn = committed_lsn, settled_lsn

    def flush(self) -> Frame | None:
        """Sync the appended batches, and answer the Appends since the last call; None if there were none."""
        if not self._owes_ack:
            return None
        self._sync()
        self._owes_ack = False
        return Frame(Ack(self._elected, self.log.tail.lsn))

    # --- greeting and promise ---------------------------------------------------------------------

    def greet(self, message: Greet) -> Message:
        """Report what the log holds; raises what ``handle`` raises."""
        control = self.log.control
        if message.wal_id not in ("", control.wal_id):
            return self._refuse("other-wal", f"WAL {control.wal_id} of {control.node_id} is kept here")
        self._sync()
        return Greeting(
            control.member_id,
            self._region,
            control.wal_id,
            control.promised_epoch,
            self.log.tail,
            self.committed_lsn,
            self.log.configuration,
        )

    def _prepare(self, run: str, message: Prepare) -> Message:
        control = self.log.control
        is_of_other = message.epoch == control.promised_epoch and run != control.promised_run
        refusal = self._first_of(
            (message.wal_id != control.wal_id, "other-wal", f"WAL {control.wal_id} of {control.node_id} is kept here"),
            *self._checks_of(message.configuration),
            (message.epoch < control.promised_epoch or is_of_other, *self._fence),
        )
        if refusal is not None:
            return refusal
        self._sync()
        if message.configuration.order > self.log.configuration.order:
            self.log.configure(message.configuration)
        if message.epoch > control.promised_epoch:
            self._elected = NO_EPOCH
            self.log.store(
                control._replace(promised_epoch=message.epoch, promised_run=run, committed_lsn=self.committed_lsn)
            )
        return Promise(
            message.epoch,
            self.log.first_lsn,
            self.log.tail,
            self.committed_lsn,
            self.log.history,
            self.log.configuration,
        )

    # --- the log ----------------------------------------------------------------------------------

    def _apply(self, run: str, message: Elected) -> Message:
        if not self._is_promised_to(run, message.epoch):
            return self._fenced()
        if not _is_history(message.history, message.epoch) or message.first_lsn < 1:
            return self._refuse("unreadable", "the history is not one of this epoch")
        log = self.log
        common = last_common(log.history, log.tail.lsn, message.history)
        if common < self.committed_lsn and message.first_lsn <= self.committed_lsn:
            return self._refuse(
                "committed",
                f"LSN {self.committed_lsn} is committed here, but the history parts from this log behind {common}",
            )
        self._sync()
        is_behind = after(common) < max(message.first_lsn, log.first_lsn)
        if is_behind or (not log.history and log.first_lsn != message.first_lsn):
            log.begin_at(message.first_lsn, history_up_to(message.history, before(message.first_lsn)))
        elif log.history and common < log.tail.lsn:
            log.truncate(common)
        self._elected = message.epoch
        self._history = message.history
        return Ready(message.epoch, log.tail)

    def _append(self, run: str, message: Append, body: bytes | memoryview) -> Refusal | None:
        if not self._is_promised_to(run, message.epoch):
            return self._fenced()
        if self._elected != message.epoch:
            return self._refuse("not-elected", f"the history of epoch {message.epoch} was not applied here")
        tail = self.log.tail
        if body:
            if message.previous != tail:
                return self._refuse("does-not-fit", f"the log ends with {tail}, not with {message.previous}")
            first_lsn = after(tail.lsn)
            if epoch_of(self._history, first_lsn) != message.written_in:
                return self._refuse(
                    "does-not-fit", f"epoch {message.written_in} did not write LSN {first_lsn} by the history"
                )
            try:
                last_lsn = check_batches(body, first_lsn, self.log.control.node_id)
            except InvalidInputError as error:
                return self._refuse("damaged", str(error))
            if epoch_of(self._history, last_lsn) != message.written_in:
                return self._refuse("does-not-fit", "the batches reach into the next epoch")
            self.log.append(message.written_in, body)
            self._unsynced = True
        self.committed_lsn = max(self.committed_lsn, min(message.committed_lsn, self.log.tail.lsn))
        self.settled_lsn = max(self.settled_lsn, min(message.settled_lsn, self.committed_lsn))
        self._owes_ack = True
        return None

    def _fetch(self, message: Fetch) -> Frame:
        self._sync()
        try:
            chunk = self.log.read(message.from_lsn, self.log.tail.lsn, min(message.bytes_max, FETCH_BYTES_MAX))
        except WalCorruptError:
            raise
        except WalError as error:
            return Frame(self._refuse("not-here", str(error)))
        return Frame(Batches(chunk.previous, chunk.written_in), chunk.batches)

    def _configure(self, run: str, message: Configure) -> Message:
        not_applied = f"the history of epoch {message.epoch} was not applied here"
        refusal = self._first_of(
            (not self._is_promised_to(run, message.epoch), *self._fence),
            (self._elected != message.epoch, "not-elected", not_applied),
            *self._checks_of(message.configuration),
        )
        if refusal is not None:
            return refusal
        if message.configuration.order > self.log.configuration.order:
            self._sync()
            self.log.configure(message.configuration)
        return Configured(message.epoch, self.log.configuration)

    # --- conditions of the rules -----------------------------------------------------------------------

    def _sync(self) -> None:
        """Make appended batches durable, as any answer about the log requires."""
        if self._unsynced:
            self.log.sync()
            self._unsynced = False

    def _is_promised_to(self, run: str, epoch: Epoch) -> bool:
        control = self.log.control
        return control.promised_epoch == epoch and control.promised_run == run

    @property
    def _fence(self) -> tuple[Reason, str]:
        return "fenced", f"epoch {self.log.control.promised_epoch} is followed here"

    def _checks_of(self, received: Configuration) -> tuple[Check, ...]:
        return (
            (not received.is_sound, "unreadable", "the list of members is not one"),
            (received.order < self.log.configuration.order, "other-members", "a newer list of members is known here"),
        )

    def _fenced(self) -> Refusal:
        return self._refuse(*self._fence)

    def _first_of(self, *checks: Check) -> Refusal | None:
        """The refusal for the first check that applies; None if none does."""
        return next((self._refuse(reason, detail) for applies, reason, detail in checks if applies), None)

    def _refuse(self, reason: Reason, detail: str) -> Refusal:
        return Refusal(reason, detail, self.log.control.promised_epoch)


def _is_history(history: History, epoch: Epoch) -> bool:
    """Whether it ends with ``epoch``, in numbers that can be stored."""
    is_of_epoch = bool(history) and history[-1].epoch == epoch and history_rises(history)
    return is_of_epoch and min(history[0]) >= 1 and history[-1].first_lsn <= LSN_LIMIT
