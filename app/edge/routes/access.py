"""``/v1/tokens``, ``/v1/whoami``, ``/v1/access-log``: tokens, the caller, and records of access."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Path, Query, Response

from app.edge.accepted import AcceptedDep, Service
from app.edge.answers import json_answer
from app.edge.forms.body import json_body
from app.edge.forms.fields import TREE_SIZE_MAX, CursorQuery, Limit, TenantQuery
from app.edge.forms.lists import Cursors, number_position, page
from app.edge.forms.requests import TokenRequest
from app.edge.routing import PROBLEM_RESPONSE, StrictRoute, answered
from app.runtime.answers import Time, shape
from app.runtime.answers.node import IssuedTokenAnswer, TokenAnswer, TokenList
from app.runtime.principals import Right
from app.runtime.settings.types import parse_duration
from app.runtime.state.node import Node
from app.trust.tokens import Tokens
from app.write.intake.access_records import AccessRecords
from ledger import rfc3339
from ledger.errors import InvalidInputError, reported_as
from signing.key_statement import IssuedToken

router = APIRouter(route_class=StrictRoute, tags=["access"], responses=PROBLEM_RESPONSE)

LIFE_MAX = timedelta(days=3650)

_LINES = Cursors("access", number_position)


GrantAnswer = shape(
    "GrantAnswer",
    "Rights, and the patterns of tenants that they are for.",
    rights=list[str],
    tenants=list[str],
)

WhoamiAnswer = shape(
    "WhoamiAnswer",
    "Who calls; no principal where nobody is asked.",
    principal=str | None,
    source=str,
    token_id=str | None,
    expires_at=Time | None,
    grants=[GrantAnswer],
)

AccessAnswer = shape(
    "AccessAnswer",
    "That somebody read payloads of a tenant, acted on it, or was refused.",
    at=Time,
    kind=Literal["read", "act", "refusal"],
    tenant_id=str,
    actor=str | None,
    route=str,
    path=str,
    address=str | None,
    what=dict[str, Any],
)

AccessList = shape(
    "AccessList",
    "Lines of one node's access log, newest first.",
    items=[AccessAnswer],
    next_cursor=str | None,
)


@router.post("/v1/tokens", status_code=201, responses=answered(IssuedTokenAnswer, 201))
async def issue_token(
    tokens: Service[Tokens], accepted: AcceptedDep, wanted: Annotated[dict[str, Any], json_body(TokenRequest)]
) -> Response:
    """Issue a token, with rights for tenants that the caller administers. The answer has it, and nothing else ever."""
    token, text = await tokens.issue(
        wanted["name"], wanted["rights"], wanted["tenants"], _end(wanted.get("expires_in")), accepted.caller
    )
    return json_answer({**_answer(token), "token": text}, 201, {"Cache-Control": "no-store"})


@router.get("/v1/tokens", responses=answered(TokenList))
async def list_tokens(tokens: Service[Tokens], accepted: AcceptedDep) -> Response:
    """The tokens for tenants that the caller administers, newest first, those that count no more among them."""
    return page([_answer(each) for each in tokens.issued(accepted.caller)], None)


@router.delete("/v1/tokens/{token_id}", responses=answered(TokenAnswer))
async def revoke_token(
    node: Service[Node],
    tokens: Service[Tokens],
    accepted: AcceptedDep,
    token_id: Annotated[str, Path(min_length=1, max_length=64, description="As lists have it.")],
) -> Response:
    """Let a token count no more: here at once, on other nodes within a second."""
    node.check_writable()
    await accepted.allow()
    return json_answer(_answer(await tokens.revoke(token_id, accepted.caller)))


@router.get("/v1/whoami", responses=answered(WhoamiAnswer))
async def tell_caller(accepted: AcceptedDep) -> Response:
    """Who the service takes the caller for, and what he may do."""
    caller = accepted.caller
    return json_answer(
        {
            "principal": caller.id,
            "source": caller.source,
            "token_id": caller.token_id,
            "expires_at": caller.expires_at,
            "grants": [
                {"rights": [right for right in Right if right in grant.rights], "tenants": list(grant.tenants)}
                for grant in caller.grants
            ],
        }
    )


@router.get("/v1/access-log", responses=answered(AccessList))
async def list_access(
    records: Service[AccessRecords],
    tenant_id: TenantQuery,
    limit: Annotated[Limit, Query()] = 100,
    cursor: CursorQuery = None,
) -> Response:
    """Who read the tenant's payloads, acted on it or was refused, by this node's access log, newest first."""
    (below,) = _LINES.at(tenant_id, cursor) or (TREE_SIZE_MAX,)
    lines, following = await records.log.newest(tenant_id, below, limit)
    return page(lines, _LINES.next(tenant_id, None if following is None else (following,)))


def _end(expires_in: str | None) -> datetime | None:
    if expires_in is None:
        return None
    invalid = partial(InvalidInputError, path=("expires_in",))
    with reported_as(invalid, "expires_in", ValueError, OverflowError):
        life = parse_duration(expires_in)
    if not timedelta() < life <= LIFE_MAX:
        raise invalid(f"expires_in: a token lives at most {LIFE_MAX.days} days")
    return (datetime.now(UTC) + life).replace(microsecond=0)


def _answer(token: IssuedToken) -> dict[str, Any]:
    return {
        "token_id": token.token_id,
        "name": token.name,
        "rights": list(token.rights),
        "tenants": list(token.tenants),
        "issued_at": rfc3339.text_of(token.issued_hlc.physical_ms) if token.issued_hlc.physical_ms else None,
        "issued_by": token.issued_by,
        "expires_at": token.expires_at,
        "revoked": token.is_revoked,
    }
