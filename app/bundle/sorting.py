"""Sorting more entries than memory holds, into the order of a merge.

Entries pass through a heap of bounded size into sorted runs of one temporary file, and the runs are merged as they
are read back (replacement selection: Knuth, The Art of Computer Programming 3, 5.4.1). What is nearly in order, as the
entries of a log are by HLC, becomes one run, whatever its length.

Invariants::

    entries held <= HELD_ENTRIES_MAX, and their bytes <= HELD_BYTES_MAX or it is one entry
    1 <= runs <= RUNS_MAX; each holds one buffer of READ_BYTES, or one entry, when they are merged
"""

from __future__ import annotations

import heapq
import os
import struct
from collections.abc import Callable, Iterator
from typing import BinaryIO, Final

from ledger.bundle.incoming import Incoming, MergeKey, decode_incoming, encode_incoming
from ledger.errors import InvalidInputError

HELD_ENTRIES_MAX: Final = 20_000
HELD_BYTES_MAX: Final = 24 << 20
RUNS_MAX: Final = 1000
READ_BYTES: Final = 32 << 10
WRITE_BYTES: Final = 1 << 20

_length = struct.Struct(">I")

_Held = tuple[int, MergeKey, bytes]


class Sorter:
    """Takes entries in any order, then gives them in the order of their keys; equal keys in that of their bytes."""

    def __init__(self, file: BinaryIO, before_write: Callable[[], None] = lambda: None) -> None:
        """``file`` is empty, may be read and written, and stays the caller's. ``before_write`` is called before each
        ``WRITE_BYTES`` and may refuse them by raising."""
        self._file = file
        self._before_write = before_write
        self._heap: list[_Held] = []
        self._held_bytes = 0
        self._run = 0
        self._last: MergeKey | None = None
        self._begins: list[int] = [0]
        self._pending = bytearray()
        self._size = 0

    def add(self, entry: Incoming) -> None:
        """Take one entry.

        Raises:
            InvalidInputError: they are in too little order to be sorted within bounds.
            OSError: the file cannot be written.
        """
        data = encode_incoming(entry)
        is_late = self._last is not None and entry.key < self._last
        heapq.heappush(self._heap, (self._run + is_late, entry.key, data))
        self._held_bytes += len(data)
        while len(self._heap) > HELD_ENTRIES_MAX or (self._held_bytes > HELD_BYTES_MAX and len(self._heap) > 1):
            self._write_lowest()

    def entries(self) -> Iterator[Incoming]:
        """All of them, in order. Nothing may be added any more."""
        while self._heap:
            self._write_lowest()
        self._flush()
        self._file.flush()
        ends = [*self._begins[1:], self._size]
        runs = [self._read_run(begin, end) for begin, end in zip(self._begins, ends, strict=True)]
        return (entry for _, _, entry in heapq.merge(*runs))

    def _write_lowest(self) -> None:
        run, key, data = heapq.heappop(self._heap)
        self._held_bytes -= len(data)
        if run != self._run:
            if len(self._begins) == RUNS_MAX:
                raise InvalidInputError(
                    "the entries of these bundles are in too little order to be merged at once; import fewer at a time"
                )
            self._run = run
            self._begins.append(self._size)
        self._last = key
        self._pending += _length.pack(len(data))
        self._pending += data
        self._size += _length.size + len(data)
        if len(self._pending) >= WRITE_BYTES:
            self._flush()

    def _flush(self) -> None:
        self._before_write()
        self._file.write(self._pending)
        self._pending.clear()

    def _read_run(self, begin: int, end: int) -> Iterator[tuple[MergeKey, bytes, Incoming]]:
        descriptor, at, buffer = self._file.fileno(), begin, b""
        taken = 0
        while at < end or taken < len(buffer):
            wanted = _length.size
            if len(buffer) - taken >= wanted:
                wanted += _length.unpack_from(buffer, taken)[0]
            if len(buffer) - taken < wanted:
                missing = max(wanted - (len(buffer) - taken), min(READ_BYTES, end - at))
                read = os.pread(descriptor, missing, at)
                if not read:
                    raise OSError("the file that entries are sorted in is cut short")
                at += len(read)
                buffer, taken = buffer[taken:] + read, 0
                continue
            data = buffer[taken + _length.size : taken + wanted]
            taken += wanted
            entry = decode_incoming(data)
            yield entry.key, data, entry
