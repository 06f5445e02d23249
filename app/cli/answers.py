"""What the commands read of the service's answers, member by member.

An answer is held against its shape before anything of it is used, so that one of another program, or of a service that
lies, becomes one line. Members beyond a shape are kept: a newer service may say more. The values stay as JSON has
them: ``datetime`` is the text of one, ``bytes`` is base64.
"""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Literal, TypedDict

from msgspec import Meta

HexHash = Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]


class ChainPlace(TypedDict):
    """Where an event stands in its tenant's chain."""

    seq: int


class Event(TypedDict):
    """An event that was taken."""

    job_id: str
    type: str
    chain: ChainPlace | None
    session: str


class Batch(TypedDict):
    """All events of one request were taken."""

    first_hlc: str
    last_hlc: str
    session: str


class Snapshot(TypedDict):
    """A signed range of a chain."""

    id: int
    tenant_id: str
    from_seq: int
    to_seq: int
    entry_count: int
    merkle_root: str
    snapshot_hlc: str


class Tenant(TypedDict):
    """One tenant."""

    tenant_id: Annotated[str, Meta(pattern="^[a-z0-9_-]{1,63}$")]


class Tenants(TypedDict):
    """A page of the list of tenants."""

    items: list[Tenant]
    next_cursor: str | None


class KeyEntry(TypedDict):
    """The entry that introduced a key."""

    seq: int
    chain_link: str


class Key(TypedDict):
    """A public key of the ledger, when it counts, who admitted it and what it signs."""

    key_id: str
    algorithm: str
    public_key_pem: str
    node_id: str | None
    not_before: str | None
    not_after: str | None
    revoked_from_hlc: str | None
    revocation_reason: str | None
    signs_snapshots: bool
    signs_checkpoints: bool
    admitted_by: str | None
    introduced_by: KeyEntry | None


class WaitingKey(Key):
    """A key that nobody has admitted yet, and what an admission vouches for."""

    facts: dict[str, Any]
    is_old_form: bool


class Keys(TypedDict):
    """All public keys of the ledger."""

    keys: list[Key]
    not_admitted: list[WaitingKey]
    root_key_id: str | None
    log_verifier_keys: list[str]


class Node(TypedDict):
    """The node that answers."""

    node_id: str


class Rotation(TypedDict):
    """The key that signs from now on, and the one before it."""

    key: Key
    previous: Key


class Privacy(TypedDict):
    """A tenant's private fields."""

    tenant_id: str
    fields: list[str]
    subject: str | None
    seq: int | None
    covers: str


class Erasure(TypedDict):
    """Keys of a person that were destroyed."""

    tenant_id: str
    key_ids: list[str]
    seq: int


class Cosigned(TypedDict):
    """One cosignature that was taken."""

    witness: str


class CosignatureAdded(TypedDict):
    """What of a cosigned checkpoint was taken."""

    tree_size: int
    added: list[Cosigned]


class Cosignature(TypedDict):
    """One cosignature, and whether it holds."""

    tree_size: int
    time: datetime
    status: str
    witness: str
    note: str


class Cosignatures(TypedDict):
    """The newest cosignatures on a tenant's checkpoints."""

    items: list[Cosignature]


class Anchor(TypedDict):
    """One reply of a time-stamping authority."""

    tree_size: int
    time: datetime
    authority: str
    response: bytes
    checkpoint: str


class Anchors(TypedDict):
    """The newest replies of time-stamping authorities."""

    items: list[Anchor]


class ConsistencyProof(TypedDict):
    """That a tree is a prefix of a later one."""

    hashes: list[HexHash]


class Conflict(TypedDict):
    """Two events that have one HLC."""

    tenant_id: str
    hlc: str
    job_id: str
    conflict_hlc: str


class Head(TypedDict):
    """End of a chain."""

    seq: int
    chain_link: str | None


class Import(TypedDict):
    """What an import did, or would do."""

    dry_run: bool
    bundles: int
    entries: int
    imported: int
    duplicates: int
    jobs_changed: int
    conflicts: list[Conflict]
    new_heads: dict[str, Head]


class Break(TypedDict):
    """The first place at which a chain does not hold."""

    seq: int
    kind: str
    detail: str
    expected: Any
    actual: Any


class SeenBreak(TypedDict):
    """A break that a node found, and when."""

    kind: str
    seq: int
    detail: str
    found_at: str


class Acknowledged(TypedDict):
    """Breaks that somebody has seen, each in an entry of `_system`."""

    tenant_id: str
    acknowledged: list[SeenBreak]


class VerdictHead(TypedDict):
    """End of a chain as verified."""

    seq: int
    chain_link: str | None
    hlc: str | None


class Anchored(TypedDict):
    """What somebody outside said of a chain."""

    kind: str
    by: str
    time: str
    to_seq: int
    status: str
    detail: str | None


class Verdict(TypedDict):
    """What a verification found."""

    tenant_id: str
    valid: bool
    entries_checked: int
    from_seq: int
    to_seq: int
    head: VerdictHead
    verdicts: dict[str, Literal["ok", "broken", "not_checked", "unknown_key"]]
    first_break: Break | None
    compared_with: str | None
    anchors: list[Anchored]
    signed_to_seq: int
    unsigned_entries: int
    duration_ms: float
