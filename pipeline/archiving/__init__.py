"""An archive run: entries that are chained, signed and not archived yet are archived, none twice.

A run works in rounds, one range of each tenant a round, until nothing is left. Several ledgers, each with its own
archive, go through their rounds together::

    1. the last manifest of the tenant says what is archived; it is of this log, signed by a key of it, and the chain
       has its last link
    2. the plan of the next range: an existing one without a manifest, else a new one, written first
    3. the files of entries of all plans of the round, wherever and in whatever order (pipeline.archiving.filing)
    4. the range as a whole, folded of its files as a verification folds ranges: they follow on what is archived, every
       snapshot is one of these entries; months are right, and the newest checkpoint extends the tree
    5. the file of its snapshots, and the manifest, which makes the range a part of the archive

If a run is killed, step 2 of the next run finds the unfinished plan. Concurrent runs write the same bytes: plans,
files and manifests are written once, and the second run compares. A tenant with invalid rows or an invalid archive
gets no manifest; other tenants do. The same holds for a tenant that the archive has and the ledger no longer has.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache, partial
from itertools import islice
from types import MappingProxyType
from typing import Final, NamedTuple

import msgspec
import pyarrow.parquet as pq
from msgspec import UNSET

from ledger.errors import (
    ArchiveConflictError,
    ArchiveInvalidError,
    BrokenRangeError,
    InvalidInputError,
    ProofError,
    SignatureError,
    TenantNotFoundError,
    UnknownKeyError,
    reported_as,
)
from ledger.merkle import tiles, verify_consistency
from ledger.verification.range_fold import ChainBounds, Fold
from ledger.verification.snapshot_check import OpenedRow, open_row
from ledger.verification.verdict import Break, Findings
from objects.store import ArchiveStore
from pipeline.archive import (
    ANCHORED_VERSION,
    FORMAT_VERSION,
    MANIFEST_BYTES_MAX,
    Manifest,
    SealedManifest,
    manifest_path,
    month_of,
    open_manifest,
    put_object,
)
from pipeline.archive.reader import last_snapshot, newest_manifest, ranges_of, read_signed, tenants_of
from pipeline.archiving.filing import (
    FileAll,
    FiledEntries,
    FileTask,
    Ledger,
    Outcome,
    SignedEnd,
    UnjudgedBreak,
    broken_at,
    file_snapshots,
    found_in,
)
from pipeline.archiving.plan import Plan, checkpoint_of, next_plan
from pipeline.arrow import rows_of
from signing import note as notes
from signing.anchors import WITNESS, BundledAnchor, StoredAnchor, as_of
from signing.checkpoint import Checkpoint, open_checkpoint
from signing.keys import Keyring, Signer
from signing.note import WitnessKey, cosignatures_of
from signing.snapshot import open_snapshot

ROUND_FILES_MAX: Final = 512
"""A round ends with the plan that reaches this many files. Memory holds a summary of about 400 kB for each."""


_OF_ONE_TENANT: Final = (
    *(BrokenRangeError, ArchiveConflictError, ArchiveInvalidError, InvalidInputError, UnknownKeyError),
)
"""Errors of one tenant, which stop no other tenant."""


class Archived(NamedTuple):
    """Result of a run for one tenant: entries ``from_seq..to_seq`` are newly archived, if any."""

    tenant_id: str
    from_seq: int
    to_seq: int
    files: int
    bytes: int
    first_break: Break | None
    """The first break after ``to_seq``; no row after ``to_seq`` is archived."""
    unsigned: int = 0
    """Entries after ``to_seq`` without a known fault, which wait for a snapshot that signs them."""


class Run:
    """One run of one ledger into one archive. ``archive_together`` MUST be called with it once."""

    def __init__(
        self,
        ledger: Ledger,
        store: ArchiveStore,
        signer: Signer,
        keyring: Keyring,
        known: Mapping[str, SealedManifest] = MappingProxyType({}),
    ) -> None:
        """``keyring`` holds the trusted keys of the ledger and of the existing archive. ``known`` are the last
        manifests that a run before this one wrote or verified, by tenant; an outdated one is caught up with, as names
        are written once."""
        self._ledger, self._store = ledger, store
        self._signer, self._keyring = signer, keyring
        self._log_origin = ledger.log_origin()
        self._known = known
        self._last: dict[str, SealedManifest | None] = {}
        self._done: dict[str, Archived] = {}
        self._waiting: dict[str, SignedEnd] = {}
        self._last_seqs: dict[str, int] = {}
        self._plans: list[Plan] = []
        self.footers: dict[str, pq.FileMetaData] = {}
        """Of entry files that this run wrote, by name: of some, as they are a convenience."""

    @property
    def is_done(self) -> bool:
        """Whether nothing is left to archive."""
        return not self._waiting

    @property
    def last(self) -> dict[str, SealedManifest]:
        """The last manifest of each tenant that this run archived without a break."""
        return {
            tenant_id: sealed
            for tenant_id, sealed in self._last.items()
            if sealed is not None and self._done[tenant_id].first_break is None
        }

    def tenants(self) -> set[str]:
        """Every tenant of the ledger or of the archive."""
        return {*self._ledger.tenants(), *tenants_of(self._store)}

    def prepare(self) -> None:
        """Make the place of the archive ready; raises as ``archive_together``."""
        self._store.prepare()

    def begin(self, tenants: Collection[str] | None) -> None:
        """Find what is to be archived of these tenants, by default of all; raises as ``archive_together``."""
        waiting = self._waiting = {each.tenant_id: each for each in self._ledger.signed(tenants)}
        self._last_seqs = self._ledger.unsigned() if tenants is None else {}
        self._last_seqs |= {each.tenant_id: each.last_seq for each in waiting.values()}
        unseen = tenants_of(self._store) if tenants is None else [each for each in tenants if each not in waiting]
        gone = [each for each in unseen if each not in waiting and (tenants is None or ranges_of(self._store, each))]
        for tenant_id in sorted(set(tenants or ()) - waiting.keys() - set(gone)):
            raise TenantNotFoundError(f"there is nothing signed of a tenant {tenant_id} that could be archived")
        for tenant_id in sorted([*waiting, *gone]):
            self._done[tenant_id] = Archived(tenant_id, 1, 0, 0, 0, None)
            with self._giving_up(tenant_id):
                self._last[tenant_id] = last = self._last_of(tenant_id)
                end = 0 if last is None else last.manifest.to_seq
                self._done[tenant_id] = Archived(tenant_id, end + 1, end, 0, 0, None)
                if tenant_id not in waiting:
                    raise broken_at(
                        end,
                        "rollback",
                        f"the archive has entries up to seq {end}, and the ledger has no signed entry any more",
                    )

    def _last_of(self, tenant_id: str) -> SealedManifest | None:
        """The last manifest. The known one must be there still: a range behind one that is lost would be a gap."""
        if (known := self._known.get(tenant_id)) is None:
            return newest_manifest(self._store, tenant_id, self._keyring)
        bounds = known.manifest.from_seq, known.manifest.to_seq
        if read_signed(self._store, tenant_id, bounds, self._keyring).digest != known.digest:
            raise ArchiveInvalidError(f"{manifest_path(tenant_id, *bounds)} is another one than was written")
        return known

    def plan(self) -> list[FileTask]:
        """The files of the next range of each tenant; finished tenants leave the waiting list."""
        tasks: list[FileTask] = []
        self._plans = []
        for tenant_id, signed in list(self._waiting.items()):
            with self._giving_up(tenant_id):
                plan = None if self._is_at_end(signed) else self._next_plan(signed)
                if plan is None:
                    del self._waiting[tenant_id]
                    continue
                where = self._ledger.state.dsn, self._store.url, self._store.lock
                tasks += [FileTask(name, plan.from_seq, *where) for name in plan.entry_files]
                self._plans.append(plan)
            if len(tasks) >= ROUND_FILES_MAX:
                break
        return tasks

    def _is_at_end(self, signed: SignedEnd) -> bool:
        """Whether this run archived all that was signed, and no other run was faster, which may have found more."""
        done, last = self._done[signed.tenant_id], self._last[signed.tenant_id]
        is_ours = last is not None and last.last_snapshot is not None
        return done.files > 0 and done.to_seq == signed.signed_seq and is_ours

    def _next_plan(self, signed: SignedEnd) -> Plan | None:
        last = self._last[signed.tenant_id]
        return next_plan(self._ledger, self._store, self._log_origin, signed, last, self._keyring)

    def finish(self, outcomes: Iterator[Outcome]) -> None:
        """Seal the planned ranges; ``outcomes`` begins with those of their files."""
        for plan in self._plans:
            filed = list(islice(outcomes, len(plan.entry_files)))
            with self._giving_up(plan.tenant_id):
                self._finish(plan, filed)

    def results(self) -> list[Archived]:
        """The result for each tenant, by name."""
        for tenant_id in self._last_seqs:
            self._done.setdefault(tenant_id, Archived(tenant_id, 1, 0, 0, 0, None))
        return [
            done
            if done.first_break is not None
            else done._replace(unsigned=max(0, self._last_seqs.get(name, 0) - done.to_seq))
            for name, done in sorted(self._done.items())
        ]

    def extend_table(self) -> None:
        """Append to the archive's table the files of the tenants that were archived without a break; raises as
        ``TableWriter.extend``."""
        # Imported here, because tasks import this package and write no table.
        from pipeline.archive.table_writer import TableWriter

        TableWriter(self._store, self._log_origin).extend(self.last, self._signer, self._keyring, self.footers)

    def _finish(self, plan: Plan, filed: Sequence[Outcome]) -> None:
        if found := [each for each in filed if isinstance(each, Break)]:
            raise BrokenRangeError(min(found, key=lambda each: (isinstance(each, UnjudgedBreak), each.seq)))
        entries = [each for each in filed if isinstance(each, FiledEntries)]
        before = self._last[plan.tenant_id]
        manifest, last_snapshot = manifest_of(self._ledger, self._store, plan, before, entries, self._keyring)
        sealed = write_manifest(self._store, manifest, self._signer, self._keyring)
        is_ours = sealed.manifest is manifest
        self._last[plan.tenant_id] = sealed._replace(last_snapshot=last_snapshot if is_ours else None)
        if len(self.footers) < ROUND_FILES_MAX:
            self.footers |= {each.file.name: each.footer for each in entries if each.file and each.footer}
        done, size = self._done[plan.tenant_id], sum(file.bytes for file in manifest.files)
        self._done[plan.tenant_id] = done._replace(
            to_seq=manifest.to_seq, files=done.files + len(manifest.files), bytes=done.bytes + size
        )

    @contextmanager
    def _giving_up(self, tenant_id: str) -> Iterator[None]:
        """Record an error of this tenant in its result, so that other tenants continue."""
        try:
            yield
        except _OF_ONE_TENANT as error:
            done = self._done[tenant_id]
            found = error.found if isinstance(error, BrokenRangeError) else found_in(error, done.to_seq + 1)
            self._done[tenant_id] = done._replace(first_break=found)
            self._waiting.pop(tenant_id, None)


def archive_together(
    runs: Sequence[Run], file_all: FileAll, tenants: Collection[str] | None = None
) -> list[list[Archived]]:
    """Archive these tenants of the ledgers of ``runs``, by default all; returns the results of each run. The files of
    one round are made together, whatever ledgers they are of. Of several ledgers, each archives the tenants it has.

    Raises:
        TenantNotFoundError: a tenant has nothing signed and nothing archived.
        ArchiveUnavailableError, DatabaseUnavailableError, SigningUnavailableError: a service does not answer.
    """
    for run in runs:
        run.prepare()
    of_runs = [tenants if tenants is None or len(runs) == 1 else run.tenants() & {*tenants} for run in runs]
    for tenant_id in sorted({*(tenants or ())} - {each for some in of_runs for each in some or ()}):
        raise TenantNotFoundError(f"none of {len(runs)} ledgers has a tenant {tenant_id}")
    for run, some in zip(runs, of_runs, strict=True):
        if some is None or some:
            run.begin(some)
    while waiting := [run for run in runs if not run.is_done]:
        tasks: list[FileTask] = []
        planned: list[Run] = []
        for run in waiting:
            if len(tasks) < ROUND_FILES_MAX:
                tasks += run.plan()
                planned.append(run)
        outcomes = iter(file_all(tasks) if tasks else ())
        for run in planned:
            run.finish(outcomes)
    return [run.results() for run in runs]


def write_manifest(store: ArchiveStore, manifest: Manifest, signer: Signer, keyring: Keyring) -> SealedManifest:
    """Sign and write the manifest; returns the stored manifest, which another run may have written first.

    Raises:
        ArchiveConflictError: a different manifest exists.
        ArchiveInvalidError, UnknownKeyError: the existing manifest is invalid, or its key is unknown.
        ArchiveUnavailableError, SigningUnavailableError: one of the two does not answer.
    """
    path = manifest_path(manifest.tenant_id, manifest.from_seq, manifest.to_seq)
    data = manifest.seal(signer)
    if put_object(store, path, data):
        return SealedManifest(manifest, Manifest.open_envelope(data))
    if (standing := store.read(path, MANIFEST_BYTES_MAX)) is None:
        raise ArchiveInvalidError(f"{path} was there and is gone")
    theirs = open_manifest(standing, keyring)
    signed = Manifest.judge(theirs.envelope, keyring)
    if signed.verdict != "ok":
        raise UnknownKeyError(f"{path}: {signed.detail}")
    # The run that wrote it may have used another checkpoint, and other cosignatures.
    said = theirs.manifest
    ours = msgspec.structs.replace(
        manifest,
        checkpoint=said.checkpoint,
        consistency=said.consistency,
        anchors=said.anchors,
        format_version=said.format_version,
    )
    if ours != theirs.manifest:
        raise ArchiveConflictError(f"{path} is there already and says something else: nothing was overwritten")
    return theirs


# --- a range as a whole ---------------------------------------------------------------------------


def manifest_of(
    ledger: Ledger,
    store: ArchiveStore,
    plan: Plan,
    before: SealedManifest | None,
    entries: Sequence[FiledEntries],
    keyring: Keyring,
) -> tuple[Manifest, str]:
    """The manifest of the range of ``plan``, which follows ``before``, and the digest of its last snapshot. Its
    snapshots are in the archive on return. ``keyring`` has the keys trusted for them.

    Raises:
        BrokenRangeError: an entry or a snapshot is invalid or missing, or the checkpoint does not extend their tree.
        ArchiveConflictError: the plan does not fit these entries, or a different snapshot file exists.
        ArchiveInvalidError: an earlier archived file differs from its manifest.
        InvalidInputError: a snapshot holds a forbidden value.
    """
    # 1. The snapshots, few enough for memory: the verified rows are the rows that are written.
    batches = list(ledger.snapshots(plan.tenant_id, plan.from_seq, plan.to_seq))
    findings, opener = Findings(), partial(open_snapshot, keyring=keyring)
    opened = [open_row(row, opener, findings) for batch in batches for row in rows_of(batch)]
    # 2. All of it together.
    fold = _folded(store, plan, before, entries, opened, findings)
    # 3. The months.
    highest = _highest_time(plan, before, entries)
    # 4. The newest checkpoint.
    claim, digest, tree, last = opened[-1].claim, opened[-1].digest, fold.frontier, fold.verdict().head
    assert claim is not None
    assert digest is not None
    assert tree is not None
    proved = _proved_checkpoint(ledger, plan, before, tree.root(), keyring)
    # 5. The file of snapshots.
    files = [each.file for each in entries if each.file is not None]
    assert len(files) == len(entries), "what holds was written"
    snapshots = file_snapshots(store, plan.snapshot_file, batches)
    manifest = Manifest(
        node_id=claim.node_id,
        log_origin=plan.log_origin,
        tenant_id=plan.tenant_id,
        from_seq=plan.from_seq,
        to_seq=plan.to_seq,
        from_chain_link=entries[0].first["chain_link"],
        to_chain_link=str(last.chain_link),
        first_hlc=entries[0].first["t_hlc"],
        last_hlc=str(last.hlc),
        highest_physical_ms=highest,
        entry_count=plan.to_seq - plan.from_seq + 1,
        snapshot_count=snapshots.rows,
        tree_size=plan.to_seq,
        tree_root=tree.root().hex(),
        frontier=tuple(each.hex() for each in tree.hashes),
        checkpoint=proved.checkpoint,
        consistency=tuple(each.hex() for each in proved.consistency),
        extends=tuple(each.hex() for each in proved.extends),
        previous_manifest=plan.previous_manifest,
        files=(*files, snapshots),
        anchors=tuple(proved.anchors) or UNSET,
        format_version=ANCHORED_VERSION if proved.anchors else FORMAT_VERSION,
    )
    return manifest, digest


def _tree_of(manifest: Manifest) -> tuple[int, bytes]:
    return manifest.tree_size, bytes.fromhex(manifest.tree_root)


def _folded(
    store: ArchiveStore,
    plan: Plan,
    before: SealedManifest | None,
    entries: Sequence[FiledEntries],
    snapshots: Sequence[OpenedRow],
    findings: Findings,
) -> Fold:
    ends = ChainBounds(plan.tenant_id, None, None, first_seq=plan.from_seq, is_to_end=False)
    if before is not None:
        ends = ends._replace(
            expected_prev=before.manifest.to_chain_link,
            expected_snapshot=before.last_snapshot or last_snapshot(store, before.manifest),
            expected_frontier=tuple(map(bytes.fromhex, before.manifest.frontier)),
        )
    fold = Fold(ends, findings)
    for name, filed in zip(plan.entry_files, entries, strict=True):
        filed.summary.snapshots[:] = [each for each in snapshots if name.from_seq <= each.stored_from <= name.to_seq]
        fold.add(filed.summary)
    fold.close()
    if (found := worst(findings)) is not None:
        raise BrokenRangeError(found)
    end_seq, signed_end = fold.verdict().to_seq, fold.verdict().signed_to.seq
    if end_seq < plan.to_seq:
        raise broken_at(
            end_seq + 1, "gap", f"entries from seq {end_seq + 1} on are missing, and a snapshot covers them"
        )
    if signed_end < plan.to_seq:
        raise broken_at(signed_end + 1, "snapshot-chain", f"the snapshots end at {signed_end} and not at {plan.to_seq}")
    return fold


def _highest_time(plan: Plan, before: SealedManifest | None, entries: Sequence[FiledEntries]) -> int:
    """Check the month of each file; returns the highest hlc_physical so far, earlier ranges included."""
    highest = 0 if before is None else before.manifest.highest_physical_ms
    for name, filed in zip(plan.entry_files, entries, strict=True):
        months = {month_of(max(highest, each)) for each in (filed.first["hlc_physical"], filed.highest_physical_ms)}
        if months != {name.month}:
            raise ArchiveConflictError(f"the plan of {name.path()} does not fit the entries: {sorted(months)}")
        highest = max(highest, filed.highest_physical_ms)
    return highest


def worst(findings: Findings) -> Break | None:
    """The break to report. A break by an unknown key is reported only if there is no other."""
    if (first := findings.first_break()) is None or findings.verdicts()["signatures"] != "unknown_key":
        return first
    others = [each for each in findings.found.first.values() if each.kind != "snapshot-signature"]
    return min(others, key=lambda each: each.seq, default=UnjudgedBreak(*first))


class _ProvedCheckpoint(NamedTuple):
    """The newest checkpoint, and what connects it with the range."""

    checkpoint: str
    consistency: list[bytes]
    """That it extends the tree at the end of the range."""
    extends: list[bytes]
    """That this tree extends the one at the end of the range before."""
    anchors: list[BundledAnchor]
    """The newest cosignature of each witness on a tree between both."""


def _proved_checkpoint(
    ledger: Ledger, plan: Plan, before: SealedManifest | None, root: bytes, keyring: Keyring
) -> _ProvedCheckpoint:
    """The newest checkpoint. ``root`` is that of the tree at the end of the range, which follows ``before``."""
    tenant_id, size = plan.tenant_id, plan.to_seq
    tile = cache(partial(ledger.tile, tenant_id))
    with ledger.at_one_time():
        text = next((each.checkpoint for each in ledger.sealed(tenant_id)), None)
        checkpoint = None if text is None else checkpoint_of(plan.log_origin, tenant_id, text, keyring)
        if text is None or checkpoint is None or checkpoint.size < size:
            raise broken_at(size, "tree", f"the newest checkpoint does not cover seq {size} any more")
        proof = _proof((size, root), (checkpoint.size, checkpoint.root), tile)
        cosigned = ledger.cosignatures_between(tenant_id, size, checkpoint.size)
        anchors = [each for key, note in cosigned for each in _anchor(key, note, checkpoint, keyring, tile)]
    extends = [] if before is None else _proof(_tree_of(before.manifest), (size, root), tile)
    return _ProvedCheckpoint(text, proof, extends, anchors)


def _anchor(key: str, note: str, own: Checkpoint, keyring: Keyring, tile: tiles.GetTile) -> Iterator[BundledAnchor]:
    """A stored cosignature with the proof that the checkpoint ``own`` extends its tree; nothing if it does not hold."""
    with suppress(SignatureError, BrokenRangeError, InvalidInputError, ValueError):
        witness = WitnessKey.parse(key)
        (found,) = cosignatures_of(notes.parse(note), [witness])
        signed = open_checkpoint(note, as_of(keyring, found.time), origin=own.origin)
        proof = _proof((signed.size, signed.root), (own.size, own.root), tile)
        yield StoredAnchor(WITNESS, key, note, signed.size, found.time).bundled(proof)


def _proof(first: tuple[int, bytes], second: tuple[int, bytes], tile: tiles.GetTile) -> list[bytes]:
    """The proof, of stored tiles, that the second of two trees, by size and root, extends the first."""
    with reported_as(
        partial(broken_at, first[0], "tree"), "the stored tree is not shown to extend these entries", ProofError
    ):
        proof = tiles.consistency_proof(first[0], second[0], tile)
        verify_consistency(first[0], second[0], first[1], second[1], proof)
    return proof
