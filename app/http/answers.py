"""Shapes of answers, for OpenAPI; routers build the same shapes as plain values, which is faster.

That both agree is proved by running every operation against its description.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any, Literal

import orjson
from pydantic import BaseModel, ConfigDict
from starlette.responses import Response

from app.http.fields import HexHash, HlcText, JobId
from ledger.jobs import STATUSES

_JSON_OPTIONS = orjson.OPT_UTC_Z

JobStatus = Literal[
    "SUBMITTED", "ACCEPTED", "RUNNING", "CANCELLING", "CANCELLED", "COMPLETED", "FAILED", "TIMED_OUT", "REFUSED"
]
assert set(JobStatus.__args__) == set(STATUSES)  # type: ignore[attr-defined]
Level = Literal["NONE", "LOCAL", "REGIONAL", "GLOBAL"]


def json_answer(value: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """``value`` as a JSON answer."""
    return Response(orjson.dumps(value, option=_JSON_OPTIONS), status, headers, media_type="application/json")


class _Answer(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Problem(BaseModel):
    """RFC 9457. ``type`` ends in the problem's name; some problems have further members."""

    model_config = ConfigDict(extra="allow")
    type: str
    title: str
    status: int
    detail: str
    path: str = ""


class DurabilityAnswer(_Answer):
    """What was asked for, what has been reached, and what that outlives."""

    requested: Level
    achieved: Level
    survives: list[Literal["process", "node", "region"]]


class ChainPlace(_Answer):
    """Where an event stands in its tenant's chain."""

    seq: int
    chain_link: HexHash
    prev_chain_link: HexHash | None


TimeOfHlc = str | None
"""The time that the HLC beside it says (RFC 3339, UTC); null where that has no such form."""


class EventAnswer(_Answer):
    """An event that was taken. ``chain`` is null when the answer came before chaining."""

    job_id: JobId
    tenant_id: str
    type: str
    action: str
    hlc: HlcText
    at: TimeOfHlc
    epoch: int
    lsn: int
    fence_token: int
    durability: DurabilityAnswer
    chain: ChainPlace | None
    session: str


class BatchAnswer(_Answer):
    """All events of one request were taken."""

    accepted: int
    durability: DurabilityAnswer
    first_hlc: HlcText
    first_at: TimeOfHlc
    last_hlc: HlcText
    last_at: TimeOfHlc
    job_ids: list[JobId]
    session: str


class StatsAnswer(_Answer):
    """What became of stats reports: waiting to be written, or dropped. ``sample_rate`` is the share that was kept while
    they came, 0 when none was even looked at."""

    accepted: int
    dropped: int
    sample_rate: float


class ConsistencyAnswer(_Answer):
    """Which promise the read kept, from where, and how far behind."""

    level: Literal["EVENTUAL", "SESSION", "BOUNDED_STALENESS", "STRONG"]
    source: str
    staleness_ms: int


class LostTo(_Answer):
    """The event that was chained first under the same Idempotency-Key."""

    job_id: JobId
    hlc: HlcText


class RefusedEvent(_Answer):
    """An event of the job that was acknowledged at LOCAL and lost against another of its Idempotency-Key."""

    type: str
    hlc: HlcText
    reason: str
    lost_to: LostTo


class ListedJobAnswer(_Answer):
    """One job: what all events about it say together."""

    tenant_id: str
    job_id: str
    status: JobStatus
    spec: Any
    assigned_dcs: list[str]
    fence_token: int
    completed: int
    failed: int
    created_hlc: HlcText | None
    created_at: TimeOfHlc
    last_hlc: HlcText
    last_at: TimeOfHlc
    last_seq: int
    result: dict[str, Any] | None
    error: Any
    refused: RefusedEvent | None


class OtherCreation(_Answer):
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


class JobList(_Answer):
    """Jobs, newest first."""

    items: list[ListedJobAnswer]
    next_cursor: str | None
    consistency: ConsistencyAnswer


class JobEventAnswer(_Answer):
    """One event of a job, as chained."""

    seq: int
    hlc: HlcText
    at: TimeOfHlc
    type: str | None
    action: str
    payload: Any
    payload_digest: HexHash
    chain_link: HexHash


class JobEventList(_Answer):
    """Events of one job in HLC order."""

    items: list[JobEventAnswer]
    next_cursor: str | None
    consistency: ConsistencyAnswer


class TreeAnswer(_Answer):
    """A tenant's Merkle tree."""

    size: int
    root_hash: HexHash
    checkpoint_size: int | None


class HeadAnswer(_Answer):
    """End of a tenant's chain."""

    tenant_id: str
    seq: int
    chain_link: HexHash | None
    hlc: HlcText | None
    at: TimeOfHlc
    updated_at: datetime
    signed_to_seq: int
    tree: TreeAnswer | None


class EntryAnswer(_Answer):
    """One entry, every column; ``payload`` and ``origin`` are strings of the stored bytes."""

    id: int
    tenant_id: str
    seq: int
    t_hlc: str
    at: TimeOfHlc
    hlc_physical: int
    hlc_logical: int
    hlc_node: str
    job_id: str
    action: str
    link_version: int
    prev_chain_link: str | None
    chain_link: str
    payload_digest: str
    payload: str
    origin: str | None
    created_at: datetime


class EntryList(_Answer):
    """Entries in seq order."""

    items: list[EntryAnswer]
    next_cursor: str | None


class InclusionAnswer(_Answer):
    """Proof (RFC 9162) that a leaf stands in the tree of ``tree_size`` leaves."""

    leaf_index: int
    tree_size: int
    leaf_hash: HexHash
    root_hash: HexHash
    hashes: list[HexHash]


class ConsistencyProofAnswer(_Answer):
    """Proof (RFC 9162) that the tree of ``second`` leaves begins with the tree of ``first``."""

    first: int
    second: int
    first_root: HexHash
    second_root: HexHash
    hashes: list[HexHash]


class AddedCosignature(_Answer):
    """A cosignature that was stored; ``witness`` is the verifier key."""

    witness: str
    time: datetime


class CosignedAnswer(_Answer):
    """What was stored of a cosigned checkpoint."""

    tenant_id: str
    tree_size: int
    root_hash: HexHash
    added: list[AddedCosignature]


class CosignatureAnswer(_Answer):
    """A stored cosignature; ``note`` is the checkpoint with this one cosignature."""

    tree_size: int
    witness: str
    time: datetime
    status: Literal["ok", "broken", "unknown_key"]
    note: str


class CosignatureList(_Answer):
    """Cosignatures, newest first."""

    items: list[CosignatureAnswer]
    next_cursor: str | None


class BreakAnswer(_Answer):
    """The first thing that does not hold."""

    seq: int
    kind: str
    detail: str
    expected: Any
    actual: Any


class VerdictHead(_Answer):
    """End of the chain as verified."""

    seq: int
    chain_link: str | None
    hlc: str | None


class AnchoredAnswer(_Answer):
    """What somebody outside said of the first ``to_seq`` entries, and whether it holds."""

    kind: Literal["witness", "rfc3161"]
    by: str
    time: str
    to_seq: int
    status: Literal["ok", "broken", "invalid", "not_checked"]
    detail: str | None


class TimestampAnswer(_Answer):
    """A time stamp (RFC 3161) over the bytes of ``checkpoint``; ``response`` is the TimeStampResp in base64."""

    kind: Literal["rfc3161"]
    tree_size: int
    authority: str
    time: datetime
    checkpoint: str
    response: str


class TimestampList(_Answer):
    """Time stamps, newest first."""

    items: list[TimestampAnswer]
    next_cursor: str | None


class VerdictAnswer(_Answer):
    """What verification found."""

    tenant_id: str
    valid: bool
    entries_checked: int
    from_seq: int
    to_seq: int
    head: VerdictHead
    verdicts: dict[str, Literal["ok", "broken", "not_checked", "unknown_key"]]
    first_break: BreakAnswer | None
    breaks: dict[str, int]
    compared_with: str | None
    anchors: list[AnchoredAnswer]
    signed_to_seq: int
    unsigned_entries: int
    duration_ms: float


class TenantAnswer(_Answer):
    """One tenant, or ``_system``."""

    tenant_id: str


class TenantList(_Answer):
    """Tenants by name."""

    items: list[TenantAnswer]
    next_cursor: str | None


class ListedSnapshot(_Answer):
    """One signed batch of entries."""

    id: int
    tenant_id: str
    from_seq: int
    to_seq: int
    snapshot_hlc: HlcText
    snapshot_at: TimeOfHlc
    from_chain_link: HexHash
    to_chain_link: HexHash
    entry_count: int
    merkle_root: HexHash
    created_at: datetime


class SnapshotAnswer(ListedSnapshot):
    """One signed batch of entries with its DSSE envelope."""

    dsse_envelope: dict[str, Any]


class AcknowledgedBreak(_Answer):
    """A break that verification found and somebody has seen."""

    kind: str
    seq: int
    detail: str
    found_at: str


class AcknowledgeAnswer(_Answer):
    """What was acknowledged, each in an entry of `_system`."""

    tenant_id: str
    acknowledged: list[AcknowledgedBreak]


class SnapshotList(_Answer):
    """Snapshots, newest first."""

    items: list[ListedSnapshot]
    next_cursor: str | None


class ConflictAnswer(_Answer):
    """An event whose HLC another one has: a CONFLICT entry holds it, with an HLC that follows from it."""

    tenant_id: str
    hlc: HlcText
    job_id: str
    action: str
    digest: HexHash
    kept_digest: HexHash
    conflict_hlc: HlcText


class ImportHead(_Answer):
    """End of a tenant's chain after the import; seq 0 and nulls for one that a dry run would begin."""

    tenant_id: str
    seq: int
    chain_link: HexHash | None
    hlc: HlcText | None


class ImportAnswer(_Answer):
    """What an import came to: `imported + duplicates = entries`. `conflicts` lists the first 1000. `new_head` is that
    of the first tenant by name, `new_heads` has all."""

    bundles: int
    entries: int
    imported: int
    duplicates: int
    conflicts: list[ConflictAnswer]
    jobs_changed: int
    new_head: ImportHead
    new_heads: dict[str, ImportHead]
    dry_run: bool


class KeyEntry(_Answer):
    """The entry of ``_system`` that introduced a key."""

    seq: int
    chain_link: HexHash


class KeyAnswer(_Answer):
    """A public key and when it counts."""

    key_id: str
    algorithm: str
    public_key_pem: str
    not_before: datetime | None
    not_after: datetime | None
    revoked_from_hlc: HlcText | None
    node_id: str | None
    signs_snapshots: bool
    signs_checkpoints: bool
    revocation_reason: str | None
    admitted: bool
    admitted_by: str | None
    introduced_by: KeyEntry | None


class WaitingKeyAnswer(KeyAnswer):
    """A public key that nobody has admitted, and what an admission vouches for; of the old form is one that was
    introduced before there were statements about keys in the ledger."""

    facts: dict[str, Any]
    is_old_form: bool


class RotationAnswer(_Answer):
    """The key that signs now and the one whose place it took."""

    key: KeyAnswer
    previous: KeyAnswer


class KeyList(_Answer):
    """Keys of snapshots, and of checkpoints in the form of C2SP signed notes."""

    keys: list[KeyAnswer]
    not_admitted: list[WaitingKeyAnswer]
    root_key_id: str | None
    log_verifier_keys: list[str]


class Positions(_Answer):
    """How far this node's writes have come; each is at least the next."""

    written_lsn: int
    durable_lsn: int
    commit_lsn: int
    chained_lsn: int


class ClockAnswer(_Answer):
    """The hybrid logical clock."""

    last_hlc: HlcText
    last_at: TimeOfHlc
    offset_ms: int
    max_clock_skew_ms: int
    ticks: int
    skew_rejections: int


class Topology(_Answer):
    """What an acknowledged write outlives here, level by level."""

    postgres_survives: Literal["process", "node", "region"]
    safekeepers: int


class NodeAnswer(_Answer):
    """This node."""

    node_id: str
    region: str
    gate: str
    epoch: int
    wal_id: str
    ack_mode: str
    topology: Topology
    positions: Positions
    clock: ClockAnswer
    failure: str | None


class PrivacyAnswer(_Answer):
    """A tenant's private fields, and the entry of its chain that says so."""

    tenant_id: str
    fields: list[str]
    subject: str | None
    seq: int | None
    declared_at: datetime | None
    covers: str
    other_nodes_within_s: float


class ErasureAnswer(_Answer):
    """The newest erasure of a subject, and the entry of the tenant's chain that says so."""

    tenant_id: str
    key_ids: list[str]
    seq: int
    erased_at: datetime
    other_nodes_within_s: float


class LiveAnswer(_Answer):
    """The process runs."""

    status: Literal["live"]


class CheckAnswer(_Answer):
    """One readiness check."""

    ok: bool
    detail: str | None


class ReadyAnswer(_Answer):
    """The node takes requests."""

    status: Literal["ready"]
    checks: dict[str, CheckAnswer]
