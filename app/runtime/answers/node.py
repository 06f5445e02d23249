"""Shapes of answers about a node and its keys, private fields included."""

from __future__ import annotations

from typing import Any, Literal, NotRequired

from typing_extensions import TypedDict

from app.runtime.answers import HexHash, HlcText, Page, Time, TimeOfHlc
from ledger.positions import Epoch, Lsn


class KeyEntry(TypedDict):
    """The entry of ``_system`` that introduced a key."""

    seq: int
    chain_link: HexHash


class KeyAnswer(TypedDict):
    """A public key and when it counts."""

    key_id: str
    algorithm: str
    public_key_pem: str
    not_before: Time | None
    not_after: Time | None
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


class RotationAnswer(TypedDict):
    """The key that signs now and the one whose place it took."""

    key: KeyAnswer
    previous: KeyAnswer


class KeyList(TypedDict):
    """Keys of snapshots, and of checkpoints in the form of C2SP signed notes."""

    keys: list[KeyAnswer]
    not_admitted: list[WaitingKeyAnswer]
    root_key_id: str | None
    log_verifier_keys: list[str]


class Positions(TypedDict):
    """How far this node's writes have come; each is at least the next."""

    written_lsn: Lsn
    durable_lsn: Lsn
    commit_lsn: Lsn
    chained_lsn: Lsn


class ClockAnswer(TypedDict):
    """The hybrid logical clock."""

    last_hlc: HlcText
    last_at: TimeOfHlc
    offset_ms: int
    max_clock_skew_ms: int
    ticks: int
    skew_rejections: int


class Topology(TypedDict):
    """What an acknowledged write outlives here, level by level."""

    postgres_survives: Literal["process", "node", "region"]
    safekeepers: int


class MemberAnswer(TypedDict):
    """A safekeeper of this node: what it holds durably, how many records it lacks, and why it does not follow."""

    address: str
    region: str
    member_id: str | None
    in_sync: bool
    last_replicated_lsn: Lsn
    lag_lsn: int
    fault: str | None


class NodeAnswer(TypedDict):
    """This node."""

    node_id: str
    region: str
    gate: str
    epoch: Epoch
    wal_id: str
    ack_mode: str
    core: str
    topology: Topology
    members: NotRequired[list[MemberAnswer]]
    positions: Positions
    clock: ClockAnswer
    failure: str | None


class PrivacyAnswer(TypedDict):
    """A tenant's private fields, and the entry of its chain that says so."""

    tenant_id: str
    fields: list[str]
    subject: str | None
    seq: int | None
    declared_at: Time | None
    covers: str
    other_nodes_within_s: float


class ErasureAnswer(TypedDict):
    """The newest erasure of a subject, and the entry of the tenant's chain that says so."""

    tenant_id: str
    key_ids: list[str]
    seq: int
    erased_at: Time
    other_nodes_within_s: float


class TokenAnswer(TypedDict):
    """A token without its text: whose it is, what it allows, and how long."""

    token_id: str
    name: str
    rights: list[str]
    tenants: list[str]
    issued_at: Time | None
    issued_by: str | None
    expires_at: Time | None
    revoked: bool


class NewTokenAnswer(TokenAnswer):
    """A new token, with its text."""

    token: str


class TokenList(Page):
    """Tokens, newest first."""

    items: list[TokenAnswer]
