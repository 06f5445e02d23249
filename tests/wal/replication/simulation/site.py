"""One place where the node may run, with a disk of its own: a run there is elected, follows, writes and chains."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping

from ledger.errors import WalError
from ledger.hlc import Hlc
from ledger.positions import Lsn, after
from tests.wal.replication.simulation.database import Database
from tests.wal.replication.simulation.disk import NODE, WAL_ID, CrashError, Disk, Record, SimLog, batch
from tests.wal.replication.simulation.member import Member
from tests.wal.replication.simulation.network import Connection, Network
from tests.wal.replication.simulation.oracle import Oracle
from tests.wal.replication.simulation.world import Act, Process, World
from wal.format import encode_record
from wal.replication.configuration import AckMode
from wal.replication.election import Election, Plan, Requests, follow, held_in
from wal.replication.messages import Fetch, Frame, Greet, Greeting
from wal.replication.proposer import Dropped, Proposer

ELECT_S = 1.5
BEAT_S = 0.2
DATABASE_S = (0.0005, 0.01)
SILENT_S = 1.0
"""A member that says nothing for so long counts as lost."""


class Site(Process):
    def __init__(
        self, world: World, name: str, network: Network, database: Database, oracle: Oracle, home: str
    ) -> None:
        super().__init__(world, name)
        self.network, self.database, self.oracle, self.home = network, database, oracle, home
        self.disk = Disk(world.rng)
        self.disk.on_append = oracle.appended
        self.sync_s = 0.002
        self.ended: Callable[[str], None] = lambda reason: None
        self.proposer: Proposer | None = None
        self._following: Generator[Fetch, Frame, None] | None = None

    # --- a run ------------------------------------------------------------------------------------

    def start(self, members: Mapping[str, Member], ack_mode: AckMode) -> None:
        """Begin a run; ``ended`` is told when it is over."""
        self.begin_life()
        self.run = f"{self.world.rng.getrandbits(128):032x}"
        self.ack_mode = ack_mode
        self.proposer, self._following = None, None
        self.members = members
        self._connections: dict[str, Connection] = {}
        self._count = 0
        self.world.say(f"{self.name} starts {self.run[:4]}, {ack_mode}, members {' '.join(members)}")
        self._guard(self._elect)

    def crash(self) -> None:
        if self.is_alive:
            self._stop("crashes")

    def _stop(self, reason: str) -> None:
        self.world.say(f"{self.name} {self.run[:4]} ends: {reason}")
        self.die()
        self.disk.crash()
        for connection in self._connections.values():
            connection.forget()
        self.ended(reason)

    def _guard(self, act: Act) -> None:
        """Do it; a crash of the disk, or what the protocol refuses, ends the run."""
        try:
            act()
        except CrashError:
            self._stop("crashes in the middle")
        except WalError as error:
            self._stop(str(error))
        else:
            if self.is_alive and self.proposer is not None:
                self._look_at(self.proposer)

    def _timer(self, delay_s: float, act: Act) -> None:
        self.after(delay_s, lambda: self._guard(act))

    # --- 1. election ------------------------------------------------------------------------------

    def _elect(self) -> None:
        self.log = SimLog(self.disk)
        self._seen = self.database.row
        self._election = Election(
            node_id=NODE,
            run=self.run,
            wal_id=WAL_ID,
            own=held_in(self.log),
            above=self._seen.epoch,
            addresses=self.members,
            wants_quorum=self.ack_mode.is_replicated,
        )
        for address in self.members:
            self._connect(address)
        self._timer(ELECT_S, self._time_is_up)

    def _time_is_up(self) -> None:
        if self._election.outcome is None:
            self._election.time_is_up()
            self._decided()

    def _say(self, said: Requests) -> None:
        for address, message in said:
            self._connections[address].send(Frame(message))
        self._decided()

    def _decided(self) -> None:
        plan = self._election.outcome
        if isinstance(plan, str):
            raise WalError(plan)
        if plan is None or self._following is not None:
            return
        for connection in self._connections.values():
            connection.forget()
        self._connections = {}
        self._plan = plan
        listed = plan.configuration
        self.world.say(
            f"{self.name} {self.run[:4]} is elected for {plan.epoch}: keeps {plan.keep_lsn}, tail {plan.tail}, donor "
            f"{plan.donor}, list {listed.order} {'copies' if listed.copies else len(listed.voters)}"
        )
        if not listed.is_quorum and self._seen.disk not in ("", self.disk.control.member_id):
            raise WalError("copies are not taken over: another disk is the log")
        # --- 2. the own copy
        self._following = follow(plan, self.log)
        try:
            self._request: Fetch | None = next(self._following)
        except StopIteration:
            self._take_row()
        else:
            assert plan.donor is not None
            self._connect(plan.donor)
            self._timer(ELECT_S, self._give_up_following)

    def _give_up_following(self) -> None:
        if self._request is not None:
            raise WalError("the donor does not answer")

    def _followed(self, answer: Frame) -> None:
        assert self._following is not None
        try:
            self._request = self._following.send(answer)
        except StopIteration:
            self._request = None
            self._take_row()
        else:
            self._connections[self._plan.donor or ""].send(Frame(self._request))

    # --- 3. the fence of the chain ----------------------------------------------------------------

    def _take_row(self) -> None:
        self._request = None
        for connection in self._connections.values():
            connection.forget()
        self._connections = {}
        self.log.store(self.log.control._replace(epoch=self._plan.epoch))
        self._ask(
            lambda: self.database.take(self._plan.epoch, self.disk.control.member_id, self._seen.epoch), self._row_taken
        )

    def _ask(self, transaction: Callable[[], bool], answered: Callable[[bool], None]) -> None:
        """A transaction of PostgreSQL: it is done even if whoever asked is not there any more."""

        def commit() -> None:
            outcome = transaction()
            self.world.later(self.world.between(*DATABASE_S), self.mine(lambda: self._guard(lambda: answered(outcome))))

        self.world.later(self.world.between(*DATABASE_S), commit)

    def _row_taken(self, is_taken: bool) -> None:
        if not is_taken:
            raise WalError("another took the row of the chain")
        self._begin(self._plan)

    # --- 4. writing -------------------------------------------------------------------------------

    def _begin(self, plan: Plan) -> None:
        self.oracle.begins(plan.epoch, self.run, self.disk)
        self._chained_lsn = self.database.row.chained_lsn
        self._is_chaining = False
        self._reported_lsn = Lsn(0)
        self.proposer = Proposer(
            node_id=NODE,
            run=self.run,
            wal_id=WAL_ID,
            epoch=plan.epoch,
            history=plan.history,
            configuration=plan.configuration,
            home=self.home,
            ack_mode=self.ack_mode,
            addresses={address: member.region for address, member in self.members.items()},
            committed_lsn=self.log.control.committed_lsn,
            read=self.log.read_written,
            oldest_lsn=lambda: self.log.first_lsn,
            send=lambda address, frame: self._connections[address].send(frame),
            drop=self._drop,
            on_configured=self._configured,
        )
        self.write(1)
        for address in self.members:
            self._connect(address)
        self._timer(BEAT_S, self._beat)
        self._timer(0.03, self._chain)

    def write(self, count: int) -> None:
        """Append so many records, and sync them in a while."""
        assert self.proposer is not None
        records = []
        for lsn in range(after(self.log.tail.lsn), after(self.log.tail.lsn) + count):
            self._count += 1
            payload = f"{self._plan.epoch}.{self.run[:8]}.{self._count}".encode()
            records.append(Record(Lsn(lsn), encode_record(lsn, Hlc(1_000_000 + lsn, 0, NODE).pack(), 1, payload)))
        data = batch(records)
        self.log.append(self._plan.epoch, data)
        self.proposer.written(records[-1].lsn)
        self._timer(self.sync_s * self.world.between(0.2, 3.0), self._sync)

    def write_soon(self, count: int) -> None:
        """As a client would have it; nothing where nobody writes."""
        if self.is_alive and self.proposer is not None:
            self.mine(lambda: self._guard(lambda: self.write(count)))()

    def _sync(self) -> None:
        assert self.proposer is not None
        self.log.sync()
        self.proposer.became_durable(self.log.tail.lsn)

    def _beat(self) -> None:
        assert self.proposer is not None
        self.proposer.tell_committed()
        for address, connection in list(self._connections.items()):
            if connection.is_open and self.world.now_s - connection.heard_at_s > SILENT_S:
                self._drop(address, "silent", "refused")
        self._timer(BEAT_S, self._beat)

    def _chain(self) -> None:
        assert self.proposer is not None
        self._timer(0.03, self._chain)
        upto = min(self.proposer.committed_lsn, self._chained_lsn + 8)
        if self._is_chaining or upto <= self._chained_lsn:
            return
        self._is_chaining = True
        behind = self._chained_lsn
        payloads = [record.payload for _, record in self.disk.records() if behind < record.lsn <= upto]
        epoch = self._plan.epoch
        self._ask(lambda: self.database.chain(epoch, behind, payloads), self._chained)
        self._chaining_upto = upto

    def _chained(self, is_chained: bool) -> None:
        if not is_chained:
            raise WalError("fenced: another epoch chains")
        self._chained_lsn, self._is_chaining = Lsn(self._chaining_upto), False

    def _look_at(self, proposer: Proposer) -> None:
        if proposer.committed_lsn > self._reported_lsn:
            self._reported_lsn = proposer.committed_lsn
            self.oracle.reports(self._plan.epoch, self.run, self._reported_lsn, self.disk)
        if proposer.fenced_by:
            self._stop("fenced")

    def _configured(self, configuration: object) -> None:
        self.world.say(f"{self.name} {self.run[:4]} has the list {configuration.order}: {self._shown(configuration)}")
        self.log.configure(configuration)

    def _shown(self, configuration: object) -> str:
        if configuration.copies:
            return "copies"
        return " ".join(member.member_id[:4] for member in configuration.members)

    # --- connections ------------------------------------------------------------------------------

    def _connect(self, address: str) -> None:
        connection = Connection(
            self.network, self, self.members[address], self.run, self._opened, self._heard, self._lost
        )
        self._connections[address] = connection

    def _is_current(self, connection: Connection) -> bool:
        return self._connections.get(connection.server.name) is connection

    def _opened(self, connection: Connection) -> None:
        if not self._is_current(connection):
            return
        address = connection.server.name
        if (proposer := self.proposer) is not None:
            self._guard(lambda: proposer.connected(address))
        elif self._following is not None:
            connection.send(Frame(Greet(NODE, WAL_ID, self.run)))
        else:
            self._guard(lambda: self._say(self._election.connected(address)))

    def _heard(self, connection: Connection, frame: Frame) -> None:
        if not self._is_current(connection):
            return
        address = connection.server.name
        if (proposer := self.proposer) is not None:
            self._guard(lambda: proposer.received(address, frame.message))
        elif self._following is not None:
            if isinstance(frame.message, Greeting):
                connection.send(Frame(self._request))
            else:
                self._guard(lambda: self._followed(frame))
        else:
            self._guard(lambda: self._say(self._election.received(address, frame.message)))

    def _lost(self, connection: Connection) -> None:
        if not self._is_current(connection):
            return
        address = connection.server.name
        if (proposer := self.proposer) is not None:
            self._guard(lambda: proposer.lost(address))
            self._reconnect(address)
        elif self._following is not None:
            self._guard(self._give_up_following)
        else:
            self._guard(lambda: self._say(self._election.lost(address)))

    def _drop(self, address: str, reason: str, dropped: Dropped) -> None:
        self.world.say(f"{self.name} {self.run[:4]} drops {address}: {reason}")
        self._connections[address].forget()
        assert self.proposer is not None
        self.proposer.lost(address)
        if dropped != "damaged-at-rest":
            self._reconnect(address)

    def _reconnect(self, address: str) -> None:
        self._timer(self.world.between(0.05, 0.3), lambda: self._connect(address))
