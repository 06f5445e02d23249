"""The statuses of a job: what each means, and which of them counts.

A status with a ``part`` is reached by an event that raises this part. Of the statuses that a job has reached the one of
highest fence counts, and of those of one fence the one of highest precedence. REFUSED, CANCELLED and CANCELLING count
whatever the fence; ``ledger.machines.jobs.status`` has their rules.
"""

from collections.abc import Mapping
from typing import Final, Literal, NamedTuple

from ledger.facts.events import JOB_EVENTS, Part


class Status(NamedTuple):
    """One status."""

    name: str
    precedence: int
    when: str
    """When a job has it; Markdown."""
    part: Part | None = None
    """The part of a job's state that reaches it."""
    event: str = ""
    """Of those that an END reaches, the event that does."""
    is_end: bool = False
    """Whether a job of this status takes no more events at the edge."""
    tone: Literal["", "ok", "warn", "bad"] = ""
    """How the console colours it."""


_BELOW: Final = "and its fence token is at least that of every lower status"

_STATUSES: Final = (
    Status("SUBMITTED", 0, "nothing else is known"),
    Status("ACCEPTED", 10, "a data centre accepted it", Part.ACCEPTANCE),
    Status("RUNNING", 20, f"a workflow or progress was reported, {_BELOW}", Part.RUN),
    Status("CANCELLING", 80, "a cancellation was requested", Part.CANCELLATION, tone="warn"),
    Status(
        "CANCELLED",
        90,
        "a cancellation was requested, and there is an end, or an acknowledgement of every data centre that accepted "
        "the job (of those assigned, where none accepted) and of at least one",
        is_end=True,
    ),
    Status("COMPLETED", 50, f"it completed, {_BELOW}", Part.END, "JobCompleted", is_end=True, tone="ok"),
    Status("FAILED", 50, f"it failed, {_BELOW}", Part.END, "JobFailed", is_end=True, tone="bad"),
    Status("TIMED_OUT", 50, f"it timed out, {_BELOW}", Part.END, "JobTimedOut", is_end=True, tone="bad"),
    Status(
        "REFUSED",
        100,
        "its creation was acknowledged at LOCAL and lost against another of its Idempotency-Key, or PostgreSQL would "
        "not hold it (`refused` says which): the job never was",
        is_end=True,
        tone="bad",
    ),
)

STATUS_OF_NAME: Final[Mapping[str, Status]] = {status.name: status for status in _STATUSES}

STATUSES: Final = tuple(STATUS_OF_NAME)
"""The names of all statuses that a job can have."""

ENDED: Final = frozenset(status.name for status in _STATUSES if status.is_end)
"""The statuses of jobs that take no more events."""

SUBMITTED: Final = "SUBMITTED"
ACCEPTED: Final = "ACCEPTED"
CANCELLING: Final = "CANCELLING"
CANCELLED: Final = "CANCELLED"
COMPLETED: Final = "COMPLETED"
FAILED: Final = "FAILED"
TIMED_OUT: Final = "TIMED_OUT"
REFUSED: Final = "REFUSED"

REACHED: Final = tuple(
    (status.part, status.name)
    for status in sorted(_STATUSES, key=lambda status: -status.precedence)
    if status.part not in (None, Part.ACCEPTANCE, Part.CANCELLATION, Part.END)
)
"""The statuses between an acceptance and an end, and the part that reaches each; highest precedence first."""

STATUS_OF_END: Final = {JOB_EVENTS[status.event].action: status.name for status in _STATUSES if status.event}
"""The status that an end of this action gives."""
