"""A range that is to be archived, as a whole: its files folded as a verification folds ranges, and its manifest."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import pyarrow as pa

from ledger.errors import ArchiveConflictError, BrokenRangeError, ProofError
from ledger.merkle import Frontier, tiles, verify_consistency
from ledger.verification.range_fold import Ends, Fold
from ledger.verification.snapshot_check import open_row
from ledger.verification.verdict import Break, Findings, Head
from objects.store import ArchiveStore
from pipeline.archive.layout import month_of
from pipeline.archive.manifest import Manifest, SealedManifest
from pipeline.archiving.filing import FiledEntries, UnjudgedBreak, file_snapshots
from pipeline.archiving.plan import Plan, checkpoint_of, last_snapshot
from pipeline.archiving.postgres import Ledger
from pipeline.arrow import rows_of
from signing.keys import Keyring
from signing.snapshot import open_snapshot


class Whole(NamedTuple):
    """A range whose entries and snapshots were found to hold, and to follow on what is archived."""

    plan: Plan
    entries: Sequence[FiledEntries]
    snapshots: Sequence[pa.RecordBatch]
    node_id: str
    """Of the last snapshot."""
    last: Head
    highest_physical_ms: int
    """Of all entries up to the last, those before the range too."""
    tree: Frontier
    """Right edge of the tree up to the last entry."""


def whole(
    ledger: Ledger,
    store: ArchiveStore,
    plan: Plan,
    before: SealedManifest | None,
    entries: Sequence[FiledEntries],
    keyring: Keyring,
) -> Whole:
    """The range of ``plan``, which follows on ``before``, folded of its files; ``keyring`` has the keys that may have
    signed its snapshots.

    Raises:
        BrokenRangeError: an entry or a snapshot does not hold, or they do not go all the way.
        ArchiveConflictError: the plan is not one of these entries.
        ArchiveInvalidError: what is archived before is not what its manifest says.
    """
    ends, highest = Ends(plan.tenant_id, None, None, first_seq=plan.from_seq, is_to_end=False), 0
    if before is not None:
        manifest, highest = before.manifest, before.manifest.highest_physical_ms
        ends = ends._replace(
            expected_prev=manifest.to_chain_link,
            expected_snapshot=last_snapshot(store, manifest),
            expected_frontier=tuple(map(bytes.fromhex, manifest.frontier)),
        )
    # 1. The snapshots, few enough to be held: what is judged is what will be written.
    batches = list(ledger.snapshots(plan.tenant_id, plan.from_seq, plan.to_seq))
    findings, opener = Findings(), partial(open_snapshot, keyring=keyring)
    snapshots = [open_row(row, opener, findings) for batch in batches for row in rows_of(batch)]
    # 2. All of it together.
    fold = Fold(ends, findings)
    for name, filed in zip(plan.entry_files, entries, strict=True):
        findings.merge(filed.summary.found)
        begun = [each for each in snapshots if name.from_seq <= each.stored_from <= name.to_seq]
        fold.add(filed.summary._replace(snapshots=begun))
    fold.close()
    found = worst(findings) or _end_missing(plan, fold)
    if found is not None:
        raise BrokenRangeError(found)
    # 3. The months.
    for name, filed in zip(plan.entry_files, entries, strict=True):
        months = {month_of(max(highest, each)) for each in (filed.first["hlc_physical"], filed.highest_physical_ms)}
        if months != {name.month}:
            raise ArchiveConflictError(f"the plan of {name.path()} does not fit the entries: {sorted(months)}")
        highest = max(highest, filed.highest_physical_ms)
    claim, tree = snapshots[-1].claim, fold.frontier
    assert claim is not None
    assert tree is not None
    return Whole(plan, entries, batches, claim.node_id, fold.verdict().head, highest, tree)


def worst(findings: Findings) -> Break | None:
    """The break to tell: of keys that nobody here can judge only where there is nothing else."""
    first = findings.first_break()
    if first is None or findings.verdicts()["signatures"] != "unknown_key":
        return first
    others = [each for each in findings.found.first.values() if each.kind != "snapshot-signature"]
    return min(others, key=lambda each: each.seq, default=UnjudgedBreak(*first))


def _end_missing(plan: Plan, fold: Fold) -> Break | None:
    """What is missing at the end of a range, of which nothing is wrong as far as it goes."""
    entries_end, snapshots_end = fold.verdict().to_seq, fold.verdict().signed_to.seq
    if entries_end < plan.to_seq:
        missing = f"entries from seq {entries_end + 1} on are missing, and a snapshot covers them"
        return Break(entries_end + 1, "gap", missing)
    if snapshots_end < plan.to_seq:
        detail = f"the snapshots end at {snapshots_end} and not at {plan.to_seq}"
        return Break(snapshots_end + 1, "snapshot-chain", detail)
    return None


def manifest_of(ledger: Ledger, store: ArchiveStore, found: Whole, keyring: Keyring) -> Manifest:
    """The manifest of a range, whose snapshots are in the archive on return, once its newest checkpoint is found to
    extend its tree.

    Raises:
        BrokenRangeError: the checkpoint does not.
        ArchiveConflictError: something else stands where the snapshots are to go.
        InvalidInputError: a snapshot holds what it never may.
    """
    plan, entries, root = found.plan, found.entries, found.tree.root()
    files = [each.file for each in entries if each.file is not None]
    assert len(files) == len(entries), "what holds was written"
    checkpoint, proof = _checkpoint(ledger, plan, root, keyring)
    snapshots = file_snapshots(store, plan.files[-1], found.snapshots)
    return Manifest(
        node_id=found.node_id,
        log_origin=plan.log_origin,
        tenant_id=plan.tenant_id,
        from_seq=plan.from_seq,
        to_seq=plan.to_seq,
        from_chain_link=entries[0].first["chain_link"],
        to_chain_link=str(found.last.chain_link),
        first_hlc=entries[0].first["t_hlc"],
        last_hlc=str(found.last.hlc),
        highest_physical_ms=found.highest_physical_ms,
        entry_count=plan.to_seq - plan.from_seq + 1,
        snapshot_count=snapshots.rows,
        tree_size=plan.to_seq,
        tree_root=root.hex(),
        frontier=tuple(each.hex() for each in found.tree.hashes),
        checkpoint=checkpoint,
        consistency=tuple(each.hex() for each in proof),
        previous_manifest=plan.previous_manifest,
        files=(*files, snapshots),
    )


def _checkpoint(ledger: Ledger, plan: Plan, root: bytes, keyring: Keyring) -> tuple[str, list[bytes]]:
    """The newest checkpoint, and the proof that it extends the tree under ``root``, which ends with the range."""
    tenant_id, size = plan.tenant_id, plan.to_seq
    with ledger.at_one_time():
        text = ledger.checkpoint(tenant_id)
        checkpoint = None if text is None else checkpoint_of(plan.log_origin, tenant_id, text, keyring)
        if text is None or checkpoint is None or checkpoint.size < size:
            raise BrokenRangeError(Break(size, "tree", f"the newest checkpoint does not cover seq {size} any more"))
        try:
            proof = tiles.consistency_proof(size, checkpoint.size, partial(ledger.tile, tenant_id))
            verify_consistency(size, checkpoint.size, root, checkpoint.root, proof)
        except ProofError as error:
            detail = f"the newest checkpoint is not shown to extend these entries: {error}"
            raise BrokenRangeError(Break(size, "tree", detail)) from error
    return text, proof
