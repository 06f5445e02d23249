"""A node and the members of its quorum, over the network: the node becomes the writer of its log, and then writes it.

``elect`` blocks until an election has ended, ``carry_out`` until the node's own copy is the elected log. ``Shipper`` is
a thread that sends the members every batch that the node writes, and reports the committed position to the node.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field, replace
from itertools import chain

from ledger.errors import FencedError, LedgerError, WalError
from ledger.positions import BEFORE_FIRST, Lsn, after
from wal.group_commit import GroupCommit
from wal.replication.election import Election, Plan, Requests, follow
from wal.replication.file_log import FileLog, TailReader
from wal.replication.messages import Ack, Frame, Greet, Greeting, Refusal
from wal.replication.proposer import UNDER_WAY_BYTES_MAX, Dropped, Link, Proposer
from wal.replication.tls import PeerTls
from wal.replication.wires import Connected, Event, Lost, Received, Wires
from wal.scrub import Report

CHECK_INTERVAL_S = 0.25
"""How often a thread that waits for a member checks whether the start was given up."""
SHIPPED_MEMBERS_MAX = 16
"""With more following members, Python does all shipping."""
BEATS_A_TIMEOUT = 3
"""Heartbeats, with the committed position, in each ``timeout_s``."""


@dataclass(frozen=True)
class Members:
    """The region of each member by address, how to connect to the members, and the id of this run of the node.

    A member that sends nothing for ``timeout_s`` seconds is lost; an election waits as long for answers.
    """

    addresses: Mapping[str, str]
    run: str
    timeout_s: float = 5.0
    tls: PeerTls | None = None
    given_up: threading.Event = field(default_factory=threading.Event)
    """Set if the node no longer wants to write the log: then an election, or a wait for a member, fails."""


def elect(members: Members, election: Election) -> Plan:
    """Run ``election`` with the members that answer in time.

    Raises:
        WalError: there is no quorum, or another proposer was faster.
    """
    ends_s = time.monotonic() + members.timeout_s
    faults: dict[str, str] = {}
    """By address, why a member refused or was not reached."""
    with closing(Wires(members.addresses, members.tls, members.timeout_s)) as wires:
        for events in _events(members, wires, ends_s):
            for event in events:
                for address, message in _requests(election, event, faults):
                    wires.send(address, Frame(message))
            if election.outcome is not None:
                break
        else:
            election.time_is_up()
    if not isinstance(election.outcome, Plan):
        raise WalError("; ".join([str(election.outcome), *(f"{at}: {why}" for at, why in sorted(faults.items()))]))
    return election.outcome


def _requests(election: Election, event: Event, faults: dict[str, str]) -> Requests:
    """The requests that follow from ``event``. ``faults`` keeps why a member refused or was not reached; a refusal is
    not replaced by the disconnection after it, which says less."""
    match event:
        case Connected(address):
            return election.connected(address)
        case Lost(address, reason):
            faults.setdefault(address, reason)
            return election.lost(address)
        case Received(address, frame):
            faults.pop(address, None)
            if isinstance(frame.message, Refusal):
                faults[address] = f"{frame.message.reason}: {frame.message.detail}"
            return election.received(address, frame.message)


def carry_out(members: Members, plan: Plan, log: FileLog) -> None:
    """Carry out ``plan`` on ``log``, with the records of the donor.

    Raises:
        WalError: the donor was lost, or sent other records than promised: elect again.
        OSError: the own copy cannot be written.
    """
    steps = follow(plan, log)
    if (request := next(steps, None)) is None:
        return
    assert plan.donor is not None
    greeting = Greet(log.control.node_id, plan.wal_id, members.run)
    with closing(Wires({plan.donor: members.addresses[plan.donor]}, members.tls, members.timeout_s)) as wires:
        for event in chain.from_iterable(_events(members, wires)):
            match event:
                case Connected(address):
                    wires.send(address, Frame(greeting))
                case Lost(address, reason):
                    raise WalError(f"the member at {address}, which holds the log, was lost: {reason}")
                case Received(address, frame) if isinstance(frame.message, Greeting):
                    wires.send(address, Frame(request))
                case Received(address, frame):
                    try:
                        request = steps.send(frame)
                    except StopIteration:
                        return
                    wires.send(address, Frame(request))


def _events(members: Members, wires: Wires, ends_s: float = float("inf")) -> Iterator[list[Event]]:
    """Events of the connections, until ``ends_s`` of the monotonic clock.

    Raises:
        WalError: the start was given up.
    """
    while (left_s := ends_s - time.monotonic()) > 0:
        if members.given_up.is_set():
            raise WalError("the start was given up")
        wires.open_due()
        yield wires.wait(min(left_s, CHECK_INTERVAL_S))


class Shipper:
    """The thread that leads the members through an epoch, with a ``proposer`` that no other thread uses.

    The ``writer`` of the log writes to ``wake_fd`` when it has written or synced a batch. ``make`` builds the proposer,
    with ``send`` and ``drop`` of the shipper, and ``tail`` to read from. The shipper calls these callbacks on its own
    thread; they MUST NOT block::

        on_reached(committed_lsn, region_lsns)    more is committed, or held in a region
        on_acknowledged(seconds)                  a member acknowledged a batch so long after it was written here
        on_over(error)                            once: no more can be committed, since another writer took over,
                                                  or the log cannot be read
        report(event, facts)                      once for each change: a member is lost, is back, refuses a message,
                                                  or lags; a quorum is lost, is back

    If all following members have been sent all of the log, over plain connections, C ships batches and receives Acks
    without the interpreter's lock (``wal/_shipping.h``), until the proposer has to decide something.
    """

    def __init__(
        self,
        members: Members,
        make: Callable[[Shipper], Proposer],
        *,
        on_reached: Callable[[Lsn, Mapping[str, Lsn]], None],
        on_acknowledged: Callable[[float], None],
        on_over: Callable[[LedgerError], None],
        report: Report,
        tail: TailReader,
        lag_threshold: int,
        keeps_damaged: bool,
    ) -> None:
        self._timeout_s = members.timeout_s
        self.tail = tail
        """Reads the log that is shipped."""
        self._report = report
        self._lag_threshold = lag_threshold
        self._keeps_damaged = keeps_damaged
        self._held_lsn = BEFORE_FIRST
        """LSN that enough members and the own log held after the last shipping in C."""
        self._wires = Wires(members.addresses, members.tls, members.timeout_s)
        self.wake_fd = self._wires.wake_fd
        self.send = self._wires.send
        self._writer: GroupCommit
        self._on_reached = on_reached
        self._on_acknowledged = on_acknowledged
        self._on_over = on_over
        self.proposer = make(self)
        self._had_quorum: bool | None = None
        """None until enough members follow for the first time."""
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="wal-shipper", daemon=True)

    def start(self, writer: GroupCommit) -> None:
        """Ship the batches of ``writer``, all of which are of this epoch."""
        self._writer = writer
        self._thread.start()

    def drop(self, address: str, reason: str, dropped: Dropped) -> None:
        """Close the connection and connect again after a pause; never again if the batches that the member lacks are
        damaged in the own log, unless ``keeps_damaged``."""
        link = self.proposer.links[address]
        if link.fault != reason:
            self._report("wal_replication_append_reject", {"member": address, "error": reason})
        if dropped == "damaged-on-the-way":
            self._count_damaged(link)
        self._wires.close_one(address, reason, is_last=dropped == "damaged-at-rest" and not self._keeps_damaged)

    def reports(self) -> list[Link]:
        """The current state of each member; thread-safe."""
        durable_lsn = self.proposer.durable_lsn
        return [
            replace(link, lag_lsn=max(0, durable_lsn - link.replicated_lsn)) for link in self.proposer.links.values()
        ]

    def close(self, timeout_s: float) -> None:
        """Send the members the rest, and close all connections; also ``wake_fd``, unless the writer hangs and may still
        write to it."""
        self._is_closing = True
        self._wires.wake()
        is_started = self._thread.ident is not None
        if is_started:
            self._thread.join(timeout_s)
        if not is_started or (self._writer.has_ended and not self._thread.is_alive()):
            self._wires.close()

    # Everything below runs on the thread of the shipper.

    def _run(self) -> None:
        beat_s = self._timeout_s / BEATS_A_TIMEOUT
        next_beat_s = time.monotonic() + beat_s
        reached: tuple[Lsn, Mapping[str, Lsn]] = (self.proposer.committed_lsn, {})
        try:
            is_last = False
            while not is_last and not self.proposer.fenced_by:
                is_last = self._is_closing
                self._wires.open_due()
                wait_s = 0.0 if is_last else min(beat_s, CHECK_INTERVAL_S)
                needs_python = self._ship(wait_s)
                events = [] if needs_python is False else self._wires.wait(0.0 if needs_python else wait_s)
                for event in events:
                    self._handle(event)
                if events:
                    self._check_quorum()
                if self._take_written() or events or needs_python is not None:
                    reached = self._report_reached(reached)
                if time.monotonic() >= next_beat_s:
                    next_beat_s = time.monotonic() + beat_s
                    self.proposer.tell_committed()
                    self._check_lag()
            if fenced_by := self.proposer.fenced_by:
                raise FencedError(f"another writer has taken over this log: {fenced_by}; this process stops")
        except Exception as error:
            self._on_over(error if isinstance(error, LedgerError) else WalError(f"shipping failed: {error!r}"))
        finally:
            self._wires.leave()
            self.tail.close()

    def _ship(self, wait_s: float) -> bool | None:
        """Ship batches and receive Acks in C for up to ``wait_s``, and handle the Acks; returns whether Python is
        needed then. None, and nothing was done, if Python must ship."""
        ship, proposer = self._writer.ship, self.proposer
        in_step = proposer.in_step() if ship is not None else None
        if ship is None or in_step is None or not 0 < len(in_step[0]) <= SHIPPED_MEMBERS_MAX:
            return None
        links, enough, is_any = in_step
        shipped_lsn = proposer.written_lsn
        place = self.tail.place(after(shipped_lsn))
        descriptors = [self._wires.descriptor_of(link.address) for link in links]
        if place is None or None in descriptors:
            return None
        members = [
            (descriptor, link.replicated_lsn, link.under_way, link.timed_lsn, link.timed_since_s)
            for descriptor, link in zip(descriptors, links, strict=True)
        ]
        needs_python, sent_lsn, sent_bytes, offset, _, self._held_lsn, answers = ship(
            self._wires.epoll.fileno(),
            self.wake_fd,
            members,
            proposer.epoch,
            shipped_lsn,
            proposer.committed_lsn,
            proposer.settled_lsn,
            *place,
            enough,
            is_any,
            max(proposer.committed_lsn, self._held_lsn),
            UNDER_WAY_BYTES_MAX,
            time.monotonic() + wait_s,
        )
        if sent_lsn > shipped_lsn:
            self.tail.passed(sent_lsn, offset)
            proposer.shipped(links, sent_lsn, sent_bytes)
        for link, of_member in zip(links, answers, strict=True):
            self._take_answers(link, *of_member)
        self._wires.lose_silent()
        return bool(needs_python)

    def _take_answers(
        self,
        link: Link,
        acked_lsn: Lsn,
        is_received: bool,
        others: bytes,
        unsent: bytes,
        error: int,
        timed_lsn: Lsn,
        timed_since_s: float,
        took_s: float,
    ) -> None:
        """Handle the answers of a member while C shipped: the fields are those of ``Ship``."""
        link.timed_lsn, link.timed_since_s = timed_lsn, timed_since_s
        if took_s >= 0:
            self._on_acknowledged(took_s)
        if acked_lsn > link.replicated_lsn:
            self.proposer.received(link.address, Ack(self.proposer.epoch, acked_lsn))
            self._shorten_pause(link)
        if is_received or unsent or error:
            self._wires.went_on(link.address, others, unsent, error)

    def _handle(self, event: Event) -> None:
        link = self.proposer.links[event.address]
        match event:
            case Connected(address):
                self.proposer.connected(address)
            case Lost(address, reason, is_damaged):
                if is_damaged:
                    self._count_damaged(link)
                if link.fault != reason:
                    self._report("wal_replication_member_lost", {"member": address, "error": reason})
                link.fault = reason
                link.timed_lsn = BEFORE_FIRST
                self.proposer.lost(address)
            case Received(address, frame):
                self.proposer.received(address, frame.message)
                if link.timed_lsn and link.replicated_lsn >= link.timed_lsn:
                    link.timed_lsn = BEFORE_FIRST
                    self._on_acknowledged(time.monotonic() - link.timed_since_s)
                if link.is_streaming and self._wires.is_open(address):
                    if link.fault is not None:
                        link.fault = None
                        self._report("wal_replication_member_back", {"member": address})
                    self._shorten_pause(link)

    def _count_damaged(self, link: Link) -> None:
        """A frame to or from the member arrived damaged: its batches are read from the log again."""
        link.damaged_frames += 1
        link.damaged_behind_lsn = link.replicated_lsn
        self.tail.read_again()

    def _shorten_pause(self, link: Link) -> None:
        """The member follows: reset the pause before the next connection, unless frames arrive damaged."""
        if link.damaged_behind_lsn is None or link.replicated_lsn > link.damaged_behind_lsn:
            link.damaged_behind_lsn = None
            self._wires.settled(link.address)

    def _report_reached(self, before: tuple[Lsn, Mapping[str, Lsn]]) -> tuple[Lsn, Mapping[str, Lsn]]:
        """Report the committed position and that of each region, if one rose; writers that waited for the commit are
        about to append again."""
        reached = self.proposer.committed_lsn, self.proposer.region_lsns()
        if reached != before:
            if self.proposer.configuration.is_quorum:
                self._writer.expect(reached[0] - before[0])
            self._on_reached(*reached)
        return reached

    def _take_written(self) -> bool:
        """Ship the batches written since the last call; returns whether more is durable."""
        durable_lsn, written_lsn = self._writer.durable_lsn, self._writer.written_lsn  # in this order: it is not less
        if written_lsn > self.proposer.written_lsn:
            self.proposer.written(written_lsn)
            for link in self.proposer.links.values():
                if link.is_streaming and not link.timed_lsn:
                    link.timed_lsn, link.timed_since_s = written_lsn, time.monotonic()
        is_more = durable_lsn > self.proposer.durable_lsn
        if is_more:
            self.proposer.became_durable(durable_lsn)
        return is_more

    def _check_quorum(self) -> None:
        needed, is_there = self.proposer.needed(), self.proposer.has_quorum()
        if is_there != self._had_quorum and (is_there or self._had_quorum) and needed:
            if self._had_quorum is not None:
                event = "wal_quorum_back" if is_there else "wal_quorum_lost"
                self._report(event, {"following": self.proposer.in_sync(), "needed": needed})
            self._had_quorum = is_there

    def _check_lag(self) -> None:
        for link in self.proposer.links.values():
            lag_lsn = self.proposer.durable_lsn - link.replicated_lsn
            if lag_lsn > self._lag_threshold and not link.is_lagging:
                self._report("wal_replication_lag_threshold_exceeded", {"member": link.address, "lag_lsn": lag_lsn})
            link.is_lagging = lag_lsn > self._lag_threshold
