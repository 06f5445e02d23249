"""An archive as bundles: all that is archived of a tenant in one file, which a ledger takes as any bundle.

Each tenant is verified wholly first, in this process and in bounded memory; only what holds, by keys that are held, is
written. The rows, links, snapshots and the checkpoint are those of the archive; the bundle's manifest is signed again.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

from ledger.errors import ArchiveInvalidError, UnknownKeyError
from objects.store import ArchiveStore
from pipeline.archive.judging import verify_tenant
from pipeline.archive.reader import TenantArchive
from signing.bundle.writer import BundleEnd, BundleWriter
from signing.files import whole_file
from signing.keys import Keyring, Signer


class Unpacked(NamedTuple):
    """One bundle that was written: entries 1 to ``to_seq``."""

    tenant_id: str
    file: Path
    to_seq: int
    snapshots: int


async def unpack(store: ArchiveStore, tenant_id: str, folder: Path, keyring: Keyring, signer: Signer) -> Unpacked:
    """Write ``TENANT.bundle.tar`` into ``folder``, signed by ``signer``.

    Raises:
        TenantNotFoundError: there is nothing of the tenant in the archive.
        ArchiveInvalidError: what is archived of it does not hold.
        UnknownKeyError: a key that signed it is not in ``keyring``.
        ArchiveUnavailableError, SigningUnavailableError, OSError: it cannot be read, signed or written.
    """
    refuse_unless_trusted(await verify_tenant(store, tenant_id, keyring))
    archive = TenantArchive.read(store, tenant_id, keyring)
    file = folder / f"{tenant_id}.bundle.tar"
    with whole_file(file) as target:
        for piece in _pieces(archive, keyring, signer):
            target.write(piece)
    snapshots = sum(each.manifest.snapshot_count for each in archive.sealed)
    return Unpacked(tenant_id, file, archive.newest.to_seq, snapshots)


def refuse_unless_trusted(verdict: dict[str, Any]) -> None:
    """Refuse what is broken, and what no held key signed.

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


def _pieces(archive: TenantArchive, keyring: Keyring, signer: Signer) -> Iterator[bytes]:
    newest = archive.newest
    writer = BundleWriter(tenant_id=archive.tenant_id, node_id=newest.node_id, log_origin=newest.log_origin)
    with closing(writer):
        for rows in archive.entry_batches():
            yield writer.add_entries(rows)
        for rows in archive.snapshot_batches():
            writer.add_snapshots(rows)
        proof = [bytes.fromhex(each) for each in newest.consistency]
        yield from writer.finish(BundleEnd(newest.tree_root, newest.checkpoint, proof, keyring), signer)
