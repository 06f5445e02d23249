"""The ledger's answers, as JSON; newer ledgers may send more members."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, TypedDict

from tallystick_client.facts import Level, Status

Consistency = Literal["eventual", "session", "bounded_staleness", "strong"]


class Durability(TypedDict):
    """The requested level, the reached level, and the failures that it survives."""

    requested: Level
    achieved: Level
    survives: list[str]


class ChainPlace(TypedDict):
    """The position of an event in its tenant's chain."""

    seq: int
    chain_link: str
    prev_chain_link: str | None


class Recorded(TypedDict):
    """A recorded event. ``chain`` is None when the answer came before chaining. ``home_region`` is the region that made
    the job's id, None if the ledger does not know it."""

    job_id: str
    home_region: str | None
    tenant_id: str
    type: str
    action: str
    hlc: str
    at: str
    epoch: int
    lsn: int
    fence_token: int
    durability: Durability
    chain: ChainPlace | None
    session: str


class BatchRecorded(NamedTuple):
    """Events recorded together: their number, and the ids of the created jobs, in order."""

    accepted: int
    job_ids: list[str]


class ListedJob(TypedDict):
    """A job: the fold of all its events."""

    tenant_id: str
    job_id: str
    name: str | None
    status: Status
    spec: Any
    assigned_dcs: list[str]
    fence_token: int
    completed: int
    failed: int
    actor: Any
    created_hlc: str | None
    created_at: str | None
    last_hlc: str
    last_at: str
    last_seq: int
    ended_at: str | None
    run_ms: int | None
    result: dict[str, Any] | None
    error: Any


class JobState(ListedJob):
    """A job, and the freshness of this view: ``level``, ``source``, ``staleness_ms``."""

    consistency: dict[str, Any]


class CountedJobs(TypedDict):
    """So many jobs, by status; of ``by_trace_time`` the hour is that of a trace. ``run_times`` has ``jobs``,
    ``min_ms``, ``p50_ms``, ``p95_ms`` and ``max_ms``, None if none is known."""

    jobs: int
    by_trace_time: int
    statuses: dict[str, int]
    run_times: dict[str, int] | None


class JobGroup(CountedJobs):
    """The jobs of one status, hour, day, data centre, error or value of a field."""

    value: str | None


class JobsSummary(TypedDict):
    """How many jobs of a tenant there are."""

    tenant_id: str
    by: str
    dc: str | None
    since: str | None
    until: str | None
    all: CountedJobs
    groups: list[JobGroup]
    groups_left_out: int
    other: CountedJobs | None
    consistency: dict[str, Any]


class JobEvent(TypedDict):
    """An event of a job, as chained."""

    seq: int
    hlc: str
    at: str
    type: str | None
    action: str
    actor: Any
    payload: Any
    payload_digest: str
    chain_link: str
    state: Literal["GLOBAL", "APPLIED", "COMPACTED"]


class Entry(TypedDict):
    """An entry of a chain, every column of it; ``payload`` is the text of the stored bytes."""

    tenant_id: str
    seq: int
    t_hlc: str
    job_id: str
    action: str
    prev_chain_link: str | None
    chain_link: str
    payload_digest: str
    payload: str
    origin: Any
    at: str


class Accepted(TypedDict):
    """A proposal that is in force from entry ``index`` on."""

    index: int
    hlc: str
    verdict: Literal["accepted"]
