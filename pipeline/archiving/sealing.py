"""The manifest of a range whose files are there: the range as a whole is judged, then signed and written once."""

from __future__ import annotations

import io
from collections.abc import Sequence

from ledger.errors import ArchiveConflictError, ArchiveInvalidError, BrokenRangeError, ProofError, UnknownKeyError
from ledger.merkle import Frontier, tiles, verify_consistency
from ledger.merkle.subtrees import append_part
from ledger.verification.verdict import Break
from pipeline.archive import manifest as manifests
from pipeline.archive.layout import MANIFEST_BYTES_MAX, manifest_path, month_of
from pipeline.archive.manifest import Manifest, SealedManifest
from pipeline.archive.store import ArchiveStore
from pipeline.archiving.filing import FiledEntries, FiledSnapshots
from pipeline.archiving.next_range import checkpoint_of
from pipeline.archiving.plan import Plan
from pipeline.archiving.postgres import Ledger
from signing.keys import Keyring, Signer


def manifest_of(
    ledger: Ledger,
    plan: Plan,
    last: SealedManifest | None,
    entries: Sequence[FiledEntries],
    snapshots: FiledSnapshots,
    keyring: Keyring,
) -> Manifest:
    """The manifest of the range of ``plan``, which follows on ``last``: its files follow one another, their months are
    right, the tree has the root that the snapshots were compared with, and the newest checkpoint extends it.

    Raises:
        BrokenRangeError: one of these is not so.
        ArchiveConflictError: the plan is not one of these entries.
    """
    before = None if last is None else last.manifest
    link = None if before is None else before.to_chain_link
    highest = entries[0].first_physical_ms if before is None else before.highest_physical_ms
    frontier = Frontier() if before is None else manifests.frontier_of(before)
    for name, filed in zip(plan.entry_files, entries, strict=True):
        if filed.prev_chain_link != link:
            detail = f"seq {name.from_seq} does not name the link of seq {name.from_seq - 1} as the one before it"
            raise BrokenRangeError(Break(name.from_seq, "prev-link", detail))
        months = {month_of(max(highest, each)) for each in (filed.first_physical_ms, filed.highest_physical_ms)}
        if months != {name.month}:
            raise ArchiveConflictError(f"the plan of {name.path()} does not fit the entries: {sorted(months)}")
        link, highest = filed.to_chain_link, max(highest, filed.highest_physical_ms)
        append_part(frontier, name.to_seq, filed.subtrees)
    root = frontier.root()
    if (snapshots.to_chain_link, snapshots.tree_root) != (link, root.hex()):
        detail = f"the snapshot that ends at {plan.to_seq} is not of these entries"
        raise BrokenRangeError(Break(plan.to_seq, "snapshot-root", detail))
    checkpoint, proof = _checkpoint(ledger, plan, root, keyring)
    return Manifest(
        node_id=snapshots.node_id,
        log_origin=plan.log_origin,
        tenant_id=plan.tenant_id,
        from_seq=plan.from_seq,
        to_seq=plan.to_seq,
        from_chain_link=entries[0].from_chain_link,
        to_chain_link=entries[-1].to_chain_link,
        first_hlc=entries[0].first_hlc,
        last_hlc=entries[-1].last_hlc,
        highest_physical_ms=highest,
        entry_count=plan.to_seq - plan.from_seq + 1,
        snapshot_count=snapshots.file.rows,
        tree_size=plan.to_seq,
        tree_root=root.hex(),
        frontier=tuple(each.hex() for each in frontier.hashes),
        checkpoint=checkpoint,
        consistency=tuple(each.hex() for each in proof),
        previous_manifest=plan.previous_manifest,
        files=(*(each.file for each in entries), snapshots.file),
    )


def write_manifest(store: ArchiveStore, manifest: Manifest, signer: Signer, keyring: Keyring) -> SealedManifest:
    """Sign and write it; returns the manifest that stands there, which may be of another run that was first.

    Raises:
        ArchiveConflictError: another manifest stands there.
        ArchiveInvalidError, UnknownKeyError: what stands there does not hold.
        ArchiveUnavailableError, SigningUnavailableError: one of the two does not answer.
    """
    path = manifest_path(manifest.tenant_id, manifest.from_seq, manifest.to_seq)
    data = manifests.seal(manifest, signer)
    if store.create(path, io.BytesIO(data)):
        return manifests.open_manifest(data)
    standing = store.read(path, MANIFEST_BYTES_MAX)
    if standing is None:
        raise ArchiveInvalidError(f"{path} was there and is gone")
    theirs = manifests.open_manifest(standing, keyring)
    signed = manifests.judge(theirs.envelope, keyring)
    if signed.verdict != "ok":
        raise UnknownKeyError(f"{path}: {signed.detail}")
    # A run that was first may have seen another checkpoint.
    ours = manifest._replace(checkpoint=theirs.manifest.checkpoint, consistency=theirs.manifest.consistency)
    if ours != theirs.manifest:
        raise ArchiveConflictError(f"{path} is there already and says something else: nothing was overwritten")
    return theirs


def _checkpoint(ledger: Ledger, plan: Plan, root: bytes, keyring: Keyring) -> tuple[str, list[bytes]]:
    """The newest checkpoint, and the proof that it extends the tree under ``root``, which ends with the range."""
    tenant_id, size = plan.tenant_id, plan.to_seq
    with ledger.at_one_time():
        text = ledger.checkpoint(tenant_id)
        checkpoint = None if text is None else checkpoint_of(plan.log_origin, tenant_id, text, keyring)
        if text is None or checkpoint is None or checkpoint.size < size:
            raise BrokenRangeError(Break(size, "tree", f"the newest checkpoint does not cover seq {size} any more"))
        stored = ledger.tiles(tenant_id, sorted(tiles.consistency_tiles(size, checkpoint.size)))
    try:
        proof = tiles.consistency_proof(size, checkpoint.size, lambda level, index: stored.get((level, index), b""))
        verify_consistency(size, checkpoint.size, root, checkpoint.root, proof)
    except ProofError as error:
        detail = f"the newest checkpoint is not shown to extend these entries: {error}"
        raise BrokenRangeError(Break(size, "tree", detail)) from error
    return text, proof
