"""Shapes of answers about chains: heads, entries, proofs, verdicts, anchors, snapshots, imports."""

from __future__ import annotations

from typing import Any, Literal

from app.runtime.answers import HexHash, HlcText, TenantId, Time, TimeOfHlc, list_shape, optional, shape

EntryAnswer = shape(
    "EntryAnswer",
    "One entry, every column; ``payload`` and ``origin`` are strings of the stored bytes.",
    id=int,
    tenant_id=str,
    seq=int,
    t_hlc=str,
    at=TimeOfHlc,
    hlc_physical=int,
    hlc_logical=int,
    hlc_node=str,
    job_id=str,
    action=str,
    link_version=int,
    prev_chain_link=str | None,
    chain_link=str,
    payload_digest=str,
    payload=str,
    origin=str | None,
    created_at=Time,
)

EntryList = list_shape("EntryList", "Entries in seq order.", EntryAnswer)

InclusionAnswer = shape(
    "InclusionAnswer",
    "Proof (RFC 9162) that a leaf stands in the tree of ``tree_size`` leaves.",
    leaf_index=int,
    tree_size=int,
    leaf_hash=HexHash,
    root_hash=HexHash,
    hashes=list[HexHash],
)

JobEntryAnswer = shape("JobEntryAnswer", "One entry of a job.", leaf_index=int, leaf_hash=HexHash)

NeighbourAnswer = shape(
    "NeighbourAnswer",
    "The leaf of another job, and its path.",
    count=int,
    digest=HexHash,
    hashes=list[HexHash],
    key=HexHash,
)

RunProofAnswer = shape(
    "RunProofAnswer",
    "The place of a job in one run of the index of jobs.",
    at=int,
    hashes=list[HexHash] | None,
    jobs=int,
    left=NeighbourAnswer | None,
    right=NeighbourAnswer | None,
)

JobProofAnswer = shape(
    "JobProofAnswer",
    "All entries of a job from ``from_seq`` to ``tree_size``, or none, proved by the index of jobs of a snapshot.",
    tenant_id=str,
    job_id=str,
    from_seq=int,
    tree_size=int,
    entries=list[JobEntryAnswer],  # type: ignore[valid-type]
    runs=list[RunProofAnswer],  # type: ignore[valid-type]
    snapshot_id=int,
    dsse_envelope=dict[str, Any],
)

ConsistencyProofAnswer = shape(
    "ConsistencyProofAnswer",
    "Proof (RFC 9162) that the tree of ``second`` leaves begins with the tree of ``first``.",
    first=int,
    second=int,
    first_root=HexHash,
    second_root=HexHash,
    hashes=list[HexHash],
)

AddedCosignature = shape(
    "AddedCosignature",
    "A cosignature that was stored; ``witness`` is the verifier key.",
    witness=str,
    time=Time,
)

CosignedAnswer = shape(
    "CosignedAnswer",
    "What was stored of a cosigned checkpoint.",
    tenant_id=str,
    tree_size=int,
    root_hash=HexHash,
    added=[AddedCosignature],
)

CosignatureAnswer = shape(
    "CosignatureAnswer",
    "A stored cosignature; ``note`` is the checkpoint with this one cosignature.",
    tree_size=int,
    witness=str,
    time=Time,
    status=Literal["ok", "broken", "unknown_key"],
    note=str,
)

CosignatureList = list_shape("CosignatureList", "Cosignatures, newest first.", CosignatureAnswer)

WitnessAnswer = shape(
    "WitnessAnswer",
    "The newest cosignature of a witness, ``none`` if it has cosigned nothing of this log; ``witness`` is its verifier "
    "key, ``fault`` why this node last got no cosignature of it.",
    witness=str,
    name=str,
    url=str | None,
    tree_size=int,
    time=Time | None,
    status=Literal["ok", "broken", "unknown_key", "none"],
    note=str | None,
    fault=str | None,
)

QuorumAnswer = shape(
    "QuorumAnswer",
    "How far the quorum of the policy covers the log, and which witnesses are missing.",
    met=bool,
    quorum=str,
    quorum_to_seq=int,
    missing=[str],
)

WitnessesAnswer = shape(
    "WitnessesAnswer",
    "The witnesses of a log, and the quorum over its newest checkpoint, of size ``tree_size``; ``policy`` is null "
    "without one.",
    tenant_id=str,
    tree_size=int,
    policy=QuorumAnswer | None,
    witnesses=[WitnessAnswer],
)

VerdictHead = shape(
    "VerdictHead",
    "End of the chain as verified.",
    seq=int,
    chain_link=str | None,
    hlc=str | None,
)

AnchoredAnswer = shape(
    "AnchoredAnswer",
    "What somebody outside said of the first ``to_seq`` entries, and whether it holds.",
    kind=Literal["witness", "rfc3161"],
    by=str,
    time=str,
    to_seq=int,
    status=Literal["ok", "broken", "invalid", "not_checked"],
    detail=str | None,
)

TimestampAnswer = shape(
    "TimestampAnswer",
    "A time stamp (RFC 3161) over the bytes of ``checkpoint``; ``response`` is the TimeStampResp in base64.",
    kind=Literal["rfc3161"],
    tree_size=int,
    authority=str,
    time=Time,
    checkpoint=str,
    response=bytes,
)

TimestampList = list_shape("TimestampList", "Time stamps, newest first.", TimestampAnswer)

NotMendedAnswer = shape(
    "NotMendedAnswer",
    "A break beside the chain, such as a row of the table of keys, that this node met and that still stands.",
    seq=int,
    kind=str,
    detail=str,
)

BreakAnswer = shape(
    "BreakAnswer",
    "The first thing that does not hold.",
    **NotMendedAnswer.__annotations__,
    expected=Any,
    actual=Any,
)

PrunedAnswer = shape(
    "PrunedAnswer",
    "Entries up to ``to_seq`` left for the archive; ``manifest`` is the digest of its manifest that covers the last. "
    "The PRUNED entry at ``seq`` says so; ``commitments`` is the digest of those that it carries.",
    to_seq=int,
    manifest=str | None,
    at=TimeOfHlc,
    seq=int,
    commitments=str | None,
)

VerdictAnswer = shape(
    "VerdictAnswer",
    "What verification found.",
    tenant_id=str,
    valid=bool,
    entries_checked=int,
    from_seq=int,
    to_seq=int,
    verified_from_seq=optional(int),
    pruned=optional(PrunedAnswer | None),
    head=VerdictHead,
    verdicts=dict[str, Literal["ok", "broken", "not_checked", "unknown_key"]],
    first_break=BreakAnswer | None,
    breaks=dict[str, int],
    compared_with=str | None,
    anchors=[AnchoredAnswer],
    signed_to_seq=int,
    unsigned_entries=int,
    commitments=optional(int),
    duration_ms=float,
    not_mended=optional([NotMendedAnswer]),
)

TenantAnswer = shape(
    "TenantAnswer",
    "One tenant, or ``_system``.",
    tenant_id=TenantId,
)

TenantList = list_shape("TenantList", "Tenants by name.", TenantAnswer)

ListedSnapshot = shape(
    "ListedSnapshot",
    "One signed batch of entries.",
    id=int,
    tenant_id=str,
    from_seq=int,
    to_seq=int,
    snapshot_hlc=HlcText,
    snapshot_at=TimeOfHlc,
    from_chain_link=HexHash,
    to_chain_link=HexHash,
    entry_count=int,
    merkle_root=HexHash,
    created_at=Time,
)

EnvelopeSignature = shape(
    "EnvelopeSignature",
    "One signature of an envelope, base64, and the id of the key that made it.",
    keyid=str,
    sig=str,
)

Envelope = shape(
    "Envelope",
    "A DSSE envelope: docs/formats/snapshot.md says what its payload, base64, states.",
    payload=str,
    payloadType=str,
    signatures=[EnvelopeSignature],
)

SnapshotAnswer = shape(
    "SnapshotAnswer",
    "One batch of entries with its DSSE envelope, null if it is unsigned.",
    **ListedSnapshot.__annotations__,
    dsse_envelope=Envelope | None,
)

AcknowledgedBreak = shape(
    "AcknowledgedBreak",
    "A break that a part of the node met and somebody has seen.",
    **NotMendedAnswer.__annotations__,
    found_at=str,
)

AcknowledgeAnswer = shape(
    "AcknowledgeAnswer",
    "What was acknowledged, each in an entry of `_system`.",
    tenant_id=str,
    acknowledged=[AcknowledgedBreak],
)

SnapshotList = list_shape("SnapshotList", "Snapshots, newest first.", ListedSnapshot)

ConflictAnswer = shape(
    "ConflictAnswer",
    "An event whose HLC another one has: a CONFLICT entry holds it, with an HLC that follows from it.",
    tenant_id=str,
    hlc=HlcText,
    job_id=str,
    action=str,
    digest=HexHash,
    kept_digest=HexHash,
    conflict_hlc=HlcText,
)

ImportHead = shape(
    "ImportHead",
    "End of a tenant's chain after the import; seq 0 and nulls for one that a dry run would begin.",
    tenant_id=str,
    seq=int,
    chain_link=HexHash | None,
    hlc=HlcText | None,
)

ImportAnswer = shape(
    "ImportAnswer",
    "What an import came to: `imported + duplicates = entries`. `conflicts` lists the first 1000. `new_head` is that\n"
    "of the first tenant by name, `new_heads` has all.",
    bundles=int,
    entries=int,
    imported=int,
    duplicates=int,
    conflicts=[ConflictAnswer],
    jobs_changed=int,
    new_head=ImportHead,
    new_heads={str: ImportHead},
    dry_run=bool,
)
