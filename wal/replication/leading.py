"""A node and the members of its quorum, over the network: to become the writer of its log, and to be it.

``elect`` blocks until an election ended, ``carry_out`` until the node's own copy is the log that counts. ``Shipper`` is
a thread that tells the members of every batch that the node writes, and the node of what is committed.
"""

from __future__ import annotations

import ssl
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from ledger.errors import FencedError, LedgerError, WalError
from ledger.positions import Lsn
from wal.replication.election import Election, Held, Plan, Said
from wal.replication.following import follow
from wal.replication.messages import Frame
from wal.replication.proposer import Proposer, Written
from wal.replication.replica_log import ReplicaLog
from wal.replication.wires import Connected, Lost, Received, Wires

BEATS_A_TIMEOUT = 3
"""How often members are told what is committed, so that they answer, in the time after which a silent one is lost."""


@dataclass(frozen=True)
class Members:
    """Where the members stand, by address their region; how they are spoken to, and by which run of this node."""

    addresses: Mapping[str, str]
    run: str
    timeout_s: float = 5.0
    tls: ssl.SSLContext | None = None
    elect_within_s: float = field(default=5.0)


def held_in(log: ReplicaLog) -> Held:
    """What this copy would bring into an election."""
    return Held(log.first_lsn, log.tail, log.history, log.control.committed_lsn)


def elect(members: Members, election: Election) -> Plan:
    """Have ``election`` decided by those members who answer in time.

    Raises:
        WalError: there is no quorum, or another proposer was faster.
    """
    wires = Wires(members.addresses, members.tls, members.timeout_s)
    ends_s = time.monotonic() + members.elect_within_s
    try:
        while election.outcome is None:
            wires.open_due()
            left_s = ends_s - time.monotonic()
            if left_s <= 0:
                election.time_is_up()
                break
            for event in wires.wait(left_s):
                for address, message in _told(election, event):
                    wires.send(address, Frame(message))
    finally:
        wires.close()
    if not isinstance(election.outcome, Plan):
        raise WalError(str(election.outcome))
    return election.outcome


def _told(election: Election, event: object) -> Said:
    match event:
        case Connected(address):
            return election.connected(address)
        case Lost(address, _):
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
            ask = _Asking(wires, plan.donor, members.timeout_s)
            ask(election_greeting)
            while True:
                request = steps.send(ask(Frame(request)))
        finally:
            wires.close()
    except StopIteration:
        return


class _Asking:
    """One member, asked one thing after the other."""

    def __init__(self, wires: Wires, address: str, timeout_s: float) -> None:
        self._wires, self._address, self._timeout_s = wires, address, timeout_s
        self._until(Connected)

    def __call__(self, request: Frame) -> Frame:
        self._wires.send(self._address, request)
        answer = self._until(Received)
        assert isinstance(answer, Received)
        return answer.frame

    def _until(self, kind: type[Connected | Received]) -> Connected | Received:
        while True:
            self._wires.open_due()
            for event in self._wires.wait(self._timeout_s):
                if isinstance(event, Lost):
                    raise WalError(f"the member at {self._address}, which holds the log, was lost: {event.reason}")
                if isinstance(event, kind):
                    return event


class MemberReport(NamedTuple):
    """How one member follows: by its address."""

    address: str
    region: str
    member_id: str
    is_streaming: bool
    replicated_lsn: Lsn
    fault: str | None


class Shipper:
    """The thread that leads the members through an epoch, with a ``proposer`` that nobody else touches.

    ``on_reached(committed_lsn)`` is called on it whenever more is committed; ``on_over(error)`` once, when nothing more
    can be: another writer took over, or the log cannot be read. ``make`` builds the proposer, with ``send``, ``drop``
    and ``on_fenced`` of the shipper.
    """

    def __init__(
        self,
        members: Members,
        make: Callable[[Shipper], Proposer],
        *,
        on_reached: Callable[[Lsn], None],
        on_over: Callable[[LedgerError], None],
    ) -> None:
        self._members = members
        self._wires = Wires(members.addresses, members.tls, members.timeout_s)
        self._told: deque[Written | Lsn] = deque()
        """What the node wrote and synced, in order, to be taken in by the thread."""
        self._on_reached = on_reached
        self._on_over = on_over
        self.proposer = make(self)
        self.faults: dict[str, str] = {}
        """Why a member is not spoken to, by address."""
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="wal-shipper", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def written(self, batch: Written) -> None:
        """A batch was written; from the WAL's writer thread."""
        self._told.append(batch)
        self._wires.ring()

    def became_durable(self, lsn: Lsn) -> None:
        """All up to ``lsn`` is synced; from the WAL's writer thread."""
        self._told.append(lsn)
        self._wires.ring()

    def on_fenced(self, detail: str) -> None:
        self._on_over(FencedError(f"another writer has taken over this log: {detail}; this process stops"))

    def send(self, address: str, frame: Frame) -> None:
        self._wires.send(address, frame)

    def drop(self, address: str, reason: str) -> None:
        self._wires.close_one(address, reason)

    def reports(self) -> list[MemberReport]:
        """How each member follows, as of now; from any thread."""
        return [
            MemberReport(
                address, link.region, link.member_id, link.is_streaming, link.replicated_lsn, self.faults.get(address)
            )
            for address, link in self.proposer.links.items()
        ]

    def close(self, timeout_s: float) -> None:
        """Let the members go, once they were sent what is there."""
        self._closing = True
        self._wires.ring()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)

    def _run(self) -> None:
        beat_s = self._members.timeout_s / BEATS_A_TIMEOUT
        next_beat_s = time.monotonic() + beat_s
        proposer, wires = self.proposer, self._wires
        try:
            while not self._closing and not proposer.is_fenced:
                before = proposer.committed_lsn
                wires.open_due()
                for event in wires.wait(min(beat_s, 0.25)):
                    self._take(event)
                while self._told:
                    told = self._told.popleft()
                    if isinstance(told, Written):
                        proposer.written(told)
                    else:
                        proposer.became_durable(told)
                if proposer.committed_lsn != before:
                    self._on_reached(proposer.committed_lsn)
                if time.monotonic() >= next_beat_s:
                    next_beat_s = time.monotonic() + beat_s
                    proposer.tell_committed()
        except Exception as error:
            self._on_over(error if isinstance(error, LedgerError) else WalError(f"shipping failed: {error!r}"))
        finally:
            wires.close()

    def _take(self, event: object) -> None:
        match event:
            case Connected(address):
                self.faults.pop(address, None)
                self.proposer.connected(address)
            case Lost(address, reason):
                self.faults[address] = reason
                self.proposer.lost(address)
            case Received(address, frame):
                self.proposer.received(address, frame.message)
                if self.proposer.links[address].is_streaming:
                    self._wires.settled(address)
