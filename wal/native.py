"""The queue of the WAL, and what is done for each batch that comes from elsewhere, in C where that is built, and in
Python where it is not, as ``ledger.native`` says."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import Any, NamedTuple, Protocol

from ledger.hlc import node_hash
from ledger.positions import Epoch, Lsn
from wal.folder import gone
from wal.log import Log, Room
from wal.queue import NO_BELL, Bounds, PythonQueue, Queue

_module: ModuleType | None
try:
    _module = import_module("wal._native")
except ImportError:
    _module = None

check_batches: Callable[..., int | None] = getattr(_module, "check_batches", lambda *_: None)
"""As ``wal.replication.replica_log.check_batches``, of a node with this hash; None where that has to be asked."""
_Queue: Any = getattr(_module, "Queue", object)
_Stream: Any = getattr(_module, "Stream", None)


class NativeQueue(_Queue):  # type: ignore[misc]
    """The queue in C, and what of its writer's loop is Python's: which segment, and space ahead."""

    def __new__(cls, bounds: Bounds, log: Log, *bells: int) -> NativeQueue:
        """A queue over this log."""
        hashed = node_hash(bounds.node_id)
        queue: NativeQueue = super().__new__(cls, bounds.node_id, hashed, log.next_lsn, *bounds[1:], *bells)
        return queue

    def __init__(self, bounds: Bounds, log: Log, *bells: int) -> None:
        self._size = 0
        """Of the batch that found no room, with its BATCH record."""

    def write(self, log: Log, until_s: float) -> bool:
        """As ``wal.queue.Queue`` says: batch after batch, without the interpreter's lock."""
        room = log.room(self._size)
        place = room.descriptor, room.offset, os.fsencode(room.path), room.inode
        offset, small_end, self._size, is_named, is_open = self.write_batches(*place, *room[4:], until_s)
        if not is_named:
            raise gone(room.path)
        if offset > room.offset:
            log.wrote(offset, self.durable_lsn, small_end)
        return bool(is_open)


class Streamed(NamedTuple):
    """How far a stream has come with a log: all of it is durable."""

    offset: int
    """In the segment, behind the last batch."""
    last_lsn: int
    committed_lsn: int
    settled_lsn: int
    noted_lsn: int
    is_named: bool
    """The segment has its name still; else the last batch is lost."""


class Stream(Protocol):
    """Appends of one epoch that come over a plain connection one behind the other, each of one batch: taken in C,
    without the interpreter's lock, by the rule of ``wal.replication.acceptor`` for such, and that alone
    (``wal/_stream.h``).

    Between ``lend`` and ``take_back`` nobody else may touch the log, and nothing that the rules look at may change but
    where it ends. ``serve`` belongs to the thread of the connection, the others to whoever has the log's lock.
    """

    def lend(
        self,
        epoch: Epoch,
        last_lsn: Lsn,
        committed_lsn: Lsn,
        settled_lsn: Lsn,
        node_hash: bytes,
        room: tuple[object, ...],
        noted_lsn: Lsn,
        wal_id: bytes,
        note: int,
        /,
    ) -> None:
        """The log ends so, all of it durable, and goes on in ``room``, a ``Room`` with its path as bytes; ``note`` is
        the descriptor of a ``CommitNote`` that says ``noted_lsn``."""

    def serve(
        self, socket: int, stop: int, buffer: bytearray, idle_s: float, frame_s: float, /
    ) -> tuple[int, bytes, bool]:
        """Take what comes into the empty buffer, and acknowledge it, until something comes that is not a stream's, or
        the log was taken back: how many bytes of it are in the buffer, what of an answer is still to be sent, and
        whether nothing came for ``idle_s`` seconds, or no whole frame for ``frame_s``."""

    def take_back(self, timeout_s: float, /) -> tuple[int, int, int, int, int, bool] | None:
        """Nothing more is taken: a ``Streamed``; None where a disk holds it up for longer than this, if that is not
        below 0.

        Raises:
            OSError: a write or a sync failed.
        """


class FromMember(NamedTuple):
    """What one member said while batches were shipped to it, and what became of its connection."""

    acked_lsn: int
    """The highest that it has acknowledged."""
    is_heard: bool
    """It said anything."""
    others: bytes
    """What else it said, perhaps not all of it."""
    unsent: bytes
    """What is still to be sent of the last frame."""
    error: int
    """What errno was where the connection failed; -1 where the member closed it, else 0."""
    timed_lsn: int
    timed_since_s: float
    """Of the monotonic clock: a batch whose Ack is waited for, 0 where none is."""
    took_s: float
    """How long the last that was waited for took to be acknowledged; -1 where none was."""


class Shipped(NamedTuple):
    """What came of shipping."""

    is_odd: bool
    """Something is there that only Python does."""
    sent_lsn: int
    sent_bytes: int
    """Of batches, to each member."""
    offset: int
    """Behind the last batch that was sent."""
    durable_lsn: int
    """Of the own log."""
    reached_lsn: int
    """What this and enough members hold."""
    said: list[tuple[Any, ...]]
    """A ``FromMember`` of each member."""


Ship = Callable[..., tuple[Any, ...]]
"""``ship(epoll, bell, members, epoch, sent_lsn, committed_lsn, settled_lsn, file, offset, enough, is_any, told_lsn,
under_way_bytes_max, until_s)``: send what the queue has written behind ``sent_lsn``, which stands in ``file`` from
``offset`` on, to all of ``members``, and take in their Acks, until this time of the monotonic clock, or until
``enough`` members and the own sync are further than ``told_lsn``, with ``is_any`` until any says anything, or Python
is needed: a ``Shipped``. Each member is (descriptor, LSN it acknowledged, bytes under way to it, LSN timed, since
when), and holds all up to ``sent_lsn`` or has it under way. ``epoll`` has them all, the bell, and all else."""


def make_stream() -> Stream | None:
    """A stream to lend a log to; None where there are none."""
    return None if _Stream is None else _Stream()


def lent_room(room: Room) -> tuple[object, ...]:
    """As ``Stream.lend`` takes it."""
    return room.descriptor, room.offset, os.fsencode(room.path), *room[3:]


def make_queue(bounds: Bounds, log: Log, bell: int, shipper_bell: int = NO_BELL) -> Queue:
    """A queue over this log, whose next record is the first that it takes."""
    queue = PythonQueue if _module is None else NativeQueue
    return queue(bounds, log, bell, shipper_bell)
