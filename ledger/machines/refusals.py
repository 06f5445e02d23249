"""REFUSED entries for events that PostgreSQL would not hold, as the reader of their job finds them.

It may be the job id that was not held, so such an entry has another, which follows from it::

    "refused:" + lowercase hex SHA-256 of the job id

Its payload says the event's record type, job id and bytes (base64) and the SQLSTATE. It is no part of the job's state.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterable
from hashlib import sha256
from typing import NamedTuple

import orjson

from ledger.facts.events import ACTIONS, EVENTS_BY_ACTION
from ledger.hlc import Hlc
from ledger.machines.job_fold import CREATION


class Refusal(NamedTuple):
    """One such entry."""

    seq: int
    hlc: Hlc
    action: str
    """Of the event that it keeps."""
    sqlstate: str

    @property
    def is_creation(self) -> bool:
        """Whether the event was to create the job."""
        return self.action == CREATION

    def text(self) -> str:
        """Why the job that it was to create takes no events, to be said behind its name."""
        return (
            f"was never made: PostgreSQL refused its creation with SQLSTATE {self.sqlstate}, and the REFUSED entry at "
            f"seq {self.seq} keeps its bytes; mend what refuses it and create the job again"
        )


def refused_job_id(job_id: str) -> str:
    """Job id of the entries that stand in for events of ``job_id``."""
    return f"refused:{sha256(job_id.encode()).hexdigest()}"


def refusal_of(job_id: str, entries: Iterable[tuple[int, str, str]]) -> Refusal | None:
    """What the (seq, HLC, payload) of REFUSED entries say of the job: of its first creation, else of its newest event;
    None when none of them is of this job."""
    found = [each for entry in entries if (each := _refusal(job_id, *entry)) is not None]
    creations = [each for each in found if each.is_creation]
    return creations[0] if creations else found[-1] if found else None


def _refusal(job_id: str, seq: int, t_hlc: str, payload: str) -> Refusal | None:
    try:
        facts = orjson.loads(payload)
        action, sqlstate, hlc = ACTIONS[facts["record_type"]], facts["sqlstate"], Hlc.parse(t_hlc)
        is_of_job = facts["job_id"] == b64encode(job_id.encode()).decode()
    except (ValueError, TypeError, KeyError):
        return None
    if not is_of_job or action not in EVENTS_BY_ACTION or not isinstance(sqlstate, str):
        return None
    return Refusal(seq, hlc, action, sqlstate)
