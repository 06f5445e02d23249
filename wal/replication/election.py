"""Becoming the writer of a log: a majority of the members promises an epoch; then the best log is found and followed.

Pure: ``Election`` receives events and answers with the messages to send. Its ``Plan`` has the changes to the proposer's
own copy that are due before the first record of the new epoch; ``follow`` makes them.

Steps::

    1. greet all members; the newest list of members that any of them knows names the voters
    2. take an epoch above all promised ones, and prepare it with all members that answered
    3. once a majority of the voters promised, no record of a lower epoch can be committed any more: the best log among
       theirs and the own one holds all committed records
    4. cut the own copy where it diverges from that log, and fetch the missing records from the member that has them

Without voters the node's own log wins, and step 3 is skipped. The absence of voters must be certain: a first quorum
starts only if every member answers and none knows of a quorum. After a crash at any point the next election finds an
own copy that is sound, and no longer than allowed.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from operator import attrgetter
from typing import NamedTuple

from ledger.errors import InvalidInputError, WalError, reported_as
from ledger.positions import BEFORE_FIRST, NO_EPOCH, Epoch, Lsn, after, before
from wal.control import History, begin_epoch, epoch_of, history_up_to, last_common
from wal.reader import check_batches
from wal.replication.configuration import NO_MEMBERS, Configuration, Member
from wal.replication.file_log import FileLog
from wal.replication.messages import (
    EMPTY,
    Batches,
    Fetch,
    Frame,
    Greet,
    Greeting,
    Message,
    Position,
    Prepare,
    Promise,
    Refusal,
)

ATTEMPTS_MAX = 8
"""How often a higher epoch is tried while another proposer is faster; then the other proposer wins."""

Requests = list[tuple[str, Message]]
"""Messages, each with the address of its receiver."""


NOTHING_HELD = Promise(NO_EPOCH, Lsn(1), EMPTY, BEFORE_FIRST, (), NO_MEMBERS)
"""The holdings of a proposer without a copy of the log."""


def held_in(log: FileLog) -> Promise:
    """The content of the proposer's own copy, in the form in which members report theirs."""
    return Promise(
        log.control.epoch, log.first_lsn, log.tail, log.control.committed_lsn, log.history, log.configuration
    )


class Plan(NamedTuple):
    """The result of an election that was won.

    The proposer's own log is to be cut after ``keep_lsn``. The member at ``donor``, whose oldest record is
    ``donor_first_lsn``, has the records from there up to ``tail``; if ``donor`` is None, none are missing. The first
    record of ``epoch`` follows ``tail``, as in ``history``.
    """

    epoch: Epoch
    wal_id: str
    configuration: Configuration
    keep_lsn: Lsn
    tail: Position
    donor: str | None
    donor_first_lsn: Lsn
    history: History
    committed_lsn: Lsn


class Election:
    """One attempt of the run ``run`` to write the log of ``node_id``.

    ``own`` describes the proposer's copy; ``wal_id`` is empty if it has none. The epoch will be higher than ``above``,
    and than all epochs that the copies know. ``wants_quorum`` is false if the members keep copies. With
    ``accept_loss_in``, a region, the members that answer become the whole list, and the members of that region vote
    from now on: committed records that only other members hold are given up.

    ``outcome`` becomes a Plan, or the reason for having none; then the election is over.
    """

    def __init__(
        self,
        *,
        node_id: str,
        run: str,
        wal_id: str,
        own: Promise,
        above: Epoch,
        addresses: Iterable[str],
        wants_quorum: bool,
        accept_loss_in: str | None = None,
    ) -> None:
        self._greet = Greet(node_id, wal_id, run)
        self._wal_id = wal_id
        self._own = own
        self._newest = own.configuration
        self._above = above
        self._wants_quorum = wants_quorum
        self._loss_in = accept_loss_in
        self._answered: set[str] = set()
        self._waiting = set(addresses)
        """Members without an answer or a failure so far."""
        self._addresses = tuple(self._waiting)
        self._greetings: dict[str, Greeting] = {}
        self._promises: dict[str, Promise] = {}
        self._epoch: Epoch = NO_EPOCH
        self._attempts = 0
        self.outcome: Plan | str | None = None

    def connected(self, address: str) -> Requests:
        """The connection to ``address`` was opened."""
        return [(address, self._greet)]

    def lost(self, address: str) -> Requests:
        """The connection to ``address`` was lost, or could not be opened."""
        self._waiting.discard(address)
        self._answered.discard(address)
        self._greetings.pop(address, None)
        self._promises.pop(address, None)
        return self._advance()

    def time_is_up(self) -> None:
        """End the wait for answers."""
        self._waiting.clear()
        self._advance()
        if self.outcome is None:
            self.outcome = self._no_quorum()

    def received(self, address: str, message: Message) -> Requests:
        """The member at ``address`` answered."""
        if self.outcome is not None:
            return []
        match message:
            case Greeting():
                return self._greeted(address, message)
            case Promise() if message.epoch == self._epoch:
                self._promises[address] = message
                self._learn(message.configuration)
                return self._advance()
            case Refusal() if message.reason == "fenced":
                # of a lower epoch: the answer to an attempt before this one
                return self._prepare(message.promised_epoch) if message.promised_epoch >= self._epoch else []
            case Refusal():
                return self.lost(address)
            case _:
                return []

    # --- the steps --------------------------------------------------------------------------------

    def _greeted(self, address: str, greeting: Greeting) -> Requests:
        self._waiting.discard(address)
        self._answered.add(address)
        if greeting.member_id:
            self._greetings[address] = greeting
            self._learn(greeting.configuration)
        return [(address, self._prepare_message())] if self._epoch and greeting.member_id else self._advance()

    def _learn(self, configuration: Configuration) -> None:
        self._newest = max(self._newest, configuration, key=attrgetter("order"))

    @property
    def _configuration(self) -> Configuration:
        """The list that names the voters: the newest.

        If that list has no voters, but the own copy still has a list with voters, the newest may never have become
        valid: its members still vote.
        """
        if self._newest.copies and self._own.configuration.is_quorum:
            return self._newest._replace(copies=False)
        return self._newest

    def _advance(self) -> Requests:
        """Take the next step if it is due."""
        if self.outcome is not None:
            return []
        configuration = self._configuration
        if self._loss_in is not None:
            return self._advance_with_loss()
        if configuration.copies != self._newest.copies and configuration.epoch != self._own.configuration.epoch:
            return self._end("what the members hold are copies: only where the log itself is may it be written")
        if not self._epoch:
            has_quorum = configuration.has_majority(self._members_of(self._greetings))
            if not has_quorum and self._waiting:
                return []
            if configuration.is_quorum and not has_quorum:
                return self._end(self._no_quorum())
            if not configuration.is_quorum and self._wants_quorum and len(self._answered) < len(self._addresses):
                return self._end(
                    f"no quorum: nobody knows of one yet, and {len(self._answered)} of {len(self._addresses)} members, "
                    "all of whom are needed to begin one, answer"
                )
            return self._prepare(NO_EPOCH)
        if configuration.has_majority(self._members_of(self._promises)):
            return self._end(self._decide())
        is_lost = not configuration.has_majority(self._members_of(self._greetings)) and not self._waiting
        return self._end(self._no_quorum()) if is_lost else []

    def _end(self, outcome: Plan | str) -> Requests:
        self.outcome = outcome
        return []

    def _advance_with_loss(self) -> Requests:
        """Take the next step if the members that answer become the whole list."""
        if self._waiting:
            return []
        if not self._greetings:
            return self._end("no member answers")
        if not self._epoch:
            return self._prepare(NO_EPOCH)
        return self._end(self._decide()) if self._promises.keys() >= self._greetings.keys() else []

    def _prepare(self, above: Epoch) -> Requests:
        """Step 2, with an epoch above all known ones."""
        self._attempts += 1
        if self._attempts > ATTEMPTS_MAX:
            return self._end(f"another proposer is at epoch {above}, and was faster {ATTEMPTS_MAX} times")
        greetings = self._greetings.values()
        known = {each.promised_epoch for each in greetings} | {each.tail.epoch for each in greetings}
        self._epoch = Epoch(1 + max(above, self._epoch, self._above, self._own.epoch, self._own.tail.epoch, *known))
        self._promises.clear()
        wal_ids = [each.wal_id for each in greetings]
        self._wal_id = self._wal_id or max(wal_ids, key=wal_ids.count, default="")
        if not self._configuration.is_quorum and self._loss_in is None:
            return self._end(self._decide())
        return [(address, self._prepare_message()) for address in self._greetings]

    def _prepare_message(self) -> Prepare:
        return Prepare(self._epoch, self._wal_id, self._configuration)

    def _decide(self) -> Plan:
        """Step 3: the best log has the highest (epoch of its last record, LSN); the own log takes part."""
        own, configuration = self._own, self._configuration
        held: dict[str | None, Promise] = {None: own}
        held |= {
            address: promise
            for address, promise in self._promises.items()
            if self._loss_in is not None or self._greetings[address].member_id in configuration.voters
        }
        if self._loss_in is not None:
            left = sorted(Member(each.member_id, each.region) for each in self._greetings.values())
            configuration = Configuration(configuration.generation + 1, self._epoch, self._loss_in, False, tuple(left))
        donor = max(held, key=lambda address: held[address].tail)
        best = held[donor]
        keep_lsn = own.tail.lsn if donor is None else last_common(own.history, own.tail.lsn, best.history)
        # the own copy may still have the start of the log, which the donor may have removed
        oldest_lsn = min((start.first_lsn for start in best.history), default=keep_lsn)
        kept = history_up_to(own.history, keep_lsn)
        history = (*(start for start in kept if start.first_lsn < oldest_lsn), *best.history)
        return Plan(
            epoch=self._epoch,
            wal_id=self._wal_id,
            configuration=configuration,
            keep_lsn=min(keep_lsn, best.tail.lsn),
            tail=best.tail,
            donor=donor,
            donor_first_lsn=best.first_lsn,
            history=begin_epoch(history, self._epoch, after(best.tail.lsn)),
            committed_lsn=max(each.committed_lsn for each in held.values()),
        )

    def _members_of(self, answered: Iterable[str]) -> frozenset[str]:
        return frozenset(self._greetings[address].member_id for address in answered)

    def _no_quorum(self) -> str:
        voters = self._configuration.voters or frozenset(self._addresses)
        answered = self._members_of(self._greetings) & voters
        return (
            f"no quorum: {len(answered)} of {len(voters)} members that vote answer, {len(voters) // 2 + 1} are needed"
        )


FETCH_BYTES = 4 << 20


def follow(plan: Plan, log: FileLog) -> Generator[Fetch, Frame, None]:
    """Make the own copy the log of ``plan``: yields the requests to the donor, and is sent its answers.

    Raises:
        WalError: the donor does not have the log that it promised, or no longer has it.
        OSError: the own copy cannot be written.
    """
    if plan.donor is not None:
        if after(plan.keep_lsn) < max(plan.donor_first_lsn, log.first_lsn):
            log.begin_at(plan.donor_first_lsn, history_up_to(plan.history, before(plan.donor_first_lsn)))
        elif plan.keep_lsn < log.tail.lsn:
            log.truncate(plan.keep_lsn)
        while log.tail.lsn < plan.tail.lsn:
            _take((yield Fetch(after(log.tail.lsn), FETCH_BYTES)), plan, log)
        log.sync()
        if log.tail != plan.tail:
            raise WalError(f"the log ends with {log.tail} where {plan.tail} was promised")
    if plan.configuration.order > log.configuration.order:
        log.configure(plan.configuration)
    log.store(log.control._replace(committed_lsn=min(plan.committed_lsn, log.tail.lsn)))


def _take(answer: Frame, plan: Plan, log: FileLog) -> None:
    """Append the donor's batches: they must be of the epoch that the history names, and not exceed its promise."""
    message, first_lsn = answer.message, after(log.tail.lsn)
    if isinstance(message, Refusal):
        raise WalError(f"the member that holds the log refuses to give it: {message.reason}: {message.detail}")
    if not isinstance(message, Batches) or not answer.body:
        raise WalError(f"the member that holds the log gave nothing behind LSN {log.tail.lsn}")
    with reported_as(WalError, "the member that holds the log gave what is damaged", InvalidInputError):
        last_lsn = check_batches(answer.body, first_lsn, log.control.node_id)
    epochs = {epoch_of(plan.history, lsn) for lsn in (first_lsn, last_lsn)}
    if epochs != {message.written_in} or last_lsn > plan.tail.lsn:
        raise WalError(f"LSN {first_lsn} to {last_lsn} of epoch {message.written_in} are not what was promised")
    log.append(message.written_in, answer.body)
    log.sync()
