"""Batches of a merge, decided and linked onto the expected heads in memory before they are stored.

ready.heads == the locked heads    then ``ready`` can be stored: any append to a chain moves its head

First an external sort brings the entries of all bundles into the order of the merge. Entries are collected up to a
bound, then sorted, and the lower half is appended to a run in a temporary file, in blocks of several entries. The runs
are merged as they are read back. Entries that are nearly in order, as those of a log are by HLC, become one run of any
length; entries that fit into memory never touch the file.

Invariants::

    entries held <= HELD_ENTRIES_MAX, and their bytes <= HELD_BYTES_MAX or it is one entry, plus what is being added
    1 <= runs <= RUNS_MAX; each holds one block of BLOCK_BYTES, or one entry, when they are merged

*Entries that were in a chain here, and left it with a prune*, do not come back. Rows that left are not found by their
HLC. What tells an entry that left from a new one is listed in ``ledger.bundle.merge.Left``. The order of reads matters,
since rows leave meanwhile: the rows were looked up before the floor and the jobs that departed are read here.
"""

from __future__ import annotations

import asyncio
import errno
import heapq
import os
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from operator import attrgetter
from typing import IO, Final, NamedTuple

import msgspec

from app.store import Connection, exchange
from app.store.appended import AppendedEntries, ChainAppender, ChainPosition, head_of
from app.store.chain_reads import find_existing, highest_hlc
from app.store.chaining import ChainHead
from app.store.departed import departed
from app.trust.retention import RetentionReader
from ledger.bundle.merge import (
    Decided,
    Incoming,
    Left,
    MergeKey,
    chained_as,
    check_beginnings,
    decide,
    encode_incoming,
    event_of,
    events_to_find,
)
from ledger.chain import Linker
from ledger.chain.conflict import Event
from ledger.errors import InvalidInputError, NotReadyError
from ledger.facts.events import SystemAction
from ledger.hlc import Hlc
from ledger.machines.retention import Floor, archived


@dataclass(frozen=True, slots=True)
class ReadyBatch:
    """A batch that is decided and linked onto ``heads``, the heads of all tenants of the import."""

    entries: Sequence[Incoming]
    heads: Mapping[str, ChainHead]
    existing: Mapping[str, dict[str, Event]]
    """By tenant of the batch, the chained events at the HLCs of its entries, including those that it places."""
    decided: Decided
    appended: AppendedEntries

    @property
    def heads_after(self) -> dict[str, ChainHead]:
        """The heads after the batch."""
        return {**self.heads, **{tenant: head_of(links) for tenant, links in self.appended.links.items()}}


async def decide_and_link(
    connection: Connection,
    entries: Sequence[Incoming],
    heads: Mapping[str, ChainHead],
    linkers: dict[str, Linker],
    departures: Departures,
    before: ReadyBatch | None = None,
) -> ReadyBatch:
    """Decide and link ``entries`` onto ``heads``. The entries that ``before`` places need not be stored yet.

    Raises:
        ArchivedError: whether an entry left with a prune cannot be told.
        InvalidInputError: the beginning of a chain of an older link version cannot be kept as it is.
    """
    existing = await read_existing(connection, entries, departures)
    # Entries affect each other's decision only if they have the same time.
    if before is not None and before.entries[-1].key[:3] == entries[0].key[:3]:
        for tenant_id, here in existing.items():
            here |= {**before.existing.get(tenant_id, {}), **here}
    decided, appended = decide(entries, existing), AppendedEntries()
    batch_heads = {tenant_id: heads[tenant_id] for tenant_id in existing}
    check_beginnings(decided.placed, {tenant_id: head[:2] for tenant_id, head in batch_heads.items()})
    appender = ChainAppender(appended, batch_heads, linkers)
    if len(decided.placed) <= AT_ONCE_MAX:
        _chain(decided, appender)
    else:
        await asyncio.to_thread(_chain, decided, appender)
    return ReadyBatch(entries, heads, existing, decided, appended)


async def read_existing(
    connection: Connection, batch: Sequence[Incoming], departures: Departures
) -> dict[str, dict[str, Event]]:
    """By tenant, the chained events at the HLCs that decide about ``batch``: none if all its entries are above the
    chain's highest HLC. With those that left with a prune.

    Raises:
        ArchivedError: whether an entry left cannot be told.
    """
    lowest = {entry.tenant_id: entry.key[1:4] for entry in reversed(batch)}
    existing: dict[str, dict[str, Event]] = {}
    if batch[0].key.rank and SystemAction.CONFLICT.value not in {entry.action for entry in batch}:
        for tenant in lowest:
            if (highest := await highest_hlc(connection, tenant)) is None or highest < lowest[tenant]:
                existing[tenant] = {}
    for tenant, events in events_to_find([entry for entry in batch if entry.tenant_id not in existing]).items():
        existing[tenant] = {
            t_hlc: entry.event for t_hlc, entry in (await find_existing(connection, tenant, events)).items()
        }
    await departures.add_left(connection, batch, existing)
    return existing


def _chain(decided: Decided, appender: ChainAppender) -> None:
    """Link the entries that were decided to be placed."""
    for entry, kept_digest in decided.placed:
        if entry.key.rank == 0:
            place, hlc = ChainPosition(entry.seq, entry.chain_link, entry.prev_chain_link), Hlc.parse(entry.t_hlc)
            payload = entry.payload.encode()
            appender.keep(entry.tenant_id, hlc, entry.job_id, entry.action, entry.link_version, place, payload)
        else:
            hlc, action, payload = chained_as(entry, kept_digest)
            appender.append(entry.tenant_id, hlc, entry.job_id, action, payload, entry.origin)
    appender.finish()


AT_ONCE_MAX: Final = 50
"""Entries that are sorted and linked in the event loop: a thread takes longer to answer."""
HELD_ENTRIES_MAX: Final = 20_000
HELD_BYTES_MAX: Final = 24 << 20
RUNS_MAX: Final = 1000
BLOCK_BYTES: Final = 32 << 10

_length = struct.Struct(">I")
_encode_block: Final = msgspec.msgpack.Encoder().encode
_decode_block: Final = msgspec.msgpack.Decoder(list[Incoming]).decode
_key: Final = attrgetter("key")


# --- sorting --------------------------------------------------------------------------------------


class Sorter:
    """Takes entries in any order, and returns them ordered by key, then by their bytes."""

    def __init__(self, file: IO[bytes], before_write: Callable[[], object] = lambda: None) -> None:
        """``file`` is empty, readable and writable; the caller closes it. ``before_write`` is called before each block
        and may raise to prevent it."""
        self._file = file
        self._before_write = before_write
        self._held: list[Incoming] = []
        self._held_bytes = 0
        self._last: MergeKey | None = None
        self._begins: list[int] = [0]
        self._size = 0

    def add(self, entries: Sequence[Incoming]) -> None:
        """Add some entries.

        Raises:
            InvalidInputError: the entries are too unordered to be sorted within bounds.
            NotReadyError: the disk cannot be written.
        """
        self._held += entries
        self._held_bytes += sum(map(_size_of, entries))
        while len(self._held) > HELD_ENTRIES_MAX or (self._held_bytes > HELD_BYTES_MAX and len(self._held) > 1):
            _sort(self._held)
            self._write(len(self._held) if self._is_behind() else max(1, len(self._held) // 2))

    @property
    def is_held(self) -> bool:
        """Whether memory holds all entries."""
        return self._last is None

    @property
    def is_small(self) -> bool:
        """Whether there are so few that they are sorted sooner than a thread answers."""
        return self.is_held and len(self._held) <= AT_ONCE_MAX

    def entries(self) -> Iterator[Incoming]:
        """All entries, in order. No entry may be added afterwards.

        Raises:
            NotReadyError: the disk cannot be written; or cannot be read, while the iterator is read.
        """
        _sort(self._held)
        if self.is_held:
            return iter(self._held)
        self._write(len(self._held))
        with _on_disk():
            self._file.flush()
        runs = [self._read_run(begin, end) for begin, end in pairwise([*self._begins, self._size])]
        return runs[0] if len(runs) == 1 else heapq.merge(*runs, key=_key_and_bytes)

    def _is_behind(self) -> bool:
        """Whether the lowest held entry, of the sorted ones, is below the end of the run."""
        return bool(self._held) and self._last is not None and self._held[0].key < self._last

    def _write(self, count: int) -> None:
        """Move the first ``count`` held entries, which are sorted, to the end of the run, or into a new run."""
        if not count:
            return
        if self._is_behind():
            if len(self._begins) == RUNS_MAX:
                raise InvalidInputError(
                    "the entries of these bundles are in too little order to be merged at once; import fewer at a time"
                )
            self._begins.append(self._size)
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

    def _read_run(self, at: int, end: int) -> Iterator[Incoming]:
        descriptor = self._file.fileno()
        while at < end:
            (length,) = _length.unpack(_read(descriptor, at, _length.size))
            yield from _decode_block(_read(descriptor, at + _length.size, length))
            at += _length.size + length


def _size_of(entry: Incoming) -> int:
    """Bytes of the fields of variable length; all other fields are far below a kilobyte."""
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


class Departures(NamedTuple):
    """Finds the entries of one import that left."""

    retention: RetentionReader
    was_taken: bool = False
    """Whether these bundles were imported before."""
    followed_log: str | None = None
    """The log whose next range this is, if a peer sent it."""

    async def add_left(
        self, connection: Connection, batch: Sequence[Incoming], existing: Mapping[str, dict[str, Event]]
    ) -> None:
        """Add to ``existing``, the chained events by tenant and HLC, the events of ``batch`` that left.

        Raises:
            ArchivedError: whether an entry left cannot be told.
        """
        for tenant_id, here in existing.items():
            known = await self.retention.read(connection, tenant_id)
            if known.floor is None:
                continue
            left = await self._left(connection, tenant_id, known.floor)
            doubtful = left.doubtful((entry for entry in batch if entry.tenant_id == tenant_id), here)
            jobs = {*await departed(connection, sorted({(tenant_id, entry.job_id) for entry in doubtful}))}
            for entry in doubtful:
                has_left = left.has_left(entry, is_of_departed_job=(tenant_id, entry.job_id) in jobs)
                if has_left is None:
                    raise archived(
                        f"no more of these bundles is imported: job {entry.job_id} of tenant {tenant_id}, of which "
                        f"they have an entry that may have left as well (HLC {entry.t_hlc}, seq {entry.key.seq} of "
                        f"{entry.key.log}),",
                        known.floor,
                    )
                if has_left:
                    here[entry.t_hlc] = event_of(entry)

    async def _left(self, connection: Connection, tenant_id: str, floor: Floor) -> Left:
        seen = await exchange.positions(connection, tenant_id)
        imported = {log: each.imported_seq for log, each in seen.items()}
        return Left(
            floor.to_seq,
            Hlc.parse(floor.highest_hlc),
            self.retention.origin(tenant_id),
            imported,
            was_taken=self.was_taken,
            # What was imported of a peer's chain has no gaps.
            is_next=self.followed_log is not None and imported.get(self.followed_log, 0) > 0,
        )
