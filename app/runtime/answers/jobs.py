"""Shapes of answers about jobs and their events, stats, commitments and capacities of nodes."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import WithJsonSchema

from app.runtime.answers import HexHash, HlcText, JobId, TimeOfHlc, list_shape, optional, shape
from ledger.facts.statuses import STATUSES

JobStatus = Annotated[str, WithJsonSchema({"enum": [*STATUSES], "type": "string"})]
Level = Literal["NONE", "LOCAL", "REGIONAL", "GLOBAL"]

DurabilityAnswer = shape(
    "DurabilityAnswer",
    "What was asked for, what has been reached, and what that outlives.",
    requested=Level,
    achieved=Level,
    survives=list[Literal["process", "node", "region"]],
)

BatchAnswer = shape(
    "BatchAnswer",
    "All events of one request were taken. ``home_regions`` are the regions other than this one that made the ids of\n"
    "their jobs.",
    accepted=int,
    durability=DurabilityAnswer,
    first_hlc=HlcText,
    first_at=TimeOfHlc,
    last_hlc=HlcText,
    last_at=TimeOfHlc,
    job_ids=list[JobId],
    home_regions=list[str],
    session=str,
)

StatsAnswer = shape(
    "StatsAnswer",
    "What became of stats reports: waiting to be written, or dropped. ``sample_rate`` is the share that was kept "
    "while\nthey came, 0 when none was even looked at.",
    accepted=int,
    dropped=int,
    sample_rate=float,
)

ConsistencyAnswer = shape(
    "ConsistencyAnswer",
    "Which promise the read kept, from where, and how far behind.",
    level=Literal["EVENTUAL", "SESSION", "BOUNDED_STALENESS", "STRONG"],
    source=str,
    staleness_ms=int,
)

ListConsistencyAnswer = shape(
    "ListConsistencyAnswer",
    "As ``ConsistencyAnswer``, and up to which entry of the tenant's chain the list knows, which ends at\n"
    "``head_seq``. Where that is behind, ``staleness_ms`` is at least the age of the first entry that the list lacks.",
    **ConsistencyAnswer.__annotations__,
    as_of_seq=int,
    head_seq=int,
)

LostTo = shape(
    "LostTo",
    "The event that was chained first under the same Idempotency-Key.",
    job_id=JobId,
    hlc=HlcText,
)

RefusedEvent = shape(
    "RefusedEvent",
    "An event of the job that is in the chain as REFUSED: it was acknowledged at LOCAL and lost against another of "
    "its\nIdempotency-Key (``lost_to``), or PostgreSQL would not hold it (``reason`` is ``sqlstate-`` and the code, "
    "``seq`` is\nthat of the entry that keeps its bytes).",
    type=str,
    hlc=HlcText,
    reason=str,
    seq=int | None,
    lost_to=LostTo | None,
)

ConflictingEntry = shape(
    "ConflictingEntry",
    "One entry of a conflict. ``log`` first chained it; a list of jobs leaves that out.",
    seq=int,
    hlc=HlcText,
    at=TimeOfHlc,
    node_id=str,
    counts=bool,
    log=optional(str | None),
)

JobConflict = shape(
    "JobConflict",
    "Facts about a job that exclude each other, the one that counts first. Kind ``creation``: it was created more\n"
    "than once, with different content; by the rule ``lowest-hlc`` the creation of lowest HLC counts.",
    kind=Literal["creation"],
    rule=Literal["lowest-hlc"],
    entries=[ConflictingEntry],
)

ListedJobAnswer = shape(
    "ListedJobAnswer",
    "One job: what all events about it say together. ``name`` is ``name``, ``task``, ``job`` or ``script`` of its\n"
    "spec, else its ``command``. ``uncounted_seq`` is that of its newest event that does not count, because its log\n"
    "is excluded. ``run_ms`` is from the first acceptance to the end, of the try that ended.",
    tenant_id=str,
    job_id=str,
    name=str | None,
    status=JobStatus,
    spec=Any,
    assigned_dcs=list[str],
    fence_token=int,
    completed=int,
    failed=int,
    actor=Any,
    created_hlc=HlcText | None,
    created_at=TimeOfHlc,
    last_hlc=HlcText,
    last_at=TimeOfHlc,
    last_seq=int,
    ended_at=TimeOfHlc,
    run_ms=int | None,
    result=dict[str, Any] | None,
    error=Any,
    refused=RefusedEvent | None,
    uncounted_seq=optional(int | None),
    conflicts=optional([JobConflict]),
)

OtherCreation = shape(
    "OtherCreation",
    "A later JobCreated of the same job, at ``seq``, that says something else than the first, which counts.",
    seq=int,
    hlc=HlcText,
    at=TimeOfHlc,
    spec=Any,
    assigned_dcs=Any,
)

JobAnswer = shape(
    "JobAnswer",
    "One job and how fresh this view of it is. ``other_creations`` are at most 16, those of lowest HLC, ascending.",
    **ListedJobAnswer.__annotations__,
    other_creations=[OtherCreation],
    consistency=ConsistencyAnswer,
)

DamagedJobAnswer = shape(
    "DamagedJobAnswer",
    "A job of which something stored is not what was chained, and what that is.",
    job_id=JobId,
    detail=str,
)

JobList = list_shape(
    "JobList",
    "Jobs, newest first. ``damaged`` names those that belong here and are not among the items, because what is stored\n"
    "of them is not what was chained.",
    ListedJobAnswer,
    damaged=[DamagedJobAnswer],
    consistency=ListConsistencyAnswer,
)

RunTimesAnswer = shape(
    "RunTimesAnswer",
    "Run times of so many ended jobs: the shortest and the longest, and percentiles within 1 %.",
    jobs=int,
    min_ms=int,
    p50_ms=int,
    p95_ms=int,
    max_ms=int,
)

_COUNTED: dict[str, Any] = {
    "jobs": int,
    "by_trace_time": int,
    "statuses": {str: int},
    "run_times": RunTimesAnswer | None,
}

CountedJobs = shape(
    "CountedJobs",
    "So many jobs, so many of each status that there is. Of ``by_trace_time`` jobs the hour is that of the\n"
    "``trace_time`` of their creation, of the others that of its HLC.",
    **_COUNTED,
)

JobGroup = shape(
    "JobGroup",
    "The jobs of one ``value``, as ``CountedJobs``: a status, an hour, a data centre, an error, or a value of a\n"
    "field. Null for errors without a text. Of more than 200 groups each is without ``run_times``.",
    value=str | None,
    **_COUNTED,
)

JobSummary = shape(
    "JobSummary",
    "How many jobs of a tenant there are, by group: the newest hours or days, or the groups of most jobs.\n"
    "``groups_left_out`` more have some. ``other`` are the jobs with values of a field that are not counted by\n"
    "themselves, null without any. ``since`` and ``until`` are the hours that were counted, null without a bound.",
    tenant_id=str,
    by=str,
    dc=str | None,
    since=str | None,
    until=str | None,
    all=CountedJobs,
    groups=[JobGroup],
    groups_left_out=int,
    other=CountedJobs | None,
    consistency=ListConsistencyAnswer,
)

ReportAnswer = shape(
    "ReportAnswer",
    "A report that is being made; ``GET /v1/reports/{report_id}`` of node ``node_id`` has its page once it is done.\n"
    "``progress`` says how far Spark is, null where the node makes it of the figures.",
    report_id=str,
    tenant_id=str,
    node_id=str,
    started_at=str,
    progress=str | None,
)

EventOrigin = shape(
    "EventOrigin",
    "Where an imported entry was first chained, and what brought it.",
    log=str,
    seq=int,
    chain_link=HexHash,
    node_id=str,
    bundle_digest=HexHash,
)

JobEventAnswer = shape(
    "JobEventAnswer",
    "One event of a job, as chained. ``state`` says how far it has come: GLOBAL, it is chained; APPLIED, the table of\n"
    "jobs has followed it; COMPACTED, a signed snapshot covers it. ``origin`` is where an imported event was first\n"
    "chained: the log, its seq and link there, and the node and the digest of the bundle that it left it in; null\n"
    "for an event of this ledger. If its log is excluded, the event does not count.",
    seq=int,
    hlc=HlcText,
    at=TimeOfHlc,
    type=str | None,
    action=str,
    actor=Any,
    payload=Any,
    payload_digest=HexHash,
    chain_link=HexHash,
    state=Literal["GLOBAL", "APPLIED", "COMPACTED"],
    origin=optional(EventOrigin | None),
    counts=optional(bool),
)

JobEventList = list_shape(
    "JobEventList",
    "Events of one job in HLC order.",
    JobEventAnswer,
    consistency=ConsistencyAnswer,
)

VerdictOfProposal = shape(
    "VerdictOfProposal",
    "A proposal that was accepted; ``index`` is the seq of its entry. One that was rejected is a problem.",
    index=int,
    hlc=HlcText,
    verdict=Literal["accepted"],
)

CapacityAnswer = shape(
    "CapacityAnswer",
    "A capacity that was recorded.",
    index=int,
    hlc=HlcText,
    node=str,
)

RulesAnswer = shape(
    "RulesAnswer",
    "Rules that judge a tenant's proposals from an entry on.",
    index=int,
    hlc=HlcText,
    version=int,
)

CommitmentItem = shape(
    "CommitmentItem",
    "One active commitment.",
    index=int,
    commitment=dict[str, Any],
)

CommitmentList = list_shape(
    "CommitmentList",
    "Active commitments as of one seq, in order of their index.",
    CommitmentItem,
    as_of_seq=int,
)

NodeItem = shape(
    "NodeItem",
    "What one node has, what is reserved of it and what is free. ``excess`` is what is reserved beyond its limit,\n"
    "which is its capacity times its overcommit; ``overbooked`` says whether that is anything.",
    index=int,
    node=str,
    capacity=dict[str, Any],
    overcommit=dict[str, Any],
    reserved=dict[str, Any],
    free=dict[str, Any],
    overbooked=bool,
    excess=dict[str, Any],
)

NodeList = list_shape(
    "NodeList",
    "Nodes of known capacity as of one seq, in order of the entries that set it, and the rules in force.",
    NodeItem,
    as_of_seq=int,
    rules=int,
)
