"""``POST /v1/events``: many events in one request, one JSON object a line.

All lines are checked before the first is taken; one invalid line refuses the whole request.

    1 <= lines <= LINES_MAX        len(line) <= wal.record_bytes_max

Lines are checked in turns, few of long ones, so that other requests never wait for a whole body.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Annotated, Any

import orjson
from fastapi import APIRouter, Query, Request, Response

from app.edge.accepted import Accepted, AcceptedDep, LineCharges, Service
from app.edge.answers import json_answer
from app.edge.forms.body import NDJSON_MEDIA_TYPE, read_body
from app.edge.forms.fields import Level
from app.edge.forms.requests import EVENT_FORMS, EVENT_LINE, EVENT_TAGS
from app.edge.forms.validation import LineModel
from app.edge.routing import (
    PROBLEM_RESPONSE,
    SIGNATURE_PARAMETER,
    WRITE_HEADERS,
    WRITE_PARAMETERS,
    StrictRoute,
    answered,
)
from app.edge.writes import (
    Route,
    durability_answer,
    request_key,
    shown_session,
    token_of,
    write_headers,
)
from app.read.consistency import Consistency
from app.runtime.answers.jobs import BatchAnswer
from app.runtime.settings.config import Settings
from app.runtime.sharing import FairTurns, turns
from app.runtime.state.node import Node
from app.runtime.state.session import SessionTokens
from app.write.intake.job_checks import HomeRegions
from app.write.intake.private_fields import Sealing
from app.write.intake.submit import Submitter
from app.write.pending.requests import BatchReceipt, EventLines, draft_of
from ledger import native, rfc3339
from ledger.errors import InvalidInputError, reported_as
from ledger.facts.events import Durability

router = APIRouter(route_class=StrictRoute, tags=["events"], responses=PROBLEM_RESPONSE)

SIGNATURE_HEADER_BYTES_MAX = 8192
LINES_MAX = 100_000
"""Most events in one request."""

_EVENTS = LineModel("event", EVENT_LINE, LINES_MAX, EVENT_TAGS)


@router.post(
    "/v1/events",
    responses=answered(BatchAnswer, headers=WRITE_HEADERS),
    openapi_extra={
        "requestBody": {
            "required": True,
            "content": {
                NDJSON_MEDIA_TYPE: {
                    "schema": {"type": "string", "format": "binary", "description": "One EventLine a line."},
                    "x-item-schema": {"$ref": "#/components/schemas/EventLine"},
                }
            },
        },
        "parameters": [*WRITE_PARAMETERS, SIGNATURE_PARAMETER],
    },
)
async def submit_events(
    request: Request,
    accepted: AcceptedDep,
    node: Service[Node],
    settings: Service[Settings],
    line_turns: Service[FairTurns],
    sealing: Service[Sealing],
    sessions: Service[SessionTokens],
    consistency: Service[Consistency],
    submitter: Service[Submitter],
    homes: Service[HomeRegions],
    durability: Annotated[
        Level | None, Query(description="Of the whole request; left out, the highest default of its events.")
    ] = None,
) -> Response:
    """Record many events, all or none."""
    node.check_writable()
    body = await read_body(request, NDJSON_MEDIA_TYPE, settings.http.body_bytes_max)
    charges = LineCharges(accepted.access.quotas) if accepted.access.quotas.bounds_tenants else None

    def admit(lines: EventLines) -> None:
        for tenant_id in lines.tenants:
            accepted.check_tenant(tenant_id)
        if charges is not None:
            charges.read(lines)

    lines = await lines_of(body, settings.wal.record_bytes_max, accepted.caller.id, admit, line_turns)
    if charges is not None:
        charges.charge()
    is_sealed = await sealing.prepare_lines(lines)
    key = sealing.key_of(request_key(accepted, Route.EVENTS, body, durability or ""), is_sealed)
    once = None
    if (signature := _signature_of(accepted)) is not None:
        once = await submitter.signatures.check_lines(lines, signature, key, hashlib.sha256(body).digest(), line_turns)
    if tokens := shown_session(accepted, sessions, consistency):
        await consistency.wait_for_session(tokens)
    receipt = await submitter.submit_lines(
        lines,
        durability=None if durability is None else Durability[durability],
        key=key if key is None or once is None else once,
        once=once,
    )
    accepted.answers(receipt.first_lsn, receipt.last_lsn)
    return _answer(sessions, receipt, await homes.others(job_id for _, job_id in lines.jobs))


def _signature_of(accepted: Accepted) -> Any:
    """The header ``Tally-Signature``, None without one.

    Raises:
        InvalidInputError: it is not one object in JSON.
    """
    given = accepted.header_values(b"tally-signature")
    if not given:
        return None
    with reported_as(InvalidInputError, "Tally-Signature is not JSON", ValueError):
        if len(given) > 1 or len(given[0]) > SIGNATURE_HEADER_BYTES_MAX:
            raise InvalidInputError("Tally-Signature: send one", ("Tally-Signature",))
        return orjson.loads(given[0])


async def lines_of(
    body: bytes,
    line_bytes_max: int,
    actor: str | None,
    admit: Callable[[EventLines], None] = lambda _lines: None,
    line_turns: FairTurns | None = None,
) -> EventLines:
    """The events of ``body``, which ``actor`` sent, all checked. ``admit`` gets them as they are read, and refuses
    events that the caller may not send; omit ``line_turns`` if no other lines wait for turns.

    Raises:
        InvalidEventError: a line is invalid; later lines were not read.
        ProblemError: too many lines.
    """
    line_turns = line_turns or FairTurns()
    sources = _EVENTS.split(body)
    lines = EventLines(sources, actor)
    for turn in turns(list(map(len, sources))):
        await line_turns.next(actor)
        here = sources[turn.start : turn.stop]
        read = native.event_lines(here, EVENT_FORMS, line_bytes_max)
        left = [at for at in range(len(here)) if read is None or read[0][at] is None]
        numbers = [turn.start + at + 1 for at in left]
        events = _EVENTS.check([here[at] for at in left], numbers, line_bytes_max) if left else []
        drafts = {at: draft_of(event, None, None, actor) for at, event in zip(left, events, strict=True)}
        lines.extend(len(here), read, drafts)
        admit(lines)
    return lines


def _answer(sessions: SessionTokens, receipt: BatchReceipt, home_regions: list[str]) -> Response:
    session = token_of(sessions, receipt.last_hlc, receipt.epoch, receipt.last_lsn)
    return json_answer(
        {
            "accepted": receipt.accepted,
            "durability": durability_answer(receipt.requested, receipt.achieved, receipt.survives),
            "first_hlc": receipt.first_hlc,
            "first_at": rfc3339.time_of(receipt.first_hlc),
            "last_hlc": receipt.last_hlc,
            "last_at": rfc3339.time_of(receipt.last_hlc),
            "job_ids": receipt.job_ids,
            "home_regions": home_regions,
            "session": session,
        },
        headers=write_headers(session, receipt.replayed),
    )
