"""A run of the archive: what is chained and signed of a ledger, and not archived yet, gets there; nothing twice.

In rounds, until nothing is left, each tenant one range at a time::

    1. the last manifest of the tenant says what is archived; it is of this log, signed by a key of it, and the chain
       has its last link
    2. the plan of the next range: one that stands there without its manifest, else a new one, written first
    3. the files of all plans of the round, wherever and in whatever order (pipeline.archiving.filing)
    4. the range as a whole: files follow one another, months are right, the tree has the root that the last snapshot
       claims, and the newest checkpoint extends it
    5. the manifest, which makes the range a part of the archive

Killed anywhere, the next run finds at 2 what it has to finish. Two runs at once write the same bytes: plans, files and
manifests are written once, and who comes second compares. A tenant whose rows, or whose part of the archive, do not
hold gets no manifest; others do. A tenant that the archive has and the ledger has no more is one of those.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Final, NamedTuple

from ledger.errors import (
    ArchiveConflictError,
    ArchiveInvalidError,
    BrokenRangeError,
    InvalidInputError,
    TenantNotFoundError,
    UnknownKeyError,
)
from ledger.verification.verdict import Break
from pipeline.archive.layout import FILES_MAX
from pipeline.archive.manifest import SealedManifest
from pipeline.archive.reader import newest_manifest, tenants_of
from pipeline.archive.store import ArchiveStore
from pipeline.archiving.covered import UnjudgedBreak
from pipeline.archiving.filing import (
    FiledEntries,
    FiledSnapshots,
    FileTask,
    Outcome,
    found_in,
)
from pipeline.archiving.next_range import ground_of, next_plan
from pipeline.archiving.plan import Plan
from pipeline.archiving.postgres import Ledger, SignedEnd
from pipeline.archiving.sealing import manifest_of, write_manifest
from signing.keys import Keyring, Signer

ROUND_FILES_MAX: Final = 4 * FILES_MAX
"""A round is closed by the plan that takes it to so many files."""

FileAll = Callable[[Sequence[FileTask]], Sequence[Outcome]]
"""Makes files, in any order, and gives what came of each."""


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
                ground = ground_of(self._store, last, self._keyring)
                tasks += [*map(FileTask, plan.entry_files), FileTask(plan.files[-1], ground)]
                plans.append(plan)
            if len(tasks) >= ROUND_FILES_MAX:
                break
        outcomes = iter(self._file_all(tasks) if tasks else ())
        for plan in plans:
            filed = list(islice(outcomes, len(plan.files)))
            with self._giving_up(plan.tenant_id, waiting):
                self._finish(plan, filed)

    def _finish(self, plan: Plan, filed: Sequence[Outcome]) -> None:
        found = [each for each in filed if isinstance(each, Break)]
        if found:
            raise BrokenRangeError(min(found, key=lambda each: (isinstance(each, UnjudgedBreak), each.seq)))
        entries = [each for each in filed if isinstance(each, FiledEntries)]
        (snapshots,) = (each for each in filed if isinstance(each, FiledSnapshots))
        manifest = manifest_of(self._ledger, plan, self._last[plan.tenant_id], entries, snapshots, self._keyring)
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
