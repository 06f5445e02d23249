"""A run of the archive: what is chained and signed of a ledger, and not archived yet, gets there; nothing twice.

In rounds, until nothing is left, each tenant one range at a time::

    1. the last manifest of the tenant says what is archived; it is of this log, signed by a key of it, and the chain
       has its last link
    2. the plan of the next range: one that stands there without its manifest, else a new one, written first
    3. the files of entries of all plans of the round, wherever and in whatever order (pipeline.archiving.filing)
    4. the range as a whole, folded of its files as a verification folds ranges: they follow on what is archived, every
       snapshot is one of these entries; months are right, and the newest checkpoint extends the tree
    5. the file of its snapshots, and the manifest, which makes the range a part of the archive

Killed anywhere, the next run finds at 2 what it has to finish. Two runs at once write the same bytes: plans, files and
manifests are written once, and who comes second compares. A tenant whose rows, or whose part of the archive, do not
hold gets no manifest; others do. A tenant that the archive has and the ledger has no more is one of those.
"""

from __future__ import annotations

import io
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Final, NamedTuple

import msgspec

from ledger.errors import (
    ArchiveConflictError,
    ArchiveInvalidError,
    BrokenRangeError,
    InvalidInputError,
    TenantNotFoundError,
    UnknownKeyError,
)
from ledger.verification.verdict import Break
from objects.store import ArchiveStore
from pipeline.archive.layout import MANIFEST_BYTES_MAX, manifest_path
from pipeline.archive.manifest import FORM, Manifest, SealedManifest, open_manifest
from pipeline.archive.reader import newest_manifest, tenants_of
from pipeline.archiving.filing import (
    FileAll,
    FiledEntries,
    FileTask,
    Outcome,
    UnjudgedBreak,
    found_in,
)
from pipeline.archiving.plan import Plan, next_plan
from pipeline.archiving.postgres import Ledger, SignedEnd
from pipeline.archiving.whole import manifest_of, whole
from signing.keys import Keyring, Signer

ROUND_FILES_MAX: Final = 512
"""A round is closed by the plan that takes it to so many files, of each of which a summary of some 400 kB is held."""


class Archived(NamedTuple):
    """What a run did for one tenant: entries ``from_seq..to_seq`` are new in the archive, none when it ends below."""

    tenant_id: str
    from_seq: int
    to_seq: int
    files: int
    bytes: int
    first_break: Break | None
    """What is wrong with the rows behind ``to_seq``; none of those is archived."""
    unsigned: int = 0
    """Entries behind ``to_seq`` that are sound as far as is known, and stay behind until a snapshot signs them."""


class Run:
    """One run. ``archive`` MUST be called once."""

    def __init__(
        self, ledger: Ledger, store: ArchiveStore, signer: Signer, keyring: Keyring, file_all: FileAll
    ) -> None:
        """``keyring`` holds the keys that may have signed the ledger, and what is archived already."""
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
            TenantNotFoundError: one of them has nothing that is signed, nor archived.
            ArchiveUnavailableError, DatabaseUnavailableError, SigningUnavailableError: one of them does not answer.
        """
        self._store.prepare()
        waiting = {each.tenant_id: each for each in self._ledger.signed(tenants)}
        last_seqs = {each.tenant_id: each.last_seq for each in waiting.values()}
        unsigned = self._ledger.unsigned() if tenants is None else {}
        archived = tenants_of(self._store)
        gone = [each for each in archived if each not in waiting and (tenants is None or each in tenants)]
        unsigned = {tenant_id: last_seq for tenant_id, last_seq in unsigned.items() if tenant_id not in gone}
        for tenant_id in sorted(set(tenants or ()) - waiting.keys() - set(gone)):
            raise TenantNotFoundError(f"there is nothing signed of a tenant {tenant_id} that could be archived")
        for tenant_id in sorted([*waiting, *gone]):
            self._done[tenant_id] = Archived(tenant_id, 1, 0, 0, 0, None)
            with self._giving_up(tenant_id, waiting):
                last = self._last[tenant_id] = newest_manifest(self._store, tenant_id, self._keyring)
                end = 0 if last is None else last.manifest.to_seq
                self._done[tenant_id] = Archived(tenant_id, end + 1, end, 0, 0, None)
                if tenant_id not in waiting:
                    detail = f"the archive has entries up to seq {end}, and the ledger has no signed entry any more"
                    raise BrokenRangeError(Break(end, "rollback", detail))
        while waiting:
            self._round(waiting)
        for tenant_id, last_seq in unsigned.items():
            self._done.setdefault(tenant_id, Archived(tenant_id, 1, 0, 0, 0, None))
            last_seqs.setdefault(tenant_id, last_seq)
        return [self._with_unsigned(each, last_seqs.get(name, 0)) for name, each in sorted(self._done.items())]

    @staticmethod
    def _with_unsigned(done: Archived, last_seq: int) -> Archived:
        is_sound = done.first_break is None
        return done._replace(unsigned=max(0, last_seq - done.to_seq)) if is_sound else done

    def _round(self, waiting: dict[str, SignedEnd]) -> None:
        """The next range of each tenant; those that are done are not waiting any more."""
        plans: list[Plan] = []
        tasks: list[FileTask] = []
        for tenant_id, signed in list(waiting.items()):
            with self._giving_up(tenant_id, waiting):
                last = self._last[tenant_id]
                plan = next_plan(self._ledger, self._store, self._log_origin, signed, last, self._keyring)
                if plan is None:
                    del waiting[tenant_id]
                    continue
                tasks += [FileTask(name, plan.from_seq) for name in plan.entry_files]
                plans.append(plan)
            if len(tasks) >= ROUND_FILES_MAX:
                break
        outcomes = iter(self._file_all(tasks) if tasks else ())
        for plan in plans:
            filed = list(islice(outcomes, len(plan.entry_files)))
            with self._giving_up(plan.tenant_id, waiting):
                self._finish(plan, filed)

    def _finish(self, plan: Plan, filed: Sequence[Outcome]) -> None:
        found = [each for each in filed if isinstance(each, Break)]
        if found:
            raise BrokenRangeError(min(found, key=lambda each: (isinstance(each, UnjudgedBreak), each.seq)))
        entries = [each for each in filed if isinstance(each, FiledEntries)]
        last = self._last[plan.tenant_id]
        found_whole = whole(self._ledger, self._store, plan, last, entries, self._keyring)
        manifest = manifest_of(self._ledger, self._store, found_whole, self._keyring)
        self._last[plan.tenant_id] = write_manifest(self._store, manifest, self._signer, self._keyring)
        done, size = self._done[plan.tenant_id], sum(file.bytes for file in manifest.files)
        self._done[plan.tenant_id] = done._replace(
            to_seq=manifest.to_seq, files=done.files + len(manifest.files), bytes=done.bytes + size
        )

    @contextmanager
    def _giving_up(self, tenant_id: str, waiting: dict[str, SignedEnd]) -> Iterator[None]:
        """Whatever is wrong with this tenant is told of it, and others go on."""
        try:
            yield
        except BrokenRangeError as broken:
            self._give_up(tenant_id, broken.found, waiting)
        except (ArchiveConflictError, ArchiveInvalidError, InvalidInputError, UnknownKeyError) as error:
            self._give_up(tenant_id, found_in(error, self._done[tenant_id].to_seq + 1), waiting)

    def _give_up(self, tenant_id: str, found: Break, waiting: dict[str, SignedEnd]) -> None:
        self._done[tenant_id] = self._done[tenant_id]._replace(first_break=found)
        waiting.pop(tenant_id, None)


def write_manifest(store: ArchiveStore, manifest: Manifest, signer: Signer, keyring: Keyring) -> SealedManifest:
    """Sign and write it; returns the manifest that stands there, which may be of another run that was first.

    Raises:
        ArchiveConflictError: another manifest stands there.
        ArchiveInvalidError, UnknownKeyError: what stands there does not hold.
        ArchiveUnavailableError, SigningUnavailableError: one of the two does not answer.
    """
    path = manifest_path(manifest.tenant_id, manifest.from_seq, manifest.to_seq)
    data = FORM.seal(manifest, signer)
    if store.create(path, io.BytesIO(data)):
        return open_manifest(data)
    standing = store.read(path, MANIFEST_BYTES_MAX)
    if standing is None:
        raise ArchiveInvalidError(f"{path} was there and is gone")
    theirs = open_manifest(standing, keyring)
    signed = FORM.judge(theirs.envelope, keyring)
    if signed.verdict != "ok":
        raise UnknownKeyError(f"{path}: {signed.detail}")
    # A run that was first may have seen another checkpoint.
    ours = msgspec.structs.replace(
        manifest, checkpoint=theirs.manifest.checkpoint, consistency=theirs.manifest.consistency
    )
    if ours != theirs.manifest:
        raise ArchiveConflictError(f"{path} is there already and says something else: nothing was overwritten")
    return theirs
