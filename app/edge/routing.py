"""Routes: each authenticates and authorizes the caller before it reads a request, and refuses unknown query parameters.

A query parameter that the operation does not know, or that is repeated and no list, is refused: a typing error must not
pass for a default, and two readers must not read different values from one request.

The framework spends more time on a request (routers inside routers, parameters, exit stacks) than it takes to
check and answer one event. So routes are direct children of the application, and the routes that take one event are
``LeanRoute``: described like the others, called without the machinery.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterator, Mapping
from typing import Any, get_origin

from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from app.edge.accepted import ACCEPTED, FAULT, AccessControl
from app.edge.answers import JSON_MEDIA_TYPE
from app.edge.forms.body import SCHEMA_REF, JsonBody
from app.edge.forms.fields import IDEMPOTENCY_KEY_PATTERN, SESSION_PATTERN
from app.edge.library_internals import Dependant
from app.edge.problems import PROBLEM_MEDIA_TYPE, concise
from app.runtime.principals import ACTS, RULES, UNLISTED, Needs
from app.runtime.settings.words import nearest
from ledger.errors import InvalidInputError

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


def answered(shape: Any, status: int | str = 200, **more: Any) -> dict[int | str, dict[str, Any]]:
    """Describes the answer that an operation gives: a ``shape``."""
    return {
        status: {"content": {JSON_MEDIA_TYPE: {"schema": {"$ref": SCHEMA_REF.format(model=shape.__name__)}}}, **more}
    }


SIGNATURE_PARAMETER = {
    "name": "Tally-Signature",
    "in": "header",
    "required": False,
    "description": "One signature for all lines, as JSON: docs/formats/signed-events.md.",
    "schema": {"type": "string", "maxLength": 8192},
}
WRITE_PARAMETERS = [IDEMPOTENCY_KEY_PARAMETER, SESSION_PARAMETER]
WRITE_HEADERS: dict[str, Any] = {
    "Tally-Session": {"schema": {"type": "string"}, "description": "Show it to a read that is to see this write."},
    "Idempotent-Replay": {
        "schema": {"type": "string", "enum": ["true"]},
        "required": False,
        "description": "This is the first answer again: the Idempotency-Key and the body were seen before.",
    },
}


class RightedRoute(APIRoute):
    """A route that authenticates and authorizes the caller before it reads a request. Has one method."""

    def __init__(self, path: str, endpoint: Callable[..., Any], **described: Any) -> None:
        described["operation_id"] = described.get("operation_id") or endpoint.__name__
        super().__init__(path, endpoint, **described)
        (method,) = self.methods or {"GET"}
        self.rule = RULES.get(f"{method} {path}", UNLISTED)
        self.is_act = f"{method} {path}" in ACTS

    def problem(self, problem: Response, scope: Scope) -> Response:
        """The answer to an error, in the form that the clients of the route read."""
        return problem

    async def authorize(self, scope: Scope) -> None:
        """Accept the request, unless the fast path has; raise the error that it met, if any.

        Raises:
            UnauthenticatedError, ForbiddenError, QuotaExceededError: as ``AccessControl.accept``.
            LedgerError, ProblemError: what the fast path met.
        """
        fault: Exception | None = scope.get(FAULT)
        if fault is not None:
            raise fault
        if ACCEPTED not in scope and self.rule.needs is not Needs.NOTHING:
            access: AccessControl = scope["app"].state.services[AccessControl]
            await access.accept(scope, self.rule)


class StrictRoute(RightedRoute):
    """A route that knows its query parameters, takes each at most once, and describes its ``JsonBody``."""

    takes_any_query = False

    def __init__(self, path: str, endpoint: Callable[..., Any], **described: Any) -> None:
        super().__init__(path, endpoint, **described)
        for part in self.dependant.dependencies:
            if isinstance(part.call, JsonBody):
                self.openapi_extra = {"requestBody": part.call.description}

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """The framework's handler, after a check of the query."""
        handle = super().get_route_handler()
        known = dict(_query_names(self.dependant))

        async def handle_strictly(request: Request) -> Response:
            await self.authorize(request.scope)
            if request.scope["query_string"] and not self.takes_any_query:
                _check_query(request, known)
            return await handle(request)

        return handle_strictly


class OpenRoute(StrictRoute):
    """A route that ignores unknown query parameters: other parties make its addresses."""

    takes_any_query = True


class ConciseRoute(StrictRoute):
    """A route whose problems are Concise Problem Details (RFC 9290): its clients read CBOR."""

    def problem(self, problem: Response, scope: Scope) -> Response:
        """As Concise Problem Details."""
        return concise(problem)


class LeanRoute(RightedRoute):
    """A route whose endpoint takes the request, path parameters that it checks by itself, and services; no query.

    Raises:
        TypeError: it has another parameter or dependency, which would never be passed.
    """

    def __init__(self, path: str, endpoint: Callable[..., Any], **described: Any) -> None:
        super().__init__(path, endpoint, **described)
        wanted = self.dependant
        unfit = [part for part in wanted.dependencies if not _takes_request_alone(part)]
        if unfit or wanted.query_params or wanted.header_params or wanted.cookie_params or self.body_field:
            raise TypeError(f"{path}: a LeanRoute gives its endpoint the request, parts of its path and services alone")
        dependencies = [(str(part.name), part.call) for part in wanted.dependencies if part.call is not None]

        async def call_endpoint(scope: Scope, receive: Receive, send: Send) -> None:
            await self.authorize(scope)
            request = Request(scope, receive, send)
            if scope["query_string"]:
                _check_query(request, {})
            given = {name: await call(request) for name, call in dependencies}
            response = await endpoint(request, **given, **scope["path_params"])
            await response(scope, receive, send)

        self.app = call_endpoint


def _takes_request_alone(part: Dependant) -> bool:
    """Whether a dependency is a parameter of its endpoint, as services are, and takes only the request."""
    asks_for = (part.dependencies, part.path_params, part.query_params, part.header_params, part.body_params)
    return part.name is not None and part.request_param_name is not None and not any(asks_for)


def _query_names(dependant: Dependant) -> Iterator[tuple[str, bool]]:
    """Query parameters of an endpoint and its dependencies, and whether each may be repeated."""
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
