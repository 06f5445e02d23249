"""Reading an untrusted archive: manifests first, then only the files that they name.

An object is parsed only after its digest or its signature was compared. Unsigned data, names of objects included,
only serves to locate objects. Memory holds one row group of a file and all manifests of a tenant with their signed
payloads. A manifest has at most ``MANIFEST_BYTES_MAX`` bytes, about 200 for each file it names; a run writes one,
and one more for every ``RANGE_ROWS_MAX`` entries.

The verification of a tenant starts with ``ArchiveJudge.judge``, verifies the rows as ``ledger.verification`` does,
and ends with ``ArchiveJudge.verdict``. Its verdict object is that of a chain plus the aspect ``archive``: manifests,
digests, files and checkpoints. If that aspect is broken, nothing else is checked. Keys come from the caller alone;
an archive holds none. ``verify_tenant`` runs this verification in one process.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
from msgspec import UNSET

from ledger.errors import (
    ArchiveInvalidError,
    ArchiveSignatureError,
    LedgerError,
    ProofError,
    SeqOutOfRangeError,
    SignatureError,
    TenantNotFoundError,
    UnknownKeyError,
    reported_as,
)
from ledger.names import is_readable_tenant
from ledger.verification import verify
from ledger.verification.entry_check import ENTRY_COLUMNS
from ledger.verification.reader import ChainReader
from ledger.verification.tree_check import StoredTree, TreeHead
from ledger.verification.verdict import ASPECTS, Anchor, Break, Head
from objects.store import ArchiveStore
from pipeline.archive import (
    MANIFEST_BYTES_MAX,
    MANIFESTS,
    ArchivedFile,
    Manifest,
    SealedManifest,
    manifest_path,
    manifest_range,
    manifests_of,
    month_of,
    month_order,
    open_manifest,
)
from pipeline.archive.parquet import ENTRY_FILE_SCHEMA, SNAPSHOT_FILE_SCHEMA, batches, opened
from pipeline.arrow import Row, rows_of
from signing.anchors import NOBODY, ExternalWitnesses, judge_bundled
from signing.bundle.writer import BundleEnd, BundleWriter
from signing.callers import judge_of
from signing.checkpoint import judge_unvouched
from signing.checkpoint import read as read_checkpoint
from signing.keys import Keyring, Signer
from signing.manifest import judge_own_checkpoint
from signing.snapshot import open_snapshot


def tenants_of(store: ArchiveStore) -> list[str]:
    """Every tenant with manifests in the archive, by name. Empty folders are ignored, as buckets have none.

    Raises:
        ArchiveUnavailableError: it cannot be read.
    """
    return [name for name in filter(is_readable_tenant, store.folders(MANIFESTS)) if store.objects(manifests_of(name))]


def ranges_of(store: ArchiveStore, tenant_id: str) -> list[tuple[int, int]]:
    """First and last seq of each manifest of the tenant, from their names, in order and without gap.

    Raises:
        ArchiveInvalidError: there is a gap, or an object with another name.
        ArchiveUnavailableError: they cannot be read.
    """
    ranges = sorted(manifest_range(name) for name in store.objects(manifests_of(tenant_id)))
    expected_seq = 1
    for from_seq, to_seq in ranges:
        if from_seq != expected_seq or to_seq < from_seq:
            raise ArchiveInvalidError(
                f"of tenant {tenant_id} a manifest begins at seq {from_seq} where one from {expected_seq} must follow"
            )
        expected_seq = to_seq + 1
    return ranges


def newest_manifest(store: ArchiveStore, tenant_id: str, keyring: Keyring) -> SealedManifest | None:
    """The last manifest of the tenant, signed by a key of ``keyring``; None if there is none.

    Raises:
        ArchiveInvalidError: the manifest is invalid.
        UnknownKeyError: no key of the ring signed it.
        ArchiveUnavailableError: it cannot be read.
    """
    ranges = ranges_of(store, tenant_id)
    return read_signed(store, tenant_id, ranges[-1], keyring) if ranges else None


def read_signed(store: ArchiveStore, tenant_id: str, bounds: tuple[int, int], keyring: Keyring) -> SealedManifest:
    """The manifest of a range, signed by a key of ``keyring``; raises as ``newest_manifest``."""
    sealed = read(store, tenant_id, *bounds, keyring)
    require_signed(sealed, keyring)
    return sealed


def require_signed(sealed: SealedManifest, keyring: Keyring) -> None:
    """Raises UnknownKeyError if no key of ``keyring`` signed the manifest."""
    signed = Manifest.judge(sealed.envelope, keyring)
    if signed.verdict != "ok":
        said = sealed.manifest
        raise UnknownKeyError(
            f"the manifest of tenant {said.tenant_id}, seq {said.from_seq} to {said.to_seq}: {signed.detail}; name the "
            "key that signed it with --keys"
        )


def read(
    store: ArchiveStore, tenant_id: str, from_seq: int, to_seq: int, keyring: Keyring | None = None
) -> SealedManifest:
    """The manifest of a range; its signature may be unverified.

    Raises:
        ArchiveInvalidError: it is missing or malformed, or that of another range.
        ArchiveSignatureError: it names a key of ``keyring`` that did not sign it.
        ArchiveUnavailableError: it cannot be read.
    """
    path = manifest_path(tenant_id, from_seq, to_seq)
    if (data := store.read(path, MANIFEST_BYTES_MAX)) is None:
        raise ArchiveInvalidError(f"{path} is missing from the archive")
    sealed = open_manifest(data, keyring)
    manifest = sealed.manifest
    if (manifest.tenant_id, manifest.from_seq, manifest.to_seq) != (tenant_id, from_seq, to_seq):
        raise ArchiveInvalidError(f"{path} is the manifest of another range")
    return sealed


def check_follows(before: SealedManifest, sealed: SealedManifest) -> None:
    """Raises ArchiveInvalidError if ``sealed`` is not the manifest after ``before``."""
    first, then = before.manifest, sealed.manifest
    name = f"the manifest of {then.tenant_id} from seq {then.from_seq} on"
    if then.previous_manifest != before.digest:
        raise ArchiveInvalidError(f"{name} names another one before it than the one that stands there")
    if then.log_origin != first.log_origin:
        raise ArchiveInvalidError(f"{name} is of another log than the one before it")
    months = [month_order(each.parsed.month or "") for each in (first.entry_files[-1], then.entry_files[0])]
    if then.highest_physical_ms < first.highest_physical_ms or months != sorted(months):
        raise ArchiveInvalidError(f"{name} goes back in time from the one before it")
    then.check_extends(first.tree_size, first.tree_root)


@dataclass(frozen=True)
class TenantArchive:
    """The archived part of one tenant according to its manifests, whose signatures may be unverified."""

    store: ArchiveStore
    tenant_id: str
    sealed: Sequence[SealedManifest]

    @classmethod
    def read(cls, store: ArchiveStore, tenant_id: str, keyring: Keyring | None) -> TenantArchive:
        """Read the manifests, each of which names the one before it; raises as ``read`` does.

        Raises:
            TenantNotFoundError: there are none.
            ArchiveInvalidError: a manifest does not follow its predecessor.
        """
        sealed = [read(store, tenant_id, *each, keyring) for each in ranges_of(store, tenant_id)]
        for before, each in pairwise(sealed):
            check_follows(before, each)
        if not sealed:
            raise TenantNotFoundError(f"there is no tenant {tenant_id!r} in the archive {store.url}")
        return cls(store, tenant_id, sealed)

    @classmethod
    def signed(cls, store: ArchiveStore, tenant_id: str, keyring: Keyring) -> TenantArchive:
        """The same of manifests that keys of ``keyring`` signed.

        Raises:
            TenantNotFoundError, ArchiveInvalidError: as ``read``.
            UnknownKeyError: no key of ``keyring`` signed a manifest.
        """
        archive = cls.read(store, tenant_id, keyring)
        for each in archive.sealed:
            require_signed(each, keyring)
        return archive

    @property
    def newest(self) -> Manifest:
        """The last manifest."""
        return self.sealed[-1].manifest

    def files(self, from_seq: int | None = None, to_seq: int | None = None) -> Iterator[tuple[Manifest, ArchivedFile]]:
        """The entry files that should hold entries of this range, by seq, each with its manifest."""
        for manifest, file in ((each.manifest, file) for each in self.sealed for file in each.manifest.entry_files):
            _, first, last, _ = file.parsed
            if (from_seq is None or last >= from_seq) and (to_seq is None or first <= to_seq):
                yield manifest, file

    def entry_batches(self, from_seq: int | None = None, to_seq: int | None = None) -> Iterator[list[Row]]:
        """Stored batches of ``ENTRY_COLUMNS`` in the range.

        Raises:
            ArchiveInvalidError: a file is not what its manifest says.
            ArchiveUnavailableError: one cannot be read.
        """
        return (
            list(rows_of(batch))
            for _, file in self.files(from_seq, to_seq)
            for batch in entries_of(self.store, file, ENTRY_COLUMNS, {"seq": (from_seq, to_seq)})
        )

    def snapshot_batches(self, from_seq: int | None = None, to_seq: int | None = None) -> Iterator[list[Row]]:
        """Batches of ``SNAPSHOT_COLUMNS`` by ``from_seq``, those wholly in the range; raises as ``entry_batches``."""
        bounds = {"from_seq": (from_seq, None), "to_seq": (None, to_seq)}
        return (
            list(rows_of(batch))
            for sealed in self.sealed
            for batch in snapshots_of(self.store, sealed.manifest.snapshot_file, bounds)
        )

    def last_entry(self) -> Head:
        """The last archived entry; raises as ``entry_batches``."""
        names = ("seq", "chain_link", "t_hlc")
        *_, last = entries_of(self.store, self.newest.entry_files[-1], (*names, "hlc_physical"), {})
        return Head(*(last.column(name)[-1].as_py() for name in names))


def cosigned(archive: TenantArchive, keyring: Keyring | None, external: ExternalWitnesses) -> tuple[Anchor, ...]:
    """The last statement of each witness in the manifests, judged. One that holds is about the first ``to_seq`` entries
    of the manifest, whose tree all larger ones extend; one that contradicts the manifest is compared with the entries
    as it stands."""
    found: dict[str, Anchor] = {}
    for manifest in (each.manifest for each in archive.sealed if external.are_any):
        for each in () if manifest.anchors is UNSET else manifest.anchors:
            anchor = judge_bundled(each, read_checkpoint(manifest.checkpoint), keyring, external)
            if anchor.status == "ok" and anchor.size >= manifest.to_seq:
                anchor = anchor._replace(size=manifest.to_seq, root=bytes.fromhex(manifest.tree_root))
            found[each.by] = anchor._replace(status="ok") if anchor.status == "broken" else anchor
    return tuple(found.values())


def last_snapshot(store: ArchiveStore, manifest: Manifest) -> str:
    """Digest of the snapshot that ends an archived range, as the archive has it.

    Raises:
        ArchiveInvalidError: the file of snapshots differs from its manifest.
    """
    *_, batch = snapshots_of(store, manifest.snapshot_file, {})
    with reported_as(partial(ArchiveInvalidError, seq=manifest.to_seq), manifest.snapshot_file.name, SignatureError):
        return open_snapshot(batch.column("dsse_envelope")[-1].as_py(), None).payload_sha256


# --- the rows of one file -----------------------------------------------------------------------------

Bounds = Mapping[str, tuple[int | None, int | None]]
"""Lowest and highest value of columns, both included; None is no bound."""


def entries_of(
    store: ArchiveStore, file: ArchivedFile, columns: Sequence[str], bounds: Bounds
) -> Iterator[pa.RecordBatch]:
    """The stored rows of a file of entries within ``bounds``; no batch is empty.

    Raises:
        ArchiveInvalidError: the file differs from its manifest, or holds an entry later than its month. A reader
            that looks for a time skips files of earlier months.
        ArchiveUnavailableError: it cannot be read.
    """
    with opened(store, file, ENTRY_FILE_SCHEMA) as found:
        for batch in batches(found, file, columns):
            latest = pc.max(batch.column("hlc_physical")).as_py()
            if month_order(month_of(latest)) > month_order(file.parsed.month or ""):
                raise ArchiveInvalidError(f"{file.name} holds an entry of a later month", file.parsed.from_seq)
            yield from _within(batch, bounds)


def snapshots_of(store: ArchiveStore, file: ArchivedFile, bounds: Bounds) -> Iterator[pa.RecordBatch]:
    """The stored rows of a file of snapshots; as ``entries_of``."""
    with opened(store, file, SNAPSHOT_FILE_SCHEMA) as found:
        for batch in batches(found, file):
            yield from _within(batch, bounds)


def _within(batch: pa.RecordBatch, bounds: Bounds) -> list[pa.RecordBatch]:
    """The rows of ``batch`` within ``bounds`` as one batch; none without rows."""
    for name, (low, high) in bounds.items():
        if low is not None:
            batch = batch.filter(pc.greater_equal(batch.column(name), low))
        if high is not None:
            batch = batch.filter(pc.less_equal(batch.column(name), high))
    return [batch] if batch.num_rows else []


# --- judging --------------------------------------------------------------------------------------


ARCHIVE: Final = "archive"
"""The aspect that archives have besides those of a chain, the kind of a break in it, and what ``compared_with`` calls
the tree heads of the manifests."""
ARCHIVE_SIGNATURE: Final = "archive-signature"
"""The kind of a break in a manifest's signature."""


OF_A_COPY: Final = (
    "that more was archived once: an archive cut off at its end is whole; compare it with its ledger",
    "job states: archives hold none, they follow from the entries",
)
"""What an archive alone leaves unchecked."""


class ArchiveJudge:
    """The verification of one tenant of an archive, around that of its rows."""

    def __init__(self, archive: TenantArchive, keyring: Keyring | None) -> None:
        """Without ``keyring`` no signature is verified, so no other finding is authenticated."""
        self._archive, self._keyring = archive, keyring
        self._unknown_manifest: tuple[int, str] | None = None
        """Seq and reason of the first manifest that no held key signed."""
        self._unknown_checkpoint: str | None = None
        self._manifest_keys: set[str] = set()

    def judge(self) -> list[TreeHead]:
        """Verify signatures and checkpoints; returns the tree heads that the rows must agree with, one a manifest.

        Raises:
            ArchiveInvalidError: a signature or checkpoint is invalid.
        """
        for manifest, envelope, _ in self._archive.sealed:
            signed = Manifest.judge(envelope, self._keyring)
            self._manifest_keys.update(signed.key_ids)
            if signed.verdict == "unknown_key" and self._unknown_manifest is None:
                self._unknown_manifest = (manifest.from_seq, signed.detail or "")
            at = f"the checkpoint in the manifest of seq {manifest.from_seq} to {manifest.to_seq}"
            with reported_as(
                partial(ArchiveInvalidError, seq=manifest.to_seq), f"{at} does not hold", SignatureError, ProofError
            ):
                _, unknown = judge_own_checkpoint(manifest, manifest.checkpoint, self._keyring)
            if unknown is not None and self._unknown_checkpoint is None:
                self._unknown_checkpoint = f"{at}: {unknown}"
        return [
            TreeHead(each.manifest.tree_size, bytes.fromhex(each.manifest.tree_root), ARCHIVE, is_own=True)
            for each in self._archive.sealed
        ]

    def verdict(self, found: dict[str, Any]) -> dict[str, Any]:
        """The whole verdict; ``found`` is the verdict object on the rows."""
        verdict = {**found}
        own = "ok" if self._keyring is not None else "not_checked"
        if self._unknown_manifest is not None:
            own, (seq, why) = "unknown_key", self._unknown_manifest
            verdict["valid"] = False
            verdict["first_break"] = (
                verdict["first_break"] or Break(seq, ARCHIVE_SIGNATURE, f"the manifest: {why}")._asdict()
            )
        verdict["verdicts"] = {ARCHIVE: own, **verdict["verdicts"]}
        judge_unvouched(verdict, self._unknown_checkpoint, self._keyring)
        return {**verdict, "not_checked": self._not_checked(), ARCHIVE: self._about()}

    def _not_checked(self) -> list[str]:
        no_key = "no key was given, so no signature was checked: the author of the files may have invented all of it"
        return [
            *([no_key] if self._keyring is None else []),
            *([self._unknown_checkpoint] if self._unknown_checkpoint else []),
            *OF_A_COPY,
        ]

    def _about(self) -> dict[str, Any]:
        newest, files = self._archive.newest, [file for each in self._archive.sealed for file in each.manifest.files]
        return {
            "url": self._archive.store.url,
            "log_origin": newest.log_origin,
            "to_seq": newest.to_seq,
            "tree_root": newest.tree_root,
            "manifests": len(self._archive.sealed),
            "newest_manifest": self._archive.sealed[-1].digest,
            "files": len(files),
            "bytes": sum(file.bytes for file in files),
            "manifest_key_ids": sorted(self._manifest_keys),
            "checkpoint": read_checkpoint(newest.checkpoint).to_json(),
        }


def broken(tenant_id: str, error: LedgerError, seconds: float) -> dict[str, Any]:
    """The verdict object on a tenant with an invalid archive, for the reason given."""
    kind = ARCHIVE_SIGNATURE if isinstance(error, ArchiveSignatureError) else ARCHIVE
    seq = error.seq if isinstance(error, ArchiveInvalidError) else 0
    return {
        "tenant_id": tenant_id,
        "valid": False,
        "entries_checked": 0,
        "from_seq": 0,
        "to_seq": 0,
        "head": Head(0, None, None)._asdict(),
        "verdicts": {ARCHIVE: "broken"} | dict.fromkeys(ASPECTS, "not_checked"),
        "first_break": Break(seq, kind, str(error))._asdict(),
        "breaks": {kind: 1},
        "compared_with": None,
        "anchors": [],
        "signed_to_seq": 0,
        "unsigned_entries": 0,
        "duration_ms": round(seconds * 1000, 1),
        "not_checked": ["the rows: the archive itself does not hold, so nothing in it says anything"],
    }


async def verify_tenant(
    store: ArchiveStore,
    tenant_id: str,
    keyring: Keyring | None,
    kept: Sequence[TreeHead] = (),
    external: ExternalWitnesses = NOBODY,
) -> dict[str, Any]:
    """The verdict object on a tenant of an archive, against the keys of ``keyring``, tree heads that were kept
    elsewhere, and the cosignatures of ``external`` witnesses.

    Raises:
        TenantNotFoundError: the archive does not have the tenant.
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
            checkpoints=[*kept, *judge.judge()],
            anchors=cosigned(archive, keyring, external),
            projection=False,
            callers=judge_of(keyring),
        )
    except ArchiveInvalidError as error:
        return broken(tenant_id, error, time.perf_counter() - began_s)
    verdict = judge.verdict(found.to_json((time.perf_counter() - began_s) * 1000))
    return external.with_quorum(verdict, found.anchors)


class ArchiveChainReader(ChainReader):
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
        return self._archive.newest.tree

    async def entries(self, from_seq: int | None, to_seq: int | None) -> AsyncIterator[Sequence[Row]]:
        """Batches of ``ENTRY_COLUMNS`` as they stand."""
        for rows in self._archive.entry_batches(from_seq, to_seq):
            yield rows

    async def snapshots(self, from_seq: int, to_seq: int | None) -> AsyncIterator[Sequence[Row]]:
        """Batches of ``SNAPSHOT_COLUMNS``, those wholly in the range."""
        for rows in self._archive.snapshot_batches(from_seq, to_seq):
            yield rows


# --- as bundles -----------------------------------------------------------------------------------


def bundle_pieces(
    store: ArchiveStore, tenant_id: str, keyring: Keyring, signer: Signer, from_seq: int | None = None
) -> Iterator[bytes]:
    """The pieces of a bundle, signed by ``signer``, of what is archived from ``from_seq`` on, by default of all. The
    archive of the tenant is verified whole before the first one.

    Raises:
        TenantNotFoundError: the archive does not have the tenant.
        SeqOutOfRangeError: the archive ends before ``from_seq``.
        ArchiveInvalidError: the archive of the tenant is invalid.
        UnknownKeyError: a key that signed it is not in ``keyring``.
        ArchiveUnavailableError, SigningUnavailableError: it cannot be read, or signed.
    """
    refuse_unless_trusted(asyncio.run(verify_tenant(store, tenant_id, keyring)))
    archive = TenantArchive.read(store, tenant_id, keyring)
    newest = archive.newest
    if (from_seq or 1) > newest.to_seq:
        raise SeqOutOfRangeError(f"the archive of tenant {tenant_id} ends at seq {newest.to_seq}", ("from_seq",))
    writer = BundleWriter(tenant_id=tenant_id, node_id=newest.node_id, log_origin=newest.log_origin)
    with closing(writer):
        for rows in archive.entry_batches(from_seq):
            yield writer.add_entries(rows)
        for rows in archive.snapshot_batches(from_seq):
            writer.add_snapshots(rows)
        proof = [bytes.fromhex(each) for each in newest.consistency]
        yield from writer.finish(BundleEnd(newest.tree_root, newest.checkpoint, proof, keyring), signer)


def refuse_unless_trusted(verdict: dict[str, Any]) -> None:
    """Reject a broken tenant, and a tenant that no held key signed.

    Raises:
        ArchiveInvalidError, UnknownKeyError: it is.
    """
    results, first = verdict["verdicts"].values(), verdict["first_break"]
    name = f"tenant {verdict['tenant_id']} of the archive"
    if "broken" in results:
        raise ArchiveInvalidError(f"{name} does not hold: {first['kind']} at seq {first['seq']}: {first['detail']}")
    if "unknown_key" in results:
        why = first["detail"] if first is not None else verdict["not_checked"][0]
        raise UnknownKeyError(f"{name}: {why}; name the keys you trust with --keys")
