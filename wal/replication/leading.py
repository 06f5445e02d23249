"""A node and the members of its quorum, over the network: to become the writer of its log, and to be it.

``elect`` blocks until an election ended, ``carry_out`` until the node's own copy is the log that counts. ``Shipper`` is
a thread that tells the members of every batch that the node writes, and the node of what is committed.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from ledger.errors import FencedError, LedgerError, WalError
from ledger.positions import BEFORE_FIRST, Lsn, after
from wal.native import FromMember, Ship, Shipped
from wal.replication.election import Election, Held, Plan, Said, follow
from wal.replication.file_log import TailReader
from wal.replication.messages import Frame, Refusal
from wal.replication.proposer import UNDER_WAY_BYTES_MAX, Dropped, Link, Proposer
from wal.replication.replica_log import ReplicaLog
from wal.replication.tls import PeerTls
from wal.replication.wires import Connected, Event, Lost, Received, Wires

LOOK_S = 0.25
"""How long anybody waits for a member before he looks whether the log is still to be written."""
SHIPPED_MEMBERS_MAX = 16
"""With more of them, Python does all."""
_UNTIMED = (Lsn(0), 0.0)
BEATS_A_TIMEOUT = 3
"""How often members are told what is committed, so that they answer, in the time after which a silent one is lost."""


@dataclass(frozen=True)
class Members:
    """Where the members stand, by address their region; how they are spoken to, and by which run of this node.

    One that says nothing for ``timeout_s`` seconds is lost; an election waits as long for their answers.
    """

    addresses: Mapping[str, str]
    run: str
    timeout_s: float = 5.0
    tls: PeerTls | None = None
    given_up: threading.Event = field(default_factory=threading.Event)
    """Set once nobody wants the log to be written any more: who waits for a member in an election then fails."""


def held_in(log: ReplicaLog) -> Held:
    """What this copy would bring into an election."""
    return Held(log.first_lsn, log.tail, log.history, log.control.committed_lsn)


def elect(members: Members, election: Election) -> Plan:
    """Have ``election`` decided by those members who answer in time.

    Raises:
        WalError: there is no quorum, or another proposer was faster.
    """
    wires = Wires(members.addresses, members.tls, members.timeout_s)
    ends_s = time.monotonic() + members.timeout_s
    faults: dict[str, str] = {}
    """Why a member does not answer as it should, by address."""
    try:
        while election.outcome is None:
            wires.open_due()
            left_s = ends_s - time.monotonic()
            if left_s <= 0:
                election.time_is_up()
                break
            _go_on(members)
            for event in wires.wait(min(left_s, LOOK_S)):
                _note_fault(faults, event)
                for address, message in _told(election, event):
                    wires.send(address, Frame(message))
    finally:
        wires.close()
    if not isinstance(election.outcome, Plan):
        raise WalError("; ".join([str(election.outcome), *(f"{at}: {why}" for at, why in sorted(faults.items()))]))
    return election.outcome


def _note_fault(faults: dict[str, str], event: Event) -> None:
    """Keep what a member refused, or why it is not reached; what it refused says more than that it hung up then."""
    match event:
        case Lost(address, reason):
            faults.setdefault(address, reason)
        case Received(address, frame) if isinstance(frame.message, Refusal):
            faults[address] = f"{frame.message.reason}: {frame.message.detail}"
        case Received(address):
            faults.pop(address, None)


def _go_on(members: Members) -> None:
    """Return while the log is still to be written.

    Raises:
        WalError: it is not.
    """
    if members.given_up.is_set():
        raise WalError("the start was given up")


def _told(election: Election, event: object) -> Said:
    match event:
        case Connected(address):
            return election.connected(address)
        case Lost(address):
            return election.lost(address)
        case Received(address, frame):
            return election.received(address, frame.message)
    return []


def carry_out(members: Members, plan: Plan, log: ReplicaLog, election_greeting: Frame) -> None:
    """Bring ``log`` into the state that ``plan`` says, with what its donor gives.

    Raises:
        WalError: the donor went away, or gave what was not promised: elect again.
        OSError: the own copy cannot be written.
    """
    steps = follow(plan, log)
    try:
        request = next(steps)
        assert plan.donor is not None
        wires = Wires({plan.donor: members.addresses[plan.donor]}, members.tls, members.timeout_s)
        try:
            ask = _Asking(members, wires, plan.donor)
            ask(election_greeting)
            while True:
                request = steps.send(ask(Frame(request)))
        finally:
            wires.close()
    except StopIteration:
        return


class _Asking:
    """One member, asked one thing after the other."""

    def __init__(self, members: Members, wires: Wires, address: str) -> None:
        self._members, self._wires, self._address = members, wires, address
        self._events: deque[Event] = deque()
        """What happened that nobody has asked for yet."""
        self._until(Connected)

    def __call__(self, request: Frame) -> Frame:
        self._wires.send(self._address, request)
        answer = self._until(Received)
        assert isinstance(answer, Received)
        return answer.frame

    def _until(self, kind: type[Connected | Received]) -> Connected | Received:
        while True:
            while self._events:
                event = self._events.popleft()
                if isinstance(event, Lost):
                    raise WalError(f"the member at {self._address}, which holds the log, was lost: {event.reason}")
                if isinstance(event, kind):
                    return event
            _go_on(self._members)
            self._wires.open_due()
            self._events.extend(self._wires.wait(LOOK_S))


class MemberReport(NamedTuple):
    """How one member follows: ``fault`` says why it does not, None when it does. What was sent counts from the start of
    this process."""

    address: str
    region: str
    member_id: str
    is_streaming: bool
    replicated_lsn: Lsn
    lag_lsn: int
    sent_records: int
    sent_bytes: int
    damaged_frames: int
    fault: str | None


class Watcher(Protocol):
    """Who is told what becomes of members, on the thread of the shipper; nothing of it may block."""

    def acknowledged(self, address: str, seconds: float) -> None:
        """So long it took from a batch's end in the own log to the member's word that it is durable there."""

    def lost(self, address: str, reason: str) -> None:
        """The member cannot be spoken to any more; told once for each reason, until it can."""

    def back(self, address: str) -> None:
        """A member that was lost follows again."""

    def quorum_changed(self, is_there: bool, following: int, needed: int) -> None:
        """So many members that vote follow, which is enough to commit, or is not any more; told when that changes."""

    def refused(self, address: str, reason: str) -> None:
        """The member refused what it was sent, or cannot be sent what it lacks; told once for each reason."""

    def lags(self, address: str, lag_lsn: int) -> None:
        """The member is so many records behind, more than is in order; told once, until it is not."""


class Writer(Protocol):
    """Who writes the log that is shipped, and rings the shipper's bell: ``wal.group_commit.GroupCommit``."""

    @property
    def written_lsn(self) -> Lsn: ...
    @property
    def durable_lsn(self) -> Lsn: ...
    @property
    def has_ended(self) -> bool: ...
    @property
    def ship(self) -> Ship | None: ...
    def expect(self, entries: int) -> None: ...


class Reached(NamedTuple):
    """How far the log has come: what is committed, and what each region holds."""

    committed_lsn: Lsn
    region_lsns: Mapping[str, Lsn]


class Shipper:
    """The thread that leads the members through an epoch, with a ``proposer`` that nobody else touches.

    ``bell`` is to be rung by the ``writer`` of the log whenever it has written or synced something.
    ``on_reached(reached)`` is called on it whenever more is committed, or held in a region; ``on_over(error)`` once,
    when nothing more can be: another writer took over, or the log cannot be read. ``make`` builds the proposer, with
    ``send``, ``drop`` and ``on_fenced`` of the shipper, and what ``tail`` reads.

    Where all who follow stand where the log ends, over plain connections, batches are sent and Acks taken in without
    the interpreter's lock (``wal/_shipping.h``), until what they say is to be looked at.
    """

    def __init__(
        self,
        members: Members,
        make: Callable[[Shipper], Proposer],
        *,
        on_reached: Callable[[Reached], None],
        on_over: Callable[[LedgerError], None],
        tail: TailReader,
        watcher: Watcher,
        lag_threshold: int,
        keeps_damaged: bool,
    ) -> None:
        self._members = members
        self.tail = tail
        """Reads the log that is shipped."""
        self._watcher = watcher
        self._lag_threshold = lag_threshold
        self._keeps_damaged = keeps_damaged
        self._lagging: set[str] = set()
        self._timed: dict[str, tuple[Lsn, float]] = {}
        """By address, a record whose acknowledgement is timed, and since when: one at a time."""
        self._damaged_frames: Counter[str] = Counter()
        """By address, frames to or from the member that arrived damaged."""
        self._damaged_behind: dict[str, Lsn] = {}
        """By address, what the member had acknowledged when a frame arrived damaged: until it acknowledges more, the
        pauses between connections become longer."""
        self._durable_lsn = BEFORE_FIRST
        self._held_lsn = BEFORE_FIRST
        """What enough members and the own log held when that was shipped without the interpreter's lock."""
        self._wires = Wires(members.addresses, members.tls, members.timeout_s)
        self.bell = self._wires.bell
        self._writer: Writer | None = None
        self._written_lsn = BEFORE_FIRST
        self._on_reached = on_reached
        self._on_over = on_over
        self.proposer = make(self)
        self._had_quorum: bool | None = None
        """None until enough members follow for the first time."""
        self.faults: dict[str, str] = {}
        """Why a member is not spoken to, by address."""
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="wal-shipper", daemon=True)

    def start(self, writer: Writer) -> None:
        """Ship what ``writer`` writes, all of which is of this epoch."""
        self._writer = writer
        self._thread.start()

    def on_fenced(self, detail: str) -> None:
        self._on_over(FencedError(f"another writer has taken over this log: {detail}; this process stops"))

    def send(self, address: str, frame: Frame) -> None:
        self._wires.send(address, frame)

    def drop(self, address: str, reason: str, dropped: Dropped) -> None:
        """Connect to the member again after a pause; never again where what it lacks is damaged in the own log, unless
        ``keeps_damaged``."""
        if self.faults.get(address) != reason:
            self._watcher.refused(address, reason)
        if dropped is Dropped.DAMAGED_ON_THE_WAY:
            self._count_damaged(address)
        self._wires.close_one(address, reason)
        if dropped is Dropped.DAMAGED_AT_REST and not self._keeps_damaged:
            self._wires.give_up(address)

    def _count_damaged(self, address: str) -> None:
        """A frame to or from the member arrived damaged: what it carried is read from the log again."""
        self._damaged_frames[address] += 1
        self._damaged_behind[address] = self.proposer.links[address].replicated_lsn
        self.tail.read_again()

    def _settle(self, address: str, link: Link) -> None:
        """The member follows: the pause before the next connection begins again, unless frames arrive damaged."""
        if link.replicated_lsn > self._damaged_behind.get(address, BEFORE_FIRST - 1):
            self._damaged_behind.pop(address, None)
            self._wires.settled(address)

    def reports(self) -> list[MemberReport]:
        """How each member follows, as of now; from any thread."""
        return [
            MemberReport(
                address,
                link.region,
                link.member_id,
                link.is_streaming,
                link.replicated_lsn,
                max(0, self._durable_lsn - link.replicated_lsn),
                link.sent_records,
                link.sent_bytes,
                self._damaged_frames[address],
                self.faults.get(address),
            )
            for address, link in self.proposer.links.items()
        ]

    def close(self, timeout_s: float) -> None:
        """Let the members go, once they were sent what is there. The bell goes with them, unless the writer hangs, and
        may ring it yet."""
        self._closing = True
        self._wires.ring()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        if not self._thread.is_alive() and (self._writer is None or self._writer.has_ended):
            self._wires.close()

    def _run(self) -> None:
        beat_s = self._members.timeout_s / BEATS_A_TIMEOUT
        next_beat_s = time.monotonic() + beat_s
        proposer, wires = self.proposer, self._wires
        before = Reached(proposer.committed_lsn, {})
        try:
            is_last = False
            while not is_last and not proposer.is_fenced:
                is_last = self._closing
                wires.open_due()
                wait_s = 0.0 if is_last else min(beat_s, LOOK_S)
                shipped = self._ship(wait_s)
                events = wires.wait(wait_s if shipped is None else 0.0) if shipped is None or shipped.is_odd else []
                for event in events:
                    self._take(event)
                if events:
                    self._look_at_quorum()
                if self._take_in() or events or shipped is not None:
                    before = self._tell_reached(before)
                if time.monotonic() >= next_beat_s:
                    next_beat_s = time.monotonic() + beat_s
                    proposer.tell_committed()
                    self._look_at_lag()
        except Exception as error:
            self._on_over(error if isinstance(error, LedgerError) else WalError(f"shipping failed: {error!r}"))
        finally:
            wires.leave()
            self.tail.close()

    def _ship(self, wait_s: float) -> Shipped | None:
        """Wait for so long while batches are sent and Acks come, and take in those; None, and nothing was done, where
        that is for Python."""
        ship = None if self._writer is None else self._writer.ship
        level = None if ship is None else self.proposer.level()
        if ship is None or level is None or not 0 < len(level.following) <= SHIPPED_MEMBERS_MAX:
            return None
        place = self.tail.place(after(level.sent_lsn))
        descriptors = [self._wires.descriptor_of(address) for address in level.following]
        if place is None or None in descriptors:
            return None
        members = [
            (descriptor, link.replicated_lsn, link.under_way, *self._timed.get(address, _UNTIMED))
            for descriptor, (address, link) in zip(descriptors, level.following.items(), strict=True)
        ]
        shipped = Shipped(
            *ship(
                self._wires.epoll,
                self.bell,
                members,
                level.epoch,
                level.sent_lsn,
                level.committed_lsn,
                level.settled_lsn,
                *place,
                level.enough,
                level.is_any,
                max(level.committed_lsn, self._held_lsn),
                UNDER_WAY_BYTES_MAX,
                time.monotonic() + wait_s,
            )
        )
        self._held_lsn = Lsn(shipped.reached_lsn)
        if shipped.sent_lsn > level.sent_lsn:
            self._written_lsn = Lsn(shipped.sent_lsn)
            self.tail.passed(self._written_lsn, shipped.offset)
            self.proposer.shipped(level, self._written_lsn, shipped.sent_bytes)
        for (address, link), fields in zip(level.following.items(), shipped.said, strict=True):
            self._heard(address, link, FromMember(*fields))
        self._wires.lose_silent()
        return shipped

    def _heard(self, address: str, link: Link, said: FromMember) -> None:
        """What a member said while batches were shipped."""
        self._timed.pop(address, None)
        if said.timed_lsn:
            self._timed[address] = Lsn(said.timed_lsn), said.timed_since_s
        if said.took_s >= 0:
            self._watcher.acknowledged(address, said.took_s)
        if said.acked_lsn > link.replicated_lsn:
            self.proposer.acknowledged(address, Lsn(said.acked_lsn))
            self._settle(address, link)
        if said.is_heard or said.unsent or said.error:
            self._wires.went_on(address, said.others, said.unsent, said.error)

    def _take(self, event: object) -> None:
        match event:
            case Connected(address):
                self.proposer.connected(address)
            case Lost(address, reason, is_damaged):
                if is_damaged:
                    self._count_damaged(address)
                if self.faults.get(address) != reason:
                    self._watcher.lost(address, reason)
                self.faults[address] = reason
                self._timed.pop(address, None)
                self.proposer.lost(address)
            case Received(address, frame):
                self.proposer.received(address, frame.message)
                self._look_at_time(address)
                link = self.proposer.links[address]
                if link.is_streaming and self._wires.is_open(address):
                    if self.faults.pop(address, None) is not None:
                        self._watcher.back(address)
                    self._settle(address, link)

    def _tell_reached(self, before: Reached) -> Reached:
        """Tell how far the log has come, if that is further than before; whoever waits for what is committed now will
        come back to the writer."""
        reached = Reached(self.proposer.committed_lsn, self.proposer.region_lsns())
        if reached == before:
            return before
        if self._writer is not None and self.proposer.configuration.is_quorum:
            self._writer.expect(reached.committed_lsn - before.committed_lsn)
        self._on_reached(reached)
        return reached

    def _take_in(self) -> bool:
        """What the writer has done since the last time; whether more is durable."""
        assert self._writer is not None
        durable_lsn, written_lsn = self._writer.durable_lsn, self._writer.written_lsn  # in this order: it is not less
        if written_lsn > self._written_lsn:
            self._written_lsn = written_lsn
            self.proposer.written(written_lsn)
            for address, link in self.proposer.links.items():
                if link.is_streaming and address not in self._timed:
                    self._timed[address] = written_lsn, time.perf_counter()
        if durable_lsn == self._durable_lsn:
            return False
        self._durable_lsn = durable_lsn
        self.proposer.became_durable(durable_lsn)
        return True

    def _look_at_time(self, address: str) -> None:
        lsn, since_s = self._timed.get(address, (None, 0.0))
        if lsn is not None and self.proposer.links[address].replicated_lsn >= lsn:
            del self._timed[address]
            self._watcher.acknowledged(address, time.perf_counter() - since_s)

    def _look_at_quorum(self) -> None:
        following, needed, is_there = self.proposer.in_sync(), self.proposer.needed(), self.proposer.has_quorum()
        if is_there != self._had_quorum and (is_there or self._had_quorum) and needed:
            if self._had_quorum is not None:
                self._watcher.quorum_changed(is_there, following, needed)
            self._had_quorum = is_there

    def _look_at_lag(self) -> None:
        for report in self.reports():
            if report.lag_lsn <= self._lag_threshold:
                self._lagging.discard(report.address)
            elif report.address not in self._lagging:
                self._lagging.add(report.address)
                self._watcher.lags(report.address, report.lag_lsn)
