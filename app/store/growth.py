"""Chains that grow by one transaction, in memory, before Postgres sees any of it.

Assigns ``seq``, links, and merges job state; for events born here and for entries that are imported alike. A pure
function of the locked heads, the stored job states and what is appended.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any, NamedTuple

import orjson

from app.store.chaining import ChainHead
from app.store.notary import LinkRow
from ledger.chain import LINK_VERSION, Linker
from ledger.hlc import Hlc
from ledger.machines import jobs

JobKey = tuple[str, str]
"""(tenant, job id)."""


class ChainPosition(NamedTuple):
    """Where an entry stands in its chain; links are lowercase hex."""

    seq: int
    chain_link: str
    prev_chain_link: str | None


@dataclass(slots=True)
class Growth:
    """New entries at the ends of chains, and the job states that they leave."""

    log_rows: list[tuple[object, ...]] = field(default_factory=list)
    """Rows of ``LOG_COLUMNS``, those of one tenant in seq order."""
    links: dict[str, list[LinkRow]] = field(default_factory=dict)
    """New entries by tenant, in seq order; the last of each is the new head."""
    job_states: dict[JobKey, jobs.JobState] = field(default_factory=dict)

    def job_rows(self) -> list[tuple[object, ...]]:
        """Rows of ``MERGED_JOB_COLUMNS`` that store ``job_states``."""
        return [_job_row(job, state) for job, state in self.job_states.items()]

    def heads(self) -> list[tuple[str, int, str, str]]:
        """(tenant, seq, link, HLC) of each chain's new end."""
        return [(tenant, last.seq, last.chain_link, last.t_hlc) for tenant, (*_, last) in self.links.items()]


class _Entry(NamedTuple):
    """One entry that has its place and no link yet."""

    hlc: Hlc
    job_id: str
    action: str
    payload: bytes
    origin: str | None
    facts: Mapping[str, Any] | None


class _End:
    """The end of one chain while it grows: its head, what is to be linked onto that, and the jobs that it changes."""

    __slots__ = ("entries", "folds", "head", "linker")

    def __init__(self, head: ChainHead, linker: Linker) -> None:
        self.head = head
        self.linker = linker
        self.entries: list[_Entry] = []
        self.folds: dict[str, jobs.JobFold] = {}


class Grower:
    """Appends entries to ``growth``, onto ``heads``; ``growth`` is whole once ``finish`` was called.

    ``job_states`` are the stored states of all jobs that will be touched and have one; ``linkers`` is filled as needed.
    Entries of one chain are linked together, which costs half of linking each as it comes.
    """

    def __init__(
        self,
        growth: Growth,
        heads: Mapping[str, ChainHead],
        job_states: Mapping[JobKey, jobs.JobState],
        linkers: dict[str, Linker],
    ) -> None:
        self._growth = growth
        self._heads = heads
        self._stored = job_states
        self._ends = {
            tenant: _End(head, linkers.get(tenant) or linkers.setdefault(tenant, Linker(tenant)))
            for tenant, head in heads.items()
        }

    def append(
        self,
        tenant_id: str,
        hlc: Hlc,
        job_id: str,
        action: str,
        payload: bytes,
        origin: str | None = None,
        *,
        facts: Mapping[str, Any] | None = None,
    ) -> int:
        """Chain one entry, link version 2; returns its seq. ``facts`` is what ``payload`` encodes, if that is known."""
        end = self._ends[tenant_id]
        end.entries.append(_Entry(hlc, job_id, action, payload, origin, facts))
        return end.head.seq + len(end.entries)

    def keep(
        self,
        tenant_id: str,
        hlc: Hlc,
        job_id: str,
        action: str,
        version: int,
        place: ChainPosition,
        payload: bytes,
        origin: str | None = None,
    ) -> None:
        """Take over an entry as it is, where it stood; its link MUST have been verified."""
        end = self._ends[tenant_id]
        self._link(tenant_id, end)
        seq, chain_link, prev = place
        assert (seq, prev) == (end.head.seq + 1, end.head.chain_link)
        t_hlc = hlc.text()
        digest = hashlib.sha256(payload).hexdigest()
        text = payload.decode()
        self._growth.log_rows.append(
            (tenant_id, seq, t_hlc, *hlc, job_id, action, version, prev, chain_link, digest, text, origin)
        )
        self._growth.links.setdefault(tenant_id, []).append(LinkRow(seq, t_hlc, chain_link))
        end.head = ChainHead(seq, chain_link, t_hlc)
        self._fold(tenant_id, end, seq, _Entry(hlc, job_id, action, payload, origin, None), digest)

    def finish(self) -> None:
        """Link what was appended, and merge the states of its jobs."""
        for tenant_id, end in self._ends.items():
            self._link(tenant_id, end)
            for job_id, fold in end.folds.items():
                self._growth.job_states[(tenant_id, job_id)] = fold.state()

    def place(self, tenant_id: str, seq: int) -> ChainPosition:
        """Where the entry stands that ``append`` gave this seq; known once all is finished."""
        links = self._growth.links[tenant_id]
        at = seq - links[0].seq
        return ChainPosition(
            seq, links[at].chain_link, links[at - 1].chain_link if at else self._heads[tenant_id].chain_link
        )

    def _link(self, tenant_id: str, end: _End) -> None:
        entries, end.entries = end.entries, []
        if not entries:
            return
        growth, head = self._growth, end.head
        hlcs, job_ids, actions, payloads, origins, _ = zip(*entries, strict=True)
        physical_ms, logical, nodes = zip(*hlcs, strict=True)
        seqs = range(head.seq + 1, head.seq + 1 + len(entries))
        t_hlcs = [hlc.text() for hlc in hlcs]
        digests = [hashlib.sha256(payload).digest() for payload in payloads]
        sources = [b"" if origin is None else origin.encode() for origin in origins]
        head_link = bytes.fromhex(head.chain_link or "")
        links = [
            link.hex() for link in end.linker.links(seqs[0], head_link, t_hlcs, job_ids, actions, digests, sources)
        ]
        digest_texts = [digest.hex() for digest in digests]
        growth.log_rows += zip(
            repeat(tenant_id, len(entries)),
            seqs,
            t_hlcs,
            physical_ms,
            logical,
            nodes,
            job_ids,
            actions,
            repeat(LINK_VERSION, len(entries)),
            [head.chain_link, *links[:-1]],
            links,
            digest_texts,
            [payload.decode() for payload in payloads],
            origins,
            strict=True,
        )
        growth.links.setdefault(tenant_id, []).extend(map(LinkRow, seqs, t_hlcs, links))
        end.head = ChainHead(seqs[-1], links[-1], t_hlcs[-1])
        for seq, entry, digest in zip(seqs, entries, digest_texts, strict=True):
            self._fold(tenant_id, end, seq, entry, digest)

    def _fold(self, tenant_id: str, end: _End, seq: int, entry: _Entry, digest: str) -> None:
        hlc, job_id, action, payload, _, facts = entry
        if facts is None:
            value = orjson.loads(payload)
            facts = value if isinstance(value, dict) else {}
        said = jobs.said_of_job(action, facts, hlc, digest, job_id)
        if said is None:
            return
        fold = end.folds.get(job_id)
        if fold is None:
            fold = end.folds[job_id] = jobs.JobFold(job_id, self._stored.get((tenant_id, job_id)))
        fold.add(*said, seq)


def head_of(links: Sequence[LinkRow]) -> ChainHead:
    """The head that these entries leave."""
    return ChainHead(links[-1].seq, links[-1].chain_link, links[-1].t_hlc)


def _job_row(job: JobKey, state: jobs.JobState) -> tuple[object, ...]:
    physical, logical, node = state.created.order[:3] if state.created is not None else (None, None, None)
    return (*job, jobs.status(state), physical, logical, node, state.last_seq, jobs.to_json(state).decode())
