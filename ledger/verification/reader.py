"""What verification reads a tenant's ledger through, wherever its rows are."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Final, Protocol

from ledger.verification.commitment_check import of_commitments
from ledger.verification.entry_check import EntryRow
from ledger.verification.projection_check import Rows
from ledger.verification.snapshot_check import SnapshotRow
from ledger.verification.tree_check import StoredTree
from ledger.verification.verdict import Head


class ChainReader(Protocol):
    """Reads one tenant's ledger, in one consistent state. Text is well-formed Unicode; batches are not empty."""

    async def head(self) -> Head | None:
        """The row of ``chain_heads``, None when there is none."""

    async def last_entry(self) -> Head | None:
        """The entry of highest seq, None when there is none."""

    def entries(self, from_seq: int | None, to_seq: int | None) -> AsyncIterator[Sequence[EntryRow]]:
        """Batches of ``ENTRY_COLUMNS`` by seq, in order of storage where seqs repeat; None is no bound."""

    def snapshots(self, from_seq: int, to_seq: int | None) -> AsyncIterator[Sequence[SnapshotRow]]:
        """Batches of ``SNAPSHOT_COLUMNS`` by ``from_seq``, of snapshots wholly in the range."""

    async def tree(self) -> StoredTree | None:
        """The stored tree's size and root, None when there is none."""

    async def tiles(self, level: int, first: int, last: int) -> Mapping[int, bytes] | None:
        """Stored tiles ``first..last`` of a level, those there are; None when this form of a ledger stores none."""

    def jobs(self) -> Rows:
        """Batches of ``JOB_COLUMNS`` by job id, of a table that follows the chain."""

    def entries_by_job(self) -> Rows:
        """Batches of ``FOLD_COLUMNS`` by job id and seq, of the entries which that table has followed."""

    def commitments(self) -> Rows:
        """Batches of ``COMMITMENT_COLUMNS`` by seq, of the entries whose verdicts are judged."""

    def promised(self) -> Rows:
        """Batches of ``PROMISED_COLUMNS`` by seq, of the table of commitments, which follows as that of jobs."""

    async def followed_seq(self) -> int:
        """How far these tables have followed the chain, 0 where there are none."""


_NO_BATCHES: Final[Sequence[Sequence[Any]]] = ()


class RowsAlone:
    """The part of a ``ledger.verification.ChainReader`` that is about tables besides entries and snapshots."""

    async def tiles(self, level: int, first: int, last: int) -> Mapping[int, bytes] | None:
        """None: there are no stored tiles."""
        return None

    async def jobs(self) -> AsyncIterator[Sequence[Any]]:
        """Nothing: there are no job states, which follow from the entries, so nothing is compared with them."""
        for batch in _NO_BATCHES:
            yield batch

    entries_by_job = promised = jobs

    async def followed_seq(self) -> int:
        """0: there is no table."""
        return 0

    def entries(self, from_seq: int | None, to_seq: int | None) -> AsyncIterator[Sequence[EntryRow]]:
        """Batches of entries, as readers give them."""
        raise NotImplementedError

    async def commitments(self) -> AsyncIterator[Sequence[Any]]:
        """Those entries whose verdicts are judged, by reading all entries once more."""
        async for rows in self.entries(None, None):
            if found := of_commitments(rows):
                yield found
