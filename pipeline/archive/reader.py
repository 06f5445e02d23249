"""Reading an archive that may come from anybody: manifests first, and files only as these name them.

Nothing is parsed before its digest, or its signature, was compared; what nobody signed, names of objects included, only
says where to look. Memory holds one manifest at a time for as many as there are, and one row group of a file.
"""

from __future__ import annotations

from collections.abc import Iterator

from ledger.errors import ArchiveInvalidError, UnknownKeyError
from ledger.names import is_readable_tenant
from pipeline.archive.layout import MANIFEST_BYTES_MAX, MANIFESTS, manifest_path, manifest_range, manifests_of
from pipeline.archive.manifest import SealedManifest, judge, open_manifest
from pipeline.archive.store import ArchiveStore
from signing.keys import Keyring


def tenants_of(store: ArchiveStore) -> list[str]:
    """Every tenant that the archive has manifests of, by name.

    Raises:
        ArchiveUnavailableError: it cannot be read.
    """
    return [name for name in store.folders(MANIFESTS) if is_readable_tenant(name)]


def ranges_of(store: ArchiveStore, tenant_id: str) -> list[tuple[int, int]]:
    """First and last seq of each manifest of the tenant, as their names say, in order and without gap.

    Raises:
        ArchiveInvalidError: there is a gap, or something else among them.
        ArchiveUnavailableError: they cannot be read.
    """
    ranges = sorted(manifest_range(each.name) for each in store.objects(manifests_of(tenant_id)))
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
    signed = judge(sealed.envelope, keyring)
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
    if then.highest_physical_ms < first.highest_physical_ms:
        raise ArchiveInvalidError(f"{name} has a lower highest_physical_ms than the one before it")
