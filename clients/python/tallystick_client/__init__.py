"""Client of Tallystick, the tamper-evident job ledger: ``Client`` blocks, ``AsyncClient`` is awaited."""

from tallystick_client.answers import (
    Accepted,
    BatchRecorded,
    Entry,
    JobEvent,
    JobState,
    ListedJob,
    Recorded,
)
from tallystick_client.client import AsyncClient, Client
from tallystick_client.errors import (
    ConflictError,
    CopiesRemovedError,
    FinalError,
    InvalidError,
    JobEndedError,
    JobExistsError,
    JobNotFoundError,
    KeyReusedError,
    LaggedError,
    NotAllowedError,
    NotTheLedgerError,
    OtherRegionError,
    ProblemError,
    SpoolError,
    TallystickError,
    TransientError,
    UnreachableError,
    WriteLostError,
)
from tallystick_client.facts import EventName, Level, Status
from tallystick_client.jobs import AsyncJob, Job
from tallystick_client.outbox import SpoolReport
from tallystick_client.transport import Reply

__all__ = [
    "Accepted",
    "AsyncClient",
    "AsyncJob",
    "BatchRecorded",
    "Client",
    "ConflictError",
    "CopiesRemovedError",
    "Entry",
    "EventName",
    "FinalError",
    "InvalidError",
    "Job",
    "JobEndedError",
    "JobEvent",
    "JobExistsError",
    "JobNotFoundError",
    "JobState",
    "KeyReusedError",
    "LaggedError",
    "Level",
    "ListedJob",
    "NotAllowedError",
    "NotTheLedgerError",
    "OtherRegionError",
    "ProblemError",
    "Recorded",
    "Reply",
    "SpoolError",
    "SpoolReport",
    "Status",
    "TallystickError",
    "TransientError",
    "UnreachableError",
    "WriteLostError",
]
