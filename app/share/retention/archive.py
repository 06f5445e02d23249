"""The archive that a prune relies on: what a signed manifest says is archived, and the same read back and verified.

All of it blocks, so callers use a thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from signing.keys import Keyring


class ArchivedTo(NamedTuple):
    """Entries 1 to ``to_seq`` of a tenant are archived, as a signed manifest says."""

    to_seq: int
    chain_link: str
    """Of entry ``to_seq``."""
    manifest: str
    """SHA-256 of the manifest's payload, in hex."""


class Archive(Protocol):
    """An archive of this ledger."""

    url: str

    def end(self, tenant_id: str, keyring: Keyring) -> ArchivedTo | None:
        """How far a tenant is archived by its newest manifest, None if it is not. No file is read.

        Raises:
            LedgerError: the archive cannot be read, or no key of ``keyring`` signed the manifest.
        """

    def read_back(self, tenant_id: str, keyring: Keyring, from_seq: int, to_seq: int) -> Sequence[ArchivedTo]:
        """Read and verify every file of these entries; returns the manifests that cover them, by seq.

        Raises:
            LedgerError: as ``end``; something is missing, or does not hold.
        """


class StoredArchive:
    """The archive at an address, in a folder or bucket."""

    def __init__(self, url: str) -> None:
        self.url = url

    def end(self, tenant_id: str, keyring: Keyring) -> ArchivedTo | None:
        """As ``Archive.end``."""
        from objects.store import ArchiveStore
        from pipeline.archive.ranges import archived_end

        found = archived_end(ArchiveStore(self.url), tenant_id, keyring)
        return None if found is None else ArchivedTo(found.to_seq, found.chain_link, found.manifest)

    def read_back(self, tenant_id: str, keyring: Keyring, from_seq: int, to_seq: int) -> Sequence[ArchivedTo]:
        """As ``Archive.read_back``."""
        from objects.store import ArchiveStore
        from pipeline.archive.ranges import verified_range

        found = verified_range(ArchiveStore(self.url), tenant_id, keyring, from_seq, to_seq)
        return [ArchivedTo(each.to_seq, each.chain_link, each.manifest) for each in found]
