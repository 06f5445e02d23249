"""Which data centres an entry concerns, and of which a cancellation awaits the acknowledgement.

A job has the data centres that it is assigned to, and those that have accepted it. An entry that a data centre reported
of itself (``dc_id``) concerns that one; any other entry of a job concerns all data centres of the job, and those that
it names by itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ledger.machines.job_state import JobState
from ledger.machines.jobs import ABOUT_JOBS


def reporting_dc(payload: Mapping[str, Any]) -> str | None:
    """The data centre that reported it of itself; None when none did."""
    dc = payload.get("dc_id")
    return dc if isinstance(dc, str) else None


def named_dcs(payload: Mapping[str, Any]) -> frozenset[str]:
    """The data centres that the payload of an entry names, the one that reports it aside."""
    assigned = payload.get("assigned_dcs")
    named = [payload.get("failed_dc"), *(assigned if isinstance(assigned, list) else ())]
    return frozenset(dc for dc in named if isinstance(dc, str))


def is_about_job(action: str) -> bool:
    """Whether the entry is one of a job: others concern no data centre that they do not name."""
    return action in ABOUT_JOBS


def dcs_of(state: JobState) -> frozenset[str]:
    """The data centres of the job."""
    return frozenset((*(state.created.assigned_dcs if state.created is not None else ()), *state.accepted))


def awaits_ack(state: JobState, dc: str) -> bool:
    """Whether the job is to be cancelled, and ``dc``, one of its data centres, has not acknowledged that."""
    return state.cancel is not None and dc not in state.ack and dc in dcs_of(state)
