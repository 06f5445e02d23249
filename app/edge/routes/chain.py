"""``/v1/chain``, ``/v1/tenants``, ``/v1/snapshots``: verify, head, entries, Merkle proofs, signed batches of entries;
whose chains there are.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any

import orjson
from fastapi import APIRouter, Path, Query, Request, Response

from app.edge.accepted import AcceptedDep, Service
from app.edge.answers import json_answer, while_connected
from app.edge.forms.body import json_body
from app.edge.forms.fields import (
    JOB_ID_PATTERN,
    TREE_SIZE_MAX,
    CursorQuery,
    CursorText,
    Limit,
    ReadableTenantId,
    SeqNumber,
    TenantQuery,
    WholeNumber,
)
from app.edge.forms.lists import Cursors, NewestFirst, number_position, page, text_position
from app.edge.forms.requests import AcknowledgeRequest, SnapshotRequest
from app.edge.routing import PROBLEM_RESPONSE, StrictRoute, answered
from app.read import proofs
from app.read.verification import ChainVerifier
from app.runtime.answers import HexHash, HlcText, Time, TimeOfHlc, shape
from app.runtime.answers.chain import (
    AcknowledgeAnswer,
    ConsistencyProofAnswer,
    EntryList,
    InclusionAnswer,
    JobProofAnswer,
    SnapshotAnswer,
    SnapshotList,
    TenantList,
    VerdictAnswer,
)
from app.runtime.principals import Right
from app.runtime.settings.config import Settings
from app.runtime.state.found_breaks import FoundBreaks
from app.runtime.state.losses import KIND as WAL_LOST
from app.runtime.state.losses import Losses
from app.runtime.state.node import Node
from app.store import chain_reads
from app.store.entry_check import EntryCheck
from app.store.notary import read_link
from app.store.reading import reading, run_in, whole
from app.store.sessions import NodePool
from app.trust.retention import RetentionReader
from app.write.followers.notary import Notary
from app.write.intake.system_entries import SystemEntries
from ledger import rfc3339
from ledger.errors import ArchivedError, ChainDamagedError, DatabaseUnavailableError, InvalidInputError, NotFoundError
from ledger.facts.events import SystemAction
from ledger.verification.verdict import damaged

router = APIRouter(route_class=StrictRoute, tags=["chain"], responses=PROBLEM_RESPONSE)


UNKNOWN_CALLER = "caller"
"""Who verified or acknowledged, where nobody is asked who calls."""

_ENTRIES = Cursors("entries", number_position)
_TENANTS = Cursors("tenants", text_position)


TreeAnswer = shape(
    "TreeAnswer",
    "A tenant's Merkle tree.",
    size=int,
    root_hash=HexHash,
    checkpoint_size=int | None,
)

HeadAnswer = shape(
    "HeadAnswer",
    "End of a tenant's chain.",
    tenant_id=str,
    seq=int,
    chain_link=HexHash | None,
    hlc=HlcText | None,
    at=TimeOfHlc,
    updated_at=Time | None,
    signed_to_seq=int,
    tree=TreeAnswer | None,
)


@router.get("/v1/chain/verify", responses=answered(VerdictAnswer))
async def verify_chain(
    request: Request,
    verifier: Service[ChainVerifier],
    breaks: Service[FoundBreaks],
    accepted: AcceptedDep,
    tenant_id: Annotated[ReadableTenantId | None, Query(description="Required, in one of its two spellings.")] = None,
    tenant_id_in_camel_case: Annotated[
        ReadableTenantId | None, Query(alias="tenantId", description="As tenant_id.")
    ] = None,
    from_seq: Annotated[SeqNumber | None, Query(description="First entry to verify.")] = None,
    to_seq: Annotated[SeqNumber | None, Query(description="Last entry to verify.")] = None,
) -> Response:
    """Verify a tenant's chain, all of it when no range is given. 200 whenever it could run. It stops when nobody waits
    for it any more.

    Entries that left are passed over (`verified_from_seq`); a range of which all have left is 410 `archived`.

    `not_mended` are breaks beside the chain, such as rows of the table of keys, that this node met and that stand after
    a verification of the whole chain that finds it valid.
    """
    given = [tenant for tenant in (tenant_id, tenant_id_in_camel_case) if tenant is not None]
    if len(given) != 1:
        raise InvalidInputError("tenant_id: needed once, as tenant_id or tenantId", ("tenant_id",))
    if from_seq is not None and to_seq is not None and from_seq > to_seq:
        raise InvalidInputError("from_seq: lies behind to_seq", ("from_seq",))
    with accepted.access.quotas.verifications.one(accepted.caller.id):
        async with while_connected(request):
            verification = await verifier.full(given[0], from_seq, to_seq, by=accepted.caller.id or UNKNOWN_CALLER)
    verdict = verification.verdict
    is_whole_valid = from_seq is None and to_seq is None and verdict.is_valid
    not_mended = [
        {"seq": each.seq, "kind": each.kind, "detail": each.detail}
        for each in (breaks.of_tenant(verdict.tenant_id) if is_whole_valid else ())
    ]
    return json_answer(verification.to_json() | {"not_mended": not_mended})


@router.post("/v1/chain/acknowledge", responses=answered(AcknowledgeAnswer))
async def acknowledge_breaks(
    losses: Service[Losses],
    breaks: Service[FoundBreaks],
    node: Service[Node],
    settings: Service[Settings],
    system_entries: Service[SystemEntries],
    accepted: AcceptedDep,
    wanted: Annotated[dict[str, Any], json_body(AcknowledgeRequest)],
) -> Response:
    """Say that somebody has seen breaks that this node met: of one kind and seq, or all of the tenant.
    Those of `_system` include records of this node's WAL that are lost, kind `wal-lost`.

    Each is an entry of `_system`. `/readyz` and the metrics report it until it is mended too: a whole verification
    finds the chain valid.
    """
    tenant_id, kind, seq = wanted["tenant_id"], wanted.get("kind"), wanted.get("seq")
    lost, found = losses.wanted(tenant_id, kind, seq), breaks.unacknowledged(tenant_id, kind, seq)
    if not lost and not found:
        raise NotFoundError(f"this node has found no such break of tenant {tenant_id} that is not acknowledged yet")
    to_record: list[tuple[str, dict[str, object], Callable[[], None]]] = [
        *(
            (
                each.subject,
                {"kind": each.kind, "seq": each.seq, "detail": each.detail, "found_at": each.found_at},
                partial(breaks.acknowledge, each, accepted.caller.id or UNKNOWN_CALLER),
            )
            for each in found
        ),
        *(
            (
                f"loss:{node.node_id}:{loss.seq}",
                {"kind": WAL_LOST, "seq": loss.seq, "detail": loss.text, "found_at": loss.found_at},
                partial(losses.acknowledge, loss),
            )
            for loss in lost
        ),
    ]
    for subject, said, acknowledge in to_record:
        facts = {**said, "tenant_id": tenant_id, "node_id": node.node_id, "reason": wanted["reason"]}
        try:
            async with asyncio.timeout(settings.write.timeout.total_seconds()):
                await system_entries.record(SystemAction.BREAK_ACKNOWLEDGED, subject, facts)
        except TimeoutError as error:
            raise DatabaseUnavailableError("the acknowledgement is not chained yet; try again later") from error
        await asyncio.to_thread(acknowledge)
    return json_answer({"tenant_id": tenant_id, "acknowledged": [said for _, said, _ in to_record]})


# The same route without prefix.
router.add_api_route("/chain/verify", verify_chain, include_in_schema=False)


@router.get("/v1/chain/head", responses=answered(HeadAnswer))
async def read_head(pool: Service[NodePool], tenant_id: TenantQuery) -> Response:
    """End of the tenant's chain, and of its Merkle tree."""
    async with reading(pool, snapshot=True) as connection:
        head = await chain_reads.head(connection, tenant_id)
        whole(tenant_id, head, ("head_chain_link", "head_hlc", "root_hash", "checkpoint"))
        link = await read_link(connection, tenant_id, head.head_seq)
    if head.head_chain_link != link:
        raise damaged(tenant_id, "head", head.head_seq, f"its head at seq {head.head_seq} is not the entry there")
    tree = None
    if head.root_hash is not None:
        signed = chain_reads.checkpoint_in(tenant_id, head.checkpoint)
        tree = {
            "size": head.tree_size,
            "root_hash": head.root_hash,
            "checkpoint_size": None if signed is None else signed.size,
        }
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


@router.get("/v1/chain/entries", responses=answered(EntryList))
async def list_entries(
    accepted: AcceptedDep,
    pool: Service[NodePool],
    entry_check: Service[EntryCheck],
    retention: Service[RetentionReader],
    tenant_id: TenantQuery,
    from_seq: Annotated[
        SeqNumber | None, Query(description="First entry of the list; left out, the first that has not left.")
    ] = None,
    limit: Annotated[Limit, Query()] = 100,
    cursor: Annotated[CursorText | None, Query(description="Goes on where a page ended; wins over from_seq.")] = None,
) -> Response:
    """Entries in seq order, every column as stored: what stands at a break is seen here, and reported. A list that
    begins with an entry that left is 410 `archived`."""
    (wanted,) = _ENTRIES.at(tenant_id, cursor) or (from_seq,)
    async with reading(pool, snapshot=True) as connection:
        start = wanted or 1
        try:
            await retention.refuse_left(connection, tenant_id, start)
        except ArchivedError as error:
            if wanted is not None:
                raise
            start = error.verified_from_seq
        except ChainDamagedError as error:
            accepted.report_break(error)
        entries, more = await chain_reads.list_entries(connection, tenant_id, start, limit)
        if not entries:
            await chain_reads.require_tenant(connection, tenant_id)
        try:
            await entry_check.require(connection, tenant_id, [entry.columns for entry in entries])
        except ChainDamagedError as error:
            accepted.report_break(error)
    await accepted.record_read(tenant_id, from_seq=start, entries=len(entries))
    return page(
        [entry.as_listed() for entry in entries], _ENTRIES.next(tenant_id, (entries[-1].seq + 1,)) if more else None
    )


@router.get("/v1/chain/proof/inclusion", responses=answered(InclusionAnswer))
async def prove_inclusion(
    notary: Service[Notary],
    pool: Service[NodePool],
    tenant_id: TenantQuery,
    seq: Annotated[SeqNumber, Query(description="The entry.")],
    tree_size: Annotated[SeqNumber | None, Query(description="Leaves of the tree; the newest checkpoint's.")] = None,
) -> Response:
    """Prove that an entry stands in the tree; of the newest checkpoint when no size is given."""
    with notary.rebuilds_if_damaged(tenant_id):
        return json_answer(await proofs.inclusion(pool, tenant_id, seq, tree_size))


@router.get("/v1/chain/proof/consistency", responses=answered(ConsistencyProofAnswer))
async def prove_consistency(
    notary: Service[Notary],
    pool: Service[NodePool],
    tenant_id: TenantQuery,
    first: Annotated[SeqNumber, Query(description="Leaves of the smaller tree.")],
    second: Annotated[SeqNumber | None, Query(description="Leaves of the larger; the newest checkpoint's.")] = None,
) -> Response:
    """Prove that the tree of ``second`` leaves, or of the newest checkpoint, begins with that of ``first``."""
    with notary.rebuilds_if_damaged(tenant_id):
        return json_answer(await proofs.consistency(pool, tenant_id, first, second))


@router.get("/v1/chain/proof/job", responses=answered(JobProofAnswer))
async def prove_job_by_index(
    notary: Service[Notary],
    pool: Service[NodePool],
    retention: Service[RetentionReader],
    tenant_id: TenantQuery,
    job_id: Annotated[str, Query(pattern=JOB_ID_PATTERN, description="The job.")],
    snapshot_id: Annotated[
        WholeNumber | None, Query(ge=1, le=TREE_SIZE_MAX, description="Whose index proves it; the newest with one.")
    ] = None,
) -> Response:
    """Prove that these are all entries of a job, or that it has none, up to the end of a snapshot."""
    with notary.rebuilds_if_damaged(tenant_id):
        return json_answer(await proofs.job(pool, retention, tenant_id, job_id, snapshot_id))


@router.get("/v1/tenants", responses=answered(TenantList))
async def list_tenants(
    pool: Service[NodePool], accepted: AcceptedDep, limit: Annotated[Limit, Query()] = 100, cursor: CursorQuery = None
) -> Response:
    """The tenants that have a chain and whose the caller may read, by name, `_system` among them."""
    (after,) = _TENANTS.at("", cursor) or ("",)
    found = await run_in(
        reading(pool), chain_reads.list_tenants, after, limit + 1, accepted.caller.patterns(Right.AUDIT)
    )
    last = (found[limit - 1],) if len(found) > limit else None
    return page([{"tenant_id": tenant} for tenant in found[:limit]], _TENANTS.next("", last))


snapshots = APIRouter(route_class=StrictRoute, tags=["snapshots"], responses=PROBLEM_RESPONSE)

_SNAPSHOTS = NewestFirst("snapshots", chain_reads.list_snapshots, lambda row: row.from_seq)


@snapshots.post(
    "/v1/snapshots",
    status_code=201,
    responses={
        **answered(SnapshotAnswer, 201),
        **answered(SnapshotAnswer, description="Everything was covered already; the newest snapshot"),
    },
)
async def sign_snapshot(
    pool: Service[NodePool], notary: Service[Notary], wanted: Annotated[dict[str, Any], json_body(SnapshotRequest)]
) -> Response:
    """Cover everything chained so far by snapshots; answers the newest. `chain.sign_snapshots` says if it is signed."""
    tenant_id = wanted["tenant_id"]
    await run_in(reading(pool), chain_reads.require_tenant, tenant_id)
    signed = await notary.sign_now(tenant_id)
    newest = await run_in(reading(pool), chain_reads.newest_snapshot, tenant_id)
    if newest is None:
        raise NotFoundError(f"tenant {tenant_id} has no entry that could be signed")
    return json_answer(_whole_snapshot(*newest), 201 if signed else 200)


@snapshots.get("/v1/snapshots", responses=answered(SnapshotList))
async def list_snapshots(
    pool: Service[NodePool],
    tenant_id: TenantQuery,
    limit: Annotated[Limit, Query()] = 100,
    cursor: CursorQuery = None,
) -> Response:
    """Snapshots of a tenant, newest first."""
    rows, following = await _SNAPSHOTS.read(pool, tenant_id, cursor, limit)
    return page([_snapshot_answer(row) for row in rows], following)


@snapshots.get("/v1/snapshots/{snapshot_id}", responses=answered(SnapshotAnswer))
async def read_snapshot(
    pool: Service[NodePool],
    accepted: AcceptedDep,
    snapshot_id: Annotated[WholeNumber, Path(ge=1, le=TREE_SIZE_MAX, description="Its id in lists.")],
) -> Response:
    """One snapshot with its DSSE envelope, null if it is unsigned."""
    found = await run_in(reading(pool), chain_reads.snapshot, snapshot_id)
    if found is None or not accepted.caller.may(Right.AUDIT, found[0].tenant_id):
        raise NotFoundError(f"there is no snapshot {snapshot_id}")
    return json_answer(_whole_snapshot(*found))


def _whole_snapshot(row: chain_reads.SnapshotRow, dsse_envelope: str | None) -> dict[str, object]:
    return {**_snapshot_answer(row), "dsse_envelope": orjson.Fragment(dsse_envelope or "null")}


def _snapshot_answer(row: chain_reads.SnapshotRow) -> dict[str, object]:
    return {**row._asdict(), "snapshot_at": rfc3339.time_of(row.snapshot_hlc)}
