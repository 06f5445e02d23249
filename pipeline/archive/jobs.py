"""Jobs and their events of one tenant, read from an archive by signed manifests.

Files are compared with the manifests that name them, and read row group by row group. A list is made in passes, each
over the jobs of one part of all ids, so that memory is bounded by ``ROWS_A_PASS`` and the jobs that are found. Of a
list that begins at a time, files of earlier months are skipped: months never go back.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final
from zlib import crc32

import pyarrow as pa
import pyarrow.compute as pc

from ledger import rfc3339
from ledger.errors import InvalidInputError
from ledger.facts.events import ACTOR
from ledger.hlc import Hlc
from ledger.machines import jobs
from ledger.machines.exclusions import COUNT_ALL, NO_STATEMENTS, SUBJECT, Exclusions, log_of, statements_of
from ledger.machines.job_search import JobFilter
from ledger.machines.jobs import JobParts, JobState, payload_of
from ledger.verification import FOLD_COLUMNS
from ledger.verification.entry_check import ENTRY_COLUMNS
from objects.store import ArchiveStore
from pipeline.archive import Manifest, month_of, month_order
from pipeline.archive.reader import TenantArchive, entries_of
from pipeline.arrow import lists_of, rows_of
from signing.keys import Keyring

ROWS_A_PASS: Final = 500_000
"""Most entries whose jobs are held at once, on average."""
LISTED_MAX: Final = 100_000
"""Most jobs of one list."""
_JOB_ID: Final = ENTRY_COLUMNS.index("job_id")


@dataclass(frozen=True)
class ArchivedJobs:
    """The jobs of a tenant as of the end of its archive."""

    archive: TenantArchive
    exclusions: Exclusions

    @classmethod
    def open(cls, store: ArchiveStore, tenant_id: str, keyring: Keyring) -> ArchivedJobs:
        """Read the manifests.

        Raises:
            TenantNotFoundError: the archive does not have the tenant.
            ArchiveInvalidError: a manifest or a file does not hold.
            UnknownKeyError: no key of ``keyring`` signed a manifest.
            ArchiveUnavailableError: the archive cannot be read.
        """
        archive = TenantArchive.signed(store, tenant_id, keyring)
        found = cls(archive, COUNT_ALL)
        stated = [row for batch in found._entries_of(SUBJECT) for row in rows_of(batch.select(FOLD_COLUMNS))]
        if not stated:
            return found
        return cls(archive, statements_of(NO_STATEMENTS, stated, found.log).exclusions(found.log))

    @property
    def log(self) -> str:
        """The log of the tenant's chain."""
        return f"{self.end.log_origin}/{self.archive.tenant_id}"

    @property
    def end(self) -> Manifest:
        """The newest manifest: what is said holds as of its last entry."""
        return self.archive.newest

    def find(self, wanted: JobFilter, since: Hlc | None, until: Hlc | None, limit: int | None) -> list[dict[str, Any]]:
        """The jobs that match, created at ``since`` or later and before ``until``, newest first, at most ``limit``, as
        ``GET /v1/jobs`` shows them.

        Raises:
            InvalidInputError: without a limit, more than ``LISTED_MAX`` match.
            ArchiveInvalidError, ArchiveUnavailableError: a file does not hold, or cannot be read.
        """
        rows = sum(each.manifest.entry_count for each in self.archive.sealed)
        passes, kept = -(-rows // ROWS_A_PASS), (limit or LISTED_MAX + 1)
        newest: list[tuple[tuple[int, int, str], str, dict[str, Any]]] = []
        for part in range(passes):
            for state in self._states(part, passes, since):
                if (order := _order(state)) is None or not _is_wanted(state, wanted, since, until):
                    continue
                heapq.heappush(newest, (order, state.job_id, self._shown(state)))
                if len(newest) > kept:
                    heapq.heappop(newest)
        if limit is None and len(newest) > LISTED_MAX:
            raise InvalidInputError(f"more than {LISTED_MAX:,} jobs match: narrow the list, or give a --limit")
        return [item for *_, item in sorted(newest, key=lambda each: each[:2], reverse=True)]

    def job(self, job_id: str) -> tuple[dict[str, Any], list[dict[str, Any]]] | None:
        """The job and its events by HLC, as the service shows them; None if nothing of it is archived."""
        parts = JobParts(exclusions=self.exclusions)
        rows: list[tuple[Any, ...]] = []
        for batch in self._entries_of(job_id):
            parts.add(lists_of(batch))
            rows += rows_of(batch)
        states = parts.take()
        if not states:
            return None
        rows.sort(key=lambda row: (row[2], row[3], row[4]))
        shown, logs = self._shown(states[0]), {row[0]: log_of(row[-1]) or self.log for row in rows}
        for conflict in shown["conflicts"]:
            conflict["entries"] = [{**entry, "log": logs.get(entry["seq"])} for entry in conflict["entries"]]
        end = {"url": self.archive.store.url, "to_seq": self.end.to_seq, "manifest": self.archive.sealed[-1].digest}
        return {**shown, "archive": end}, [self._event(row) for row in rows]

    def _shown(self, state: JobState) -> dict[str, Any]:
        return {"tenant_id": self.archive.tenant_id, **jobs.view(state), "conflicts": jobs.conflicts(state)}

    def _event(self, row: Sequence[Any]) -> dict[str, Any]:
        seq, t_hlc, _, _, _, _, action, _, _, link, digest, text, origin = row
        payload = payload_of(text)
        return {
            "seq": seq,
            "hlc": t_hlc,
            "at": rfc3339.time_of(t_hlc),
            "type": payload.get("type"),
            "action": action,
            "actor": payload.get(ACTOR),
            "payload": payload,
            "payload_digest": digest,
            "chain_link": link,
            "state": "COMPACTED",
            "origin": payload_of(origin) or None,
            "counts": self.exclusions.counts(origin),
        }

    def _states(self, part: int, passes: int, since: Hlc | None) -> Sequence[JobState]:
        """The jobs whose ids fall into a part, with all entries from the month of ``since`` on."""
        parts = JobParts(exclusions=self.exclusions)
        earliest = month_order("" if since is None else month_of(since.physical_ms))
        for _, file in self.archive.files():
            if month_order(file.parsed.month or "") < earliest:
                continue
            for batch in entries_of(self.archive.store, file, ENTRY_COLUMNS, {}):
                rows = batch if passes == 1 else batch.filter(_is_of_part(batch.column(_JOB_ID), part, passes))
                parts.add(lists_of(rows))
        return parts.take()

    def _entries_of(self, job_id: str) -> Iterator[pa.RecordBatch]:
        for _, file in self.archive.files():
            for batch in entries_of(self.archive.store, file, ENTRY_COLUMNS, {}):
                found = batch.filter(pc.equal(batch.column(_JOB_ID), job_id))
                if found.num_rows:
                    yield found


def archived_jobs(url: str, tenant_id: str, keyring: Keyring) -> ArchivedJobs:
    """The jobs in the archive at ``url``; raises as ``ArchivedJobs.open``."""
    return ArchivedJobs.open(ArchiveStore(url), tenant_id, keyring)


def _is_of_part(job_ids: pa.Array, part: int, passes: int) -> pa.Array:
    return pa.array([crc32(job_id.encode()) % passes == part for job_id in job_ids.to_pylist()], pa.bool_())


def _order(state: JobState) -> tuple[int, int, str] | None:
    """The HLC of the job's creation, None without one, as of a job whose creation left before."""
    return None if state.created is None else state.created.order[:3]


def _is_wanted(state: JobState, wanted: JobFilter, since: Hlc | None, until: Hlc | None) -> bool:
    assert state.created is not None
    created, actor = Hlc(*state.created.order[:3]), state.created.actor
    is_within = (since is None or created >= since) and (until is None or created < until)
    is_of = not wanted.statuses or jobs.status(state) in wanted.statuses
    return is_within and is_of and wanted.actor in (None, actor) and wanted.finds(state)
