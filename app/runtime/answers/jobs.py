"""Shapes of answers about jobs and their events, stats, commitments and capacities of nodes."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import WithJsonSchema
from typing_extensions import TypedDict

from app.runtime.answers import HexHash, HlcText, JobId, Page, TimeOfHlc
from ledger.facts.statuses import STATUSES

JobStatus = Annotated[str, WithJsonSchema({"enum": [*STATUSES], "type": "string"})]
Level = Literal["NONE", "LOCAL", "REGIONAL", "GLOBAL"]


class DurabilityAnswer(TypedDict):
    """What was asked for, what has been reached, and what that outlives."""

    requested: Level
    achieved: Level
    survives: list[Literal["process", "node", "region"]]


class BatchAnswer(TypedDict):
    """All events of one request were taken."""

    accepted: int
    durability: DurabilityAnswer
    first_hlc: HlcText
    first_at: TimeOfHlc
    last_hlc: HlcText
    last_at: TimeOfHlc
    job_ids: list[JobId]
    session: str


class StatsAnswer(TypedDict):
    """What became of stats reports: waiting to be written, or dropped. ``sample_rate`` is the share that was kept while
    they came, 0 when none was even looked at."""

    accepted: int
    dropped: int
    sample_rate: float


class ConsistencyAnswer(TypedDict):
    """Which promise the read kept, from where, and how far behind."""

    level: Literal["EVENTUAL", "SESSION", "BOUNDED_STALENESS", "STRONG"]
    source: str
    staleness_ms: int


class ListConsistencyAnswer(ConsistencyAnswer):
    """As ``ConsistencyAnswer``, and up to which entry of the tenant's chain the list knows, which ends at
    ``head_seq``. Where that is behind, ``staleness_ms`` is at least the age of the first entry that the list lacks."""

    as_of_seq: int
    head_seq: int


class LostTo(TypedDict):
    """The event that was chained first under the same Idempotency-Key."""

    job_id: JobId
    hlc: HlcText


class RefusedEvent(TypedDict):
    """An event of the job that is in the chain as REFUSED: it was acknowledged at LOCAL and lost against another of its
    Idempotency-Key (``lost_to``), or PostgreSQL would not hold it (``reason`` is ``sqlstate-`` and the code, ``seq`` is
    that of the entry that keeps its bytes)."""

    type: str
    hlc: HlcText
    reason: str
    seq: int | None
    lost_to: LostTo | None


class ListedJobAnswer(TypedDict):
    """One job: what all events about it say together."""

    tenant_id: str
    job_id: str
    status: JobStatus
    spec: Any
    assigned_dcs: list[str]
    fence_token: int
    completed: int
    failed: int
    actor: Any
    created_hlc: HlcText | None
    created_at: TimeOfHlc
    last_hlc: HlcText
    last_at: TimeOfHlc
    last_seq: int
    result: dict[str, Any] | None
    error: Any
    refused: RefusedEvent | None


class OtherCreation(TypedDict):
    """A later JobCreated of the same job, at ``seq``, that says something else than the first, which counts."""

    seq: int
    hlc: HlcText
    at: TimeOfHlc
    spec: Any
    assigned_dcs: Any


class JobAnswer(ListedJobAnswer):
    """One job and how fresh this view of it is. ``other_creations`` are at most 16, those of lowest HLC."""

    other_creations: list[OtherCreation]
    consistency: ConsistencyAnswer


class DamagedJobAnswer(TypedDict):
    """A job of which something stored is not what was chained, and what that is."""

    job_id: JobId
    detail: str


class JobList(Page):
    """Jobs, newest first. ``damaged`` names those that belong here and are not among the items, because what is stored
    of them is not what was chained."""

    items: list[ListedJobAnswer]
    damaged: list[DamagedJobAnswer]
    consistency: ListConsistencyAnswer


class JobEventAnswer(TypedDict):
    """One event of a job, as chained. ``state`` says how far it has come: GLOBAL, it is chained; APPLIED, the table of
    jobs has followed it; COMPACTED, a signed snapshot covers it."""

    seq: int
    hlc: HlcText
    at: TimeOfHlc
    type: str | None
    action: str
    actor: Any
    payload: Any
    payload_digest: HexHash
    chain_link: HexHash
    state: Literal["GLOBAL", "APPLIED", "COMPACTED"]


class JobEventList(Page):
    """Events of one job in HLC order."""

    items: list[JobEventAnswer]
    consistency: ConsistencyAnswer


class VerdictOfProposal(TypedDict):
    """A proposal that was accepted; ``index`` is the seq of its entry. One that was rejected is a problem."""

    index: int
    hlc: HlcText
    verdict: Literal["accepted"]


class CapacityAnswer(TypedDict):
    """A capacity that was recorded."""

    index: int
    hlc: HlcText
    node: str


class CommitmentItem(TypedDict):
    """One active commitment."""

    index: int
    commitment: dict[str, Any]


class CommitmentList(Page):
    """Active commitments as of one seq, in order of their index."""

    as_of_seq: int
    items: list[CommitmentItem]


class NodeItem(TypedDict):
    """What one node has."""

    index: int
    node: str
    capacity: dict[str, Any]


class NodeList(Page):
    """Capacities as of one seq, in order of the entries that set them."""

    as_of_seq: int
    items: list[NodeItem]
