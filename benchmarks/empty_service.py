"""The baseline of ``submit_local``: the same application and model, and a handler that does nothing.

The body is read and checked as the service does it; the answer has the size of the service's, made once.
"""

from __future__ import annotations

import uvloop
from fastapi import APIRouter, FastAPI, Request, Response

from app.config import Settings
from app.http.body import JSON_MEDIA_TYPE, parse, read_body
from app.http.requests import JOB_REQUEST
from app.http.routing import LeanRoute
from app.http.writing import receipt_answer
from app.node.session import SECRET_BYTES, SessionTokens
from app.pending.requests import Receipt
from benchmarks.serving import application, serve
from ledger.machines.events import JOB_EVENTS, Durability

RECEIPT = Receipt(
    job_id="local-1704931200000-gate0a1b2c-00000",
    tenant_id="bench",
    event=JOB_EVENTS["JobCreated"],
    hlc="1704931200000:0:node-0a1b2c3d",
    epoch=1,
    lsn=10_000,
    fence_token=1,
    requested=Durability.LOCAL,
    achieved=Durability.LOCAL,
    survives=("process",),
    chain=None,
    replayed=False,
)

router = APIRouter(route_class=LeanRoute)
_ANSWER = receipt_answer(SessionTokens(bytes(SECRET_BYTES)), RECEIPT)
_BODY = bytes(_ANSWER.body)
_HEADERS = {name: _ANSWER.headers[name] for name in ("Tally-Session", "Location")}
_BODY_BYTES_MAX = min(Settings().http.body_bytes_max, Settings().wal.record_bytes_max)


@router.post("/v1/jobs", status_code=201)
async def submit_job(request: Request) -> Response:
    """Read, check, answer."""
    parse(JOB_REQUEST, await read_body(request, JSON_MEDIA_TYPE, _BODY_BYTES_MAX))
    return Response(_BODY, 201, _HEADERS, media_type="application/json")


def create_app() -> FastAPI:
    """The application."""
    app = application()
    app.router.routes.extend(router.routes)
    return app


if __name__ == "__main__":
    uvloop.run(serve(create_app()))
