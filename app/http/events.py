"""``POST /v1/events``: many events in one request, one JSON object a line.

All lines are checked before the first is taken; one that is wrong refuses the whole request. Lines end with LF or
CRLF; empty lines are allowed at the end only.

    1 <= lines <= LINES_MAX        len(line) <= wal.record_bytes_max

Lines are checked in turns, few of long ones, so that other requests never wait for a whole body.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response
from pydantic import ValidationError

from app.background.turns import turns
from app.http.answers import BatchAnswer, json_answer
from app.http.body import NDJSON_MEDIA_TYPE, read_body
from app.http.fields import Level
from app.http.members import check_unique, is_unique
from app.http.problems import PAYLOAD_TOO_LARGE, ProblemError, dotted, invalid
from app.http.requests import EVENT_LINE, EVENT_TAGS
from app.http.routing import PROBLEM_RESPONSE, WRITE_HEADERS, WRITE_PARAMETERS, StrictRoute
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
from ledger import canonical, rfc3339
from ledger.errors import InvalidEventError, InvalidInputError
from ledger.machines.events import Durability

router = APIRouter(route_class=StrictRoute, tags=["events"], responses=PROBLEM_RESPONSE)

LINES_MAX = 100_000
"""Most events in one request."""

_validate_line = EVENT_LINE.validator.validate_json
_LEVEL = "Of the whole request; left out, the highest default of its events."
_BRACKETS_SAFE = 60
"""A line with fewer cannot be nested too deep."""
_FLAT = bytes.maketrans(b"123456789E", b"000000000e")
_SUSPECTS = (b"0" * 16, b"0e000", rb"\u0000", b"NaN", b"Infinity")
"""What a text contains, its digits made 0, if it holds a value without canonical form (nesting aside)."""

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
    response_model=BatchAnswer,
    responses={200: {"headers": WRITE_HEADERS}},
    openapi_extra={"requestBody": _BODY, "parameters": WRITE_PARAMETERS},
)
async def submit_events(
    request: Request, durability: Annotated[Level | None, Query(description=_LEVEL)] = None
) -> Response:
    """Record many events, all or none."""
    parts = parts_of(request)
    parts.check_writable()
    body = await read_body(request, NDJSON_MEDIA_TYPE, parts.settings.http.body_bytes_max)
    drafts = await parts.sealing.prepare_lines(await drafts_of(body, parts.settings.wal.record_bytes_max))
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
    lines = body.split(b"\n", LINES_MAX + 1)
    while lines and not lines[-1].strip(b" \t\r"):
        lines.pop()
    if not lines:
        raise InvalidEventError("there is no event in the request", 1)
    if len(lines) > LINES_MAX:
        raise ProblemError(PAYLOAD_TOO_LARGE, f"at most {LINES_MAX} events go into one request")
    drafts: list[Draft] = []
    for turn in turns(list(map(len, lines))):
        if turn.start:
            await asyncio.sleep(0)
        texts = lines[turn.start : turn.stop]
        events = _events_of(texts, turn.start + 1, line_bytes_max)
        _check_text(texts, events, turn.start + 1)
        drafts += [draft_of(event, None, None) for event in events]
    return drafts


def _events_of(lines: list[bytes], first_number: int, bytes_max: int) -> list[Any]:
    """The events of ``lines``, of the right form; their text is still to be checked.

    Raises:
        InvalidEventError: a line is wrong; the first that is.
    """
    if max(map(len, lines)) <= bytes_max:
        with contextlib.suppress(ValidationError):
            return list(map(_validate_line, lines))
    return [_event_of(line, number, bytes_max) for number, line in enumerate(lines, first_number)]


def _event_of(line: bytes, number: int, bytes_max: int) -> Any:
    """The event of one line, of the right form; its text is still to be checked."""
    if len(line) > bytes_max:
        raise InvalidEventError(f"line {number} has {len(line)} bytes; {bytes_max} are allowed", number)
    try:
        return EVENT_LINE.validate_json(line)
    except ValidationError as error:
        found = invalid(error, EVENT_TAGS)
        raise InvalidEventError(f"line {number}: {found}", number, found.path) from None


def _check_text(lines: list[bytes], events: list[Any], first_number: int) -> None:
    """What the parser lets pass: members given twice, values without canonical form.

    The lines are looked at together, which finds nothing nearly always; only if it does, one by one.

    Raises:
        InvalidEventError: a line has such a thing.
    """
    text = b"\n".join(lines)
    if is_unique(text, events) and not _is_suspect(text) and max(map(_brackets, lines)) <= _BRACKETS_SAFE:
        return
    for number, (line, event) in enumerate(zip(lines, events, strict=True), first_number):
        _check_line(line, event, number)


def _check_line(line: bytes, event: Any, number: int) -> None:
    try:
        check_unique(line, event)
        if _is_suspect(line) or _brackets(line) > _BRACKETS_SAFE:
            canonical.encode(event)
    except InvalidInputError as error:
        place = f"{dotted(error.path)}: " if error.path else ""
        raise InvalidEventError(f"line {number}: {place}{error}", number, error.path) from None


def _is_suspect(text: bytes) -> bool:
    """Whether ``text`` may hold a value without canonical form, nesting aside; false nearly always, at little cost."""
    flat = text.translate(_FLAT, b"+")
    return any(suspect in flat for suspect in _SUSPECTS)


def _brackets(line: bytes) -> int:
    return line.count(b"{") + line.count(b"[")


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
