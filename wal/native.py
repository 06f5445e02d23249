"""The queue of the WAL, and what is done for each batch that comes from elsewhere, in C where that is built, and in
Python where it is not, as ``ledger.native`` says."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import Any

from ledger.hlc import node_hash
from wal.format import BATCH_RECORD_BYTES, BatchRecord
from wal.guard import gone
from wal.log import Log
from wal.queue import NO_BELL, Bounds, PythonQueue, Queue

_module: ModuleType | None
try:
    _module = import_module("wal._native")
except ImportError:
    _module = None

check_batches: Callable[..., int | None] = getattr(_module, "check_batches", lambda *_: None)
"""As ``wal.replication.checking.check_batches``, of a node with this hash; None where that has to be asked."""
crc32: Callable[..., int] = getattr(_module, "sum", zlib.crc32)
"""As that of zlib."""
receive: Callable[..., int | None] | None = getattr(_module, "receive", None)
"""What ``wal.replication.frames.FrameSocket`` does to read, where no TLS is between."""
_Queue: Any = getattr(_module, "Queue", object)


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
        offset, self._size, is_named, is_open = self.write_batches(*place, *room[4:], until_s)
        if not is_named:
            raise gone(room.path)
        if offset > room.offset:
            log.wrote(offset, self.durable_lsn)
        return bool(is_open)


def append_synced(log: Log, batch: BatchRecord, whole: bytes | memoryview) -> None:
    """``Log.append`` and ``Log.sync`` of one batch; ``whole`` is it with its BATCH record.

    Raises:
        WalError, OSError: as those do.
    """
    if _module is None:
        log.append(batch, whole[BATCH_RECORD_BYTES:])
        log.sync()
        return
    assert batch.first_lsn == log.next_lsn
    room = log.room(len(whole))
    if not _module.write_synced(room.descriptor, whole, room.offset, os.fsencode(room.path), room.inode):
        raise gone(room.path)
    log.wrote(room.offset + len(whole), batch.last_lsn)


def make_queue(bounds: Bounds, log: Log, bell: int, shipper_bell: int = NO_BELL) -> Queue:
    """A queue over this log, whose next record is the first that it takes."""
    queue = PythonQueue if _module is None else NativeQueue
    return queue(bounds, log, bell, shipper_bell)
