"""What this node knows of jobs, so that a request about a known job costs no query.

An entry is a lower bound of the truth: a job that is here exists, a fence here was used, a job marked
ended has ended. Another node may know more; the fold sorts that out, here it is only used to refuse early.
"""

from __future__ import annotations

from collections import OrderedDict

JOBS_MAX = 200_000
"""Jobs remembered; the least recently used are forgotten first, and looked up again when needed."""


class KnownJob:
    """Highest fence seen, whether the job is known to have ended, and its creation as ``creation_digest`` has it.

    ``creation`` is None where it is not known, or cannot be compared.
    """

    __slots__ = ("creation", "ended", "fence_token")

    def __init__(self, fence_token: int, ended: bool, creation: str | None) -> None:
        self.fence_token = fence_token
        self.ended = ended
        self.creation = creation


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

    def learn(self, tenant_id: str, job_id: str, fence_token: int, ended: bool, creation: str | None = None) -> None:
        """Add knowledge; what was known already is never lost to it."""
        known = self._jobs.get((tenant_id, job_id))
        if known is None:
            self._jobs[(tenant_id, job_id)] = KnownJob(fence_token, ended, creation)
            if len(self._jobs) > JOBS_MAX:
                self._jobs.popitem(last=False)
            return
        if fence_token > known.fence_token:
            known.fence_token = fence_token
        known.ended = known.ended or ended
        if known.creation is None:
            known.creation = creation

    def reopen(self, tenant_id: str, job_id: str) -> None:
        """Forget that the job has ended, and how it was created: the event that said so was refused."""
        known = self._jobs.get((tenant_id, job_id))
        if known is not None:
            known.ended = False
            known.creation = None
