"""The parts of the WAL that are in C if it is built (``ledger.native``): the queue, checking batches, and shipping and
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
"""As ``wal.reader.check_batches``, for a node with this hash; None if the caller must check in Python."""
_Queue: Any = getattr(_module, "Queue", object)


class NativeQueue(_Queue):  # type: ignore[misc]
    """``wal.queue.Queue`` in C; Python rotates a full segment and writes the first zeros ahead."""

    def __new__(cls, bounds: Bounds, log: Log, *fds: int) -> NativeQueue:
        """A queue over this log."""
        queue: NativeQueue = super().__new__(
            cls, bounds.node_id, node_hash(bounds.node_id), log.next_lsn, *bounds[1:], *fds
        )
        return queue

    def __init__(self, bounds: Bounds, log: Log, *fds: int) -> None:
        self._size = 0
        """Bytes of the batch that found no space, with its BATCH record."""

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
    """Accepts Appends in C, without the interpreter's lock: those of one epoch that come over a plain connection one
    after the other, each of one batch. It applies the rule of ``wal.replication.acceptor`` for such Appends, and no
    other (``wal/_stream.h``).

    Between ``lend`` and ``take_back`` no other thread may use the log, and of all that the rules read only the end of
    the log may change. The thread of the connection calls ``serve``; the thread that holds the log's lock calls the
    others.
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
        """Lend the log: it ends with ``last_lsn``, all of it durable, and continues in ``space``. ``note`` is the
        descriptor of a ``CommitNote`` that holds ``noted_lsn``."""

    def serve(self, socket: int, buffer: bytearray, idle_s: float, frame_s: float, /) -> tuple[int, bytes, bool]:
        """Receive into the empty buffer and acknowledge, until other bytes than such an Append come, or the log was
        taken back. Returns how many bytes are in the buffer, the unsent rest of an answer, and whether nothing came for
        ``idle_s`` seconds, or no whole frame for ``frame_s``."""

    def take_back(self, timeout_s: float, /) -> tuple[int, Lsn, Lsn, Lsn, Lsn, bool] | None:
        """Accept no more, and return the end of the log, all of it durable: the offset after the last batch; the LSNs
        last, committed, settled and noted; and whether the segment still has its name, else the last batch is lost.
        None if the disk takes longer than ``timeout_s``, unless that is below 0.

        Raises:
            OSError: a write or a sync failed.
        """


Ship = Callable[..., tuple[Any, ...]]
"""``ship(epoll, wake_fd, members, epoch, sent_lsn, committed_lsn, settled_lsn, file, offset, enough, is_any,
reported_lsn, under_way_bytes_max, until_s)``: send the batches that the queue has written after ``sent_lsn``, in
``file`` from ``offset`` on, to all of ``members``, and receive their Acks. It returns at this time of the monotonic
clock, or when ``enough`` members and the own sync are past ``reported_lsn``, or when Python is needed; with ``is_any``
also when any member sends anything.

Each member is (descriptor, LSN it acknowledged, bytes under way to it, LSN timed, since when); all records up to
``sent_lsn`` are acknowledged or under way. ``epoll`` watches all members, ``wake_fd``, and all other connections.

Returns (whether Python is needed; the last LSN that was sent; bytes of batches sent to each member; the offset after
them; the own durable LSN; the LSN that the own log and enough members hold; answers). The answers of a member are
(the highest LSN that it acknowledged; whether it sent anything; bytes that are no Acks, perhaps not all of them; the
unsent rest of the last frame; the errno with which the connection failed, -1 if the member closed it, else 0; the LSN
of a batch whose Ack is awaited, 0 for none; since when by the monotonic clock; how long the last awaited Ack took, -1
for none).
"""


make_stream: Callable[[], Stream | None] = getattr(_module, "Stream", lambda: None)
"""Creates a stream to which a log can be lent; returns None without C."""


def make_queue(bounds: Bounds, log: Log, durable_fd: int, shipper_fd: int = NO_FD) -> Queue:
    """A queue over this log; its first record is the next of the log."""
    queue: type[Queue] = Queue if _module is None else NativeQueue
    return queue(bounds, log, durable_fd, shipper_fd)
