"""A bundle as ``ledger.verification`` reads ledgers: while one part is being checked a thread decompresses the next."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, Final

from ledger.verification import Head, StoredTree
from signing.bundle.reader import BundleReader
from signing.bundle.snapshot_rows import FROM_SEQ, TO_SEQ

SNAPSHOTS_A_BATCH: Final = 50

Row = tuple[Any, ...]
_NO_ROWS: Final[Sequence[Sequence[Row]]] = ()


class BundleChainReader:
    """An open bundle as a ``ledger.verification.ChainReader``; belongs to one task at a time."""

    def __init__(self, bundle: BundleReader) -> None:
        self._bundle = bundle

    async def head(self) -> Head | None:
        """The end of the chain as the manifest names it."""
        manifest = self._bundle.manifest
        return Head(manifest.to_seq, manifest.to_chain_link, manifest.last_hlc)

    async def last_entry(self) -> Head | None:
        """The last entry there is."""
        return await asyncio.to_thread(self._bundle.last_entry)

    async def tree(self) -> StoredTree | None:
        """The tree as the manifest names it."""
        return StoredTree(self._bundle.manifest.tree_size, self._bundle.manifest.tree_root)

    async def tiles(self, level: int, first: int, last: int) -> Mapping[int, bytes] | None:
        """None: bundles hold no tiles."""
        return None

    async def entries(self, from_seq: int | None, to_seq: int | None) -> AsyncIterator[Sequence[Row]]:
        """Batches of ``ENTRY_COLUMNS`` as they stand, of those parts that the range touches."""
        numbers = self._bundle.parts_of(from_seq, to_seq)
        ahead = self._start_reading(numbers[0]) if numbers else None
        try:
            for number, following in pairwise((*numbers, None)):
                assert ahead is not None
                assert number is not None
                raw = await ahead
                ahead = self._start_reading(following) if following is not None else None
                for batch in self._bundle.part_batches(number, raw, from_seq, to_seq):
                    yield batch
        finally:
            if ahead is not None:
                await asyncio.gather(ahead, return_exceptions=True)

    def _start_reading(self, number: int) -> asyncio.Future[bytes]:
        return asyncio.ensure_future(asyncio.to_thread(self._bundle.read_part, number))

    async def snapshots(self, from_seq: int, to_seq: int | None) -> AsyncIterator[Sequence[Row]]:
        """Batches of ``SNAPSHOT_COLUMNS``, those wholly in the range."""
        batch: list[Row] = []
        for row in self._bundle.snapshot_rows():
            if row[FROM_SEQ] >= from_seq and (to_seq is None or row[TO_SEQ] <= to_seq):
                batch.append(row)
            if len(batch) == SNAPSHOTS_A_BATCH:
                yield batch
                batch = []
        if batch:
            yield batch

    async def jobs(self) -> AsyncIterator[Sequence[Row]]:
        """Nothing: bundles hold no job states; they follow from the entries."""
        for batch in _NO_ROWS:
            yield batch

    async def entries_by_job(self) -> AsyncIterator[Sequence[Row]]:
        """Nothing, since there are no job states to compare with."""
        for batch in _NO_ROWS:
            yield batch
