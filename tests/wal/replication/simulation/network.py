"""A network: what is sent on a connection arrives late, in order, and only as long as nothing of it is lost; then the
connection breaks, a while later, at both ends. What was sent on a connection may arrive once more, long after. A frame
may arrive with a bit flipped: whoever receives it notices, a member answers so, and the connection breaks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from ledger.errors import InvalidInputError
from ledger.positions import NO_EPOCH
from tests.wal.replication.simulation.world import Process, World
from wal.replication import messages
from wal.replication.messages import Frame, Refusal

BREAK_S = 0.6
"""After which both ends have seen that something was lost."""
STRAY_S = 3.0


class Server(Protocol):
    """A process that is spoken to."""

    name: str
    is_alive: bool

    def arrived(self, connection: Connection | None, run: str, frame: Frame) -> None: ...

    def mine(self, act: Callable[[], None]) -> Callable[[], None]: ...


class Network:
    def __init__(self, world: World) -> None:
        self.world = world
        self.blocked: set[tuple[str, str]] = set()
        """(from, to): nothing gets through."""
        self.loss = 0.0
        self.stray = 0.0
        """Chance that a frame arrives a second time, on no connection."""
        self.damage = 0.0
        """Chance that a frame arrives with a bit flipped."""
        self.delay_s = (0.0005, 0.004)
        self.extra_s: dict[tuple[str, str], float] = {}
        """From one to another it takes so much longer."""

    def delay(self, source: str, target: str) -> float:
        return self.world.between(*self.delay_s) + self.extra_s.get((source, target), 0.0)

    def arrives(self, data: bytes) -> bytes:
        """The bytes of a frame as they arrive."""
        if not self.damage or not self.world.happens(self.damage):
            return data
        flipped = bytearray(data)
        flipped[self.world.rng.randrange(messages.PREFIX_BYTES, len(data))] ^= 1 << self.world.rng.randrange(8)
        return bytes(flipped)

    def gets_through(self, source: str, target: str) -> bool:
        return (source, target) not in self.blocked and not self.world.happens(self.loss)


class Connection:
    """From a run of the node to a member. ``opened``, ``heard`` and ``lost`` are called at the run's end."""

    def __init__(
        self,
        network: Network,
        client: Process,
        server: Server,
        run: str,
        opened: Callable[[Connection], None],
        heard: Callable[[Connection, Frame], None],
        lost: Callable[[Connection], None],
    ) -> None:
        self.network, self.world = network, network.world
        self.client, self.server, self.run = client, server, run
        self.is_open = True
        """As far as the run knows."""
        self.heard_at_s = self.world.now_s
        self._heard, self._lost = heard, lost
        self._is_stuck = {"out": False, "back": False}
        self._arrival_s = {"out": 0.0, "back": 0.0}
        name = client.name
        if network.gets_through(name, server.name) and network.gets_through(server.name, name):
            delay_s = network.delay(name, server.name) + network.delay(server.name, name)
            if server.is_alive:
                self.world.later(delay_s, client.mine(lambda: opened(self) if self.is_open else None))
            else:
                self.world.later(delay_s, client.mine(self.close))
        else:
            self.world.later(BREAK_S, client.mine(self.close))

    def send(self, frame: Frame) -> None:
        """From the run to the member."""
        if not self.is_open:
            return
        source, target = self.client.name, self.server.name
        data = b"".join(messages.encode(frame))
        if self.network.stray and self.world.happens(self.network.stray):
            arrive = self.server.mine(lambda: self.server.arrived(None, self.run, messages.decode(data)))
            self.world.later(self.world.between(0.0, STRAY_S), arrive)
        arriving = self.network.arrives(data)
        self._carry("out", source, target, self.server.mine(lambda: self._arrive(arriving)))

    def _arrive(self, data: bytes) -> None:
        """As a safekeeper does it: a damaged frame is refused, and ends the connection."""
        try:
            frame = messages.decode(data)
        except InvalidInputError as error:
            self.answer(Frame(Refusal("damaged", str(error), NO_EPOCH)))
            self.break_soon()
        else:
            self.server.arrived(self, self.run, frame)

    def answer(self, frame: Frame) -> None:
        """From the member to the run."""
        data = self.network.arrives(b"".join(messages.encode(frame)))

        def arrive() -> None:
            if not self.is_open:
                return
            self.heard_at_s = self.world.now_s
            try:
                heard = messages.decode(data)
            except InvalidInputError:
                self.close()
            else:
                self._heard(self, heard)

        self._carry("back", self.server.name, self.client.name, self.client.mine(arrive))

    def break_soon(self) -> None:
        """The member is gone, or something was lost."""
        self.world.later(self.world.between(0.01, BREAK_S), self.client.mine(self.close))

    def close(self) -> None:
        if self.is_open:
            self.is_open = False
            self._lost(self)

    def forget(self) -> None:
        """The run closes it."""
        self.is_open = False

    def _carry(self, way: str, source: str, target: str, arrive: Callable[[], None]) -> None:
        if self._is_stuck[way]:
            return
        if not self.network.gets_through(source, target):
            self._is_stuck[way] = True
            self.break_soon()
            return
        at_s = max(self._arrival_s[way], self.world.now_s + self.network.delay(source, target))
        self._arrival_s[way] = at_s
        self.world.later(at_s - self.world.now_s, arrive)
