"""``POST /v1/events``: many events in one request, one JSON object a line.

All lines are checked before the first is taken; one that is wrong refuses the whole request.

    1 <= lines <= LINES_MAX        len(line) <= wal.record_bytes_max

Lines are checked in turns, few of long ones, so that other requests never wait for a whole body.
"""

from __future__ import annotations

import asyncio
from typing import Annotated

from fastapi import APIRouter, Query, Request, Response

from app.answers.jobs import BatchAnswer
from app.background.turns import turns
from app.http.answers import json_answer
from app.http.body import NDJSON_MEDIA_TYPE, read_body
from app.http.fields import Level
from app.http.lines import LineModel
from app.http.requests import EVENT_LINE, EVENT_TAGS
from app.http.routing import PROBLEM_RESPONSE, WRITE_HEADERS, WRITE_PARAMETERS, StrictRoute, answered, check_tenant
from app.http.writing import (
    Route,
    draft_of,
    durability_answer,
    request_key,
    session_tokens,
    token_of,
    write_headers,
)
from app.node.session import SessionTokens
from app.parts import parts_of
from app.pending.requests import BatchReceipt, Draft
from ledger import rfc3339
from ledger.machines.events import Durability

router = APIRouter(route_class=StrictRoute, tags=["events"], responses=PROBLEM_RESPONSE)

LINES_MAX = 100_000
"""Most events in one request."""

_EVENTS = LineModel("event", EVENT_LINE, LINES_MAX, EVENT_TAGS)
_LEVEL = "Of the whole request; left out, the highest default of its events."
_BODY = {
    "required": True,
    "content": {
        NDJSON_MEDIA_TYPE: {
            "schema": {"type": "string", "description": "One EventLine a line."},
            "x-item-schema": {"$ref": "#/components/schemas/EventLine"},
        }
    },
}


@router.post(
    "/v1/events",
    responses=answered(BatchAnswer, headers=WRITE_HEADERS),
    openapi_extra={"requestBody": _BODY, "parameters": WRITE_PARAMETERS},
)
async def submit_events(
    request: Request, durability: Annotated[Level | None, Query(description=_LEVEL)] = None
) -> Response:
    """Record many events, all or none."""
    parts = parts_of(request)
    parts.check_writable()
    body = await read_body(request, NDJSON_MEDIA_TYPE, parts.settings.http.body_bytes_max)
    unsealed = await drafts_of(body, parts.settings.wal.record_bytes_max)
    for tenant_id in {draft.tenant_id for draft in unsealed}:
        check_tenant(request, tenant_id)
    drafts = await parts.sealing.prepare_lines(unsealed)
    key = parts.sealing.key_of(request_key(request, Route.EVENTS, body, durability or ""), drafts)
    tokens = session_tokens(request)
    if tokens:
        parts.consistency.receive(tokens)
        await parts.consistency.wait_for_session(tokens)
    level = None if durability is None else Durability[durability]
    return _answer(parts.sessions, await parts.submitter.submit_lines(drafts, durability=level, key=key))


async def drafts_of(body: bytes, line_bytes_max: int) -> list[Draft]:
    """The events of ``body``, all checked.

    Raises:
        InvalidEventError: a line is wrong; nothing else was looked at after it.
        ProblemError: too many lines.
    """
    lines = _EVENTS.split(body)
    drafts: list[Draft] = []
    for turn in turns(list(map(len, lines))):
        if turn.start:
            await asyncio.sleep(0)
        numbers = range(turn.start + 1, turn.stop + 1)
        events = _EVENTS.check(lines[turn.start : turn.stop], numbers, line_bytes_max)
        drafts += [draft_of(event, None, None) for event in events]
    return drafts


def _answer(sessions: SessionTokens, receipt: BatchReceipt) -> Response:
    session = token_of(sessions, receipt.last_hlc, receipt.epoch, receipt.last_lsn)
    body = {
        "accepted": receipt.accepted,
        "durability": durability_answer(receipt.requested, receipt.achieved, receipt.survives),
        "first_hlc": receipt.first_hlc,
        "first_at": rfc3339.time_of(receipt.first_hlc),
        "last_hlc": receipt.last_hlc,
        "last_at": rfc3339.time_of(receipt.last_hlc),
        "job_ids": receipt.job_ids,
        "session": session,
    }
    return json_answer(body, headers=write_headers(session, receipt.replayed))
