"""What is refused of a request for what is known of its jobs, before anything of it is taken."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Protocol

from app.runtime.sharing import Turn
from app.runtime.state.node import Node
from app.store.edge import ChainedJob
from app.write.intake.job_index import JobIndex
from app.write.pending.event_lines import CREATED, EventLines, JobOfLine, creation_of
from app.write.pending.requests import Draft
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
from ledger.names import GATE

Created = dict[tuple[str, str], str | None]
"""(tenant, job id) of each job that a request creates: the ``creation_of`` its first creation."""
Unknown = dict[tuple[str, str], int]
"""(tenant, job id) of each job of which this node knows nothing: the number of its first event."""


class JobLookup(Protocol):
    """What submitting needs of the store: what is chained of each job that exists."""

    async def __call__(self, wanted: Sequence[tuple[str, str]], /) -> dict[tuple[str, str], ChainedJob]: ...


_MADE_SOMEWHERE = re.compile(rf"(?P<region>{GATE})-[0-9]+-{GATE}-[0-9]+")


class JobChecks:
    """Refuses what a request says of jobs that do not exist, have ended, or were created otherwise: first by what this
    node knows, then by asking the store."""

    def __init__(
        self, node: Node, job_index: JobIndex, find_jobs: JobLookup, homes: Mapping[str, str] | None = None
    ) -> None:
        """``homes`` says by region where another ledger takes what concerns the jobs made there."""
        self._homes = homes or {}
        self._jobs = job_index
        self._node = node
        self._find_jobs = find_jobs
        self._made_here = re.compile(rf"{re.escape(node.region)}-[0-9]+-{re.escape(node.gate)}-[0-9]+")
        """Job ids that this node makes; a caller who brought one could meet a job made later."""

    async def check(self, lines: EventLines, requested: Durability, *, in_lines: bool) -> None:
        """Refuse events about jobs that do not exist or have ended, and creations of jobs that were created otherwise.

        Jobs created earlier in the request exist. A creation at LOCAL is compared with what this node knows only; what
        it differs from elsewhere, the job's reader is shown.
        """
        created: Created = {}
        unknown: Unknown = {}
        looked_at: set[JobOfLine] = set()
        turn = Turn()
        for number, (job, kind) in enumerate(zip(lines.jobs, lines.types, strict=True)):
            # What holds for one line of a job holds for all, but for what each creation says.
            if kind != CREATED and job in looked_at:
                continue
            if turn.is_over():
                await turn.pause()
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
            # A creation needs no job to be there, and a known job is: both are durable while Postgres is away.
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
                raise _not_found(wanted_job, number, in_lines)
            if (ended := found[wanted_job].ended if known is None else known.ended) is not None:
                raise _ended(wanted_job[1], ended, number, in_lines)
        self._check_creations(lines, created, in_lines=in_lines)

    def is_known(self, draft: Draft) -> bool:
        """``check`` of one event by what this node knows; false when the store must be asked too.

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
        """Refuse what is known to be wrong; else note in ``created`` or ``unknown`` what is to be asked for."""
        tenant_id, job_id = job_of_line
        if job_id is None:
            return
        job = (tenant_id, job_id)
        is_creation = kind == CREATED
        if is_creation and self._made_here.fullmatch(job_id) is not None:
            raise _taken(job_id, number, in_lines)
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
        """The jobs that the store must be asked for."""
        wanted = list(unknown)
        if requested > Durability.LOCAL:
            wanted += [job for job, creation in created.items() if creation is not None and not self._knows(job)]
        return wanted

    def _knows(self, job: tuple[str, str]) -> bool:
        known = self._jobs.get(*job)
        return known is not None and known.creation is not None and not known.is_doubtful

    def _check_creations(self, lines: EventLines, created: Created, *, in_lines: bool) -> None:
        """Refuse, now that the chain was asked, what was created otherwise or has ended."""
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


def _not_found(job: tuple[str, str], number: int, in_lines: bool) -> LedgerError:
    reason = f"tenant {job[0]} has no job {job[1]}; create it first"
    return InvalidEventError(reason, number + 1) if in_lines else JobNotFoundError(reason)


def _taken(job_id: str, number: int, in_lines: bool) -> LedgerError:
    reason = f"job_id: {job_id} is of the form of the ids that this node makes; leave it out, or choose another"
    return InvalidEventError(reason, number + 1, ("job_id",)) if in_lines else InvalidInputError(reason, ("job_id",))


def _ended(job_id: str, ended: str, number: int, in_lines: bool) -> LedgerError:
    reason = f"job {job_id} {ended}"
    return InvalidEventError(reason, number + 1) if in_lines else JobEndedError(reason)


def _exists(job: tuple[str, str], number: int, in_lines: bool) -> LedgerError:
    reason = (
        f"tenant {job[0]} has a job {job[1]} that was created with another spec or other assigned_dcs; choose another "
        "job_id, or repeat the creation as it was"
    )
    return InvalidEventError(reason, number + 1, ("job_id",)) if in_lines else JobExistsError(reason)
