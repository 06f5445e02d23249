"""What of the WAL is in C where that is built, as ``ledger.native`` says: the queue, checking batches, and shipping and
receiving them without the interpreter's lock. Without C, Python does the same."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from ledger.hlc import node_hash
from ledger.positions import Epoch, Lsn
from wal.log import AppendSpace, Log, gone
from wal.queue import NO_FD, Bounds, Queue

_module: ModuleType | None
try:
    _module = import_module("wal._native")
except ImportError:
    _module = None

check_batches: Callable[..., int | None] = getattr(_module, "check_batches", lambda *_: None)
"""As ``wal.reader.check_batches``, of a node with this hash; None if that is to be asked."""
_Queue: Any = getattr(_module, "Queue", object)


class NativeQueue(_Queue):  # type: ignore[misc]
    """``wal.queue.Queue`` in C; a segment that is full, and the first zeros written ahead, are Python's."""

    def __new__(cls, bounds: Bounds, log: Log, *fds: int) -> NativeQueue:
        """A queue over this log."""
        hashed = node_hash(bounds.node_id)
        queue: NativeQueue = super().__new__(cls, bounds.node_id, hashed, log.next_lsn, *bounds[1:], *fds)
        return queue

    def __init__(self, bounds: Bounds, log: Log, *fds: int) -> None:
        self._size = 0
        """Of the batch that found no space, with its BATCH record."""

    def write(self, log: Log, until_s: float) -> bool:
        """As ``wal.queue.Queue.write``: batch after batch, without the interpreter's lock."""
        space = log.append_space(self._size)
        _, start, path, *_ = space
        offset, small_end, self._size, is_named, is_open = self.write_batches(*space, until_s)
        if not is_named:
            raise gone(Path(os.fsdecode(path)))
        if offset > start:
            log.wrote(offset, self.durable_lsn, small_end)
        return bool(is_open)


class Stream(Protocol):
    """Appends of one epoch that come over a plain connection one behind the other, each of one batch: taken in C,
    without the interpreter's lock, by the rule of ``wal.replication.acceptor`` for such, and that alone
    (``wal/_stream.h``).

    Between ``lend`` and ``take_back`` no other thread may use the log, and nothing that the rules read may change but
    where it ends. ``serve`` belongs to the thread of the connection, the others to the thread that has the log's lock.
    """

    def lend(
        self,
        epoch: Epoch,
        last_lsn: Lsn,
        committed_lsn: Lsn,
        settled_lsn: Lsn,
        node_hash: bytes,
        space: AppendSpace,
        noted_lsn: Lsn,
        wal_id: bytes,
        note: int,
        /,
    ) -> None:
        """The log ends so, all of it durable, and continues in ``space``;
        ``note`` is the descriptor of a ``CommitNote`` that says ``noted_lsn``."""

    def serve(self, socket: int, buffer: bytearray, idle_s: float, frame_s: float, /) -> tuple[int, bytes, bool]:
        """Receive into the empty buffer and acknowledge, until something comes that is no such Append, or the log was
        taken back: how many bytes of it are in the buffer, what of an answer is still to be sent, and whether nothing
        came for ``idle_s`` seconds, or no whole frame for ``frame_s``."""

    def take_back(self, timeout_s: float, /) -> tuple[int, Lsn, Lsn, Lsn, Lsn, bool] | None:
        """Accept nothing more. How far the log is, all of it durable: the offset behind the last batch; the LSNs last,
        committed, settled and noted; and whether the segment still has its name, else the last batch is lost. None if a
        disk takes longer than this, unless it is below 0.

        Raises:
            OSError: a write or a sync failed.
        """


Ship = Callable[..., tuple[Any, ...]]
"""``ship(epoll, wake_fd, members, epoch, sent_lsn, committed_lsn, settled_lsn, file, offset, enough, is_any,
reported_lsn, under_way_bytes_max, until_s)``: send what the queue has written behind ``sent_lsn``, in ``file`` from
``offset`` on, to all of ``members``, and receive their Acks, until this time of the monotonic clock, or until
``enough`` members and the own sync are further than ``reported_lsn``, with ``is_any`` until any member sends
anything, or until Python is needed.

Each member is (descriptor, LSN it acknowledged, bytes under way to it, LSN timed, since when), and holds all up to
``sent_lsn`` or has it under way. ``epoll`` has them all, ``wake_fd``, and all else.

Gives (whether Python is needed; the last LSN that was sent; bytes of batches sent to each member; the offset behind
them; the own durable LSN; the LSN that the own log and enough members hold; answers). The answers of a member are
(the highest LSN that it acknowledged; whether it sent anything; what it sent beside Acks, perhaps not all of it;
what is still to be sent of the last frame; the errno with which the connection failed, -1 if the member closed it,
else 0; the LSN of a batch whose Ack is awaited, 0 for none; since when by the monotonic clock; how long the last
awaited Ack took, -1 for none).
"""


make_stream: Callable[[], Stream | None] = getattr(_module, "Stream", lambda: None)
"""A stream to lend a log to; None without C."""


def make_queue(bounds: Bounds, log: Log, durable_fd: int, shipper_fd: int = NO_FD) -> Queue:
    """A queue over this log, whose next record is the first that it takes."""
    queue: type[Queue] = Queue if _module is None else NativeQueue
    return queue(bounds, log, durable_fd, shipper_fd)
