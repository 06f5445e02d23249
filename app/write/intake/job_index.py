"""What this node knows of jobs, so that a request about a known job costs no query.

A job that is here exists, or was refused; a fence here was used. That it takes no more events is known from the chain,
or from an end on its way there. Another node may know more. This index only refuses early: what counts is the fold of
the chain.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from ledger.facts.statuses import COMPLETED
from ledger.machines.jobs import ended_text
from ledger.positions import BEFORE_FIRST, Lsn

ENDED: Final = ended_text(COMPLETED, None)
JOBS_MAX = 200_000
"""Jobs remembered; the least recently used are forgotten first, and looked up again when needed."""


@dataclass(slots=True)
class KnownJob:
    """What is known of one job.

    ``fence_token`` is the highest fence seen. ``ended`` is why it takes no more events, None while it does, and
    ``ended_lsn`` the LSN of the record that ended it, as long as that is not chained, else 0. ``seq`` is of the newest
    of its entries that the chain was seen to hold. ``creation`` is its creation as ``creation_digest`` has it, None
    where it is not known, or cannot be compared. It ``is_doubtful`` when entries were chained since that may change
    ``ended``: the chain is to be asked.
    """

    fence_token: int
    ended: str | None = None
    ended_lsn: Lsn = BEFORE_FIRST
    seq: int = 0
    creation: str | None = None
    is_doubtful: bool = False


class JobIndex:
    """Bounded map from (tenant, job id) to what is known of the job."""

    def __init__(self) -> None:
        self._jobs: OrderedDict[tuple[str, str], KnownJob] = OrderedDict()

    def get(self, tenant_id: str, job_id: str) -> KnownJob | None:
        """What is known of the job, None when nothing is."""
        known = self._jobs.get((tenant_id, job_id))
        if known is not None:
            self._jobs.move_to_end((tenant_id, job_id))
        return known

    def entered(
        self, tenant_id: str, job_id: str, fence_token: int, lsn: Lsn, *, is_end: bool, creation: str | None = None
    ) -> None:
        """An event of the job goes to the chain. An end counts at once unless its fence is stale: whether a stale one
        ends the job is for the fold of the chain to say."""
        known = self._known(tenant_id, job_id, fence_token, creation)
        if is_end and fence_token >= known.fence_token:
            known.ended, known.ended_lsn = ENDED, lsn

    def chained(
        self,
        tenant_id: str,
        job_id: str,
        fence_token: int,
        ended: str | None,
        seq: int,
        upto_lsn: Lsn,
        creation: str | None = None,
    ) -> None:
        """What the chain says of the job with its entries up to ``seq``, and all records of this node up to
        ``upto_lsn``. It may have been read before something newer that is known, which is not lost to it."""
        known = self._known(tenant_id, job_id, fence_token, creation)
        if seq >= known.seq and (ended is not None or known.ended_lsn <= upto_lsn):
            known.ended, known.ended_lsn, known.seq = ended, BEFORE_FIRST, seq

    def mark_doubtful(self, jobs: Iterable[tuple[str, str]]) -> None:
        """What was chained may have ended these jobs, or shown that they have not: ask the chain when one is needed."""
        for job in jobs:
            if (known := self._jobs.get(job)) is not None:
                known.is_doubtful = True

    def take_doubtful(self, jobs: Iterable[tuple[str, str]]) -> set[tuple[str, str]]:
        """The chain is asked about these jobs; returns those that were doubtful."""
        doubted = {job for job in jobs if (known := self._jobs.get(job)) is not None and known.is_doubtful}
        for job in doubted:
            self._jobs[job].is_doubtful = False
        return doubted

    def forget(self, tenant_id: str, job_id: str) -> None:
        """An event of the job was refused after it was entered: ask the chain when the job is needed again."""
        self._jobs.pop((tenant_id, job_id), None)

    def _known(self, tenant_id: str, job_id: str, fence_token: int, creation: str | None) -> KnownJob:
        known = self._jobs.get((tenant_id, job_id))
        if known is None:
            known = self._jobs[(tenant_id, job_id)] = KnownJob(fence_token)
            if len(self._jobs) > JOBS_MAX:
                self._jobs.popitem(last=False)
        elif fence_token > known.fence_token:
            known.fence_token = fence_token
        if known.creation is None:
            known.creation = creation
        return known
