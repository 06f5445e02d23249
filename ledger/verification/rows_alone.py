"""A ledger that is rows alone, as bundles and archives are: what it answers where a database would look into tables."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Final

from ledger.verification.commitment_rows import of_commitments
from ledger.verification.entry_check import EntryRow

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
