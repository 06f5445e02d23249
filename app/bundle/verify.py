"""Verifying a bundle: its container and manifest, then its rows by the one algorithm that verifies chains.

Steps, those of docs/formats/bundle.md::

    1. container and digests          signing.bundle.reader
    2. the manifest's signature       signing.bundle.judging
    3. the checkpoints                signing.bundle.judging
    4. entries, snapshots, tree       ledger.verification, over the reader

Where 1 to 3 are broken nothing else is looked at. Keys come from the caller alone.
"""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path

from app.bundle.chain_reader import ReadingAhead
from ledger.errors import BundleInvalidError
from ledger.verification import verify
from signing.anchors import NOBODY, Outsiders
from signing.bundle.judging import BundleVerdict, judged, refused
from signing.bundle.reader import BundleReader, digest_of
from signing.checkpoint import JudgedCheckpoint
from signing.keys import Keyring
from signing.memory import Memory


async def verify_file(
    path: Path,
    keyring: Keyring | None,
    kept: JudgedCheckpoint | None = None,
    memory: Memory | None = None,
    outsiders: Outsiders = NOBODY,
) -> BundleVerdict:
    """The verdict on the file; whatever it holds, nothing but this is the outcome.

    Raises:
        OSError: the file cannot be read.
    """
    began_s = time.perf_counter()
    try:
        with BundleReader.open(path, keyring) as reader:
            return await verify_bundle(reader, keyring, kept, memory, outsiders)
    except BundleInvalidError as error:
        return refused(error, *digest_of(path), time.perf_counter() - began_s)


async def verify_bundle(
    reader: BundleReader,
    keyring: Keyring | None,
    kept: JudgedCheckpoint | None = None,
    memory: Memory | None = None,
    outsiders: Outsiders = NOBODY,
) -> BundleVerdict:
    """The verdict on an open bundle, against the keys of ``keyring``, a checkpoint kept elsewhere and what was verified
    before; what is to be remembered is in it.

    Without ``keyring`` no signature is judged, and nothing vouches for what else is found.
    """
    return await judged(reader, keyring, kept, partial(verify, ReadingAhead(reader)), memory, outsiders)
