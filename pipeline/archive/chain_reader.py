"""One tenant of an archive as ``ledger.verification`` reads ledgers, and its verification in one process.

What is awaited here never waits; it reads files. Memory holds a row group.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from functools import partial
from typing import Any

from ledger.errors import ArchiveInvalidError
from ledger.verification import verify
from ledger.verification.rows_alone import RowsAlone
from ledger.verification.snapshot_check import SNAPSHOT_COLUMNS
from ledger.verification.tree_check import StoredTree
from ledger.verification.verdict import Head
from pipeline.archive.judging import ArchiveJudge, broken
from pipeline.archive.reader import TenantArchive
from pipeline.archive.store import ArchiveStore
from pipeline.arrow import Row
from signing.keys import Keyring
from signing.snapshot import open_snapshot

_FROM_SEQ, _TO_SEQ = map(SNAPSHOT_COLUMNS.index, ("from_seq", "to_seq"))


async def verify_tenant(store: ArchiveStore, tenant_id: str, keyring: Keyring | None) -> dict[str, Any]:
    """The verdict object on a tenant of an archive, against the keys of ``keyring``.

    Raises:
        TenantNotFoundError: there is nothing of it in the archive.
        ArchiveUnavailableError: the archive cannot be read.
    """
    began_s = time.perf_counter()
    try:
        archive = TenantArchive.read(store, tenant_id, keyring)
        judge = ArchiveJudge(archive, keyring)
        found = await verify(
            ArchiveChainReader(archive),
            tenant_id=tenant_id,
            open_snapshot=partial(open_snapshot, keyring=keyring),
            checkpoints=judge.judge(),
            projection=False,
        )
    except ArchiveInvalidError as error:
        return broken(tenant_id, error, time.perf_counter() - began_s)
    return judge.verdict(found.to_json((time.perf_counter() - began_s) * 1000))


class ArchiveChainReader(RowsAlone):
    """One tenant of an archive as a ``ledger.verification.ChainReader``; belongs to one task at a time."""

    def __init__(self, archive: TenantArchive) -> None:
        self._archive = archive

    async def head(self) -> Head | None:
        """The end of the chain as the newest manifest names it."""
        return self._archive.newest.last

    async def last_entry(self) -> Head | None:
        """The last entry there is."""
        return self._archive.last_entry()

    async def tree(self) -> StoredTree | None:
        """The tree as the newest manifest names it."""
        return StoredTree(self._archive.newest.tree_size, self._archive.newest.tree_root)

    async def entries(self, from_seq: int | None, to_seq: int | None) -> AsyncIterator[Sequence[Row]]:
        """Batches of ``ENTRY_COLUMNS`` as they stand."""
        for rows in self._archive.entry_batches(from_seq, to_seq):
            yield rows

    async def snapshots(self, from_seq: int, to_seq: int | None) -> AsyncIterator[Sequence[Row]]:
        """Batches of ``SNAPSHOT_COLUMNS``, those wholly in the range."""
        for rows in self._archive.snapshot_batches():
            wanted = [row for row in rows if row[_FROM_SEQ] >= from_seq and (to_seq is None or row[_TO_SEQ] <= to_seq)]
            if wanted:
                yield wanted
