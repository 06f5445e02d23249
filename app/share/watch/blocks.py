"""Watched entries: each is encoded once, as a server-sent event, and filtered by action, job and data centre.

    id: 17
    event: CANCEL
    data: {"id": 204, "tenant_id": "acme", "seq": 17, ...}

``data`` is the entry as ``GET /v1/chain/entries`` lists it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

import orjson

from app.runtime.answers import json_bytes
from app.store.chain_reads import ListedEntry
from ledger.machines import jobs
from ledger.machines.jobs import payload_of
from ledger.verification.verdict import damaged

BLOCK_BYTES_MAX: Final = 64 * 1024
"""Bytes of the events of a block of several entries: a stalled client holds about two blocks."""
CHOICES_KEPT_MAX: Final = 32
"""Filter results that a block caches."""

DcsOfJobs = Mapping[str, frozenset[str] | None]
"""The data centres of jobs by id; None if unknown: then all clients get the job's entries."""


class Wanted(NamedTuple):
    """The filter of a client; None matches everything."""

    actions: frozenset[str] | None = None
    job_id: str | None = None
    dc: str | None = None

    def takes(self, entry: WatchedEntry) -> bool:
        """Whether the entry matches."""
        return (
            (self.actions is None or entry.action in self.actions)
            and (self.job_id is None or entry.job_id == self.job_id)
            and (self.dc is None or entry.dcs is None or self.dc in entry.dcs)
        )


EVERYTHING: Final = Wanted()


class WatchedEntry(NamedTuple):
    """One entry, encoded."""

    seq: int
    action: str
    job_id: str
    event: bytes
    """The server-sent event."""
    dcs: frozenset[str] | None
    """The data centres that it concerns; None if unknown."""


class Chosen(NamedTuple):
    """The joined events of selected entries, and the number of entries."""

    events: bytes
    entries: int


class Block:
    """Consecutive entries, at least one. A filter's result is cached for all clients with the same filter."""

    __slots__ = ("_chosen", "_of_jobs", "entries", "event_bytes", "first_seq", "has_dcs", "last_seq")

    def __init__(self, entries: Sequence[WatchedEntry], *, has_dcs: bool) -> None:
        self.entries = entries
        self.first_seq = entries[0].seq
        self.last_seq = entries[-1].seq
        self.has_dcs = has_dcs
        """Whether the data centres of the entries were looked up."""
        self.event_bytes = sum(len(entry.event) for entry in entries)
        self._chosen: dict[Wanted, Chosen] = {}
        self._of_jobs: dict[str, list[WatchedEntry]] | None = None

    def chosen(self, wanted: Wanted) -> Chosen:
        """The events of the ``wanted`` entries."""
        if wanted.job_id is not None:
            return _joined(entry for entry in self._of_job(wanted.job_id) if wanted.takes(entry))
        if (found := self._chosen.get(wanted)) is None:
            found = _joined(entry for entry in self.entries if wanted.takes(entry))
            if len(self._chosen) < CHOICES_KEPT_MAX:
                self._chosen[wanted] = found
        return found

    def chosen_between(self, wanted: Wanted, after_seq: int, to_seq: int) -> Chosen:
        """The events of the ``wanted`` entries after ``after_seq``, up to ``to_seq``."""
        if after_seq < self.first_seq and to_seq >= self.last_seq:
            return self.chosen(wanted)
        return _joined(entry for entry in self.entries if after_seq < entry.seq <= to_seq and wanted.takes(entry))

    def _of_job(self, job_id: str) -> Sequence[WatchedEntry]:
        if self._of_jobs is None:
            self._of_jobs = {}
            for entry in self.entries:
                self._of_jobs.setdefault(entry.job_id, []).append(entry)
        return self._of_jobs.get(job_id, ())


def blocks_of(
    tenant_id: str, after_seq: int, listed: Sequence[ListedEntry], dcs_of_jobs: DcsOfJobs | None
) -> list[Block]:
    """The blocks of the entries after ``after_seq``; without ``dcs_of_jobs`` their data centres are unknown.

    Raises:
        ChainDamagedError: an entry between them is missing.
    """
    blocks: list[Block] = []
    entries: list[WatchedEntry] = []
    size = 0
    for expected_seq, each in enumerate(listed, after_seq + 1):
        if each.seq != expected_seq:
            raise damaged(tenant_id, "gap", expected_seq, f"the entry of seq {expected_seq} is missing")
        entry = _watched(each, dcs_of_jobs)
        if entries and size + len(entry.event) > BLOCK_BYTES_MAX:
            blocks.append(Block(entries, has_dcs=dcs_of_jobs is not None))
            entries, size = [], 0
        entries.append(entry)
        size += len(entry.event)
    if entries:
        blocks.append(Block(entries, has_dcs=dcs_of_jobs is not None))
    return blocks


def jobs_in_question(listed: Iterable[ListedEntry]) -> set[str]:
    """The jobs whose data centres are needed to find those of these entries."""
    return {
        entry.job_id
        for entry in listed
        if entry.action in jobs.ABOUT_JOBS and jobs.reporting_dc(payload_of(entry.payload)) is None
    }


def _joined(entries: Iterable[WatchedEntry]) -> Chosen:
    events = [entry.event for entry in entries]
    return Chosen(b"".join(events), len(events))


def _watched(entry: ListedEntry, dcs_of_jobs: DcsOfJobs | None) -> WatchedEntry:
    # An action edited to hold a newline must stay one line of the event.
    name = entry.action.encode() if entry.action.isprintable() else orjson.dumps(entry.action)
    event = b"id: %d\nevent: %b\ndata: %b\n\n" % (entry.seq, name, json_bytes(entry.as_listed()))
    return WatchedEntry(
        entry.seq, entry.action, entry.job_id, event, None if dcs_of_jobs is None else _dcs_of(entry, dcs_of_jobs)
    )


def _dcs_of(entry: ListedEntry, dcs_of_jobs: DcsOfJobs) -> frozenset[str] | None:
    payload = payload_of(entry.payload)
    if (reporting := jobs.reporting_dc(payload)) is not None:
        return frozenset((reporting,))
    named = jobs.named_dcs(payload)
    if entry.action not in jobs.ABOUT_JOBS:
        return named
    of_job = dcs_of_jobs.get(entry.job_id, frozenset())
    return None if of_job is None else named | of_job
