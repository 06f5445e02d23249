"""A log kept by several, without sockets: every message is delivered at once, in order, unless a test holds it back."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from ledger.positions import NO_EPOCH, Epoch, Lsn, after
from tests.wal.logs import NODE, WAL_ID, hlc_of, payload_of
from wal.format import batch_of, encode_batch, encode_record
from wal.replication.acceptor import Acceptor
from wal.replication.configuration import AckMode, Configuration
from wal.replication.election import Election, Plan, Requests, follow, held_in
from wal.replication.file_log import FileLog
from wal.replication.messages import Frame, Message
from wal.replication.proposer import Dropped, Proposer

HOME = "use1"


def batch(first_lsn: int, last_lsn: int, node_id: str = NODE, payload_bytes: int = 0) -> bytes:
    """A batch of the records of these LSNs, as it stands in a segment; payloads have so many bytes at least."""
    lsns = range(first_lsn, last_lsn + 1)
    hlcs = {lsn: hlc_of(lsn)._replace(node_id=node_id).pack() for lsn in lsns}
    body = b"".join(encode_record(Lsn(lsn), hlcs[lsn], 1, payload_of(lsn).ljust(payload_bytes)) for lsn in lsns)
    return encode_batch(batch_of(Lsn(first_lsn), Lsn(last_lsn), hlcs[last_lsn], body)) + body


def lsns_of(log: FileLog) -> list[tuple[int, int]]:
    """What a copy holds: (epoch, LSN) of each record."""
    log.sync()
    found: list[tuple[int, int]] = []
    at = log.first_lsn
    while at <= log.tail.lsn:
        chunk = log.read(at, log.tail.lsn, 1)
        found += [(chunk.written_in, lsn) for lsn in range(at, chunk.last_lsn + 1)]
        at = after(chunk.last_lsn)
    return found


class Quorum:
    """Members ``a``, ``b``, ``c``... in folders of their own; one that is ``down`` is not reached."""

    def __init__(self, folder: Path, count: int = 3, regions: dict[str, str] | None = None) -> None:
        self.folder = folder
        self.addresses = {name: (regions or {}).get(name, HOME) for name in "abcdefg"[:count]}
        self.down: set[str] = set()
        self.members: dict[str, Acceptor] = {}
        for name in self.addresses:
            self.restart(name)

    def restart(self, name: str) -> None:
        """As after a kill: what was not synced may be gone, what was is read back from its files."""
        if name in self.members:
            self.log_of(name).close()
        self.members[name] = Acceptor(FileLog(self.folder / name, NODE, WAL_ID), self.addresses[name])

    def wipe(self, name: str) -> None:
        """The disk of the member is lost; an empty one takes its place."""
        self.log_of(name).close()
        for path in (self.folder / name).iterdir():
            path.unlink()
        self.members[name] = Acceptor(FileLog(self.folder / name, NODE, WAL_ID), self.addresses[name])

    def log_of(self, name: str) -> FileLog:
        log = self.members[name].log
        assert isinstance(log, FileLog)
        return log

    def ask(self, name: str, run: str, frame: Frame) -> Frame | None:
        """What the member answers at once."""
        if name in self.down:
            return None
        acceptor = self.members[name]
        return acceptor.handle(run, frame) or acceptor.flush()

    def close(self) -> None:
        for name in self.addresses:
            self.log_of(name).close()


@dataclass
class Writer:
    """A run of the node: its copy of the log, an election, and then the epoch."""

    quorum: Quorum
    folder: Path
    run: str
    ack_mode: AckMode = AckMode.REPLICATED_QUORUM
    above: Epoch = NO_EPOCH
    accept_loss_in: str | None = None
    dropped: list[tuple[str, str]] = field(default_factory=list)
    held_back: set[str] = field(default_factory=set)
    """Members to whom nothing is delivered; it waits."""
    slow: set[str] = field(default_factory=set)
    """Members to whom no records are delivered, as if there were too many; what is said besides is heard."""
    outbox: deque[tuple[str, Frame]] = field(default_factory=deque)

    def __post_init__(self) -> None:
        self.run = self.run.encode().hex().rjust(32, "0")
        self.log = FileLog(self.folder, NODE, WAL_ID)

    def elect(self) -> Plan | str:
        """One attempt, with all who are not down."""
        election = Election(
            node_id=NODE,
            run=self.run,
            wal_id=WAL_ID,
            own=held_in(self.log),
            above=self.above,
            addresses=self.quorum.addresses,
            wants_quorum=self.ack_mode.is_replicated,
            accept_loss_in=self.accept_loss_in,
        )
        said: deque[tuple[str, Message]] = deque()
        for name in self.quorum.addresses:
            lost: Requests = election.lost(name) if name in self.quorum.down else election.connected(name)
            said.extend(lost)
        while said and election.outcome is None:
            name, message = said.popleft()
            answer = self.quorum.ask(name, self.run, Frame(message))
            assert answer is not None
            said.extend(election.received(name, answer.message))
        if election.outcome is None:
            election.time_is_up()
        assert election.outcome is not None
        return election.outcome

    def begin(self) -> Plan:
        """Win, bring the own copy in order, and write the first record of the epoch."""
        plan = self.elect()
        assert isinstance(plan, Plan), plan
        steps = follow(plan, self.log)
        try:
            request = next(steps)
            while True:
                assert plan.donor is not None
                answer = self.quorum.ask(plan.donor, self.run, Frame(request))
                assert answer is not None
                request = steps.send(answer)
        except StopIteration:
            pass
        self.epoch = plan.epoch
        self.proposer = Proposer(
            node_id=NODE,
            run=self.run,
            wal_id=plan.wal_id,
            epoch=plan.epoch,
            history=plan.history,
            configuration=plan.configuration,
            home=HOME,
            ack_mode=self.ack_mode,
            addresses=self.quorum.addresses,
            committed_lsn=self.log.control.committed_lsn,
            read=self.log.read,
            oldest_lsn=lambda: self.log.first_lsn,
            send=lambda name, frame: self.outbox.append((name, frame)),
            drop=self._drop,
            on_configured=self._configured,
        )
        self.write(1)
        for name in self.quorum.addresses:
            self.connect(name)
        return plan

    def connect(self, name: str) -> None:
        if name not in self.quorum.down:
            self.proposer.connected(name)
            self.deliver()

    def write(self, records: int, *, sync: bool = True) -> int:
        """Write a batch of so many records, and tell who is there; the last LSN."""
        first_lsn = after(self.log.tail.lsn)
        last_lsn = Lsn(first_lsn + records - 1)
        data = batch(first_lsn, last_lsn)
        self.log.append(self.epoch, data)
        self.proposer.written(last_lsn)
        if sync:
            self.log.sync()
            self.proposer.became_durable(last_lsn)
        self.deliver()
        return last_lsn

    def deliver(self) -> None:
        """Hand over what was sent, and what is answered, until nothing is left but what is held back."""
        waiting: deque[tuple[str, Frame]] = deque()
        while self.outbox:
            name, frame = self.outbox.popleft()
            if name in self.held_back or (name in self.slow and frame.body):
                waiting.append((name, frame))
            elif name in self.quorum.down:
                self.proposer.lost(name)
            elif (answer := self.quorum.ask(name, self.run, frame)) is not None:
                self.proposer.received(name, answer.message)
        self.outbox = waiting

    def _drop(self, name: str, reason: str, dropped: Dropped) -> None:
        self.dropped.append((name, reason))
        self.proposer.lost(name)

    def _configured(self, configuration: Configuration) -> None:
        self.log.configure(configuration)

    def close(self) -> None:
        self.log.close()


def logs(quorum: Quorum) -> Iterator[tuple[str, list[tuple[int, int]]]]:
    for name in quorum.addresses:
        yield name, lsns_of(quorum.log_of(name))
