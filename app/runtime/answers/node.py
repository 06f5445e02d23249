"""Shapes of answers about a node and its keys, private fields included."""

from __future__ import annotations

from typing import Any, Literal

from app.runtime.answers import HexHash, HlcText, Time, TimeOfHlc, list_shape, optional, shape
from app.runtime.answers.exchange import CallerAnswer, RequiredAnswer
from ledger.positions import Epoch, Lsn

KeyEntry = shape(
    "KeyEntry",
    "The entry of ``_system`` that introduced a key.",
    seq=int,
    chain_link=HexHash,
)

KeyAnswer = shape(
    "KeyAnswer",
    "A public key and when it counts.",
    key_id=str,
    algorithm=str,
    public_key_pem=str,
    not_before=Time | None,
    not_after=Time | None,
    revoked_from_hlc=HlcText | None,
    node_id=str | None,
    signs_snapshots=bool,
    signs_checkpoints=bool,
    revocation_reason=str | None,
    admitted=bool,
    admitted_by=str | None,
    introduced_by=KeyEntry | None,
)

WaitingKeyAnswer = shape(
    "WaitingKeyAnswer",
    "A public key that nobody has admitted, and what an admission vouches for; of the old form is one that was\n"
    "introduced before there were statements about keys in the ledger.",
    **KeyAnswer.__annotations__,
    facts=dict[str, Any],
    is_old_form=bool,
)

RotationAnswer = shape(
    "RotationAnswer",
    "The key that signs now and the one whose place it took.",
    key=KeyAnswer,
    previous=KeyAnswer,
)

KeyList = shape(
    "KeyList",
    "Keys of snapshots, and of checkpoints in the form of C2SP signed notes.",
    keys=[KeyAnswer],
    second_keys=optional([KeyAnswer]),
    not_admitted=[WaitingKeyAnswer],
    root_key_id=str | None,
    log_verifier_keys=list[str],
    second_log_verifier_keys=optional(list[str]),
    callers=optional(list[CallerAnswer] | None),
    signatures_required=optional([RequiredAnswer]),
)

Positions = shape(
    "Positions",
    "How far this node's writes have come; each is at least the next.",
    written_lsn=Lsn,
    durable_lsn=Lsn,
    commit_lsn=Lsn,
    chained_lsn=Lsn,
)

ClockAnswer = shape(
    "ClockAnswer",
    "The hybrid logical clock.",
    last_hlc=HlcText,
    last_at=TimeOfHlc,
    offset_ms=int,
    max_clock_skew_ms=int,
    ticks=int,
    skew_rejections=int,
)

Topology = shape(
    "Topology",
    "What an acknowledged write outlives here, level by level.",
    postgres_survives=Literal["process", "node", "region"],
    safekeepers=int,
)

MemberAnswer = shape(
    "MemberAnswer",
    "A safekeeper of this node: what it holds durably, how many records it lacks, and why it does not follow.",
    address=str,
    region=str,
    member_id=str | None,
    in_sync=bool,
    last_replicated_lsn=Lsn,
    lag_lsn=int,
    fault=str | None,
)

NodeAnswer = shape(
    "NodeAnswer",
    "This node.",
    node_id=str,
    region=str,
    gate=str,
    epoch=Epoch,
    wal_id=str,
    ack_mode=str,
    core=str,
    topology=Topology,
    members=optional([MemberAnswer]),
    positions=Positions,
    clock=ClockAnswer,
    failure=str | None,
)

PrivacyAnswer = shape(
    "PrivacyAnswer",
    "A tenant's private fields, and the entry of its chain that says so.",
    tenant_id=str,
    fields=list[str],
    subject=str | None,
    seq=int | None,
    declared_at=Time | None,
    covers=str,
    other_nodes_within_s=float,
)

ErasureAnswer = shape(
    "ErasureAnswer",
    "The newest erasure of a subject, and the entry of the tenant's chain that says so.",
    tenant_id=str,
    key_ids=list[str],
    seq=int,
    erased_at=Time,
    other_nodes_within_s=float,
)

TokenAnswer = shape(
    "TokenAnswer",
    "A token without its text: whose it is, what it allows, and how long.",
    token_id=str,
    name=str,
    rights=list[str],
    tenants=list[str],
    issued_at=Time | None,
    issued_by=str | None,
    expires_at=Time | None,
    revoked=bool,
)

IssuedTokenAnswer = shape(
    "IssuedTokenAnswer",
    "A new token, with its text.",
    **TokenAnswer.__annotations__,
    token=str,
)

TokenList = list_shape("TokenList", "Tokens, newest first.", TokenAnswer)
