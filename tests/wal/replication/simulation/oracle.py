"""What must hold, whatever the protocol does: judged by what was written, answered and reported, and nothing else.

A record's payload says who wrote it, ``epoch.run.number``, so that what a copy says of it can be held against that.
"""

from __future__ import annotations

from collections.abc import Mapping

from ledger.positions import Epoch, Lsn, before
from tests.wal.replication.simulation.disk import Disk, Record, SimLog
from wal.replication.messages import Ack, Append, Frame, Greeting, Message, Promise, Ready


class ViolationError(AssertionError):
    """Something that must never happen did."""


class Oracle:
    def __init__(self) -> None:
        self.committed: dict[Lsn, bytes] = {}
        """What any writer reported as committed."""
        self.chained: list[bytes] = []
        """What PostgreSQL holds, by LSN from 1."""
        self._content: dict[tuple[Epoch, Lsn], bytes] = {}
        self._before: dict[tuple[Epoch, Lsn], bytes] = {}
        """The payload in front of a record."""
        self._writers: dict[Epoch, str] = {}
        self._begun: dict[Epoch, tuple[Lsn, Mapping[Lsn, bytes]]] = {}
        """By epoch, what its writer began with, and from which LSN on."""
        self._promised: dict[str, tuple[Epoch, str]] = {}
        self._applied: dict[str, Epoch] = {}
        """The epoch whose history a member has applied, since it was started last."""
        self._committed_by: dict[str, Lsn] = {}

    # --- copies -----------------------------------------------------------------------------------

    def appended(self, written_in: Epoch, records: list[Record], previous: tuple[Epoch, Record] | None) -> None:
        """A copy got these records behind ``previous``."""
        ahead = previous[1] if previous else None
        for record in records:
            at = f"LSN {record.lsn}, {record.payload!r}"
            if int(record.payload.split(b".")[0]) != written_in:
                raise ViolationError(f"{at} is kept as of epoch {written_in}")
            if self._content.setdefault((written_in, record.lsn), record.payload) != record.payload:
                raise ViolationError(f"{at}: epoch {written_in} wrote something else there, too")
            if ahead is not None:
                if ahead.lsn + 1 != record.lsn:
                    raise ViolationError(f"{at} comes behind LSN {ahead.lsn}")
                if self._before.setdefault((written_in, record.lsn), ahead.payload) != ahead.payload:
                    raise ViolationError(f"{at} comes behind {ahead.payload!r} here, elsewhere behind something else")
            ahead = record

    def started(self, name: str) -> None:
        """A member was started."""
        self._applied.pop(name, None)

    def handled(self, name: str, log: SimLog, run: str, message: Message, answer: Frame | None) -> None:
        """A member took a message in, and has this answer."""
        if isinstance(message, Append) and answer is None:
            promised = self._promised.get(log.control.member_id)
            if promised != (message.epoch, run):
                raise ViolationError(
                    f"{name} took an append of epoch {message.epoch}, {run[:4]}; it promised {promised}"
                )
            if self._applied.get(name) != message.epoch:
                raise ViolationError(f"{name} took an append of epoch {message.epoch} without its history")
        if answer is not None:
            if isinstance(answer.message, Promise):
                self._promises(name, log, run, answer.message)
            if isinstance(answer.message, Ready):
                self._applied[name] = answer.message.epoch
            self.answered(name, log, answer.message)

    def answered(self, name: str, log: SimLog, message: Message) -> None:
        """A member answers; it must be able to say so after a crash."""
        match message:
            case Ack():
                lsn = message.durable_lsn
            case Ready() | Promise() | Greeting():
                lsn = message.tail.lsn
            case _:
                return
        durable_lsn = max(log.disk.last_lsn, before(log.first_lsn))
        if lsn > durable_lsn:
            raise ViolationError(f"{name} says it holds LSN {lsn}, {durable_lsn} is durable")

    def _promises(self, name: str, log: SimLog, run: str, promise: Promise) -> None:
        control = log.control
        last = self._promised.get(control.member_id, (0, ""))
        if promise.epoch < last[0] or (promise.epoch == last[0] and run != last[1]):
            raise ViolationError(f"{name} promised epoch {promise.epoch} to {run[:4]} after {last}")
        if control.promised_epoch < promise.epoch:
            raise ViolationError(f"{name} promised epoch {promise.epoch}, durably {control.promised_epoch}")
        self._promised[control.member_id] = (promise.epoch, run)

    # --- writers ----------------------------------------------------------------------------------

    def begins(self, epoch: Epoch, run: str, disk: Disk) -> None:
        """The run writes in this epoch from now on, behind what its disk holds."""
        if self._writers.setdefault(epoch, run) != run:
            raise ViolationError(f"{run[:4]} and {self._writers[epoch][:4]} both write in epoch {epoch}")
        held = {record.lsn: record.payload for _, record in disk.records()}
        self._begun[epoch] = (disk.first_lsn, held)
        for lsn, payload in self.committed.items():
            self._still_holds(epoch, lsn, payload)

    def reports(self, epoch: Epoch, run: str, lsn: Lsn, disk: Disk) -> None:
        """The run says that all up to ``lsn`` is committed."""
        last_lsn = self._committed_by.get(run, Lsn(0))
        if lsn < last_lsn:
            raise ViolationError(f"{run[:4]} reported LSN {last_lsn} as committed, and now {lsn}")
        self._committed_by[run] = lsn
        if lsn > disk.last_lsn:
            raise ViolationError(f"{run[:4]} reports LSN {lsn}, its own disk holds {disk.last_lsn}")
        for _, record in disk.records():
            if last_lsn < record.lsn <= lsn:
                known = self.committed.setdefault(record.lsn, record.payload)
                if known != record.payload:
                    raise ViolationError(f"LSN {record.lsn} was committed as {known!r}, now it is {record.payload!r}")
                for later in self._begun:
                    if later > epoch:
                        self._still_holds(later, record.lsn, record.payload)

    def _still_holds(self, epoch: Epoch, lsn: Lsn, payload: bytes) -> None:
        first_lsn, held = self._begun[epoch]
        if lsn >= first_lsn and held.get(lsn) != payload:
            raise ViolationError(f"epoch {epoch} began with {held.get(lsn)!r} at LSN {lsn}, committed is {payload!r}")

    # --- the chain --------------------------------------------------------------------------------

    def chains(self, from_lsn: Lsn, payloads: list[bytes]) -> None:
        """PostgreSQL took these in."""
        if from_lsn != len(self.chained) + 1:
            raise ViolationError(f"LSN {from_lsn} is chained behind {len(self.chained)}")
        for lsn, payload in enumerate(payloads, from_lsn):
            if self.committed.get(Lsn(lsn)) != payload:
                raise ViolationError(
                    f"LSN {lsn} is chained as {payload!r}, committed is {self.committed.get(Lsn(lsn))!r}"
                )
            self.chained.append(payload)
