"""Shapes of answers about chains: heads, entries, proofs, verdicts, anchors, snapshots, imports."""

from __future__ import annotations

from typing import Any, Literal, NotRequired

from typing_extensions import TypedDict

from app.runtime.answers import HexHash, HlcText, Page, TenantId, Time, TimeOfHlc


class EntryAnswer(TypedDict):
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
    created_at: Time


class EntryList(Page):
    """Entries in seq order."""

    items: list[EntryAnswer]


class InclusionAnswer(TypedDict):
    """Proof (RFC 9162) that a leaf stands in the tree of ``tree_size`` leaves."""

    leaf_index: int
    tree_size: int
    leaf_hash: HexHash
    root_hash: HexHash
    hashes: list[HexHash]


class ConsistencyProofAnswer(TypedDict):
    """Proof (RFC 9162) that the tree of ``second`` leaves begins with the tree of ``first``."""

    first: int
    second: int
    first_root: HexHash
    second_root: HexHash
    hashes: list[HexHash]


class AddedCosignature(TypedDict):
    """A cosignature that was stored; ``witness`` is the verifier key."""

    witness: str
    time: Time


class CosignedAnswer(TypedDict):
    """What was stored of a cosigned checkpoint."""

    tenant_id: str
    tree_size: int
    root_hash: HexHash
    added: list[AddedCosignature]


class CosignatureAnswer(TypedDict):
    """A stored cosignature; ``note`` is the checkpoint with this one cosignature."""

    tree_size: int
    witness: str
    time: Time
    status: Literal["ok", "broken", "unknown_key"]
    note: str


class CosignatureList(Page):
    """Cosignatures, newest first."""

    items: list[CosignatureAnswer]


class VerdictHead(TypedDict):
    """End of the chain as verified."""

    seq: int
    chain_link: str | None
    hlc: str | None


class AnchoredAnswer(TypedDict):
    """What somebody outside said of the first ``to_seq`` entries, and whether it holds."""

    kind: Literal["witness", "rfc3161"]
    by: str
    time: str
    to_seq: int
    status: Literal["ok", "broken", "invalid", "not_checked"]
    detail: str | None


class TimestampAnswer(TypedDict):
    """A time stamp (RFC 3161) over the bytes of ``checkpoint``; ``response`` is the TimeStampResp in base64."""

    kind: Literal["rfc3161"]
    tree_size: int
    authority: str
    time: Time
    checkpoint: str
    response: bytes


class TimestampList(Page):
    """Time stamps, newest first."""

    items: list[TimestampAnswer]


class NotMendedAnswer(TypedDict):
    """A break beside the chain, such as a row of the table of keys, that this node met and that still stands."""

    seq: int
    kind: str
    detail: str


class BreakAnswer(NotMendedAnswer):
    """The first thing that does not hold."""

    expected: Any
    actual: Any


class VerdictAnswer(TypedDict):
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
    not_mended: NotRequired[list[NotMendedAnswer]]


class TenantAnswer(TypedDict):
    """One tenant, or ``_system``."""

    tenant_id: TenantId


class TenantList(Page):
    """Tenants by name."""

    items: list[TenantAnswer]


class ListedSnapshot(TypedDict):
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
    created_at: Time


class EnvelopeSignature(TypedDict):
    """One signature of an envelope, base64, and the id of the key that made it."""

    keyid: str
    sig: str


class Envelope(TypedDict):
    """A DSSE envelope: docs/formats/snapshot.md says what its payload, base64, states."""

    payload: str
    payloadType: str
    signatures: list[EnvelopeSignature]


class SnapshotAnswer(ListedSnapshot):
    """One signed batch of entries with its DSSE envelope."""

    dsse_envelope: Envelope


class AcknowledgedBreak(NotMendedAnswer):
    """A break that a part of the node met and somebody has seen."""

    found_at: str


class AcknowledgeAnswer(TypedDict):
    """What was acknowledged, each in an entry of `_system`."""

    tenant_id: str
    acknowledged: list[AcknowledgedBreak]


class SnapshotList(Page):
    """Snapshots, newest first."""

    items: list[ListedSnapshot]


class ConflictAnswer(TypedDict):
    """An event whose HLC another one has: a CONFLICT entry holds it, with an HLC that follows from it."""

    tenant_id: str
    hlc: HlcText
    job_id: str
    action: str
    digest: HexHash
    kept_digest: HexHash
    conflict_hlc: HlcText


class ImportHead(TypedDict):
    """End of a tenant's chain after the import; seq 0 and nulls for one that a dry run would begin."""

    tenant_id: str
    seq: int
    chain_link: HexHash | None
    hlc: HlcText | None


class ImportAnswer(TypedDict):
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
