"""Early refusals of a request, from what this node knows of its jobs; nothing of the request is taken before.

A known job exists or was refused, and its fence was used. Whether it has ended is known from the chain, or from an end
on its way there. Another node may know more. ``JobIndex`` only refuses early and saves a query for a known job. The
fold of the chain decides.

*Home regions* (decision 0090). The home of a job is the region whose node made its id,
``{region}-{ms}-{gate}-{number}``. An id that a caller chose, or that names neither this region nor a peer's, has no
known home.

A ledger with peers takes every event about a job that it knows, wherever its home is, and a cancellation also of a job
that it does not know yet. With ``exchange.foreign_jobs`` ``redirect`` it takes no event about a job of a peer's region,
unless that region was retired.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from app.runtime.sharing import in_turns
from app.runtime.state.node import Node
from app.runtime.tasks import keep_newest
from app.store.edge import ChainedJob
from app.store.jobs.table import JobKey
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
from ledger.facts.events import JOB_EVENTS, Durability
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
        self._jobs: OrderedDict[JobKey, KnownJob] = OrderedDict()

    def get(self, job: JobKey) -> KnownJob | None:
        """The known facts of the job, None if there are none."""
        if (known := self._jobs.get(job)) is not None:
            self._jobs.move_to_end(job)
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

    def mark_doubtful(self, jobs: Iterable[JobKey]) -> None:
        """Chained entries may have changed whether these jobs have ended: read the chain when a job is next needed."""
        for job in jobs:
            if (known := self._jobs.get(job)) is not None:
                known.is_doubtful = True

    def take_doubtful(self, jobs: Iterable[JobKey]) -> set[JobKey]:
        """Clear the doubt of these jobs, which are about to be read; returns the jobs that were doubtful."""
        doubted = {job for job in jobs if (known := self._jobs.get(job)) is not None and known.is_doubtful}
        for job in doubted:
            self._jobs[job].is_doubtful = False
        return doubted

    def forget(self, tenant_id: str, job_id: str) -> None:
        """An event of the job was refused after it was entered: read the chain when the job is needed again."""
        self._jobs.pop((tenant_id, job_id), None)

    def _known(self, tenant_id: str, job_id: str, fence_token: int, creation: str | None) -> KnownJob:
        if (known := self._jobs.get((tenant_id, job_id))) is None:
            known = KnownJob(fence_token)
            keep_newest(self._jobs, (tenant_id, job_id), known, JOBS_MAX)
        elif fence_token > known.fence_token:
            known.fence_token = fence_token
        if known.creation is None:
            known.creation = creation
        return known


JobLookup = Callable[[Sequence[JobKey]], Awaitable[dict[JobKey, ChainedJob]]]
"""Reads the chained state of each of these jobs that exists."""


_CANCELLATION: Final = JOB_EVENTS["JobCancellationRequested"].record_type


@dataclass(slots=True)
class _Open:
    """Questions about the jobs of one request that only the store can answer.

    ``created`` has the ``creation_of`` the first creation of each job. ``unknown`` has, of each job that this node does
    not know, the number of its first event. Of these, ``early`` are the jobs that need not exist: the first event is a
    cancellation, and the job may be on its way from another region.
    """

    created: dict[JobKey, str | None] = field(default_factory=dict)
    unknown: dict[JobKey, int] = field(default_factory=dict)
    early: set[JobKey] = field(default_factory=set)


class JobChecks:
    """Refuses events of jobs that do not exist or have ended, and creations that differ from the first one. Checks
    what this node knows first, then the store."""

    def __init__(self, node: Node, job_index: JobIndex, find_jobs: JobLookup, homes: HomeRegions) -> None:
        self._homes = homes
        self._jobs = job_index
        self._node = node
        self._find_jobs = find_jobs
        self._made_here = re.compile(rf"{re.escape(node.region)}-[0-9]+-{re.escape(node.gate)}-[0-9]+")
        """Job ids that this node makes; an id chosen by a caller could collide with a job made later."""

    async def check(
        self, lines: EventLines, requested: Durability, *, in_lines: bool, takes_early: bool = True
    ) -> None:
        """Refuse events of jobs that do not exist or have ended, and creations that differ from the first one.

        Jobs created earlier in the request exist. A creation at LOCAL is compared only with what this node knows; if it
        differs from a creation elsewhere, a read of the job reports that. Unless it ``takes_early``, a cancellation
        needs an existing job like any other event.
        """
        to_read = _Open()
        looked_at: set[JobOfLine] = set()
        async for number, (job, kind) in in_turns(enumerate(zip(lines.jobs, lines.types, strict=True))):
            # The result for one line of a job holds for all its lines, except creations.
            if kind == CREATED or job not in looked_at:
                if (error := self._look_at(job, kind, lines.creations[number], number, to_read)) is not None:
                    raise _of_line(error, number, in_lines)
                looked_at.add(job)
        if not takes_early:
            to_read.early.clear()
        if wanted := self._wanted(to_read, requested):
            for number, error in self._refusals(lines, to_read, await self._read(wanted, to_read)):
                raise _of_line(error, number, in_lines)

    def _refusals(
        self, lines: EventLines, to_read: _Open, found: Mapping[JobKey, ChainedJob]
    ) -> Iterator[tuple[int, LedgerError]]:
        """The lines that the store refuses, and why; ``found`` was read of it."""
        for job, number in to_read.unknown.items():
            known = self._jobs.get(job)
            if job not in found and known is None:
                if job not in to_read.early:
                    yield number, self._homes.not_found(*job)
            elif error := _ended(job[1], found[job].ended if known is None else known.ended):
                yield number, error
        for number, ((tenant_id, job_id), kind) in enumerate(zip(lines.jobs, lines.types, strict=True)):
            if kind != CREATED or job_id is None:
                continue
            job = (tenant_id, job_id)
            known = self._jobs.get(job)
            if known is not None and (
                error := _ended(job_id, known.ended) or _differs(job, known.creation, to_read.created[job])
            ):
                yield number, error

    async def _read(self, wanted: Sequence[JobKey], to_read: _Open) -> dict[JobKey, ChainedJob]:
        """The chained state of these jobs, which this node knows from then on."""
        doubted = self._jobs.take_doubtful(wanted)
        chained_lsn = {tenant_id: self._node.chained_lsn_of(tenant_id) for tenant_id in {job[0] for job in wanted}}
        try:
            found = await self._find_jobs(wanted)
        except DatabaseUnavailableError:
            self._jobs.mark_doubtful(doubted)
            # A creation and an early cancellation need no existing job, and a known job exists: all are durable while
            # Postgres is away.
            if not to_read.unknown.keys() <= doubted | to_read.early:
                raise
            return {}
        for job, chained in found.items():
            if chained.is_made or job in doubted:
                self._jobs.chained(
                    *job, chained.fence_token, chained.ended, chained.seq, chained_lsn[job[0]], chained.creation
                )
        return found

    def is_known(self, draft: Draft) -> bool:
        """``check`` one event against what this node knows; False if the store must be read too.

        Raises:
            LedgerError: as ``check``.
        """
        to_read = _Open()
        job, kind = (draft.tenant_id, draft.job_id), draft.event.record_type
        if (error := self._look_at(job, kind, creation_of(draft), 0, to_read)) is not None:
            raise error
        return not self._wanted(to_read, draft.durability)

    def _look_at(
        self, job_of_line: JobOfLine, kind: int, creation: str | None, number: int, to_read: _Open
    ) -> LedgerError | None:
        """Why the line is known to be wrong; else notes in ``to_read`` what must be read."""
        tenant_id, job_id = job_of_line
        if job_id is None:
            return None
        job = (tenant_id, job_id)
        is_creation = kind == CREATED
        if is_creation and self._made_here.fullmatch(job_id) is not None:
            return InvalidInputError(
                f"job_id: {job_id} is of the form of the ids that this node makes; leave it out, or choose another",
                ("job_id",),
            )
        if not is_creation and (redirected := self._homes.redirected(job_id)) is not None:
            return redirected
        known = self._jobs.get(job)
        is_doubtful = known is not None and known.is_doubtful and not is_creation
        error = None if known is None or is_doubtful else _ended(job_id, known.ended)
        if error is None and is_creation:
            first = None if known is None else known.creation
            error = _differs(job, first, creation) or _differs(job, to_read.created.setdefault(job, creation), creation)
        elif error is None and (known is None or is_doubtful) and job not in to_read.created:
            to_read.unknown.setdefault(job, number)
            if kind == _CANCELLATION and self._homes.may_be_on_its_way(job_id):
                to_read.early.add(job)
        return error

    def _wanted(self, to_read: _Open, requested: Durability) -> list[JobKey]:
        """The jobs that must be read from the store."""
        wanted = list(to_read.unknown)
        if requested > Durability.LOCAL:
            wanted += [
                job for job, creation in to_read.created.items() if creation is not None and not self._knows(job)
            ]
        return wanted

    def _knows(self, job: JobKey) -> bool:
        known = self._jobs.get(job)
        return known is not None and known.creation is not None and not known.is_doubtful


def _ended(job_id: str, ended: str | None) -> LedgerError | None:
    return None if ended is None else JobEndedError(f"job {job_id} {ended}")


def _differs(job: JobKey, first: str | None, second: str | None) -> LedgerError | None:
    """The error if a creation differs from the first one of its job, as far as both are known."""
    if first is None or second is None or first == second:
        return None
    return JobExistsError(
        f"tenant {job[0]} has a job {job[1]} that was created with another spec or other assigned_dcs; choose another "
        "job_id, or repeat the creation as it was"
    )


def _of_line(error: LedgerError, number: int, in_lines: bool) -> LedgerError:
    """``error``; for one of several lines, with the line number and the member that is wrong."""
    if not in_lines:
        return error
    if isinstance(error, OtherRegionError):
        return error.at_line(number + 1)
    return InvalidEventError(
        str(error), number + 1, ("job_id",) if isinstance(error, InvalidInputError | JobExistsError) else ()
    )


_MADE_BY_A_NODE: Final = re.compile(rf"{GATE}-[0-9]+-{GATE}-[0-9]+")


class HomeRegions:
    """The home regions that this ledger can tell: its own and those of its peers."""

    def __init__(
        self,
        own: str,
        ledgers: Mapping[str, str] | None = None,
        *,
        redirects: bool = False,
        is_retired: Callable[[str], bool] = lambda _: False,
    ) -> None:
        """``ledgers`` has the URL of each peer's ledger by its region; ``is_retired`` tells whether that ledger is gone
        for good."""
        self._own = own
        self._ledgers = {region: url.rstrip("/") for region, url in (ledgers or {}).items()}
        self._redirects = redirects
        self._is_retired = is_retired

    def of(self, job_id: str) -> str | None:
        """The home region of the job, None if it is not known."""
        region = job_id.partition("-")[0]
        is_known = region == self._own or region in self._ledgers
        return region if is_known and _MADE_BY_A_NODE.fullmatch(job_id) is not None else None

    async def others(self, job_ids: Iterable[str | None]) -> list[str]:
        """The home regions of these jobs besides this one, sorted. None stands for a job whose id this node makes."""
        if not self._ledgers:
            return []
        homes = {self.of(job_id) async for job_id in in_turns(job_ids) if job_id is not None}
        return sorted(home for home in homes if home is not None and home != self._own)

    def redirected(self, job_id: str) -> OtherRegionError | None:
        """The error for an event about the job if another ledger takes it; None if this one does."""
        home = self.of(job_id) if self._redirects else None
        if home is None or home == self._own or self._is_retired(home):
            return None
        return OtherRegionError(job_id, home, self._ledgers[home])

    def may_be_on_its_way(self, job_id: str) -> bool:
        """Whether another region may have made the job, so that a cancellation is taken before the job arrives."""
        home = self.of(job_id)
        is_taken = not self._redirects or (home is not None and self._is_retired(home))
        return bool(self._ledgers) and is_taken and home != self._own

    def not_found(self, tenant_id: str, job_id: str) -> JobNotFoundError:
        """The error for an event about a job that neither this node nor the chain knows."""
        home = self.of(job_id)
        if home is None or home == self._own or self._is_retired(home):
            or_later = ", or repeat this once it was imported" if home is None and self._ledgers else ""
            return JobNotFoundError(f"tenant {tenant_id} has no job {job_id}; create it first{or_later}")
        return JobNotFoundError(
            f"job {job_id} of tenant {tenant_id} was made in region {home} and has not arrived here: until it is "
            f"imported only its cancellation is taken. Repeat this later, or send it to {self._ledgers[home]}"
        )
