"""A bundle as ``ledger.verification`` reads ledgers. What is awaited here never waits; it reads the file."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Final

from ledger.bundle.rows import Row
from ledger.verification.reader import RowsAlone
from ledger.verification.tree_check import StoredTree
from ledger.verification.verdict import Head
from signing.bundle.reader import BundleReader
from signing.bundle.snapshot_rows import FROM_SEQ, TO_SEQ

SNAPSHOTS_A_BATCH: Final = 50


class BundleChainReader(RowsAlone):
    """An open bundle as a ``ledger.verification.ChainReader``; belongs to one task at a time."""

    def __init__(self, bundle: BundleReader) -> None:
        self._bundle = bundle

    async def head(self) -> Head | None:
        """The end of the chain as the manifest names it."""
        manifest = self._bundle.manifest
        return Head(manifest.to_seq, manifest.to_chain_link, manifest.last_hlc)

    async def last_entry(self) -> Head | None:
        """The last entry there is."""
        return self._bundle.last_entry()

    async def tree(self) -> StoredTree | None:
        """The tree as the manifest names it."""
        return StoredTree(self._bundle.manifest.tree_size, self._bundle.manifest.tree_root)

    async def entries(self, from_seq: int | None, to_seq: int | None) -> AsyncIterator[Sequence[Row]]:
        """Batches of ``ENTRY_COLUMNS`` as they stand, of those parts that the range touches."""
        for batch in self._bundle.entry_batches(from_seq, to_seq):
            yield batch

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
