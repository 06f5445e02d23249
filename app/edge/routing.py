"""Routes: each asks who calls, and for a right, before it looks at a request, and refuses a query nobody asked for.

A query parameter that no operation knows, or that comes twice and is no list, is refused: a typing error must not pass
for a default, and two readers must not read two different values out of one request.

The framework spends more time on a request (routers inside routers, parameters, exit stacks) than it takes to
check and answer one event. So routes stand in the application directly, and the routes that take one event are
``LeanRoute``: described like the others, called without the machinery.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, get_origin

from fastapi import Depends
from fastapi.dependencies.models import Dependant
from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from app.edge.charging import charge_caller, charge_named
from app.edge.forms.body import JSON_MEDIA_TYPE, SCHEMA_REF, JsonBody
from app.edge.forms.fields import IDEMPOTENCY_KEY_PATTERN, SESSION_PATTERN
from app.edge.parts import Parts, parts_of
from app.edge.problems import PROBLEM_MEDIA_TYPE
from app.runtime.principals import ACTS, RULES, UNLISTED, Needs, Principal
from app.runtime.settings.words import nearest
from app.trust.access import callers
from app.trust.access.callers import ASKED_S, CALLER
from ledger.errors import InvalidInputError, NotReadyError, UnauthenticatedError

PROBLEM_RESPONSE: dict[int | str, dict[str, Any]] = {
    "default": {
        "description": "A problem (RFC 9457)",
        "content": {PROBLEM_MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}},
    }
}
"""Every operation may be answered with a problem: for ``responses`` of a router."""

IDEMPOTENCY_KEY_PARAMETER: dict[str, Any] = {
    "name": "Idempotency-Key",
    "in": "header",
    "required": False,
    "description": "The same key and body give the first answer again.",
    "schema": {"type": "string", "pattern": IDEMPOTENCY_KEY_PATTERN},
}
SESSION_PARAMETER: dict[str, Any] = {
    "name": "Tally-Session",
    "in": "header",
    "required": False,
    "description": "One or several session tokens, separated by commas: writes to be seen first.",
    "schema": {"type": "string", "pattern": SESSION_PATTERN, "maxLength": 4096},
}


def answered(shape: Any, status: int = 200, **more: Any) -> dict[int | str, dict[str, Any]]:
    """Describes the answer that an operation gives: a shape of ``app.runtime.answers``."""
    schema = {"$ref": SCHEMA_REF.format(model=shape.__name__)}
    return {status: {"content": {JSON_MEDIA_TYPE: {"schema": schema}}, **more}}


WRITE_PARAMETERS = [IDEMPOTENCY_KEY_PARAMETER, SESSION_PARAMETER]
WRITE_HEADERS: dict[str, Any] = {
    "Tally-Session": {"schema": {"type": "string"}, "description": "Show it to a read that is to see this write."},
    "Idempotent-Replay": {
        "schema": {"type": "string", "enum": ["true"]},
        "required": False,
        "description": "This is the first answer again: the Idempotency-Key and the body were seen before.",
    },
}


BEGUN = "tally.begun"
"""Where the scope of a request holds the ``Begun`` of one that its connection began to answer."""


@dataclass(slots=True)
class Begun:
    """What a connection did of a request before the framework got it: the caller is known, and has the right."""

    at_s: float
    """When, by ``time.perf_counter``."""
    caller: Principal | None = None
    error: Exception | None = None
    """What came of it, where the route has only to raise this."""
    is_charged: bool = False
    """Whether it was taken out of what there is for its tenant."""


class RightedRoute(APIRoute):
    """A route that asks who calls, and for a right, before it looks at a request. Has one method."""

    def __init__(self, path: str, endpoint: Callable[..., Any], **described: Any) -> None:
        described["operation_id"] = described.get("operation_id") or endpoint.__name__
        super().__init__(path, endpoint, **described)
        (method,) = self.methods or {"GET"}
        self.rule = RULES.get(f"{method} {path}", UNLISTED)
        self.is_act = f"{method} {path}" in ACTS

    async def authorize(self, scope: Scope) -> None:
        """Refuse a caller who has not the right; a request that its connection began has been asked for it.

        Raises:
            UnauthenticatedError: nothing says who calls.
            ForbiddenError: the caller has not the right.
            QuotaExceededError: he, or a tenant that he names, has had his share.
            LedgerError, ProblemError: what the connection met.
        """
        begun: Begun | None = scope.get(BEGUN)
        scope[ASKED_S] = time.perf_counter() if begun is None else begun.at_s
        if begun is not None:
            scope[CALLER] = begun.caller
            if begun.error is not None:
                raise begun.error
        elif self.rule.needs is not Needs.NOTHING:
            parts: Parts = scope["app"].state.parts
            caller = scope[CALLER] = await parts.callers.caller(scope)
            callers.check(caller, self.rule, scope)
            if parts.quotas.bounds_principals:
                charge_caller(parts.quotas, caller, scope)
            # A route without a right has no tenant either: who names one is refused, and takes nothing from it.
            if parts.quotas.bounds_tenants and self.rule.right is not None:
                charge_named(parts.quotas, scope)


def caller_of(request: Request) -> Principal:
    """Who calls; of a route that needs to know."""
    caller: Principal = request.scope[CALLER]
    return caller


CallerDep = Annotated[Principal, Depends(caller_of)]


async def caller_if_known(request: Request) -> Principal | None:
    """Who calls, where nobody need say so; None where nothing says it, or cannot be asked now."""
    try:
        return await parts_of(request).callers.caller(request.scope)
    except (UnauthenticatedError, NotReadyError):
        return None


class StrictRoute(RightedRoute):
    """A route that knows its query parameters, takes each at most once, and describes the ``JsonBody`` it asks for."""

    def __init__(self, path: str, endpoint: Callable[..., Any], **described: Any) -> None:
        super().__init__(path, endpoint, **described)
        for part in self.dependant.dependencies:
            if isinstance(part.call, JsonBody):
                self.openapi_extra = {"requestBody": part.call.description}

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """The framework's handler behind a look at the query."""
        handle = super().get_route_handler()
        known = dict(_query_names(self.dependant))

        async def handle_strictly(request: Request) -> Response:
            await self.authorize(request.scope)
            if request.scope["query_string"]:
                _check_query(request, known)
            return await handle(request)

        return handle_strictly


class OpenRoute(RightedRoute):
    """A route that passes over what it does not know of its query: its addresses are made by others."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """The framework's handler behind the right that the route needs."""
        handle = super().get_route_handler()

        async def handle_allowed(request: Request) -> Response:
            await self.authorize(request.scope)
            return await handle(request)

        return handle_allowed


class LeanRoute(RightedRoute):
    """A route whose endpoint takes the request, and path parameters that it checks by itself, and no query.

    Raises:
        TypeError: it has a dependency, or another parameter, which would never be looked at.
    """

    def __init__(self, path: str, endpoint: Callable[..., Any], **described: Any) -> None:
        super().__init__(path, endpoint, **described)
        wanted = self.dependant
        given_nothing = (wanted.dependencies, wanted.query_params, wanted.header_params, wanted.cookie_params)
        if any(given_nothing) or self.body_field is not None:
            raise TypeError(f"{path}: a LeanRoute gives its endpoint the request and parts of its path, nothing else")

        async def call_endpoint(scope: Scope, receive: Receive, send: Send) -> None:
            await self.authorize(scope)
            request = Request(scope, receive, send)
            if scope["query_string"]:
                _check_query(request, {})
            response = await endpoint(request, **scope["path_params"])
            await response(scope, receive, send)

        self.app = call_endpoint


def _query_names(dependant: Dependant) -> Iterator[tuple[str, bool]]:
    """Query parameters of an endpoint, and of what it depends on; whether each may come several times."""
    for field in dependant.query_params:
        yield field.alias, get_origin(field.field_info.annotation) is list
    for part in dependant.dependencies:
        yield from _query_names(part)


def _check_query(request: Request, known: Mapping[str, bool]) -> None:
    seen: set[str] = set()
    for name, _ in request.query_params.multi_items():
        if name not in known:
            near = nearest(name[:100], known)
            meant = "" if near is None else f"; the nearest is {near}"
            raise InvalidInputError(f"{name[:100]}: there is no such query parameter{meant}", (name,))
        if name in seen and not known[name]:
            raise InvalidInputError(f"{name}: given more than once", (name,))
        seen.add(name)
