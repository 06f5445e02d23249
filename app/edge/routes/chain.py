"""``/v1/chain`` and ``/v1/tenants``: verify, head, entries, Merkle proofs; whose chains there are."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Annotated

from fastapi import APIRouter, Query, Request, Response

from app.edge.accepted import record_read, report_break
from app.edge.answers import json_answer
from app.edge.connection.disconnect import while_connected
from app.edge.forms.body import json_body
from app.edge.forms.fields import CursorQuery, CursorText, Limit, ReadableTenantId, SeqNumber
from app.edge.forms.lists import Cursors, number_position, page, text_position
from app.edge.forms.requests import AcknowledgeRequest
from app.edge.parts import Parts, PartsDep
from app.edge.routing import PROBLEM_RESPONSE, CallerDep, StrictRoute, answered
from app.read import proofs
from app.runtime.answers.chain import (
    AcknowledgeAnswer,
    ConsistencyProofAnswer,
    EntryList,
    HeadAnswer,
    InclusionAnswer,
    TenantList,
    TreeAnswer,
    VerdictAnswer,
)
from app.runtime.principals import Right
from app.runtime.state.losses import KIND as WAL_LOST
from app.store import chain_reads
from app.store.notary import read_link
from app.store.reading import reading
from app.store.rows import whole
from ledger import rfc3339
from ledger.errors import ChainDamagedError, DatabaseUnavailableError, InvalidInputError, NotFoundError
from ledger.facts.events import SystemAction
from ledger.verification.verdict import damaged

router = APIRouter(route_class=StrictRoute, tags=["chain"], responses=PROBLEM_RESPONSE)

TenantQuery = Annotated[ReadableTenantId, Query()]

UNKNOWN_CALLER = "caller"
"""Who verified or acknowledged, where nobody is asked who calls."""

_ENTRIES = Cursors("entries", number_position)
_TENANTS = Cursors("tenants", text_position)


@router.get("/v1/chain/verify", responses=answered(VerdictAnswer))
async def verify_chain(
    request: Request,
    parts: PartsDep,
    caller: CallerDep,
    tenant_id: Annotated[ReadableTenantId | None, Query(description="Required, in one of its two spellings.")] = None,
    tenant_id_in_camel_case: Annotated[
        ReadableTenantId | None, Query(alias="tenantId", description="As tenant_id.")
    ] = None,
    from_seq: Annotated[SeqNumber | None, Query(description="First entry to verify.")] = None,
    to_seq: Annotated[SeqNumber | None, Query(description="Last entry to verify.")] = None,
) -> Response:
    """Verify a tenant's chain, all of it when no range is given. 200 whenever it could run. It stops when nobody waits
    for it any more.

    `not_mended` are breaks beside the chain, such as rows of the table of keys, that this node met and that stand after
    a verification of the whole chain that finds it valid.
    """
    given = [tenant for tenant in (tenant_id, tenant_id_in_camel_case) if tenant is not None]
    if len(given) != 1:
        raise InvalidInputError("tenant_id: needed once, as tenant_id or tenantId", ("tenant_id",))
    if from_seq is not None and to_seq is not None and from_seq > to_seq:
        raise InvalidInputError("from_seq: lies behind to_seq", ("from_seq",))
    with parts.quotas.verifications.one(caller.id):
        async with while_connected(request):
            verification = await parts.verifier.full(given[0], from_seq, to_seq, by=caller.id or UNKNOWN_CALLER)
    verdict = verification.verdict
    is_whole = from_seq is None and to_seq is None
    standing = parts.breaks.of_tenant(verdict.tenant_id) if is_whole and verdict.is_valid else []
    not_mended = [{"seq": each.seq, "kind": each.kind, "detail": each.detail} for each in standing]
    return json_answer(verification.to_json() | {"not_mended": not_mended})


@router.post("/v1/chain/acknowledge", responses=answered(AcknowledgeAnswer))
async def acknowledge_breaks(
    parts: PartsDep, caller: CallerDep, wanted: Annotated[AcknowledgeRequest, json_body(AcknowledgeRequest)]
) -> Response:
    """Say that somebody has seen breaks that this node met: of one kind and seq, or all of the tenant.
    Those of `_system` include records of this node's WAL that are lost, kind `wal-lost`.

    Each is an entry of `_system`. `/readyz` and the metrics report it until it is mended too: a whole verification
    finds the chain valid.
    """
    tenant_id, kind, seq = wanted["tenant_id"], wanted.get("kind"), wanted.get("seq")
    losses = parts.losses.wanted(tenant_id, kind, seq)
    try:
        breaks = parts.breaks.wanted(tenant_id, kind, seq)
    except NotFoundError:
        if not losses:
            raise
        breaks = []
    seen = []
    for each in breaks:
        said = {"kind": each.kind, "seq": each.seq, "detail": each.detail, "found_at": each.found_at}
        await _record_acknowledgement(parts, each.subject, said, wanted)
        await asyncio.to_thread(parts.breaks.acknowledge, each, caller.id or UNKNOWN_CALLER)
        seen.append(said)
    for loss in losses:
        said = {"kind": WAL_LOST, "seq": loss.seq, "detail": loss.text, "found_at": loss.found_at}
        await _record_acknowledgement(parts, f"loss:{parts.node.node_id}:{loss.seq}", said, wanted)
        await asyncio.to_thread(parts.losses.acknowledge, loss)
        seen.append(said)
    return json_answer({"tenant_id": tenant_id, "acknowledged": seen})


async def _record_acknowledgement(
    parts: Parts, subject: str, said: Mapping[str, object], wanted: AcknowledgeRequest
) -> None:
    """Record in `_system` that somebody has seen it, and wait until that is chained.

    Raises:
        DatabaseUnavailableError: it is not chained in time.
    """
    facts = {**said, "tenant_id": wanted["tenant_id"], "node_id": parts.node.node_id, "reason": wanted["reason"]}
    try:
        async with asyncio.timeout(parts.settings.write.timeout.total_seconds()):
            await parts.system_entries.record(SystemAction.BREAK_ACKNOWLEDGED, subject, facts)
    except TimeoutError as error:
        raise DatabaseUnavailableError("the acknowledgement is not chained yet; try again later") from error


# The spelling without prefix, as the seed of this project has it.
router.add_api_route("/chain/verify", verify_chain, include_in_schema=False)


@router.get("/v1/chain/head", responses=answered(HeadAnswer))
async def read_head(parts: PartsDep, tenant_id: TenantQuery) -> Response:
    """End of the tenant's chain, and of its Merkle tree."""
    async with reading(parts.pool, snapshot=True) as connection:
        head = await chain_reads.head(connection, tenant_id)
        whole(tenant_id, head, ("head_chain_link", "head_hlc", "root_hash", "checkpoint"))
        link = await read_link(connection, tenant_id, head.head_seq)
    if head.head_chain_link != link:
        raise damaged(tenant_id, "head", head.head_seq, f"its head at seq {head.head_seq} is not the entry there")
    tree: TreeAnswer | None = None
    if head.root_hash is not None:
        size = proofs.checkpoint_size(tenant_id, head.checkpoint)
        tree = {"size": head.tree_size, "root_hash": head.root_hash, "checkpoint_size": size}
    return json_answer(
        HeadAnswer(
            tenant_id=tenant_id,
            seq=head.head_seq,
            chain_link=head.head_chain_link,
            hlc=head.head_hlc,
            at=rfc3339.time_of(head.head_hlc),
            updated_at=head.updated_at,
            signed_to_seq=head.signed_seq,
            tree=tree,
        )
    )


@router.get("/v1/chain/entries", responses=answered(EntryList))
async def list_entries(
    request: Request,
    parts: PartsDep,
    tenant_id: TenantQuery,
    from_seq: Annotated[SeqNumber, Query(description="First entry of the list.")] = 1,
    limit: Annotated[Limit, Query()] = 100,
    cursor: Annotated[CursorText | None, Query(description="Goes on where a page ended; wins over from_seq.")] = None,
) -> Response:
    """Entries in seq order, every column as stored: what stands at a break is seen here, and reported."""
    (start,) = _ENTRIES.at(tenant_id, cursor) or (from_seq,)
    async with reading(parts.pool) as connection:
        entries, more = await chain_reads.list_entries(connection, tenant_id, start, limit)
        if not entries:
            await chain_reads.require_tenant(connection, tenant_id)
        try:
            await parts.entry_check.require(connection, tenant_id, [entry.columns for entry in entries])
        except ChainDamagedError as error:
            report_break(parts, request.scope, error)
    await record_read(request, tenant_id, from_seq=start, entries=len(entries))
    return page(
        [entry.as_listed() for entry in entries], _ENTRIES.next(tenant_id, (entries[-1].seq + 1,)) if more else None
    )


@router.get("/v1/chain/proof/inclusion", responses=answered(InclusionAnswer))
async def prove_inclusion(
    parts: PartsDep,
    tenant_id: TenantQuery,
    seq: Annotated[SeqNumber, Query(description="The entry.")],
    tree_size: Annotated[SeqNumber | None, Query(description="Leaves of the tree; the newest checkpoint's.")] = None,
) -> Response:
    """Prove that an entry stands in the tree; of the newest checkpoint when no size is given."""
    with parts.mending(tenant_id):
        return json_answer(await proofs.inclusion(parts.pool, tenant_id, seq, tree_size))


@router.get("/v1/chain/proof/consistency", responses=answered(ConsistencyProofAnswer))
async def prove_consistency(
    parts: PartsDep,
    tenant_id: TenantQuery,
    first: Annotated[SeqNumber, Query(description="Leaves of the smaller tree.")],
    second: Annotated[SeqNumber | None, Query(description="Leaves of the larger; the newest checkpoint's.")] = None,
) -> Response:
    """Prove that the tree of ``second`` leaves, or of the newest checkpoint, begins with that of ``first``."""
    with parts.mending(tenant_id):
        return json_answer(await proofs.consistency(parts.pool, tenant_id, first, second))


@router.get("/v1/tenants", responses=answered(TenantList))
async def list_tenants(
    parts: PartsDep, caller: CallerDep, limit: Annotated[Limit, Query()] = 100, cursor: CursorQuery = None
) -> Response:
    """The tenants that have a chain and whose the caller may read, by name, `_system` among them."""
    (after,) = _TENANTS.at("", cursor) or ("",)
    async with reading(parts.pool) as connection:
        found = await chain_reads.list_tenants(connection, after, limit + 1, caller.patterns(Right.AUDIT))
    following = _TENANTS.next("", (found[limit - 1],)) if len(found) > limit else None
    return page([{"tenant_id": tenant} for tenant in found[:limit]], following)
