"""Reading an archive that may come from anybody: manifests first, and files only as these name them.

Nothing is parsed before its digest, or its signature, was compared; what nobody signed, names of objects included, only
says where to look. Memory holds one row group of a file, and all manifests of a tenant with what was signed: each file
has at most ``MANIFEST_BYTES_MAX`` bytes, and about 200 for each file it names; a run makes one, and one more for every
``RANGE_ROWS_MAX`` entries.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from ledger.errors import ArchiveInvalidError, TenantNotFoundError, UnknownKeyError
from ledger.names import is_readable_tenant
from ledger.verification.entry_check import ENTRY_COLUMNS
from ledger.verification.verdict import Head
from objects.store import ArchiveStore
from pipeline.archive.manifest import (
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
from signing.keys import Keyring


def tenants_of(store: ArchiveStore) -> list[str]:
    """Every tenant that the archive has manifests of, by name; an empty folder says nothing, as buckets have none.

    Raises:
        ArchiveUnavailableError: it cannot be read.
    """
    names = filter(is_readable_tenant, store.folders(MANIFESTS))
    return [name for name in names if store.objects(manifests_of(name))]


def ranges_of(store: ArchiveStore, tenant_id: str) -> list[tuple[int, int]]:
    """First and last seq of each manifest of the tenant, as their names say, in order and without gap.

    Raises:
        ArchiveInvalidError: there is a gap, or something else among them.
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
    """The last manifest of the tenant, which a key of ``keyring`` signed; None when there is none.

    Raises:
        ArchiveInvalidError: it does not hold.
        UnknownKeyError: no key of the ring signed it.
        ArchiveUnavailableError: it cannot be read.
    """
    ranges = ranges_of(store, tenant_id)
    if not ranges:
        return None
    sealed = read(store, tenant_id, *ranges[-1], keyring)
    signed = Manifest.judge(sealed.envelope, keyring)
    if signed.verdict != "ok":
        raise UnknownKeyError(
            f"the newest manifest of tenant {tenant_id}, up to seq {ranges[-1][1]}: {signed.detail}; name the key that "
            "signed it with --keys"
        )
    return sealed


def manifests(store: ArchiveStore, tenant_id: str, keyring: Keyring | None) -> Iterator[SealedManifest]:
    """The manifests of the tenant by seq, each naming the one before it; who signed them is not judged.

    Raises:
        ArchiveInvalidError: one is missing or malformed, or does not follow.
        ArchiveSignatureError: one names a key of ``keyring`` that did not sign it.
        ArchiveUnavailableError: one cannot be read.
    """
    before: SealedManifest | None = None
    for from_seq, to_seq in ranges_of(store, tenant_id):
        sealed = read(store, tenant_id, from_seq, to_seq, keyring)
        if before is not None:
            _check_follows(before, sealed)
        yield sealed
        before = sealed


def read(
    store: ArchiveStore, tenant_id: str, from_seq: int, to_seq: int, keyring: Keyring | None = None
) -> SealedManifest:
    """The manifest of a range; raises as ``manifests`` does."""
    path = manifest_path(tenant_id, from_seq, to_seq)
    data = store.read(path, MANIFEST_BYTES_MAX)
    if data is None:
        raise ArchiveInvalidError(f"{path} is missing from the archive")
    sealed = open_manifest(data, keyring)
    manifest = sealed.manifest
    if (manifest.tenant_id, manifest.from_seq, manifest.to_seq) != (tenant_id, from_seq, to_seq):
        raise ArchiveInvalidError(f"{path} is the manifest of another range")
    return sealed


def _check_follows(before: SealedManifest, sealed: SealedManifest) -> None:
    first, then = before.manifest, sealed.manifest
    name = f"the manifest of {then.tenant_id} from seq {then.from_seq} on"
    if then.previous_manifest != before.digest:
        raise ArchiveInvalidError(f"{name} names another one before it than the one that stands there")
    if then.log_origin != first.log_origin:
        raise ArchiveInvalidError(f"{name} is of another log than the one before it")
    months = [month_order(each.parsed.month or "") for each in (first.entry_files[-1], then.entry_files[0])]
    if then.highest_physical_ms < first.highest_physical_ms or months != sorted(months):
        raise ArchiveInvalidError(f"{name} goes back in time from the one before it")


@dataclass(frozen=True)
class TenantArchive:
    """All that is archived of one tenant, as its manifests say; who signed them is not judged."""

    store: ArchiveStore
    tenant_id: str
    sealed: Sequence[SealedManifest]

    @classmethod
    def read(cls, store: ArchiveStore, tenant_id: str, keyring: Keyring | None) -> TenantArchive:
        """Read the manifests; raises as ``manifests`` does.

        Raises:
            TenantNotFoundError: there are none.
        """
        sealed = list(manifests(store, tenant_id, keyring))
        if not sealed:
            raise TenantNotFoundError(f"there is no tenant {tenant_id!r} in the archive {store.url}")
        return cls(store, tenant_id, sealed)

    @property
    def newest(self) -> Manifest:
        """The last manifest."""
        return self.sealed[-1].manifest

    def files(self, from_seq: int | None = None, to_seq: int | None = None) -> Iterator[tuple[Manifest, ArchivedFile]]:
        """The entry files that should hold entries of this range, by seq, each with its manifest."""
        for sealed in self.sealed:
            for file in sealed.manifest.entry_files:
                _, first, last, _ = file.parsed
                if (from_seq is None or last >= from_seq) and (to_seq is None or first <= to_seq):
                    yield sealed.manifest, file

    def entry_batches(self, from_seq: int | None = None, to_seq: int | None = None) -> Iterator[list[Row]]:
        """Batches of ``ENTRY_COLUMNS`` as they stand, those in the range.

        Raises:
            ArchiveInvalidError: a file is not what its manifest says.
            ArchiveUnavailableError: one cannot be read.
        """
        for _, file in self.files(from_seq, to_seq):
            for batch in entries_of(self.store, file, ENTRY_COLUMNS, {"seq": (from_seq, to_seq)}):
                yield list(rows_of(batch))

    def snapshot_batches(self) -> Iterator[list[Row]]:
        """Batches of ``SNAPSHOT_COLUMNS`` by ``from_seq``; raises as ``entry_batches``."""
        for sealed in self.sealed:
            for batch in snapshots_of(self.store, sealed.manifest.snapshot_file):
                yield list(rows_of(batch))

    def last_entry(self) -> Head:
        """The last entry there is; raises as ``entry_batches``."""
        file = self.newest.entry_files[-1]
        with opened(self.store, file, ENTRY_FILE_SCHEMA) as found:
            *_, last = batches(found, file, ("seq", "chain_link", "t_hlc"))
        return Head(*(last.column(name)[-1].as_py() for name in ("seq", "chain_link", "t_hlc")))


# --- the rows of one file -----------------------------------------------------------------------------

Bounds = Mapping[str, tuple[int | None, int | None]]
"""Lowest and highest value of columns, both included; None is no bound."""


def entries_of(
    store: ArchiveStore, file: ArchivedFile, columns: Sequence[str], bounds: Bounds
) -> Iterator[pa.RecordBatch]:
    """The rows of a file of entries as they stand, those within ``bounds``; no batch is empty.

    Raises:
        ArchiveInvalidError: it is not what its manifest says, or holds an entry later than its month: a reader that
            looks for a time passes over files of earlier months.
        ArchiveUnavailableError: it cannot be read.
    """
    with opened(store, file, ENTRY_FILE_SCHEMA) as found:
        for batch in batches(found, file, columns):
            latest = pc.max(batch.column("hlc_physical")).as_py()
            if month_order(month_of(latest)) > month_order(file.parsed.month or ""):
                raise ArchiveInvalidError(f"{file.name} holds an entry of a later month", file.parsed.from_seq)
            wanted = within(batch, bounds)
            if wanted.num_rows:
                yield wanted


def snapshots_of(store: ArchiveStore, file: ArchivedFile) -> Iterator[pa.RecordBatch]:
    """The rows of a file of snapshots as they stand; raises as ``entries_of``."""
    with opened(store, file, SNAPSHOT_FILE_SCHEMA) as found:
        yield from batches(found, file)


def within(batch: pa.RecordBatch, bounds: Bounds) -> pa.RecordBatch:
    """The rows of ``batch`` within ``bounds``."""
    for name, (low, high) in bounds.items():
        if low is not None:
            batch = batch.filter(pc.greater_equal(batch.column(name), low))
        if high is not None:
            batch = batch.filter(pc.less_equal(batch.column(name), high))
    return batch
