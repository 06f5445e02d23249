"""Chains that grow by one transaction, in memory, before Postgres sees any of it.

Assigns ``seq``, links, and merges job state; for events born here and for entries that are imported alike. A pure
function of the locked heads, the stored job states and what is appended.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import orjson

from app.store.chaining import ChainHead
from app.store.notary import LinkRow
from ledger import jobs
from ledger.chain import LINK_VERSION, Linker
from ledger.hlc import Hlc

Job = tuple[str, str]
"""(tenant, job id)."""


class Place(NamedTuple):
    """Where an entry stands in its chain; links are lowercase hex."""

    seq: int
    chain_link: str
    prev_chain_link: str | None


@dataclass(slots=True)
class Growth:
    """New entries at the ends of chains, and the job states that they leave."""

    log_rows: list[tuple[object, ...]] = field(default_factory=list)
    """Rows of ``LOG_COLUMNS``."""
    links: dict[str, list[LinkRow]] = field(default_factory=dict)
    """New entries by tenant, in seq order; the last of each is the new head."""
    job_states: dict[Job, jobs.JobState] = field(default_factory=dict)

    def job_rows(self) -> list[tuple[object, ...]]:
        """Rows of ``MERGED_JOB_COLUMNS`` that store ``job_states``."""
        return [_job_row(job, state) for job, state in self.job_states.items()]

    def heads(self) -> list[tuple[str, int, str, str]]:
        """(tenant, seq, link, HLC) of each chain's new end."""
        return [(tenant, last.seq, last.chain_link, last.t_hlc) for tenant, (*_, last) in self.links.items()]


class _End:
    """The end of one chain while it grows."""

    __slots__ = ("chain_link", "link", "linker", "links", "seq")

    def __init__(self, head: ChainHead, linker: Linker) -> None:
        self.seq = head.seq
        self.chain_link = head.chain_link
        self.link = bytes.fromhex(head.chain_link or "")
        self.linker = linker
        self.links: list[LinkRow] | None = None


class Grower:
    """Appends entries to ``growth``, onto ``heads``.

    ``job_states`` are the stored states of all jobs that will be touched and have one; ``linkers`` is filled as needed.
    """

    def __init__(
        self,
        growth: Growth,
        heads: Mapping[str, ChainHead],
        job_states: Mapping[Job, jobs.JobState],
        linkers: dict[str, Linker],
    ) -> None:
        self._growth = growth
        self._stored = job_states
        self._ends = {
            tenant: _End(head, linkers.get(tenant) or linkers.setdefault(tenant, Linker(tenant)))
            for tenant, head in heads.items()
        }

    def append(
        self, tenant_id: str, hlc: Hlc, job_id: str, action: str, payload: bytes, origin: str | None = None
    ) -> Place:
        """Chain one entry, link version 2."""
        end = self._ends[tenant_id]
        t_hlc = hlc.text()
        digest = hashlib.sha256(payload)
        source = b"" if origin is None else origin.encode()
        link = end.linker.link(end.seq + 1, t_hlc, job_id, action, end.link, digest.digest(), source)
        place = Place(end.seq + 1, link.hex(), end.chain_link)
        self._add(end, tenant_id, hlc, t_hlc, job_id, action, LINK_VERSION, place, digest.hexdigest(), payload, origin)
        end.link = link
        return place

    def keep(
        self,
        tenant_id: str,
        hlc: Hlc,
        job_id: str,
        action: str,
        version: int,
        place: Place,
        payload: bytes,
        origin: str | None = None,
    ) -> None:
        """Take over an entry as it is, where it stood; its link MUST have been verified."""
        end = self._ends[tenant_id]
        assert (place.seq, place.prev_chain_link) == (end.seq + 1, end.chain_link)
        digest = hashlib.sha256(payload).hexdigest()
        self._add(end, tenant_id, hlc, hlc.text(), job_id, action, version, place, digest, payload, origin)
        end.link = bytes.fromhex(place.chain_link)

    def _add(
        self,
        end: _End,
        tenant_id: str,
        hlc: Hlc,
        t_hlc: str,
        job_id: str,
        action: str,
        version: int,
        place: Place,
        digest: str,
        payload: bytes,
        origin: str | None,
    ) -> None:
        growth = self._growth
        seq, chain_link, prev = place
        growth.log_rows.append(
            (tenant_id, seq, t_hlc, *hlc, job_id, action, version, prev, chain_link, digest, payload.decode(), origin)
        )
        end.seq, end.chain_link = seq, chain_link
        if end.links is None:
            end.links = growth.links.setdefault(tenant_id, [])
        end.links.append(LinkRow(seq, t_hlc, chain_link))
        value = orjson.loads(payload)
        fact = jobs.fact_of(action, value if isinstance(value, dict) else {}, hlc, digest, job_id, seq)
        if fact is not None:
            job = (tenant_id, job_id)
            known = growth.job_states.get(job) or self._stored.get(job)
            growth.job_states[job] = jobs.merge(known, fact) if known is not None else fact


def head_of(links: Sequence[LinkRow]) -> ChainHead:
    """The head that these entries leave."""
    return ChainHead(links[-1].seq, links[-1].chain_link, links[-1].t_hlc)


def _job_row(job: Job, state: jobs.JobState) -> tuple[object, ...]:
    physical, logical, node = state.created.order[:3] if state.created is not None else (None, None, None)
    return (*job, jobs.status(state), physical, logical, node, state.last_seq, jobs.to_json(state).decode())
