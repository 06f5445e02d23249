"""A bundle as ``ledger.verification`` reads ledgers: while one part is being checked a thread decompresses the next."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from itertools import pairwise

from ledger.bundle.rows import Row
from ledger.verification.verdict import Head
from signing.bundle.chain_reader import BundleChainReader
from signing.bundle.reader import BundleReader


class ReadingAhead(BundleChainReader):
    """As ``BundleChainReader``, without holding up the event loop."""

    def __init__(self, bundle: BundleReader) -> None:
        super().__init__(bundle)
        self._bundle = bundle

    async def last_entry(self) -> Head | None:
        """The last entry there is."""
        return await asyncio.to_thread(self._bundle.last_entry)

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
