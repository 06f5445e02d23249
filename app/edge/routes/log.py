"""``/v1/log/{tenant_id}``: a tenant's log in the form of C2SP tlog-tiles: checkpoint, hash tiles, entry bundles; and
signatures of witnesses and authorities on its checkpoints.

A tile path is ``tile/<level>/<index>[.p/<width>]``, one of a bundle ``tile/entries/<index>[.p/<width>]``; the index is
written in groups of three digits, all but the last with an ``x`` in front: 1234067 is ``x001/x234/067``. The content of
such a path never changes (a partial tile is a prefix of the full one), so caches may keep it for ever; a checkpoint or
an error they may not.
"""

from __future__ import annotations

import asyncio
import base64
import gzip
import re
from datetime import UTC, datetime
from functools import partial
from typing import Annotated, Literal

from fastapi import APIRouter, Path, Query, Request, Response

from app.edge.accepted import AcceptedDep, Service
from app.edge.answers import json_answer
from app.edge.forms.body import TEXT_MEDIA_TYPE, read_body
from app.edge.forms.fields import CursorQuery, Limit, ReadableTenantPath
from app.edge.forms.lists import NewestFirst, page
from app.edge.routing import PROBLEM_RESPONSE, StrictRoute, answered
from app.read import (
    proofs,
)
from app.runtime.answers.chain import CosignatureList, CosignedAnswer, TimestampList, WitnessesAnswer
from app.runtime.settings.config import Settings
from app.runtime.state.node import Node
from app.store import anchors
from app.store.sessions import NodePool
from app.trust.key_chain import Trust, open_stored
from app.trust.retention import RetentionReader
from app.write.followers.anchors import CosignatureInbox
from app.write.followers.notary import Notary
from app.write.followers.witnesses import Witnesses
from ledger.errors import NotFoundError
from ledger.merkle.tiles import TILE_WIDTH
from signing.anchors import RFC_3161, WITNESS, ExternalWitnesses

router = APIRouter(route_class=StrictRoute, tags=["log"], responses=PROBLEM_RESPONSE)

TILE_LEVEL_MAX = 63
NOTE_BYTES_MAX = 128 * 1024
"""Longest note taken: room for every cosignature that a note may have."""
_LEVEL = re.compile(r"(?P<level>0|[1-9][0-9]?)/(?P<rest>.*)", re.ASCII)
_INDEX = re.compile(r"(?P<index>(?:x[0-9]{3}/){0,5}[0-9]{3})(?:\.p/(?P<width>[1-9][0-9]{0,2}))?", re.ASCII)
_GZIP = re.compile(r"(?:x-)?gzip|\*", re.ASCII)
_NO_WEIGHT = re.compile(r"q=0(?:\.0{0,3})?", re.ASCII)
_BINARY = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}

_COSIGNATURES = NewestFirst("cosignatures", partial(anchors.listed, WITNESS), lambda row: row.number)
_TIMESTAMPS = NewestFirst("anchors", partial(anchors.listed, RFC_3161), lambda row: row.number)


@router.get(
    "/v1/log/{tenant_id}/checkpoint",
    response_class=Response,
    responses={200: {"description": "A signed note", "content": {TEXT_MEDIA_TYPE: {"schema": {"type": "string"}}}}},
)
async def read_checkpoint(
    notary: Service[Notary],
    pool: Service[NodePool],
    external: Service[ExternalWitnesses],
    trust: Service[Trust],
    tenant_id: ReadableTenantPath,
    is_cosigned: Annotated[
        Literal["true", "false"], Query(alias="cosigned", description="Only one that a witness has cosigned.")
    ] = "false",
) -> Response:
    """The newest checkpoint: a C2SP signed note over size and root of the tree, with the cosignatures there are.

    With ``cosigned`` the newest one that a registered witness has cosigned.
    """
    read = proofs.cosigned_checkpoint if is_cosigned == "true" else proofs.served_checkpoint
    with notary.rebuilds_if_damaged(tenant_id):
        note = await read(pool, tenant_id, external.witnesses)
        open_stored(tenant_id, note, await trust.log_keys(tenant_id), notary.origin(tenant_id))
    return Response(note, headers={"Cache-Control": "no-store"}, media_type=TEXT_MEDIA_TYPE)


@router.get(
    "/v1/log/{tenant_id}/tile/entries/{bundle:path}",
    response_class=Response,
    responses={200: {"description": "Entries, each behind its length as u16 big-endian", "content": _BINARY}},
)
async def read_entry_bundle(
    request: Request,
    pool: Service[NodePool],
    retention: Service[RetentionReader],
    settings: Service[Settings],
    tenant_id: ReadableTenantPath,
    bundle: Annotated[
        str,
        Path(
            description="Which: its number in groups of three digits as C2SP tlog-tiles has it, with .p/ and a width "
            "where it is not full."
        ),
    ],
) -> Response:
    """The entries that hash to the level 0 tile of the same path: chain links, 32 bytes each. Of a bundle whose first
    entry has left for the archive, below the minimum index of tlog-tiles, 410 `archived`."""
    entries = await proofs.entry_bundle(pool, retention, tenant_id, *_parse_index(bundle))
    headers = {**_kept_for_ever(settings), "Vary": "Accept-Encoding"}
    if _takes_gzip(request.headers.getlist("accept-encoding")):
        entries = gzip.compress(entries, compresslevel=1, mtime=0)
        headers["Content-Encoding"] = "gzip"
    return Response(entries, headers=headers, media_type="application/octet-stream")


@router.get(
    "/v1/log/{tenant_id}/tile/{tile:path}",
    response_class=Response,
    responses={200: {"description": "Hashes of 32 bytes", "content": _BINARY}},
)
async def read_tile(
    pool: Service[NodePool],
    settings: Service[Settings],
    tenant_id: ReadableTenantPath,
    tile: Annotated[
        str,
        Path(
            description="Which: its level, /, and its number in groups of three digits, with .p/ and a width where it "
            "is not full."
        ),
    ],
) -> Response:
    """One tile of hashes, full, or partial when its path ends in ``.p/<width>``."""
    match = _LEVEL.fullmatch(tile)
    if match is None or int(match["level"]) > TILE_LEVEL_MAX:
        raise NotFoundError("not the path of a hash tile")
    return Response(
        await proofs.hash_tile(pool, tenant_id, int(match["level"]), *_parse_index(match["rest"])),
        headers=_kept_for_ever(settings),
        media_type="application/octet-stream",
    )


@router.post(
    "/v1/log/{tenant_id}/cosignatures",
    status_code=201,
    responses=answered(CosignedAnswer, 201),
    openapi_extra={"requestBody": {"required": True, "content": {TEXT_MEDIA_TYPE: {"schema": {"type": "string"}}}}},
)
async def add_cosignatures(
    request: Request,
    accepted: AcceptedDep,
    node: Service[Node],
    cosignatures: Service[CosignatureInbox],
    tenant_id: ReadableTenantPath,
) -> Response:
    """Take a checkpoint of this log, as C2SP signed note, that registered witnesses have cosigned."""
    node.check_writable()
    note = await read_body(request, TEXT_MEDIA_TYPE, NOTE_BYTES_MAX)
    await accepted.allow()
    checkpoint, added = await cosignatures.take(tenant_id, note, datetime.now(UTC))
    items = [{"witness": each.witness.text(), "time": each.time} for each in added]
    return json_answer(
        {"tenant_id": tenant_id, "tree_size": checkpoint.size, "root_hash": checkpoint.root.hex(), "added": items}, 201
    )


@router.get("/v1/log/{tenant_id}/cosignatures", responses=answered(CosignatureList))
async def list_cosignatures(
    pool: Service[NodePool],
    external: Service[ExternalWitnesses],
    tenant_id: ReadableTenantPath,
    limit: Annotated[Limit, Query()] = 100,
    cursor: CursorQuery = None,
) -> Response:
    """Cosignatures on the tenant's checkpoints, newest first, each with whether it holds."""
    rows, following = await _COSIGNATURES.read(pool, tenant_id, cursor, limit)
    statuses = await asyncio.to_thread(lambda: [proofs.status_of(row.said, external.witnesses) for row in rows])
    return page(
        [
            {
                "tree_size": row.said.size,
                "witness": row.said.by,
                "time": row.said.time,
                "status": status,
                "note": row.said.note,
            }
            for row, status in zip(rows, statuses, strict=True)
        ],
        following,
    )


@router.get("/v1/log/{tenant_id}/witnesses", responses=answered(WitnessesAnswer))
async def list_witnesses(
    external: Service[ExternalWitnesses],
    logs: Service[proofs.CosignedLogs],
    pushed: Service[Witnesses | None],
    tenant_id: ReadableTenantPath,
) -> Response:
    """The newest cosignature of each witness on the tenant's checkpoints, and whether the policy's quorum is met."""
    size, said, quorum = await logs.read(tenant_id)
    faults = {} if pushed is None else pushed.faults_of(tenant_id)
    return json_answer(
        {
            "tenant_id": tenant_id,
            "tree_size": size,
            "policy": None if quorum is None else quorum.to_json(),
            "witnesses": proofs.witnesses_of(said, external, faults),
        }
    )


@router.get("/v1/log/{tenant_id}/anchors", responses=answered(TimestampList))
async def list_anchors(
    pool: Service[NodePool],
    tenant_id: ReadableTenantPath,
    limit: Annotated[Limit, Query()] = 100,
    cursor: CursorQuery = None,
) -> Response:
    """Time stamps (RFC 3161) on the tenant's checkpoints, newest first, as they came: whoever holds the CA judges."""
    rows, following = await _TIMESTAMPS.read(pool, tenant_id, cursor, limit)
    return page(
        [
            {
                "kind": RFC_3161,
                "tree_size": row.said.size,
                "authority": row.said.by,
                "time": row.said.time,
                "checkpoint": row.said.note,
                "response": base64.b64encode(row.said.response).decode(),
            }
            for row in rows
        ],
        following,
    )


def _kept_for_ever(settings: Settings) -> dict[str, str]:
    """Headers of immutable content; shared caches may keep it only if every caller may read it."""
    kept_by = "public" if settings.auth.mode == "none" else "private"
    return {"Cache-Control": f"{kept_by}, max-age=31536000, immutable"}


def _parse_index(path: str) -> tuple[int, int]:
    """(index, width) at the end of a tile path; only the canonical spelling is accepted."""
    match = _INDEX.fullmatch(path)
    if match is None:
        raise NotFoundError("not the path of a tile")
    groups = match["index"].replace("x", "").split("/")
    width = int(match["width"] or TILE_WIDTH)
    if (len(groups) > 1 and groups[0] == "000") or (match["width"] and width >= TILE_WIDTH):
        raise NotFoundError("not the path of a tile")
    return int("".join(groups)), width


def _takes_gzip(accepted: list[str]) -> bool:
    """Whether an Accept-Encoding asks for gzip, by name or by ``*``, and does not give it the weight 0."""
    for item in ",".join(accepted).lower().split(","):
        name, _, weight = (part.strip() for part in item.partition(";"))
        if _GZIP.fullmatch(name):
            return _NO_WEIGHT.fullmatch(weight) is None
    return False
