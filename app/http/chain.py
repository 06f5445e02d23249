"""``/v1/chain``: verify, head, entries, Merkle proofs."""

from __future__ import annotations

import asyncio
from typing import Annotated

from fastapi import APIRouter, Query, Request, Response

from app.http import cursor as cursors
from app.http.answers import json_answer
from app.http.body import read_json
from app.http.chain_answers import (
    AcknowledgeAnswer,
    ConsistencyProofAnswer,
    EntryList,
    HeadAnswer,
    InclusionAnswer,
    VerdictAnswer,
)
from app.http.disconnect import while_connected
from app.http.fields import CursorText, Limit, ReadableTenantId, SeqNumber
from app.http.requests import ACKNOWLEDGE_REQUEST
from app.http.routing import PROBLEM_RESPONSE, StrictRoute, body_of
from app.parts import PartsDep, parts_of
from app.read import proofs
from app.store import chain_reads
from app.store.reading import reading
from app.store.whole import whole
from ledger import rfc3339
from ledger.errors import DatabaseUnavailableError, InvalidInputError, TenantNotFoundError
from ledger.machines.events import SystemAction

router = APIRouter(route_class=StrictRoute, tags=["chain"])

ACKNOWLEDGE_BYTES_MAX = 8192

TenantQuery = Annotated[ReadableTenantId, Query()]


@router.get("/v1/chain/verify", responses={200: {"model": VerdictAnswer}, **PROBLEM_RESPONSE})
async def verify_chain(
    request: Request,
    parts: PartsDep,
    tenant_id: Annotated[ReadableTenantId | None, Query(description="Required, in one of its two spellings.")] = None,
    tenant_id_in_camel_case: Annotated[
        ReadableTenantId | None, Query(alias="tenantId", description="As tenant_id.")
    ] = None,
    from_seq: Annotated[SeqNumber | None, Query(description="First entry to verify.")] = None,
    to_seq: Annotated[SeqNumber | None, Query(description="Last entry to verify.")] = None,
) -> Response:
    """Verify a tenant's chain, all of it when no range is given. 200 whenever it could run. It stops when nobody waits
    for it any more."""
    given = [tenant for tenant in (tenant_id, tenant_id_in_camel_case) if tenant is not None]
    if len(given) != 1:
        raise InvalidInputError("tenant_id: needed once, as tenant_id or tenantId", ("tenant_id",))
    if from_seq is not None and to_seq is not None and from_seq > to_seq:
        raise InvalidInputError("from_seq: lies behind to_seq", ("from_seq",))
    async with while_connected(request):
        verification = await parts.verifier.full(given[0], from_seq, to_seq)
    return json_answer(verification.to_json())


@router.post(
    "/v1/chain/acknowledge",
    responses={200: {"model": AcknowledgeAnswer}, **PROBLEM_RESPONSE},
    openapi_extra={"requestBody": body_of(ACKNOWLEDGE_REQUEST)},
)
async def acknowledge_breaks(request: Request) -> Response:
    """Say that somebody has seen breaks that this node's verification found: of one kind and seq, or all of the tenant.

    Each is an entry of `_system`. `/readyz` and the metrics tell of it no longer, unless what stands there changes.
    """
    parts = parts_of(request)
    parts.check_writable()
    wanted = await read_json(request, ACKNOWLEDGE_REQUEST, ACKNOWLEDGE_BYTES_MAX)
    tenant_id, seen = wanted["tenant_id"], []
    for each in parts.breaks.wanted(tenant_id, wanted.get("kind"), wanted.get("seq")):
        said = {"kind": each.kind, "seq": each.seq, "detail": each.detail, "found_at": each.found_at}
        facts = {**said, "tenant_id": tenant_id, "node_id": parts.node.node_id, "reason": wanted["reason"]}
        try:
            async with asyncio.timeout(parts.settings.write.timeout.total_seconds()):
                await parts.system_entries.record(SystemAction.BREAK_ACKNOWLEDGED, each.subject, facts)
        except TimeoutError as error:
            raise DatabaseUnavailableError("the acknowledgement is not chained yet; try again later") from error
        await asyncio.to_thread(parts.breaks.acknowledge, each)
        seen.append(said)
    return json_answer({"tenant_id": tenant_id, "acknowledged": seen})


# The spelling without prefix, as the seed of this project has it.
router.add_api_route("/chain/verify", verify_chain, include_in_schema=False)


@router.get("/v1/chain/head", responses={200: {"model": HeadAnswer}, **PROBLEM_RESPONSE})
async def read_head(parts: PartsDep, tenant_id: TenantQuery) -> Response:
    """End of the tenant's chain, and of its Merkle tree."""
    async with reading(parts.pool) as connection:
        head = await chain_reads.head(connection, tenant_id)
    if head is None:
        raise TenantNotFoundError(f"there is no tenant {tenant_id}")
    whole(tenant_id, head, ("head_chain_link", "head_hlc", "root_hash", "checkpoint"))
    tree = None
    if head.root_hash is not None:
        size = proofs.checkpoint_size(tenant_id, head.checkpoint)
        tree = {"size": head.tree_size, "root_hash": head.root_hash, "checkpoint_size": size}
    return json_answer(
        {
            "tenant_id": tenant_id,
            "seq": head.head_seq,
            "chain_link": head.head_chain_link,
            "hlc": head.head_hlc,
            "at": rfc3339.time_of(head.head_hlc),
            "updated_at": head.updated_at,
            "signed_to_seq": head.signed_seq,
            "tree": tree,
        }
    )


@router.get("/v1/chain/entries", responses={200: {"model": EntryList}, **PROBLEM_RESPONSE})
async def list_entries(
    parts: PartsDep,
    tenant_id: TenantQuery,
    from_seq: Annotated[SeqNumber, Query(description="First entry of the list.")] = 1,
    limit: Annotated[Limit, Query()] = 100,
    cursor: Annotated[CursorText | None, Query(description="Goes on where a page ended; wins over from_seq.")] = None,
) -> Response:
    """Entries in seq order, every column as stored."""
    start = cursors.decode_number("entries", tenant_id, cursor) or from_seq
    async with reading(parts.pool) as connection:
        entries, more = await chain_reads.list_entries(connection, tenant_id, start, limit)
        if not entries and not await chain_reads.tenant_exists(connection, tenant_id):
            raise TenantNotFoundError(f"there is no tenant {tenant_id}")
    following = cursors.encode("entries", tenant_id, entries[-1].seq + 1) if more else None
    items = [{**entry._asdict(), "at": rfc3339.time_of(entry.t_hlc)} for entry in entries]
    return json_answer({"items": items, "next_cursor": following})


@router.get("/v1/chain/proof/inclusion", responses={200: {"model": InclusionAnswer}, **PROBLEM_RESPONSE})
async def prove_inclusion(
    parts: PartsDep,
    tenant_id: TenantQuery,
    seq: Annotated[SeqNumber, Query(description="The entry.")],
    tree_size: Annotated[SeqNumber | None, Query(description="Leaves of the tree; the newest checkpoint's.")] = None,
) -> Response:
    """Prove that an entry stands in the tree; of the newest checkpoint when no size is given."""
    with parts.mending(tenant_id):
        proof = await proofs.inclusion(parts.pool, tenant_id, seq, tree_size)
    return json_answer(
        {
            "leaf_index": proof.leaf_index,
            "tree_size": proof.tree_size,
            "leaf_hash": proof.leaf_hash.hex(),
            "root_hash": proof.root_hash.hex(),
            "hashes": [one.hex() for one in proof.hashes],
        }
    )


@router.get("/v1/chain/proof/consistency", responses={200: {"model": ConsistencyProofAnswer}, **PROBLEM_RESPONSE})
async def prove_consistency(
    parts: PartsDep,
    tenant_id: TenantQuery,
    first: Annotated[SeqNumber, Query(description="Leaves of the smaller tree.")],
    second: Annotated[SeqNumber | None, Query(description="Leaves of the larger; the newest checkpoint's.")] = None,
) -> Response:
    """Prove that the tree of ``second`` leaves, or of the newest checkpoint, begins with that of ``first``."""
    with parts.mending(tenant_id):
        proof = await proofs.consistency(parts.pool, tenant_id, first, second)
    return json_answer(
        {
            "first": proof.first,
            "second": proof.second,
            "first_root": proof.first_root.hex(),
            "second_root": proof.second_root.hex(),
            "hashes": [one.hex() for one in proof.hashes],
        }
    )
