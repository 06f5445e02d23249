"""Shapes of answers about chains: heads, entries, proofs, verdicts, anchors, snapshots, imports."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Literal

from app.http.answers import Answer, TimeOfHlc, answer_like, list_of
from app.http.fields import HexHash, HlcText
from app.read.proofs import ConsistencyProof, InclusionProof
from app.store.chain_reads import ListedEntry, SnapshotRow


class TreeAnswer(Answer):
    """A tenant's Merkle tree."""

    size: int
    root_hash: HexHash
    checkpoint_size: int | None


class HeadAnswer(Answer):
    """End of a tenant's chain."""

    tenant_id: str
    seq: int
    chain_link: HexHash | None
    hlc: HlcText | None
    at: TimeOfHlc
    updated_at: datetime
    signed_to_seq: int
    tree: TreeAnswer | None


EntryAnswer = answer_like(
    "EntryAnswer",
    "One entry, every column; `payload` and `origin` are strings of the stored bytes.",
    ListedEntry,
    at=TimeOfHlc,
)


EntryList = list_of("EntryList", "Entries in seq order.", EntryAnswer)


InclusionAnswer = answer_like(
    "InclusionAnswer", "Proof (RFC 9162) that a leaf stands in the tree of `tree_size` leaves.", InclusionProof
)


ConsistencyProofAnswer = answer_like(
    "ConsistencyProofAnswer",
    "Proof (RFC 9162) that the tree of `second` leaves begins with the tree of `first`.",
    ConsistencyProof,
)


class AddedCosignature(Answer):
    """A cosignature that was stored; ``witness`` is the verifier key."""

    witness: str
    time: datetime


class CosignedAnswer(Answer):
    """What was stored of a cosigned checkpoint."""

    tenant_id: str
    tree_size: int
    root_hash: HexHash
    added: list[AddedCosignature]


class CosignatureAnswer(Answer):
    """A stored cosignature; ``note`` is the checkpoint with this one cosignature."""

    tree_size: int
    witness: str
    time: datetime
    status: Literal["ok", "broken", "unknown_key"]
    note: str


CosignatureList = list_of("CosignatureList", "Cosignatures, newest first.", CosignatureAnswer)


class BreakAnswer(Answer):
    """The first thing that does not hold."""

    seq: int
    kind: str
    detail: str
    expected: Any
    actual: Any


class VerdictHead(Answer):
    """End of the chain as verified."""

    seq: int
    chain_link: str | None
    hlc: str | None


class AnchoredAnswer(Answer):
    """What somebody outside said of the first ``to_seq`` entries, and whether it holds."""

    kind: Literal["witness", "rfc3161"]
    by: str
    time: str
    to_seq: int
    status: Literal["ok", "broken", "invalid", "not_checked"]
    detail: str | None


class TimestampAnswer(Answer):
    """A time stamp (RFC 3161) over the bytes of ``checkpoint``; ``response`` is the TimeStampResp in base64."""

    kind: Literal["rfc3161"]
    tree_size: int
    authority: str
    time: datetime
    checkpoint: str
    response: str


TimestampList = list_of("TimestampList", "Time stamps, newest first.", TimestampAnswer)


class VerdictAnswer(Answer):
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


class TenantAnswer(Answer):
    """One tenant, or ``_system``."""

    tenant_id: str


TenantList = list_of("TenantList", "Tenants by name.", TenantAnswer)


class EnvelopeSignature(Answer):
    """One signature of an envelope, base64, and the id of the key that made it."""

    keyid: str
    sig: str


class Envelope(Answer):
    """A DSSE envelope: docs/formats/snapshot.md says what its payload, base64, states."""

    payload: str
    payloadType: str  # noqa: N815 - DSSE's spelling
    signatures: list[EnvelopeSignature]


_SHOWN_SNAPSHOT = {
    "snapshot_hlc": HlcText,
    "snapshot_at": TimeOfHlc,
    "from_chain_link": HexHash,
    "to_chain_link": HexHash,
    "merkle_root": HexHash,
}
ListedSnapshot = answer_like("ListedSnapshot", "One signed batch of entries.", SnapshotRow, **_SHOWN_SNAPSHOT)
SnapshotAnswer = answer_like(
    "SnapshotAnswer",
    "One signed batch of entries with its DSSE envelope.",
    SnapshotRow,
    **_SHOWN_SNAPSHOT,
    dsse_envelope=Envelope,
)


class AcknowledgedBreak(Answer):
    """A break that verification found and somebody has seen."""

    kind: str
    seq: int
    detail: str
    found_at: str


class AcknowledgeAnswer(Answer):
    """What was acknowledged, each in an entry of `_system`."""

    tenant_id: str
    acknowledged: list[AcknowledgedBreak]


SnapshotList = list_of("SnapshotList", "Snapshots, newest first.", ListedSnapshot)


class ConflictAnswer(Answer):
    """An event whose HLC another one has: a CONFLICT entry holds it, with an HLC that follows from it."""

    tenant_id: str
    hlc: HlcText
    job_id: str
    action: str
    digest: HexHash
    kept_digest: HexHash
    conflict_hlc: HlcText


class ImportHead(Answer):
    """End of a tenant's chain after the import; seq 0 and nulls for one that a dry run would begin."""

    tenant_id: str
    seq: int
    chain_link: HexHash | None
    hlc: HlcText | None


class ImportAnswer(Answer):
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
