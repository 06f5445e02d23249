"""A safekeeper: the real acceptor, in an event loop of its own."""

from __future__ import annotations

from collections import deque

from tests.wal.replication.simulation.disk import CrashError, Disk, SimLog
from tests.wal.replication.simulation.network import Connection
from tests.wal.replication.simulation.oracle import Oracle
from tests.wal.replication.simulation.world import Process, World
from wal.replication.acceptor import Acceptor
from wal.replication.messages import Append, Frame

TOGETHER_MAX = 6
"""Most messages that are handled before what was appended is synced."""

Heard = tuple[Connection | None, str, Frame]


class Member(Process):
    def __init__(self, world: World, name: str, region: str, oracle: Oracle) -> None:
        super().__init__(world, name)
        self.region = region
        self.oracle = oracle
        self.disk = Disk(world.rng)
        self.disk.on_append = oracle.appended
        self.sync_s = 0.001
        self.start()

    @property
    def member_id(self) -> str:
        return self.disk.control.member_id

    def start(self) -> None:
        self.begin_life()
        self._inbox: deque[Heard] = deque()
        self._connections: dict[Connection, None] = {}
        self._is_busy = False
        self._log = SimLog(self.disk)
        self._acceptor = Acceptor(self._log, self.region)
        self.oracle.started(self.name)

    def crash(self) -> None:
        if not self.is_alive:
            return
        self.world.say(f"{self.name} crashes")
        self.die()
        self.disk.crash()
        for connection in self._connections:
            connection.break_soon()

    def wipe(self) -> None:
        """The disk is lost, and replaced by an empty one."""
        self.crash()
        self.disk.wipe()
        self.world.say(f"{self.name} is wiped: now {self.member_id[:4]}")

    def arrived(self, connection: Connection | None, run: str, frame: Frame) -> None:
        if connection is not None:
            self._connections[connection] = None
        self._inbox.append((connection, run, frame))
        if not self._is_busy:
            self._is_busy = True
            self.after(0.0001, self._work)

    def _work(self) -> None:
        """Handle some messages, sync what they appended at once, and answer when that is done."""
        answers: list[tuple[Connection | None, Frame]] = []
        owed: Connection | None = None
        try:
            for _ in range(self.world.rng.randint(1, TOGETHER_MAX)):
                if not self._inbox:
                    break
                connection, run, frame = self._inbox.popleft()
                if isinstance(frame.message, Append):
                    if connection is not owed:
                        self._flush(owed, answers)
                    owed = connection
                answer = self._acceptor.handle(run, frame)
                self.oracle.handled(self.name, self._log, run, frame.message, answer)
                if answer is not None:
                    answers.append((connection, answer))
            self._flush(owed, answers)
        except CrashError:
            self.crash()
            return
        self.world.later(self.sync_s * self.world.between(0.2, 2.0), self.mine(lambda: self._done(answers)))

    def _flush(self, owed: Connection | None, answers: list[tuple[Connection | None, Frame]]) -> None:
        acknowledged = self._acceptor.flush()
        if acknowledged is not None:
            self.oracle.answered(self.name, self._log, acknowledged.message)
            answers.append((owed, acknowledged))

    def _done(self, answers: list[tuple[Connection | None, Frame]]) -> None:
        for connection, answer in answers:
            if connection is not None:
                connection.answer(answer)
        self._is_busy = bool(self._inbox)
        if self._is_busy:
            self._work()
