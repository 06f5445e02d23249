"""Sorting more entries than memory holds, into the order of a merge.

Entries gather until they are too many, are sorted, and the lower half goes to the end of a run in a temporary file, as
blocks of several entries; the runs are merged as they are read back. What is nearly in order, as the entries of a log
are by HLC, becomes one run, whatever its length; what fits into memory never touches the file.

Invariants::

    entries held <= HELD_ENTRIES_MAX, and their bytes <= HELD_BYTES_MAX or it is one entry, plus what is being added
    1 <= runs <= RUNS_MAX; each holds one block of BLOCK_BYTES, or one entry, when they are merged
"""

from __future__ import annotations

import errno
import heapq
import os
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, pairwise
from operator import attrgetter
from typing import BinaryIO, Final

import msgspec

from ledger.bundle.merge import Incoming, MergeKey, encode_incoming
from ledger.errors import InvalidInputError, NotReadyError

HELD_ENTRIES_MAX: Final = 20_000
HELD_BYTES_MAX: Final = 24 << 20
RUNS_MAX: Final = 1000
BLOCK_BYTES: Final = 32 << 10

_length = struct.Struct(">I")
_encode_block: Final = msgspec.msgpack.Encoder().encode
_decode_block: Final = msgspec.msgpack.Decoder(list[Incoming]).decode
_key: Final = attrgetter("key")


class Sorter:
    """Takes entries in any order, then gives them in the order of their keys; equal keys in that of their bytes."""

    def __init__(self, file: BinaryIO, before_write: Callable[[], object] = lambda: None) -> None:
        """``file`` is empty, may be read and written, and stays the caller's. ``before_write`` is called before each
        block and may refuse it by raising."""
        self._file = file
        self._before_write = before_write
        self._held: list[Incoming] = []
        self._held_bytes = 0
        self._last: MergeKey | None = None
        self._begins: list[int] = [0]
        self._size = 0

    def add(self, entries: Sequence[Incoming]) -> None:
        """Take some entries.

        Raises:
            InvalidInputError: they are in too little order to be sorted within bounds.
            NotReadyError: the disk does not take them.
        """
        self._held += entries
        self._held_bytes += sum(map(_size_of, entries))
        while len(self._held) > HELD_ENTRIES_MAX or (self._held_bytes > HELD_BYTES_MAX and len(self._held) > 1):
            _sort(self._held)
            if self._last is not None and self._held[0].key < self._last:
                self._begin_run()
                self._write(len(self._held))
            else:
                self._write(max(1, len(self._held) // 2))

    def entries(self) -> Iterator[Incoming]:
        """All of them, in order. Nothing may be added any more.

        Raises:
            NotReadyError: the disk does not take them; or does not give them back, as the iterator is read.
        """
        _sort(self._held)
        if self._last is None:
            return iter(self._held)
        if self._held and self._held[0].key < self._last:
            self._begin_run()
        self._write(len(self._held))
        with _on_disk():
            self._file.flush()
        runs = [self._read_run(begin, end) for begin, end in pairwise([*self._begins, self._size])]
        return runs[0] if len(runs) == 1 else heapq.merge(*runs, key=_key_and_bytes)

    def _begin_run(self) -> None:
        if len(self._begins) == RUNS_MAX:
            raise InvalidInputError(
                "the entries of these bundles are in too little order to be merged at once; import fewer at a time"
            )
        self._begins.append(self._size)

    def _write(self, count: int) -> None:
        """Move the first ``count`` of those held, which are sorted, to the end of the run."""
        if not count:
            return
        low, self._held = self._held[:count], self._held[count:]
        begin, size = 0, 0
        for end, entry in enumerate(low, 1):
            size += _size_of(entry)
            if size >= BLOCK_BYTES or end == count:
                self._held_bytes -= size
                self._write_block(low[begin:end])
                begin, size = end, 0
        self._last = low[-1].key

    def _write_block(self, entries: list[Incoming]) -> None:
        self._before_write()
        data = _encode_block(entries)
        with _on_disk():
            self._file.write(_length.pack(len(data)) + data)
        self._size += _length.size + len(data)

    def _read_run(self, begin: int, end: int) -> Iterator[Incoming]:
        return chain.from_iterable(self._read_blocks(begin, end))

    def _read_blocks(self, at: int, end: int) -> Iterator[list[Incoming]]:
        descriptor = self._file.fileno()
        while at < end:
            (length,) = _length.unpack(_read(descriptor, at, _length.size))
            yield _decode_block(_read(descriptor, at + _length.size, length))
            at += _length.size + length


def _size_of(entry: Incoming) -> int:
    """Bytes that are variable in length; all others are far below a kilobyte."""
    return 512 + len(entry.payload)


def _key_and_bytes(entry: Incoming) -> tuple[MergeKey, bytes]:
    return entry.key, encode_incoming(entry)


def _sort(entries: list[Incoming]) -> None:
    entries.sort(key=_key)
    if any(first.key == then.key for first, then in pairwise(entries)):
        entries.sort(key=_key_and_bytes)


def _read(descriptor: int, at: int, size: int) -> bytes:
    with _on_disk():
        data = os.pread(descriptor, size, at)
        if len(data) != size:
            raise OSError(errno.EIO, "it is cut short")
    return data


@contextmanager
def _on_disk() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise NotReadyError(
            f"entries cannot be sorted in a file beside the WAL: {error.strerror}; make room there, then import again"
        ) from error
