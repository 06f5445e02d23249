"""A run of the archive: what is chained and signed of a ledger, and not archived yet, gets there; nothing twice.

In rounds, until nothing is left, each tenant one range at a time::

    1. the last manifest of the tenant says what is archived; it is of this log, signed by a key of it, and the chain
       has its last link
    2. the plan of the next range: one that stands there without its manifest, else a new one, written first
    3. the files of all plans of the round, wherever and in whatever order (pipeline.archive.filing)
    4. the range as a whole: files follow one another, months are right, the tree has the root that the last snapshot
       claims, and the newest checkpoint extends it
    5. the manifest, which makes the range a part of the archive

Killed anywhere, the next run finds at 2 what it has to finish. Two runs at once write the same bytes: plans, files and
manifests are written once, and who comes second compares. A tenant whose rows do not hold gets no manifest; others do.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Collection, Sequence
from itertools import islice
from typing import Final, NamedTuple

from ledger import tiles
from ledger.errors import (
    ArchiveConflictError,
    ArchiveInvalidError,
    InvalidInputError,
    ProofError,
    SignatureError,
    TenantNotFoundError,
    UnknownKeyError,
)
from ledger.merkle import Frontier, verify_consistency
from ledger.subtrees import append_part
from pipeline.archive import manifest as manifests
from pipeline.archive.filing import FiledEntries, FiledSnapshots, FoundBreak
from pipeline.archive.layout import (
    FILES_MAX,
    MANIFEST_BYTES_MAX,
    PLAN_BYTES_MAX,
    RANGE_FILES,
    RANGE_ROWS_MAX,
    FileName,
    manifest_path,
    month_of,
    plan_path,
)
from pipeline.archive.manifest import Manifest, SealedManifest
from pipeline.archive.plan import Plan, cut, decode_plan, encode_plan
from pipeline.archive.postgres import Ledger, Signed
from pipeline.archive.reader import newest_manifest
from pipeline.archive.store import ArchiveStore
from signing import checkpoint as checkpoints
from signing import note
from signing.checkpoint import Checkpoint
from signing.keys import Keyring, Signer

ROUND_FILES_MAX: Final = 4 * FILES_MAX
"""A round is closed by the plan that takes it to so many files."""

Outcome = FiledEntries | FiledSnapshots | FoundBreak
FileAll = Callable[[Sequence[FileName]], Sequence[Outcome]]
"""Makes files, in any order, and gives what came of each."""


class Archived(NamedTuple):
    """What a run did for one tenant: entries ``from_seq..to_seq`` are new in the archive, none when it ends below."""

    tenant_id: str
    from_seq: int
    to_seq: int
    files: int
    bytes: int
    first_break: FoundBreak | None
    """What is wrong with the rows behind ``to_seq``; none of those is archived."""


class BrokenRangeError(Exception):
    """Rows of a range do not hold; ``found`` says which."""

    def __init__(self, seq: int, kind: str, detail: str) -> None:
        super().__init__(detail)
        self.found = FoundBreak(seq, kind, detail, {kind: 1})


class Run:
    """One run. ``archive`` MUST be called once."""

    def __init__(
        self, ledger: Ledger, store: ArchiveStore, signer: Signer, keyring: Keyring, file_all: FileAll
    ) -> None:
        """``keyring`` holds the keys that may have signed what is archived already."""
        self._ledger = ledger
        self._store = store
        self._signer = signer
        self._keyring = keyring
        self._file_all = file_all
        self._log_origin = ledger.log_origin()
        self._last: dict[str, SealedManifest | None] = {}
        self._done: dict[str, Archived] = {}

    def archive(self, tenants: Collection[str] | None = None) -> list[Archived]:
        """Archive these tenants, by default all; what was done for each, by name.

        Raises:
            TenantNotFoundError: one of them has nothing that is signed.
            ArchiveConflictError: something else stands in the archive's place.
            ArchiveInvalidError, UnknownKeyError: what is archived already does not hold.
            ArchiveUnavailableError, DatabaseUnavailableError, SigningUnavailableError: one of them does not answer.
        """
        self._store.prepare()
        waiting = {each.tenant_id: each for each in self._ledger.signed()}
        for tenant_id in sorted(set(tenants or ()) - waiting.keys()):
            raise TenantNotFoundError(f"there is nothing signed of a tenant {tenant_id} that could be archived")
        waiting = {name: signed for name, signed in waiting.items() if tenants is None or name in tenants}
        for tenant_id in waiting:
            self._last[tenant_id] = newest_manifest(self._store, tenant_id, self._keyring)
            begin = self._end_of(tenant_id)
            self._done[tenant_id] = Archived(tenant_id, begin + 1, begin, 0, 0, None)
        while waiting:
            self._round(waiting)
        return list(self._done.values())

    def _round(self, waiting: dict[str, Signed]) -> None:
        """Steps 1 to 5 for the next range of each tenant; those that are done are not waiting any more."""
        plans: list[Plan] = []
        for tenant_id, signed in list(waiting.items()):
            try:
                plan = self._next_plan(signed)
            except BrokenRangeError as broken:
                self._give_up(tenant_id, broken.found, waiting)
                continue
            if plan is None:
                del waiting[tenant_id]
                continue
            plans.append(plan)
            if sum(len(each.files) for each in plans) >= ROUND_FILES_MAX:
                break
        outcomes = iter(self._file_all([name for plan in plans for name in plan.files]) if plans else ())
        for plan in plans:
            filed = list(islice(outcomes, len(plan.files)))
            try:
                self._finish(plan, filed)
            except BrokenRangeError as broken:
                self._give_up(plan.tenant_id, broken.found, waiting)

    def _give_up(self, tenant_id: str, found: FoundBreak, waiting: dict[str, Signed]) -> None:
        self._done[tenant_id] = self._done[tenant_id]._replace(first_break=found)
        del waiting[tenant_id]

    def _end_of(self, tenant_id: str) -> int:
        last = self._last[tenant_id]
        return 0 if last is None else last.manifest.to_seq

    # --- 1. and 2. what comes next ------------------------------------------------------------------

    def _next_plan(self, signed: Signed) -> Plan | None:
        """The plan of the next range, None when there is none."""
        last = self._last[signed.tenant_id]
        if last is not None:
            self._check_follows(last.manifest)
        from_seq = self._end_of(signed.tenant_id) + 1
        checkpoint = self._checkpoint(signed.tenant_id, signed.checkpoint)
        limit = min(signed.signed_seq, 0 if checkpoint is None else checkpoint.size)
        path = plan_path(signed.tenant_id, from_seq)
        standing = self._store.read(path, PLAN_BYTES_MAX)
        if standing is None:
            if from_seq > limit:
                return None
            plan = self._new_plan(signed.tenant_id, from_seq, limit)
            if plan is None or self._store.create(path, io.BytesIO(encode_plan(plan))):
                return plan
            standing = self._store.read(path, PLAN_BYTES_MAX) or b""
        plan = decode_plan(standing)
        previous = None if last is None else last.digest
        expected = (self._log_origin, signed.tenant_id, from_seq, previous)
        if (plan.log_origin, plan.tenant_id, plan.from_seq, plan.previous_manifest) != expected or plan.to_seq > limit:
            raise ArchiveConflictError(
                f"{path} is the plan of a range that this ledger does not have ({plan.log_origin}, up to seq "
                f"{plan.to_seq}): archive to another place, or remove it if nothing was written for it"
            )
        return plan

    def _check_follows(self, manifest: Manifest) -> None:
        """The chain has what is archived, as far as its last link tells."""
        if manifest.log_origin != self._log_origin:
            raise ArchiveConflictError(
                f"what is archived of tenant {manifest.tenant_id} is of the log {manifest.log_origin}, and this "
                f"ledger's is {self._log_origin}: archive to another place"
            )
        link = self._ledger.entry_before(manifest.tenant_id, manifest.to_seq + 1).chain_link
        if link != manifest.to_chain_link:
            detail = f"the archive has the link {manifest.to_chain_link} at seq {manifest.to_seq}, the chain {link}"
            raise BrokenRangeError(manifest.to_seq, "rollback", detail)

    def _new_plan(self, tenant_id: str, from_seq: int, limit: int) -> Plan | None:
        with self._ledger.at_one_time():
            to_seq = self._range_end(tenant_id, from_seq, min(limit, from_seq - 1 + RANGE_ROWS_MAX))
            if to_seq is None or to_seq > limit:
                return None
            files = self._cut(tenant_id, from_seq, to_seq, RANGE_FILES)
            if files[-1].to_seq < to_seq and len(files) == RANGE_FILES:
                to_seq = self._range_end(tenant_id, from_seq, files[-1].to_seq) or to_seq
                files = self._cut(tenant_id, from_seq, to_seq, FILES_MAX)
        if not files or (files[0].from_seq, files[-1].to_seq) != (from_seq, to_seq):
            at = files[-1].to_seq + 1 if files and files[0].from_seq == from_seq else from_seq
            if len(files) == FILES_MAX:
                raise InvalidInputError(f"a snapshot of {tenant_id} up to seq {to_seq} needs over {FILES_MAX} files")
            raise BrokenRangeError(at, "gap", f"entries from seq {at} on are missing, and a snapshot covers them")
        last = self._last[tenant_id]
        snapshots = FileName(tenant_id, from_seq, to_seq, None)
        previous = None if last is None else last.digest
        return Plan(self._log_origin, tenant_id, from_seq, to_seq, previous, (*files, snapshots))

    def _range_end(self, tenant_id: str, from_seq: int, to_seq: int) -> int | None:
        """Where a range ends that is to end at about ``to_seq``: with a snapshot, behind it if none ends before."""
        end = self._ledger.snapshot_end(tenant_id, from_seq, to_seq)
        return end if end is not None else self._ledger.next_snapshot_end(tenant_id, from_seq)

    def _cut(self, tenant_id: str, from_seq: int, to_seq: int, files_max: int) -> list[FileName]:
        last = self._last[tenant_id]

        def first_at_or_after(from_seq: int, to_seq: int, physical_ms: int) -> tuple[int, int]:
            found = self._ledger.first_at_or_after(tenant_id, from_seq, to_seq, physical_ms)
            assert found is not None
            return found

        stretches = self._ledger.stretches(tenant_id, from_seq, to_seq)
        highest = None if last is None else last.manifest.highest_physical_ms
        return list(islice(cut(tenant_id, stretches, highest, first_at_or_after), files_max))

    # --- 4. and 5. the range as a whole -------------------------------------------------------------

    def _finish(self, plan: Plan, filed: Sequence[Outcome]) -> None:
        broken = [each for each in filed if isinstance(each, FoundBreak)]
        if broken:
            first = min(broken, key=lambda found: found.seq)
            raise BrokenRangeError(first.seq, first.kind, first.detail)
        manifest = self._manifest(
            plan,
            [each for each in filed if isinstance(each, FiledEntries)],
            next(each for each in filed if isinstance(each, FiledSnapshots)),
        )
        self._last[plan.tenant_id] = self._write(manifest)
        done = self._done[plan.tenant_id]
        size = sum(file.bytes for file in manifest.files)
        self._done[plan.tenant_id] = done._replace(
            to_seq=manifest.to_seq, files=done.files + len(manifest.files), bytes=done.bytes + size
        )

    def _manifest(self, plan: Plan, entries: Sequence[FiledEntries], snapshots: FiledSnapshots) -> Manifest:
        last = self._last[plan.tenant_id]
        before = None if last is None else last.manifest
        link = None if before is None else before.to_chain_link
        highest = entries[0].first_physical_ms if before is None else before.highest_physical_ms
        frontier = Frontier() if before is None else manifests.frontier_of(before)
        for name, filed in zip(plan.entry_files, entries, strict=True):
            if filed.prev_chain_link != link:
                detail = f"seq {name.from_seq} does not name the link of seq {name.from_seq - 1} as the one before it"
                raise BrokenRangeError(name.from_seq, "prev-link", detail)
            months = {month_of(max(highest, each)) for each in (filed.first_physical_ms, filed.highest_physical_ms)}
            if months != {name.month}:
                raise ArchiveConflictError(f"the plan of {name.path()} does not fit the entries: {sorted(months)}")
            link, highest = filed.to_chain_link, max(highest, filed.highest_physical_ms)
            append_part(frontier, name.to_seq, filed.subtrees)
        root = frontier.root()
        if (snapshots.to_chain_link, snapshots.tree_root) != (link, root.hex()):
            detail = f"the snapshot that ends at {plan.to_seq} is not of these entries"
            raise BrokenRangeError(plan.to_seq, "snapshot-root", detail)
        text, proof = self._proof(plan.tenant_id, plan.to_seq, root)
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
            checkpoint=text,
            consistency=tuple(each.hex() for each in proof),
            previous_manifest=plan.previous_manifest,
            files=(*(each.file for each in entries), snapshots.file),
        )

    def _proof(self, tenant_id: str, size: int, root: bytes) -> tuple[str, list[bytes]]:
        """The newest checkpoint, and the proof that it extends the tree of ``size`` leaves under ``root``."""
        with self._ledger.at_one_time():
            text = self._ledger.checkpoint(tenant_id)
            checkpoint = self._checkpoint(tenant_id, text)
            if text is None or checkpoint is None or checkpoint.size < size:
                raise BrokenRangeError(size, "tree", f"the newest checkpoint does not cover seq {size} any more")
            wanted = sorted(tiles.consistency_tiles(size, checkpoint.size))
            stored = self._ledger.tiles(tenant_id, wanted)
        try:
            proof = tiles.consistency_proof(size, checkpoint.size, lambda level, index: stored.get((level, index), b""))
            verify_consistency(size, checkpoint.size, root, checkpoint.root, proof)
        except ProofError as error:
            detail = f"the newest checkpoint is not shown to extend these entries: {error}"
            raise BrokenRangeError(size, "tree", detail) from error
        return text, proof

    def _checkpoint(self, tenant_id: str, text: str | None) -> Checkpoint | None:
        if text is None:
            return None
        try:
            checkpoint = checkpoints.parse(note.parse(text).text)
        except SignatureError as error:
            raise BrokenRangeError(1, "tree", f"the newest checkpoint is malformed: {error}") from error
        if checkpoint.origin != f"{self._log_origin}/{tenant_id}":
            raise BrokenRangeError(1, "tree", f"the newest checkpoint is of log {checkpoint.origin[:200]!r}")
        return checkpoint

    def _write(self, manifest: Manifest) -> SealedManifest:
        """Step 5; returns the manifest that stands there, which may be of another run that was first."""
        path = manifest_path(manifest.tenant_id, manifest.from_seq, manifest.to_seq)
        data = manifests.seal(manifest, self._signer)
        if self._store.create(path, io.BytesIO(data)):
            return manifests.open_manifest(data)
        standing = self._store.read(path, MANIFEST_BYTES_MAX)
        if standing is None:
            raise ArchiveInvalidError(f"{path} was there and is gone")
        theirs = manifests.open_manifest(standing, self._keyring)
        signed = manifests.judge(theirs.envelope, self._keyring)
        if signed.verdict != "ok":
            raise UnknownKeyError(f"{path}: {signed.detail}")
        # A run that was first may have seen another checkpoint.
        ours = manifest._replace(checkpoint=theirs.manifest.checkpoint, consistency=theirs.manifest.consistency)
        if ours != theirs.manifest:
            raise ArchiveConflictError(f"{path} is there already and says something else: nothing was overwritten")
        return theirs
