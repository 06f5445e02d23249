"""Shapes of answers about a node and its keys, private fields included."""

from __future__ import annotations

from typing import Any, Literal, NotRequired

from typing_extensions import TypedDict

from app.runtime.answers import HexHash, HlcText, Time, TimeOfHlc
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


class PeerAnswer(TypedDict):
    """A ledger that this one imports from: why not now, how much is lacking, and what came since the process began."""

    url: str
    region: str
    fault: str | None
    lag_entries: int
    imported_entries: int


class ExchangeAnswer(TypedDict):
    """The ledgers that this one imports from."""

    peers: list[PeerAnswer]


class HeldTenant(TypedDict):
    """Up to which seq a tenant's chain of another ledger was imported here."""

    tenant_id: str
    seq: int


class HeldList(TypedDict):
    """Tenants of another ledger, by name."""

    items: list[HeldTenant]


class PrivacyAnswer(TypedDict):
    """A tenant's private fields, and the entry of its chain that says so."""

    tenant_id: str
    fields: list[str]
    subject: str | None
    seq: int | None
    declared_at: Time | None
    covers: str
    other_nodes_within_s: float


class SearchFieldsAnswer(TypedDict):
    """The fields by which a tenant's jobs are found at once. Until all jobs are indexed, ``is_built`` is false, and
    searches look at jobs one by one."""

    tenant_id: str
    fields: list[str]
    is_built: bool
    declared_at: Time | None


class ErasureAnswer(TypedDict):
    """The newest erasure of a subject, and the entry of the tenant's chain that says so."""

    tenant_id: str
    key_ids: list[str]
    seq: int
    erased_at: Time
    other_nodes_within_s: float


class LiveAnswer(TypedDict):
    """The process runs."""

    status: Literal["live"]


class CheckAnswer(TypedDict):
    """One readiness check."""

    ok: bool
    detail: str | None


class VerifiedAnswer(TypedDict):
    """When the chains of all tenants, but for those that never were, had been verified from end to end."""

    at: Time | None
    """When the oldest of these verifications began."""
    by: str | None
    """`walk`: the node's own walk over all chains; `node`: another verification of its own; else who asked for it,
    `caller` where `auth.mode` is `none`. Callers with `operate` for all tenants are told."""
    tenants: int
    never_verified: int


class ReadyAnswer(TypedDict):
    """The node takes requests."""

    status: Literal["ready"]
    checks: dict[str, CheckAnswer]
    verified: VerifiedAnswer


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


class TokenList(TypedDict):
    """Tokens, newest first."""

    items: list[TokenAnswer]
    next_cursor: str | None


class GrantAnswer(TypedDict):
    """Rights, and the patterns of tenants that they are for."""

    rights: list[str]
    tenants: list[str]


class WhoamiAnswer(TypedDict):
    """Who calls; no principal where nobody is asked."""

    principal: str | None
    source: str
    token_id: str | None
    expires_at: Time | None
    grants: list[GrantAnswer]


class ConsoleSessionAnswer(TypedDict):
    """How people sign in to the console, and who has: by a cookie until ``expires_at``, null where there is none. No
    ``principal`` where nobody is asked, or nobody has signed in."""

    auth_mode: Literal["none", "tokens", "oidc"]
    oidc_sign_in: bool
    principal: str | None
    expires_at: Time | None


class DeadLetterAnswer(TypedDict):
    """An entry that a webhook refused while it took others."""

    seq: int
    reason: str
    at: Time
    redelivering: bool


class WebhookAnswer(TypedDict):
    """A receiver of entries. All up to ``delivered_seq`` was confirmed, not asked for, or is a dead letter; the first
    100 of these are listed. ``backlog_entries`` come behind it in the chain, also those that it does not ask for."""

    webhook_id: str
    tenant_id: str
    url: str
    actions: list[str] | None
    job: str | None
    state: Literal["delivering", "failing", "stopped"]
    delivered_seq: int
    backlog_entries: int
    delivered_at: Time | None
    failing_since: Time | None
    last_error: str | None
    created_by: str | None
    created_at: Time
    dead_letter_count: int
    dead_letters: list[DeadLetterAnswer]


class NewWebhookAnswer(WebhookAnswer):
    """A new receiver, with the secret that its messages are signed with."""

    secret: str


class WebhookList(TypedDict):
    """The receivers of a tenant's entries, the first one first; all of them."""

    items: list[WebhookAnswer]
    next_cursor: None


class AccessAnswer(TypedDict):
    """That somebody read payloads of a tenant, acted on it, or was refused."""

    at: Time
    kind: Literal["read", "act", "refusal"]
    tenant_id: str
    actor: str | None
    route: str
    path: str
    address: str | None
    what: dict[str, Any]


class AccessList(TypedDict):
    """Lines of one node's access log, newest first."""

    items: list[AccessAnswer]
    next_cursor: str | None
