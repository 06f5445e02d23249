"""Appends that a safekeeper takes one behind the other in C are judged, kept and answered as Python does; and whoever
else asks for the log has all of it."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ledger.positions import Epoch, Lsn
from tests.waiting import until
from tests.wal.logs import NODE, WAL_ID
from tests.wal.replication.keepers import Keeper, Peer, talking
from tests.wal.replication.quorums import batch
from wal import native
from wal.inspect import verify
from wal.replication import server
from wal.replication.file_log import FileLog
from wal.replication.frames import ConnectionOverError, status
from wal.replication.kept_logs import CommitNote, KeptLog
from wal.replication.messages import Ack, Append, Elected, Fetch, Frame, Message, Position, Ready, Refusal, encode
from wal.segment import list_segments

pytestmark = pytest.mark.debian_tools
ROOT = Path(__file__).parents[3]
PROGRAM = """
import os, sys
from contextlib import closing
from pathlib import Path
from tests.wal.replication.keepers import Keeper, talking
with closing(Keeper(Path(sys.argv[1]))) as keeper, talking(keeper.port) as peer:
    peer.elect(1)
    for _ in range(20):
        peer.send(3)
        said = peer.heard().message
        os.write(1, f"{type(said).__name__} {getattr(said, 'durable_lsn', '')}\\n".encode())
        if type(said).__name__ == "Refusal":
            break
"""


@pytest.fixture
def keeper(tmp_path: Path) -> Iterator[Keeper]:
    with closing(Keeper(tmp_path / "keeper")) as keeper:
        yield keeper


def kept_of(keeper: Keeper) -> KeptLog:
    (kept,) = keeper.safekeeper.logs.all()
    return kept


def stream(keeper: Keeper, peer: Peer) -> None:
    """Append until the log is lent to a stream that waits for the next."""
    peer.append()
    until(lambda: kept_of(keeper)._lent_to is not None, "the log is lent")


def test_a_log_is_lent_behind_an_append_and_whoever_asks_for_it_has_it_back(keeper: Keeper) -> None:
    with talking(keeper.port) as peer:
        peer.elect(1)
        assert kept_of(keeper)._lent_to is None
        for round_ in range(3):
            stream(keeper, peer)
            last_lsn = peer.append(4, committed_lsn=5 * round_ + 1)
            assert kept_of(keeper)._lent_to is not None
            (wal,) = status("127.0.0.1", keeper.port, None, 60.0).wals
            assert (wal.state, wal.tail, wal.durable_lsn) == ("open", Position(Epoch(1), Lsn(last_lsn)), last_lsn)
            assert wal.committed_lsn == 5 * round_ + 1
            assert kept_of(keeper)._lent_to is None
        stream(keeper, peer)
        peer.append(committed_lsn=12, settled_lsn=11)
        keeper.safekeeper.tend()
        opened = kept_of(keeper).opened
        assert opened is not None
        control = opened.log.control
        assert (control.durable_lsn, control.committed_lsn) == (17, 12)
        assert opened.acceptor.settled_lsn == 11


def test_a_higher_epoch_ends_a_stream(keeper: Keeper) -> None:
    with talking(keeper.port) as old, talking(keeper.port, 2) as new:
        old.elect(1)
        stream(keeper, old)
        old.append(2)
        # It is promised all that was acknowledged, and nothing more comes from the other.
        assert new.elect(2) == Position(Epoch(1), Lsn(3))
        refusal = old.refused(Append(Epoch(1), old.tail, Epoch(1), Lsn(0)), batch(4, 4))
        assert (refusal.reason, refusal.promised_epoch) == ("fenced", 2)
        stream(keeper, new)
        new.append()
    assert verify(keeper.folder / NODE)[-1].last_lsn == 5


def test_two_connections_of_one_run_never_stream_at_the_same_time(keeper: Keeper) -> None:
    with talking(keeper.port) as first, talking(keeper.port) as second:
        first.elect(1)
        stream(keeper, first)
        second.elect(1, from_lsn=1)
        second.tail = first.tail
        stream(keeper, second)
        # The first is not behind the end of the log any more, though its stream's was.
        refusal = first.refused(Append(Epoch(1), first.tail, Epoch(1), Lsn(0)), batch(2, 2))
        assert refusal.reason == "does-not-fit"
        second.append()


def test_a_process_that_is_killed_leaves_what_it_was_told_is_committed(keeper: Keeper) -> None:
    with talking(keeper.port) as peer:
        peer.elect(1)
        stream(keeper, peer)
        peer.append(5)
        peer.append(1, committed_lsn=6)
        with closing(CommitNote(keeper.folder / NODE, WAL_ID)) as note:
            assert note.lsn == 6
        # A note never says more than is held.
        peer.append(1, committed_lsn=100)
        with closing(CommitNote(keeper.folder / NODE, WAL_ID)) as note:
            assert note.lsn == 8


def test_a_segment_that_lost_its_name_ends_a_stream_and_nothing_in_it_is_acknowledged(keeper: Keeper) -> None:
    with talking(keeper.port) as peer:
        peer.elect(1)
        stream(keeper, peer)
        (segment,) = list_segments(keeper.folder / NODE)
        segment.path.unlink()
        assert peer.refused(Append(Epoch(1), peer.tail, Epoch(1), Lsn(0)), batch(2, 2)).reason == "unavailable"
    until(lambda: keeper.told("wal_sync_failure"), "that is told")


def test_a_stream_ends_with_its_safekeeper_and_with_a_peer_that_says_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ExitStack() as stack:
        keeper = Keeper(tmp_path)
        peer = stack.enter_context(talking(keeper.port))
        peer.elect(1)
        stream(keeper, peer)
        began_s = time.monotonic()
        keeper.close()
        assert time.monotonic() - began_s < server.STOP_TIMEOUT_S
        with pytest.raises(ConnectionOverError):
            peer.heard()
    assert verify(tmp_path / NODE)[0].last_lsn == 1
    monkeypatch.setattr(server, "IDLE_TIMEOUT_S", 3.0)  # it must not be so long until it streams
    with closing(Keeper(tmp_path)) as keeper, talking(keeper.port) as peer:
        peer.elect(2)
        stream(keeper, peer)
        with pytest.raises(ConnectionOverError):
            peer.heard()
        assert keeper.told("safekeeper_connection_ended")[-1]["error"] == "the peer is silent"


def test_a_frame_that_comes_a_byte_at_a_time_has_one_deadline() -> None:
    stream = native.make_stream()
    assert stream is not None
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ended = threading.Event()
        theirs.sendall((1 << 20).to_bytes(4, "big") + bytes(4))

        def dribble() -> None:
            for _ in range(60):
                if ended.wait(0.05):
                    return
                theirs.sendall(b"x")
            theirs.shutdown(socket.SHUT_WR)

        peer = threading.Thread(target=dribble)
        peer.start()
        try:
            end, unsent, is_late = stream.serve(ours.fileno(), bytearray(1 << 21), 60.0, 0.5)
        finally:
            ended.set()
            peer.join()
    assert is_late
    assert (unsent, end < 100) == (b"", True)


def test_a_disk_that_fails_under_a_stream_is_never_acknowledged(tmp_path: Path, strace: str) -> None:
    trace = tmp_path / "trace"
    done = subprocess.run(
        [strace, "-f", "-qq", "-e", "trace=pwritev,pwritev2,fdatasync,sendto", "-o", str(trace),
         "-e", "inject=fdatasync:error=EIO:when=12", sys.executable, "-c", PROGRAM, str(tmp_path / "log")],
        env=os.environ | {"PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, timeout=100,
    )  # fmt: skip
    said = done.stdout.decode().splitlines()
    assert said == [*(f"Ack {3 * number}" for number in range(1, len(said))), "Refusal "]
    assert len(said) > 8
    calls: dict[str, list[str]] = {}
    for line in trace.read_text().splitlines():
        calls.setdefault(line.split()[0], []).append(line)
    (serving,) = [lines for lines in calls.values() if sum("fdatasync" in line for line in lines) > 8]
    is_synced, acks = True, 0
    for line in serving:
        if "pwritev" in line and "iov_len=28" not in line:  # not the note
            is_synced = False
        elif re.search(r"fdatasync.*= 0( |$)", line):
            is_synced = True
        elif re.search(r'sendto\(.*"\\0\\0\\0.*\\10', line) and "MSG_NOSIGNAL" in line:
            acks += 1
            assert is_synced
    assert acks > 6


def steps(last: int) -> st.SearchStrategy[list[tuple[Any, ...]]]:
    """What a proposer and others do: for some of it the log must be taken back, some of it is refused."""
    lsns = st.integers(0, last)
    appends = st.tuples(st.just("append"), st.integers(1, 5), st.sampled_from((0, 300, 40_000)), lsns, lsns)
    others = st.sampled_from(
        [("tell", 3), ("two batches",), ("together",), ("one of two",), ("in pieces",), ("status",), ("tend",),
         ("elect",), ("fetch",), ("damaged",), ("crc",), ("again",), ("ahead",), ("older epoch",), ("other epoch",),
         ("wrong history",), ("head",)]
    )  # fmt: skip
    return st.lists(st.one_of(appends, appends, appends, others), min_size=3, max_size=14)


class Side:
    """A safekeeper that streams, or one that does not, and what a peer hears of it."""

    def __init__(self, folder: Path, *, streams: bool) -> None:
        self.folder, self._streams = folder, streams
        self.keeper = Keeper(folder)
        self.peer = Peer(self.keeper.port)
        self.heard: list[object] = []
        self.peer.elect(1)

    def go(self, step: tuple[Any, ...]) -> None:
        with pytest.MonkeyPatch.context() as patch:
            if not self._streams:
                patch.setattr(KeptLog, "lend", lambda *_: False)
            self._go(*step)
        if self.heard and isinstance(self.heard[-1], Refusal) and self.heard[-1].reason == "damaged":
            self._anew()

    def _go(self, what: str, *more: Any) -> None:
        peer = self.peer
        tail, first = peer.tail, Lsn(peer.tail.lsn + 1)
        match what:
            case "append":
                records, payload_bytes, committed_lsn, settled_lsn = more
                peer.send(records, payload_bytes, committed_lsn=committed_lsn, settled_lsn=settled_lsn)
                self.heard.append(peer.heard().message)
            case "tell":
                self.heard.append(peer.tell(*more))
            case "two batches":
                peer.tail = Position(peer.epoch, Lsn(first + 2))
                self._ask(
                    Append(peer.epoch, tail, peer.epoch, Lsn(0)), batch(first, first) + batch(first + 1, first + 2)
                )
            case "together":
                peer.tail = Position(peer.epoch, Lsn(first + 1))
                self._send(self._append(tail, first) + self._append(Position(peer.epoch, first), Lsn(first + 1)))
                # One Ack is for both where both were there, else each has its own: the last one says it all.
                while (answer := peer.heard().message) == Ack(peer.epoch, first):
                    pass
                self.heard.append(answer)
            case "one of two":
                peer.tail = Position(peer.epoch, first)
                self._send(2 * self._append(tail, first))
                self.heard += [peer.heard().message for _ in range(2)]
            case "in pieces":
                peer.tail = Position(peer.epoch, first)
                whole = self._append(tail, first)
                for piece in (whole[:3], whole[3:11], whole[11:40], whole[40:]):
                    self._send(piece)
                    until(lambda: self.keeper.has_read(peer), "the piece is read")
                self.heard.append(peer.heard().message)
            case "status":
                (wal,) = status("127.0.0.1", self.keeper.port, None, 60.0).wals
                self.heard.append((wal.tail, wal.durable_lsn, wal.committed_lsn, wal.settled_lsn))
            case "tend":
                self.keeper.safekeeper.tend()
            case "elect":
                ready = peer.ask(Elected(peer.epoch, Lsn(1), peer.history))
                assert isinstance(ready, Ready)
                self.heard.append(ready)
            case "fetch":
                peer.say(Fetch(Lsn(1), 1 << 20))
                self.heard.append(bytes(peer.heard().body) if tail.lsn else peer.heard().message)
            case "damaged":
                self._ask(Append(peer.epoch, tail, peer.epoch, Lsn(0)), batch(first, first)[:-1] + b"?")
            case "crc":
                changed = bytearray(self._append(tail, first))
                changed[len(changed) - len(batch(first, first)) - 1] ^= 1  # settled_lsn
                self._send(changed)
                self.heard.append(peer.heard().message)
            case "again":
                self._ask(Append(peer.epoch, Position(peer.epoch, Lsn(0)), peer.epoch, Lsn(0)), batch(1, 1))
            case "ahead":
                self._ask(
                    Append(peer.epoch, Position(peer.epoch, first), peer.epoch, Lsn(0)), batch(first + 1, first + 1)
                )
            case "older epoch":
                self._ask(Append(Epoch(0), tail, peer.epoch, Lsn(0)), batch(first, first))
            case "other epoch":
                self._ask(Append(peer.epoch, Position(Epoch(9), tail.lsn), peer.epoch, Lsn(0)), batch(first, first))
            case "wrong history":
                self._ask(Append(peer.epoch, tail, Epoch(2), Lsn(0)), batch(first, first))
            case "head":
                data = b"".join(encode(Frame(Append(peer.epoch, tail, peer.epoch, Lsn(0)), b"no batch at all" * 9)))
                self._send(data)
                self.heard.append(peer.heard().message)

    def _append(self, previous: Position, lsn: Lsn) -> bytes:
        """A frame that appends one record."""
        epoch = self.peer.epoch
        return b"".join(encode(Frame(Append(epoch, previous, epoch, Lsn(0)), batch(lsn, lsn))))

    def _send(self, data: bytes | bytearray) -> None:
        """At once, as far as the connection takes it."""
        self.peer.spoken._send(data)

    def _ask(self, message: Message, body: bytes) -> None:
        self.heard.append(self.peer.ask(message, body))

    def _anew(self) -> None:
        """Behind what is damaged the node speaks over a new connection."""
        epoch, tail = self.peer.epoch, self.peer.tail
        self.peer.close()
        self.peer = Peer(self.keeper.port)
        self.peer.elect(epoch, from_lsn=1)
        assert self.peer.tail.lsn == tail.lsn

    def end(self) -> list[tuple[str, bytes]]:
        """The files that are left."""
        self.peer.close()
        self.keeper.close()
        kept = [self.folder / NODE / "committed", *(each.path for each in list_segments(self.folder / NODE))]
        return [(path.name, path.read_bytes() if path.exists() else b"") for path in kept]


@given(steps(30))
def test_both_answer_and_keep_the_same(drawn: list[tuple[Any, ...]]) -> None:
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setitem(FileLog.__init__.__kwdefaults__, "segment_bytes", 150_000)
        sides = [Side(Path(folder) / "c", streams=True), Side(Path(folder) / "python", streams=False)]
        for step in drawn:
            for side in sides:
                side.go(step)
        left = [side.end() for side in sides]
    assert sides[0].heard == sides[1].heard
    assert left[0] == left[1]
