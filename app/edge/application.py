"""The web application: routers, middleware, errors as problems, the OpenAPI description."""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import dataclass
from inspect import cleandoc
from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.edge.accepted import ACCEPTED, Accepted, AccessControl, Services, kinds_named_by, span_of
from app.edge.answers import IS_HEAD, path_outside
from app.edge.forms.body import SCHEMA_REF
from app.edge.forms.requests import CAPACITY, EVENT_LINE, EVENT_REQUEST, PROPOSAL, STATS_REPORT
from app.edge.forms.validation import invalid_parameter
from app.edge.problems import problem_response, respond
from app.edge.routes import (
    access,
    bundles,
    chain,
    commitments,
    events,
    exchange,
    jobs,
    keys,
    lineage,
    log,
    otlp,
    pages,
    privacy,
    reports,
    retention,
    scitt,
    service,
    sign_in,
    stats,
    watch,
)
from app.edge.routing import RightedRoute
from app.runtime.answers import SHAPES
from app.runtime.metrics import UNMATCHED_ROUTE, Metrics
from app.runtime.settings.config import Settings
from ledger.errors import NotReadyError, ProblemError, QuotaExceededError, WalFullError
from ledger.facts.problems import (
    INTERNAL_ERROR,
    INVALID_REQUEST,
    METHOD_NOT_ALLOWED,
    NOT_FOUND,
    NOT_READY,
    PAYLOAD_TOO_LARGE,
    PROBLEMS,
    UNSUPPORTED_MEDIA_TYPE,
)

ROUTERS = (
    jobs.submissions,
    jobs.router,
    events.router,
    lineage.router,
    otlp.router,
    commitments.proposals,
    commitments.router,
    stats.router,
    chain.router,
    chain.snapshots,
    watch.router,
    reports.router,
    bundles.router,
    bundles.receipts_router,
    privacy.router,
    retention.router,
    privacy.search,
    keys.router,
    access.router,
    watch.webhooks_router,
    exchange.router,
    retention.archive,
    exchange.exclusions,
    keys.callers_router,
    scitt.router,
    log.router,
    service.router,
    sign_in.router,
    sign_in.callbacks,
    pages.router,
)
"""The most used routers come first: a path is matched against one route after the other."""


def create_app(services: Services) -> FastAPI:
    """The application over ``services``; the caller serves it.

    Raises:
        LookupError: a route names a missing service.
    """
    app = FastAPI(title="Tallystick", docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    app.state.services = services
    routes = [route for router in ROUTERS for route in router.routes if isinstance(route, APIRoute)]
    app.router.routes.extend(routes)
    for route in routes:
        if missing := set(kinds_named_by(route.dependant)) - services.keys():
            raise LookupError(f"{route.path} names services that are not wired: {sorted(map(str, missing))}")
    app.add_middleware(Observed, access=services[AccessControl], metrics=services[Metrics])

    async def respond_to_invalid_parameters(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return _responded(invalid_parameter(error), request.scope)

    app.add_exception_handler(RequestValidationError, respond_to_invalid_parameters)

    async def respond_to_http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        detail, headers = error.detail, error.headers
        if error.status_code == 404:
            detail = f"{request.url.path} is no path of this API; /docs describes those there are"
        elif error.status_code == 405:
            allowed = ", ".join(_methods_at(request.url.path, routes))
            detail, headers = f"{request.method} is not allowed here, {allowed} is", {"Allow": allowed}
        kind = _BY_STATUS.get(error.status_code, INVALID_REQUEST if error.status_code < 500 else INTERNAL_ERROR)
        return problem_response(kind, detail, headers=headers)

    app.add_exception_handler(HTTPException, respond_to_http)
    app.openapi = lambda: _describe(app)  # type: ignore[method-assign]
    app.add_route("/openapi.json", _answer_description)
    return app


async def _answer_description(request: Request) -> Response:
    """The OpenAPI document, with the address at which the client of this request reaches the service."""
    root_path = request.app.state.services[Settings].http.root_path
    servers = [{"url": path_outside(request.scope, root_path, "") or "/"}]
    return JSONResponse(request.app.openapi() | {"servers": servers})


def _responded(error: Exception, scope: Scope) -> Response:
    """The answer to an error, in the form that the route's clients read."""
    response, route = respond(error), scope.get("route")
    return route.problem(response, scope) if isinstance(route, RightedRoute) else response


def _methods_at(path: str, routes: list[APIRoute]) -> list[str]:
    """Every method of the path: the framework only knows the methods of its first route."""
    found = {method for route in routes if route.path_regex.match(path) for method in route.methods or ()}
    return sorted(found | {"HEAD"} if "GET" in found else found) or ["GET"]


def _describe(app: FastAPI) -> dict[str, Any]:
    """The OpenAPI document, with the models that endpoints read by themselves."""
    if app.openapi_schema is None:
        document = get_openapi(title=app.title, version="1", routes=app.routes, description=_DESCRIPTION)
        models = document.setdefault("components", {}).setdefault("schemas", {})
        models |= _shapes_of_answers()
        for name, adapter in _READ_BY_ENDPOINTS.items():
            schema = adapter.json_schema(ref_template=SCHEMA_REF)
            models.update(schema.pop("$defs", {}))
            models[name] = schema
        problems = "\n".join(f"- `{kind.name}` ({kind.status}): {kind.title}" for kind in PROBLEMS)
        models["Problem"]["description"] = f"{models['Problem'].get('description', '')}\n\n{problems}"
        for operation in (each for path in document["paths"].values() for each in path.values()):
            for answer in operation["responses"].values():
                _say_what_it_is(answer, models)
            body = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
            body.pop("$defs", None)
        for route in app.routes:
            if isinstance(route, RightedRoute) and route.include_in_schema:
                (method,) = route.methods or {"GET"}
                operation = document["paths"][route.path_format][method.lower()]
                right, needs = route.rule
                needed = needs.value if right is None else f"the right `{right}` for {needs.value}"
                operation["description"] = f"{operation['description']}\n\nNeeds {needed}."
        if app.state.services[Settings].auth.mode != "none":
            document["components"]["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
            document["security"] = [{"token": []}]
        app.openapi_schema = document
    return app.openapi_schema


def _shapes_of_answers() -> dict[str, Any]:
    """Every shape of an answer, by name. An answer has exactly its members; a problem may have more."""
    _, described = msgspec.json.schema_components(SHAPES, ref_template=SCHEMA_REF.format(model="{name}"))
    for name, shape in described.items():
        shape["additionalProperties"] = name == "Problem"
        shape["description"] = cleandoc(shape["description"])
    return described


def _say_what_it_is(answer: dict[str, Any], models: dict[str, Any]) -> None:
    """Describe an answer without a description by the model of its body."""
    if answer["description"] != _NO_DESCRIPTION:
        return
    for content in answer.get("content", {}).values():
        name = content["schema"].get("$ref", "").rpartition("/")[2]
        answer["description"] = models.get(name, {}).get("description", _NO_DESCRIPTION)


_BY_STATUS = {
    kind.status: kind for kind in (NOT_FOUND, METHOD_NOT_ALLOWED, PAYLOAD_TOO_LARGE, UNSUPPORTED_MEDIA_TYPE, NOT_READY)
}
"""Problems that the framework reports by their status."""
_NO_DESCRIPTION = "Successful Response"
"""The framework's text for a route without a description."""
_READ_BY_ENDPOINTS = {
    "EventRequest": EVENT_REQUEST,
    "EventLine": EVENT_LINE,
    "StatsReport": STATS_REPORT,
    "ProposalRequest": PROPOSAL,
    "CapacityRequest": CAPACITY,
}
_DESCRIPTION = """A tamper-evident job ledger. Errors are problems (RFC 9457); every list takes `limit` and `cursor`.
Writes answer with a session token in `Tally-Session`; show it to read your own writes."""


CLIENT_GONE_STATUS = 499
REFUSAL_PAUSE_S = (0.25, 0.5)
"""Delay of a refusal for a spent quota or a full backlog: refusing as fast as a caller retries would slow other
callers. It is random between these, so that callers refused together do not retry together."""


@dataclass(eq=False)
class Observed:
    """ASGI middleware. The route label is the template of the route, so it has few values.

    The application sees HEAD as GET; the connection drops the body.
    """

    app: ASGIApp
    access: AccessControl
    metrics: Metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on; answer it with a problem if no handler did."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        accepted: Accepted | None = scope.get(ACCEPTED)
        began_s = time.perf_counter() if accepted is None else accepted.began_s
        asked = scope["method"]
        if asked == "HEAD":
            scope = {**scope, "method": "GET", IS_HEAD: True}
        status = 0

        async def send_observed(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            if not scope["path"].isprintable():
                raise ProblemError(INVALID_REQUEST, "the path holds a control character; no path of this API does")
            await self.app(scope, receive, send_observed)
        except ClientDisconnect:
            status = status or CLIENT_GONE_STATUS
        except asyncio.CancelledError:
            # Requests are cancelled only by a stop whose time for them is up.
            if status:
                raise
            error = NotReadyError("the service stops and had no time for this request; send it again")
            response = _responded(error, scope)
            await response(scope, receive, send_observed)
        except Exception as error:
            self.access.record_refusal(scope, error)
            self.access.report_break(scope, error)
            response = _responded(error, scope)
            if status:
                raise
            if isinstance(error, (QuotaExceededError, WalFullError)):
                error.__traceback__ = None
                self.access.release_memory(scope)
                await asyncio.sleep(random.uniform(*REFUSAL_PAUSE_S))  # noqa: S311
            await response(scope, receive, send_observed)
        finally:
            self.access.release_memory(scope)
            route, accepted = scope.get("route"), scope.get(ACCEPTED)
            self.metrics.observe_request(
                asked,
                UNMATCHED_ROUTE if route is None else route.path,
                status or CLIENT_GONE_STATUS,
                time.perf_counter() - began_s,
                span_of(scope),
                None if accepted is None else accepted.lsns,
            )
