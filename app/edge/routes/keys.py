"""``/v1/keys``: public keys, for clients that check signatures themselves; rotating, admitting, revoking them;
``/v1/callers``: keys of callers that sign their events; which events of a tenant must be signed."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Path, Query, Request, Response

from app.edge.accepted import AcceptedDep, AccessControl, Service
from app.edge.answers import json_answer
from app.edge.forms.body import json_body
from app.edge.forms.fields import TENANT_PATTERN, HlcText, ReadableTenantId
from app.edge.forms.requests import AdmitRequest, CallerRequest, RevokeRequest, RotateRequest, SignaturesRequest
from app.edge.routing import PROBLEM_RESPONSE, StrictRoute, answered
from app.runtime.answers.exchange import CallerAnswer, CallerList
from app.runtime.answers.node import KeyAnswer, KeyList, RotationAnswer
from app.runtime.principals import Right, shown_callers
from app.runtime.state.node import Node
from app.store import chain_reads
from app.store.reading import reading
from app.store.sessions import NodePool
from app.trust.caller_keys import CallerKeys
from app.trust.key_chain import PublishedKey, Trust
from app.trust.key_changes import KeyChanges, WhichKey
from ledger.errors import InvalidInputError
from ledger.hlc import Hlc
from signing.key_history import KnownKey
from signing.keys import ML_DSA_44, Caller

router = APIRouter(route_class=StrictRoute, tags=["keys"], responses=PROBLEM_RESPONSE)
callers_router = APIRouter(route_class=StrictRoute, tags=["callers"], responses=PROBLEM_RESPONSE)

TENANTS_MAX = 1000
"""Most tenants whose log keys one answer lists; ask by ``tenant_id`` for others."""
WAITING_MAX = 100
"""Most keys listed that nobody has admitted, the newest."""

_NO_CALLERS: dict[str, Any] = {"callers": None, "signatures_required": []}
KeyId = Annotated[str, Path(pattern="^[0-9a-f]{16}$", description="First 16 hex of SHA-256 of the public key's SPKI.")]


@router.get("/v1/keys", responses=answered(KeyList))
async def list_keys(
    request: Request,
    access: Service[AccessControl],
    trust: Service[Trust],
    pool: Service[NodePool],
    tenant_id: Annotated[
        ReadableTenantId | None, Query(description="Whose log keys; when left out, of all that the caller may audit.")
    ] = None,
) -> Response:
    """Keys of snapshots, when they count and where they sign; and of checkpoints, of one tenant's log or of all."""
    # The issuer may have to be asked who calls: not with a connection in hand, of which there are few.
    caller = await access.caller_if_known(request.scope)
    patterns = [] if caller is None else caller.patterns(Right.AUDIT)
    published = await trust.published()
    async with reading(pool) as connection:
        tenants = [tenant_id] if tenant_id else await chain_reads.list_tenants(connection, "", TENANTS_MAX, patterns)
    ring = [item.key for item in published.admitted]
    return json_answer(
        {
            # A reader who may see none of them must not take the others for strangers.
            **(shown_callers(published.callers.to_json(), patterns) if patterns else _NO_CALLERS),
            "keys": [_answer(item) for item in published.admitted if not item.key.is_second],
            # Apart, as earlier releases refuse a list with an algorithm that they do not know.
            "second_keys": [_answer(item) for item in published.admitted if item.key.is_second],
            "not_admitted": [_waiting_answer(item) for item in published.waiting[-WAITING_MAX:]],
            "root_key_id": published.root_key_id,
            "log_verifier_keys": [text for tenant in tenants for text in trust.log_verifier_keys(tenant, ring)],
            "second_log_verifier_keys": [
                text for tenant in tenants for text in trust.log_verifier_keys(tenant, ring, ML_DSA_44)
            ],
        }
    )


@router.post("/v1/keys/rotate", status_code=201, responses=answered(RotationAnswer, 201))
async def rotate_key(
    key_changes: Service[KeyChanges], trust: Service[Trust], wanted: Annotated[dict[str, Any], json_body(RotateRequest)]
) -> Response:
    """Let a new key of this node sign from now on. What the old one signed stays valid; it signs nothing later."""
    chosen: list[WhichKey] = [which for which in ("log", "second") if wanted.get(f"{which}_key")]
    if len(chosen) > 1:
        raise InvalidInputError("log_key and second_key: one key is rotated at a time", ("second_key",))
    new_id, old_id = await key_changes.rotate(wanted.get("new_key_uri"), *chosen)
    found = await _by_id(trust)
    return json_answer({"key": found[new_id], "previous": found[old_id]}, 201)


@router.post("/v1/keys/{key_id}/revoke", responses=answered(KeyAnswer))
async def revoke_key(
    key_changes: Service[KeyChanges],
    trust: Service[Trust],
    key_id: KeyId,
    wanted: Annotated[dict[str, Any], json_body(RevokeRequest)],
) -> Response:
    """Let nothing count that the key signed from an HLC on, now when none is given. A key in use is rotated first."""
    await key_changes.revoke(
        key_id,
        Hlc.parse(wanted["from_hlc"]) if "from_hlc" in wanted else None,
        wanted.get("reason"),
        wanted.get("statement"),
    )
    return json_answer((await _by_id(trust))[key_id])


@router.post("/v1/keys/{key_id}/admit", responses=answered(KeyAnswer))
async def admit_key(
    key_changes: Service[KeyChanges],
    trust: Service[Trust],
    key_id: KeyId,
    wanted: Annotated[dict[str, Any], json_body(AdmitRequest)],
) -> Response:
    """Let a key count that a node introduced, with the word of this node's key or with a statement made elsewhere."""
    await key_changes.admit(key_id, wanted.get("statement"))
    return json_answer((await _by_id(trust))[key_id])


async def _by_id(trust: Trust) -> dict[str, dict[str, Any]]:
    published = await trust.published()
    return {
        **{item.key.key_id: _waiting_answer(item) for item in published.waiting},
        **{item.key.key_id: _answer(item) for item in published.admitted},
    }


def _answer(item: PublishedKey) -> dict[str, Any]:
    said = item._asdict()
    return {
        **said.pop("key").to_json(),
        **said,
        "admitted": True,
        "introduced_by": None if item.introduced_by is None else item.introduced_by._asdict(),
    }


def _waiting_answer(item: KnownKey) -> dict[str, Any]:
    return {
        **_answer(PublishedKey(item.key, item.node_id, False, False, None, None, item.introduced.at)),
        "admitted": False,
        "facts": item.facts,
        "is_old_form": item.is_old_form,
    }


@callers_router.post("/v1/callers", status_code=201, responses=answered(CallerAnswer, 201))
async def register_caller(
    callers: Service[CallerKeys], accepted: AcceptedDep, wanted: Annotated[dict[str, Any], json_body(CallerRequest)]
) -> Response:
    """Let a key sign events of these tenants as this caller. Its private half stays with the caller."""
    caller = await callers.register(wanted["name"], wanted["tenants"], wanted["public_key_pem"], accepted.caller)
    return json_answer(_caller_answer(caller), 201)


@callers_router.get("/v1/callers", responses=answered(CallerList))
async def list_callers(callers: Service[CallerKeys], accepted: AcceptedDep) -> Response:
    """The callers that may sign events of tenants that the caller may audit, and what must be signed there."""
    return json_answer(shown_callers(callers.known.to_json(), accepted.caller.patterns(Right.AUDIT)))


@callers_router.delete("/v1/callers/{key_id}", responses=answered(CallerAnswer))
async def revoke_caller(
    callers: Service[CallerKeys],
    node: Service[Node],
    accepted: AcceptedDep,
    key_id: Annotated[str, Path(max_length=64, description="The key.")],
    reason: Annotated[str, Query(max_length=1000, description="Why; goes on record. Must be given.")] = "",
    from_hlc: Annotated[HlcText | None, Query(description="From when on; left out, in two seconds.")] = None,
) -> Response:
    """Let no event count that the key signed from an HLC on. The key is never registered again."""
    node.check_writable()
    await accepted.allow()
    if not reason:
        raise InvalidInputError("reason: say why the key is revoked", ("reason",))
    return json_answer(_caller_answer(await callers.revoke(key_id, from_hlc, reason, accepted.caller)))


@callers_router.put("/v1/tenants/{tenant_id}/signatures", responses=answered(CallerList))
async def require_signatures(
    callers: Service[CallerKeys],
    accepted: AcceptedDep,
    tenant_id: Annotated[str, Path(pattern=TENANT_PATTERN, description="Whose.")],
    wanted: Annotated[dict[str, Any], json_body(SignaturesRequest)],
) -> Response:
    """Take events of these types only if their callers sign them, from now on; of all others either way."""
    await callers.require(tenant_id, wanted["types"], accepted.caller)
    return json_answer(shown_callers(callers.known.to_json(), [tenant_id]))


def _caller_answer(caller: Caller) -> dict[str, Any]:
    return {**caller.key.to_json(), "name": caller.name, "tenants": list(caller.tenants)}
