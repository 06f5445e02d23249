"""Verifying a bundle: its container and manifest, then its rows by the one algorithm that verifies chains.

Steps, those of docs/formats/bundle.md::

    1. container and digests          signing.bundle.reader
    2. the manifest's signature       signing.judging
    3. the checkpoints                signing.judging
    4. entries, snapshots, tree       ledger.verification, over the reader

Where 1 to 3 are broken nothing else is checked. Keys come from the caller alone.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path

from ledger.bundle.rows import Row
from ledger.errors import BundleInvalidError, NotABundleError
from ledger.verification import verify
from ledger.verification.verdict import Head
from signing.anchors import NOBODY, ExternalWitnesses
from signing.bundle.reader import BundleChainReader, BundleReader, digest_of
from signing.checkpoint import JudgedCheckpoint
from signing.judging import BundleVerdict, judged, refused
from signing.keys import Keyring
from signing.memory import Memory


async def verify_file(
    path: Path,
    keyring: Keyring | None,
    kept: JudgedCheckpoint | None = None,
    memory: Memory | None = None,
    outsiders: ExternalWitnesses = NOBODY,
) -> BundleVerdict:
    """The verdict on a bundle, whole or damaged.

    Raises:
        NotABundleError: the file is something else.
        OSError: the file cannot be read.
    """
    began_s = time.perf_counter()
    try:
        with BundleReader.open(path, keyring) as reader:
            return await verify_bundle(reader, keyring, kept, memory, outsiders)
    except NotABundleError:
        raise
    except BundleInvalidError as error:
        return refused(error, *digest_of(path), time.perf_counter() - began_s)


async def verify_bundle(
    reader: BundleReader,
    keyring: Keyring | None,
    kept: JudgedCheckpoint | None = None,
    memory: Memory | None = None,
    outsiders: ExternalWitnesses = NOBODY,
) -> BundleVerdict:
    """The verdict on an open bundle, against the keys of ``keyring``, a checkpoint kept elsewhere and what was verified
    before; what is to be remembered is in it.

    Without ``keyring`` no signature is judged, and nothing vouches for what else is found.
    """
    return await judged(reader, keyring, kept, partial(verify, ReadingAhead(reader)), memory, outsiders)


class ReadingAhead(BundleChainReader):
    """As ``BundleChainReader``, without holding up the event loop: while one part is checked a thread unpacks the
    next."""

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
