"""A chain and what left it, verified as one from seq 1: the verdict on its database, joined with that on its archive.

Both are verified by themselves. They join where the tree of the archive is the beginning of that of the chain, which
covers every link. So the database's verification compares ``ArchivedPart.heads``, which are no checkpoints from
elsewhere, and its stored tiles prove the tree of what left::

    archive     1 ... to_seq of the newest manifest          PRUNED names a manifest of it
    database         to_seq of PRUNED + 1 ... the head       its tree begins with the archive's

Entries in both are verified twice. The commitments that PRUNED carries must be those that the archive's entries up to
its ``to_seq`` lead to. Where the database has not kept what the index of jobs needs of the entries that left, these
give it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from ledger.errors import ArchiveInvalidError, TenantNotFoundError
from ledger.facts.events import CommitmentAction
from ledger.job_index import keys_of
from ledger.machines.carried import carry_commitments, digest_of_carried
from ledger.merkle import leaf_hashes
from ledger.verification.entry_check import ENTRY_COLUMNS
from ledger.verification.tree_check import TreeHead
from ledger.verification.verdict import Break, with_archive
from objects.store import ArchiveStore
from pipeline.archive import SealedManifest
from pipeline.archive.reader import ARCHIVE, OF_A_COPY, TenantArchive, verify_tenant
from pipeline.arrow import Row
from signing.keys import Keyring
from signing.snapshot import ENVELOPE, TO_SEQ, payload_of

Entries = Callable[[int, int], Iterator[Sequence[Row]]]
"""Gives batches of ``ENTRY_COLUMNS`` of the archived entries of this range."""
SnapshotAt = Callable[[int], str | None]
"""Gives the envelope of the archived snapshot that ends at a seq."""
_PROMISES: Final = (CommitmentAction.PROPOSE_ACCEPTED, CommitmentAction.CAPACITY_SET)
_SEQ, _JOB_ID, _ACTION, _LINK, _PAYLOAD, _ORIGIN = map(
    ENTRY_COLUMNS.index, ("seq", "job_id", "action", "chain_link", "payload", "origin")
)


@dataclass(frozen=True)
class ArchivedPart:
    """What an archive has of a tenant, by manifests whose signatures its verdict judges."""

    tenant_id: str
    url: str
    sealed: Sequence[SealedManifest]
    """Its manifests, none if the archive does not have the tenant, or if they cannot be read."""
    verdict: Mapping[str, Any] | None
    """The verdict object on it; None if the archive does not have the tenant."""
    rows: Entries = lambda from_seq, to_seq: iter(())
    snapshot_at: SnapshotAt = lambda to_seq: None

    @property
    def heads(self) -> list[TreeHead]:
        """The tree of the archive, with which that of the chain must begin."""
        newest = [each.manifest for each in self.sealed[-1:]]
        return [TreeHead(each.tree_size, bytes.fromhex(each.tree_root), ARCHIVE, is_own=True) for each in newest]

    def ends_before(self, verdict: Mapping[str, Any]) -> bool:
        """Whether entries have left the database of this verdict that are not in here."""
        pruned = verdict.get("pruned")
        return pruned is not None and (self.sealed[-1].manifest.to_seq if self.sealed else 0) < pruned["to_seq"]

    def joined(self, verdict: Mapping[str, Any], log: str | None) -> dict[str, Any]:
        """``verdict``, on a database that was compared with ``heads`` and has the log of this name, joined with that
        on the archive. Both are valid together if nothing is missing between them."""
        pruned = verdict.get("pruned")
        refusal = self.refusal(pruned, log) or (None if pruned is None else self.carried_break(pruned))
        found = with_archive(verdict, self.verdict, None if refusal is None else refusal._asdict())
        if self.verdict is not None:
            found["not_checked"] = [each for each in self.verdict["not_checked"] if each not in OF_A_COPY]
            found[ARCHIVE] = self.verdict.get(ARCHIVE)
        return found

    def refusal(self, pruned: Mapping[str, Any] | None, log: str | None) -> Break | None:
        """Why this archive cannot stand for what left, None if it can."""
        left_to = 0 if pruned is None else pruned["to_seq"]
        if self.verdict is None:
            says = f"the archive {self.url} has nothing of tenant {self.tenant_id}"
            return (
                Break(1, ARCHIVE, f"{says}, and entries up to seq {left_to} left for an archive") if left_to else None
            )
        if not self.sealed:
            return None  # Its verdict says why.
        newest = self.sealed[-1].manifest
        named = None if pruned is None else pruned["manifest"]
        last = next((each for each in self.sealed if each.manifest.from_seq <= left_to <= each.manifest.to_seq), None)
        if named is not None and last is not None and named == last.digest:
            return None  # Of another log it may be only from before a fork.
        if log and (archived_log := f"{newest.log_origin}/{self.tenant_id}") != log:
            return Break(1, ARCHIVE, "the archive is of another log than the chain", log, archived_log)
        if newest.to_seq < left_to:
            detail = f"seq {newest.to_seq + 1} to {left_to} left the database, and the archive ends before"
            return Break(newest.to_seq + 1, ARCHIVE, detail, left_to, newest.to_seq)
        if named is not None and last is not None:
            detail = f"the archive's manifest of seq {left_to} is not the one that the PRUNED entry names"
            return Break(last.manifest.from_seq, ARCHIVE, detail, named, last.digest)
        return None

    def carried_break(self, pruned: Mapping[str, Any]) -> Break | None:
        """Whether the commitments that the PRUNED entry carries are others than the entries here lead to. Not judged of
        an archive that does not hold.

        Raises:
            ArchiveInvalidError, ArchiveUnavailableError: the entries cannot be read.
        """
        assert self.verdict is not None
        is_any = self.verdict.get("commitments", 0) > 0 or pruned["commitments"] is not None
        if not is_any or "broken" in self.verdict["verdicts"].values():
            return None
        due = self._carried(pruned["to_seq"])
        if pruned["commitments"] == due:
            return None
        detail = f"PRUNED at seq {pruned['seq']} carries other commitments than the archived entries lead to"
        return Break(pruned["seq"], CARRIED, detail, due, pruned["commitments"])

    def _carried(self, to_seq: int) -> str | None:
        """Digest of what the PRUNED entry about the entries up to a seq must carry."""
        state: dict[str, Any] | None = None
        for rows in self.rows(1, to_seq):
            promises = [
                (row[_SEQ], row[_ACTION], row[_PAYLOAD])
                for row in rows
                if row[_ACTION] in _PROMISES and row[_ORIGIN] is None
            ]
            if promises:
                state = carry_commitments(state, promises)
        return digest_of_carried(state)

    # --- as the source of an index of jobs ---

    async def kept(self) -> None:
        """All entries are here, so nothing is kept of them."""

    async def payload_at(self, to_seq: int) -> bytes:
        """The payload of the archived snapshot that ends there."""
        return payload_of(self.snapshot_at(to_seq))

    async def left_hashes(self, begin: int, end: int) -> bytes:
        """None: see ``kept``."""
        return b""

    async def entries(self, begin: int, end: int) -> tuple[bytes, bytes]:
        """Keys and leaf hashes of the archived entries."""
        found = [row for batch in self.rows(begin + 1, end) for row in batch]
        hashes = leaf_hashes([bytes.fromhex(row[_LINK]) for row in found])
        return keys_of([row[_JOB_ID] for row in found]), b"".join(hashes)


CARRIED: Final = "carried"
"""The kind of a break between what a PRUNED entry carries and the entries that left."""
NO_MANIFESTS: Final[Sequence[SealedManifest]] = ()


async def archived_part(store: ArchiveStore, tenant_id: str, keyring: Keyring | None) -> ArchivedPart:
    """Verify what an archive has of a tenant.

    Raises:
        ArchiveUnavailableError: the archive cannot be read.
    """
    try:
        verdict = await verify_tenant(store, tenant_id, keyring)
    except TenantNotFoundError:
        return ArchivedPart(tenant_id, store.url, NO_MANIFESTS, None)
    try:
        archive = TenantArchive.read(store, tenant_id, keyring)
    except ArchiveInvalidError:
        return ArchivedPart(tenant_id, store.url, NO_MANIFESTS, verdict)

    def snapshot_at(to_seq: int) -> str | None:
        rows = (row for batch in archive.snapshot_batches(None, to_seq) for row in batch)
        return next((row[ENVELOPE] for row in rows if row[TO_SEQ] == to_seq), None)

    return ArchivedPart(tenant_id, store.url, archive.sealed, verdict, archive.entry_batches, snapshot_at)
