"""What the routes that write share: from a checked body to a draft, from a receipt to an answer."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from enum import IntEnum

from fastapi import Request, Response

from app.edge.forms.body import JSON_MEDIA_TYPE
from app.edge.forms.fields import IDEMPOTENCY_KEY_PATTERN
from app.edge.parts import parts_of
from app.runtime.answers import json_bytes
from app.runtime.state.session import SessionTokens, Token
from app.write.pending.requests import Receipt, RequestKey
from ledger import rfc3339
from ledger.errors import InvalidInputError
from ledger.facts.events import Durability
from ledger.positions import Epoch, Lsn

_KEY = re.compile(IDEMPOTENCY_KEY_PATTERN)
_SESSION_HEADER = "Tally-Session"


class Route(IntEnum):
    """Routes that take an Idempotency-Key. The numbers are stored: never change or reuse one."""

    JOBS = 1
    JOB_EVENTS = 2
    CANCEL = 3
    EVENTS = 4
    COMMITMENTS = 5
    LINEAGE = 6


def request_key(request: Request, route: Route, body: bytes, scope: str) -> RequestKey | None:
    """The request's Idempotency-Key; ``scope`` is what identifies the request beside its body.

    Raises:
        InvalidInputError: not 1 to 255 visible ASCII characters, or more than one.
    """
    given = request.headers.getlist("idempotency-key")
    if not given:
        return None
    if len(given) > 1:
        raise _no_key()
    return key_of(given[0], route, body, scope)


def key_of(given: str, route: Route, body: bytes, scope: str) -> RequestKey:
    """As ``request_key``, of the value of the header."""
    if _KEY.fullmatch(given) is None:
        raise _no_key()
    return RequestKey(int(route), given, hashlib.sha256(b"%b\n%b" % (scope.encode(), body)).digest())


def _no_key() -> InvalidInputError:
    return InvalidInputError("Idempotency-Key: send one, of 1 to 255 visible ASCII characters", ("Idempotency-Key",))


def session_tokens(request: Request) -> Sequence[Token]:
    """The tokens the request shows.

    Raises:
        InvalidInputError: one is not of this ledger.
    """
    return parts_of(request).sessions.decode_header(",".join(request.headers.getlist("tally-session")))


def token_of(sessions: SessionTokens, hlc: str, epoch: Epoch, lsn: Lsn) -> str:
    """The session token of a write of the node that ``hlc`` names."""
    return sessions.encode(Token(hlc.rpartition(":")[2], epoch, lsn, hlc))


def durability_answer(requested: Durability, achieved: Durability, survives: Sequence[str]) -> dict[str, object]:
    """What was asked for and what was reached."""
    return {"requested": requested.name, "achieved": achieved.name, "survives": list(survives)}


def write_headers(session: str, replayed: bool) -> dict[str, str]:
    """Headers of every answer to a write."""
    headers = {_SESSION_HEADER: session}
    if replayed:
        headers["Idempotent-Replay"] = "true"
    return headers


def receipt_answer(sessions: SessionTokens, receipt: Receipt) -> Response:
    """201 for one event."""
    session, body = receipt_body(sessions, receipt)
    headers = write_headers(session, receipt.replayed)
    headers["Location"] = location_of(receipt)
    return Response(body, 201, headers, media_type=JSON_MEDIA_TYPE)


def location_of(receipt: Receipt) -> str:
    """Where the job of an event is read."""
    return f"/v1/jobs/{receipt.job_id}"


def receipt_body(sessions: SessionTokens, receipt: Receipt) -> tuple[str, bytes]:
    """The session token of one event, and the JSON that answers it. Equal receipts give equal bytes."""
    session = token_of(sessions, receipt.hlc, receipt.epoch, receipt.lsn)
    chain = receipt.chain
    body = {
        "job_id": receipt.job_id,
        "tenant_id": receipt.tenant_id,
        "type": receipt.event.name,
        "action": receipt.event.action,
        "hlc": receipt.hlc,
        "at": rfc3339.time_of(receipt.hlc),
        "epoch": receipt.epoch,
        "lsn": receipt.lsn,
        "fence_token": receipt.fence_token,
        "durability": durability_answer(receipt.requested, receipt.achieved, receipt.survives),
        "chain": None
        if chain is None
        else {"seq": chain.seq, "chain_link": chain.chain_link, "prev_chain_link": chain.prev_chain_link},
        "session": session,
    }
    return session, json_bytes(body)
