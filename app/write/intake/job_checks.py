"""Early refusals of a request, from what this node knows of its jobs; nothing of the request is taken before.

A known job exists or was refused, and its fence was used. Whether it has ended is known from the chain, or from an end
on its way there. Another node may know more. ``JobIndex`` only refuses early and saves a query for a known job. The
fold of the chain decides.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from app.runtime.sharing import in_turns
from app.runtime.state.node import Node
from app.runtime.tasks import keep_newest
from app.store.edge import ChainedJob
from app.write.pending.requests import CREATED, Draft, EventLines, JobOfLine, creation_of
from ledger.errors import (
    DatabaseUnavailableError,
    InvalidEventError,
    InvalidInputError,
    JobEndedError,
    JobExistsError,
    JobNotFoundError,
    LedgerError,
    OtherRegionError,
)
from ledger.facts.events import Durability
from ledger.facts.statuses import COMPLETED
from ledger.machines.jobs import ended_text
from ledger.names import GATE
from ledger.positions import BEFORE_FIRST, Lsn

ENDED: Final = ended_text(COMPLETED, None)
JOBS_MAX = 200_000
"""Jobs remembered; the least recently used are forgotten first, and looked up again when needed."""


@dataclass(slots=True)
class KnownJob:
    """Known facts of one job.

    ``fence_token`` is the highest fence seen. ``ended`` is why it takes no more events, None while it does.
    ``ended_lsn`` is the LSN of the record that ended it while that record is not chained, else 0. ``seq`` is its newest
    entry seen in the chain. ``creation`` is the ``creation_digest`` of its creation, None if not known or not
    comparable. It ``is_doubtful`` if entries chained since may change ``ended``: the chain must be read.
    """

    fence_token: int
    ended: str | None = None
    ended_lsn: Lsn = BEFORE_FIRST
    seq: int = 0
    creation: str | None = None
    is_doubtful: bool = False


class JobIndex:
    """Bounded map from (tenant, job id) to the known facts of the job."""

    def __init__(self) -> None:
        self._jobs: OrderedDict[tuple[str, str], KnownJob] = OrderedDict()

    def get(self, tenant_id: str, job_id: str) -> KnownJob | None:
        """The known facts of the job, None if there are none."""
        known = self._jobs.get((tenant_id, job_id))
        if known is not None:
            self._jobs.move_to_end((tenant_id, job_id))
        return known

    def entered(
        self, tenant_id: str, job_id: str, fence_token: int, lsn: Lsn, *, is_end: bool, creation: str | None = None
    ) -> None:
        """An event of the job is on its way to the chain. An end takes effect immediately unless its fence is stale;
        then the fold of the chain decides whether it ends the job."""
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
        """Update the job from the chain, read with its entries up to ``seq`` and all records of this node up to
        ``upto_lsn``. Newer known facts are kept."""
        known = self._known(tenant_id, job_id, fence_token, creation)
        if seq >= known.seq and (ended is not None or known.ended_lsn <= upto_lsn):
            known.ended, known.ended_lsn, known.seq = ended, BEFORE_FIRST, seq

    def mark_doubtful(self, jobs: Iterable[tuple[str, str]]) -> None:
        """Chained entries may have changed whether these jobs have ended: read the chain when a job is next needed."""
        for job in jobs:
            if (known := self._jobs.get(job)) is not None:
                known.is_doubtful = True

    def take_doubtful(self, jobs: Iterable[tuple[str, str]]) -> set[tuple[str, str]]:
        """Clear the doubt of these jobs, which are about to be read; returns the jobs that were doubtful."""
        doubted = {job for job in jobs if (known := self._jobs.get(job)) is not None and known.is_doubtful}
        for job in doubted:
            self._jobs[job].is_doubtful = False
        return doubted

    def forget(self, tenant_id: str, job_id: str) -> None:
        """An event of the job was refused after it was entered: read the chain when the job is needed again."""
        self._jobs.pop((tenant_id, job_id), None)

    def _known(self, tenant_id: str, job_id: str, fence_token: int, creation: str | None) -> KnownJob:
        known = self._jobs.get((tenant_id, job_id))
        if known is None:
            known = KnownJob(fence_token)
            keep_newest(self._jobs, (tenant_id, job_id), known, JOBS_MAX)
        elif fence_token > known.fence_token:
            known.fence_token = fence_token
        if known.creation is None:
            known.creation = creation
        return known


Created = dict[tuple[str, str], str | None]
"""(tenant, job id) of each job that a request creates: the ``creation_of`` its first creation."""
Unknown = dict[tuple[str, str], int]
"""(tenant, job id) of each job that this node does not know: the number of its first event."""


JobLookup = Callable[[Sequence[tuple[str, str]]], Awaitable[dict[tuple[str, str], ChainedJob]]]
"""Reads the chained state of each of these jobs that exists."""


_MADE_SOMEWHERE = re.compile(rf"(?P<region>{GATE})-[0-9]+-{GATE}-[0-9]+")


class JobChecks:
    """Refuses events of jobs that do not exist or have ended, and creations that differ from the first one. Checks
    what this node knows first, then the store."""

    def __init__(
        self, node: Node, job_index: JobIndex, find_jobs: JobLookup, homes: Mapping[str, str] | None = None
    ) -> None:
        """``homes`` gives, by region, the ledger that takes the events of jobs made there."""
        self._homes = homes or {}
        self._jobs = job_index
        self._node = node
        self._find_jobs = find_jobs
        self._made_here = re.compile(rf"{re.escape(node.region)}-[0-9]+-{re.escape(node.gate)}-[0-9]+")
        """Job ids that this node makes; an id chosen by a caller could collide with a job made later."""

    async def check(self, lines: EventLines, requested: Durability, *, in_lines: bool) -> None:
        """Refuse events of jobs that do not exist or have ended, and creations that differ from the first one.

        Jobs created earlier in the request exist. A creation at LOCAL is compared only with what this node knows; if it
        differs from a creation elsewhere, a read of the job reports that.
        """
        created: Created = {}
        unknown: Unknown = {}
        looked_at: set[JobOfLine] = set()
        async for number, (job, kind) in in_turns(enumerate(zip(lines.jobs, lines.types, strict=True))):
            # The result for one line of a job holds for all its lines, except creations.
            if kind != CREATED and job in looked_at:
                continue
            self._look_at(job, kind, lines.creations[number], number, created, unknown, in_lines=in_lines)
            looked_at.add(job)
        wanted = self._wanted(created, unknown, requested)
        if not wanted:
            return
        doubted = self._jobs.take_doubtful(wanted)
        chained_lsn = {tenant_id: self._node.chained_lsn_of(tenant_id) for tenant_id in {job[0] for job in wanted}}
        try:
            found = await self._find_jobs(wanted)
        except DatabaseUnavailableError:
            self._jobs.mark_doubtful(doubted)
            # A creation needs no existing job, and a known job exists: both are durable while Postgres is away.
            if not unknown.keys() <= doubted:
                raise
            found = {}
        for wanted_job, chained in found.items():
            if chained.is_made or wanted_job in doubted:
                upto_lsn = chained_lsn[wanted_job[0]]
                self._jobs.chained(
                    *wanted_job, chained.fence_token, chained.ended, chained.seq, upto_lsn, chained.creation
                )
        for wanted_job, number in unknown.items():
            known = self._jobs.get(*wanted_job)
            if wanted_job not in found and known is None:
                missing = JobNotFoundError(f"tenant {wanted_job[0]} has no job {wanted_job[1]}; create it first")
                raise _refusal(missing, number, in_lines)
            if (ended := found[wanted_job].ended if known is None else known.ended) is not None:
                raise _ended(wanted_job[1], ended, number, in_lines)
        self._check_creations(lines, created, in_lines=in_lines)

    def is_known(self, draft: Draft) -> bool:
        """``check`` one event against what this node knows; False if the store must be read too.

        Raises:
            LedgerError: as ``check``.
        """
        created: Created = {}
        unknown: Unknown = {}
        job, kind = (draft.tenant_id, draft.job_id), draft.event.record_type
        self._look_at(job, kind, creation_of(draft), 0, created, unknown, in_lines=False)
        return not self._wanted(created, unknown, draft.durability)

    def _look_at(
        self,
        job_of_line: JobOfLine,
        kind: int,
        creation: str | None,
        number: int,
        created: Created,
        unknown: Unknown,
        *,
        in_lines: bool,
    ) -> None:
        """Refuse a line that is known to be wrong; else note in ``created`` or ``unknown`` what must be read."""
        tenant_id, job_id = job_of_line
        if job_id is None:
            return
        job = (tenant_id, job_id)
        is_creation = kind == CREATED
        if is_creation and self._made_here.fullmatch(job_id) is not None:
            reason = f"job_id: {job_id} is of the form of the ids that this node makes; leave it out, or choose another"
            raise _refusal(InvalidInputError(reason, ("job_id",)), number, in_lines, ("job_id",))
        if self._homes and not is_creation:
            self._refuse_of_other_region(job_id)
        known = self._jobs.get(*job)
        is_doubtful = known is not None and known.is_doubtful and not is_creation
        if known is not None and known.ended is not None and not is_doubtful:
            raise _ended(job_id, known.ended, number, in_lines)
        if is_creation:
            for first in (None if known is None else known.creation, created.setdefault(job, creation)):
                if _differ(first, creation):
                    raise _exists(job, number, in_lines)
        elif (known is None or is_doubtful) and job not in created:
            unknown.setdefault(job, number)

    def _refuse_of_other_region(self, job_id: str) -> None:
        made = _MADE_SOMEWHERE.fullmatch(job_id)
        if made is not None and made["region"] in self._homes:
            raise OtherRegionError(job_id, made["region"], self._homes[made["region"]])

    def _wanted(self, created: Created, unknown: Unknown, requested: Durability) -> list[tuple[str, str]]:
        """The jobs that must be read from the store."""
        wanted = list(unknown)
        if requested > Durability.LOCAL:
            wanted += [job for job, creation in created.items() if creation is not None and not self._knows(job)]
        return wanted

    def _knows(self, job: tuple[str, str]) -> bool:
        known = self._jobs.get(*job)
        return known is not None and known.creation is not None and not known.is_doubtful

    def _check_creations(self, lines: EventLines, created: Created, *, in_lines: bool) -> None:
        """Refuse jobs that were created otherwise or have ended; the chain was read before."""
        for number, ((tenant_id, job_id), kind) in enumerate(zip(lines.jobs, lines.types, strict=True)):
            if kind != CREATED or job_id is None:
                continue
            job = (tenant_id, job_id)
            if (known := self._jobs.get(*job)) is None:
                continue
            if known.ended is not None:
                raise _ended(job_id, known.ended, number, in_lines)
            if _differ(known.creation, created[job]):
                raise _exists(job, number, in_lines)


def _differ(first: str | None, second: str | None) -> bool:
    return first is not None and second is not None and first != second


def _ended(job_id: str, ended: str, number: int, in_lines: bool) -> LedgerError:
    return _refusal(JobEndedError(f"job {job_id} {ended}"), number, in_lines)


def _exists(job: tuple[str, str], number: int, in_lines: bool) -> LedgerError:
    reason = (
        f"tenant {job[0]} has a job {job[1]} that was created with another spec or other assigned_dcs; choose another "
        "job_id, or repeat the creation as it was"
    )
    return _refusal(JobExistsError(reason), number, in_lines, ("job_id",))


def _refusal(error: LedgerError, number: int, in_lines: bool, path: Sequence[str] = ()) -> LedgerError:
    """``error``; for one of several lines, with the line number and the member at ``path``."""
    return InvalidEventError(str(error), number + 1, tuple(path)) if in_lines else error
