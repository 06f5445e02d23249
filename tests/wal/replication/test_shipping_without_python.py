"""Batches that are sent, and Acks that are taken in, without the interpreter's lock: the bytes that Python would send,
and whatever is not an Ack of this epoch left to Python."""

from __future__ import annotations

import os
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from ledger.positions import Epoch, Lsn
from tests.waiting import until
from tests.wal.logs import NODE, WAL_ID, hlc_of, payload_of
from tests.wal.replication.keepers import WAIT_S
from wal.format import SEGMENT_HEADER_BYTES
from wal.group_commit import GroupCommit
from wal.log import Log
from wal.replication.messages import Ack, Append, Frame, Message, Position, Refusal, decode, encode, length_of
from wal.replication.wires import CALLED
from wal.segment import list_segments

pytestmark = pytest.mark.debian_tools
SETTLED = Lsn(300)
COMMITTED = Lsn(70_000)


class MemberAnswers(NamedTuple):
    """As ``wal.native.Ship`` says."""

    acked_lsn: int
    is_received: bool
    others: bytes
    unsent: bytes
    error: int
    timed_lsn: int
    timed_since_s: float
    took_s: float


class Shipped(NamedTuple):
    """As ``wal.native.Ship`` says."""

    needs_python: bool
    sent_lsn: int
    sent_bytes: int
    offset: int
    durable_lsn: int
    reached_lsn: int
    answers: list[tuple[Any, ...]]


def said(message: Message) -> bytes:
    return b"".join(encode(Frame(message)))


class Node:
    """A log that is written, and three connections over which it is shipped, to ends that a test holds."""

    def __init__(self, folder: Path, segment_bytes: int = 1 << 20) -> None:
        self.folder = folder
        self.wake_fd = os.eventfd(0, os.EFD_NONBLOCK)
        log = Log(folder, node_id=NODE, wal_id=WAL_ID, epoch=Epoch(1), next_lsn=Lsn(1), segment_bytes=segment_bytes)
        self.writer = GroupCommit(log, shipper_fd=self.wake_fd, on_failure=print)
        pairs = [socket.socketpair() for _ in range(3)]
        self.near, self.far = [near for near, _ in pairs], [far for _, far in pairs]
        self.epoll = select.epoll()
        for descriptor in (self.wake_fd, *(near.fileno() for near in self.near)):
            self.epoll.register(descriptor, select.EPOLLIN)
        self.file = os.open(list_segments(folder)[0].path, os.O_RDONLY)
        self.sent_lsn, self.offset = 0, SEGMENT_HEADER_BYTES
        self.acked = [0, 0, 0]

    def ship(
        self,
        *,
        enough: int = 2,
        is_any: bool = False,
        reported_lsn: int = 0,
        under_way: int = 0,
        wait_s: float = WAIT_S,
    ) -> tuple[Shipped, list[MemberAnswers]]:
        assert self.writer.ship is not None
        members = [(near.fileno(), acked, under_way, 0, 0.0) for near, acked in zip(self.near, self.acked, strict=True)]
        shipped = Shipped(
            *self.writer.ship(
                self.epoll.fileno(), self.wake_fd, members, 1, self.sent_lsn, COMMITTED, SETTLED,
                self.file, self.offset, enough, is_any, reported_lsn, 1 << 20, time.monotonic() + wait_s,
            )
        )  # fmt: skip
        self.sent_lsn, self.offset = shipped.sent_lsn, shipped.offset
        heard = [MemberAnswers(*each) for each in shipped.answers]
        self.acked = [each.acked_lsn for each in heard]
        return shipped, heard

    def write(self, payload: bytes = b"") -> int:
        lsn = self.writer.next_lsn
        self.writer.append(hlc_of(lsn), 1, payload or payload_of(lsn))
        until(lambda: self.writer.durable_lsn >= lsn, "it is durable")
        return lsn

    def close(self) -> None:
        self.writer.close(WAIT_S)
        for each in (*self.near, *self.far, self.epoll):
            each.close()
        os.close(self.wake_fd)
        os.close(self.file)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    node = Node(tmp_path)
    yield node
    node.close()


def frames_at(far: socket.socket, count: int) -> list[Frame]:
    frames = []
    for _ in range(count):
        prefix = far.recv(8, socket.MSG_WAITALL)
        frames.append(decode(prefix + far.recv(length_of(prefix) - 8, socket.MSG_WAITALL)))
    return frames


def test_every_member_is_sent_the_batches_as_they_stand_in_the_segment(node: Node) -> None:
    for _ in range(3):
        node.write()
    shipped, _ = node.ship(wait_s=0)
    assert (shipped.needs_python, shipped.sent_lsn, shipped.durable_lsn, shipped.reached_lsn) == (False, 3, 3, 0)
    held = b""
    for far in node.far:
        frames = frames_at(far, 3)
        for before, frame in enumerate(frames):
            append = Append(Epoch(1), Position(Epoch(1), Lsn(before)), Epoch(1), COMMITTED, SETTLED)
            assert frame.message == append
            assert b"".join(encode(frame)) == b"".join(encode(Frame(append, frame.body)))
        held = b"".join(bytes(frame.body) for frame in frames)
    assert list_segments(node.folder)[0].path.read_bytes()[SEGMENT_HEADER_BYTES:].startswith(held)
    assert (len(held), shipped.offset) == (shipped.sent_bytes, SEGMENT_HEADER_BYTES + len(held))


@pytest.mark.parametrize(("enough", "answers"), [(1, 1), (2, 2), (3, 3)])
def test_python_is_woken_once_so_many_hold_what_is_durable_here(node: Node, enough: int, answers: int) -> None:
    lsn = node.write()
    done: list[Shipped] = []
    thread = threading.Thread(target=lambda: done.append(node.ship(enough=enough, reported_lsn=0)[0]))
    # What members say one behind the other is taken in meanwhile: it ends with the last that is needed.
    for far in node.far[: answers - 1]:
        far.sendall(said(Ack(Epoch(1), Lsn(lsn))))
    shipped, heard = node.ship(enough=enough, wait_s=0.1)
    assert (shipped.reached_lsn, shipped.needs_python) == (0, False)
    assert [each.acked_lsn for each in heard] == [lsn] * (answers - 1) + [0] * (4 - answers)
    assert all(each.took_s > 0 for each in heard[: answers - 1])
    thread.start()
    node.far[answers - 1].sendall(said(Ack(Epoch(1), Lsn(lsn))))
    thread.join(WAIT_S)
    assert (done[0].reached_lsn, done[0].needs_python) == (lsn, False)


def test_without_members_that_vote_the_own_sync_is_enough_and_with_is_any_any_word(node: Node) -> None:
    assert node.write() == 1
    assert node.ship(enough=0)[0].reached_lsn == 1
    node.far[2].sendall(said(Ack(Epoch(1), Lsn(1))))
    shipped, heard = node.ship(enough=0, is_any=True, reported_lsn=1)
    assert (shipped.needs_python, heard[2].acked_lsn, heard[2].is_received, heard[0].is_received) == (
        False,
        1,
        True,
        False,
    )


@pytest.mark.parametrize(
    ("data", "others"),
    [
        (said(Ack(Epoch(2), Lsn(1))), None),
        (said(Refusal("fenced", "by a test", Epoch(2))), None),
        (said(Ack(Epoch(1), Lsn(1)))[:-1] + b"\x02", None),
        (said(Ack(Epoch(1), Lsn(1)))[:-2], None),
        (said(Ack(Epoch(1), Lsn(1))) + said(Refusal("fenced", "", Epoch(2))), said(Refusal("fenced", "", Epoch(2)))),
        (b"\xff" * 600, b"\xff" * 512),
    ],
    ids=["another epoch", "a refusal", "damaged", "torn", "an Ack before", "no end"],
)
def test_what_is_no_ack_of_this_epoch_is_left_to_python(node: Node, data: bytes, others: bytes | None) -> None:
    node.write()
    node.far[1].sendall(data)
    shipped, heard = node.ship()
    assert shipped.needs_python
    assert heard[1].others == (data if others is None else others)
    assert heard[1].acked_lsn == (1 if others is not None and len(data) < 600 else 0)


def test_a_member_that_closes_or_resets_is_told_of(node: Node) -> None:
    node.far[0].close()
    shipped, heard = node.ship()
    assert (shipped.needs_python, heard[0].error, heard[1].error) == (True, -1, 0)
    node.write()
    shipped, heard = node.ship()
    assert shipped.needs_python
    assert heard[0].error != 0
    assert heard[0].unsent  # of no use any more


def test_what_a_member_does_not_take_is_given_back(node: Node) -> None:
    for near in node.near:
        near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
    size = 300_000
    node.write(os.urandom(size))
    shipped, heard = node.ship()
    assert (shipped.needs_python, shipped.sent_lsn) == (True, 1)
    for far, each in zip(node.far, heard, strict=True):
        came = far.recv(1 << 20)
        assert 0 < len(each.unsent) < size
        frame = decode(came + each.unsent)
        assert frame.message == Append(Epoch(1), Position(Epoch(1), Lsn(0)), Epoch(1), COMMITTED, SETTLED)
        assert len(frame.body) > size


def test_nothing_is_sent_where_too_much_is_under_way(node: Node) -> None:
    node.write()
    shipped, _ = node.ship(under_way=1 << 20)
    assert (shipped.needs_python, shipped.sent_lsn, shipped.sent_bytes) == (True, 0, 0)
    with pytest.raises(BlockingIOError):
        node.far[0].recv(1, socket.MSG_DONTWAIT)


@pytest.mark.parametrize("what", ["python rings", "another connection"])
def test_what_else_is_there_ends_it(node: Node, what: str) -> None:
    other, end = socket.socketpair()
    with other, end:
        node.epoll.register(other.fileno(), select.EPOLLIN)
        act: dict[str, Callable[[], Any]] = {
            "python rings": lambda: os.eventfd_write(node.wake_fd, CALLED),
            "another connection": lambda: end.send(b"!"),
        }
        timer = threading.Timer(0.05, act[what])
        timer.start()
        began_s = time.monotonic()
        assert node.ship()[0].needs_python
        assert time.monotonic() - began_s < WAIT_S / 2
        timer.join()
        node.epoll.unregister(other.fileno())


def test_the_end_of_a_segment_and_damage_in_it_are_for_python(tmp_path: Path) -> None:
    node = Node(tmp_path, segment_bytes=400)
    while len(list_segments(tmp_path)) == 1:
        node.write()
    shipped, _ = node.ship()
    assert shipped.needs_python
    first = list_segments(tmp_path)[0].path
    assert shipped.offset == first.stat().st_size
    assert shipped.sent_lsn == list_segments(tmp_path)[1].base_lsn - 1
    with first.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"?")
    node.sent_lsn, node.offset = 0, SEGMENT_HEADER_BYTES
    assert node.ship()[0].sent_lsn < shipped.sent_lsn
    node.close()
