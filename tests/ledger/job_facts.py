"""States of jobs one event at a time: what folding many at once is compared with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ledger.machines.job_fold import HlcParts, JobFold, JobState
from ledger.machines.jobs import said_of_job


def event_fact(action: str, payload: Mapping[str, Any], hlc: HlcParts, digest: str, job_id: str, seq: int) -> JobState:
    """The state that one event is by itself."""
    folding = JobFold(job_id)
    folding.add(action, payload, hlc, digest, seq)
    return folding.state()


def fact_of(
    action: str, payload: Mapping[str, Any], hlc: HlcParts, digest: str, job_id: str, seq: int
) -> JobState | None:
    """The state that one entry is by itself, None when it says nothing of a job."""
    said = said_of_job(action, payload, hlc, digest, job_id)
    return None if said is None else event_fact(*said, job_id, seq)


def merge(a: JobState, b: JobState) -> JobState:
    """The state that both are together."""
    folding = JobFold(a.job_id, a)
    folding.join(b)
    return folding.state()
