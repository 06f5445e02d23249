"""Safekeepers on real sockets, in this process or in one of their own, and proposers that say what a test wants."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ledger.positions import Epoch, Lsn, after
from objects.store import ArchiveStore
from tests.tally import Tally, bare_environment
from tests.wal.logs import NODE, WAL_ID
from tests.wal.replication.quorums import batch
from wal.control import History, begin_epoch, history_up_to
from wal.replication import server
from wal.replication.configuration import NO_MEMBERS
from wal.replication.frames import FrameSocket, connect
from wal.replication.messages import (
    Ack,
    Append,
    Elected,
    Frame,
    Greet,
    Greeting,
    Message,
    Position,
    Prepare,
    Promise,
    Ready,
    Refusal,
)
from wal.replication.safekeeper import Safekeeper
from wal.replication.tls import PeerTls
from wal.scrub import INTERVAL_DEFAULT_S, Scrubber

WAIT_S = 60.0


class Keeper:
    """A safekeeper in this process. ``events`` is what it told."""

    def __init__(
        self,
        folder: Path,
        *,
        tls: PeerTls | None = None,
        region: str = "use1",
        port: int = 0,
        archive: ArchiveStore | None = None,
        **more: Any,
    ) -> None:
        self.folder = folder
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.safekeeper = Safekeeper(folder, region, self._told, archive, **more)
        listener = server.listen("127.0.0.1", port, is_secured=tls is not None)
        self.port = int(listener.getsockname()[1])
        self._server = server.Server(self.safekeeper, listener, tls)
        self._thread = threading.Thread(target=self._server.run, daemon=True)
        self._thread.start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def _told(self, event: str, facts: Any) -> None:
        self.events.append((event, dict(facts)))

    def told(self, event: str) -> list[dict[str, Any]]:
        return [facts for name, facts in self.events if name == event]

    def has_read(self, peer: Peer) -> bool:
        """Nothing that came over this connection is still to be read."""
        _, port = peer.spoken._socket.getsockname()
        known = Path("/proc/net/tcp").read_text()
        unread = re.search(rf":{self.port:04X} \w+:{port:04X} \w+ \w+:(\w+)", known)
        return unread is not None and int(unread[1], 16) == 0

    def scrub_by_hand(self) -> None:
        """Let the test take the steps of the scrubber, at times of its own, and no thread."""
        kept = self.safekeeper
        kept.scrubber.close()
        kept.scrubber = Scrubber(kept._copies, INTERVAL_DEFAULT_S, kept._scrubbed, self._told)

    def close(self) -> None:
        self._server.stop()
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive()
        self.safekeeper.close()


class KeeperProcess:
    """``tally safekeeper serve`` as a process."""

    def __init__(self, folder: Path, *options: str | Path) -> None:
        command = ("safekeeper", "serve", "--dir", folder, "--listen", "127.0.0.1:0", *options)
        self.process = Tally(*command, env=bare_environment(), stderr=subprocess.PIPE)
        self.events: list[dict[str, Any]] = []
        self._ready = threading.Event()
        self._reading = threading.Thread(target=self._read, daemon=True)
        self._reading.start()
        assert self._ready.wait(WAIT_S), self.events
        self.port = int(self.events_of("safekeeper_ready")[0]["address"].rpartition(":")[2])

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.events.append(json.loads(line) if line.startswith(b"{") else {"event": "", "line": line.decode()})
            if self.events[-1]["event"] == "safekeeper_ready":
                self._ready.set()
        self._ready.set()

    def events_of(self, name: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["event"] == name]

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(WAIT_S)

    def stop(self) -> int:
        self.process.terminate()
        code = self.process.wait(WAIT_S)
        self._reading.join(WAIT_S)
        return code

    def close(self) -> None:
        if self.process.poll() is None:
            self.kill()
        self._reading.join(WAIT_S)


class Peer:
    """One connection of a run of a proposer."""

    def __init__(self, port: int, run: int = 1, node_id: str = NODE, wal_id: str = WAL_ID, **tls: Any) -> None:
        self.node_id, self.wal_id, self.run = node_id, wal_id, f"{run:032x}"
        self.spoken: FrameSocket = connect("localhost" if tls else "127.0.0.1", port, tls.get("tls"), WAIT_S)
        self.epoch = Epoch(0)
        self.tail = Position(Epoch(0), Lsn(0))
        self.history: History = ()

    def say(self, message: Message, body: bytes = b"") -> None:
        self.spoken.send(Frame(message, body))

    def heard(self) -> Frame:
        return self.spoken.next(WAIT_S)

    def ask(self, message: Message, body: bytes = b"") -> Message:
        self.say(message, body)
        return self.heard().message

    def greet(self, wal_id: str | None = None) -> Message:
        return self.ask(Greet(self.node_id, self.wal_id if wal_id is None else wal_id, self.run))

    def prepare(self, epoch: int) -> Message:
        return self.ask(Prepare(Epoch(epoch), self.wal_id, NO_MEMBERS))

    def elect(self, epoch: int, from_lsn: int | None = None) -> Position:
        """Become the writer of an epoch whose first record is ``from_lsn``, or comes behind what is held; the tail."""
        greeting = self.greet()
        assert isinstance(greeting, Greeting), greeting
        promise = self.prepare(epoch)
        assert isinstance(promise, Promise), promise
        first_lsn = Lsn(from_lsn or after(promise.tail.lsn))
        self.epoch = Epoch(epoch)
        self.history = begin_epoch(history_up_to(promise.history, Lsn(first_lsn - 1)), self.epoch, first_lsn)
        ready = self.ask(Elected(self.epoch, promise.first_lsn, self.history))
        assert isinstance(ready, Ready), ready
        self.tail = ready.tail
        return ready.tail

    def send(self, records: int = 1, payload_bytes: int = 0, *, committed_lsn: int = 0, settled_lsn: int = 0) -> int:
        """Append so many records behind the last sent; the last LSN. Nothing is heard."""
        first_lsn, last_lsn = after(self.tail.lsn), Lsn(self.tail.lsn + records)
        data = batch(first_lsn, last_lsn, self.node_id, payload_bytes)
        said = Append(self.epoch, self.tail, self.epoch, Lsn(committed_lsn), Lsn(settled_lsn))
        self.tail = Position(self.epoch, last_lsn)
        self.say(said, data)
        return last_lsn

    def acknowledged(self, lsn: int) -> int:
        """Hear until so much is acknowledged; how many answers that took."""
        answers = 0
        while True:
            message = self.heard().message
            assert isinstance(message, Ack), message
            answers += 1
            if message.durable_lsn >= lsn:
                return answers

    def append(self, records: int = 1, **more: Any) -> int:
        """``send``, and wait until it is durable."""
        lsn = self.send(records, **more)
        self.acknowledged(lsn)
        return lsn

    def tell(self, committed_lsn: int, settled_lsn: int = 0) -> Message:
        """Tell what is committed, and settled, alone."""
        return self.ask(Append(self.epoch, self.tail, self.epoch, Lsn(committed_lsn), Lsn(settled_lsn)))

    def refused(self, message: Message, body: bytes = b"") -> Refusal:
        answer = self.ask(message, body)
        assert isinstance(answer, Refusal), answer
        return answer

    def close(self) -> None:
        self.spoken.close()


@contextmanager
def talking(port: int, run: int = 1, **more: Any) -> Iterator[Peer]:
    peer = Peer(port, run, **more)
    try:
        yield peer
    finally:
        peer.close()


def raw(port: int) -> socket.socket:
    """A connection to say anything over."""
    return socket.create_connection(("127.0.0.1", port), WAIT_S)
