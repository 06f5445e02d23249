"""The interface through which verification reads a tenant's ledger, for every place of its rows."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Final, NamedTuple, Protocol

from ledger.facts.events import VERDICTS, CommitmentAction
from ledger.machines.exclusions import COUNT_ALL, Exclusions
from ledger.verification.entry_check import EntryRow
from ledger.verification.left_index import IndexAtFloor
from ledger.verification.snapshot_check import SnapshotRow
from ledger.verification.tree_check import StoredTree
from ledger.verification.verdict import Head

Rows = AsyncIterator[Sequence[Sequence[Any]]]
"""Batches of rows."""

COMMITMENT_ACTIONS: Final = frozenset((*map(str, VERDICTS), str(CommitmentAction.CAPACITY_SET)))
"""Actions of the entries that are judged."""

COMMITMENT_COLUMNS: Final = ("seq", "job_id", "action", "payload")
"""Columns of one entry as readers give it to be judged, by seq; of those actions, and not imported."""

PROMISED_COLUMNS: Final = ("seq", "ended_seq", "subject")
"""Columns of one row of the table as readers give it, by seq."""


class CommitmentRow(NamedTuple):
    """One entry in the order of ``COMMITMENT_COLUMNS``."""

    seq: Any
    job_id: Any
    action: Any
    payload: Any


class PromisedRow(NamedTuple):
    """One row of the table in the order of ``PROMISED_COLUMNS``."""

    seq: Any
    ended_seq: Any
    subject: Any


def of_commitments(rows: Sequence[EntryRow]) -> list[CommitmentRow]:
    """The entries that must be judged."""
    return [
        CommitmentRow(row[0], row[5], row[6], row[11])
        for row in rows
        if type(row[6]) is str and row[6] in COMMITMENT_ACTIONS and row[12] is None
    ]


_NO_BATCHES: Final[Sequence[Sequence[Any]]] = ()


class ChainReader(Protocol):
    """Reads one tenant's ledger, in one consistent state. Text is well-formed Unicode; batches are not empty.

    A subclass for a place that has entries and snapshots only inherits what is about tables besides these.
    """

    @abstractmethod
    async def head(self) -> Head | None:
        """The row of ``chain_heads``, None when there is none."""

    @abstractmethod
    async def last_entry(self) -> Head | None:
        """The entry of highest seq, None when there is none."""

    @abstractmethod
    def entries(self, from_seq: int | None, to_seq: int | None) -> AsyncIterator[Sequence[EntryRow]]:
        """Batches of ``ENTRY_COLUMNS`` by seq, in order of storage where seqs repeat; None is no bound."""

    @abstractmethod
    def snapshots(self, from_seq: int, to_seq: int | None) -> AsyncIterator[Sequence[SnapshotRow]]:
        """Batches of ``SNAPSHOT_COLUMNS`` by ``from_seq``, of snapshots wholly in the range."""

    @abstractmethod
    async def tree(self) -> StoredTree | None:
        """The stored tree's size and root, None when there is none."""

    async def tiles(self, level: int, first: int, last: int) -> Mapping[int, bytes] | None:
        """The existing tiles among ``first..last`` of a level; None if this form of a ledger stores none."""
        return None

    async def jobs(self) -> AsyncIterator[Sequence[Sequence[Any]]]:
        """Batches of ``JOB_COLUMNS`` by job id, of a table that follows the chain."""
        for batch in _NO_BATCHES:
            yield batch

    def entries_by_job(self) -> Rows:
        """Batches of ``FOLD_COLUMNS`` by job id and seq, of the entries which that table has followed."""
        return self.jobs()

    async def exclusions(self) -> Exclusions:
        """What is excluded from the fold of these entries."""
        return COUNT_ALL

    async def retention_entries(self) -> Sequence[EntryRow]:
        """The entries about retention, in seq order; none where this form of a ledger is always whole."""
        return ()

    async def index_at(self, to_seq: int) -> IndexAtFloor | None:
        """What is stored of the index of jobs of entries up to ``to_seq``, which left; None if nothing is."""
        return None

    async def commitments(self) -> AsyncIterator[Sequence[Sequence[Any]]]:
        """Batches of ``COMMITMENT_COLUMNS`` by seq, of the entries whose verdicts are judged."""
        async for rows in self.entries(None, None):
            if found := of_commitments(rows):
                yield found

    def promised(self) -> Rows:
        """Batches of ``PROMISED_COLUMNS`` by seq, of the table of commitments, which follows the chain as well."""
        return self.jobs()

    async def followed_seq(self) -> int:
        """The seq up to which these tables have followed the chain, 0 if there are none."""
        return 0
