"""What the commands read of the service's answers, member by member.

An answer is held against its shape before anything of it is used, so that one of another program, or of a service that
lies, becomes one line. Members beyond a shape are kept: a newer service may say more. The values stay as JSON has
them: ``datetime`` is the text of one, ``bytes`` is base64. What members mean is said where the service answers them, in
``app.http``.
"""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct, defstruct


def _shape(base: type[Struct] = Struct, **members: Any) -> Any:
    """A JSON object that has these members and those of ``base``, and may have others."""
    return defstruct("Answer", members.items(), bases=(base,))


def _list(item: Any) -> Any:
    return list[item]


def _by_name(item: Any) -> Any:
    return dict[str, item]


_HexHash = Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]

# --- events and jobs ----------------------------------------------------------------------------------

_ChainPlace = _shape(seq=int)
Event = _shape(job_id=str, type=str, chain=_ChainPlace | None, session=str)
Batch = _shape(first_hlc=str, last_hlc=str, session=str)
_JobEvent = _shape(type=str | None)
JobEvents = _shape(items=_list(_JobEvent))

# --- chains -------------------------------------------------------------------------------------------

_Tenant = _shape(tenant_id=Annotated[str, Meta(pattern="^[a-z0-9_-]{1,63}$")])
Tenants = _shape(items=_list(_Tenant), next_cursor=str | None)
Snapshot = _shape(id=int, tenant_id=str, from_seq=int, to_seq=int, entry_count=int, merkle_root=str, snapshot_hlc=str)
_Break = _shape(seq=int, kind=str, detail=str, expected=Any, actual=Any)
_Head = _shape(seq=int, chain_link=str | None)
_VerdictHead = _shape(_Head, hlc=str | None)
_Anchored = _shape(kind=str, by=str, time=str, to_seq=int, status=str, detail=str | None)
Verdict = _shape(
    tenant_id=str,
    valid=bool,
    entries_checked=int,
    from_seq=int,
    to_seq=int,
    head=_VerdictHead,
    verdicts=dict[str, Literal["ok", "broken", "not_checked", "unknown_key"]],
    first_break=_Break | None,
    compared_with=str | None,
    anchors=_list(_Anchored),
    signed_to_seq=int,
    unsigned_entries=int,
    duration_ms=float,
)
_SeenBreak = _shape(kind=str, seq=int, detail=str, found_at=str)
Acknowledged = _shape(tenant_id=str, acknowledged=_list(_SeenBreak))
ConsistencyProof = _shape(hashes=list[_HexHash])
_Cosigned = _shape(witness=str)
CosignatureAdded = _shape(tree_size=int, added=_list(_Cosigned))
_Cosignature = _shape(tree_size=int, time=datetime, status=str, witness=str, note=str)
Cosignatures = _shape(items=_list(_Cosignature))
_Anchor = _shape(tree_size=int, time=datetime, authority=str, response=bytes, checkpoint=str)
Anchors = _shape(items=_list(_Anchor))
_Conflict = _shape(tenant_id=str, hlc=str, job_id=str, conflict_hlc=str)
Import = _shape(
    dry_run=bool,
    bundles=int,
    entries=int,
    imported=int,
    duplicates=int,
    jobs_changed=int,
    conflicts=_list(_Conflict),
    new_heads=_by_name(_Head),
)

# --- a node, its keys, private fields -----------------------------------------------------------------

Node = _shape(node_id=str)
_KeyEntry = _shape(seq=int, chain_link=str)
Key = _shape(
    key_id=str,
    algorithm=str,
    public_key_pem=str,
    node_id=str | None,
    not_before=str | None,
    not_after=str | None,
    revoked_from_hlc=str | None,
    revocation_reason=str | None,
    signs_snapshots=bool,
    signs_checkpoints=bool,
    admitted_by=str | None,
    introduced_by=_KeyEntry | None,
)
_WaitingKey = _shape(Key, facts=dict[str, Any], is_old_form=bool)
Keys = _shape(keys=_list(Key), not_admitted=_list(_WaitingKey), root_key_id=str | None, log_verifier_keys=list[str])
Rotation = _shape(key=Key, previous=Key)
Privacy = _shape(tenant_id=str, fields=list[str], subject=str | None, seq=int | None, covers=str)
Erasure = _shape(tenant_id=str, key_ids=list[str], seq=int)
