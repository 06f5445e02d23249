"""``/v1/log/{tenant_id}``: a tenant's log as C2SP tlog-tiles reads it. Checkpoint and hash tiles.

A tile path is ``tile/<level>/<index>[.p/<width>]``; the index is written in groups of three digits, all but the last
with an ``x`` in front: 1234067 is ``x001/x234/067``. A full tile never changes, a partial one is a prefix of it.
"""

from __future__ import annotations

import re
from typing import Annotated

from fastapi import APIRouter, Path, Response

from app.http.fields import READABLE_TENANT_PATTERN
from app.http.routing import PROBLEM_RESPONSE, StrictRoute
from app.parts import PartsDep
from app.store import chain_reads
from app.store.notary import read_tiles
from app.store.reading import reading
from ledger.errors import NotFoundError, TenantNotFoundError
from ledger.merkle import HASH_BYTES
from ledger.tiles import TILE_WIDTH

router = APIRouter(route_class=StrictRoute, tags=["log"])

TILE_LEVEL_MAX = 63
_TILE = re.compile(
    r"(?P<level>0|[1-9][0-9]?)/(?P<index>(?:x[0-9]{3}/){0,5}[0-9]{3})(?:\.p/(?P<width>[1-9][0-9]{0,2}))?", re.ASCII
)
_FOREVER = {"Cache-Control": "public, max-age=31536000, immutable"}
_NOT_KEPT = {"Cache-Control": "no-store"}
_TEXT = {"description": "A signed note", "content": {"text/plain; charset=utf-8": {"schema": {"type": "string"}}}}
_BYTES = {
    "description": "Hashes of 32 bytes",
    "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}},
}

TenantPath = Annotated[str, Path(pattern=READABLE_TENANT_PATTERN)]


@router.get("/v1/log/{tenant_id}/checkpoint", response_class=Response, responses={200: _TEXT, **PROBLEM_RESPONSE})
async def read_checkpoint(parts: PartsDep, tenant_id: TenantPath) -> Response:
    """The newest checkpoint: a C2SP signed note over size and root of the tree."""
    async with reading(parts.pool) as connection:
        head = await chain_reads.head(connection, tenant_id)
    if head is None:
        raise TenantNotFoundError(f"there is no tenant {tenant_id}")
    if head.checkpoint is None:
        raise NotFoundError(f"no checkpoint of {tenant_id} has been signed yet; try again soon")
    return Response(head.checkpoint, headers=_NOT_KEPT, media_type="text/plain")


@router.get(
    "/v1/log/{tenant_id}/tile/{tile:path}", response_class=Response, responses={200: _BYTES, **PROBLEM_RESPONSE}
)
async def read_tile(parts: PartsDep, tenant_id: TenantPath, tile: str) -> Response:
    """One tile of hashes, full, or partial when its path ends in ``.p/<width>``."""
    level, index, width = _parse(tile)
    async with reading(parts.pool) as connection:
        found = await read_tiles(connection, tenant_id, [(level, index)])
    hashes = found.get((level, index), b"")
    if len(hashes) < width * HASH_BYTES:
        raise NotFoundError(f"tile {tile[:100]} of {tenant_id} does not reach that far")
    return Response(hashes[: width * HASH_BYTES], headers=_FOREVER, media_type="application/octet-stream")


def _parse(tile: str) -> tuple[int, int, int]:
    """(level, index, width) of a tile path that has one spelling only."""
    match = _TILE.fullmatch(tile)
    if match is None or int(match["level"]) > TILE_LEVEL_MAX:
        raise NotFoundError("not the path of a hash tile")
    groups = match["index"].replace("x", "").split("/")
    width = int(match["width"] or TILE_WIDTH)
    if (len(groups) > 1 and groups[0] == "000") or (match["width"] and width >= TILE_WIDTH):
        raise NotFoundError("not the path of a hash tile")
    return int(match["level"]), int("".join(groups)), width
